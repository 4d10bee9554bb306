"""Experts on the host: computed on threads, in whatever order their weights come.

The calling thread hands experts over and goes on; threads take what is ready, those first whose
slots others wait for. Experts of few rows are one compiled call where the kernels have one; the
others, and all without a compiler, are products of a piece of rows each. An expert's outputs
replace its inputs, and no two share a row.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowtide.core import Costs, Facts, IntArray, Moves
from lowtide.experts.at_once import ExpertsAtOnce
from lowtide.experts.compiled_residents import CompiledResidents
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
"""What a call over experts of so many tokens becomes: see `Device.host_work`."""


class HostTile(NamedTuple):
    """What the host computes of a tile, all of it in host memory."""

    layer: int
    rows: ExpertRows
    buffers: ExpertBuffers
    inputs: Tensor | None  # [tokens, hidden]: what `parts` has to be filled from, if it has
    is_finished: Callable[[int], bool]  # whether the tile has the last of an expert's rows


class HostExpertExecutor:
    """Owns the host's share of a layer. Does not know who else computes beside it."""

    device = None

    def __init__(
        self,
        host: HostTier,
        threads: Executor,
        kernels: Kernels,
        at_once: ExpertsAtOnce | None,
        paced: Paced = lambda num_tokens, call: call,
    ) -> None:
        """at_once: calls over several experts of few rows, where there are any."""
        self.host = host
        self.threads = threads
        self.kernels = kernels
        self.at_once = at_once
        self._paced = paced
        # With what is to be done when it has ended: its slot is given back.
        self._ready: deque[tuple[Call, Call]] = deque()
        self._working: deque[Future[None]] = deque()

    # A layer, from its routing to its outputs, where there is no device

    def load(self, initial: Sequence[IntArray], progress: Progress) -> None:
        """Makes `initial[layer]` resident and no others."""
        self.host.load(initial, progress)

    def parts(self, layer: int) -> ExpertParts | None:
        """A layer's experts, for kernels that run whole layers; None where they cannot."""
        return None if self.at_once is None else self.at_once.parts(layer)

    def compiled_residents(
        self, hits: IntArray, abandon: Callable[[], None]
    ) -> CompiledResidents | None:
        """For passes that kernels run by themselves; None where none do. See there."""
        library = self.kernels.library
        if library is None or self.at_once is None:
            return None
        return CompiledResidents(self.host, self.at_once, library, hits, abandon)

    def look(self, call: LayerCall, policies: Policies) -> HostInputs:
        """A layer's input and routing in host memory."""
        self.host.arrive(call.layer)
        routed = routed_tokens(*call.routing, call.scores) if policies.asks_routing else None
        return HostInputs(call.x, call.routing.experts, routed)

    def facts(self, call: LayerCall, inputs: HostInputs, capacity: IntArray, costs: Costs) -> Facts:
        """What policies are told. capacity: [num_layers]."""
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
        """Those of `experts` that are absent have to come, whatever is decided of who stays:
        deciding takes a share of a millisecond, in which the disk would have nothing to do.
        """
        self.reads = HostReads(self.host, layer, experts)
        self.reads.start()

    def open(self, work: Work, plan: Plan | None) -> None:
        """Starts the other reads of a layer; `run_tile` of each of its tiles follows."""
        assert plan is not None, "no policy was asked of a layer of the host's"
        self.follow(plan, plan.ask_moves())  # which slots are given to which experts

    def run_tile(self, work: Work, tile: Tile) -> None:
        """Experts of few rows in one call on this thread, unless an expert waits for a slot, which
        only this thread gives to others; the others on threads, as they are read.
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
        del self._tile  # its buffers are views into a workspace, which may be gone after the pass

    def stop(self) -> None:
        """After a failure: nothing more begins, and nothing is under way."""
        self._ready.clear()
        self.threads.drain()
        self._working.clear()

    def abandon(self) -> None:
        """After a failure: gives all slots back, once nothing uses or fills them."""
        self.stop()
        self.host.abandon()

    def as_dict(self) -> dict[str, float]:
        """What it counts by itself."""
        return {}

    # The same in parts, for who has a device beside it

    def follow(self, plan: Plan, moves: Moves) -> None:
        """Has the reads go on by what was decided, those ahead after a layer's own."""
        self.reads.obey(moves)
        if self.host.reads_ahead:
            self.host.read_ahead.expect(plan.facts, plan.decision.run)
        self.reads.start()

    def submit(self, tile: HostTile, experts: list[int]) -> None:
        """Hands over experts of a tile that are in memory; those of few rows in one call.

        That call comes last: all cores share it, so it fills the time that the others leave.
        """
        self._tile = tile
        few, many = self._divided(experts)
        self._submit(many)
        if few:
            self._start(self._few(tile, few))

    def submit_first(self, expert: int) -> None:
        """Hands over one that goes before all others: its slot is wanted."""
        pieces = self._pieces(expert)
        self._ready.extendleft(reversed(pieces))
        for _ in pieces:
            self._start(self._run_ready)

    def collect(self, pump: Callable[[], float] = lambda: WAIT_LIMIT_S) -> None:
        """Waits for what was handed over; reads go on meanwhile.

        pump: called before each wait, says how long that may be.
        """
        while True:
            self.host.news.clear()
            is_busy = self.is_busy()
            self.reads.start()  # gives slots back, and the last of them to reads ahead
            if not is_busy:
                return
            self.host.wait(compute_stalled, pump())

    def is_busy(self) -> bool:
        """Whether something handed over has not ended. Raises what it failed with."""
        while self._working and self._working[0].done():
            self._working.popleft().result()
        return bool(self._working)

    def _submit(self, experts: Sequence[int]) -> None:
        pieces = [piece for expert in experts for piece in self._pieces(expert)]
        self._ready.extend(pieces)
        for _ in range(min(len(pieces), self.threads.num_threads)):
            self._start(self._run_ready)

    def _start(self, call: Call) -> None:
        future = self.threads.submit(call)
        self._working.append(future)
        future.add_done_callback(lambda _: self.host.news.set())

    def _divided(self, experts: list[int]) -> tuple[list[int], list[int]]:
        """Those that one call takes, and those that it does not."""
        if self.at_once is None or not experts:
            return [], experts
        is_few = self.at_once.takes_experts(self._tile.rows.num_tokens(experts)).tolist()
        pairs = list(zip(experts, is_few, strict=True))
        return [e for e, few in pairs if few], [e for e, few in pairs if not few]

    def _pieces(self, expert: int) -> list[tuple[Call, Call]]:
        """The calls of an expert's rows, and what follows each: the last gives its slot back."""
        tile, slot, num_ended = self._tile, self.reads.slots[expert], itertools.count(1)
        pieces = tile.rows.pieces(expert)

        def end() -> None:
            if next(num_ended) == len(pieces):
                self._give_back(tile, [expert])

        return [
            (self._paced([p.stop - p.start], partial(self._run, tile, p, slot)), end)
            for p in pieces
        ]

    def _give_back(self, tile: HostTile, experts: Sequence[int]) -> None:
        for expert in experts:
            if tile.is_finished(expert):
                self.host.give_back(self.reads.slots[expert])

    def _run_ready(self) -> None:
        """On a compute thread: runs experts until none is ready."""
        while True:
            try:
                call, end = self._ready.popleft()
            except IndexError:  # another thread took the last one
                return
            call()
            end()
            self.host.idle_s = 0.0

    def _run(self, tile: HostTile, pairs: slice, slot: int) -> None:
        self._gather(tile, [pairs])
        # An expert's inputs are not needed once gate and up are computed: the outputs replace them.
        parts, gate, up = (buffer[pairs] for buffer in tile.buffers)
        weights = self.host.slots.weights(tile.layer, slot)
        self.kernels.gated_mlp(parts, weights, gate, up, parts)

    def _few(self, tile: HostTile, experts: list[int]) -> Call:
        """One call over all of them. Its Python runs here, but for the least: a thread that wants
        the interpreter beside this one waits for it at every step, and this one at every operator.
        """
        self._gather(tile, [tile.rows.pairs(expert) for expert in experts])
        groups = tile.rows.groups(experts, [self.reads.slots[expert] for expert in experts])
        return self._paced(groups[:, 2].tolist(), partial(self._run_few, tile, groups, experts))

    def _run_few(self, tile: HostTile, groups: IntArray, experts: list[int]) -> None:
        if self.at_once is not None:
            self.at_once.run(groups, *tile.buffers, tile.layer)
        self._give_back(tile, experts)

    def _gather(self, tile: HostTile, pairs: Sequence[slice]) -> None:
        """Experts' inputs, where they are not in place yet; by numpy, whose calls cost least."""
        if tile.inputs is None:
            return
        num_pairs = sum(part.stop - part.start for part in pairs)
        if pairs[-1].stop - pairs[0].start == num_pairs:  # with none between them
            pairs = [slice(pairs[0].start, pairs[-1].stop)]
        token_of = tile.rows.token_of.numpy()
        x, parts = (rows.view(torch.uint8).numpy() for rows in (tile.inputs, tile.buffers.parts))
        for part in pairs:
            np.take(x, token_of[part], axis=0, out=parts[part], mode="clip")
