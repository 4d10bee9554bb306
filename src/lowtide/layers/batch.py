"""The flat token batch: consecutive rows of several sequences, without padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import is_

from torch import Tensor

from lowtide.core import RowKind, Step
from lowtide.memory.chunking import Counts, LogitNeeds
from lowtide.memory.kv_cache import KVCache, KVRange

__all__ = ["Batch", "KVRange", "Segment"]

MAX_ANSWER_ROWS = 8
"""Most rows of an answer that attend one by one: more are cheaper together."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's rows of a batch: consecutive positions, written to its KV range.

    Position p belongs to block `p // block_length`; a row sees every position of its own and of
    earlier blocks. `block_length` 1 is causal attention. Positions before `first_position` must be
    in the KV cache already, or belong to a segment before it in the batch. Positions after the
    last row that rows see must be in the cache.
    """

    start: int  # first row in the batch
    stop: int  # one past its last row
    first_position: int  # absolute position of row `start`
    block_length: int
    kv: KVRange
    sees_to: int = 0  # end of the positions that a whole block sees, if after its last row
    is_answer: bool = False  # causal, and each row's token follows those before it
    cuts: tuple[int, ...] = ()  # positions in its midst where states are copied, ascending

    @property
    def goes_by_rows(self) -> bool:
        """True if each row attends by itself, with the bits of a pass of its own."""
        num_rows = self.stop - self.start
        return self.block_length == 1 and (num_rows == 1 or self.is_answer)

    @property
    def end_position(self) -> int:
        return self.first_position + self.stop - self.start

    def divided(self, inner_ends: Sequence[int]) -> list[Segment]:
        """Divide the segment at these positions; the last part ends where it does."""
        found, first = list[Segment](), self.first_position
        for end in (*inner_ends, self.end_position):
            start = self.start + first - self.first_position
            stop = start + end - first
            found.append(replace(self, start=start, stop=stop, first_position=first, cuts=()))
            first = end
        return found


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass: its rows, their sequences and its purpose."""

    token_ids: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64, absolute
    segments: tuple[Segment, ...]  # once placed: one for each part of a sequence
    step: Step
    logit_rows: int = 0  # most rows whose statistics are requested afterwards, of each kind
    asked: tuple[LogitNeeds, ...] = ()  # the kinds
    chunk_ends: tuple[int, ...] = ()  # of a prompt in several chunks: one past the last row of each
    on_layer: Callable[[float], None] = lambda _: None  # after each of its layers: the share done

    @property
    def counts(self) -> Counts:
        """Counts that determine the sizes of the pass's transients."""
        return Counts(
            self.token_ids.shape[0],
            max(min(one.stop - one.start, one.block_length) for one in self.segments),
            max(max(one.end_position, one.sees_to) for one in self.segments),
            self.logit_rows,
            self.asked,
        )

    def placed(self, kv_cache: KVCache) -> Batch:
        """Return the batch with keys and values at their places in this pass.

        A sequence whose states are copied in its midst, or in chunks, has a segment for each part.
        Commits their memory; raises PageError if there is none.
        """
        segments = list[Segment]()
        for one in self.segments:
            inner_ends = self._inner_ends(one)
            rows = slice(one.start, one.stop)
            kv = kv_cache.of_pass(one.kv, rows, one.end_position, inner_ends)
            own = one if one.kv is kv else replace(one, kv=kv)
            segments += own.divided(inner_ends) if inner_ends else (own,)
        self._mark_answers(segments)
        is_same = len(segments) == len(self.segments) and all(map(is_, segments, self.segments))
        return self if is_same else replace(self, segments=tuple(segments))

    def chunks(self) -> list[tuple[slice, Batch]]:
        """Return the rows of each chunk, with the batch that it would be alone."""
        start, found = 0, []
        for stop in self.chunk_ends:
            segments = tuple(
                replace(one, start=one.start - start, stop=one.stop - start)
                for one in self.segments
                if start <= one.start < stop
            )
            own = Batch(self.token_ids[start:stop], self.positions[start:stop], segments, self.step)
            found.append((slice(start, stop), own))
            start = stop
        return found

    def _inner_ends(self, segment: Segment) -> Sequence[int]:
        """Return the positions after all parts of a segment but the last."""
        if not self.chunk_ends:
            return segment.cuts
        of_chunks = (segment.first_position + end for end in self.chunk_ends[:-1])
        return sorted({*segment.cuts, *of_chunks})

    def _mark_answers(self, segments: list[Segment]) -> None:
        """Set `is_answer` where several rows are all of an answer."""
        several = [
            number
            for number, one in enumerate(segments)
            if one.block_length == 1 and 1 < one.stop - one.start <= MAX_ANSWER_ROWS
        ]
        if not several:
            return
        kinds = self.step.rows_of(len(self.token_ids)).kind
        for number in several:
            one = segments[number]
            if (kinds[one.start : one.stop] == RowKind.DECODE).all():
                segments[number] = replace(one, is_answer=True)
