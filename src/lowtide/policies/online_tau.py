"""`tau=auto`: the interval that would have been fastest over the last steps.

TIDE computes its interval beforehand, from a drift and a miss rate; its Eq. 7 adds times that in
fact overlap. Here the last steps' demand is replayed with the machine's costs, as `Tide` would
place experts, at all candidate intervals at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from lowtide.core import BoolArray, Costs, FloatArray, IntArray, Step, StepKind
from lowtide.policies.tau import TAUS

_FIRST = 4  # steps until the first estimate; then after twice as many, and so on to a window
_WINDOW = 32  # steps whose demand is kept
HYSTERESIS = 0.01  # share of the time that another interval has to save


class TauChange(NamedTuple):
    """A change of the interval, as `OnlineTau` reports it."""

    num_steps: int  # seen until then
    old: int
    new: int
    saved: float  # share of the time of the last steps


class OnlineTau:
    """Chooses the interval from the demand of the last steps in a few layers.

    From time to time it switches to the interval that would have been fastest, if that is fast
    enough to matter. Knows nothing of residents: the replay starts with the best ones of its first
    step.
    """

    def __init__(
        self,
        num_experts: int,
        budget: int,
        costs: Costs,
        *,
        waits: bool = False,
        tau: int = 4,
        watched: Iterable[int] = (0,),
        on_change: Callable[[TauChange], None] = lambda change: None,
    ) -> None:
        """budget: residents of a layer. waits: a refresh waits for the experts it admits."""
        self.tau = tau
        self._budget = min(budget, num_experts)
        self._costs = costs
        self._waits = waits
        self._on_change = on_change
        self._watched = list(watched)
        self._hits = np.zeros((_WINDOW, len(self._watched), num_experts), np.int64)
        self._index = np.zeros(_WINDOW, np.int64)
        self._num_steps = 0

    def observe(self, step: Step, hits: IntArray) -> None:
        """Learn a pass' demand; prefill passes and unwatched layers are ignored.

        hits [num_layers, num_experts]
        """
        watched = hits[self._watched]
        if step.kind is StepKind.PREFILL or not watched.any():
            return
        row = self._num_steps % _WINDOW
        self._hits[row], self._index[row] = watched, step.index
        self._num_steps += 1
        if self._is_due():
            self._choose()

    def _is_due(self) -> bool:
        num_steps = self._num_steps
        if num_steps < _WINDOW:
            return num_steps >= _FIRST and num_steps & (num_steps - 1) == 0
        return num_steps % _WINDOW == 0

    def _choose(self) -> None:
        order = np.arange(max(0, self._num_steps - _WINDOW), self._num_steps) % _WINDOW
        taus = sorted({*TAUS, self.tau})
        seconds = interval_seconds(
            self._hits[order], self._index[order], taus, self._budget, self._costs, self._waits
        )
        now_s, best = float(seconds[taus.index(self.tau)]), int(seconds.argmin())
        if seconds[best] < (1 - HYSTERESIS) * now_s:
            saved = 1 - float(seconds[best]) / now_s
            self._on_change(TauChange(self._num_steps, self.tau, taus[best], saved))
            self.tau = taus[best]


def interval(tau: int | OnlineTau) -> int:
    """Return the present refresh interval, in steps."""
    return tau.tau if isinstance(tau, OnlineTau) else tau


def interval_seconds(
    hits: IntArray,
    index: IntArray,
    taus: Sequence[int],
    budget: int,
    costs: Costs,
    waits: bool,
) -> FloatArray:
    """Return the seconds of these steps' layers at each interval, placed as `Tide` does: [taus].

    hits [steps, layers, experts]; index [steps]: each step's number in its block. Each layer has
    the link for its own duration, which on average is its share when layers follow one another.
    """
    replay = _TauReplay(hits[0], np.array(taus), budget, costs, waits)
    seconds = [replay.step(*one) for one in zip(hits, index.tolist(), strict=True)]
    total_s: FloatArray = np.sum(seconds, axis=0)
    return total_s


class _TauReplay:
    """Replayed residents [taus, layers, experts] at every interval."""

    def __init__(
        self, first: IntArray, taus: IntArray, budget: int, costs: Costs, waits: bool
    ) -> None:
        self._taus, self._budget, self._costs, self._waits = taus, budget, costs, waits
        shape = (len(taus), *first.shape)
        none = np.zeros(shape, np.bool_)
        self._is_resident: BoolArray = np.broadcast_to(self._best(first, none[0]), shape).copy()
        self._is_coming, self._is_leaving = none.copy(), none.copy()
        self._credit = np.zeros(shape[:2])  # of transfers

    def step(self, hits: IntArray, index: int) -> FloatArray:
        """Replay a step; return its seconds over all layers, [taus]."""
        costs, is_fetched = self._costs, None
        is_refresh = index % self._taus == 0
        if is_refresh.any():
            is_fetched = self._refresh(hits, is_refresh)
        is_resident = self._is_resident
        all_s = costs.device_s(hits)
        device_s = np.einsum("kle,le->kl", is_resident, all_s)
        host_s = np.einsum("kle,le->kl", ~is_resident, costs.host_s(hits))
        if is_fetched is not None:
            fetched_s = np.einsum("kle,le->kl", is_fetched, all_s)
            device_s = self._with_fetches(device_s, is_fetched.sum(axis=2), fetched_s)
        layer_s = np.maximum(device_s, host_s) + costs.dense_s.at(int(hits.max(initial=0)))
        layer_s += costs.sync_s
        if not self._waits and self._is_coming.any():
            self._arrive(layer_s)
        total_s: FloatArray = layer_s.sum(axis=1)
        return total_s

    def _with_fetches(
        self, device_s: FloatArray, num_fetched: IntArray, fetched_s: FloatArray
    ) -> FloatArray:
        """Return when the device ends: residents' `device_s` first, fetched experts last.

        Only as many fetched experts as there are staging slots overlap with residents. All arrays
        are [taus, layers].
        """
        costs = self._costs
        num_beside = np.minimum(num_fetched, costs.num_staging + costs.num_ahead)
        each_s = fetched_s / np.maximum(1, num_fetched)
        residents_s = np.maximum(device_s - fetched_s, num_beside * costs.fetch_s)
        rest_s = (num_fetched - num_beside) * np.maximum(costs.fetch_s, each_s)
        end_s: FloatArray = residents_s + num_beside * each_s + rest_s
        return end_s

    def _refresh(self, hits: IntArray, is_refresh: BoolArray) -> BoolArray | None:
        """Refresh residents; return experts the step waits for, [taus, layers, experts]."""
        best = np.where(is_refresh[:, None, None], self._best(hits, self._is_resident), False)
        is_of_it = is_refresh[:, None, None]
        new, old = best & ~self._is_resident, self._is_resident & ~best & is_of_it
        if self._waits:
            self._is_resident = np.where(is_of_it, best, self._is_resident)
            return new
        has_new = is_of_it & new.any(axis=2, keepdims=True)  # else the old moves go on
        self._is_coming = np.where(has_new, new, self._is_coming)
        self._is_leaving = np.where(has_new, old, self._is_leaving)
        return None

    def _arrive(self, layer_s: FloatArray) -> None:
        """Finish the moves for which the link has time, in the order of their ids."""
        is_waiting = self._is_coming.any(axis=2)
        self._credit = np.where(is_waiting, self._credit + layer_s / self._costs.fetch_s, 0.0)
        room = np.floor(self._credit)[:, :, None]
        arrived = self._is_coming & (self._is_coming.cumsum(axis=2) <= room)
        num_arrived = arrived.sum(axis=2)
        num_over = self._is_resident.sum(axis=2) + num_arrived - self._budget
        gone = self._is_leaving & (self._is_leaving.cumsum(axis=2) <= num_over[:, :, None])
        self._is_resident = (self._is_resident | arrived) & ~gone
        self._is_coming, self._is_leaving = self._is_coming & ~arrived, self._is_leaving & ~gone
        self._credit -= num_arrived

    def _best(self, hits: IntArray, is_resident: BoolArray) -> BoolArray:
        """Return the experts with most hits; residents, then lower ids, win ties."""
        num_experts = hits.shape[-1]
        rank = (2 * hits + is_resident) * num_experts + np.arange(num_experts)[::-1]
        if self._budget < num_experts:
            least = np.partition(rank, -self._budget, axis=-1)[..., -self._budget, None]
        else:
            least = np.zeros((*rank.shape[:-1], 1), np.int64)
        best: BoolArray = rank >= np.maximum(least, num_experts)
        return best
