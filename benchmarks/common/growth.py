"""What grows with the length of a sequence: straight lines, longest lengths, and their ratios.

Pure: numbers in, numbers out.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
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


class StepTime(NamedTuple):
    """`linear_s * tokens + square_s * tokens^2`: attention's work grows with the square."""

    linear_s: float
    square_s: float

    @classmethod
    def through(cls, points: Mapping[int, float]) -> StepTime:
        """Least squares of relative distances; no part is below 0. points: seconds by tokens."""
        tokens = np.array(list(points), np.float64)
        seconds = np.array(list(points.values()), np.float64)
        columns = np.stack([tokens, tokens**2], axis=1) / seconds[:, None]
        linear_s, square_s = np.linalg.lstsq(columns, np.ones_like(seconds), rcond=None)[0].tolist()
        if square_s < 0:
            return cls(float(np.mean(seconds / tokens)), 0.0)
        if linear_s < 0:
            return cls(0.0, float(np.mean(seconds / tokens**2)))
        return cls(linear_s, square_s)

    def at(self, num_tokens: int) -> float:
        return self.linear_s * num_tokens + self.square_s * num_tokens**2


def at_full_depth(by_layers: Mapping[int, float], num_layers: int) -> float:
    """What a model of all its layers takes, from models of two numbers of layers."""
    (fewer, least), (more, most) = sorted(by_layers.items())
    return least + (num_layers - fewer) * (most - least) / (more - fewer)


class Cell(NamedTuple):
    """The longest sequences of one model under one cap at one share of the prompt."""

    model: str
    cap_bytes: int
    prompt_share: float
    ours_tokens: int
    theirs_tokens: Mapping[str, int]  # by side

    @property
    def ratios(self) -> dict[str, float]:
        return {side: self.ours_tokens / tokens for side, tokens in self.theirs_tokens.items()}


def mean_ratios(cells: Sequence[Cell]) -> dict[str, float]:
    """The arithmetic mean over all cells, by side, as the paper's headline has it."""
    sides = {side: None for cell in cells for side in cell.theirs_tokens}
    return {
        side: statistics.fmean(cell.ratios[side] for cell in cells if side in cell.theirs_tokens)
        for side in sides
    }
