"""Expert runtime: runs one layer's routed experts, on host and device.

Each expert of a layer runs on one side. The host's executor runs experts once their bytes have been
read; a device's executor runs those in its slots or fetched into them. The runtime decides nothing:
policies choose where experts run, which stay and which come next.

An expert's products and the order of the sum are the same wherever it runs and whatever is
resident. So the bits of the result never depend on placement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from time import perf_counter
from typing import Protocol

import numpy as np
from torch import Tensor

from lowtide.core import NO_MOVES, BoolArray, Facts, IntArray, MoEShape, Moves, Step
from lowtide.experts.capacity import Capacity
from lowtide.experts.compiled_residents import CompiledResidents
from lowtide.experts.device_executor import DeviceExpertExecutor
from lowtide.experts.host_executor import HostExpertExecutor
from lowtide.experts.policy_facts import HostInputs, substituted_routing
from lowtide.experts.rows import ExpertRows, LayerCall, Routing
from lowtide.experts.stats import ExpertLook, ExpertStats
from lowtide.experts.work import Plan, Work
from lowtide.kernels.layer_parts import ExpertParts
from lowtide.policies.answers import check_experts, check_moves, check_ranks
from lowtide.policies.decision import Decision, Policies
from lowtide.policies.receipt import Receipt
from lowtide.policies.slot_lending import ExpertUse
from lowtide.policies.substitution import replaced
from lowtide.progress import Progress, no_progress
from lowtide.threads.event import Event

SAMPLE_S = 0.1
"""Least time between two passes that are counted for watchers where that needs synchronisation."""

_ON_DEVICE, _ON_HOST, _FROM_DISK = range(3)  # where a row's expert is run, or comes from


class Observer(Protocol):
    """Read-only hook, called after each layer, for example by a trace or a comparison."""

    def saw_layer(self, layer: int, step: Step, x: Tensor, routing: Routing, out: Tensor) -> None:
        """Observe a layer after its experts were summed.

        `x` [tokens, hidden] compute dtype is the input of its router and experts, `out` [tokens,
        hidden] float32 their sum; both are valid until the call returns.
        """
        ...


class ExpertObserver(Protocol):
    """Observer of the inputs of experts' matrices, if the host runs all experts."""

    def saw_experts(self, layer: int, x: Tensor, rows: ExpertRows, activated: Tensor) -> None:
        """Observe experts of a layer, all or a tile's, after they were run.

        `x` [tokens, hidden] compute dtype; `activated` [pairs, expert_size]: the input of down, in
        the order of the sorted pairs of `rows`. Valid until the call returns.
        """
        ...


class ExpertRuntime:
    """Runtime of a model's experts, with the policies that decide about them.

    Does not know how experts are run, nor where from.
    """

    def __init__(
        self,
        shape: MoEShape,
        policies: Policies,
        executor: HostExpertExecutor | DeviceExpertExecutor,
    ) -> None:
        self._shape = shape
        self.policies = policies
        self.asks_scores = policies.asks_scores  # `forward` needs the router's scores
        self.executor = executor
        self.host, self.device = executor.host, executor.device
        self._alone = executor if isinstance(executor, HostExpertExecutor) else None
        self.capacity = Capacity(policies.capacity)
        self.observer: Observer | None = None
        self.expert_observer: ExpertObserver | None = None  # never with a device
        self.use: ExpertUse | None = None  # counts every demand, if set
        # For each watcher, tokens by expert [layers, experts]. Other threads replace the tuple.
        self._watches: tuple[IntArray, ...] = ()
        self._is_sampled = False  # True: this pass counts also where that needs synchronisation
        self._sample_due_s = -math.inf
        self._num_device_hits = 0  # of the latest sample
        self.stats = ExpertStats()
        self._is_under_way = False  # a step, or what has to be cleared up after one
        self._hits: IntArray = np.zeros((shape.num_layers, shape.num_experts), np.int64)
        self._place: IntArray = np.zeros(shape.num_experts, np.int64)  # scratch of `_count`
        self._compiled = executor.compiled_residents(self._hits, self._abandon)

    def forward(self, call: LayerCall) -> None:
        """Compute `out[t] = sum over t's experts e of weight * expert_e(x[t])`, in ascending e.

        x, out and the routing are contiguous. Raises StorageError or DeviceError when an expert
        cannot be read or copied; the runtime stays usable.
        """
        if self._is_under_way:  # Ctrl-C came again while the last failure was cleared up
            self._abandon()
        residents = None
        if self._compiled is not None and self._compiled.takes(call):
            residents = self.residents()
        self._is_under_way = True
        try:
            if residents is None:
                self._run(call)
            else:
                residents.run_layer(call)
            self._is_under_way = False
        except BaseException:
            self._abandon()
            raise
        if self.observer is not None:
            self.observer.saw_layer(call.layer, call.step, call.x, call.routing, call.out)

    @property
    def joins_chunks(self) -> bool:
        """True if several chunks of a prompt may share a layer's reads, and some are to be read.

        Not if somebody observes layers, who sees chunk by chunk, nor if a policy looks at what a
        pass demands to choose other experts.
        """
        is_watched = self.observer is not None or self.expert_observer is not None
        if is_watched or self.device is not None or self.policies.asks_scores:
            return False
        return self.policies.substitution is None and not self.host.ledger.residents.all()

    def parts(self, layer: int) -> ExpertParts | None:
        """Return a layer's experts, for kernels that run whole layers; None if they cannot."""
        return self.executor.parts(layer)

    def settle_whole(self) -> int | None:
        """Return a number that changes with any expert's slot, for passes that graphs repeat.

        They can if a device has every expert and nobody looks at single layers: None otherwise.
        """
        is_seen = self.observer is not None or self.use is not None or self._is_sampled
        if self.device is None or is_seen or self._is_under_way:
            return None
        if self.policies.receipts is not None:
            return None
        return self.device.settle_whole(self.capacity)

    def add_counts(self) -> None:
        """Queue the adding up of counts of layers that are wholly on the device."""
        if self.device is not None:
            self.device.add_counts()

    def end_repeated(self, num_rows: int, use: Event) -> None:
        """End a pass of these rows that graphs repeated; use: the end of what is queued."""
        if self.device is not None:
            num_pairs = num_rows * self._shape.num_experts_per_token * self._shape.num_layers
            self.stats.num_expert_rows += num_pairs
            self.stats.num_device_rows += num_pairs
            self.device.end_whole_pass(use)

    def end_capture(self, use: Event) -> None:
        """Forget what a capture left that means nothing outside of it: its events, and counts.

        use: the end of what is queued.
        """
        if self.device is not None:
            self.device.drop_counts()
            self.device.end_whole_pass(use)

    def begin_pass(self, step: Step) -> None:
        """Begin a pass; on the host alone, policies rank the experts that may become resident."""
        self._step = step
        self._hits.fill(0)
        self._is_sampled = bool(self._watches) and perf_counter() >= self._sample_due_s
        if self.device is None:
            num_residents = self.host.ledger.residents.sum(axis=1)
            ranks = self.policies.begin_pass(step, num_residents, self.capacity.per_layer)
            if self.policies.is_checked:
                check_ranks(ranks, self.capacity.per_layer, self._shape.num_experts)
            if self._compiled is not None:
                self._compiled.begin_pass(ranks)

    def residents(self) -> CompiledResidents | None:
        """Return the residency for the compiled layers of this pass.

        None if Python must be called between a layer's router and its experts: for a substitution
        or an observer.
        """
        is_watched = self.observer is not None or self.expert_observer is not None
        if is_watched or self.policies.substitution is not None:
            return None
        if self._is_under_way:  # Ctrl-C came again while the last failure was cleared up
            self._abandon()
        if self._compiled is not None:
            self.host.pause()
        return self._compiled

    def end_pass(self) -> None:
        """End a pass; policies learn from its demands."""
        if self.device is None:
            if self._compiled is not None:
                self._compiled.count_outcome(self.stats)
            self.policies.end_pass(self._step, self._hits)
        if self.use is not None:
            self.use.saw(self._hits)
        for num_tokens in self._watches:
            num_tokens += self._hits
        if self._is_sampled and self.device is not None:
            self._num_device_hits = self.device.num_hits
            self._sample_due_s = perf_counter() + SAMPLE_S

    def load(self, progress: Progress = no_progress) -> None:
        """Make exactly the policies' first residents resident; between passes only."""
        self._is_under_way = True
        initial = [self.policies.placement.initial(i) for i in range(self._shape.num_layers)]
        for experts in initial:
            check_experts("begins with", experts, self._shape.num_experts)
        self.executor.load(initial, progress)
        self._is_under_way = False

    def adopt(self, policies: Policies, progress: Progress = no_progress) -> None:
        """Switch to other policies and their first residents; between passes only."""
        self._abandon()  # nothing is demanded: end what was begun for later
        if policies.receipts is not None and self.policies.receipts is not None:
            policies.receipts.take_over(self.policies.receipts)
        self.policies, self.asks_scores = policies, policies.asks_scores
        self.capacity = Capacity(policies.capacity)
        self.load(progress)

    def stop_waiting(self) -> None:
        """Make a pass that waits for reads fail soon; thread-safe."""
        self.host.stop_waiting()

    def close(self) -> None:
        """Stop reads and close the device; the host's threads and files have other owners."""
        self.host.close()
        if self.device is not None:
            self.device.close()

    def as_dict(self) -> dict[str, float]:
        """Return the counters since the runtime was made."""
        num_hits = self.stats.num_hits + (0 if self.device is None else self.device.num_hits)
        num_activated = num_hits + self.stats.num_misses
        told = {
            **asdict(self.stats),
            **asdict(self.host.stats),
            "num_hits": num_hits,
            "hit_rate": num_hits / num_activated if num_activated else 1.0,
            **self.executor.as_dict(),
        }
        # The tier's that moves experts, and those that were never given to it.
        told["num_moves_dropped"] += self.stats.num_moves_dropped
        return told

    @property
    def is_watched(self) -> bool:
        """Return True while a `watched` context counts demands."""
        return bool(self._watches)

    @contextmanager
    def watched(self) -> Iterator[Callable[[], ExpertLook]]:
        """Count demands while the context lasts; yield a function that returns the counts.

        It may be called on any thread, also during a pass. Layers that are wholly on a
        device are counted in one pass of each `SAMPLE_S`.
        """
        num_tokens = np.zeros_like(self._hits)
        self._watches = (*self._watches, num_tokens)
        try:
            yield partial(self._look, num_tokens)
        finally:
            self._watches = tuple(each for each in self._watches if each is not num_tokens)

    @contextmanager
    def whole_pass(self) -> Iterator[None]:
        """Guard a pass of requests: if it fails, receipts count nothing of it.

        It is run again for those requests that did not make it fail.
        """
        receipts = self.policies.receipts
        if receipts is None:
            yield
            return
        receipts.mark()
        try:
            yield
        except BaseException:
            receipts.take_back()
            raise

    def take_receipt(self, request: int) -> Receipt | None:
        """Return a request's receipt once it has ended; None if nothing may be replaced."""
        receipts = self.policies.receipts
        return None if receipts is None else receipts.take(request)

    def _look(self, num_tokens: IntArray) -> ExpertLook:
        residents = {} if self.device is None else {"gpu": self.device.ledger.residents}
        return ExpertLook(
            {**residents, "host": self.host.ledger.residents},
            num_tokens.copy(),
            self.stats.num_hits + self._num_device_hits,
            self.stats.num_misses,
            self.host.stats.read_bytes,
            self.host.stats.wait_s,
        )

    def _run(self, call: LayerCall) -> None:
        """Run a layer: demand, substitute, decide, work, start reads, run, settle."""
        executor, plan, whole = self.executor, None, None
        # Receipts need router weights always.
        if self.device is not None and self.policies.receipts is None:
            whole = self.device.whole(call.layer, self.capacity)
        if whole is None:
            call, plan = self._decide(call)
        rows = None if plan is None else plan.at_host.rows
        bounds = None if rows is None else rows.bounds
        work = Work(call, self._shape, executor.kernels, bounds)
        if whole is not None:
            num_rows = len(work.rows.token_of)
            self.stats.num_expert_rows += num_rows
            self.stats.num_device_rows += num_rows
            if self.use is not None or self._is_sampled:  # a synchronisation
                self._hits[call.layer] += work.rows.counts.cpu().numpy()
        executor.open(work, plan, whole)
        for tile in work.tiles():
            executor.run_tile(work, tile)
            if self.expert_observer is not None:  # before anything is written over `gate`
                activated = work.buffers.gate
                self.expert_observer.saw_experts(call.layer, call.x, tile.rows, activated)
            work.add(tile, executor.threads)

    def _decide(self, call: LayerCall) -> tuple[LayerCall, Plan]:
        """Return the call to run, which a substitution may have changed, and its plan."""
        executor, policies = self.executor, self.policies
        at_host = executor.look(call, policies)
        facts = executor.facts(call, at_host, self.capacity.per_layer, policies.costs)
        run, substituted = None, None
        if policies.substitution is not None:
            substituted = policies.substitute(facts)
        if substituted is not None:
            routing, experts = substituted_routing(substituted, call.routing, call.workspace)
            rows = at_host.rows and ExpertRows.at_host(experts, self._shape.num_experts)
            at_host = at_host._replace(experts=experts, routed=substituted, rows=rows)
            call = call._replace(routing=routing)
            run = self._facts(call, at_host)
        if self._alone is not None:
            self._alone.begin_reads(call.layer, (run or facts).demand.experts)
        decision = self.policies.decide(facts, run)
        self._count(facts, run, decision)
        moves = partial(self._moves, facts, decision)
        return call, Plan(facts, decision, at_host, self.policies, moves)

    def _facts(self, call: LayerCall, at_host: HostInputs) -> Facts:
        return self.executor.facts(call, at_host, self.capacity.per_layer, self.policies.costs)

    def _count(self, facts: Facts, run: Facts | None, decision: Decision) -> None:
        """Count demand, and the pairs of row and expert that the router chose by where they run."""
        stats, known, demand = self.stats, run or facts, facts.demand
        self._hits[facts.layer, demand.experts] += demand.num_tokens
        num_hits = int(np.count_nonzero(demand.is_resident))
        stats.num_hits += num_hits
        stats.num_misses += len(demand.experts) - num_hits
        experts, num_tokens = known.demand.experts, known.demand.num_tokens
        if run is not None and run.routing is not None and facts.routing is not None:
            is_own = ~replaced(run.routing, facts.routing)  # others stand in
            own = np.bincount(run.routing.experts[is_own], minlength=len(facts.is_kept))
            num_tokens = own[experts]
        place = self._place
        place.fill(_ON_DEVICE)
        place[decision.assignment.host] = _ON_HOST
        may_read = self.device is None or known.is_at_host is not None
        is_read = self._is_read(known) if may_read else None
        if is_read is not None:
            place[is_read] = _FROM_DISK
            place[decision.assignment.resident] = _ON_DEVICE
        on_device, on_host, from_disk = map(
            int, np.bincount(place[experts], num_tokens, 3).tolist()
        )
        num_run = on_device + on_host + from_disk
        num_rows = num_run if run is None else int(demand.num_tokens.sum())
        stats.num_expert_rows += num_rows
        stats.num_substituted_rows += num_rows - num_run
        stats.num_disk_rows += from_disk
        stats.num_host_rows += on_host
        stats.num_device_rows += on_device

    def _is_read(self, facts: Facts) -> BoolArray | None:
        """Mark the experts that have to be read from disk before they run, [num_experts].

        None if all are in host memory.
        """
        if self.device is None:
            return ~facts.is_kept
        if facts.is_at_host is None:
            return None
        is_read = ~facts.is_at_host
        if facts.arriving_s is not None:  # from host memory, whose slot another expert may have now
            is_read[facts.demand.experts[np.isfinite(facts.arriving_s)]] = False
        return is_read

    def _moves(self, facts: Facts, decision: Decision) -> Moves:
        """Return the policies' moves, and count them."""
        moves = self.policies.moves(facts, decision)
        if moves is not NO_MOVES:
            if self.policies.is_checked:
                check_moves(moves, self._shape.num_experts)
            self.stats.num_moves_asked += moves.num_asked
            self.stats.num_moves_dropped += moves.num_left_out
        return moves

    def _abandon(self) -> None:
        """Recover from a failure: free all slots, once nothing uses or fills them."""
        self._is_under_way = True
        if self._compiled is not None:
            self._compiled.reset()
        self.executor.abandon()
        self._is_under_way = False
