"""How the passes of a bidirectional model fit into a plan: what operators take together at each
share of masks, what binds, and how long a context can be.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from lowtide.config import parse_size
from lowtide.core import CacheMode
from lowtide.decode.kinds import make_kind
from lowtide.engine.opening.model import OpenModel
from lowtide.engine.planning.plan import least_bytes, offered_bytes
from lowtide.engine.planning.registering import plan_long_passes, planner_of, register
from lowtide.hardware.memory import total_memory_bytes
from lowtide.memory.chunking import OPERATOR_TILES, Counts
from lowtide.memory.pass_planner import PassPlan, PassPlanner
from lowtide.params import DiffusionParams
from lowtide.plan import MemoryPlan

MASKED_SHARES = (1.0, 0.75, 0.5, 0.25, 0.1)
MAX_CONTEXT = 1 << 24
"""No longer context is looked for."""


class PlannedPass(NamedTuple):
    """A pass over a whole sequence. `chunks`: into how many each operator divides its rows, of
    those that take more than a tile together; `held`: what is alive when most of the range is, and
    what libraries hold at most, the largest first: together what the pass needs.
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
    """What a plan's passes come to. `fixed`: what lies beside them in the budget, by name."""

    longest_context: int | None  # within `offered_bytes`; None: with an approximate cache
    most_tried: int  # no longer one was looked for
    offered_bytes: int
    max_positions: int  # that the model was made for
    workspace_bytes: int
    budget_bytes: int
    fixed: tuple[tuple[str, int], ...]
    steps: tuple[PlannedPass, ...]


def plan_passes(opened: OpenModel, plan: MemoryPlan) -> PlannedPasses:
    """The passes of a bidirectional model: steps of one request that fills the context."""
    tier, is_exact = plan.fast_tier, opened.cache_mode is CacheMode.EXACT
    num_offered = offered_bytes(opened, plan)
    return PlannedPasses(
        longest_context=longest_context(opened, num_offered) if is_exact else None,
        most_tried=MAX_CONTEXT,
        offered_bytes=num_offered,
        max_positions=opened.config.max_positions,
        workspace_bytes=tier.workspace_bytes,
        budget_bytes=tier.budget_bytes,
        fixed=(
            ("dense weights", tier.dense_bytes),
            ("keys and values", tier.kv_cache_bytes),
            ("read ring", tier.ring_bytes),
            ("expert slots", tier.num_slots * tier.slot_bytes),
        ),
        steps=tuple(plan_steps(opened, plan, opened.context, opened.context)),
    )


def longest_context_of(opened: OpenModel) -> int:
    """Within a host budget that was given; 0 where none was, or where there is no telling."""
    given = opened.options.host_memory
    is_host = opened.device == "cpu"
    if given == "auto" or not is_host or opened.cache_mode is not CacheMode.EXACT:
        return 0
    return longest_context(opened, parse_size(given, total_memory_bytes()))


def plan_steps(
    opened: OpenModel,
    plan: MemoryPlan,
    num_tokens: int,
    max_masked: int,
    diffusion: DiffusionParams | None = None,
) -> list[PlannedPass]:
    """Passes over a sequence of so many tokens, in the plan's workspace: with `MASKED_SHARES` of so
    many masks, the rule and the guidance of `diffusion`.
    """
    planner = planner_of(opened)
    if planner is None:  # a workspace for its own passes, which take less than a whole tile
        planner = replace(plan_long_passes(opened), short=register(opened).graph)
    asked = make_kind(opened.config.decoding).logit_needs(diffusion or DiffusionParams())
    num_rows = (2 if asked.is_guided else 1) * num_tokens
    steps = []
    for num_masked in dict.fromkeys(max(1, round(share * max_masked)) for share in MASKED_SHARES):
        counts = Counts(num_rows, num_tokens, num_tokens, num_masked, (asked,))
        steps.append(
            _planned(opened, planner, planner.plan(counts, plan.fast_tier.workspace_bytes))
        )
    return steps


def longest_context(opened: OpenModel, budget_bytes: int) -> int:
    """The most tokens of context for which a budget is enough; 0 where none is.

    In exact mode: other caches have rows of a pass and the keys that it sees grow apart.
    """

    def fits(num_tokens: int) -> bool:
        return least_bytes(replace(opened, context=num_tokens)) <= budget_bytes

    low, high = 0, 1  # fits, is to be tried
    while high <= MAX_CONTEXT and fits(high):
        low, high = high, 2 * high
    longer = range(low + 1, min(high, MAX_CONTEXT + 1))
    return low + bisect_left(longer, True, key=lambda num_tokens: not fits(num_tokens))


def _planned(opened: OpenModel, planner: PassPlanner, found: PassPlan) -> PlannedPass:
    operators = [op for op in OPERATOR_TILES if op != "experts" or opened.config.experts]
    return PlannedPass(
        num_tokens=found.counts.tokens,
        num_masked=found.counts.logit_rows,
        chunks={op: found.chunks[op] for op in operators if op in found.chunks},
        needed_bytes=found.needed_bytes,
        binding=found.binding,
        held=tuple(sorted(planner.held(found), key=lambda held: -held[1])),
    )
