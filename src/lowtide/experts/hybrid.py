"""THE HOT PATH with a device: one layer's experts, some on the device, some on the host.

Decides nothing: who runs where, what stays and what is fetched ahead are the policies' choices.
The host's share is handed over first, then the device's is queued, and both run at once, while
the policies say what is to move; an expert's products and the order of the sum are the same
wherever it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowtide.core import Assignment, Costs, Demand, Facts, MoEShape, Moves, Step, StepKind
from lowtide.errors import DeviceError
from lowtide.experts.at_once import ExpertsAtOnce, cores_beside_device
from lowtide.experts.device import Device, ExpertGroup
from lowtide.experts.early_gate import EarlyGate
from lowtide.experts.home import Home
from lowtide.experts.link import Arrival, Link
from lowtide.experts.rows import ExpertBuffers, ExpertRows, Routing
from lowtide.experts.runtime import ExpertStats, Observer
from lowtide.kernels.products import REFERENCE, Products
from lowtide.kernels.routing import combine
from lowtide.memory.workspace import Buffers
from lowtide.policies.decision import Policies
from lowtide.policies.prefetch import Ahead, Gate, PrefetchOutcome
from lowtide.reading.dense_weights import Progress
from lowtide.threads.event import WAIT_LIMIT_S, Event
from lowtide.threads.executor import Executor, Work

_START = Step(StepKind.PREFILL, 0)
_MAX_COUNTS = 64  # kept until they are added up together: small operators cost a launch each


class HostScratch(NamedTuple):
    """Where the host's experts keep gate and up, in host memory: rows as in `ExpertBuffers`."""

    gate: Tensor  # [max_rows * k, expert_size]
    up: Tensor  # [max_rows * k, expert_size]


class HybridRuntime:
    """Owns a model's experts on a device and at home, and the policies that share the work."""

    def __init__(
        self,
        shape: MoEShape,
        device: Device,
        link: Link,
        home: Home,
        policies: Policies,
        costs: Costs,
        executor: Executor,
        scratch: HostScratch,
        close: Callable[[], None],
        products: Products = REFERENCE,
    ) -> None:
        """`close`: gives back the device and what it was given. products: the host's."""
        self._shape = shape
        self.device = device
        self.link = link
        self.home = home
        self._policies = policies
        self.costs = costs
        self.executor = executor
        self.scratch = scratch
        self.products = products
        self.at_once = ExpertsAtOnce.of(home.slots, products, cores_beside_device(executor))
        self.close = close
        self.early_gate: EarlyGate | None = None
        self.observer: Observer | None = None
        self.stats = ExpertStats()
        self.num_on_host = 0
        self._is_under_way = False  # a step, or what has to be cleared up after one
        # Of layers whose experts are all resident: counted where nothing waits for the count.
        self._num_more_hits = torch.zeros((), dtype=torch.int64, device=device.torch_device)
        self._whole_counts: list[Tensor] = []  # of the last such layers, each [num_experts]
        self.wave_size = max(1, costs.num_staging // 2)  # the other half arrives meanwhile

    def forward(
        self, layer: int, x: Tensor, routing: Routing, step: Step, workspace: Buffers, out: Tensor
    ) -> None:
        """`out[t] = sum over t's experts e of weight * expert_e(x[t])`, in ascending e.

        x [tokens, hidden] compute dtype; out [tokens, hidden] float32; `layer` counts MoE layers.
        Raises StorageError or DeviceError when an expert cannot be had; the runtime stays usable.
        """
        if self._is_under_way:  # Ctrl-C came again while the last failure was cleared up
            self._abandon()
        self._is_under_way = True
        try:
            rows = ExpertRows(routing.experts, self._shape.num_experts)
            is_whole = self.link.ledger.is_resident(layer).all()
            predicted = None if is_whole else self._predict(layer, x, workspace)
            buffers = ExpertBuffers.take(workspace, self._shape, x)
            torch.index_select(x, 0, rows.token_of, out=buffers.parts)
            if is_whole:
                self._run_whole_layer(layer, rows, buffers)
            else:
                self._run_split_layer(layer, step, rows, buffers, predicted)
            self.link.pump(self.costs.dense_s.at(x.shape[0]))
            self.device.join()
            self.link.confirm()
            terms = (buffers.term, buffers.term_fp32)
            combine(buffers.parts, rows.part_of, routing.weights, *terms, out)
            self._is_under_way = False
        except BaseException:
            self._abandon()
            raise
        if self.observer is not None:
            self.observer.saw_layer(layer, step, x, routing, out)

    def adopt(self, policies: Policies, progress: Progress) -> None:
        """Goes on under other policies, from their own first residents. Between passes only."""
        self._abandon()  # nothing is demanded: ends what was begun for later
        self._policies = policies
        self.preload(progress)

    def preload(self, progress: Progress) -> None:
        """Makes the placement's first residents resident, layer by layer, and no others."""
        self._is_under_way = True
        initial = [self._policies.placement.initial(i) for i in range(self._shape.num_layers)]
        absent = [self.link.keep(layer, experts) for layer, experts in enumerate(initial)]
        slot_bytes = self.home.slots.layout.num_bytes
        total_bytes, done_bytes = sum(map(len, absent)) * slot_bytes, 0
        for layer, experts in enumerate(absent):
            here, coming = self.home.bring(_START, layer, experts.tolist())
            for expert, host_slot in chain(here, coming):
                self.link.load(layer, expert, host_slot)
                done_bytes += slot_bytes
                progress("loading experts onto the device", done_bytes, total_bytes)
        self._is_under_way = False

    @property
    def gate(self) -> Gate:
        """What the prefetch policy wants the next layer's router to be run on."""
        return self._policies.prefetch.gate

    def as_dict(self) -> dict[str, float]:
        """What it did since it was made."""
        self._add_whole_counts()
        link, num_hits = self.link.stats, self.stats.num_hits + int(self._num_more_hits)
        return {
            **replace(self.stats, num_hits=num_hits).as_dict(),
            "read_bytes": self.home.read_bytes,
            "num_on_host": self.num_on_host,
            **link.as_dict(),
            "link_bytes": link.num_copies * self.home.slots.layout.num_bytes,
        }

    def _run_whole_layer(self, layer: int, rows: ExpertRows, buffers: ExpertBuffers) -> None:
        """Every expert is resident: the device needs nobody's help and no synchronisation."""
        self._whole_counts.append(rows.counts)
        if len(self._whole_counts) == _MAX_COUNTS:
            self._add_whole_counts()
        for group in self.link.resident_groups(layer, np.arange(self._shape.num_experts)):
            self.link.note_use(group, self.device.run(group, rows, buffers, None))

    def _add_whole_counts(self) -> None:
        counts, self._whole_counts = self._whole_counts, []
        if counts:
            self._num_more_hits += torch.stack(counts).count_nonzero()

    def _run_split_layer(
        self,
        layer: int,
        step: Step,
        rows: ExpertRows,
        buffers: ExpertBuffers,
        predicted: Tensor | None,
    ) -> None:
        host_parts = self.device.to_host(rows, buffers.parts)
        demand = self._demand(layer, rows)
        facts = self._facts(step, layer, demand)
        decision = self._policies.decide(facts)
        outcome = self.link.end_prefetch(layer, decision.assignment.fetch)
        split = _LayerSplit(self, layer, step, decision.assignment, rows, buffers, host_parts)
        split.start()
        split.follow(self._policies.moves(facts, decision))
        self._look_ahead(facts, outcome, predicted)
        split.collect_host()

    def _demand(self, layer: int, rows: ExpertRows) -> Demand:
        num_tokens = np.diff(rows.bounds)
        experts = np.flatnonzero(num_tokens)
        self.link.bind_arrived()
        is_resident = self.link.ledger.is_resident(layer)[experts]
        self.stats.num_hits += int(is_resident.sum())
        self.stats.num_misses += int((~is_resident).sum())
        device_of = self.link.devices_with(layer, experts)
        return Demand(experts, num_tokens[experts], is_resident, device_of)

    def _facts(self, step: Step, layer: int, demand: Demand) -> Facts:
        return Facts(
            step,
            layer,
            demand,
            self.link.is_kept(layer),
            self._policies.capacity,
            self.costs,
            self.link.arriving_s(layer, demand.experts),
            self.link.busy_s,
            can_fetch=self.costs.num_staging > 0,
        )

    def _predict(self, layer: int, x: Tensor, workspace: Buffers) -> Tensor | None:
        """What the early gate says of the next layer, in host memory after `to_host`."""
        if self.early_gate is None or not self._policies.prefetch.wants_prediction(layer + 1):
            return None
        predicted = self.early_gate.predict(layer, x, workspace)
        return None if predicted is None else self.device.stage(predicted)

    def _look_ahead(
        self, facts: Facts, outcome: PrefetchOutcome | None, predicted: Tensor | None
    ) -> None:
        prefetch, following = self._policies.prefetch, facts.layer + 1
        if outcome is not None:
            prefetch.record(outcome)
        prefetch.observe(facts)
        if following < self._shape.num_layers:
            counts = None if predicted is None else predicted.numpy()
            chosen = prefetch.choose(Ahead(following, self.link.is_kept(following), counts))
            self.link.look_ahead(following, chosen)

    def _abandon(self) -> None:
        """After a failure: gives all slots back, once nobody uses or fills them."""
        self._is_under_way = True
        self.executor.drain()
        self.device.drain()
        self.link.abandon()
        self.home.abandon()
        self._is_under_way = False


class _HostUse:
    """Host experts under way: read their slots until their work has ended."""

    def __init__(self, work: Future[None]) -> None:
        self._work = work

    def is_done(self) -> bool:
        return self._work.done()

    def pause(self, limit_s: float) -> None:
        """Waits for a while, or less if the work ends."""
        wait([self._work], limit_s)

    def wait(self, limit_s: float = WAIT_LIMIT_S) -> None:
        """Raises what the work raised, DeviceError after `limit_s`."""
        try:
            self._work.result(limit_s)
        except TimeoutError as error:
            raise DeviceError(
                f"An expert on the host has not been computed within {limit_s:g} s: a compute "
                "thread hangs or the machine is far too busy."
            ) from error


class _LayerSplit:
    """One layer's step, divided between the host and the device."""

    def __init__(
        self,
        runtime: HybridRuntime,
        layer: int,
        step: Step,
        assignment: Assignment,
        rows: ExpertRows,
        buffers: ExpertBuffers,
        host_parts: Tensor,
    ) -> None:
        self._runtime = runtime
        self._link = runtime.link
        self._device = runtime.device
        self._layer = layer
        self._step = step
        self._assignment = assignment
        self._rows = rows
        self._buffers = buffers
        self._host_parts = host_parts
        self._for_host = frozenset(assignment.host.tolist())
        self._fetch_on: dict[int, int] = {}
        if assignment.fetch_on is not None:
            pairs = zip(assignment.fetch.tolist(), assignment.fetch_on.tolist(), strict=True)
            self._fetch_on = dict(pairs)
        self._on_host: list[_HostUse] = []
        # By expert to fetch: its copy, if one is under way.
        self._arrivals: dict[int, Arrival | None] = {}
        self._first_wave: list[tuple[int, Arrival]] = []
        self._to_fetch: Iterable[tuple[int, int]] = ()
        self._keep: set[int] = set()
        self._wave: list[tuple[int, Arrival]] = []

    def start(self) -> None:
        """Starts what needs no moves: the host's share, the residents, a first wave's copies."""
        host, fetch = self._assignment.host.tolist(), self._assignment.fetch.tolist()
        self._arrivals = {expert: self._link.take_arrival(self._layer, expert) for expert in fetch}
        wanted = [*host, *(e for e, arrival in self._arrivals.items() if arrival is None)]
        here, coming = self._runtime.home.bring(self._step, self._layer, wanted)
        self._start_here([pair for pair in here if pair[0] in self._for_host])
        self._run_residents()
        fetched = [pair for pair in here if pair[0] not in self._for_host]
        first, rest = fetched[: self._runtime.wave_size], fetched[self._runtime.wave_size :]
        self._first_wave = [(expert, self._begin_copy(expert, slot)) for expert, slot in first]
        self._to_fetch = chain(rest, coming)

    def follow(self, moves: Moves) -> None:
        """Notes which fetched experts stay; queues them as they arrive, with what is still read
        from disk."""
        self._keep = self._link.obey(self._layer, moves, self._arrivals)
        taken = [(e, arrival) for e, arrival in self._arrivals.items() if arrival is not None]
        for expert, arrival in chain(taken, self._first_wave):
            self._add_to_wave(expert, arrival)
        self._accept(self._to_fetch)
        self._run_wave()

    def _accept(self, experts: Iterable[tuple[int, int]]) -> None:
        """Sends experts that are in host memory where they are assigned."""
        for expert, host_slot in experts:
            if expert in self._for_host:
                self._start_on_host(expert, host_slot)
            else:
                self._add_to_wave(expert, self._begin_copy(expert, host_slot))

    def _begin_copy(self, expert: int, host_slot: int) -> Arrival:
        return self._link.fetch(host_slot, self._fetch_on.get(expert))

    def _start_here(self, experts: list[tuple[int, int]]) -> None:
        """Starts the host's experts that are in host memory; those of few tokens in one call.

        That call comes last: all cores share it, so it fills the time that the others leave.
        """
        at_once, num_experts = self._runtime.at_once, len(experts)
        if not num_experts:
            return
        groups = self._rows.groups(*np.array(experts, np.int64).reshape(num_experts, 2).T)
        is_shared = np.zeros(num_experts, np.bool_)
        if at_once is not None:
            is_shared = at_once.takes_experts(groups[:, 2])
        for i in np.flatnonzero(~is_shared).tolist():
            self._start_on_host(*experts[i])
        shared = groups[is_shared]
        if at_once is not None and len(shared):
            compute = partial(at_once.run, shared, self._host_parts, *self._runtime.scratch)
            self._submit(compute, shared[:, 2].tolist(), shared[:, 0].tolist())

    def _start_on_host(self, expert: int, host_slot: int) -> None:
        runtime, pairs = self._runtime, self._rows.pairs(expert)
        weights = runtime.home.slots.weights(host_slot)

        def compute() -> None:
            parts = self._host_parts[pairs]
            gate, up = (buffer[pairs] for buffer in runtime.scratch)
            runtime.products.gated_mlp(parts, weights, gate, up, parts)

        self._submit(compute, [pairs.stop - pairs.start], [host_slot])

    def _submit(self, compute: Work, num_tokens: Sequence[int], host_slots: Sequence[int]) -> None:
        work = self._device.host_work(num_tokens, compute)
        use = _HostUse(self._runtime.executor.submit(work))
        for slot in host_slots:
            self._runtime.home.used_by(slot, use)
        self._on_host.append(use)

    def _run_residents(self) -> None:
        for group in self._link.resident_groups(self._layer, self._assignment.resident):
            self._run(group, None)

    def _run(self, group: ExpertGroup, after: Event | None) -> None:
        use = self._device.run(group, self._rows, self._buffers, after)
        self._link.note_use(group, use)

    def _add_to_wave(self, expert: int, arrival: Arrival) -> None:
        self._wave.append((expert, arrival))
        if len(self._wave) == self._runtime.wave_size:
            self._run_wave()

    def _run_wave(self) -> None:
        """Queues the experts of a wave, on each device behind the last of their arrivals there,
        and settles them."""
        if not self._wave:
            return
        wave = sorted(self._wave, key=lambda pair: pair[0])
        self._wave = []
        experts = np.array([expert for expert, _ in wave])
        slots = np.array([arrival.slot for _, arrival in wave])
        arrivals = {arrival.slot: arrival for _, arrival in wave}
        for group in self._link.by_device(ExpertGroup(experts, slots)):
            last = max((arrivals[slot] for slot in group.slots.tolist()), key=lambda a: a.order)
            self._run(group, last.event)
        for expert, arrival in wave:
            self._link.settle(self._layer, expert, arrival.slot, expert in self._keep)

    def collect_host(self) -> None:
        """Waits for the host; the link goes on with what waits for it meanwhile."""
        host = self._assignment.host
        self._runtime.num_on_host += len(host)
        for use in self._on_host:
            while self._link.has_waiting and not use.is_done():
                # One copy behind the one under way: the link does not wait for the next look.
                self._link.pump(self._link.link_s)
                use.pause(self._link.link_s)
            use.wait(WAIT_LIMIT_S)
        if len(host):
            self._device.from_host(self._host_parts, self._rows, host, self._buffers.parts)
