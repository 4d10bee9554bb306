"""Counters of experts: hits, rows, moves, uses of host slots, copies across a link.

They add up at any time between passes (`account.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from lowtide.core import BoolArray, IntArray
from lowtide.policies.prefetch import PrefetchOutcome

NO_ADVANCES: Mapping[str, float] = {
    "num_moves_waiting": 0,
    "num_prefetched": 0,
    "num_prefetches_used": 0,
    "num_prefetches_dropped": 0,
    "num_prefetches_waiting": 0,
}
"""An executor's counts of experts that are brought for later, where there are none."""


@dataclass
class ExpertStats:
    """Counts of activated experts since the runtime was made."""

    num_hits: int = 0  # those that were resident in the fast tier
    num_misses: int = 0  # those that were not
    num_moves_asked: int = 0  # experts that the placement asked to become resident
    num_moves_dropped: int = 0  # those of them that will not
    num_expert_rows: int = 0  # pairs of row and expert that routers chose; of these:
    num_device_rows: int = 0  # run on the device
    num_host_rows: int = 0  # run by the host, the expert in its memory
    num_disk_rows: int = 0  # run on either side, the expert read from disk
    num_substituted_rows: int = 0  # run by another expert instead


@dataclass
class HostStats:
    """Counts, bytes and seconds of host slots since the tier was made."""

    num_moves_done: int = 0  # experts that became resident by a move, or are read to be
    num_moves_dropped: int = 0  # experts that were to be, and are not
    num_admitted: int = 0
    num_evicted: int = 0
    num_ahead: int = 0  # of the experts read, those whose read began before their layer did
    num_late: int = 0  # of those, the ones that the layer had to wait for
    num_wasted: int = 0  # reads that began before their layer did, for nothing
    num_begun_ahead: int = 0  # reads that began before their layer did
    num_read: int = 0  # experts read to be used
    read_bytes: int = 0  # theirs, and `given_up_bytes`
    given_up_bytes: int = 0  # of reads that were given up
    wait_s: float = 0.0  # the calling thread waited for a read


@dataclass
class LinkStats:
    """Counts of experts that crossed the link, by reason."""

    num_fetched: int = 0  # on demand
    num_moved: int = 0  # to be resident, for later
    num_moves_done: int = 0  # those, and fetched ones that stayed
    num_moves_dropped: int = 0  # experts that were to be resident, and are not
    num_prefetched: int = 0
    link_bytes: int = 0
    prefetch: PrefetchOutcome = field(default_factory=PrefetchOutcome)

    @property
    def num_copies(self) -> int:
        return self.num_fetched + self.num_moved + self.num_prefetched

    def as_dict(self) -> dict[str, float]:
        counts = asdict(self)
        outcome = counts.pop("prefetch")
        return {**counts, **{f"prefetch_{name}": count for name, count in outcome.items()}}


class ExpertLook(NamedTuple):
    """Snapshot of the experts of a running engine.

    residents: bool [layers, experts] for each tier's slots, the fastest tier first.
    num_tokens: tokens that demanded each expert since watching began, [layers, experts].
    """

    residents: dict[str, BoolArray]
    num_tokens: IntArray
    num_hits: int = 0
    num_misses: int = 0
    read_bytes: int = 0
    wait_s: float = 0.0
