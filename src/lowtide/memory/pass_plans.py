"""Chooses a plan for each pass, and provides its memory before the pass begins."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from lowtide.errors import PlanError
from lowtide.memory.arena import PagedArena
from lowtide.memory.chunking import Counts
from lowtide.memory.pass_planner import PassPlan, PassPlanner

REMEMBERED_PASSES = 16
"""Number of recent passes whose memory is kept for the next: those of requests taking turns."""


class PassPlans:
    """Plans a model's passes as they come."""

    def __init__(self, planner: PassPlanner, room: FixedRoom | PagedRoom) -> None:
        self.planner = planner
        self.room = room
        self.current: PassPlan | None = None  # of the current or latest pass

    def for_pass(self, counts: Counts) -> PassPlan:
        """Plan a pass and provide its memory.

        Raises PlanError if the pass cannot be divided finely enough, PageError if no memory can be
        had; the next pass may differ.
        """
        plan = self._plan(counts)
        self.room.hold(plan)
        self.current = plan
        return plan

    def rest(self) -> None:
        """Return memory while idle, where no expert could use it."""
        self.room.rest()

    def _plan(self, counts: Counts) -> PassPlan:
        room, free_bytes = self.room, self.room.free_bytes
        if not room.is_wanted:
            try:
                return self.planner.plan(counts, free_bytes, room.range_bytes(free_bytes))
            except PlanError:
                if not room.can_ask:
                    raise
        return self.planner.plan(counts, self.planner.least_bytes(counts))


class FixedRoom:
    """A range whose memory is always there."""

    can_ask = is_wanted = False

    def __init__(self, num_bytes: int, range_bytes: int) -> None:
        """num_bytes: of the range and of libraries together; range_bytes: of the range."""
        self.free_bytes = num_bytes
        self._range_bytes = range_bytes

    def range_bytes(self, free_bytes: int) -> int:
        return self._range_bytes

    def hold(self, plan: PassPlan) -> None:
        """Do nothing: the memory is there."""

    def rest(self) -> None:
        """Do nothing: the memory stays."""


class PagedRoom:
    """A range whose memory, with that of libraries, grows and shrinks within a budget."""

    def __init__(self, arena: PagedArena, is_wanted: Callable[[], bool] | None = None) -> None:
        """is_wanted: returns True if another account could use memory that a pass can spare.

        Without it a pass has only the memory of its own plan; the rest, and everything between
        requests, is returned to the system.
        """
        self.arena = arena
        self._account = arena.account
        self._is_wanted = is_wanted
        self._library_bytes = 0
        # What the last passes needed: bytes of the range, and of libraries.
        self._held: deque[tuple[int, int]] = deque(maxlen=REMEMBERED_PASSES)
        self.bytes = arena.bytes  # uint8: only what the present plan has may be used

    @property
    def free_bytes(self) -> int:
        """Bytes for the next pass, range and libraries together, without asking other accounts."""
        free_bytes = self._account.num_bytes + self._account.budget.num_free_bytes
        return free_bytes - (self.arena.group_bytes - 1)

    @property
    def can_ask(self) -> bool:
        """True if other accounts may release memory."""
        others = self._account.budget.accounts
        return any(other is not self._account and other.give_way is not None for other in others)

    @property
    def is_wanted(self) -> bool:
        """True if another account could use memory that a pass can spare."""
        return self._is_wanted is not None and self._is_wanted()

    def gives_way(self) -> None:
        """Let other accounts take this memory between passes."""
        self._account.give_way = self._give_way

    def range_bytes(self, free_bytes: int) -> int:
        """Return the share of `free_bytes` that the range may have."""
        return min(free_bytes, self.arena.part_bytes)

    def hold(self, plan: PassPlan) -> None:
        """Provide the memory of a pass. Nothing of the range is alive."""
        arena, range_bytes = self.arena, plan.placement.arena_bytes
        library_more = max(0, plan.library_bytes - self._library_bytes)
        num_more = arena.missing_bytes(0, range_bytes) + library_more
        if self._is_wanted is None or num_more > self._account.budget.num_free_bytes:
            self.shrink(range_bytes, plan.library_bytes)
        if library_more:
            self._account.draw(library_more)
            self._library_bytes = plan.library_bytes
        arena.commit(0, range_bytes)
        self._held.append((range_bytes, plan.library_bytes))

    def rest(self) -> None:
        """Release memory when no pass is expected soon. Nothing of the range is alive."""
        if self._is_wanted is None:
            self.shrink()

    def shrink(self, range_bytes: int = 0, library_bytes: int = 0) -> None:
        """Release all but these bytes of the range and of libraries."""
        self.arena.release(range_bytes, self.arena.part_bytes)
        if library_bytes < self._library_bytes:
            self._account.give_back(self._library_bytes - library_bytes)
            self._library_bytes = library_bytes

    def trim(self) -> None:
        """Release, between passes, memory that none of the recent ones needed."""
        if self._held:
            self.shrink(*map(max, zip(*self._held, strict=True)))

    def close(self) -> None:
        """Release everything; the range must not be used afterwards."""
        self._account.give_way = None
        self.shrink()
        self.arena.close()

    def _give_way(self, num_bytes: int) -> None:
        library_bytes = max(0, self._library_bytes - num_bytes)
        num_bytes -= self._library_bytes - library_bytes
        self.shrink(max(0, self.arena.committed_bytes - num_bytes), library_bytes)
