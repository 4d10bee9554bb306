"""Passes of any length, worked through in tiles of rows.

A causal or block-causal pass is one tile. A bidirectional one is as long as its sequence, and what
its operators take beside their inputs and outputs is bounded by a tile all the same.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lowtide.memory.workspace import TILE_ROWS, tiles


def in_tiles(run: Callable[..., object], *rows: Tensor) -> None:
    """`run(*rows)`, or of many rows one tile after the other.

    rows: tensors of equally many rows. Each row has the same bits in whatever tile (see `tiles`).
    """
    num_rows = rows[0].shape[0]
    if num_rows <= TILE_ROWS:
        run(*rows)
        return
    for tile in tiles(num_rows, TILE_ROWS):
        run(*(tensor[tile] for tensor in rows))
