"""Budgets: how many residents each layer may have, of as many as there is room for in all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from lowtide.core import FloatArray, IntArray

_PERIOD = 2  # steps between two looks at the layers
_FORGET = 0.9  # weight of the past in what a layer's residents are worth, per look
_LEAST_RATIO = 2.0  # of the worth gained to the worth lost, so that slots do not go to and fro
_SHARE = 32  # of a layer's experts, one in so many changes layers at once


class Budgets:
    """Residents per layer, which move from where the last one is worth least to where the next
    one would be worth most.

    A layer that is to shrink may keep less at once and says later what it has evicted; a layer
    that is to grow waits until then. So all layers together never have more than the total. Only
    layers that are full take part: the others wait for the link, and what is on its way counts.
    A layer with all its experts stays so, and none becomes it: nobody decides for such layers.
    """

    def __init__(self, capacity: Sequence[int], num_experts: int) -> None:
        """`capacity`: of each layer, at the start."""
        self.capacity = [int(slots) for slots in capacity]
        """What each layer may keep now."""
        self._given = np.array(self.capacity, np.int64)
        self._given_bytes = self._given.tobytes()  # what is compared quickest
        self._held = list(self.capacity)  # residents of each layer, at most
        self._due = [0] * len(self.capacity)  # what each will get when others have evicted it
        self._num_experts = num_experts
        self._num_moved = max(1, num_experts // _SHARE)
        # [layers, experts]: a mean, best expert of each look first
        self._worth_s = np.zeros((len(self.capacity), num_experts))
        self._num_steps = 0

    def resize(self, given: IntArray) -> None:
        """Tells how many residents the layers were given, of which each keeps what it has come by
        since the start. given [num_layers]

        What is lost is to be evicted at once; what is won has to come free first.
        """
        if given.tobytes() == self._given_bytes:
            return
        then = np.array(self.capacity) + self._due + given - self._given
        then = np.clip(then, 0, self._num_experts)
        while then.sum() > given.sum():  # some had nothing left to lose
            then[then.argmax()] -= 1
        while then.sum() < given.sum():  # some had no more to win
            then[then.argmin()] += 1
        self._due = [
            max(0, new - now) for new, now in zip(then.tolist(), self.capacity, strict=True)
        ]
        self.capacity[:] = np.minimum(then, self.capacity).tolist()
        self._given, self._given_bytes = given.copy(), given.tobytes()

    def begin_step(self, worth_s: Callable[[], FloatArray]) -> None:
        """At every second step decides who gives slots to whom.

        worth_s: tells what residency is worth in a step. [layers, experts]
        """
        self._num_steps += 1
        if self._num_steps % _PERIOD == 0:
            self._divide(worth_s())

    def settle(self, layer: int, num_residents: int) -> int:
        """Tells how many residents a layer has; how many of them it has to evict now."""
        self._held[layer] = num_residents
        if self._due[layer]:
            num_free = int(self._given.sum()) - sum(map(max, self.capacity, self._held))
            num_given = max(0, min(num_free, self._due[layer]))
            self.capacity[layer] += num_given
            self._due[layer] -= num_given
        return max(0, num_residents - self.capacity[layer])

    def _divide(self, worth_s: FloatArray) -> None:
        self._worth_s *= _FORGET
        self._worth_s += (1 - _FORGET) * np.sort(worth_s, axis=1)[:, ::-1]
        gains_s = [self._gain_s(layer) for layer in range(len(self.capacity))]
        losses_s = [self._loss_s(layer) for layer in range(len(self.capacity))]
        growing, shrinking = np.argsort(gains_s)[::-1].tolist(), np.argsort(losses_s).tolist()
        for to, of in zip(growing, shrinking, strict=True):
            if gains_s[to] <= _LEAST_RATIO * losses_s[of]:
                return
            self.capacity[of] -= self._num_moved
            self._due[to] = self._num_moved

    def _gain_s(self, layer: int) -> float:
        """Worth of the last expert that the layer would get; below 0 if it gets none."""
        num_kept = self.capacity[layer] + self._num_moved
        if not self._is_full(layer) or num_kept >= self._num_experts:
            return -1.0
        return float(self._worth_s[layer, num_kept - 1])

    def _loss_s(self, layer: int) -> float:
        """Worth of the best expert that the layer would give; infinite if it gives none."""
        num_kept = self.capacity[layer] - self._num_moved
        is_whole = self.capacity[layer] == self._num_experts
        if not self._is_full(layer) or num_kept < 0 or is_whole:
            return np.inf
        return float(self._worth_s[layer, num_kept])

    def _is_full(self, layer: int) -> bool:
        return not self._due[layer] and self._held[layer] >= self.capacity[layer]
