"""Rows of logits from which tokens are chosen, or only their arg-max, in host memory.

For a large vocabulary the logits of a pass take more bytes than most layers' weights, and the host
is slow with them: 16 rows of 157,184 tokens take 3 ms to fetch and 11 ms to search. So a GPU's
logits stay there; only rows that the host draws from or changes are copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lowtide.core import BoolArray, IntArray
from lowtide.decode.sampling import ArgMax, find_arg_max
from lowtide.kernels.row_statistics import Guidance, RowStatistics, Wanted
from lowtide.layers.batch import Batch
from lowtide.memory.pinned_copies import to_device, wait_for
from lowtide.memory.workspace import tiles

LOGIT_ROWS = 32
"""Rows whose logits exist at once (and up to 15 more, see `tiles`)."""

ROW_MULTIPLE = 4
"""Logits are computed for multiples of this many rows, repeating the last, where a row's last bit
may otherwise depend on the number of rows and so on its neighbours."""


class Model(Protocol):
    """The model as decoding sees it."""

    def forward(self, batch: Batch) -> Tensor:
        """Return hidden states [rows, hidden], valid until the next `forward`.

        Writes the keys and values of all rows to their sequences' ranges.
        """
        ...

    def mixes_rows(self, hidden: Tensor) -> bool:
        """Return True if a row's logit bits may depend on the number of rows.

        Compares hidden [n, hidden] with the next multiple of `ROW_MULTIPLE` rows.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [n, vocab] of hidden states [n, hidden].

        They are valid until the next call, and the caller may overwrite them.
        """
        ...

    def row_statistics(
        self, hidden: Tensor, rows: Tensor, wanted: Wanted, guidance: Guidance | None = None
    ) -> RowStatistics:
        """Return statistics of hidden[rows]' logits, rows [n] int64; valid until the next call."""
        ...


def rows_that_predict(positions: IntArray, logits_shift: int) -> IntArray:
    """Return the positions whose hidden states give the logits of `positions`.

    With a shift of 1 it is the position before; the first has only itself. Source: Dream's
    published code, which shifts the logits of a whole sequence: [l_0, l_0, l_1, ...].
    """
    rows: IntArray = np.maximum(positions - logits_shift, 0)
    return rows


def tiled_logits(
    model: Model, hidden: Tensor, rows: IntArray, needs_logits: BoolArray
) -> Iterator[tuple[slice, Tensor | ArgMax]]:
    """Yield logits of `hidden[rows]` in parts: (a slice of `rows`, logits or arg-max).

    Logits are float32 [part, vocab] in host memory, valid until the next part; they may be
    overwritten. On a GPU, rows not marked in `needs_logits`, bool [rows], get only their arg-max.
    The host waits for the GPU once, and once more for each further tile with marked rows.
    """
    computed = _computed(model, hidden, rows)
    if hidden.device.type == "cuda":
        return _on_host(computed, hidden.device, needs_logits)
    return computed


def _computed(model: Model, hidden: Tensor, rows: IntArray) -> Iterator[tuple[slice, Tensor]]:
    """Yield the logits of `hidden[rows]` tile by tile, on the model's device."""
    num_more = -len(rows) % ROW_MULTIPLE if model.mixes_rows(hidden[: len(rows)]) else 0
    padded = np.pad(rows, (0, num_more), mode="edge") if num_more else rows
    [there] = to_device(hidden.device, torch.from_numpy(padded))
    for tile in tiles(len(padded), LOGIT_ROWS):
        logits = model.logits(hidden.index_select(0, there[tile]))
        stop = min(tile.stop, len(rows))
        yield slice(tile.start, stop), logits[: stop - tile.start]


def _on_host(
    computed: Iterator[tuple[slice, Tensor]], device: torch.device, needs_logits: BoolArray
) -> Iterator[tuple[slice, Tensor | ArgMax]]:
    """Copy the needed part of a GPU's logits, with as few waits as the buffer allows."""
    num_rows = len(needs_logits)
    best = torch.empty((num_rows, 3), dtype=torch.float64, device=device)
    host_best = torch.empty((num_rows, 3), dtype=torch.float64, pin_memory=True)
    host_tile: Tensor | None = None  # one for all tiles, whose parts are valid until the next
    parts: list[tuple[slice, Tensor | None]] = []
    for tile, logits in computed:
        is_needed = needs_logits[tile]
        if host_tile is None and is_needed.any():
            # Always of one size, so that torch keeps no more pinned memory than one.
            host_tile = torch.empty((LOGIT_ROWS + 15, logits.shape[1]), pin_memory=True)
        parts += _copied(logits, host_tile, tile.start, is_needed)
        find_arg_max(logits, best[tile])
        if is_needed.any() or tile.stop == num_rows:
            host_best.copy_(best, non_blocking=True)
            wait_for(device)
            for rows, host_logits in parts:
                yield rows, ArgMax(host_best[rows]) if host_logits is None else host_logits
            parts.clear()


def _copied(
    logits: Tensor, host_tile: Tensor | None, first: int, is_needed: BoolArray
) -> list[tuple[slice, Tensor | None]]:
    """Divide a tile's rows into runs, and copy the logits of needed runs to `host_tile`.

    Row 0 of the tile is row `first` of all.
    """
    num_rows = len(is_needed)
    if host_tile is None or not is_needed.any():
        return [(slice(first, first + num_rows), None)]
    edges = np.flatnonzero(np.diff(is_needed)) + 1
    parts: list[tuple[slice, Tensor | None]] = []
    for start, stop in pairwise([0, *edges.tolist(), num_rows]):
        run = slice(start, stop)
        copy = host_tile[run].copy_(logits[run], non_blocking=True) if is_needed[start] else None
        parts.append((slice(first + start, first + stop), copy))
    return parts
