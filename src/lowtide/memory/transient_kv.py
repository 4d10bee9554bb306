"""Keys and values that exist for one layer at a time: transients of the workspace."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.core import ALIGNMENT, align_up
from lowtide.errors import InternalError
from lowtide.memory.kv_cache import KVCache, KVRange
from lowtide.memory.kv_pages import StorageShape
from lowtide.memory.workspace import Buffers


class TransientKV(KVCache):
    """KV cache of a bidirectional model whose passes recompute everything.

    While a layer attends, its keys and values lie in the workspace, in the order of the rows; then
    those of the next layer replace them. Sequences only hold ranges of token numbers, which bound
    the rows of a pass.
    """

    def __init__(self, shape: StorageShape, dtype: torch.dtype) -> None:
        """shape: of one layer, for the most tokens of a pass."""
        # On the meta device: ranges move as in any cache, but without data.
        super().__init__(torch.empty(shape, dtype=dtype, device="meta"))

    def arrays(self, layer: int) -> None:
        return None

    def of_pass(self, kv_range: KVRange, rows: slice, num_tokens: int) -> KVRange:
        if rows.stop - rows.start != num_tokens:
            raise InternalError(
                f"A pass has {rows.stop - rows.start} rows of a sequence of {num_tokens} tokens, "
                "of which nothing is kept."
            )
        return KVRange(rows.start, num_tokens)

    def open_layer(self, num_rows: int, workspace: Buffers) -> None:
        _, num_arrays, num_heads, _, width = self._storage.shape
        # Rows are padded to the alignment, which then does not depend on a sequence's position.
        itemsize = self._storage.dtype.itemsize
        row_width = align_up(width * itemsize, ALIGNMENT) // itemsize
        shape = (num_arrays, num_heads, num_rows, row_width)
        held: Tensor = workspace.take("all keys and values", shape, self._storage.dtype)
        arrays = held[..., :width]
        self._arrays = [(arrays[0], arrays[-1])]

    def _of(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._arrays[0]  # of the layer whose turn it is
