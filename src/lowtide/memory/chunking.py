"""How many tiles of rows an operator takes together: lazily divided, as in Mosaic.

Tiles have fixed sizes, because they decide bits (`layers/rows.py`). A chunk is some of them whose
intermediate results exist at the same time. Each operator begins with all of its rows as one
chunk; while a pass needs more than there is, the operator that makes its peak gets one chunk more.
Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

TILE_ROWS = 512
"""Rows of a tile in a pass of many. Fixed, never a matter of the budget: it decides bits."""

MAX_REMAINDER = 15
"""Rows that may join the last tile; more are a tile by themselves."""

OPERATOR_TILES: Mapping[str, int] = {
    "mlp": TILE_ROWS,
    "experts": TILE_ROWS,
    "attention": 768,  # of fewer rows SDPA takes smaller pieces, up to half as long again
    "logits": 512,  # for which the vocabulary is gone through once
}
"""Rows of a tile, by operator."""

EACH_TILE: Mapping[str, int] = {}
"""Chunk counts: every tile by itself, whatever their number."""

MAX_BUCKETS = 16
"""Plans of a request at most, however many masks it begins with."""


class LogitNeeds(NamedTuple):
    """What a pass asks of its logits, beside the arg-max and its probability."""

    second: bool = False
    entropy: bool = False
    is_guided: bool = False


class Counts(NamedTuple):
    """What the sizes of a pass's transients depend on."""

    tokens: int  # rows of the pass
    block: int  # rows that see each other at most: those of its longest sequence
    keys: int  # tokens that a row sees at most
    logit_rows: int = 0  # rows whose logits are looked at, of each kind at most
    asked: tuple[LogitNeeds, ...] = ()  # the kinds

    def rows_of(self, operator: str) -> int:
        return self.logit_rows if operator == "logits" else self.tokens

    def rows_at_once(self, operator: str) -> int:
        """Rows that an operator takes in one go at most, however few its chunks: of queries those
        of one sequence, since a chunk's sequences attend one after the other.
        """
        return min(self.block, self.tokens) if operator == "attention" else self.rows_of(operator)


def tiles(num_rows: int, tile_rows: int) -> Iterator[slice]:
    """Row tiles of an operator that is computed piecewise.

    `tile_rows` is a multiple of 16, and a remainder shorter than 16 rows joins its predecessor:
    matrix products then give each row the same bits whatever the tile (DESIGN: what must stay
    true), so a tile may be as long as `tile_rows + 15`.
    """
    start = 0
    while start < num_rows:
        stop = start + tile_rows
        if num_rows - stop <= MAX_REMAINDER:
            stop = num_rows
        yield slice(start, stop)
        start = stop


def pieces(length: int, piece: int) -> list[slice]:
    """`length` in pieces, the last of which may be any shorter."""
    return [slice(start, min(length, start + piece)) for start in range(0, length, piece)]


def num_tiles(num_rows: int, tile_rows: int) -> int:
    """How many tiles there are."""
    return max(1, (num_rows + tile_rows - MAX_REMAINDER - 1) // tile_rows)


def longest_tile(num_rows: int, tile_rows: int) -> int:
    """Rows of the longest tile."""
    if num_rows <= tile_rows + MAX_REMAINDER:
        return num_rows
    remainder = num_rows % tile_rows
    return tile_rows + (remainder if remainder <= MAX_REMAINDER else 0)


def rows_together(num_rows: int, tile_rows: int, num_chunks: int) -> int:
    """Rows of a chunk, whole tiles, so that there are at most so many chunks."""
    return -(-num_tiles(num_rows, tile_rows) // num_chunks) * tile_rows


def chunk_rows(counts: Counts, operator: str, chunks: Mapping[str, int]) -> int:
    """Rows of a chunk, whole tiles, however many rows there are."""
    num_rows, tile_rows = counts.rows_of(operator), OPERATOR_TILES[operator]
    num_chunks = chunks.get(operator) or num_tiles(num_rows, tile_rows)
    return rows_together(num_rows, tile_rows, num_chunks)


def longest_chunk(counts: Counts, operator: str, chunks: Mapping[str, int]) -> int:
    """Rows that an operator takes together at most in a pass of just these counts."""
    num_rows, together = counts.rows_at_once(operator), chunk_rows(counts, operator, chunks)
    # Experts' rows are sorted by expert: theirs is room for so many, which no remainder joins.
    return min(num_rows, together) if operator == "experts" else longest_tile(num_rows, together)


def window_rows(num_rows: int, together: int) -> int:
    """Rows of a long pass whose queries exist together: of a chunk of so many, with a remainder,
    and of the tiles of products in which it begins and ends within.
    """
    return min(num_rows, together + MAX_REMAINDER + 2 * (TILE_ROWS - 1 + MAX_REMAINDER))


def at_most(num_rows: int, tile_rows: int) -> int:
    """Rows of the longest tile of up to so many rows: fewer may have a longer one."""
    return min(num_rows, tile_rows + MAX_REMAINDER)


def one_more(counts: Counts, operator: str, chunks: Mapping[str, int]) -> int | None:
    """The next count of chunks that makes them shorter; None where each is one tile."""
    most = num_tiles(counts.rows_of(operator), OPERATOR_TILES[operator])
    together = -(-most // chunks[operator])
    return None if together == 1 else -(-most // (together - 1))


def bucket(num_masked: int, max_masked: int) -> int:
    """Masked rows to plan for: one of `MAX_BUCKETS` counts up to `max_masked`, none too small."""
    step = max(1, math.ceil(max_masked / MAX_BUCKETS))
    return min(max_masked, math.ceil(num_masked / step) * step)
