"""One layer's step, once it is decided who computes what: on the host, or there and on the device.

Hands over and waits; the shares of the two (`host_share.py`, `device_tier.py`) do the work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lowtide.core import NO_MOVES, Facts, IntArray, Moves
from lowtide.errors import InternalError
from lowtide.experts.device_tier import AtHost, DeviceShare, DeviceTier
from lowtide.experts.host_share import HostBuffers, HostShare
from lowtide.experts.host_tier import LOOK_S, HostReads
from lowtide.experts.rows import ExpertBuffers, ExpertRows
from lowtide.policies.decision import Decision
from lowtide.threads.event import WAIT_LIMIT_S

if TYPE_CHECKING:
    from lowtide.experts.runtime import ExpertRuntime


class LayerRun:
    """One layer's step, divided between the host and the device, if there is one."""

    def __init__(
        self,
        runtime: ExpertRuntime,
        facts: Facts,
        decision: Decision,
        at_host: AtHost,
        rows: ExpertRows,
        buffers: ExpertBuffers,
    ) -> None:
        self._runtime = runtime
        self._facts = facts
        self._layer = facts.layer
        self._decision = decision
        self._at_host = at_host
        self._buffers = buffers
        self._rows = rows
        self._for_host = frozenset(decision.assignment.host.tolist())
        self._host_rows, self._host_buffers = self._host_side()
        self._host = HostShare(
            runtime.host, facts.layer, runtime.compute, self._host_rows, self._host_buffers
        )
        self._reads: HostReads | None = None

    def run(self) -> None:
        """Both shares, from the first expert handed over to the last one's outputs in place."""
        try:
            if self._runtime.device is None:
                self._run_alone()
            else:
                self._run_split(self._runtime.device)
        except BaseException:
            self._host.cancel()
            if self._reads is not None:
                self._reads.cancel()
            raise

    def _run_alone(self) -> None:
        """The host runs everything. Residents of few tokens in one call, unless somebody waits for
        a slot, which only this thread gives to others."""
        reads = self._open(self._decision.assignment.host, self._decision.moves or NO_MOVES)
        rest = reads.here if reads.num_waiting else self._host.run_few(reads.here)
        self._host.submit(rest)
        self._take_reads(reads, None)
        self._collect(reads)

    def _run_split(self, device: DeviceTier) -> None:
        """The host's share is handed over first, then the device's is queued, and both run at once
        while the policies say what is to move."""
        runtime, assignment = self._runtime, self._decision.assignment
        outcome = device.link.end_prefetch(self._layer, assignment.fetch)
        share = DeviceShare(device, self._layer, assignment, self._rows, self._buffers)
        wanted = np.sort(np.concatenate([assignment.host, np.array(share.wanted, np.int64)]))
        reads = self._open(wanted, runtime.host.own_moves(self._facts.step, self._layer, wanted))
        self._host.submit_all([pair for pair in reads.here if pair[0] in self._for_host])
        rest = share.start([pair for pair in reads.here if pair[0] not in self._for_host])
        share.follow(runtime.moves(self._facts, self._decision))
        for expert, slot in rest:
            share.fetch(expert, slot)
        self._take_reads(reads, share)
        share.run_wave()
        prefetch = runtime.policies.prefetch
        if outcome is not None:
            prefetch.record(outcome)
        device.look_ahead(self._facts, self._at_host, prefetch)
        self._collect(reads)
        share.take_over(self._host_buffers.parts)
        runtime.num_on_host += len(assignment.host)
        device.finish(self._layer, len(self._at_host.x))

    def _open(self, wanted: IntArray, moves: Moves) -> HostReads:
        """Starts the reads of what is not in host memory, then those ahead."""
        host = self._runtime.host
        self._reads = reads = host.open(self._layer, wanted, moves)
        host.expect_next(self._facts, self._decision.run)
        reads.start()
        return reads

    def _take_reads(self, reads: HostReads, share: DeviceShare | None) -> None:
        """Sends experts where they are assigned, as they are read."""
        while reads.has_more:
            arrived = reads.next()
            if arrived is None:
                self._wait_for_slot(reads)
            elif share is None or arrived[0] in self._for_host:
                self._host.submit_first(*arrived)
            else:
                share.fetch(*arrived)
            reads.start()

    def _wait_for_slot(self, reads: HostReads) -> None:
        if self._host.is_busy:
            self._host.wait(LOOK_S)
        elif not self._runtime.host.wait_for_use():
            raise InternalError(f"{reads.num_waiting} experts wait and no slot is free.")

    def _collect(self, reads: HostReads) -> None:
        """Waits for the host; the link and reads ahead go on with what waits for them meanwhile."""
        device, read_ahead = self._runtime.device, self._runtime.host.read_ahead
        while self._host.is_busy:
            reads.start()
            pause_s = WAIT_LIMIT_S
            if device is not None and device.link.has_waiting:
                # One copy behind the one under way: the link does not wait for the next look.
                pause_s = device.link.link_s
                device.link.pump(pause_s)
            elif read_ahead is not None and read_ahead.is_waiting:
                pause_s = LOOK_S
            self._host.wait(pause_s)
            if device is not None:
                self._host.check_progress(WAIT_LIMIT_S)
        reads.start()  # gives slots back, and the last of them to reads ahead

    def _host_side(self) -> tuple[ExpertRows, HostBuffers]:
        """The rows in host memory, and where the host computes: in the workspace if that is there,
        too, and nobody else computes in it."""
        device, scratch, buffers = self._runtime.device, self._runtime.scratch, self._buffers
        if device is None or scratch is None:
            return self._rows, HostBuffers(buffers.parts, buffers.gate, buffers.up, None)
        parts = device.device.host_parts(buffers.parts)
        if parts is buffers.parts:
            return self._rows, HostBuffers(parts, *scratch, None)
        kernels, num_experts = self._runtime.compute.kernels, len(self._rows.counts)
        rows = ExpertRows(kernels.sort_pairs(self._at_host.experts, num_experts))
        self._rows.learn(rows.counts)
        return rows, HostBuffers(parts, *scratch, self._at_host.x)
