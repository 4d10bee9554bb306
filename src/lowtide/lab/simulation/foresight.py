"""Early gates in a replay: recorded predictions, or the truth with errors at a given rate.

A trace has no features. A gate that was not recorded is simulated as the truth with each choice
replaced at random, independently, at the error rate measured on a calibration's text. That flatters
gates with correlated errors, as for the tokens of a diffusion block (`benchmarks/prefetch.py`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from lowtide.core import FloatArray, IntArray
from lowtide.errors import UsageError
from lowtide.policies.prefetch import Gate
from lowtide.replay.calibration import GATES, Calibration
from lowtide.replay.trace import Trace, count_hits

GateAccuracies = Mapping[Gate, float | FloatArray]
"""Share of routed experts that each early gate predicts correctly: one for all layers, or one for
each layer after the first [layers - 1]."""


class Foresight(enum.Enum):
    """Source of an early gate's predictions."""

    NONE = "none"  # no early gate is asked
    RECORDED = "recorded"  # it said so
    MEASURED = "measured"  # it errs as often as it did on the calibration's text
    ASSUMED = "assumed"  # it errs as often as published; not measured

    @classmethod
    def of(
        cls,
        gate: Gate,
        accuracies: GateAccuracies | None,
        predictions: Mapping[Gate, Sequence[IntArray]],
    ) -> Foresight:
        """Choose the source of `gate`'s predictions. Raise UsageError if `accuracies` lack it."""
        if gate is Gate.NONE:
            return cls.NONE
        if gate in predictions:
            return cls.RECORDED
        if accuracies is None:
            return cls.ASSUMED
        if gate not in accuracies:
            known = ", ".join(one.value for one in accuracies) or "none"
            raise UsageError(
                f"The policy asks the early gate {gate.value!r} and its accuracy is missing (there "
                f"are: {known}); run lowtide calibrate on the trace's model."
            )
        return cls.MEASURED


def measured_accuracy(calibration: Calibration) -> GateAccuracies:
    """Return each early gate's accuracy on the calibration's text, layer by layer."""
    return {Gate(n): routed for n, routed in zip(GATES, calibration.accuracy.routed, strict=True)}


def guesses(trace: Trace, accuracy: float | FloatArray, seed: int) -> Iterator[IntArray]:
    """Yield each pass' predicted tokens per expert, [layers, experts]."""
    num_layers, num_experts = trace.shape[:2]
    error_rate = np.zeros((num_layers, 1))
    error_rate[1:, 0] = 1.0 - np.asarray(accuracy)  # nothing is predicted of the first layer
    draw = np.random.default_rng(seed)
    for ids in trace.iter_ids():
        is_wrong = draw.random(ids.shape) < error_rate
        chance = draw.integers(0, num_experts, ids.shape, np.uint16)
        yield count_hits(np.where(is_wrong, chance, ids), num_experts)
