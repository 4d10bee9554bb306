"""The same model and budget in each format that weights can be made into: what it would be like."""

from __future__ import annotations

from dataclasses import replace

from lowtide.engine.device import resolve_device
from lowtide.engine.opening import OpenModel
from lowtide.engine.planning import make_plan
from lowtide.engine.weight_formats import QUANTISED
from lowtide.errors import PlanError, UnsupportedError
from lowtide.plan import OWN_FORMAT, FormatPlan

FORMATS = (OWN_FORMAT, *QUANTISED)


def plan_by_format(opened: OpenModel) -> tuple[FormatPlan, ...]:
    """For each format that this model's weights can be in; no weight is read.

    What a pass takes beside weights does not go by their format, so it is registered once.
    """
    return tuple(filter(None, (_plan_in(opened, name) for name in FORMATS)))


def _plan_in(opened: OpenModel, name: str) -> FormatPlan | None:
    """None where the weights are not made into this format, or are stored in it."""
    options = replace(
        opened.options, format=name, expert_dtype=None, dense_dtype=None, activations=OWN_FORMAT
    )
    opened = replace(opened, options=options)
    try:
        options.formats.check(
            str(opened.dtype).removeprefix("torch."), resolve_device(options.device)
        )
        num_experts = opened.config.moe_shape.num_experts * opened.config.num_moe_layers
        slot_bytes = 0 if opened.config.experts is None else opened.slot_layout.num_bytes
        weight_bytes = opened.dense.num_bytes + num_experts * slot_bytes
        if name != OWN_FORMAT and not opened.is_rounded_as_read:
            return None
    except UnsupportedError:
        return None
    try:
        plan = make_plan(opened)
    except PlanError:
        return FormatPlan(name, weight_bytes, None, None)
    share = sum(plan.residents_per_layer) / num_experts if num_experts else 1.0
    prediction = plan.prediction
    return FormatPlan(
        name, weight_bytes, share, None if prediction is None else prediction.tokens_per_s
    )
