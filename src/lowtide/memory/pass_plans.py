"""A plan for each pass, and the memory that it says: what a workspace asks before a pass begins."""

from __future__ import annotations

from typing import Protocol

from lowtide.errors import PlanError
from lowtide.memory.arena import ElasticArena
from lowtide.memory.chunking import Counts
from lowtide.memory.pages import PageAccount
from lowtide.memory.pass_planner import PassPlan, PassPlanner


class Room(Protocol):
    """What passes have room in: a range of addresses, and what libraries take beside it."""

    @property
    def free_bytes(self) -> int:
        """For the next pass, range and libraries together, without asking anybody."""
        ...

    @property
    def can_ask(self) -> bool:
        """Whether others may give way for more."""
        ...

    def range_bytes(self, free_bytes: int) -> int:
        """How much of that the range may be."""
        ...

    def hold(self, plan: PassPlan) -> None:
        """Has the memory ready. Nothing of the range is alive."""
        ...


class PassPlans:
    """The plans of a model's passes as they come."""

    def __init__(self, planner: PassPlanner, room: Room) -> None:
        self.planner = planner
        self._room = room

    def for_pass(self, counts: Counts) -> PassPlan:
        """Raises PlanError where the pass cannot be divided into so little, PageError where nobody
        gives way or the system refuses; the next pass may be another."""
        plan = self._plan(counts)
        self._room.hold(plan)
        return plan

    def _plan(self, counts: Counts) -> PassPlan:
        room, free_bytes = self._room, self._room.free_bytes
        try:
            return self.planner.plan(counts, free_bytes, room.range_bytes(free_bytes))
        except PlanError:
            if not room.can_ask:
                raise
        return self.planner.plan(counts, self.planner.least_bytes(counts))


class FixedRoom:
    """A range whose memory is there all the time."""

    def __init__(self, num_bytes: int, range_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._range_bytes = range_bytes

    @property
    def free_bytes(self) -> int:
        return self._num_bytes

    @property
    def can_ask(self) -> bool:
        return False

    def range_bytes(self, free_bytes: int) -> int:
        return self._range_bytes

    def hold(self, plan: PassPlan) -> None:
        pass


class PagedRoom:
    """A range whose memory comes and goes on account of a budget, with what libraries take."""

    def __init__(self, arena: ElasticArena, account: PageAccount) -> None:
        self._arena = arena
        self._account = account
        self._library_bytes = 0
        self.bytes = arena.bytes  # uint8: only what the present plan has may be used

    @property
    def free_bytes(self) -> int:
        """What it has and what nobody has, up to the last page."""
        free_bytes = self._account.num_bytes + self._account.budget.num_free_bytes
        return free_bytes - (self._arena.group_bytes - 1)

    @property
    def can_ask(self) -> bool:
        others = self._account.budget.accounts
        return any(other is not self._account and other.give_way is not None for other in others)

    def range_bytes(self, free_bytes: int) -> int:
        return free_bytes

    def hold(self, plan: PassPlan) -> None:
        arena, range_bytes = self._arena, plan.placement.arena_bytes
        num_more = arena.missing_bytes(0, range_bytes) + plan.library_bytes - self._library_bytes
        if num_more > self._account.budget.num_free_bytes:
            self.shrink(plan)
        if plan.library_bytes > self._library_bytes:
            self._account.draw(plan.library_bytes - self._library_bytes)
            self._library_bytes = plan.library_bytes
        arena.commit(0, range_bytes)

    def shrink(self, plan: PassPlan | None = None) -> None:
        """Gives back what a plan has no need of; all of it without one."""
        range_bytes = 0 if plan is None else plan.placement.arena_bytes
        library_bytes = 0 if plan is None else plan.library_bytes
        self._arena.release(range_bytes, self._arena.part_bytes)
        if library_bytes < self._library_bytes:
            self._account.give_back(self._library_bytes - library_bytes)
            self._library_bytes = library_bytes
