"""A policy: experts that a pass has just used are kept, the latest pass first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lowtide.extend import Placement, PolicyInputs, PolicyOption, Ranks, Recipe, Step

GAIN = PolicyOption("gain", 1, 1, 9)


class Newest(Placement):
    def __init__(self, capacity: Sequence[int], num_experts: int, gain: int) -> None:
        super().__init__(len(capacity), num_experts)
        self._numbers = np.zeros((len(capacity), num_experts))
        self._gain = gain

    def begin_pass(self, step: Step, num_residents: np.ndarray, capacity: np.ndarray) -> Ranks:
        self._numbers *= 0.5
        return Ranks(self._numbers, capacity, per_expert=self._gain)


def _placement(inputs: PolicyInputs) -> Placement:
    return Newest(inputs.capacity, inputs.num_experts, GAIN.of(inputs))


NEWEST = Recipe(_placement, options=(GAIN,))
