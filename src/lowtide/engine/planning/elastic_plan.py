"""How far the budget of a tier may be divided while it is in use: what `elastic` plans.

A plan has room for a whole context and for so many slots; what a KV cache and a workspace leave of
theirs may hold more experts (`running/elastic.py`).
"""

from __future__ import annotations

from typing import NamedTuple

from lowtide.core import align_up
from lowtide.engine.planning.planner import Planner
from lowtide.memory.arena import HUGE_PAGE_BYTES
from lowtide.memory.kv_cache import GRANULE_TOKENS
from lowtide.memory.kv_pages import KVLayout
from lowtide.plan import MemoryPlan

SMALL_GROUP_BYTES = 4096
"""A small page: 16 tokens' keys of a head of 128 in bfloat16. A huge one is 512 of them."""


class Division(NamedTuple):
    """How far the budget of a tier may be divided among a KV cache, a workspace and expert slots.

    Only passes that have plans of their own have a workspace whose memory moves, only what is kept
    from pass to pass a cache.
    """

    budget_bytes: int  # for all of them
    slot_group_bytes: int
    num_slots: int  # that there can be at most, while the others are empty
    kv: KVLayout | None  # of all tokens that there can be, while slots are as few as they can be
    workspace_bytes: int  # of the largest pass, with no operator divided where that can be; or 0

    @classmethod
    def of(cls, planner: Planner, plan: MemoryPlan) -> Division:
        """The planned division is within the budget, and so is every other one."""
        tier, long_passes, context = plan.fast_tier, planner.pass_planner, planner.memory.context
        slot_group_bytes = group_bytes(tier.num_slots * tier.slot_bytes)
        fixed_bytes = tier.dense_bytes + tier.ring_bytes
        planned_bytes = align_up(tier.num_slots * tier.slot_bytes, slot_group_bytes)
        whole_bytes = 0
        if long_passes is None:
            fixed_bytes += tier.workspace_bytes
        else:
            whole_bytes = long_passes.whole_bytes(planner.largest_counts)
            planned_bytes += tier.workspace_bytes + group_bytes(tier.workspace_bytes) - 1
        kv = KVLayout(context.kv_shape, planner.memory.dtype) if context.keeps_keys else None
        planned_bytes += 0 if kv is None else kv.address_bytes(SMALL_GROUP_BYTES)
        # Whole pages may be a little more than the plan has: its overhead names some.
        budget_bytes = max(tier.budget_bytes - fixed_bytes, planned_bytes)
        num_slots = min(plan.num_experts, budget_bytes // tier.slot_bytes)
        least_bytes = align_up(plan.num_staging * tier.slot_bytes, slot_group_bytes)
        if kv is not None and planner.config.decoding.keeps_keys:  # or passes are as long as it
            kv = kv.longest(budget_bytes - least_bytes, SMALL_GROUP_BYTES, GRANULE_TOKENS)
        workspace_bytes = min(whole_bytes, budget_bytes)
        return cls(budget_bytes, slot_group_bytes, num_slots, kv, workspace_bytes)


def elastic_tokens(planner: Planner, plan: MemoryPlan) -> int:
    """`MemoryPlan.elastic_tokens` with `elastic`; 0 where all experts have slots for good."""
    if plan.everything_fits:
        return 0
    kv = Division.of(planner, plan).kv
    return (planner.memory.context.kv_shape if kv is None else kv.shape).num_tokens


def group_bytes(num_bytes: int) -> int:
    """Huge pages, but where one more of them would be a thing to notice."""
    return HUGE_PAGE_BYTES if num_bytes >= 32 * HUGE_PAGE_BYTES else SMALL_GROUP_BYTES
