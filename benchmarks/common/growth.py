"""Straight lines over the length of a sequence or the number of layers.

Pure: numbers in, numbers out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from lowtide.errors import UsageError

MIN_POINTS = 3
"""Lengths that a straight line is drawn through: two would always fit."""


class Growth(NamedTuple):
    """`intercept + slope * tokens`, in whatever unit was measured."""

    intercept: float
    slope: float
    residual: float  # the largest distance of a point from the line, over the point

    @classmethod
    def through(cls, points: Mapping[int, float]) -> Growth:
        """The line of least squares of relative distances. points: by tokens.

        Raises UsageError for fewer than `MIN_POINTS`.
        """
        if len(points) < MIN_POINTS:
            raise UsageError(f"Growth is measured at {MIN_POINTS} lengths or more: {list(points)}.")
        tokens = np.array(list(points), np.float64)
        values = np.array(list(points.values()), np.float64)
        columns = np.stack([np.ones_like(tokens), tokens], axis=1) / values[:, None]
        intercept, slope = np.linalg.lstsq(columns, np.ones_like(values), rcond=None)[0].tolist()
        residual = float(np.abs((intercept + slope * tokens) / values - 1).max())
        return cls(intercept, slope, residual)

    def at(self, num_tokens: int) -> float:
        return self.intercept + self.slope * num_tokens

    def longest(self, limit: float) -> int:
        """The most tokens that stay within `limit`; 0 where none do."""
        if self.slope <= 0:
            raise UsageError(f"What shrinks with length has no longest one: {self.slope}.")
        return max(0, int((limit - self.intercept) / self.slope))


def at_full_depth(by_layers: Mapping[int, float], num_layers: int) -> float:
    """Continue a measurement at two numbers of layers to all layers of a model."""
    (fewer, least), (more, most) = sorted(by_layers.items())
    return least + (num_layers - fewer) * (most - least) / (more - fewer)
