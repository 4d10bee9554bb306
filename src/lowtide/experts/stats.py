"""Counters of experts: hits, uses of host slots, copies across a link."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from lowtide.core import BoolArray, IntArray
from lowtide.policies.prefetch import PrefetchOutcome


@dataclass
class ExpertStats:
    """Counts of activated experts since the runtime was made."""

    num_hits: int = 0  # those that were resident in the fast tier
    num_misses: int = 0  # those that were not
    num_moves_asked: int = 0  # experts that the placement asked to become resident


@dataclass
class HostStats:
    """Counts, bytes and seconds of host slots since the tier was made."""

    num_moves_done: int = 0  # experts that became resident by a move; others were dropped
    num_admitted: int = 0
    num_evicted: int = 0
    num_ahead: int = 0  # of the experts read, those whose read began before their layer did
    num_late: int = 0  # of those, the ones that the layer had to wait for
    num_wasted: int = 0  # reads that began before their layer did, for nothing
    read_bytes: int = 0
    wait_s: float = 0.0  # the calling thread waited for a read


@dataclass
class LinkStats:
    """Counts of experts that crossed the link, by reason."""

    num_fetched: int = 0  # on demand
    num_moved: int = 0  # to be resident, for later
    num_moves_done: int = 0  # those, and fetched ones that stayed
    num_prefetched: int = 0
    prefetch: PrefetchOutcome = field(default_factory=PrefetchOutcome)

    @property
    def num_copies(self) -> int:
        return self.num_fetched + self.num_moved + self.num_prefetched

    def as_dict(self) -> dict[str, float]:
        counts = asdict(self)
        outcome = counts.pop("prefetch")
        return {**counts, **{f"prefetch_{name}": count for name, count in outcome.items()}}


class ExpertLook(NamedTuple):
    """Experts as one who watches sees them.

    residents: which are in each tier's slots, bool [layers, experts], the fastest tier first.
    num_tokens: those that asked for each expert since the watch began, [layers, experts].
    """

    residents: dict[str, BoolArray]
    num_tokens: IntArray
    num_hits: int = 0
    num_misses: int = 0
    read_bytes: int = 0
    wait_s: float = 0.0
