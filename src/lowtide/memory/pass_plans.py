"""A plan for each pass, and the memory that it says: what a workspace asks before a pass begins."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from lowtide.errors import PlanError
from lowtide.memory.arena import ElasticArena
from lowtide.memory.chunking import Counts
from lowtide.memory.pages import PageAccount
from lowtide.memory.pass_planner import PassPlan, PassPlanner

REMEMBERED_PASSES = 16
"""How many passes' memory is kept for the next one: those of requests that take turns."""


class PassRoom(Protocol):
    """What passes have room in: a range of addresses, and what libraries take beside it."""

    @property
    def free_bytes(self) -> int:
        """For the next pass, range and libraries together, without asking other accounts."""
        ...

    @property
    def can_ask(self) -> bool:
        """Whether others may give way for more."""
        ...

    @property
    def is_wanted(self) -> bool:
        """Whether others have a better use for what a pass can do without."""
        ...

    def range_bytes(self, free_bytes: int) -> int:
        """How much of that the range may be."""
        ...

    def hold(self, plan: PassPlan) -> None:
        """Has the memory ready. Nothing of the range is alive."""
        ...

    def rest(self) -> None:
        """Told that no pass is to come soon. Nothing of the range is alive."""
        ...


class PassPlans:
    """The plans of a model's passes as they come."""

    def __init__(self, planner: PassPlanner, room: PassRoom) -> None:
        self.planner = planner
        self._room = room
        self.current: PassPlan | None = None  # of the pass under way, or the last one

    def for_pass(self, counts: Counts) -> PassPlan:
        """Raises PlanError where the pass cannot be divided into so little, PageError where
        nothing gives way or the system refuses; the next pass may be another."""
        plan = self._plan(counts)
        self._room.hold(plan)
        self.current = plan
        return plan

    def rest(self) -> None:
        """With nothing to do: gives memory back, where that is wanted."""
        self._room.rest()

    def _plan(self, counts: Counts) -> PassPlan:
        room, free_bytes = self._room, self._room.free_bytes
        if not room.is_wanted:
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

    @property
    def is_wanted(self) -> bool:
        return False

    def range_bytes(self, free_bytes: int) -> int:
        return self._range_bytes

    def hold(self, plan: PassPlan) -> None:
        pass

    def rest(self) -> None:
        pass


class PagedRoom:
    """A range whose memory comes and goes on account of a budget, with what libraries take."""

    def __init__(
        self,
        arena: ElasticArena,
        account: PageAccount,
        is_wanted: Callable[[], bool] | None = None,
        is_bound: bool = False,
    ) -> None:
        """is_wanted: see `PassRoom`; by default nothing is wanted. is_bound: a pass has the memory
        of its own plan and no more; the rest, and all of it between requests, is the system's."""
        self._arena = arena
        self._account = account
        self._is_wanted = is_wanted
        self._is_bound = is_bound
        self._library_bytes = 0
        # What the last passes needed: bytes of the range, and of libraries.
        self._held: deque[tuple[int, int]] = deque(maxlen=REMEMBERED_PASSES)
        self.bytes = arena.bytes  # uint8: only what the present plan has may be used

    @property
    def free_bytes(self) -> int:
        """What it has and what is free, up to the last page."""
        free_bytes = self._account.num_bytes + self._account.budget.num_free_bytes
        return free_bytes - (self._arena.group_bytes - 1)

    @property
    def can_ask(self) -> bool:
        others = self._account.budget.accounts
        return any(other is not self._account and other.give_way is not None for other in others)

    @property
    def is_wanted(self) -> bool:
        return self._is_wanted is not None and self._is_wanted()

    def gives_way(self) -> None:
        """Lets others of the budget have its memory between passes."""
        self._account.give_way = self._give_way

    def range_bytes(self, free_bytes: int) -> int:
        return min(free_bytes, self._arena.part_bytes)

    def hold(self, plan: PassPlan) -> None:
        arena, range_bytes = self._arena, plan.placement.arena_bytes
        library_more = max(0, plan.library_bytes - self._library_bytes)
        num_more = arena.missing_bytes(0, range_bytes) + library_more
        if self._is_bound or num_more > self._account.budget.num_free_bytes:
            self.shrink(plan)
        if library_more:
            self._account.draw(library_more)
            self._library_bytes = plan.library_bytes
        arena.commit(0, range_bytes)
        self._held.append((range_bytes, plan.library_bytes))

    def rest(self) -> None:
        if self._is_bound:
            self.shrink()

    def shrink(self, plan: PassPlan | None = None) -> None:
        """Gives back what a plan has no need of; all of it without one."""
        if plan is None:
            self._keep(0, 0)
        else:
            self._keep(plan.placement.arena_bytes, plan.library_bytes)

    def trim(self) -> None:
        """Gives back, between passes, what none of the last ones had need of."""
        if self._held:
            self._keep(*map(max, zip(*self._held, strict=True)))

    def close(self) -> None:
        """Gives back everything; nothing may use it any more."""
        self._account.give_way = None
        self._keep(0, 0)
        self._arena.close()

    def _give_way(self, num_bytes: int) -> None:
        library_bytes = max(0, self._library_bytes - num_bytes)
        num_bytes -= self._library_bytes - library_bytes
        self._keep(max(0, self._arena.committed_bytes - num_bytes), library_bytes)

    def _keep(self, range_bytes: int, library_bytes: int) -> None:
        """No more than so much."""
        self._arena.release(range_bytes, self._arena.part_bytes)
        if library_bytes < self._library_bytes:
            self._account.give_back(self._library_bytes - library_bytes)
            self._library_bytes = library_bytes
