"""A workspace that shows who reads what is not theirs any more, or not yet: for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.errors import InternalError
from lowtide.memory.pass_plans import PassPlans
from lowtide.memory.planner import UNPLANNED, ArenaPlaces
from lowtide.memory.workspace import State, Workspace

POISON = 0xFF
"""In every byte: NaN in all floating-point types."""


class PoisonedWorkspace(Workspace):
    """Whatever lies outside of what is alive is NaN, at all times.

    `touched_bytes` is how far it was filled.
    """

    def __init__(
        self, buffer: Tensor, plan: ArenaPlaces = UNPLANNED, plans: PassPlans | None = None
    ) -> None:
        self._state: State | None = None
        super().__init__(buffer, plan, plans)
        self.touched_bytes = 0
        self._poison_all()

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Raises InternalError where the plan has put it over something that is alive."""
        others = self.state.alive
        view = super().take(name, shape, dtype)
        place = self.state.alive[-1].place
        for other in others:
            if place.start < other.place.stop and other.place.start < place.stop:
                raise InternalError(f"{name} at {place} is over {other.path[-1]} at {other.place}.")
        self.touched_bytes = max(self.touched_bytes, place.start + view.nbytes)
        return view

    @property
    def state(self) -> State:
        assert self._state is not None
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        before, self._state = self._state, state
        if before is not None:
            self._poison(before)

    def take_all(self, *wanted: tuple[str, tuple[int, ...], torch.dtype]) -> list[Tensor]:
        return [self.take(*each) for each in wanted]

    def reset(self) -> None:
        super().reset()
        self._poison_all()

    def _poison_all(self) -> None:
        self._buffer[: self._num_usable].fill_(POISON)

    def _poison(self, before: State) -> None:
        """Whatever has died."""
        alive = {one.path for one in self.state.alive}
        for one in before.alive:
            if one.path not in alive:
                one.view.view(-1).view(torch.uint8).fill_(POISON)
