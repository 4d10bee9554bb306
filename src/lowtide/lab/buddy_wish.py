"""What a calibration is to find out about buddies. Imports no torch: a refusal does not wait."""

from __future__ import annotations

from dataclasses import dataclass, field

from lowtide.errors import UsageError
from lowtide.policies.buddy_lists import BuddyRule, Ranking


@dataclass(frozen=True, slots=True)
class BuddyWish:
    """What to measure, and the rule that lists are made by unless another is given later.

    list_size: alpha is fitted, so that a layer's lists have as many buddies in the mean at most;
    measured: similarities of experts, by outputs or by weights; the rule's own is, anyway.
    """

    rule: BuddyRule = field(default_factory=BuddyRule)
    list_size: float | None = None
    measured: frozenset[Ranking] = frozenset()

    def has(self, ranking: Ranking) -> bool:
        """Whether this similarity is to be measured."""
        return ranking in self.measured or ranking is self.rule.ranking

    def check(self, num_layers: int, num_experts: int) -> None:
        """Raises UsageError for what a model of so many MoE layers and experts cannot have."""
        self.rule.check(num_layers)
        most = num_experts - 1
        if self.list_size is not None and not 1 <= self.list_size <= most:
            raise UsageError(
                f"Lists of {self.list_size:g} buddies in the mean cannot be: an expert has from 1 "
                f"to {most}."
            )
