"""Forecast of the experts that a layer's next steps demand, from its last steps."""

from __future__ import annotations

import numpy as np

from lowtide.core import FloatArray, IntArray

_DECAYS = (0.0, 0.8, 0.95)  # the last step, some five, some twenty; and everything ever seen
_FORGET = 0.99  # weight of the past in what is learnt, per watched layer and step
_WATCHED, _EARLY = 4, 64  # every fourth step is learnt from, and each of the first ones
_RIDGE = 1e-9  # keeps memories that say the same from cancelling each other
_LEAST_S = 1e-300  # instead of nothing, to divide by
# One of an expert's tokens stays with it as often as not, so one with many comes again: the chance
# by tokens, which is 1 to the last bit from 53 on.
_STAYS = 1.0 - np.exp2(-np.arange(54.0))


def stays(num_tokens: IntArray) -> FloatArray:
    """Return the probability that an expert with this many tokens is demanded again."""
    chance: FloatArray = _STAYS.take(num_tokens, mode="clip")
    return chance


class Forecast:
    """Forecasts each expert's worth in its layer's next step, by a learned mixture of memories.

    A step's worth is a share: a layer's experts sum to one, so a prefill pass, which demands every
    expert, teaches as much as any other. Each layer remembers the last step, two exponential means
    and the mean of all steps, which a calibration initialises.

    The weights of the memories are learned while running, by least squares over some steps: routing
    that stays (a diffusion block), drifts, or only has favourites needs different mixtures.
    """

    def __init__(
        self, num_layers: int, num_experts: int, frequency: FloatArray | None = None
    ) -> None:
        """Begin with a calibration's activity, if given.

        frequency: [layers, experts], number of its steps in which each expert was active.
        """
        num_memories = len(_DECAYS) + 1
        self._memories = np.zeros((num_memories, num_layers, num_experts))
        self._change = np.empty_like(self._memories)
        self._flat = self._memories.reshape(num_memories, -1)
        self._num_steps = 0.0
        self._num_observed = 0
        if frequency is not None:
            self._num_steps = float(frequency.max(initial=0.0))
            total = np.maximum(frequency.sum(axis=1, keepdims=True), 1.0)
            self._memories[-1] = frequency / total
        # What each memory takes over of a new step.
        self._rates = np.array([*(1 - decay for decay in _DECAYS), 1 / (self._num_steps + 1)])
        self._products = np.zeros((num_memories, num_memories + 1))
        self._weights = np.full(num_memories, 1 / num_memories)
        self.worth_s = np.zeros(num_layers)
        """Worth of each layer's experts together, in the last step."""

    def observe(self, num_tokens: IntArray, worth_s: FloatArray) -> None:
        """Learn the seconds that each expert's residency was worth in a step.

        num_tokens, worth_s [num_layers, num_experts]. Layers without any worth are skipped.
        """
        total_s = worth_s.sum(axis=1)
        silent = (total_s <= 0).nonzero()[0]
        if len(silent) == len(total_s):
            return
        total_s[silent] = self.worth_s[silent]
        self.worth_s = total_s
        if self._num_observed < _EARLY or self._num_observed % _WATCHED == 0:
            self._learn(worth_s, silent)
        self._num_observed += 1
        kept_s = worth_s * stays(num_tokens)
        kept_s /= np.maximum(kept_s.sum(axis=1, keepdims=True), _LEAST_S)
        np.subtract(kept_s, self._memories, out=self._change)
        self._change *= self._rates[:, None, None]
        self._change[:, silent] = 0.0
        self._memories += self._change
        self._num_steps += 1
        self._rates[-1] = 1 / (self._num_steps + 1)

    def before(self, shares: FloatArray) -> float:
        """Forecast the next step's shares of a layer's worth, before a step.

        Writes them to `shares` [num_layers, num_experts]; returns the weight of the step's own
        shares.
        """
        own = self._weights * self._rates
        np.dot(self._weights - own, self._flat, out=shares.reshape(-1))
        return float(own.sum())

    def __call__(self) -> FloatArray:
        """Return the seconds that residency will be worth next, [num_layers, num_experts]."""
        worth_s: FloatArray = self._weights.dot(self._flat).reshape(self._memories.shape[1:])
        worth_s *= self.worth_s[:, None]
        return np.maximum(worth_s, 0.0, out=worth_s)

    def _learn(self, worth_s: FloatArray, silent: IntArray) -> None:
        """Find the mixture that would have forecast the recent steps with the least squared error.

        Weights are equal until enough is known. worth_s [layers, experts]; silent: other steps.
        """
        total_s, memories = self.worth_s, self._memories
        if len(silent):
            worth_s, total_s = np.delete(worth_s, silent, 0), np.delete(total_s, silent)
            memories = np.delete(memories, silent, 1)
        wanted = worth_s / total_s[:, None]
        flat = memories.reshape(len(self._weights), -1)
        self._products *= _FORGET ** len(wanted)
        self._products[:, :-1] += flat.dot(flat.T)
        self._products[:, -1] += flat.dot(wanted.reshape(-1))
        gram = self._products[:, :-1]
        ridge = _RIDGE + 1e-6 * np.trace(gram)
        target = self._products[:, -1] + ridge / len(gram)
        self._weights = np.linalg.solve(gram + ridge * np.eye(len(gram)), target)
