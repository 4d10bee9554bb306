"""Repeated measurements: medians, and how far the repeats lie apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import NamedTuple

MIN_REPEATS = 3
MAX_REPEATS = 15

Sample = Callable[[], float]
"""Does something once and says how many seconds it took; what is not part of it is not timed."""


class Timing(NamedTuple):
    """Seconds of one thing, over its repeats."""

    median_s: float
    least_s: float
    most_s: float
    num_repeats: int

    @property
    def spread(self) -> float:
        """How far the repeats lie apart, as a share of the median."""
        return (self.most_s - self.least_s) / self.median_s if self.median_s else 0.0


def repeat_interleaved(samples: Sequence[Sample], limit_s: float) -> list[Timing]:
    """Takes all samples in turn, again and again, until another round would pass `limit_s`.

    In turn, so that a slow moment of the machine falls on all of them. At least `MIN_REPEATS`
    rounds are taken, however slow, and at most `MAX_REPEATS`. Nothing is warmed up here.
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
