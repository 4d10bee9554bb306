"""What crossed a link, and why."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from lowtide.policies.prefetch import PrefetchOutcome


@dataclass
class LinkStats:
    """Experts that crossed the link, by reason."""

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
