"""Tiles of rows, which bound the memory of passes of any length.

A causal or block-causal pass is one tile. A bidirectional one is as long as its sequence, and its
operators' memory besides inputs and outputs is bounded by a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from lowtide.memory.workspace import TILE_ROWS, Buffers, tiles


def in_tiles(run: Callable[..., object], *rows: Tensor) -> None:
    """Call `run(*rows)`, tile by tile if there are many rows.

    rows: tensors with equal numbers of rows. A row has the same bits in any tile (see `tiles`).
    """
    if rows[0].shape[0] <= TILE_ROWS:
        run(*rows)
    else:
        _one_by_one(TILE_ROWS, run, rows)


def in_chunks(operator: str, workspace: Buffers, run: Callable[..., object], *rows: Tensor) -> None:
    """Call `run(*rows)` for as many tiles at a time as the plan allows the operator.

    `run` gives each row the bits of its tile: its products use their own tiles, which chunks never
    cut.
    """
    num_rows = rows[0].shape[0]
    if num_rows <= TILE_ROWS:
        run(*rows)
    else:
        _one_by_one(workspace.together(operator, num_rows), run, rows)


def tiles_of(rows: Tensor, tile_rows: int = TILE_ROWS) -> list[slice]:
    """List the tiles of a tensor's rows; a counted pass gets the longest one, for all."""
    parts = list(tiles(rows.shape[0], tile_rows))
    return [max(parts, key=num_rows_of)] if rows.is_meta else parts


def num_rows_of(rows: slice) -> int:
    num_rows: int = rows.stop - rows.start
    return num_rows


def _one_by_one(tile_rows: int, run: Callable[..., object], rows: Sequence[Tensor]) -> None:
    for part in tiles_of(rows[0], tile_rows):
        run(*(tensor[part] for tensor in rows))
