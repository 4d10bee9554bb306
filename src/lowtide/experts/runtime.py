"""THE HOT PATH: runs one layer's routed experts, wherever their bytes are.

Decides nothing: what stays resident is a placement policy's choice, bytes are moved by a
transfer, products are a kernel's. Whatever is resident, every token's experts run in the same
products and are summed in the same order, so the result's bits never depend on placement.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from lowtide.core import BoolArray, Demand, Facts, IntArray, MoEShape, Moves, Step
from lowtide.errors import InternalError
from lowtide.experts.at_once import ExpertsAtOnce
from lowtide.experts.read_ahead import Arrival, ReadAhead
from lowtide.experts.rows import ExpertBuffers, ExpertRows, Routing
from lowtide.experts.slots import ExpertSlots, SlotLedger
from lowtide.experts.transfer import Transfer
from lowtide.kernels.products import REFERENCE, Products
from lowtide.kernels.reference import combine
from lowtide.memory.workspace import Buffers
from lowtide.policies.decision import Policies
from lowtide.threads.executor import Executor


@dataclass
class ExpertStats:
    """What the runtime did, in counts, bytes and seconds since it was made."""

    num_hits: int = 0  # activated experts that were resident
    num_misses: int = 0  # activated experts that were not
    num_admitted: int = 0
    num_evicted: int = 0
    num_ahead: int = 0  # of the misses, those whose read began before their layer did
    num_wasted: int = 0  # reads that began before their layer did, for nothing
    read_bytes: int = 0
    wait_s: float = 0.0  # the computation stood still for a read

    def as_dict(self) -> dict[str, float]:
        num_activated = self.num_hits + self.num_misses
        hit_rate = self.num_hits / num_activated if num_activated else 1.0
        return {**asdict(self), "hit_rate": hit_rate}


class Observer(Protocol):
    """Somebody who watches without taking part: a trace, a comparison."""

    def saw_layer(self, layer: int, step: Step, x: Tensor, routing: Routing, out: Tensor) -> None:
        """After a layer's experts were summed: `x` [tokens, hidden] compute dtype, what its router
        and its experts were given, and `out` [tokens, hidden] float32, valid until the call
        returns."""
        ...


class ExpertRuntime:
    """Owns a model's experts on one compute device and the slots they run from."""

    def __init__(
        self,
        shape: MoEShape,
        slots: ExpertSlots,
        ledger: SlotLedger,
        transfer: Transfer,
        policies: Policies,
        executor: Executor,
        products: Products = REFERENCE,
    ) -> None:
        self._shape = shape
        self._slots = slots
        self._products = products
        self._at_once = ExpertsAtOnce.of(slots, products, executor.num_cores)
        self.ledger = ledger
        self.transfer = transfer
        self.executor = executor
        self.read_ahead = ReadAhead(ledger, shape.num_experts)
        self._policies = policies
        self.observer: Observer | None = None
        self.stats = ExpertStats()

    def forward(
        self, layer: int, x: Tensor, routing: Routing, step: Step, workspace: Buffers, out: Tensor
    ) -> None:
        """`out[t] = sum over t's experts e of weight * expert_e(x[t])`, in ascending e.

        x [tokens, hidden] compute dtype; out [tokens, hidden] float32; both and the routing are
        contiguous; `layer` counts MoE layers. Raises StorageError when an expert cannot be read;
        the runtime stays usable.
        """
        demand = self._demand(layer, routing)
        moves = self._moves(step, layer, demand)
        buffers = ExpertBuffers.take(workspace, self._shape, x)
        at_once = self._at_once
        if at_once is not None and at_once.takes(x) and self._is_settled(demand, moves):
            self._run_at_once(at_once, layer, x, routing, demand, buffers, out)
        else:
            self._run_one_by_one(layer, x, routing, demand, moves, buffers, out)
        num_hits = int(np.count_nonzero(demand.is_resident))
        self.stats.num_hits += num_hits
        self.stats.num_misses += len(demand.experts) - num_hits
        if self.observer is not None:
            self.observer.saw_layer(layer, step, x, routing, out)

    def evict_all(self) -> None:
        """Between passes only."""
        self.reclaim()  # what is read ahead
        for layer in range(self._shape.num_layers):
            for expert in np.flatnonzero(self.ledger.is_resident(layer)).tolist():
                self.ledger.evict(layer, expert)

    def adopt(self, policies: Policies) -> None:
        """Goes on under other policies. Between passes only, with nothing resident."""
        self._policies = policies

    def reclaim(self) -> None:
        """Gives all slots back but residents', once no thread uses or writes them."""
        self.read_ahead.cancel()
        self.executor.drain()
        self.transfer.drain()
        self.ledger.reclaim()

    def preload(self, layer: int, experts: IntArray) -> None:
        """Makes absent `experts` of `layer` resident before the first step."""
        demand = Demand(experts, np.zeros_like(experts), np.zeros(len(experts), np.bool_))
        moves = Moves(experts, experts[:0])
        self._run_all(layer, demand, moves, _NO_USE, has_next=False)

    def close(self) -> None:
        """Its threads belong to others: nothing is left to end."""

    def as_dict(self) -> dict[str, float]:
        """What it did since it was made."""
        return self.stats.as_dict()

    def _demand(self, layer: int, routing: Routing) -> Demand:
        chosen = routing.experts.numpy().ravel()
        num_tokens = np.bincount(chosen, minlength=self._shape.num_experts)
        experts = np.flatnonzero(num_tokens)
        return Demand(experts, num_tokens[experts], self.ledger.is_resident(layer)[experts])

    def _moves(self, step: Step, layer: int, demand: Demand) -> Moves:
        policies = self._policies
        facts = Facts(
            step,
            layer,
            demand,
            self.ledger.is_resident(layer),
            policies.capacity,
            policies.costs,
            can_fetch=False,
            has_idle_link=False,
        )
        return policies.moves(facts, policies.decide(facts))

    def _is_settled(self, demand: Demand, moves: Moves) -> bool:
        """Whether all that is demanded is there and nothing is on the move."""
        is_moving = len(moves.admit) or len(moves.evict) or len(self.read_ahead)
        return not is_moving and bool(demand.is_resident.all())

    def _run_at_once(
        self,
        at_once: ExpertsAtOnce,
        layer: int,
        x: Tensor,
        routing: Routing,
        demand: Demand,
        buffers: ExpertBuffers,
        out: Tensor,
    ) -> None:
        """All experts in one call. No other thread changes what is in a slot, and this one waits:
        nothing is leased."""
        if layer + 1 < self._shape.num_layers:
            self.read_ahead.expect(layer + 1, demand)
            self.read_ahead.start_reads(self.transfer)
        slots = self.ledger.slots_of(layer, demand.experts)
        at_once.run_layer(x, routing, slots, buffers, out)

    def _run_one_by_one(
        self,
        layer: int,
        x: Tensor,
        routing: Routing,
        demand: Demand,
        moves: Moves,
        buffers: ExpertBuffers,
        out: Tensor,
    ) -> None:
        """Residents of few tokens in one call, the others each once it is there and a thread is
        free: the same bits as all at once."""
        rows = ExpertRows(routing.experts, self._shape.num_experts)
        torch.index_select(x, 0, rows.token_of, out=buffers.parts)
        use = _Use(
            partial(self._run, rows=rows, buffers=buffers),
            partial(self._run_few, rows=rows, buffers=buffers),
        )
        self._run_all(layer, demand, moves, use, has_next=layer + 1 < self._shape.num_layers)
        combine(buffers.parts, rows.part_of, routing.weights, buffers.term, buffers.term_fp32, out)

    def _run(self, expert: int, slot: int, rows: ExpertRows, buffers: ExpertBuffers) -> None:
        pairs = rows.pairs(expert)
        # An expert's inputs are not needed once gate and up are computed: the outputs replace them.
        parts = buffers.parts[pairs]
        weights, gate, up = self._slots.weights(slot), buffers.gate[pairs], buffers.up[pairs]
        self._products.gated_mlp(parts, weights, gate, up, parts)

    def _run_few(
        self, experts: IntArray, slots: IntArray, rows: ExpertRows, buffers: ExpertBuffers
    ) -> BoolArray:
        """Runs those of few tokens in one call; says which they are."""
        if self._at_once is None:
            return np.zeros(len(experts), np.bool_)
        groups = rows.groups(experts, slots)
        is_few = self._at_once.takes_experts(groups[:, 2])
        self._at_once.run(groups[is_few], buffers.parts, buffers.gate, buffers.up)
        return is_few

    def _run_all(
        self,
        layer: int,
        demand: Demand,
        moves: Moves,
        use: _Use,
        has_next: bool,
    ) -> None:
        """Uses every demanded expert: residents of few tokens at once, others on compute threads.

        Reads of absent experts start as slots come free, and so overlap the use of those present;
        once all have started, those expected of the next layer do, where it `has_next`.
        After its use an expert is kept, evicted or dropped, as `moves` says.
        """
        pass_ = _LayerPass(self, layer, demand, moves, use)
        try:
            pass_.start()
            if has_next:
                self.read_ahead.expect(layer + 1, demand)
            pass_.start_reads()
            pass_.use_residents()
            is_busy = True
            while is_busy:
                pass_.start_reads()
                is_busy = pass_.advance()
            pass_.start_reads()  # ahead, into the last slots that came free
        except BaseException:
            pass_.abandon()
            raise


LOOK_S = 1e-3
"""How often used experts' slots are looked for: about as long as one of many tokens takes."""


class _Use(NamedTuple):
    """What experts are brought for."""

    one: Callable[[int, int], None]  # expert, slot; on any thread
    several: Callable[[IntArray, IntArray], BoolArray]  # experts, slots; says which it has used


_NO_USE = _Use(lambda expert, slot: None, lambda experts, slots: np.zeros(len(experts), np.bool_))


class _LayerPass:
    """One layer's demanded experts on their way: waiting, arriving, ready, used, settled.

    The calling thread starts reads and settles what was used (a slot changes hands on no other
    thread); compute threads take experts from `ready`, arrivals first, since their slots are
    wanted by those that wait.
    """

    def __init__(
        self,
        runtime: ExpertRuntime,
        layer: int,
        demand: Demand,
        moves: Moves,
        use: _Use,
    ) -> None:
        self._runtime = runtime
        self._layer = layer
        self._use = use
        self._admit = frozenset(moves.admit.tolist())
        self._evict = frozenset(moves.evict.tolist())
        self._demanded = frozenset(demand.experts.tolist())
        self._residents = demand.experts[demand.is_resident]
        self._absent = demand.experts[~demand.is_resident].tolist()
        self._waiting = deque(self._absent)
        self._arriving: deque[Arrival] = deque()
        self._ready: deque[tuple[int, int]] = deque()
        self._used: deque[int] = deque()
        self._slots: dict[int, int] = {}  # of experts that are ready or used, not yet settled
        self._work: deque[Future[None]] = deque()

    def start(self) -> None:
        """Frees what nobody asks for, and goes on with the reads that began before."""
        for expert in sorted(self._evict - self._demanded):
            self._evict_now(expert)
        self._claim()

    def start_reads(self) -> None:
        """Gives every free slot to an expert that waits for one, then to the next layer's."""
        ledger, transfer = self._runtime.ledger, self._runtime.transfer
        while self._waiting and ledger.num_free:
            expert, slot = self._waiting.popleft(), ledger.take()
            ticket = transfer.start(self._layer, expert, slot)
            self._arriving.append(Arrival(expert, slot, ticket))
        if not self._waiting:
            self._runtime.read_ahead.start_reads(transfer)

    def use_residents(self) -> None:
        """Uses those that can be at once, while all reads are under way; starts the others' use."""
        ledger, residents = self._runtime.ledger, self._residents
        slots = ledger.slots_of(self._layer, residents)
        is_used = np.zeros(len(residents), np.bool_)
        if not self._waiting:  # for slots, which only this thread gives to others
            is_used = self._use.several(residents, slots)
        for expert in sorted(self._evict.intersection(residents[is_used].tolist())):
            self._evict_now(expert)
        pairs = zip(residents[~is_used].tolist(), slots[~is_used].tolist(), strict=True)
        for expert, slot in pairs:
            ledger.lease(slot)
            self._slots[expert] = slot
            self._ready.append((expert, slot))
        for _ in range(min(len(self._ready), self._runtime.executor.num_threads)):
            self._start_work()

    def advance(self) -> bool:
        """Waits for the next arrival, or for work to end; False when all is settled."""
        if self._arriving:
            self._accept_arrival()
        elif self._work:
            self._await_use()
        elif self._waiting:
            raise InternalError(f"{len(self._waiting)} experts wait and no slot is free.")
        while self._work and self._work[0].done():
            self._work.popleft().result()
        while self._used:
            self._settle(self._used.popleft())
        return bool(self._waiting or self._arriving or self._work)

    def abandon(self) -> None:
        """After a failure: gives all slots back, once no thread uses or writes them."""
        self._ready.clear()
        wait(self._work)
        wait(ticket for _, _, ticket in self._arriving if not ticket.cancel())
        # Ctrl-C comes anywhere: what had just been started may not have been noted yet.
        self._runtime.reclaim()

    def _claim(self) -> None:
        """Goes on with the reads that began before this layer did."""
        read_ahead, stats = self._runtime.read_ahead, self._runtime.stats
        num_begun = len(read_ahead)
        self._arriving.extend(read_ahead.claim(self._layer, self._absent))
        for arrival in self._arriving:
            self._waiting.remove(arrival.expert)
        stats.num_ahead += len(self._arriving)
        stats.num_wasted += num_begun - len(self._arriving)

    def _await_use(self) -> None:
        """Waits for work to end, or looks in between for slots that a read ahead could have."""
        if self._runtime.read_ahead.is_waiting:
            wait([self._work[0]], timeout=LOOK_S)
        else:
            self._work[0].result()

    def _accept_arrival(self) -> None:
        expert, slot, ticket = self._arriving[0]
        stats = self._runtime.stats
        start = perf_counter()
        stats.read_bytes += ticket.result()
        stats.wait_s += perf_counter() - start
        self._arriving.popleft()
        self._slots[expert] = slot
        self._ready.appendleft((expert, slot))
        self._start_work()

    def _start_work(self) -> None:
        self._work.append(self._runtime.executor.submit(self._use_ready))

    def _use_ready(self) -> None:
        """On a compute thread: uses experts until none is ready."""
        while True:
            try:
                expert, slot = self._ready.popleft()
            except IndexError:  # another thread took the last one
                return
            self._use.one(expert, slot)
            self._used.append(expert)

    def _settle(self, expert: int) -> None:
        """After its use: keep, evict or drop."""
        ledger, slot = self._runtime.ledger, self._slots.pop(expert)
        if expert in self._admit:
            ledger.bind(self._layer, expert, slot)
            self._runtime.stats.num_admitted += 1
        elif ledger.is_bound(slot):
            ledger.release(slot)
            if expert in self._evict:
                self._evict_now(expert)
        else:
            ledger.drop(slot)

    def _evict_now(self, expert: int) -> None:
        self._runtime.ledger.evict(self._layer, expert)
        self._runtime.stats.num_evicted += 1


class ExpertRegistrar:
    """Stands in for the runtime while a forward pass is only counted."""

    def __init__(self, shape: MoEShape) -> None:
        self._shape = shape

    def forward(
        self, layer: int, x: Tensor, routing: Routing, step: Step, workspace: Buffers, out: Tensor
    ) -> None:
        ExpertBuffers.take(workspace, self._shape, x)
