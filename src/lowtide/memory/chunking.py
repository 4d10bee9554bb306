"""Division of operators into chunks of row tiles, only as far as memory requires (Mosaic).

Tiles have fixed sizes, because they decide bits (`layers/rows.py`). A chunk is a number of tiles
whose intermediate results exist together. Each operator starts with one chunk; while a pass exceeds
its memory, the operator at the peak gets one chunk more. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

TILE_ROWS = 512
"""Rows per tile of a long pass. Independent of the budget, because it decides bits."""

MAX_REMAINDER = 15
"""Most rows that join the last tile; more rows are a tile of their own."""

OPERATOR_TILES: Mapping[str, int] = {
    "mlp": TILE_ROWS,
    "experts": TILE_ROWS,
    "attention": 768,  # with fewer rows SDPA takes smaller pieces and up to half as long again
    "logits": 512,  # one pass over the vocabulary per tile
}
"""Rows per tile, by operator."""

EACH_TILE: Mapping[str, int] = {}
"""Chunk counts that make every tile a chunk."""

MAX_BUCKETS = 16
"""Most plans per request, regardless of its number of masks."""


class LogitNeeds(NamedTuple):
    """Outputs that a pass needs from its logits, besides the arg-max and its probability."""

    second: bool = False
    entropy: bool = False
    is_guided: bool = False


class Counts(NamedTuple):
    """The counts that determine the sizes of a pass's transients."""

    tokens: int  # rows of the pass
    block: int  # rows of the longest sequence
    keys: int  # most tokens that a row sees
    logit_rows: int = 0  # most rows with logits, of each kind
    asked: tuple[LogitNeeds, ...] = ()  # the kinds

    def rows_of(self, operator: str) -> int:
        return self.logit_rows if operator == "logits" else self.tokens

    def rows_at_once(self, operator: str) -> int:
        """Return the most rows that an operator can take at once.

        For attention these are the queries of one sequence: a chunk's sequences attend one by one.
        """
        return min(self.block, self.tokens) if operator == "attention" else self.rows_of(operator)


def tiles(num_rows: int, tile_rows: int) -> Iterator[slice]:
    """Yield the row tiles of an operator that is computed piecewise.

    `tile_rows` is a multiple of 16, and a remainder shorter than 16 rows joins its predecessor:
    matrix products then give each row the same bits in every tile. A tile may thus be as long as
    `tile_rows + 15`.
    """
    start = 0
    while start < num_rows:
        stop = start + tile_rows
        if num_rows - stop <= MAX_REMAINDER:
            stop = num_rows
        yield slice(start, stop)
        start = stop


def pieces(length: int, piece: int) -> list[slice]:
    """Divide `length` into pieces; the last one may be shorter."""
    return [slice(start, min(length, start + piece)) for start in range(0, length, piece)]


def num_tiles(num_rows: int, tile_rows: int) -> int:
    """Return the number of tiles."""
    return max(1, (num_rows + tile_rows - MAX_REMAINDER - 1) // tile_rows)


def longest_tile(num_rows: int, tile_rows: int) -> int:
    """Return the number of rows of the longest tile."""
    if num_rows <= tile_rows + MAX_REMAINDER:
        return num_rows
    remainder = num_rows % tile_rows
    return tile_rows + (remainder if remainder <= MAX_REMAINDER else 0)


def rows_together(num_rows: int, tile_rows: int, num_chunks: int) -> int:
    """Return the number of rows of a chunk, in whole tiles, for at most `num_chunks` chunks."""
    return -(-num_tiles(num_rows, tile_rows) // num_chunks) * tile_rows


def chunk_rows(counts: Counts, operator: str, chunks: Mapping[str, int]) -> int:
    """Return the number of rows of a chunk, in whole tiles, even if there are fewer rows."""
    num_rows, tile_rows = counts.rows_of(operator), OPERATOR_TILES[operator]
    num_chunks = chunks.get(operator) or num_tiles(num_rows, tile_rows)
    return rows_together(num_rows, tile_rows, num_chunks)


def longest_chunk(counts: Counts, operator: str, chunks: Mapping[str, int]) -> int:
    """Return the most rows that an operator takes at once in a pass of exactly these counts."""
    num_rows, together = counts.rows_at_once(operator), chunk_rows(counts, operator, chunks)
    # Experts' rows are sorted by expert; their buffers hold whole chunks without a remainder.
    return min(num_rows, together) if operator == "experts" else longest_tile(num_rows, together)


def window_rows(num_rows: int, together: int) -> int:
    """Return the most query rows of a long pass that exist together.

    These are a chunk with its remainder, and the partial tiles at its two ends.
    """
    return min(num_rows, together + MAX_REMAINDER + 2 * (TILE_ROWS - 1 + MAX_REMAINDER))


def at_most(num_rows: int, tile_rows: int) -> int:
    """Bound the longest tile of up to `num_rows` rows; fewer rows may have a longer tile."""
    return min(num_rows, tile_rows + MAX_REMAINDER)


def one_more(counts: Counts, operator: str, chunks: Mapping[str, int]) -> int | None:
    """Return the next number of chunks that shortens them; None if each is one tile."""
    most = num_tiles(counts.rows_of(operator), OPERATOR_TILES[operator])
    together = -(-most // chunks[operator])
    return None if together == 1 else -(-most // (together - 1))


def bucket(num_masked: int, max_masked: int) -> int:
    """Round up masked rows to one of `MAX_BUCKETS` counts up to `max_masked`."""
    step = max(1, math.ceil(max_masked / MAX_BUCKETS))
    return min(max_masked, math.ceil(num_masked / step) * step)
