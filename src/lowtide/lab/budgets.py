"""Budgets that hold a given share of a model's experts, for benchmarks and proofs."""

from __future__ import annotations

from lowtide.memory.budget import device_staging_slots, host_staging_slots
from lowtide.plan import MemoryPlan, TierPlan


def budget_of_share(plan: MemoryPlan, share: float) -> int:
    """Return the fast tier's budget in bytes that keeps `share` of all experts resident.

    plan: of the same model and options, with any budget. Staging slots are added; for a share of 1
    it is the plan's `full_bytes`.
    """
    num_staging = device_staging_slots(plan.num_experts)
    if plan.gpu is None:
        num_staging = host_staging_slots(plan.host.slot_bytes, plan.num_experts)
    return min(plan.full_bytes, _with_slots(plan.fast_tier, num_staging, share, plan))


def home_of_share(plan: MemoryPlan, share: float) -> int:
    """Return the host's budget that, beside a device, has `share` of all experts in memory."""
    num_staging = host_staging_slots(plan.host.slot_bytes, plan.num_experts)
    return _with_slots(plan.host, num_staging, share, plan)


def _with_slots(tier: TierPlan, num_staging: int, share: float, plan: MemoryPlan) -> int:
    fixed_bytes = tier.used_bytes - tier.num_slots * tier.slot_bytes
    num_slots = min(plan.num_experts, num_staging + round(share * plan.num_experts))
    return fixed_bytes + num_slots * tier.slot_bytes
