"""Workspace: memory for a forward pass's intermediate results.

A model never allocates a transient: it takes named buffers from a workspace, inside scopes, and may
give one back before its scope ends. The same forward pass runs over two kinds of workspace: a
`Registrar`, which computes nothing (tensors are on the meta device) and draws the pass's graph
(`memory/planner.py`), and a `Workspace`, which hands out views of one buffer at planned places.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.core import align_up
from lowtide.errors import InternalError
from lowtide.memory.chunking import (
    EACH_TILE,
    OPERATOR_TILES,
    TILE_ROWS,
    Counts,
    num_tiles,
    rows_together,
    tiles,
)
from lowtide.memory.pass_plans import PassPlans
from lowtide.memory.planner import (
    UNPLANNED,
    ArenaPlaces,
    Graph,
    LibraryOutput,
    Path,
    Place,
    Recording,
    lowest_gap,
)

__all__ = ["TILE_ROWS", "Buffers", "Registrar", "State", "Workspace", "tiles"]

MAX_STATES = 4096
"""Number of cached states; decoding needs some hundred, prompts of all lengths many."""


class Alive(NamedTuple):
    """A live buffer."""

    path: Path
    place: Place
    view: Tensor


class State:
    """A node of the allocation trie: live buffers and the sequence of calls that led here.

    The states of all passes form a tree whose branches are the next calls, so repeated calls cost
    one look-up; creating a view costs as much as a small operator.
    """

    __slots__ = ("after", "alive", "is_planned", "library", "path", "top", "view")

    def __init__(
        self,
        path: Path,
        alive: tuple[Alive, ...],
        library: tuple[LibraryOutput, ...] = (),
        is_planned: bool = True,
    ) -> None:
        """is_planned: True if the plan contains the path to this state."""
        self.path = path
        self.alive = alive
        self.library = library
        self.is_planned = is_planned
        self.top = max(
            (one.place.stop for one in alive), default=0
        )  # end of the highest live buffer
        self.view = alive[-1].view if alive else torch.empty(0)  # of the latest buffer
        self.after: dict[object, State] = {}


class Buffers(ABC):
    """A model's view of its workspace: live buffers, and calls that change them."""

    def __init__(self, chunks: Mapping[str, int] = EACH_TILE) -> None:
        """chunks: number of chunks per operator; other operators take each tile by itself."""
        self._chunks = chunks
        self._start = self.state = State((), ())  # callers keep a state and set it again
        self._num_states = 0

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Take an uninitialised buffer that lives until the enclosing scope ends."""
        try:
            self.state = state = self.state.after[name, shape, dtype]
        except KeyError:
            taken = self._taken(name, shape, dtype)
            self.state = state = self._keep((name, shape, dtype), taken)
        return state.view

    def take_all(self, *wanted: tuple[str, tuple[int, ...], torch.dtype]) -> list[Tensor]:
        """Take several buffers one after the other; each as in `take`."""
        views: list[Tensor] = []
        for name, shape, dtype in wanted:
            state = self.state.after.get((name, shape, dtype))
            if state is None:
                views.append(self.take(name, shape, dtype))
            else:
                self.state = state
                views.append(state.view)
        return views

    def give_back(self, *buffers: Tensor) -> None:
        """Release buffers before their scope ends; other tensors are ignored.

        A buffer of an outer scope loses its contents, and its place is reserved again when this
        scope ends.
        """
        for buffer in buffers:
            try:  # an identity stays a buffer's own as long as there are states after its taking
                self.state = self.state.after[id(buffer)]
            except KeyError:
                views = [one.view for one in self.state.alive]
                dead = next((i for i, view in enumerate(views) if view is buffer), None)
                if dead is not None:
                    self.state = self._keep(id(buffer), self._given_back(dead))

    def together(self, operator: str, num_rows: int) -> int:
        """Return the number of rows of a chunk: the whole tiles that an operator takes together."""
        tile_rows = OPERATOR_TILES[operator]
        num_chunks = self._chunks.get(operator) or num_tiles(num_rows, tile_rows)
        return rows_together(num_rows, tile_rows, num_chunks)

    def scope(self) -> AbstractContextManager[None]:
        """Return a context that releases, at its end, what was taken inside."""
        return _Scope(self)

    def begin(self, counts: Counts) -> None:
        """Release everything and begin a pass of up to these counts.

        Raises PlanError if there is no room for it.
        """
        self.reset()

    def reset(self) -> None:
        """Release everything."""
        self.state = self._start

    @abstractmethod
    def library(self, name: str, num_bytes: int) -> None:
        """Declare memory that an operator without an `out=` form allocates until the scope ends."""

    def _keep(self, step: object, state: State) -> State:
        if self._num_states == MAX_STATES:
            self._start.after.clear()
            self._num_states = 0
        self._num_states += 1
        self.state.after[step] = state
        return state

    def _taken(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> State:
        before, num_bytes = self.state, math.prod(shape) * dtype.itemsize
        path = (*before.path, name)
        start = self._planned_start(path, num_bytes) if before.is_planned else None
        is_planned = start is not None
        if start is None:
            start = lowest_gap((one.place for one in before.alive), align_up(num_bytes))
        taken = Alive(
            path, Place(start, align_up(num_bytes)), self._view(name, start, shape, dtype)
        )
        return State(path, (*before.alive, taken), before.library, is_planned)

    def _given_back(self, dead: int) -> State:
        before = self.state
        alive = (*before.alive[:dead], *before.alive[dead + 1 :])
        return State((*before.path, f"-{dead}"), alive, before.library, before.is_planned)

    def _planned_start(self, path: Path, num_bytes: int) -> int | None:
        """Return the planned start for `num_bytes` on this path, or None."""
        return None

    @abstractmethod
    def _view(
        self, name: str, start: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor: ...


class Workspace(Buffers):
    """Hands out 64-byte-aligned views of one buffer; allocates nothing.

    Buffers unknown to the plan are placed by first fit beside live ones, and so are all taken while
    they live.
    """

    def __init__(
        self, buffer: Tensor, plan: ArenaPlaces = UNPLANNED, plans: PassPlans | None = None
    ) -> None:
        """buffer: uint8, of the plan's size or of the size counted by a `Registrar` for a pass.

        plans: gives each pass its own plan, and its memory in `buffer`.
        """
        super().__init__()
        self._buffer = buffer
        self.plan = plan
        self.plans = plans
        self._num_usable = buffer.numel() if plans is None else plan.arena_bytes

    def begin(self, counts: Counts) -> None:
        if self.plans is not None:
            plan = self.plans.for_pass(counts)
            if plan.placement is not self.plan:
                self.adopt(plan.placement, plan.chunks)
        self.reset()

    def library(self, name: str, num_bytes: int) -> None:
        """Do nothing: only the registrar counts library outputs."""

    def adopt(self, placement: ArenaPlaces, chunks: Mapping[str, int]) -> None:
        """Switch to another plan, with nothing alive. Between passes only."""
        if placement.arena_bytes > self._buffer.numel():
            raise InternalError(
                f"A plan of {placement.arena_bytes} bytes is adopted in a workspace of "
                f"{self._buffer.numel()}."
            )
        self.plan, self._chunks = placement, chunks
        if self.plans is not None:
            self._num_usable = placement.arena_bytes
        self._start = self.state = State((), ())
        self._num_states = 0

    def _planned_start(self, path: Path, num_bytes: int) -> int | None:
        place = self.plan.places.get(path)
        return None if place is None or place.num_bytes < num_bytes else place.start

    def _view(self, name: str, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        stop = start + math.prod(shape) * dtype.itemsize
        if stop > self._num_usable:
            raise InternalError(
                f"Workspace buffer {name} {list(shape)} ends at {stop} bytes, "
                f"past the planned {self._num_usable}."
            )
        return self._buffer[start:stop].view(dtype).view(shape)


class Registrar(Buffers):
    """Draws the graph of a forward pass without computing.

    `arena_bytes` is the size that a `Workspace` without a plan must have.
    """

    def __init__(self, chunks: Mapping[str, int] = EACH_TILE) -> None:
        super().__init__(chunks)
        self._recording = Recording()
        self.arena_bytes = 0

    @property
    def graph(self) -> Graph:
        """The graph of everything run so far."""
        return self._recording.graph()

    def library(self, name: str, num_bytes: int) -> None:
        before = self.state
        state = before.after.get((name, num_bytes))
        if state is None:
            library = (*before.library, LibraryOutput(name, num_bytes))
            state = self._keep((name, num_bytes), State(before.path, before.alive, library))
        self.state = state

    def _keep(self, step: object, state: State) -> State:
        self.arena_bytes = max(self.arena_bytes, state.top)
        self._recording.note([(one.path, one.view.nbytes) for one in state.alive], state.library)
        return super()._keep(step, state)

    def _view(self, name: str, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")


class _Scope:
    """Context of `Workspace.scope` without a generator: layers open some ten scopes each."""

    __slots__ = ("_mark", "_owner")

    def __init__(self, owner: Buffers) -> None:
        self._owner = owner

    def __enter__(self) -> None:
        self._mark = self._owner.state

    def __exit__(self, *_: object) -> None:
        self._owner.state = self._mark
