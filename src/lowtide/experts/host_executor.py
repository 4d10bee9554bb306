"""Runs experts on the host's threads, in the order in which their weights arrive.

The calling thread hands experts over and continues. Threads take the ready ones, first those whose
slots are needed.

Experts of few rows are computed in one compiled call, if the kernels have one. Others, and all
experts without a compiler, are computed as products of pieces of rows. Outputs replace inputs, and
no two experts share a row.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowtide.core import Costs, Facts, IntArray, Moves
from lowtide.experts.batched_experts import BatchedExperts
from lowtide.experts.compiled_residents import CompiledResidents
from lowtide.experts.device import ExpertGroup
from lowtide.experts.host_reads import HostReads
from lowtide.experts.host_tier import HostTier, compute_stalled
from lowtide.experts.policy_facts import HostInputs, demand_of, routed_tokens
from lowtide.experts.rows import ExpertBuffers, ExpertRows, LayerCall
from lowtide.experts.work import Plan, Tile, Work
from lowtide.kernels.layer_parts import ExpertParts
from lowtide.kernels.reference import Kernels
from lowtide.policies.decision import Policies
from lowtide.progress import Progress
from lowtide.threads.event import WAIT_LIMIT_S
from lowtide.threads.executor import Executor
from lowtide.threads.executor import Work as Call

Paced = Callable[[Sequence[int], Call], Call]
"""Wraps a call over experts with these numbers of tokens: see `Device.host_work`."""


class HostTile(NamedTuple):
    """Host's share of a tile, all of it in host memory."""

    layer: int
    rows: ExpertRows
    buffers: ExpertBuffers
    inputs: Tensor | None  # [tokens, hidden]: what `parts` has to be filled from, if it has
    is_finished: Callable[[int], bool]  # whether the tile has the last of an expert's rows


class HostExpertExecutor:
    """Runs the host's share of a layer; does not know whether a device computes the rest."""

    device = None

    def __init__(
        self,
        host: HostTier,
        threads: Executor,
        kernels: Kernels,
        batched: BatchedExperts | None,
        paced: Paced = lambda num_tokens, call: call,
    ) -> None:
        """Bind the executor; batched: calls over several experts of few rows, if any."""
        self.host = host
        self.threads = threads
        self.kernels = kernels
        self.batched = batched
        self._paced = paced
        # With its follow-up, which frees its slot.
        self._ready: deque[tuple[Call, Call]] = deque()
        self._working: deque[Future[None]] = deque()

    # A layer, from its routing to its outputs, where there is no device

    def load(self, initial: Sequence[IntArray], progress: Progress) -> None:
        """Make exactly `initial[layer]` resident."""
        self.host.load(initial, progress)

    def parts(self, layer: int) -> ExpertParts | None:
        """Return a layer's experts, for kernels that run whole layers; None if they cannot."""
        return None if self.batched is None else self.batched.parts(layer)

    def compiled_residents(
        self, hits: IntArray, abandon: Callable[[], None]
    ) -> CompiledResidents | None:
        """Return the residency for passes that kernels run by themselves; None if they cannot.

        hits and abandon: see `CompiledResidents`.
        """
        library = self.kernels.library
        if library is None or self.batched is None:
            return None
        return CompiledResidents(self.host, self.batched, library, hits, abandon)

    def look(self, call: LayerCall, policies: Policies) -> HostInputs:
        """Return a layer's input and routing in host memory."""
        self.host.arrive(call.layer)
        routed = routed_tokens(*call.routing, call.scores) if policies.asks_routing else None
        return HostInputs(call.x, call.routing.experts, routed)

    def facts(self, call: LayerCall, inputs: HostInputs, capacity: IntArray, costs: Costs) -> Facts:
        """Collect the facts for policies; capacity: [num_layers]."""
        is_kept = self.host.ledger.is_resident(call.layer)
        return Facts(
            call.step,
            call.layer,
            demand_of(inputs.experts, is_kept),
            is_kept,
            capacity,
            costs,
            can_fetch=False,
            has_idle_link=False,
            routing=inputs.routed,
            is_here=is_kept,
        )

    def begin_reads(self, layer: int, experts: IntArray) -> None:
        """Start reads of the absent ones of `experts` before the policies decide.

        They are read in any case, and the decision takes a fraction of a millisecond in which the
        disk would be idle.
        """
        self.reads = HostReads(self.host, layer, experts)
        self.reads.start()

    def open(self, work: Work, plan: Plan | None, whole: ExpertGroup | None = None) -> None:
        """Start the other reads of a layer; call `run_tile` for each of its tiles afterwards."""
        assert plan is not None, "no policy was asked of a layer of the host's"
        self.follow(plan, plan.ask_moves())  # which slots are given to which experts

    def run_tile(self, work: Work, tile: Tile) -> None:
        """Compute a tile's experts: those of few rows in one call, the others as they arrive.

        The call runs on this thread unless an expert waits for a slot, because only this thread
        frees slots.
        """
        is_finished = partial(work.is_finished, tile=tile)
        self._tile = HostTile(work.layer, tile.rows, work.buffers, work.x, is_finished)
        demanded = tile.rows.demanded
        here = [expert for expert in demanded if expert in self.reads.slots]
        few, many = ([], here) if self.reads.num_waiting else self._divided(here)
        if few:
            self._few(self._tile, few)()
        self._submit(many)
        for expert in self.reads.arriving(demanded, self.is_busy):
            self.submit_first(expert)
        self.collect()
        del self._tile  # its buffers are views into a workspace, which may be freed after the pass

    def stop(self) -> None:
        """Recover from a failure: start nothing more, and wait for running work."""
        self._ready.clear()
        self.threads.drain()
        self._working.clear()

    def abandon(self) -> None:
        """Recover from a failure: free all slots, once nothing uses or fills them."""
        self.stop()
        self.host.abandon()

    def as_dict(self) -> dict[str, float]:
        """Return the executor's own counters."""
        stats = self.host.stats
        return {
            "num_moves_waiting": 0,
            "num_prefetched": stats.num_begun_ahead,
            "num_prefetches_used": stats.num_ahead,
            "num_prefetches_dropped": stats.num_wasted,
            "num_prefetches_waiting": len(self.host.read_ahead),
        }

    # The same in parts, for a host beside a device

    def follow(self, plan: Plan, moves: Moves) -> None:
        """Carry out moves by reads; reads ahead come after the layer's own."""
        self.reads.obey(moves)
        if self.host.reads_ahead:
            self.host.read_ahead.expect(plan.facts, plan.decision.run)
        self.reads.start()

    def submit(self, tile: HostTile, experts: list[int]) -> None:
        """Hand over a tile's experts that are in memory; those of few rows in one call.

        That call comes last: all cores share it, so it fills the time that the others leave idle.
        """
        self._tile = tile
        few, many = self._divided(experts)
        if many:
            self._submit(many)
        if few:
            self._start(self._few(tile, few))

    def submit_first(self, expert: int) -> None:
        """Hand over an expert before all others, because its slot is needed."""
        pieces = self._pieces([expert])
        self._ready.extendleft(reversed(pieces))
        for _ in pieces:
            self._start(self._run_ready)

    def collect(self, pump: Callable[[], float] = lambda: WAIT_LIMIT_S) -> None:
        """Wait for what was handed over; reads go on meanwhile.

        pump: called before each wait; returns the longest time to wait.
        """
        while True:
            self.host.news.clear()
            is_busy = self.is_busy()
            self.reads.start()  # frees slots, and gives the last of them to reads ahead
            if not is_busy:
                return
            self.host.wait(compute_stalled, pump())

    def is_busy(self) -> bool:
        """Return True while something handed over runs; raises its error."""
        while self._working and self._working[0].done():
            self._working.popleft().result()
        return bool(self._working)

    def _submit(self, experts: Sequence[int]) -> None:
        pieces = self._pieces(experts)
        self._ready.extend(pieces)
        for _ in range(min(len(pieces), self.threads.num_threads)):
            self._start(self._run_ready)

    def _start(self, call: Call) -> None:
        future = self.threads.submit(call)
        self._working.append(future)
        future.add_done_callback(lambda _: self.host.news.set())

    def _divided(self, experts: list[int]) -> tuple[list[int], list[int]]:
        """Split experts into those of one common call and the others."""
        if self.batched is None or not experts:
            return [], experts
        is_few = self.batched.takes_experts(self._tile.rows.most_tokens(experts))
        if is_few.all():
            return experts, []
        pairs = list(zip(experts, is_few.tolist(), strict=True))
        return [e for e, few in pairs if few], [e for e, few in pairs if not few]

    def _pieces(self, experts: Sequence[int]) -> list[tuple[Call, Call]]:
        """List the calls of experts' rows, each with its follow-up; the last frees the slot."""
        tile, slots = self._tile, self.reads.slots
        calls: list[tuple[Call, Call]] = []
        for expert in experts:
            pieces = tile.rows.pieces(expert)
            end = partial(self._end, tile, expert, itertools.count(1), len(pieces))
            for piece in pieces:
                call = partial(self._run, tile, piece, slots[expert])
                calls.append((self._paced([piece.stop - piece.start], call), end))
        return calls

    def _end(self, tile: HostTile, expert: int, num_ended: Iterator[int], num_pieces: int) -> None:
        if next(num_ended) == num_pieces:
            self._give_back(tile, [expert])

    def _give_back(self, tile: HostTile, experts: Sequence[int]) -> None:
        for expert in experts:
            if tile.is_finished(expert):
                self.host.give_back(self.reads.slots[expert])

    def _run_ready(self) -> None:
        """Run experts until none is ready; on a compute thread."""
        while True:
            try:
                call, end = self._ready.popleft()
            except IndexError:  # another thread took the last one
                return
            call()
            end()
            self.host.idle_s = 0.0

    def _run(self, tile: HostTile, pairs: slice, slot: int) -> None:
        self._gather(tile, [[pairs.start, pairs.stop - pairs.start]])
        # An expert's inputs are not needed once gate and up are computed: the outputs replace them.
        parts, gate, up = (buffer[pairs] for buffer in tile.buffers)
        weights = self.host.slots.weights(tile.layer, slot)
        self.kernels.gated_mlp(parts, weights, gate, up, parts)

    def _few(self, tile: HostTile, experts: list[int]) -> Call:
        """Prepare one call over all of `experts`.

        Most of the Python work happens here, on one thread: while threads compete for the
        interpreter, each operator waits for it.
        """
        groups = tile.rows.groups(experts, list(map(self.reads.slots.__getitem__, experts)))
        self._gather(tile, groups[:, 1:].tolist())
        return self._paced(groups[:, 2].tolist(), partial(self._run_few, tile, groups, experts))

    def _run_few(self, tile: HostTile, groups: IntArray, experts: list[int]) -> None:
        if self.batched is not None:
            self.batched.run(groups, *tile.buffers, tile.layer)
        self._give_back(tile, experts)

    def _gather(self, tile: HostTile, runs: Sequence[Sequence[int]]) -> None:
        """Gather experts' inputs if they are not in place; by numpy, whose calls cost least.

        runs: the first pair and the number of pairs of each product, ascending.
        """
        if tile.inputs is None:
            return
        token_of = tile.rows.token_of.numpy()
        x = tile.inputs.view(torch.uint8).numpy()
        parts = tile.buffers.parts.view(torch.uint8).numpy()
        start = stop = runs[0][0]
        for first, num_pairs in (*runs, (-1, 0)):
            if first != stop:  # with none between them, several are one
                np.take(x, token_of[start:stop], axis=0, out=parts[start:stop], mode="clip")
                start = first
            stop = first + num_pairs
