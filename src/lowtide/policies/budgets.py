"""Budgets: the number of residents allowed in each layer, within a total."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from lowtide.core import BoolArray, FloatArray, IntArray

_PERIOD = 2  # steps between two looks at the layers
_FORGET = 0.9  # weight of the past in what a layer's residents are worth, per look
_LEAST_RATIO = 2.0  # of the worth gained to the worth lost, so that slots do not go to and fro
_SHARE = 32  # a layer gives or gets at most one in this many of its experts at once


class Budgets:
    """Residents per layer, moved to where one more is worth most.

    A shrinking layer keeps fewer at once; a growing layer waits until those experts have left. So
    the sum never exceeds the total.

    Only full layers take part: the others are waiting for the link, and arriving experts count. A
    layer with all its experts keeps them, and no layer becomes complete, because nothing is decided
    for complete layers.
    """

    def __init__(self, capacity: Sequence[int], num_experts: int) -> None:
        """capacity: of each layer, at the start."""
        self.capacity = np.array(capacity, np.int64)
        """Residents that each layer may have now."""
        self._given = self.capacity.copy()
        self._held = self.capacity.copy()  # residents of each layer, at most
        self._due = np.zeros_like(self._given)  # what each gets when others have evicted it
        self._num_experts = num_experts
        self._num_moved = max(1, num_experts // _SHARE)
        # [layers, experts]: a mean, best expert of each look first
        self._worth_s = np.zeros((len(self.capacity), num_experts))
        self._num_steps = 0

    def resize(self, given: IntArray) -> None:
        """Take over new numbers of residents, [num_layers].

        Each layer keeps its gains since the start. A loss is evicted at once; a gain must become
        free first.
        """
        if np.array_equal(given, self._given):
            return
        then = np.clip(self.capacity + self._due + given - self._given, 0, self._num_experts)
        while then.sum() > given.sum():  # some had nothing left to lose
            then[then.argmax()] -= 1
        while then.sum() < given.sum():  # some had no more to win
            then[then.argmin()] += 1
        self._due = np.maximum(0, then - self.capacity)
        self.capacity = np.minimum(then, self.capacity)
        self._given = given.copy()

    def begin_step(self, worth_s: Callable[[], FloatArray]) -> None:
        """Decide, at every second step, which layers give slots to which.

        worth_s: returns the seconds that residency saves in a step, [layers, experts].
        """
        self._num_steps += 1
        if self._num_steps % _PERIOD == 0:
            self._divide(worth_s())

    def settle(self, num_residents: IntArray) -> None:
        """Record the layers' residents, [num_layers], and hand out slots that became free."""
        self._held[:] = num_residents
        if self._due.any():
            num_free = self._given.sum() - np.maximum(self.capacity, self._held).sum()
            num_before = self._due.cumsum() - self._due
            num_given = (num_free - num_before).clip(0, self._due)
            self.capacity += num_given
            self._due -= num_given

    def _divide(self, worth_s: FloatArray) -> None:
        self._worth_s *= _FORGET
        self._worth_s += (1 - _FORGET) * np.sort(worth_s, axis=1)[:, ::-1]
        gains_s, losses_s = self._gains_s(), self._losses_s()
        growing, shrinking = gains_s.argsort()[::-1], losses_s.argsort()
        pays = gains_s[growing] > _LEAST_RATIO * losses_s[shrinking]
        num_pairs = len(pays) if pays.all() else int(pays.argmin())
        self.capacity[shrinking[:num_pairs]] -= self._num_moved
        self._due[growing[:num_pairs]] = self._num_moved

    def _gains_s(self) -> FloatArray:
        """Return the worth of one more expert in each layer; negative if it gets none."""
        num_kept = self.capacity + self._num_moved
        gains_s = np.full(len(num_kept), -1.0)
        layers = (self._is_full() & (num_kept < self._num_experts)).nonzero()[0]
        gains_s[layers] = self._worth_s[layers, num_kept[layers] - 1]
        return gains_s

    def _losses_s(self) -> FloatArray:
        """Return the worth of the expert that each layer would give up; infinite if none."""
        num_kept = self.capacity - self._num_moved
        is_whole = self.capacity == self._num_experts
        losses_s = np.full(len(num_kept), np.inf)
        layers = (self._is_full() & (num_kept >= 0) & ~is_whole).nonzero()[0]
        losses_s[layers] = self._worth_s[layers, num_kept[layers]]
        return losses_s

    def _is_full(self) -> BoolArray:
        is_full: BoolArray = (self._due == 0) & (self._held >= self.capacity)
        return is_full
