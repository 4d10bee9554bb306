"""Forecast: which experts the next steps of a layer will want, from what its last steps wanted."""

from __future__ import annotations

import numpy as np

from lowtide.core import FloatArray, IntArray

_DECAYS = (0.0, 0.8, 0.95)  # the last step, some five, some twenty; and everything ever seen
_FORGET = 0.99  # weight of the past in what is learnt, per watched layer and step
_WATCHED = 4  # every fourth layer is learnt from
_RIDGE = 1e-9  # keeps memories that say the same from cancelling each other
# One of an expert's tokens stays with it as often as not, so one with many comes again: the chance
# by tokens, which is 1 to the last bit from 53 on.
_STAYS = 1.0 - np.exp2(-np.arange(54.0))


class Forecast:
    """Each expert's worth in a layer's next step, by the best mixture of several memories.

    A step's worth is a share: all experts of a layer sum to one, so that a prefill pass, which
    wants every expert, teaches as much as any other. Every layer remembers the last step, two
    exponential means and the mean of all steps, which a calibration starts. How much each memory
    says about the next step is learnt while running, by least squares over some layers: routing
    that stays (a diffusion block), that drifts and that only has favourites want other mixtures.
    """

    def __init__(
        self, num_layers: int, num_experts: int, frequency: FloatArray | None = None
    ) -> None:
        """`frequency` [layers, experts]: the steps of a calibration in which each was active."""
        self._last_layer = num_layers
        num_memories = len(_DECAYS) + 1
        # [layers, memories and, last, the step that they are to forecast, experts]
        self._shares = np.zeros((num_layers, num_memories + 1, num_experts))
        self._change = np.empty((num_memories, num_experts))
        self._num_steps = np.zeros(num_layers)
        if frequency is not None:
            self._num_steps[:] = frequency.max(initial=0.0)
            total = np.maximum(frequency.sum(axis=1, keepdims=True), 1.0)
            self._shares[:, -2] = frequency / total
        self._products = np.zeros((num_memories, num_memories + 1))
        self._weights = np.full(num_memories, 1 / num_memories)
        self._rates = np.array([*(1 - decay for decay in _DECAYS), 0.0])[:, None]
        self._worth_s = np.zeros(num_layers)  # of all experts together, in the last step

    def observe(
        self, layer: int, experts: IntArray, num_tokens: IntArray, worth_s: FloatArray
    ) -> None:
        """Tells what each activated expert's residency was worth in this step, in seconds.

        experts, num_tokens, worth_s [num_activated]. A step in which nothing was worth anything
        is passed over.
        """
        total_s = float(np.add.reduce(worth_s))
        if total_s <= 0:
            return
        self._worth_s[layer] = total_s
        shares = self._shares[layer]
        memories, target = shares[:-1], shares[-1]
        target.fill(0.0)
        if layer % _WATCHED == 0:
            target[experts] = worth_s / total_s
            self._products *= _FORGET
            self._products += memories.dot(shares.T)
        kept_s = worth_s * _STAYS.take(num_tokens, mode="clip")
        target[experts] = kept_s / np.add.reduce(kept_s)
        self._num_steps[layer] += 1
        self._rates[-1] = 1 / self._num_steps[layer]
        change = np.subtract(target, memories, out=self._change)
        change *= self._rates
        memories += change

    def __call__(self, layer: int) -> FloatArray:
        """Seconds that each expert's residency will be worth in the next step. [num_experts]"""
        if layer <= self._last_layer:  # a step begins; layer 0 may be one that is not heard of
            self._learn()
        self._last_layer = layer
        weights = self._weights * self._worth_s[layer]
        worth_s: FloatArray = weights.dot(self._shares[layer, :-1])
        return np.maximum(worth_s, 0.0, out=worth_s)

    def of_all_layers(self) -> FloatArray:
        """The same of every layer, by the mixture learnt last. [num_layers, num_experts]"""
        worth_s: FloatArray = np.matmul(self._weights, self._shares[:, :-1])
        worth_s *= self._worth_s[:, None]
        return np.maximum(worth_s, 0.0, out=worth_s)

    def _learn(self) -> None:
        """The mixture of least squared error; as long as little is known, equal weights."""
        gram = self._products[:, :-1]
        ridge = _RIDGE + 1e-6 * np.trace(gram)
        target = self._products[:, -1] + ridge / len(gram)
        self._weights = np.linalg.solve(gram + ridge * np.eye(len(gram)), target)
