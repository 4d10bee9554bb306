"""Facts for tests of policies, with what a test does not care for filled in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lowtide.core import (
    NO_EXPERTS,
    BoolArray,
    Costs,
    Curve,
    Demand,
    Facts,
    FloatArray,
    IntArray,
    Step,
    StepKind,
)

STEP = Step(StepKind.DENOISE, 0)

COSTS = Costs(
    expert_bytes=100,
    link_s=10.0,
    host_s=Curve([(1, 4.0)]),
    device_s=Curve([(1, 3.0)]),
    dense_s=Curve([(1, 1.0)]),
    sync_s=0.5,
)


def make_facts(
    demand: Demand,
    costs: Costs | None = None,
    *,
    step: Step = STEP,
    layer: int = 0,
    is_kept: BoolArray | None = None,
    capacity: Sequence[int] | IntArray | None = None,
    arriving_s: FloatArray | None = None,
    link_s: float = 0.0,
    can_fetch: bool | None = None,
    fetched: IntArray = NO_EXPERTS,
) -> Facts:
    """Of a layer that keeps those of the demand that are resident, and has no room for others."""
    costs = costs or Costs.unknown(1)
    if is_kept is None:
        is_kept = np.zeros(1 + int(demand.experts.max(initial=0)), np.bool_)
        is_kept[demand.experts[demand.is_resident]] = True
    if capacity is None:
        capacity = [int(is_kept.sum())] * (layer + 1)
    return Facts(
        step,
        layer,
        demand,
        is_kept,
        np.array(capacity, np.int64),
        costs,
        arriving_s,
        link_s,
        costs.num_staging > 0 if can_fetch is None else can_fetch,
        fetched=fetched,
    )
