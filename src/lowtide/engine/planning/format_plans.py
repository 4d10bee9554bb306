"""Plans of one model and budget in each format that its weights can be converted to.

`format="auto"` is the first plan's format, else the stored one; the time that rounding adds to an
expert's read is measured first. It is opt-in, because the words then depend on the budget and the
measurement.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from lowtide.engine.opening.config import EngineConfig
from lowtide.engine.opening.facts import MemoryFacts, ModelFacts, RunOptions
from lowtide.engine.opening.model import OpenModel
from lowtide.engine.opening.named_inputs import named_inputs, rounds_experts
from lowtide.engine.opening.weight_formats import QUANTISED
from lowtide.engine.planning.one_expert import keep_rounding
from lowtide.engine.planning.plan import make_plan
from lowtide.engine.planning.planner import Planner
from lowtide.errors import PlanError, UnsupportedError, UsageError
from lowtide.formats.expert_inputs import ExpertInputs
from lowtide.plan import (
    AUTO_FORMAT,
    INT8_ROWS,
    OWN_FORMAT,
    FormatPlan,
    faster_format,
    other_formats,
)

FORMATS = (OWN_FORMAT, *QUANTISED)


def plan_by_format(
    facts: ModelFacts, asked: EngineConfig, planner: Planner
) -> tuple[FormatPlan, ...]:
    """Plan each format that this model's weights can have, without reading a weight.

    If the named calibration cannot be used for rounding, only the stored format is planned.

    planner: of the model in the format asked for; passes are counted once for all formats.
    """
    experts, names = planner.memory.experts, [*FORMATS]
    inputs = None if experts is None else experts.inputs
    if inputs is None:
        try:
            inputs = named_inputs(facts, asked.calibration)
        except UsageError:
            names = [OWN_FORMAT]
    rows = (_in_format(facts, name, asked, planner, inputs) for name in names)
    return tuple(row for row in rows if row is not None)


def opened_with_format(
    opens: Callable[[EngineConfig], OpenModel], options: EngineConfig
) -> OpenModel:
    """Open a model in the format that `options` name or leave to be chosen.

    opens: opens with a named format; its exceptions are passed on.
    """
    opened = opens(as_stored(options))
    if options.format != AUTO_FORMAT:
        return opened
    facts, memory, asked = opened.facts, opened.memory, opened.options.asked
    planner = Planner.of(facts.config, memory, asked)
    for row in other_formats(plan_by_format(facts, asked, planner), memory.formats):
        rounded = opens(replace(options, format=row.format))
        keep_rounding(facts.checkpoint, memory, rounded.speed_facts)
    faster = faster_format(plan_by_format(facts, asked, planner), memory.formats)
    return opened if faster is None else opens(replace(options, format=faster.format))


def as_stored(options: EngineConfig) -> EngineConfig:
    """Return `options` with the stored format, for use before a format is chosen."""
    return replace(options, format=OWN_FORMAT) if options.format == AUTO_FORMAT else options


def _in_format(
    facts: ModelFacts,
    name: str,
    given: EngineConfig,
    planner: Planner,
    inputs: ExpertInputs | None,
) -> FormatPlan | None:
    """Plan one format; None if the weights cannot have it or are stored in it.

    inputs: experts' inputs for rounding.
    """
    config = facts.config
    # Rounded rows are not for every format.
    activations = OWN_FORMAT if given.activations == INT8_ROWS else given.activations
    asked = replace(
        given, format=name, expert_dtype=None, dense_dtype=None, activations=activations
    )
    try:
        memory = MemoryFacts.of(config, facts.weight_map, asked)
    except UnsupportedError:
        return None
    if name != OWN_FORMAT and not memory.is_rounded_as_read:
        return None
    if rounds_experts(asked.formats, memory):
        memory = memory.with_inputs(inputs)
    shape = config.moe_shape
    num_experts = shape.num_experts * shape.num_layers
    slot_bytes = 0 if memory.experts is None else memory.experts.layout.num_bytes
    weight_bytes = memory.dense.num_bytes + num_experts * slot_bytes
    try:
        opened = OpenModel(facts, memory, RunOptions.of(asked, config))
        plan = make_plan(opened, planner.in_format(memory))
    except PlanError:  # not even the least fits
        return FormatPlan(name, weight_bytes, None, None)
    share = sum(plan.residents_per_layer) / num_experts if num_experts else 1.0
    if plan.prediction is None:
        return FormatPlan(name, weight_bytes, share, None)
    return FormatPlan(name, weight_bytes, share, plan.prediction.speed, plan.prediction.at_most)
