"""The flat token batch: consecutive rows of several sequences, without padding."""

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
    earlier blocks. `block_length` 1 is causal attention. Positions before `first_position` must be
    in the KV cache already, and so must positions behind the last row that rows see.
    """

    start: int  # first row in the batch
    stop: int  # one past its last row
    first_position: int  # absolute position of row `start`
    block_length: int
    kv: KVRange
    sees_to: int = 0  # end of the positions that a whole block sees, if behind its last row

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
        if all(one.kv is kv for one, kv in zip(self.segments, ranges, strict=True)):
            return self
        pairs = zip(self.segments, ranges, strict=True)
        return replace(self, segments=tuple(replace(one, kv=kv) for one, kv in pairs))
