"""Passes of any length, worked through in tiles of rows.

A causal or block-causal pass is one tile. A bidirectional one is as long as its sequence, and what
its operators take beside their inputs and outputs is bounded by a tile all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from lowtide.memory.workspace import TILE_ROWS, Buffers, tiles


def in_tiles(run: Callable[..., object], *rows: Tensor) -> None:
    """`run(*rows)`, or of many rows one tile after the other.

    rows: tensors of equally many rows. Each row has the same bits in whatever tile (see `tiles`).
    """
    if rows[0].shape[0] <= TILE_ROWS:
        run(*rows)
    else:
        _one_by_one(TILE_ROWS, run, rows)


def in_chunks(operator: str, workspace: Buffers, run: Callable[..., object], *rows: Tensor) -> None:
    """`run(*rows)` of as many tiles at a time as the plan has the operator take together.

    `run` gives each row the bits of its tile: its products go by tiles of their own, none of which
    such a chunk cuts.
    """
    num_rows = rows[0].shape[0]
    if num_rows <= TILE_ROWS:
        run(*rows)
    else:
        _one_by_one(workspace.together(operator, num_rows), run, rows)


def tiles_of(rows: Tensor, tile_rows: int = TILE_ROWS) -> list[slice]:
    """The tiles of a tensor's rows; where nothing is computed, only counted, the longest alone,
    which stands for all.
    """
    parts = list(tiles(rows.shape[0], tile_rows))
    return [max(parts, key=num_rows_of)] if rows.is_meta else parts


def num_rows_of(rows: slice) -> int:
    num_rows: int = rows.stop - rows.start
    return num_rows


def _one_by_one(tile_rows: int, run: Callable[..., object], rows: Sequence[Tensor]) -> None:
    for part in tiles_of(rows[0], tile_rows):
        run(*(tensor[part] for tensor in rows))
