"""Residency on the host, shared with compiled passes, which do not call Python in between.

The placement's ranks for a pass (`policies/ranks.py`) and the ledger's own arrays are passed by
address; demands and their outcome are collected after the pass.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtide.core import IntArray
from lowtide.errors import InternalError, StorageError
from lowtide.experts.batched_experts import BatchedExperts
from lowtide.experts.host_tier import HostTier
from lowtide.experts.rows import LayerCall
from lowtide.experts.slots import TAKEN
from lowtide.experts.stats import ExpertStats
from lowtide.experts.transfer import DiskTransfer
from lowtide.kernels.cpu.library import struct
from lowtide.kernels.cpu.reader import Readiness
from lowtide.kernels.cpu.residency import Foresight, LayerExperts
from lowtide.kernels.layer_parts import Status
from lowtide.policies.ranks import Ranks
from lowtide.policies.reads_ahead import AheadTrial
from lowtide.reading.file_reader import Ticket, read_stalled
from lowtide.threads.event import INTERRUPT_POLL_S, WAIT_LIMIT_S


class CompiledResidents:
    """Owns the struct shared with compiled passes, and starts reads that they cannot start."""

    def __init__(
        self,
        host: HostTier,
        batched: BatchedExperts,
        library: ctypes.CDLL,
        hits: IntArray,
        abandon: Callable[[], None],
    ) -> None:
        """Fill in the struct.

        batched: computes experts in the host's slots. hits [num_layers, num_experts]: counts of
        each expert's tokens. abandon: cleans up after a failed pass.
        """
        ledger, transfer = host.ledger, host.transfer
        compiled = transfer.compiled if isinstance(transfer, DiskTransfer) else None
        self._host = host
        self._batched = batched
        self._experts = LayerExperts(library)
        self._compiled = compiled
        self._hits, self.give_up = hits, abandon  # `hits` has to outlive the struct
        self._readiness = (
            Readiness(library, ledger.max_slots) if compiled is None else compiled.readiness
        )
        num_layers, num_experts = ledger.table.shape
        self._foresight = Foresight(library, num_layers)
        self._asked: IntArray = np.zeros((num_experts, 3), np.int64)
        self._tickets: dict[int, Ticket] = {}  # by slot: of reads that Python does
        self._read_bytes: deque[int] = deque()  # of each that has ended
        # A copy out of the page cache takes a core from computing, whenever it is made.
        self._trial = AheadTrial() if compiled is not None and compiled.is_direct else None
        self._begin_s = 0.0  # when the pass began
        self._is_waiting: tuple[int, int, float] | None = None  # layer, expert, and since when
        free = ledger.free
        self._struct = struct("Residency")(
            *map(_address, (ledger.table, ledger.owner, free.ring, free.state)),
            num_experts,
            ledger.max_slots,
        )
        self._struct.hits, self._struct.asked = _address(hits), _address(self._asked)
        self._struct.readiness = self._readiness.address
        self._struct.reader = None if compiled is None else compiled.address
        self._struct.foresight = self._foresight.address
        self._struct.wait_limit_s = INTERRUPT_POLL_S
        self.address = ctypes.addressof(self._struct)

    def begin_pass(self, ranks: Ranks) -> None:
        """Set the ranks that decide from now on which experts are admitted and evicted."""
        struct = self._struct
        self._is_waiting = None
        self._ranks = ranks  # which has to outlive the pass
        self._begin_s = perf_counter()
        struct.reads_ahead = self._trial is not None and self._trial.is_on
        struct.rank, struct.room = _address(ranks.rank), _address(ranks.room)
        struct.clock = None if ranks.clock is None else _address(ranks.clock)
        struct.per_token, struct.per_expert = ranks.per_token, ranks.per_expert
        struct.per_share, struct.most = ranks.per_share, ranks.most
        struct.worth = None if ranks.worth is None else _address(ranks.worth)
        struct.num_worth = 0 if ranks.worth is None else len(ranks.worth)
        struct.includes_all, struct.low_ids_leave = ranks.includes_all, ranks.low_ids_leave
        struct.is_forced = ranks.is_forced

    def serve(self, status: Status) -> None:
        """Implement `Residents.serve`."""
        if status is Status.READS:
            self._start_reads()
        elif status is Status.WAITS:
            self._check_wait()
        elif status is Status.FAILED:
            raise self._failure()
        else:
            raise InternalError("An expert waits for a slot and none will come free.")

    def takes(self, call: LayerCall) -> bool:
        """Return True if `run_layer` supports a layer's rows."""
        return self._batched.takes(call)

    def run_layer(self, call: LayerCall) -> None:
        """Compute the experts of a layer whose router is not compiled, and their sum."""
        with call.workspace.scope():
            experts, _pairs = self._batched.layer_call(call)
            for status in self._experts.run(self.address, call.layer, experts, *call.routing):
                self.serve(status)

    def count_outcome(self, asked: ExpertStats) -> None:
        """Add the outcome of all demands since the last call to `asked` and the host's counts."""
        struct, stats = self._struct, self._host.stats
        asked.num_hits += struct.num_hits
        asked.num_misses += struct.num_misses
        # Dropped: they were expected, and the pass did not ask for them.
        asked.num_moves_asked += struct.num_admitted + struct.num_left_out
        stats.num_moves_done += struct.num_admitted
        if struct.num_misses and self._trial is not None:
            self._trial.note_seconds(perf_counter() - self._begin_s)
        stats.num_admitted += struct.num_admitted
        stats.num_evicted += struct.num_evicted
        stats.read_bytes += struct.read_bytes
        stats.num_ahead += struct.num_ahead
        stats.num_late += struct.num_late
        stats.num_wasted += struct.num_wasted
        stats.num_begun_ahead += struct.num_begun_ahead
        struct.num_ahead = struct.num_late = struct.num_wasted = struct.num_begun_ahead = 0
        asked.num_moves_dropped += struct.num_left_out
        asked.num_expert_rows += struct.num_rows
        asked.num_host_rows += struct.num_here_rows
        asked.num_disk_rows += struct.num_absent_rows
        struct.num_rows = struct.num_here_rows = struct.num_absent_rows = 0
        stats.num_read += struct.num_read
        stats.given_up_bytes += struct.given_up_bytes
        struct.num_read = struct.given_up_bytes = 0
        while self._read_bytes:
            stats.read_bytes += self._read_bytes.popleft()
            stats.num_read += 1
        stats.wait_s += struct.wait_s
        struct.num_hits = struct.num_misses = struct.num_admitted = struct.num_evicted = 0
        struct.read_bytes = struct.num_left_out = 0
        struct.wait_s = 0.0

    def reset(self) -> None:
        """Recover from a failure: forget reads, and set aside slots that are still written to."""
        begun = [ticket for ticket in self._tickets.values() if not ticket.cancel()]
        wait(begun, self._host.end_limit_s)
        for slot, ticket in self._tickets.items():
            if not ticket.done():
                self._host.set_aside(slot, ticket)
        self._tickets.clear()
        struct = self._struct
        struct.num_asked = 0
        # Nothing is claimed any more of what was read ahead.
        struct.num_wasted = struct.num_begun_ahead - struct.num_ahead
        self._is_waiting = None
        if self._compiled is None or self._compiled.drain(self._host.end_limit_s):
            return
        for slot in np.flatnonzero(self._host.ledger.owner == TAKEN).tolist():
            if self._compiled.is_filling(slot):
                self._host.set_aside(slot, self._compiled.when_over(slot))

    def _start_reads(self) -> None:
        struct = self._struct
        for expert, slot, filling in self._asked[: struct.num_asked].tolist():
            ticket = self._host.transfer.start(struct.layer, expert, slot)
            self._tickets[slot] = ticket
            ticket.add_done_callback(partial(self._end, slot, filling))
        struct.num_asked = 0

    def _end(self, slot: int, filling: int, ticket: Future[int]) -> None:
        """Record the end of a read; called on the reading thread."""
        has_failed = ticket.cancelled() or ticket.exception() is not None
        if not has_failed:
            self._read_bytes.append(ticket.result())
        self._readiness.end(slot, filling, has_failed)

    def _check_wait(self) -> None:
        self._host.check_open()
        layer, expert = self._struct.layer, self._struct.expert
        now_s = perf_counter()
        if self._is_waiting is None or self._is_waiting[:2] != (layer, expert):
            self._is_waiting = layer, expert, now_s
        elif now_s - self._is_waiting[2] > WAIT_LIMIT_S:
            self._is_waiting = None
            raise self._read_error(None)

    def _failure(self) -> BaseException:
        ticket = self._tickets.get(self._struct.slot)
        error = None if ticket is None else ticket.exception(0.0)
        return error or self._read_error(self._struct.error)

    def _read_error(self, state: int | None) -> StorageError:
        struct = self._struct
        if self._compiled is None or state is None:
            return read_stalled(self._host.transfer.describe(struct.layer, struct.expert))
        number = struct.layer * struct.num_experts + struct.expert
        return self._compiled.error(number, state)


def _address(array: NDArray[Any]) -> int:
    return int(array.ctypes.data)
