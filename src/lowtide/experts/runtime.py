"""THE HOT PATH: runs one layer's routed experts, wherever their bytes are.

A host tier, and a device tier on top of it where there is a device; without one the host runs
every expert. Decides nothing: who runs where, what stays and what comes next are the policies'
choices. An expert's products and the order of the sum are the same wherever it runs and whatever
is resident, so the result's bits never depend on placement.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lowtide.core import Demand, Facts, IntArray, MoEShape, Moves, RoutedTokens, Step
from lowtide.experts.device_tier import AtHost, DeviceTier
from lowtide.experts.host_share import HostCompute
from lowtide.experts.host_tier import HostTier
from lowtide.experts.layer_run import LayerRun
from lowtide.experts.long_pass import LongPass, LongRun
from lowtide.experts.room import Room
from lowtide.experts.rows import (
    ExpertBuffers,
    ExpertRows,
    HostScratch,
    Routing,
    RunInPlace,
    Terms,
    is_long,
)
from lowtide.experts.told import device_facts, host_facts, substituted_routing, tell
from lowtide.kernels.layer_parts import InPlace
from lowtide.memory.workspace import Buffers
from lowtide.policies.decision import Decision, Policies
from lowtide.policies.lending import Use
from lowtide.policies.receipt import Receipt
from lowtide.reading.dense_weights import Progress, no_progress


class Observer(Protocol):
    """Somebody who watches without taking part: a trace, a comparison."""

    def saw_layer(self, layer: int, step: Step, x: Tensor, routing: Routing, out: Tensor) -> None:
        """After a layer's experts were summed: `x` [tokens, hidden] compute dtype, what its router
        and its experts were given, and `out` [tokens, hidden] float32, valid until the call
        returns."""
        ...


class ExpertObserver(Protocol):
    """Somebody who watches what experts' matrices are multiplied with, where the host has all."""

    def saw_experts(self, layer: int, x: Tensor, rows: ExpertRows, activated: Tensor) -> None:
        """After experts of a layer were run, all or a tile's, each for itself: `x` [tokens, hidden]
        compute dtype; `activated` [pairs, expert_size], what down was given, in the order of the
        sorted pairs of `rows`. Valid until the call returns."""
        ...


@dataclass
class ExpertStats:
    """Activated experts, counted since the runtime was made."""

    num_hits: int = 0  # those that were resident in the fast tier
    num_misses: int = 0  # those that were not
    num_moves_asked: int = 0  # experts that the placement asked to become resident
    num_moves_done: int = 0  # those that became so; the others were dropped, or wait yet


class ExpertRuntime:
    """Owns a model's experts, in the host tier and on the device if there is one, and the policies
    that decide about them."""

    def __init__(
        self,
        shape: MoEShape,
        host: HostTier,
        policies: Policies,
        compute: HostCompute,
        device: DeviceTier | None = None,
        scratch: HostScratch | None = None,
    ) -> None:
        """scratch: where the host's experts compute beside a device; in the workspace without."""
        self._shape = shape
        # Of what is computed beside experts, where the layer's rows are.
        self._kernels = compute.kernels if device is None else device.device.kernels
        self.host = host
        self.device = device
        self.policies = policies
        self.room = Room(policies.capacity)
        self.compute = compute
        self.scratch = scratch
        self.observer: Observer | None = None
        self.expert_observer: ExpertObserver | None = None  # never beside a device
        self.use: Use | None = None  # told of every demand, where somebody wants to know
        self.stats = ExpertStats()
        self.num_on_host = 0
        # Of the pass that the host runs alone: its step, and what its layers ask for.
        self._step: Step | None = None
        self._hits = np.zeros((shape.num_layers, shape.num_experts), np.int64)
        self._last_layer = 0
        self._is_under_way = False  # a step, or what has to be cleared up after one

    @property
    def asks_scores(self) -> bool:
        """Whether `forward` is to be told the router's scores."""
        return self.policies.asks_scores

    def forward(
        self,
        layer: int,
        x: Tensor,
        routing: Routing,
        step: Step,
        workspace: Buffers,
        out: Tensor,
        scores: Tensor | None = None,
        run_in_place: RunInPlace | None = None,
    ) -> None:
        """`out[t] = sum over t's experts e of weight * expert_e(x[t])`, in ascending e.

        x [tokens, hidden] compute dtype; out [tokens, hidden] float32; both and the routing are
        contiguous; `layer` counts MoE layers. scores [tokens, num_experts] float32: the router's
        logits, for policies that ask for them. run_in_place: writes to `out`, of experts that are
        where `in_place` says. Raises StorageError or DeviceError when an expert
        cannot be had; the runtime stays usable.
        """
        if self._is_under_way:  # Ctrl-C came again while the last failure was cleared up
            self._abandon()
        self._is_under_way = True
        device, fits_tile = self.device, not is_long(len(x))
        try:
            if device is not None and fits_tile and self._stays_whole(device, layer):
                self._run_whole(device, layer, x, routing, workspace, out)
            else:
                self._run_layer(layer, x, routing, step, workspace, out, scores, run_in_place)
            if layer == self._shape.num_layers - 1:
                self._end_pass()
            self._is_under_way = False
        except BaseException:
            self._abandon()
            raise
        if self.observer is not None:
            self.observer.saw_layer(layer, step, x, routing, out)

    def in_place(self, layer: int) -> InPlace | None:
        """Where kernels may run a layer's experts by themselves, as long as `need_nobody`."""
        if self.device is not None or self.compute.at_once is None:
            return None
        return self.compute.at_once.in_place(self.host.ledger.table(layer), layer)

    def need_nobody(self, layer: int) -> bool:
        """Whether every expert of the model is in a slot of the host and stays there, and nobody
        watches or counts: then no policy has anything to say of a layer."""
        return self._has_no_listener and not self.room.is_short(layer, self.host.ledger.num_slots)

    @property
    def need_nobody_at_all(self) -> bool:
        """Whether that is so of every layer."""
        return self._has_no_listener and not self.room.is_short_anywhere(self.host.ledger.num_slots)

    @property
    def _has_no_listener(self) -> bool:
        is_watched = self.observer is not None or self.expert_observer is not None
        is_asked = is_watched or self.use is not None or self._is_under_way
        if is_asked or self.device is not None or self.policies.receipts is not None:
            return False
        return self.host.ledger.has_everybody

    def were_run(self, num_experts: int) -> None:
        """So many of a layer were run in place."""
        self.stats.num_hits += num_experts

    def were_activated(self, layer: int, x: Tensor, rows: ExpertRows, activated: Tensor) -> None:
        """Experts were run on these rows, and nothing is written over what they made of them."""
        if self.expert_observer is not None:
            self.expert_observer.saw_experts(layer, x, rows, activated)

    def load(self, progress: Progress = no_progress) -> None:
        """Makes the policies' first residents resident, and no others. Between passes only."""
        self._is_under_way = True
        initial = [self.policies.placement.initial(i) for i in range(self._shape.num_layers)]
        if self.device is None:
            self.host.load(initial, progress)
        else:
            self.device.load(self.host, initial, progress)
        self._is_under_way = False

    def adopt(self, policies: Policies, progress: Progress = no_progress) -> None:
        """Goes on under other policies, from their own first residents. Between passes only."""
        self._abandon()  # nothing is demanded: ends what was begun for later
        if policies.receipts is not None and self.policies.receipts is not None:
            policies.receipts.take_over(self.policies.receipts)
        self.policies = policies
        self.room = Room(policies.capacity)
        self._step = None
        self.load(progress)

    def close(self) -> None:
        """Gives back the device; the host's threads and files are others'."""
        if self.device is not None:
            self.device.close()

    def as_dict(self) -> dict[str, float]:
        """What it did since it was made."""
        device = self.device
        num_hits = self.stats.num_hits + (0 if device is None else device.num_hits)
        num_activated = num_hits + self.stats.num_misses
        counts = {
            **asdict(self.stats),
            **asdict(self.host.stats),
            "num_hits": num_hits,
            "hit_rate": num_hits / num_activated if num_activated else 1.0,
        }
        if device is None:
            return counts
        link = device.link.stats  # with a device it is the link that carries out moves
        counts.update({"num_on_host": self.num_on_host, **link.as_dict()})
        return {**counts, "link_bytes": link.num_copies * self.host.slots.layout.num_bytes}

    def _stays_whole(self, device: DeviceTier, layer: int) -> bool:
        """Whether a layer needs no policy; its router's weights are counted for receipts, too."""
        return self.policies.receipts is None and device.stays_whole(layer, self.room)

    def take_receipt(self, request: int) -> Receipt | None:
        """What was done to a request's words, once it has ended; None where nothing may be."""
        receipts = self.policies.receipts
        return None if receipts is None else receipts.take(request)

    def _run_whole(
        self,
        device: DeviceTier,
        layer: int,
        x: Tensor,
        routing: Routing,
        workspace: Buffers,
        out: Tensor,
    ) -> None:
        """A layer of which the device has every expert: it needs nobody's help."""
        buffers = ExpertBuffers.take(workspace, self._shape, x)
        rows = self._rows(x, routing, buffers)
        if self.use is not None:  # a synchronisation, where slots are lent
            self.use.saw(layer, rows.counts.cpu().numpy().nonzero()[0])
        device.run_whole(layer, rows, buffers)
        device.finish(layer, x.shape[0])
        self._combine(x, rows, routing, buffers, workspace, out)

    def _run_layer(
        self,
        layer: int,
        x: Tensor,
        routing: Routing,
        step: Step,
        workspace: Buffers,
        out: Tensor,
        scores: Tensor | None,
        run_in_place: RunInPlace | None,
    ) -> None:
        """Demand, substitute, decide, rows, run, combine."""
        if self.device is None:
            if self._step is None or layer <= self._last_layer:
                self._begin_pass(step)
            self._last_layer = layer
            self.host.arrive(layer)
        at_host = self._look(layer, x, routing, scores, workspace)
        facts = self._facts(step, layer, at_host.experts, at_host.told)
        self._count(layer, facts.demand)
        self._hits[layer, facts.demand.experts] = facts.demand.num_tokens
        routing, at_host, decision = self._decide(facts, routing, at_host, workspace)
        demand = facts.demand if decision.run is None else decision.run.demand
        is_at_once = self._can_run_at_once(x, demand, decision)
        if is_at_once:
            self._start_reads(facts, decision.run)
            if run_in_place is not None:
                run_in_place(*routing)
                return
        buffers = ExpertBuffers.take(workspace, self._shape, x)
        if is_long(len(x)):
            rows = self._sorted(routing)
            terms = Terms.take(workspace, buffers, x)
            given = LongPass.of(x, routing, rows, buffers, terms, out)
            LongRun(self, facts, decision, at_host, given).run()
            return
        if is_at_once:
            self._run_at_once(layer, x, routing, demand.experts, buffers, out)
            return
        rows = self._rows(x, routing, buffers)
        LayerRun(self, facts, decision, at_host, rows, buffers).run()
        self.were_activated(layer, x, rows, buffers.gate)
        self._combine(x, rows, routing, buffers, workspace, out)

    def _begin_pass(self, step: Step) -> None:
        """Of the host alone."""
        ledger, self._step = self.host.ledger, step
        self._hits.fill(0)
        residents = [ledger.is_resident(layer).sum() for layer in range(self._shape.num_layers)]
        self.policies.begin_pass(step, np.array(residents), self.room.capacity)

    def _end_pass(self) -> None:
        """After the last layer, if it was heard of."""
        if self.device is not None:
            self.device.end_pass(self.host)
        elif self._step is not None:
            self.policies.end_pass(self._step, self._hits)
            self._step = None

    def _decide(
        self, facts: Facts, routing: Routing, at_host: AtHost, workspace: Buffers
    ) -> tuple[Routing, AtHost, Decision]:
        """What is to be run, which a substitution may have changed, and by whom."""
        run: Facts | None = None
        substituted = self.policies.substitute(facts)
        if substituted is not None:
            routing, experts = substituted_routing(substituted, routing, workspace)
            at_host = at_host._replace(experts=experts)
            run = self._facts(facts.step, facts.layer, experts, substituted)
        if self.device is None and not is_long(len(at_host.x)):
            # Deciding takes a share of a millisecond, in which the disk would have nothing to do:
            # much of a short pass.
            self.host.begin(facts.layer, (run or facts).demand.experts)
        return routing, at_host, self._with_moves(facts, self.policies.decide(facts, run))

    def _with_moves(self, facts: Facts, decision: Decision) -> Decision:
        """Without a device, with its moves: who stays says whose slots are given to whom."""
        if self.device is not None:
            return decision
        moves = self.moves(facts, decision)
        self.stats.num_moves_done += len(moves.admit) + len(moves.later)
        return decision._replace(moves=moves)

    def _look(
        self, layer: int, x: Tensor, routing: Routing, scores: Tensor | None, workspace: Buffers
    ) -> AtHost:
        if self.device is None:
            told = tell(*routing, scores) if self.policies.asks_routing else None
            return AtHost(x, routing.experts, told)
        if is_long(len(x)):  # more rows than a device has room for in host memory
            experts, told = routing.experts.cpu(), None
            if self.policies.asks_routing:
                scores = None if scores is None else scores.cpu()
                told = tell(experts, routing.weights.cpu(), scores)
            return AtHost(x, experts, told)
        return self.device.look(layer, x, routing, scores, self.policies, workspace)

    def _facts(self, step: Step, layer: int, chosen: Tensor, told: RoutedTokens | None) -> Facts:
        num_tokens = np.bincount(chosen.numpy().ravel(), minlength=self._shape.num_experts)
        common = (step, layer, num_tokens, told, self.room.capacity, self.policies.costs)
        if self.device is None:
            return host_facts(*common, self.host.ledger)
        return device_facts(*common, self.device.link, self.host)

    def _count(self, layer: int, demand: Demand) -> None:
        if self.use is not None:
            self.use.saw(layer, demand.experts)
        self.stats.num_hits += (num_hits := int(np.count_nonzero(demand.is_resident)))
        self.stats.num_misses += len(demand.experts) - num_hits

    def _sorted(self, routing: Routing) -> ExpertRows:
        return ExpertRows(self._kernels.sort_pairs(routing.experts, self._shape.num_experts))

    def _rows(self, x: Tensor, routing: Routing, buffers: ExpertBuffers) -> ExpertRows:
        rows = self._sorted(routing)
        torch.index_select(x, 0, rows.token_of, out=buffers.parts)
        return rows

    def _combine(
        self,
        x: Tensor,
        rows: ExpertRows,
        routing: Routing,
        buffers: ExpertBuffers,
        workspace: Buffers,
        out: Tensor,
    ) -> None:
        terms = Terms.take(workspace, buffers, x)
        self._kernels.combine(buffers.parts, rows.part_of, routing.weights, *terms, out)

    def _can_run_at_once(self, x: Tensor, demand: Demand, decision: Decision) -> bool:
        """Whether one compiled call can do all: the host runs every expert, all that is demanded
        is there and nothing is on the move."""
        at_once, moves = self.compute.at_once, decision.moves
        if self.device is not None or at_once is None or not at_once.takes(x):
            return False
        if self.expert_observer is not None:  # who is told of experts one by one
            return False
        is_moving = moves is not None and any(map(len, moves[:3]))
        return not is_moving and not self.host.num_ahead and bool(demand.is_resident.all())

    def _run_at_once(
        self,
        layer: int,
        x: Tensor,
        routing: Routing,
        experts: IntArray,
        buffers: ExpertBuffers,
        out: Tensor,
    ) -> None:
        """No other thread changes what is in a slot, and this one waits: nothing is leased."""
        slots = self.host.ledger.slots_of(layer, experts)
        if self.compute.at_once is not None:
            self.compute.at_once.run_layer(x, routing, slots, buffers, out, layer)

    def moves(self, facts: Facts, decision: Decision) -> Moves:
        """What the policies want to move, counted."""
        moves = self.policies.moves(facts, decision)
        self.stats.num_moves_asked += moves.num_asked
        return moves

    def _start_reads(self, facts: Facts, run: Facts | None) -> None:
        """Of what the next layer is expected to ask for: this one has all that it asks for."""
        self.host.expect_next(facts, run)
        if self.host.read_ahead is not None:
            self.host.read_ahead.start_reads(self.host.transfer)

    def _abandon(self) -> None:
        """After a failure: gives all slots back, once nobody uses or fills them."""
        self._is_under_way = True
        self.compute.executor.drain()
        if self.device is not None:
            self.device.abandon()
        self.host.abandon()
        self._is_under_way = False
