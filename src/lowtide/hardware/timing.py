"""Repeated measurements: medians and the spread of repeats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import NamedTuple

MIN_REPEATS = 3
MAX_REPEATS = 15

Sample = Callable[[], float]
"""Does something once and returns the seconds it took, without preparation."""


class Timing(NamedTuple):
    """Seconds of one thing, over its repeats."""

    median_s: float
    least_s: float
    most_s: float
    num_repeats: int

    @property
    def spread(self) -> float:
        """The spread of the repeats, as a share of the median."""
        return (self.most_s - self.least_s) / self.median_s if self.median_s else 0.0


def repeat_interleaved(samples: Sequence[Sample], limit_s: float) -> list[Timing]:
    """Take all samples in turn, repeatedly, until another round would exceed `limit_s`.

    Turns make a slow moment of the machine affect all of them. At least `MIN_REPEATS` rounds are
    taken, however slow, and at most `MAX_REPEATS`. There is no warm-up.
    """
    start_s = perf_counter()
    rounds: list[list[float]] = []
    while len(rounds) < MAX_REPEATS:
        elapsed_s = perf_counter() - start_s
        if len(rounds) >= MIN_REPEATS and elapsed_s + elapsed_s / len(rounds) > limit_s:
            break
        rounds.append([sample() for sample in samples])
    return [
        Timing(median(times), min(times), max(times), len(times))
        for times in zip(*rounds, strict=True)
    ]
