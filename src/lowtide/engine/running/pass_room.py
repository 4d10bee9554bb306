"""The memory that passes compute in, and who plans it while the model runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.engine.opening.model import OpenModel
from lowtide.engine.planning.elastic_plan import group_bytes
from lowtide.engine.planning.registering import largest_counts, planner_of, register
from lowtide.hardware import available_memory_bytes
from lowtide.kernels.choice import HOST
from lowtide.memory.arena import Arena, ElasticArena
from lowtide.memory.cuda_streams import plan_errors
from lowtide.memory.host_pages import HostPages
from lowtide.memory.pages import PageBudget
from lowtide.memory.pass_plans import FixedRoom, PagedRoom, PassPlans
from lowtide.memory.planner import UNPLANNED, ArenaPlaces
from lowtide.plan import MemoryPlan


class WorkspaceMemory(NamedTuple):
    """What a `Workspace` is made of."""

    buffer: Tensor  # uint8
    placement: ArenaPlaces
    plans: PassPlans | None  # None: all passes have the plan of the largest


def workspace_memory(
    opened: OpenModel, plan: MemoryPlan, device: torch.device, shared: PagedRoom | None = None
) -> WorkspaceMemory:
    """A workspace of the planned size, or `shared` memory. Raises PlanError if it is refused."""
    num_bytes, planner = plan.fast_tier.workspace_bytes, planner_of(opened)
    if planner is None:
        placement = register(opened).graph.placement
        return WorkspaceMemory(_range(placement.arena_bytes, device), placement, None)
    if shared is not None:
        return WorkspaceMemory(shared.bytes, UNPLANNED, PassPlans(planner, shared))
    is_bound = opened.options.elastic
    if device == HOST and (is_bound or sys.platform.startswith("linux")):
        budget = PageBudget(num_bytes + group_bytes(num_bytes) - 1)
        room = paged_room(num_bytes, budget, is_bound=is_bound)
        return WorkspaceMemory(room.bytes, UNPLANNED, PassPlans(planner, room))
    largest = planner.plan(largest_counts(opened), num_bytes)
    buffer = _range(num_bytes - largest.library_bytes, device)
    fixed = FixedRoom(num_bytes, buffer.numel())
    return WorkspaceMemory(buffer, UNPLANNED, PassPlans(planner, fixed))


def paged_room(
    num_bytes: int,
    budget: PageBudget,
    is_wanted: Callable[[], bool] | None = None,
    is_bound: bool = False,
) -> PagedRoom:
    """Addresses for so many bytes, with an account of the budget; the rest as in `PagedRoom`."""
    account, pages = budget.open("workspace"), HostPages(num_bytes, group_bytes(num_bytes))
    moves = is_bound or is_wanted is not None
    free_bytes = available_memory_bytes if moves else None
    arena = ElasticArena(pages, account, free_bytes=free_bytes)
    return PagedRoom(arena, account, is_wanted, is_bound)


def _range(num_bytes: int, device: torch.device) -> Tensor:
    if device == HOST:
        return Arena(num_bytes).bytes
    with plan_errors(num_bytes, "GPU memory for workspace"):
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
