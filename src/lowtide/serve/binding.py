"""Names the limit of a model's speed on this machine, and ways to raise it.

Pure functions of the plan and of recent passes' times.
"""

from __future__ import annotations

from typing import NamedTuple

from lowtide.config import format_size
from lowtide.plan import MemoryPlan, Prediction

WAITED_SHARE = 0.25
"""Share of recent passes' time spent waiting for reads from which the disk is said to bind."""

BYTES_SHARE = 0.5
"""Share of a pass that memory alone would take from which memory is said to bind."""

MANY_ROWS = 16
"""Rows of a pass from which arithmetic is said to bind, where nothing was measured."""


class Binding(NamedTuple):
    """A speed's limit (`disk`, `memory` or `arithmetic`), a sentence on it, and one on what helps.

    help may be empty.
    """

    what: str
    sentence: str
    help: str


def binding_of(plan: MemoryPlan, waited_share: float | None = None) -> Binding:
    """Return the limit of a model's speed.

    waited_share: share of recent passes' time that was spent waiting; None without recent passes.
    """
    prediction = plan.prediction
    if waited_share is None:
        binds = prediction is not None and prediction.read_bytes > 0
    else:
        binds = waited_share >= WAITED_SHARE
    if binds:
        return _disk(plan, waited_share)
    if prediction is None:
        return Binding(
            "arithmetic", f"{_placed(plan)}; the {plan.device} device computes them.", ""
        )
    if _is_bound_by_bytes(prediction):
        size = format_size(round(prediction.memory_bytes / prediction.tokens_per_pass))
        return Binding(
            "memory",
            f"{_placed(plan)}, and each token uses {size} of weights: the speed of memory.",
            f"{_smaller_format(plan)}Requests at the same time share a pass's weights.",
        )
    rows = f"{prediction.num_rows} row{'s' * (prediction.num_rows > 1)}"
    help = "More cores or a GPU would help."
    if prediction.num_rows >= MANY_ROWS:
        help += " A lower threshold or fewer steps write more tokens in a pass."
    return Binding("arithmetic", f"{_placed(plan)}, and passes compute {rows}: arithmetic.", help)


def _disk(plan: MemoryPlan, waited_share: float | None) -> Binding:
    prediction = plan.prediction
    sentence = "Experts are read from disk"
    if prediction is not None and prediction.read_bytes:
        size = format_size(round(prediction.read_bytes_per_token))
        sentence += f", {size} a token with even routing"
    if waited_share is not None:
        sentence += f"; passes wait for it {waited_share:.0%} of their time"
    everything = format_size(plan.full_bytes)
    help = f"More memory: every expert is resident from {everything} on. {_smaller_format(plan)}"
    return Binding("disk", f"{sentence}.", help.strip())


def _placed(plan: MemoryPlan) -> str:
    if not plan.num_experts:
        return "All weights are in memory"
    residents = sum(plan.residents_per_layer)
    if residents == plan.num_experts:
        return "All experts are in memory"
    return f"The plan keeps {residents} of {plan.num_experts} experts in memory"


def _smaller_format(plan: MemoryPlan) -> str:
    """Advise to round weights, which may change answers; return "" if they are rounded already."""
    is_small = not plan.formats.names.isdisjoint(("q8", "q4"))
    return "" if is_small else "A smaller format (--format q4) helps, and may change answers. "


def _is_bound_by_bytes(prediction: Prediction) -> bool:
    """Return True if going through the weights takes a good part of a pass."""
    if prediction.speed is None or prediction.at_most is None:
        return prediction.num_rows < MANY_ROWS
    return prediction.speed.likely >= BYTES_SHARE * prediction.at_most
