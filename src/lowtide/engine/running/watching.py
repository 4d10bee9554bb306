"""Read-only snapshots of a running engine.

A snapshot is taken on any thread while passes run, without a lock and without the engine's thread:
its numbers may be part of a pass apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import NamedTuple

from lowtide.engine.running.engine import Engine
from lowtide.engine.running.worker import Worker
from lowtide.experts.stats import ExpertLook
from lowtide.plan import TierPlan, plan_tiers

_SLOTS = "slots"

_NO_PARTS = ("budget_bytes", "slot_bytes", "unused_slot_bytes")
"""Sizes of a `TierPlan` that are not parts of its budget."""


class TierMemory(NamedTuple):
    """Memory of one tier, in bytes by part: such as `dense`, `kv_cache` and `slots`.

    held: taken out of the budget, which changes where memory moves. used: what of `kv_cache` has
    tokens of running requests, and of `slots` experts.
    """

    budget_bytes: int
    held: dict[str, int]
    used: dict[str, int]


class Look(NamedTuple):
    """A running engine at one moment: experts, memory by tier, and passes since loading."""

    experts: ExpertLook
    memory: dict[str, TierMemory]
    counts: dict[str, float]


@contextmanager
def watched(worker: Worker) -> Iterator[Callable[[], Look]]:
    """Yield a function that looks at a worker's engine; demands are counted meanwhile."""
    with worker.engine.experts.watched() as look_at_experts:

        def look() -> Look:
            experts = look_at_experts()
            return Look(experts, memory_of(worker.engine, experts), worker.speed.as_dict())

        yield look


def memory_of(engine: Engine, experts: ExpertLook) -> dict[str, TierMemory]:
    """Return the memory of each tier of the plan at this moment."""
    plan, kv_cache = engine.plan, engine.kv_cache
    moving = {} if engine.moving is None else engine.moving.held_bytes()
    usage = 1 - kv_cache.num_free_tokens / kv_cache.num_tokens
    memory = {}
    for name, tier in plan_tiers(plan):
        held = _planned(tier)
        is_fast = tier is plan.fast_tier
        if is_fast:
            held |= moving
        elif engine.home is not None:
            held[_SLOTS] = engine.home.held_bytes
        residents = experts.residents.get(name)
        num_experts = 0 if residents is None else int(residents.sum())
        used = {_SLOTS: min(held[_SLOTS], num_experts * tier.slot_bytes)}
        if is_fast:  # memory that moves is there for what is written alone
            is_moving = "kv_cache" in moving
            used["kv_cache"] = round(held["kv_cache"] * (1.0 if is_moving else usage))
        memory[name] = TierMemory(tier.budget_bytes, held, used)
    return memory


def _planned(tier: TierPlan) -> dict[str, int]:
    """Return the bytes of a tier's parts by name."""
    sizes = [field.name for field in fields(tier) if field.name.endswith("_bytes")]
    parts = {
        name.removesuffix("_bytes"): getattr(tier, name) for name in sizes if name not in _NO_PARTS
    }
    return {**parts, _SLOTS: tier.num_slots * tier.slot_bytes}
