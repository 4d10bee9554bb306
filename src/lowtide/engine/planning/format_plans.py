"""The same model and budget in each format that weights can be made into: what it would be like."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from lowtide.engine.opening.device_choice import resolve_device
from lowtide.engine.opening.model import OpenModel
from lowtide.engine.opening.named_inputs import named_inputs, rounds_experts
from lowtide.engine.opening.weight_formats import QUANTISED
from lowtide.engine.planning.plan import make_plan
from lowtide.errors import PlanError, UnsupportedError, UsageError
from lowtide.formats.expert_inputs import ExpertInputs
from lowtide.plan import OWN_FORMAT, FormatPlan, MemoryPlan

FORMATS = (OWN_FORMAT, *QUANTISED)


class _InFormat(NamedTuple):
    """A model in one format; plan: None where not even the least fits."""

    name: str
    weight_bytes: int
    opened: OpenModel
    plan: MemoryPlan | None


def plan_by_format(opened: OpenModel) -> tuple[FormatPlan, ...]:
    """For each format that this model's weights can be in; no weight is read.

    With a calibration that is another model's, whose inputs nothing is rounded for, that is their
    own alone.
    """
    inputs, names = opened.inputs, [*FORMATS]
    if inputs is None:
        try:
            inputs = named_inputs(opened)
        except UsageError:
            names = [OWN_FORMAT]
    found = [each for name in names if (each := _in_format(opened, name, inputs)) is not None]
    return tuple(map(_row, found))


def _row(found: _InFormat) -> FormatPlan:
    plan = found.plan
    if plan is None:
        return FormatPlan(found.name, found.weight_bytes, None, None)
    num_experts = plan.num_experts
    share = sum(plan.residents_per_layer) / num_experts if num_experts else 1.0
    speed = None if plan.prediction is None else plan.prediction.speed
    return FormatPlan(found.name, found.weight_bytes, share, speed)


def _in_format(opened: OpenModel, name: str, inputs: ExpertInputs | None) -> _InFormat | None:
    """None where the weights are not made into this format, or are stored in it.

    inputs: of experts that are rounded.
    """
    options = replace(
        opened.options, format=name, expert_dtype=None, dense_dtype=None, activations=OWN_FORMAT
    )
    opened = replace(opened, options=options, inputs=None)
    try:
        options.formats.check(
            str(opened.dtype).removeprefix("torch."), resolve_device(options.device)
        )
        num_experts = opened.config.moe_shape.num_experts * opened.config.num_moe_layers
        slot_bytes = 0 if opened.config.experts is None else opened.slot_layout.num_bytes
        weight_bytes = opened.dense.num_bytes + num_experts * slot_bytes
        if name != OWN_FORMAT and not opened.is_rounded_as_read:
            return None
        if rounds_experts(opened):
            opened = replace(opened, inputs=inputs)
    except UnsupportedError:
        return None
    try:
        return _InFormat(name, weight_bytes, opened, make_plan(opened))
    except PlanError:
        return _InFormat(name, weight_bytes, opened, None)
