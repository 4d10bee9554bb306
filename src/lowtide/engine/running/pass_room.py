"""Makes the memory in which passes compute."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lowtide.engine.planning.budget_division import group_bytes
from lowtide.engine.planning.planner import Planner
from lowtide.hardware.memory import available_memory_bytes
from lowtide.kernels.choice import HOST
from lowtide.memory.arena import Arena, PagedArena
from lowtide.memory.cuda_streams import plan_errors
from lowtide.memory.host_pages import HostPages
from lowtide.memory.pages import PageBudget
from lowtide.memory.pass_plans import FixedRoom, PagedRoom, PassPlans
from lowtide.memory.workspace import Workspace


def open_workspace(
    planner: Planner,
    num_bytes: int,
    device: torch.device,
    shared: PagedRoom | None = None,
) -> Workspace:
    """Make a workspace of the planned size, or over `shared` memory. Raise PlanError if refused."""
    passes = planner.pass_planner
    if passes is None:
        placement = planner.registrar().graph.placement
        return Workspace(_range(placement.arena_bytes, device), placement)
    if shared is not None:
        return Workspace(shared.bytes, plans=PassPlans(passes, shared))
    if device == HOST:
        budget = PageBudget(num_bytes + group_bytes(num_bytes) - 1)
        room = paged_room(num_bytes, budget)
        return Workspace(room.bytes, plans=PassPlans(passes, room))
    largest = passes.plan(planner.largest_counts, num_bytes)
    buffer = _range(num_bytes - largest.library_bytes, device)
    return Workspace(buffer, plans=PassPlans(passes, FixedRoom(num_bytes, buffer.numel())))


def paged_room(
    num_bytes: int,
    budget: PageBudget,
    is_wanted: Callable[[], bool] | None = None,
) -> PagedRoom:
    """Reserve addresses for `num_bytes`, with an account of the budget; else as `PagedRoom`."""
    account, pages = budget.open("workspace"), HostPages(num_bytes, group_bytes(num_bytes))
    arena = PagedArena(pages, account, free_bytes=available_memory_bytes)
    return PagedRoom(arena, is_wanted)


def _range(num_bytes: int, device: torch.device) -> Tensor:
    if device == HOST:
        return Arena(num_bytes).bytes
    with plan_errors(num_bytes, "GPU memory for workspace"):
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
