"""The flat token batch: consecutive rows of several sequences, without padding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

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
    in the KV cache already, and so must positions behind the last row that rows see.
    """

    start: int  # first row in the batch
    stop: int  # one past its last row
    first_position: int  # absolute position of row `start`
    block_length: int
    kv: KVRange
    sees_to: int = 0  # end of the positions that a whole block sees, if behind its last row
    is_answer: bool = False  # causal, and each row's token follows those before it

    @property
    def goes_by_rows(self) -> bool:
        """True if each row attends by itself, with the bits of a pass of its own."""
        num_rows = self.stop - self.start
        return self.block_length == 1 and (num_rows == 1 or self.is_answer)

    @property
    def end_position(self) -> int:
        return self.first_position + self.stop - self.start


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass: its rows, their sequences and its purpose."""

    token_ids: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64, absolute
    segments: tuple[Segment, ...]
    step: Step
    logit_rows: int = 0  # most rows whose statistics are requested afterwards, of each kind
    asked: tuple[LogitNeeds, ...] = ()  # the kinds
    chunk_ends: tuple[int, ...] = ()  # of a prompt in several chunks: one past the last row of each
    on_layer: Callable[[float], None] = lambda _: None  # after each of its layers: the share done

    @property
    def counts(self) -> Counts:
        """Counts that determine the sizes of the pass's transients."""
        return Counts(
            len(self.token_ids),
            max(min(one.stop - one.start, one.block_length) for one in self.segments),
            max(max(one.end_position, one.sees_to) for one in self.segments),
            self.logit_rows,
            self.asked,
        )

    def placed(self, kv_cache: KVCache) -> Batch:
        """Return the batch with keys and values at their places in this pass.

        Commits their memory; raises PageError if there is none.
        """
        ranges = [
            kv_cache.of_pass(one.kv, slice(one.start, one.stop), one.end_position)
            for one in self.segments
        ]
        marked = self._marked()
        pairs = list(zip(marked, ranges, strict=True))
        if all(one.kv is kv for one, kv in pairs) and marked is self.segments:
            return self
        return replace(self, segments=tuple(replace(one, kv=kv) for one, kv in pairs))

    def chunks(self) -> list[tuple[slice, Batch]]:
        """Return the rows of each chunk, with the batch that it would be alone."""
        [whole], start, found = self.segments, 0, []
        for stop in self.chunk_ends:
            segment = replace(
                whole, start=0, stop=stop - start, first_position=whole.first_position + start
            )
            own = Batch(
                self.token_ids[start:stop], self.positions[start:stop], (segment,), self.step
            )
            found.append((slice(start, stop), own))
            start = stop
        return found

    def _marked(self) -> tuple[Segment, ...]:
        """Return the segments, with `is_answer` where several rows are all of an answer."""
        several = [
            one
            for one in self.segments
            if one.block_length == 1 and 1 < one.stop - one.start <= MAX_ANSWER_ROWS
        ]
        if not several:
            return self.segments
        kinds = self.step.rows_of(len(self.token_ids)).kind
        answers = {
            one.start: replace(one, is_answer=True)
            for one in several
            if (kinds[one.start : one.stop] == RowKind.DECODE).all()
        }
        return tuple(answers.get(one.start, one) for one in self.segments)
