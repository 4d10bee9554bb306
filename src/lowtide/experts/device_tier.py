"""The device tier: expert slots behind a link, on top of the host tier that feeds it.

Everything is queued and nothing waited for, but for a layer's one synchronisation. Decides
nothing: who runs here, who is fetched and who stays are the policies' choices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowtide.core import Assignment, Costs, Facts, IntArray, Moves, RoutedTokens, Step, StepKind
from lowtide.experts.away_time import AwayTime
from lowtide.experts.device import Device, ExpertGroup
from lowtide.experts.early_gate import EarlyGate
from lowtide.experts.host_tier import HostTier
from lowtide.experts.link import Arrival, Link
from lowtide.experts.room import Room
from lowtide.experts.rows import ExpertBuffers, ExpertRows, Routing
from lowtide.experts.told import tell
from lowtide.memory.pinned_copies import to_host
from lowtide.memory.workspace import Buffers
from lowtide.policies.decision import Policies
from lowtide.policies.prefetch import Ahead, Prefetch
from lowtide.reading.dense_weights import Progress
from lowtide.threads.event import Event

_START = Step(StepKind.PREFILL, 0)
_MAX_COUNTS = 64  # kept until they are added up together: small operators cost a launch each


class AtHost(NamedTuple):
    """What the host is told of a layer's step, in host memory until the next one."""

    x: Tensor  # [tokens, hidden]
    experts: Tensor  # [tokens, k] int64
    told: RoutedTokens | None = None  # the routing, for policies that ask for it
    predicted: IntArray | None = None  # tokens per expert of the next layer, by the early gate


class DeviceTier:
    """Owns a device and the link to it; knows how many experts of whole layers were asked for."""

    def __init__(
        self, device: Device, link: Link, costs: Costs, close: Callable[[], None] | None = None
    ) -> None:
        """`close`: gives back the device and what it was given; by default the device alone."""
        self.device = device
        self.link = link
        self.ledger = link.ledger
        self.costs = costs
        self.close = device.close if close is None else close
        self.early_gate: EarlyGate | None = None
        self.wave_size = max(1, costs.num_staging // 2)  # the other half arrives meanwhile
        self._away = AwayTime(link.ledger.num_layers)
        # Of layers whose experts are all resident: counted where nothing waits for the count.
        self._num_hits = torch.zeros((), dtype=torch.int64, device=device.torch_device)
        self._counts: list[Tensor] = []  # of the last such layers, each [num_experts]

    def stays_whole(self, layer: int, room: Room) -> bool:
        """Whether every expert of a layer is resident and may stay: nothing has to be decided."""
        ledger = self.link.ledger
        is_whole = bool(ledger.is_resident(layer).all())
        return is_whole and not room.is_short(layer, ledger.num_resident)

    def run_whole(self, layer: int, rows: ExpertRows, buffers: ExpertBuffers) -> None:
        """Runs a layer whose experts are all resident, without any synchronisation."""
        self._away.come_back()
        self._counts.append(rows.counts)
        if len(self._counts) == _MAX_COUNTS:
            self._add_counts()
        for group in self.link.resident_groups(layer, np.arange(len(rows.counts))):
            self.link.note_use(group, self.device.run(group, rows, buffers, None))

    @property
    def num_hits(self) -> int:
        """Activated experts of layers that were whole."""
        self._add_counts()
        return int(self._num_hits)

    def look(
        self,
        layer: int,
        x: Tensor,
        routing: Routing,
        scores: Tensor | None,
        policies: Policies,
        workspace: Buffers,
    ) -> AtHost:
        """A layer's input and routing in host memory, and what the early gate says of the next:
        the layer's one synchronisation."""
        predicted = self._predict(layer, x, policies.prefetch, workspace)
        weights = to_host(routing.weights) if policies.asks_routing else None
        scores = None if scores is None else to_host(scores)
        host_x, experts = self.device.to_host(x, routing.experts)
        self._away.come_back()
        told = None if weights is None else tell(experts, weights, scores)
        return AtHost(host_x, experts, told, None if predicted is None else predicted.numpy())

    def look_ahead(self, facts: Facts, at_host: AtHost, prefetch: Prefetch) -> None:
        """Told what a layer asked for: queues what the policy wants of the next one."""
        following = facts.layer + 1
        prefetch.observe(facts)
        if following < self.link.ledger.num_layers:
            ahead = Ahead(following, self.link.is_kept(following), at_host.predicted)
            self.link.look_ahead(following, prefetch.choose(ahead))

    def finish(self, layer: int, num_rows: int) -> None:
        """What the caller does next sees all outputs; the link goes on while it is away."""
        self.link.pump(self._away.expected_s(layer, self.costs.dense_s.at(num_rows)))
        self._away.leave(layer)
        self.device.join()
        self.link.confirm()

    def end_pass(self, host: HostTier) -> None:
        """After the last layer: brings the moves that are owed, and waits for them."""
        owed = self.link.take_owed()
        for layer, experts in owed.items():
            moves = host.own_moves(_START, layer, experts)
            for expert, host_slot in host.open(layer, experts, moves):
                self.link.move(layer, expert, host_slot)
        if owed:
            self.link.wait_for_moves()

    def load(self, host: HostTier, initial: Sequence[IntArray], progress: Progress) -> None:
        """Makes `initial[layer]` resident and no others, through host memory."""
        absent = [self.link.keep(layer, experts) for layer, experts in enumerate(initial)]
        slot_bytes = host.slots.layout.num_bytes
        total_bytes, done_bytes = sum(map(len, absent)) * slot_bytes, 0
        for layer, experts in enumerate(absent):
            moves = host.own_moves(_START, layer, experts)
            for expert, host_slot in host.open(layer, experts, moves):
                self.link.load(layer, expert, host_slot)
                done_bytes += slot_bytes
                progress("loading experts onto the device", done_bytes, total_bytes)

    def pause(self) -> None:
        """Between passes: ends all work and all copies, so that slots may be emptied and moved.

        Raises DeviceError where a copy failed, when nothing that was coming is any more.
        """
        self.device.drain()
        try:
            self.link.pause()
        except BaseException:
            self.link.abandon()
            raise

    def evict(self, layer: int, expert: int) -> None:
        """A resident, after `pause`."""
        self.link.evict(layer, expert)

    def abandon(self) -> None:
        """After a failure: gives all slots back, once nobody uses or fills them."""
        self.device.drain()
        self.link.abandon()

    def _predict(
        self, layer: int, x: Tensor, prefetch: Prefetch, workspace: Buffers
    ) -> Tensor | None:
        """What the early gate says of the next layer, in host memory after `to_host`."""
        if self.early_gate is None or not prefetch.wants_prediction(layer + 1):
            return None
        predicted = self.early_gate.predict(layer, x, workspace)
        return None if predicted is None else self.device.stage(predicted)

    def _add_counts(self) -> None:
        counts, self._counts = self._counts, []
        if counts:
            self._num_hits += torch.stack(counts).count_nonzero()


class DeviceShare:
    """The device's share of one layer: residents, then fetched experts in waves as they arrive."""

    def __init__(
        self,
        tier: DeviceTier,
        layer: int,
        assignment: Assignment,
        rows: ExpertRows,
        buffers: ExpertBuffers,
    ) -> None:
        self._tier = tier
        self._link = tier.link
        self._layer = layer
        self._assignment = assignment
        self._rows = rows
        self._buffers = buffers
        # By expert to fetch: its copy, if one is under way.
        self._arrivals = {
            expert: self._link.take_arrival(layer, expert) for expert in assignment.fetch.tolist()
        }
        self._fetch_on: dict[int, int] = {}
        if assignment.fetch_on is not None:
            pairs = zip(assignment.fetch.tolist(), assignment.fetch_on.tolist(), strict=True)
            self._fetch_on = dict(pairs)
        self._first_wave: list[tuple[int, Arrival]] = []
        self._keep: set[int] = set()
        self._wave: list[tuple[int, Arrival]] = []

    @property
    def wanted(self) -> list[int]:
        """Experts to fetch that no copy is under way of: they are wanted in host memory."""
        return [expert for expert, arrival in self._arrivals.items() if arrival is None]

    def start(self, here: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
        """Queues what needs no moves: the residents, and copies of a first wave of those `here` in
        host memory. Returns the others of `here`."""
        for group in self._link.resident_groups(self._layer, self._assignment.resident):
            self._run(group, None)
        first, rest = here[: self._tier.wave_size], here[self._tier.wave_size :]
        self._first_wave = [(expert, self._begin_copy(expert, slot)) for expert, slot in first]
        return rest

    def follow(self, moves: Moves) -> None:
        """Notes which fetched experts stay, and queues those under way as they arrive."""
        self._keep = self._link.obey(self._layer, moves, self._arrivals)
        under_way = [(e, arrival) for e, arrival in self._arrivals.items() if arrival is not None]
        for expert, arrival in [*under_way, *self._first_wave]:
            self._add_to_wave(expert, arrival)

    def fetch(self, expert: int, host_slot: int) -> None:
        """Queues the copy of an expert that is in host memory, and its run behind it."""
        self._add_to_wave(expert, self._begin_copy(expert, host_slot))

    def run_wave(self) -> None:
        """Queues the experts of a wave, on each device behind the last of their arrivals there,
        and settles them."""
        if not self._wave:
            return
        wave = sorted(self._wave, key=lambda pair: pair[0])
        self._wave = []
        experts = np.array([expert for expert, _ in wave])
        slots = np.array([arrival.slot for _, arrival in wave])
        arrivals = {arrival.slot: arrival for _, arrival in wave}
        for group in self._link.by_device(ExpertGroup(self._layer, experts, slots)):
            last = max((arrivals[slot] for slot in group.slots.tolist()), key=lambda a: a.order)
            self._run(group, last.event)
        self._settle(wave)

    def take_over(self, host_parts: Tensor) -> None:
        """Queues the copy of the host's outputs to where they belong."""
        host = self._assignment.host
        if len(host):
            self._tier.device.from_host(host_parts, self._rows, host, self._buffers.parts)

    def _begin_copy(self, expert: int, host_slot: int) -> Arrival:
        return self._link.fetch(host_slot, self._fetch_on.get(expert))

    def _add_to_wave(self, expert: int, arrival: Arrival) -> None:
        self._wave.append((expert, arrival))
        if len(self._wave) == self._tier.wave_size:
            self.run_wave()

    def _settle(self, wave: Sequence[tuple[int, Arrival]]) -> None:
        for expert, arrival in wave:
            self._link.settle(self._layer, expert, arrival.slot, expert in self._keep)

    def _run(self, group: ExpertGroup, after: Event | None) -> None:
        use = self._tier.device.run(group, self._rows, self._buffers, after)
        self._link.note_use(group, use)
