"""The flat token batch: rows of several sequences, one after the other, no padding."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from lowtide.core import Step
from lowtide.memory.chunking import Counts, LogitNeeds
from lowtide.memory.kv_cache import KVCache, KVRange

__all__ = ["Batch", "KVRange", "Segment"]


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's rows of a batch: consecutive positions, written to its KV range.

    Position p belongs to block `p // block_length`; a row sees every position of its own and of
    earlier blocks. `block_length` 1 is causal attention. What lies before `first_position` must
    be in the KV cache already, and so must what lies behind the last row, where that is seen too.
    """

    start: int  # first row in the batch
    stop: int  # one past its last row
    first_position: int  # absolute position of row `start`
    block_length: int
    kv: KVRange
    sees_to: int = 0  # where what the rows of a whole block see ends, if behind the last of them

    @property
    def end_position(self) -> int:
        return self.first_position + self.stop - self.start


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass: its rows, the sequences they belong to, and what it is for."""

    token_ids: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64, absolute
    segments: tuple[Segment, ...]
    step: Step
    logit_rows: int = 0  # whose statistics are asked for after it at most, of each kind
    asked: tuple[LogitNeeds, ...] = ()  # the kinds

    @property
    def counts(self) -> Counts:
        """What its transients' sizes depend on."""
        return Counts(
            len(self.token_ids),
            max(min(one.stop - one.start, one.block_length) for one in self.segments),
            max(max(one.end_position, one.sees_to) for one in self.segments),
            self.logit_rows,
            self.asked,
        )

    def placed(self, kv_cache: KVCache) -> Batch:
        """The same, with keys and values where they are in this pass; sees to their memory.

        Raises PageError where none is to be had.
        """
        ranges = [
            kv_cache.of_pass(one.kv, slice(one.start, one.stop), one.end_position)
            for one in self.segments
        ]
        if all(one.kv is kv for one, kv in zip(self.segments, ranges, strict=True)):
            return self
        pairs = zip(self.segments, ranges, strict=True)
        return replace(self, segments=tuple(replace(one, kv=kv) for one, kv in pairs))
