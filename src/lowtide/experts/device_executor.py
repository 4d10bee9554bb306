"""Runs experts on a device, with the host's share computed at the same time.

Residents run first, then fetched experts in waves as they arrive. For each tile the host's share is
handed to its threads before the device's is queued, so both run while the policies decide the
moves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import numpy as np
from torch import Tensor

from lowtide.core import Costs, Demand, Facts, IntArray, Moves
from lowtide.errors import InternalError
from lowtide.experts.device import ExpertGroup
from lowtide.experts.device_tier import DeviceTier
from lowtide.experts.host_executor import HostExpertExecutor, HostTile
from lowtide.experts.host_reads import NoReads
from lowtide.experts.link import Arrival
from lowtide.experts.policy_facts import HostInputs
from lowtide.experts.rows import ExpertBuffers, LayerCall
from lowtide.experts.work import Plan, Tile, Work
from lowtide.progress import Progress
from lowtide.threads.event import WAIT_LIMIT_S, Event


class DeviceExpertExecutor:
    """Orders a layer's copies and runs on a device.

    The host's executor runs the host's share; policies choose what stays.
    """

    def __init__(
        self, device: DeviceTier, beside: HostExpertExecutor, scratch: tuple[Tensor, Tensor]
    ) -> None:
        """Combine device and host. beside: the host's executor.

        scratch: the host's gate and up of a tile, each [rows of the largest * k, expert_size].
        """
        self.device = device
        self.host = beside.host
        self.threads = beside.threads
        self.kernels = device.device.kernels
        self.num_on_host = 0
        self._beside = beside
        self._scratch = scratch
        self._link = device.link
        self._moves: Moves | None = None  # of the layer, once asked for, until they are obeyed
        self.look = device.look

    def load(self, initial: Sequence[IntArray], progress: Progress) -> None:
        """Make exactly `initial[layer]` resident on the device."""
        self.device.load(self.host, initial, progress)

    def parts(self, layer: int) -> None:
        """Return None: kernels run no whole layers here."""

    def compiled_residents(self, hits: IntArray, abandon: Callable[[], None]) -> None:
        """Return None: each layer calls Python."""

    def facts(self, call: LayerCall, inputs: HostInputs, capacity: IntArray, costs: Costs) -> Facts:
        """Collect the facts for policies; capacity: [num_layers]."""
        host, layer = self.host, call.layer
        is_here, is_kept, arriving_s, busy_s = self._link.look(layer)
        rows = inputs.rows
        if rows is None:
            raise InternalError(f"Layer {layer} beside a device has no rows at the host.")
        num_tokens = np.diff(rows.bounds)
        experts = np.flatnonzero(num_tokens)
        demand = Demand(experts, num_tokens[experts], is_here[experts])
        return Facts(
            call.step,
            layer,
            demand,
            is_kept,
            capacity,
            costs,
            arriving_s[experts],
            busy_s,
            can_fetch=costs.num_staging > 0,
            routing=inputs.routed,
            is_here=is_here,
            is_at_host=None if host.is_permanent else host.ledger.is_resident(layer),
        )

    def open(self, work: Work, plan: Plan | None, whole: ExpertGroup | None = None) -> None:
        """Start the reads of a layer; call `run_tile` for each of its tiles afterwards.

        whole: all experts, instead of a plan, if every one is resident and stays.
        """
        self._work = work
        self._plan, self._whole = plan, whole
        if plan is None:
            self.device.begin_whole(work.rows.counts)
            return
        assignment = plan.decision.assignment
        self._keep: set[int] = set()
        self._moves = None
        fetch = assignment.fetch.tolist()
        self._outcome = self._link.begin_layer(work.layer, assignment.fetch)
        host_rows = plan.at_host.rows
        if host_rows is None:
            raise InternalError(f"Layer {work.layer} beside a device has no rows at the host.")
        self._host_rows = host_rows
        self._arrivals: dict[int, Arrival | None] = {}  # by expert to fetch: its copy, if begun
        absent: list[int] = []
        if fetch:
            self._arrivals = self._link.take_arrivals(work.layer, fetch)
            for expert, arrival in self._arrivals.items():
                if arrival is None:
                    absent.append(expert)
        wanted = assignment.host
        if absent:
            wanted = np.sort(np.concatenate([wanted, np.array(absent, np.int64)]))
        if self.host.is_permanent:
            self._beside.reads = NoReads(self.host, work.layer, wanted)
            return
        moves = self.host.own_moves(plan.facts.step, work.layer, wanted)
        self._beside.begin_reads(work.layer, wanted)
        self._beside.follow(plan, moves)

    def run_tile(self, work: Work, tile: Tile) -> None:
        """Compute both shares of a tile, which `work.buffers` has once the device's queue ends."""
        self._tile = tile
        work.gather(tile)
        if self._plan is not None:
            self._run_shares(self._plan)
        elif self._whole is not None:
            use = self.device.device.run(self._whole, tile.rows, work.buffers, None)
            self._link.note_whole_use(work.layer, use)
        if tile.is_last:
            self.device.finish(work.layer, len(work.x))
            if work.layer == self.device.ledger.num_layers - 1:
                self.device.end_pass(self.host)
        else:
            self.device.device.join()

    def abandon(self) -> None:
        """Recover from a failure: free all slots, once nothing uses or fills them."""
        self._beside.stop()
        self._link.stats.num_moves_dropped += self._num_moves_left
        self._moves = None
        self.device.abandon()
        self.host.abandon()

    def as_dict(self) -> dict[str, float]:
        """Return the counters, with those of the link, which carries out moves here."""
        stats, prefetch = self._link.stats, self._link.stats.prefetch
        return {
            "num_on_host": self.num_on_host,
            **stats.as_dict(),
            "num_copies": stats.num_copies,
            "num_moves_waiting": self._link.num_moves_waiting + self._num_moves_left,
            "num_prefetches_used": prefetch.num_hits + prefetch.num_late,
            "num_prefetches_dropped": prefetch.num_wasted,
            "num_prefetches_waiting": self._link.num_staged,
        }

    @property
    def _num_moves_left(self) -> int:
        """Number of experts whose moves are for the layer's last tile."""
        return 0 if self._moves is None else len(self._moves.admit)

    def _run_shares(self, plan: Plan) -> None:
        host, tile = self._beside, self._tile
        resident, fetched, hosted = plan.decision.assignment[:3]
        if tile.rows is not self._work.rows:
            resident, fetched, hosted = map(self._in_tile, (resident, fetched, hosted))
        fetch, on_host = fetched.tolist(), hosted.tolist()
        is_here = host.reads.slots.__contains__
        if on_host:
            host_tile = self._host_tile(plan, on_host)
            # The host's threads begin with experts that are in its memory already.
            host.submit(host_tile, list(filter(is_here, on_host)))
        arriving: list[tuple[int, Arrival]] = []
        to_fetch: list[int] = []
        for expert in fetch:
            arrival = self._arrivals[expert]
            if arrival is None:
                to_fetch.append(expert)
            else:
                arriving.append((expert, arrival))
        here = list(filter(is_here, to_fetch))
        self._wave: list[tuple[int, Arrival]] = []
        # No wave is small, since each has kernel launches of its own, and none is twice as large as
        # `wave_size`, the number of slots.
        self._wave_size = -(-len(fetch) // max(1, len(fetch) // self.device.wave_size))
        # Copies begin before the residents run, since one copy takes as long as many of them, and
        # before the policies decide the moves.
        first = here[: self.device.wave_size] if self._moves is None else []
        if first:
            arriving += self._begin_copies(first)
        if len(resident):
            self._queue(resident, self._link.ledger.slots_of(self._work.layer, resident), None)
        self._follow(plan, fetch)
        if arriving:
            self._add_to_wave(arriving)
        for expert in here[len(first) :]:
            self._fetch(expert)
        # The rest comes from disk, for the host or to be copied on.
        if not self.host.is_permanent:
            for expert in host.reads.arriving([*on_host, *to_fetch], host.is_busy):
                if expert in on_host:
                    self._link.offer(self._work.layer, expert, host.reads.slots[expert])
                    host.submit_first(expert)
                else:
                    self._fetch(expert)
        if self._wave:
            self._run_wave()
        if tile.is_last:
            self.num_on_host += len(plan.decision.assignment.host)
            self.device.look_ahead(plan, self._outcome)
        if on_host or not self.host.is_permanent:
            host.collect(self._pump)
        if on_host:
            parts, experts = self._work.buffers.parts, plan.decision.assignment.host
            self.device.device.from_host(host_tile.buffers.parts, tile.rows, experts, parts)

    def _in_tile(self, experts: IntArray) -> IntArray:
        """Return the experts with rows in the tile."""
        return experts[self._tile.rows.num_tokens(experts) > 0]

    def _host_tile(self, plan: Plan, experts: Sequence[int]) -> HostTile:
        """Return the tile for the host's executor, with inputs in place or at the host."""
        work, tile, inputs = self._work, self._tile, None
        parts, rows = work.buffers.parts, self._host_rows
        if tile.rows is not work.rows:
            rows = rows.tile(tile.pairs)
        host_parts = self.device.device.host_parts(parts)
        if host_parts is not parts:
            inputs = plan.at_host.x
            for pairs in map(rows.pairs, experts if inputs is None else ()):
                host_parts[pairs].copy_(parts[pairs])
        buffers = ExpertBuffers(host_parts, *self._scratch)
        return HostTile(work.layer, rows, buffers, inputs, partial(work.is_finished, tile=tile))

    def _follow(self, plan: Plan, fetch: Sequence[int]) -> None:
        """Let the link carry out the moves due with the tile; fetch: the tile's experts."""
        work, tile = self._work, self._tile
        moves = plan.ask_moves() if self._moves is None else self._moves
        at_hand: dict[int, Arrival | None] = {}
        for expert in fetch:
            if tile.is_last or work.is_finished(expert, tile):
                at_hand[expert] = self._arrivals[expert]
        due = moves if tile.is_last else self._due(moves, at_hand)
        if tile.is_last:
            self._moves = None
        self._keep |= self._link.obey(work.layer, due, at_hand, tile.is_last)

    def _due(self, moves: Moves, at_hand: Collection[int]) -> Moves:
        """Return the moves that can be made before the last tile; they leave `_moves`.

        An admitted expert must have arrived and have its last rows in this tile; a victim must have
        no rows after it.
        """
        work, tile = self._work, self._tile
        admit = np.array([e for e in moves.admit.tolist() if e in at_hand], np.int64)
        evict = np.array([e for e in moves.evict.tolist() if work.is_finished(e, tile)], np.int64)
        num_spare = max(0, len(moves.admit) - len(moves.evict))  # that replace no resident
        admit = admit[: num_spare + len(evict)]
        evict = evict[: max(0, len(admit) - num_spare)]
        self._moves = moves._replace(
            admit=moves.admit[~np.isin(moves.admit, admit)],
            evict=moves.evict[~np.isin(moves.evict, evict)],
        )
        return Moves(admit, evict)

    def _pump(self) -> float:
        """Keep the link busy while waiting for the host, by queueing one copy ahead."""
        if not self._link.has_waiting:
            return WAIT_LIMIT_S
        self._link.pump(self._link.link_s)
        return self._link.link_s

    def _fetch(self, expert: int) -> None:
        """Queue the copy of an expert in host memory, and its run after it."""
        self._add_to_wave(self._begin_copies([expert]))

    def _begin_copies(self, experts: list[int]) -> list[tuple[int, Arrival]]:
        slots = list(map(self._beside.reads.slots.__getitem__, experts))
        begun = list(zip(experts, self._link.fetch(slots), strict=True))
        self._arrivals.update(begun)
        return begun

    def _add_to_wave(self, arriving: Sequence[tuple[int, Arrival]]) -> None:
        for each in arriving:
            self._wave.append(each)
            if len(self._wave) == self._wave_size:
                self._run_wave()

    def _run_wave(self) -> None:
        """Queue the experts of a wave after the last of their arrivals.

        Each becomes resident, or its slot free, unless it has rows in the next tile.
        """
        layer, wave, last = self._work.layer, dict(sorted(self._wave)), self._wave[0][1]
        self._wave = []
        slots: list[int] = []
        for arrival in wave.values():
            slots.append(arrival.slot)
            if arrival.order > last.order:
                last = arrival
        self._queue(np.array(list(wave)), np.array(slots), last.event)
        ended = dict(zip(wave, slots, strict=True))
        if not self._tile.is_last:
            is_finished = partial(self._work.is_finished, tile=self._tile)
            ended = {expert: slot for expert, slot in ended.items() if is_finished(expert)}
        self._link.settle(layer, ended, self._keep)

    def _queue(self, experts: IntArray, slots: IntArray, after: Event | None) -> None:
        group = ExpertGroup(self._work.layer, experts, slots)
        use = self.device.device.run(group, self._tile.rows, self._work.buffers, after)
        self._link.note_use(group, use)
