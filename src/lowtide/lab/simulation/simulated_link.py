"""The simulated link and the slots behind it: a queue of transfers in simulated time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lowtide.core import BoolArray, FloatArray, IntArray, Moves

_ABSENT = np.inf


class _Transfer(NamedTuple):
    """An expert that waits for an idle link."""

    layer: int
    expert: int
    issued_s: float
    victim: int | None  # the resident it replaces, if no slot is free for it


class Fetched(NamedTuple):
    """Experts that the device runs without their being resident. Each [experts]."""

    arriving_s: FloatArray  # until they can be used; infinite where no copy is under way
    is_staged: BoolArray  # whether a prefetch is, which has a staging slot


class SimulatedLink:
    """The link and the slots behind it: when each expert is usable, and what is in transfer.

    `ready_s` and `staged_s` [layers, experts]: time from which an expert is usable as a resident,
    or from a prefetch slot; infinite if it is neither there nor in transfer.
    """

    def __init__(self, capacity: Sequence[int], num_experts: int, fetch_s: float) -> None:
        self.ready_s = np.full((len(capacity), num_experts), _ABSENT)
        self.staged_s = np.full((len(capacity), num_experts), _ABSENT)
        self.free_s = 0.0
        self.busy_s = 0.0
        self.num_moved = self.num_prefetched = self.num_moves_done = 0
        self._num_slots = sum(capacity)  # of residents: any layer may have them
        self._fetch_s = fetch_s
        self._ahead: deque[_Transfer] = deque()
        self._moves: deque[_Transfer] = deque()
        self._owed: list[_Transfer] = []

    def busy_from(self, now_s: float) -> float:
        """Return the seconds from `now_s` until everything begun has ended."""
        return max(0.0, self.free_s - now_s)

    def is_kept(self, layer: int) -> BoolArray:
        """Return residents, and experts becoming resident, [num_experts]."""
        kept: BoolArray = self.ready_s[layer] < _ABSENT
        return kept

    def arriving_s(self, layer: int, now_s: float) -> FloatArray:
        """Return seconds until each expert is usable, [num_experts]; infinite if not coming."""
        soonest = np.minimum(self.ready_s[layer], self.staged_s[layer])
        left_s: FloatArray = np.maximum(0.0, soonest - now_s)
        return left_s

    def fetched(self, layer: int, experts: IntArray, now_s: float) -> Fetched:
        """Return the arrivals of a layer's fetched experts."""
        is_staged = self.staged_s[layer, experts] < _ABSENT
        return Fetched(self.arriving_s(layer, now_s)[experts], is_staged)

    def run_until(self, now_s: float) -> None:
        """Start every waiting transfer that is due before `now_s`."""
        while queue := self._ahead or self._moves:
            start_s = max(self.free_s, queue[0].issued_s)
            if start_s >= now_s:
                return
            transfer = queue.popleft()
            starts = self._start_ahead if queue is self._ahead else self._start_move
            starts(transfer, start_s)

    def fetch(self, start_s: float) -> float:
        """Transfer one expert on demand, not before `start_s`; return its arrival."""
        return self._occupy(max(start_s, self.free_s))

    def look_ahead(self, layer: int, experts: IntArray, now_s: float) -> None:
        self._ahead.extend(_Transfer(layer, e, now_s, None) for e in experts.tolist())

    def end_layer(self, layer: int, now_s: float) -> IntArray:
        """Empty the layer's prefetch slots and forget what had not begun; return staged experts."""
        staged = np.flatnonzero(self.staged_s[layer] < _ABSENT)
        self.staged_s[layer] = _ABSENT
        self._ahead = deque(t for t in self._ahead if t.layer != layer)
        return staged

    def carry_out(self, layer: int, moves: Moves, at_hand: set[int], now_s: float) -> None:
        """Carry out moves: experts `at_hand` (just fetched) at once, others when the link is idle.

        Owed moves are made at the pass' end. New moves of a layer replace its old ones that have
        not begun.
        """
        if not len(moves.admit) and not len(moves.evict):
            return
        self._moves = deque(t for t in self._moves if t.layer != layer)
        ready_s = self.ready_s[layer]
        admit = sorted(moves.admit.tolist(), key=lambda expert: expert not in at_hand)
        victims = moves.evict.tolist()
        num_unpaired = len(victims) - len(admit)
        for victim in victims[: max(0, num_unpaired)]:
            ready_s[victim] = _ABSENT
        victims = victims[max(0, num_unpaired) :]
        num_free = len(admit) - len(victims)
        for place, expert in enumerate(admit):
            victim = victims[place - num_free] if place >= num_free else None
            if expert in at_hand:
                self._replace(layer, expert, victim, now_s)
                self.num_moves_done += 1
            else:
                waiting = self._owed if moves.is_owed else self._moves
                waiting.append(_Transfer(layer, expert, now_s, victim))

    def bring_owed(self, now_s: float) -> float:
        """Make a pass' owed moves one by one; return when the last one has arrived."""
        for transfer in self._owed:
            now_s = self._occupy(max(now_s, self.free_s))
            self._move(transfer, now_s)
        self._owed.clear()
        return now_s

    def _start_ahead(self, transfer: _Transfer, start_s: float) -> None:
        if np.isinf(self.ready_s[transfer.layer, transfer.expert]):
            self.staged_s[transfer.layer, transfer.expert] = self._occupy(start_s)
            self.num_prefetched += 1

    def _start_move(self, transfer: _Transfer, start_s: float) -> None:
        if self._has_room(transfer):
            self._move(transfer, self._occupy(start_s))

    def _move(self, transfer: _Transfer, ready_s: float) -> None:
        self._replace(transfer.layer, transfer.expert, transfer.victim, ready_s)
        self.num_moved += 1
        self.num_moves_done += 1

    def _has_room(self, transfer: _Transfer) -> bool:
        is_kept = self.is_kept(transfer.layer)
        num_kept = int(np.count_nonzero(self.ready_s < _ABSENT))
        if transfer.victim is not None and is_kept[transfer.victim]:
            num_kept -= 1
        return num_kept < self._num_slots and not is_kept[transfer.expert]

    def _replace(self, layer: int, expert: int, victim: int | None, ready_s: float) -> None:
        if victim is not None:
            self.ready_s[layer, victim] = _ABSENT
        self.ready_s[layer, expert] = ready_s

    def _occupy(self, start_s: float) -> float:
        self.free_s = start_s + self._fetch_s
        self.busy_s += self._fetch_s
        return self.free_s
