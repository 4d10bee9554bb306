"""Ways in which a tier's budget may be divided while it is in use.

A plan has room for a whole context and a number of slots. Memory that the KV cache and the
workspace do not use can hold more experts (`running/moving_memory.py`).
"""

from __future__ import annotations

from typing import NamedTuple

from lowtide.core import align_up
from lowtide.engine.planning.planner import Planner
from lowtide.memory.arena import HUGE_PAGE_BYTES
from lowtide.memory.kv_pages import KVLayout, KVShape, longest
from lowtide.memory.states import PAGE_BYTES, StateLayout
from lowtide.plan import MemoryPlan

SMALL_GROUP_BYTES = PAGE_BYTES
"""A small page: 16 tokens' keys of a head of 128 in bfloat16. A huge one is 512 of them."""


class Division(NamedTuple):
    """Bounds of dividing a tier's budget among KV cache, workspace and expert slots.

    Only passes with plans of their own have a workspace whose memory moves; only kinds that keep
    keys from pass to pass have a KV cache.
    """

    budget_bytes: int  # for all of them
    slot_group_bytes: int
    num_slots: int  # that there can be at most, while the others are empty
    kv: KVShape | None  # of all tokens that there can be, while slots are as few as they can be
    workspace_bytes: int  # of the largest pass, with no operator divided where that can be; or 0
    states: StateLayout | None = None

    @classmethod
    def of(cls, planner: Planner, plan: MemoryPlan) -> Division:
        """Derive the bounds. The planned division, and every other, is within the budget."""
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
        kv, dtype = context.kv_shape if context.keeps_keys else None, planner.memory.dtype
        if kv is not None:
            layouts = (KVLayout(each, dtype) for each in kv.storage)
            planned_bytes += sum(layout.address_bytes(SMALL_GROUP_BYTES) for layout in layouts)
        states = context.state_layout(dtype)
        state_bytes = 0 if states is None else states.num_bytes
        state_bytes = align_up(state_bytes, group_bytes(state_bytes))
        planned_bytes += state_bytes
        # Whole pages may be a little more than the plan has: its overhead names some.
        budget_bytes = max(tier.budget_bytes - fixed_bytes, planned_bytes)
        num_slots = min(plan.num_experts, budget_bytes // tier.slot_bytes)
        least_bytes = align_up(plan.num_staging * tier.slot_bytes, slot_group_bytes) + state_bytes
        if kv is not None and planner.config.decoding.keeps_keys:  # or passes are as long as it
            kv = longest(kv, dtype, budget_bytes - least_bytes, SMALL_GROUP_BYTES)
        workspace_bytes = min(whole_bytes, budget_bytes)
        return cls(budget_bytes, slot_group_bytes, num_slots, kv, workspace_bytes, states)


def max_cache_tokens(planner: Planner, plan: MemoryPlan) -> int:
    """Return `MemoryPlan.max_cache_tokens`; 0 on a GPU, or if every expert has a slot."""
    if plan.everything_fits or plan.device == "cuda":
        return 0
    kv = Division.of(planner, plan).kv
    return (kv or planner.memory.context.kv_shape).num_tokens


def group_bytes(num_bytes: int) -> int:
    """Return the unit in which memory moves: huge pages unless one would be a noticeable share."""
    return HUGE_PAGE_BYTES if num_bytes >= 32 * HUGE_PAGE_BYTES else SMALL_GROUP_BYTES
