"""A layer's pass of more rows than a tile has: the bidirectional one over a whole sequence.

Pairs come as they are sorted, by expert, as many at a time as a tile's buffers hold. An expert is
read or fetched once, when its first rows' turn comes, and stays until its last ones are computed.
Within a tile the host computes what has just been read first, since its slots are wanted, and what
was in memory beside that: neither reads nor threads wait for each other's turn. What a tile has
computed is added to the layer's sum: every token's in ascending id, one multiply and one add per
expert, as `Kernels.combine` does. So neither budget nor threads change a bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowtide.core import NO_MOVES, Facts, align_up
from lowtide.errors import InternalError
from lowtide.experts.device_tier import AtHost, DeviceTier
from lowtide.experts.device_tiles import DeviceTiles
from lowtide.experts.host_share import HostBuffers, HostShare
from lowtide.experts.host_tier import LOOK_S, HostReads
from lowtide.experts.rows import ExpertBuffers, ExpertRows, Routing, Terms
from lowtide.policies.decision import Decision
from lowtide.threads.event import WAIT_LIMIT_S

if TYPE_CHECKING:
    from lowtide.experts.runtime import ExpertRuntime


class LongPass(NamedTuple):
    """What a layer works on and what it makes."""

    x: Tensor  # [tokens, hidden]
    rows: ExpertRows
    weights: Tensor  # [tokens * k] float32, of the sorted pairs
    buffers: ExpertBuffers  # a tile's
    terms: Terms
    out: Tensor  # [tokens, hidden] float32

    @classmethod
    def of(
        cls,
        x: Tensor,
        routing: Routing,
        rows: ExpertRows,
        buffers: ExpertBuffers,
        terms: Terms,
        out: Tensor,
    ) -> LongPass:
        weights = torch.empty_like(routing.weights).flatten()
        weights[rows.part_of.flatten()] = routing.weights.flatten()
        return cls(x, rows, weights, buffers, terms, out)

    def add(self, rows: ExpertRows, pairs: slice, columns: slice) -> None:
        """Adds what a tile has computed to some columns of `out`, expert by expert."""
        weights, parts, term_fp32 = self.weights[pairs], self.buffers.parts, self.terms.fp32
        for expert in rows.demanded:
            of_expert = rows.pairs(expert)
            for start in range(of_expert.start, of_expert.stop, len(term_fp32)):
                part = slice(start, min(start + len(term_fp32), of_expert.stop))
                term = term_fp32[: part.stop - start, columns]
                term.copy_(parts[part, columns])
                term.mul_(weights[part, None])
                # No token is twice among an expert's.
                self.out[:, columns].index_add_(0, rows.token_of[part], term)


class LongRun:
    """One layer's long pass, divided between the host and the device, if there is one.

    Who computes what, and who stays, is decided once for all of its tiles.
    """

    def __init__(
        self,
        runtime: ExpertRuntime,
        facts: Facts,
        decision: Decision,
        at_host: AtHost,
        given: LongPass,
    ) -> None:
        self._runtime = runtime
        self._at_host = at_host
        self._facts = facts
        self._decision = decision
        self._given = given
        self._for_host = frozenset(decision.assignment.host.tolist())  # beside a device
        self._slots: dict[int, int] = {}  # in host memory, of experts whose turn has come

    def run(self) -> None:
        """All tiles, from the first read to the last sum."""
        self._given.out.zero_()
        if self._runtime.device is None:
            self._run_alone()
        else:
            self._run_split(self._runtime.device)

    def _run_alone(self) -> None:
        given, experts = self._given, self._decision.assignment.host
        moves = self._decision.moves or NO_MOVES
        reads = self._runtime.host.open(self._facts.layer, experts, moves)
        parts, gate, up = given.buffers
        buffers = HostBuffers(parts, gate, up, given.x)
        try:
            self._start(reads)
            for pairs in given.rows.tiles(len(parts)):
                rows = given.rows.tile(pairs)
                host = self._host_share(rows, buffers)
                self._compute(reads, host, rows, pairs, rows.demanded)
                self._runtime.were_activated(self._facts.layer, given.x, rows, gate)
                self._add(rows, pairs)
        except BaseException:
            reads.cancel()
            raise

    def _run_split(self, device: DeviceTier) -> None:
        """Of each tile the device's residents are queued first; then the host gets its experts, and
        those to be fetched are queued, as they come from disk."""
        runtime, facts, given = self._runtime, self._facts, self._given
        layer, assignment = facts.layer, self._decision.assignment
        outcome = device.link.end_prefetch(layer, assignment.fetch)
        share = DeviceTiles(device, layer, assignment, given.rows, given.buffers)
        wanted = np.sort(np.concatenate([assignment.host, np.array(share.wanted, np.int64)]))
        moves = runtime.host.own_moves(facts.step, layer, wanted)
        reads = runtime.host.open(layer, wanted, moves)
        try:
            self._start(reads)
            share.follow(runtime.moves(facts, self._decision))
            for pairs in given.rows.tiles(len(given.buffers.parts)):
                self._run_tile(device, share, reads, pairs)
        except BaseException:
            reads.cancel()
            raise
        share.end()
        prefetch = runtime.policies.prefetch
        if outcome is not None:
            prefetch.record(outcome)
        device.look_ahead(facts, self._at_host, prefetch)
        runtime.num_on_host += len(assignment.host)
        device.finish(self._facts.layer, len(given.x))

    def _start(self, reads: HostReads) -> None:
        self._slots.update(reads.here)
        self._runtime.host.expect_next(self._facts, self._decision.run)
        reads.start()

    def _run_tile(
        self, device: DeviceTier, share: DeviceTiles, reads: HostReads, pairs: slice
    ) -> None:
        given, rows = self._given, self._given.rows.tile(pairs)
        inputs = given.buffers.parts[: len(rows.token_of)]
        torch.index_select(given.x, 0, rows.token_of, out=inputs)
        for_host = [expert for expert in rows.demanded if expert in self._for_host]
        buffers = self._host_buffers(device, rows, for_host)
        host = self._host_share(rows, buffers)
        self._compute(reads, host, rows, pairs, for_host, share)
        share.take_over(buffers.parts)
        device.device.join()
        self._add(rows, pairs)

    def _host_share(self, rows: ExpertRows, buffers: HostBuffers) -> HostShare:
        runtime = self._runtime
        return HostShare(runtime.host, self._facts.layer, runtime.compute, rows, buffers)

    def _host_buffers(
        self, device: DeviceTier, rows: ExpertRows, for_host: Sequence[int]
    ) -> HostBuffers:
        """Where the host computes, its inputs in place."""
        own, scratch = self._given.buffers, self._runtime.scratch
        parts = device.device.host_parts(own.parts)
        if parts is not own.parts:
            for expert in for_host:
                pairs = rows.pairs(expert)
                parts[pairs].copy_(own.parts[pairs])
        gate, up = (own.gate, own.up) if scratch is None else scratch
        return HostBuffers(parts, gate, up, None)

    def _compute(
        self,
        reads: HostReads,
        host: HostShare,
        rows: ExpertRows,
        pairs: slice,
        for_host: Sequence[int],
        share: DeviceTiles | None = None,
    ) -> None:
        """The experts of a tile on the host, those in memory beside those that are read, and by
        being fetched."""
        try:
            to_fetch = [] if share is None else share.begin(rows, pairs)
            here = [expert for expert in for_host if expert in self._slots]
            for expert in here:
                self._submit(host, expert, pairs)
            for expert in sorted({*for_host, *to_fetch}.difference(here)):
                slot = self._slot(reads, host, expert)
                if share is not None and expert in to_fetch:
                    share.fetch(expert, slot)
                else:
                    self._submit(host, expert, pairs, is_first=True)
            if share is not None:
                share.run_wave()
            self._collect(reads, host)
        except BaseException:
            host.cancel()
            raise

    def _submit(self, host: HostShare, expert: int, pairs: slice, is_first: bool = False) -> None:
        is_last = self._given.rows.pairs(expert).stop <= pairs.stop
        host.submit_rows(expert, self._slots[expert], is_last, is_first)

    def _slot(self, reads: HostReads, host: HostShare, expert: int) -> int:
        """Where an expert is in host memory, once it is."""
        while expert not in self._slots:
            arrived = reads.bring(expert)
            if arrived is None:
                self._wait_for_slot(reads, host)
            else:
                self._slots[expert] = arrived[1]
            reads.start()
        return self._slots[expert]

    def _wait_for_slot(self, reads: HostReads, host: HostShare) -> None:
        if host.is_busy:
            host.wait(LOOK_S)
        elif not (self._runtime.host.wait_for_use() or reads.give_up_one()):
            raise InternalError(f"{reads.num_waiting} experts wait and no slot is free.")

    def _collect(self, reads: HostReads, host: HostShare) -> None:
        """Waits for the host's share of a tile; reads go on meanwhile."""
        read_ahead = self._runtime.host.read_ahead
        while host.is_busy:
            reads.start()
            is_wanted = reads.num_waiting or (read_ahead is not None and read_ahead.is_waiting)
            host.wait(LOOK_S if is_wanted else WAIT_LIMIT_S)
            if self._runtime.device is not None:
                host.check_progress(WAIT_LIMIT_S)
        reads.start()

    def _add(self, rows: ExpertRows, pairs: slice) -> None:
        executor, hidden = self._runtime.compute.executor, self._given.out.shape[1]
        if not self._given.out.is_cpu:
            self._given.add(rows, pairs, slice(0, hidden))
            return
        width = align_up(-(-hidden // executor.num_threads), 16)
        starts = range(0, hidden, width)
        columns = [slice(start, min(start + width, hidden)) for start in starts]
        executor.run([partial(self._given.add, rows, pairs, part) for part in columns])
