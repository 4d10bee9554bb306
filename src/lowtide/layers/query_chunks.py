"""Division of a long pass's queries into chunks that exist one after the other.

Products have other tiles (`layers/rows.py`) than SDPA's queries: where a chunk ends within a
product tile, its queries and attended rows wait for the next chunk. Pure.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lowtide.errors import InternalError
from lowtide.layers.attention import QUERY_ROWS, Run, blocks
from lowtide.layers.batch import Segment
from lowtide.layers.rows import num_rows_of
from lowtide.memory.chunking import TILE_ROWS, longest_tile, tiles


class Chunk(NamedTuple):
    """Runs of queries that exist together, and the product tiles that contain them."""

    runs: list[Run]
    start: int  # the first row of those tiles
    projected: list[slice]  # tiles whose queries are first needed here
    finished: list[slice]  # tiles whose last rows are attended here
    waiting: slice  # rows of the last tile, if it is unfinished


def chunks_of(segments: Sequence[Segment], num_rows: int, max_rows: int) -> Iterator[Chunk]:
    """Divide all query tiles of a batch of `num_rows` rows into chunks of up to `max_rows`.

    Raises InternalError for causal segments, whose passes are short.
    """
    products = list(tiles(num_rows, TILE_ROWS))
    stops = [tile.stop for tile in products]
    num_projected = num_finished = 0
    for runs in _runs(segments, max_rows):
        stop, first = runs[-1].rows.stop, num_finished
        projected = products[num_projected : bisect_left(stops, stop) + 1]
        finished = products[first : bisect_right(stops, stop)]
        num_projected, num_finished = num_projected + len(projected), first + len(finished)
        waiting = slice(stops[num_finished - 1] if num_finished else 0, stops[num_projected - 1])
        yield Chunk(runs, products[first].start, projected, finished, waiting)


def longest_of(chunks: Sequence[Chunk], num_rows: int) -> Chunk:
    """Return a chunk that stands for all in a counted pass: the longest run and tile."""
    runs = max(
        (chunk.runs for chunk in chunks),
        key=lambda runs: sum(num_rows_of(run.rows) for run in runs),
    )
    start = runs[0].rows.start
    tile = slice(start, start + longest_tile(num_rows, TILE_ROWS))
    return Chunk(runs, start, [tile], [tile], slice(tile.stop, tile.stop))


def _runs(segments: Sequence[Segment], max_rows: int) -> Iterator[list[Run]]:
    """Group runs of up to `max_rows` rows, or of one tile."""
    runs: list[Run] = []
    for segment in segments:
        if segment.block_length == 1:
            raise InternalError(f"A pass of more than {TILE_ROWS} rows is causal.")
        for block in blocks(segment):
            for tile in tiles(num_rows_of(block.rows), QUERY_ROWS):
                rows = slice(block.rows.start + tile.start, block.rows.start + tile.stop)
                if runs and rows.stop - runs[0].rows.start > max_rows:
                    yield runs
                    runs = []
                if runs and runs[-1].block == block.rows:
                    rows = slice(runs.pop().rows.start, rows.stop)
                runs.append(block._replace(rows=rows))
    if runs:
        yield runs
