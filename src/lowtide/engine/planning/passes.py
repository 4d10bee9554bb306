"""Describes how a bidirectional model's passes fit into a plan.

For each share of masks: the memory of all operators, the limiting buffers, and the longest context.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from lowtide.config import parse_size
from lowtide.core import CacheMode
from lowtide.decode.kinds import make_kind
from lowtide.engine.opening.facts import ContextFacts
from lowtide.engine.planning.plan import least_bytes, offered_bytes
from lowtide.engine.planning.planner import Planner
from lowtide.hardware.memory import total_memory_bytes
from lowtide.memory.chunking import OPERATOR_TILES, Counts
from lowtide.params import DiffusionParams
from lowtide.plan import MemoryPlan

MASKED_SHARES = (1.0, 0.75, 0.5, 0.25, 0.1)
MAX_CONTEXT = 1 << 24
"""Longest context considered."""


class PlannedPass(NamedTuple):
    """A pass over a whole sequence.

    chunks: operators that need more than a tile -> the number of parts of their rows.
    held: buffers alive at the peak, and the largest libraries' memory, largest first. Together they
    are the memory that the pass needs.
    """

    num_tokens: int  # with guidance those of both sequences
    num_masked: int
    chunks: Mapping[str, int]
    needed_bytes: int
    binding: str  # the operator, or the buffer, that makes the peak
    held: tuple[tuple[str, int], ...]

    @property
    def is_divided(self) -> bool:
        return any(count > 1 for count in self.chunks.values())


class PlannedPasses(NamedTuple):
    """A plan's passes. fixed: other memory in the budget, by name."""

    longest_context: int | None  # within `offered_bytes`; None: with an approximate cache
    most_tried: int  # no longer one was looked for
    offered_bytes: int
    max_positions: int  # that the model was made for
    workspace_bytes: int
    budget_bytes: int
    fixed: tuple[tuple[str, int], ...]
    steps: tuple[PlannedPass, ...]


def plan_passes(
    planner: Planner, plan: MemoryPlan, policy: str, host_memory: str | int
) -> PlannedPasses:
    """Plan a bidirectional model's passes, for one request that fills the context.

    policy, host_memory: the options as given.
    """
    tier, context = plan.fast_tier, planner.memory.context
    num_offered = offered_bytes(plan, host_memory, planner.memory.dtype)
    longest = None if context.keeps_keys else longest_context(planner, policy, num_offered)
    return PlannedPasses(
        longest_context=longest,
        most_tried=MAX_CONTEXT,
        offered_bytes=num_offered,
        max_positions=planner.config.max_positions,
        workspace_bytes=tier.workspace_bytes,
        budget_bytes=tier.budget_bytes,
        fixed=(
            ("dense weights", tier.dense_bytes),
            ("keys and values", tier.kv_cache_bytes),
            ("read ring", tier.ring_bytes),
            ("expert slots", tier.num_slots * tier.slot_bytes),
        ),
        steps=tuple(plan_steps(planner, plan, context.num_tokens, context.num_tokens)),
    )


def longest_context_of(planner: Planner, policy: str, host_memory: str | int) -> int:
    """Return the longest context within a host budget, or 0 without one or if it is unknown."""
    is_host = planner.memory.device == "cpu"
    if host_memory == "auto" or not is_host or planner.memory.context.keeps_keys:
        return 0
    return longest_context(planner, policy, parse_size(host_memory, total_memory_bytes()))


def plan_steps(
    planner: Planner,
    plan: MemoryPlan,
    num_tokens: int,
    max_masked: int,
    diffusion: DiffusionParams | None = None,
) -> list[PlannedPass]:
    """Plan passes over a sequence of `num_tokens` in the plan's workspace.

    One for each of `MASKED_SHARES` of `max_masked` masks, with the rule and guidance of
    `diffusion`.
    """
    passes = planner.pass_planner
    if passes is None:  # a workspace for its own passes, which take less than a whole tile
        passes = replace(planner.plan_long_passes(), short=planner.registrar().graph)
    asked = make_kind(planner.config.decoding).logit_needs(diffusion or DiffusionParams())
    num_rows = (2 if asked.is_guided else 1) * num_tokens
    has_experts = planner.memory.experts is not None
    operators = [op for op in OPERATOR_TILES if op != "experts" or has_experts]
    steps = []
    for num_masked in dict.fromkeys(max(1, round(share * max_masked)) for share in MASKED_SHARES):
        counts = Counts(num_rows, num_tokens, num_tokens, num_masked, (asked,))
        found = passes.plan(counts, plan.fast_tier.workspace_bytes)
        steps.append(
            PlannedPass(
                num_tokens=num_rows,
                num_masked=num_masked,
                chunks={op: found.chunks[op] for op in operators if op in found.chunks},
                needed_bytes=found.needed_bytes,
                binding=found.binding,
                held=tuple(sorted(passes.held(found), key=lambda held: -held[1])),
            )
        )
    return steps


def longest_context(planner: Planner, policy: str, budget_bytes: int) -> int:
    """Return the longest context that fits a budget; 0 if none does.

    In exact mode only: other modes' memory grows by rows and keys separately.
    """

    def fits(num_tokens: int) -> bool:
        context = ContextFacts.of(planner.config, num_tokens, CacheMode.EXACT)
        return least_bytes(planner.at_context(context), policy) <= budget_bytes

    low, high = 0, 1  # fits, is to be tried
    while high <= MAX_CONTEXT and fits(high):
        low, high = high, 2 * high
    longer = range(low + 1, min(high, MAX_CONTEXT + 1))
    return low + bisect_left(longer, True, key=lambda num_tokens: not fits(num_tokens))
