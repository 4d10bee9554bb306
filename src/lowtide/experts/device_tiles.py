"""The device's share of a long pass: the same experts in the same waves, one tile at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lowtide.core import NOBODY, Assignment, IntArray, Moves
from lowtide.experts.device_tier import DeviceShare, DeviceTier
from lowtide.experts.link import Arrival
from lowtide.experts.rows import ExpertBuffers, ExpertRows


class DeviceTiles(DeviceShare):
    """A share whose rows come in tiles. A fetched expert keeps its slot to the end of its rows.

    Experts come in ascending order here: a resident that has to go may have rows yet when an expert
    comes that shall stay. Who cannot stay at once is one of the moves for an idle link.
    """

    def __init__(
        self,
        tier: DeviceTier,
        layer: int,
        assignment: Assignment,
        rows: ExpertRows,
        buffers: ExpertBuffers,
    ) -> None:
        """rows: of all tiles."""
        super().__init__(tier, layer, assignment, rows, buffers)
        self._all_rows = rows
        self._stop = 0  # the present tile's last pair, of all
        self._held: list[tuple[int, Arrival]] = []  # used, with rows in the next tile
        self._admit: list[int] = []
        self._evict: list[int] = []
        self._is_owed = False

    def follow(self, moves: Moves) -> None:
        """Notes who is to stay and to go from now on."""
        self._admit, self._evict = moves.admit.tolist(), moves.evict.tolist()
        self._is_owed = moves.is_owed

    def begin(self, rows: ExpertRows, pairs: slice) -> Sequence[int]:
        """Queues what is on the device already, or on its way, of the experts of a tile. Returns
        those whose fetch is left to be begun."""
        self._rows, self._stop = rows, pairs.stop
        demanded = np.array(rows.demanded)
        resident = np.intersect1d(self._assignment.resident, demanded)
        for group in self._link.resident_groups(self._layer, resident):
            self._run(group, None)
        arrivals, self._held = {**self._arrivals, **dict(self._held)}, []
        to_fetch = []
        for expert in np.intersect1d(self._assignment.fetch, demanded).tolist():
            arrival = arrivals[expert]
            if arrival is None:
                to_fetch.append(expert)
            else:
                self._add_to_wave(expert, arrival)
        return to_fetch

    def end(self) -> None:
        """After the last tile: the moves that are left wait for an idle link, or the pass's end."""
        moves = Moves(np.array(self._admit, np.int64), np.array(self._evict, np.int64))
        self._link.obey(self._layer, moves._replace(is_owed=self._is_owed), {})

    def _settle(self, wave: Sequence[tuple[int, Arrival]]) -> None:
        for expert, arrival in wave:
            if self._is_finished(expert):
                keep = arrival.is_move or self._keeps(expert, arrival)
                self._link.settle(self._layer, expert, arrival.slot, keep)
            else:
                self._held.append((expert, arrival))

    def _keeps(self, expert: int, arrival: Arrival) -> bool:
        """Whether a fetched expert stays: if it shall, and somebody's place is free by now."""
        if expert not in self._admit:
            return False
        victims: IntArray = NOBODY
        ledger = self._link.ledger
        if len(self._admit) > len(self._evict):  # in nobody's place; what comes needs slots, too
            if ledger.num_free < self._tier.costs.num_staging:
                return False
        else:
            is_resident = ledger.is_resident(self._layer)
            gone = [e for e in self._evict if is_resident[e] and self._is_finished(e)]
            if not gone:
                return False
            victims = np.array(gone[:1])
            self._evict.remove(gone[0])
        self._admit.remove(expert)
        moves = Moves(np.array([expert]), victims)
        kept: set[int] = self._link.obey(self._layer, moves, {expert: arrival})
        return expert in kept

    def _is_finished(self, expert: int) -> bool:
        """Whether the last of its rows are queued, if it has any."""
        pairs = self._all_rows.pairs(expert)
        has_rows: bool = pairs.start < pairs.stop
        return not has_rows or bool(pairs.stop <= self._stop)
