"""Keys and values that exist for one layer at a time: transients of the workspace."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lowtide.core import ALIGNMENT, align_up
from lowtide.errors import InternalError
from lowtide.memory.kv_cache import KVCache, KVRange, LayerTokens
from lowtide.memory.kv_pages import KVShape
from lowtide.memory.workspace import Buffers


class TransientKV(KVCache):
    """KV cache of a bidirectional model whose passes recompute everything.

    While a layer attends, its keys and values lie in the workspace, in the order of the rows; then
    those of the next layer replace them. Sequences only hold ranges of token numbers, which bound
    the rows of a pass.
    """

    def __init__(self, shape: KVShape, dtype: torch.dtype) -> None:
        """shape: for the most tokens of a pass, with one layer in each group."""
        # On the meta device: ranges move as in any cache, but without data.
        storage = [torch.empty(group, dtype=dtype, device="meta") for group in shape.groups]
        super().__init__(storage, places=shape.places)
        self._places = shape.places

    def arrays(self, layer: int) -> None:
        return None

    def of_pass(
        self, kv_range: KVRange, rows: slice, num_tokens: int, inner_ends: Sequence[int] = ()
    ) -> KVRange:
        if rows.stop - rows.start != num_tokens:
            raise InternalError(
                f"A pass has {rows.stop - rows.start} rows of a sequence of {num_tokens} tokens, "
                "of which nothing is kept."
            )
        return KVRange(rows.start, num_tokens)

    def open_layer(self, layer: int, num_rows: int, workspace: Buffers) -> None:
        place = self._places[layer]
        if place is None:
            return
        _, num_arrays, num_heads, _, width = self._storage[place.group].shape
        # Rows are padded to the alignment, which then does not depend on a sequence's position.
        row_width = align_up(width * self.dtype.itemsize, ALIGNMENT) // self.dtype.itemsize
        shape = (num_arrays, num_heads, num_rows, row_width)
        held: Tensor = workspace.take("all keys and values", shape, self.dtype)
        arrays = held[..., :width].unbind()
        self._tokens = LayerTokens({layer: (arrays[0], arrays[-1])})  # whose turn it is
