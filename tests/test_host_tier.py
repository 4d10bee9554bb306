"""Reads into host slots for a coming layer, by a transfer whose reads end when they are told to."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from policy_facts import make_facts

from lowtide.core import Demand, MoEShape
from lowtide.experts.host_tier import HostTier
from lowtide.experts.layout import SlotLayout
from lowtide.experts.slots import ExpertSlots, SlotLedger
from lowtide.memory.arena import Arena
from lowtide.reading.file_reader import Ticket

SHAPE = MoEShape(3, 6, 2, hidden_size=16, expert_size=16)
EXPECTED = 1
"""The layer that is expected once layer 0 has run."""


class Commanded:
    """A transfer whose reads end by command. waiting: experts whose reads never begin by then."""

    def __init__(self, waiting: set[int]) -> None:
        self.reads: dict[int, tuple[int, Future[int]]] = {}  # by slot: the expert and its read
        self._waiting = waiting

    def start(self, layer: int, expert: int, slot: int) -> Ticket:
        read: Future[int] = Future()
        if expert not in self._waiting:
            read.set_running_or_notify_cancel()
        self.reads[slot] = expert, read
        return read

    def describe(self, layer: int, expert: int) -> str:
        return f"expert {expert} of MoE layer {layer}"

    def drain(self) -> None:
        """Has nothing of its own that runs."""

    def close(self) -> None:
        """Has no threads."""


some_experts = st.sets(st.integers(0, SHAPE.num_experts - 1))


@given(
    coming=st.integers(0, SHAPE.num_layers - 1),
    absent=some_experts,
    ended=some_experts,
    waiting=some_experts,
    num_slots=st.integers(1, SHAPE.num_experts + 2),
)
def test_reads_ahead_serve_their_own_layer_and_no_other(
    coming: int, absent: set[int], ended: set[int], waiting: set[int], num_slots: int
) -> None:
    """What another layer does not need is dropped; its slot is free once its read has ended."""
    layout = SlotLayout.of(SHAPE, torch.float32)
    slots = ExpertSlots(Arena(num_slots * layout.num_bytes), layout)
    ledger = SlotLedger(SHAPE.num_layers, SHAPE.num_experts, num_slots)
    transfer = Commanded(waiting - ended)
    host = HostTier(slots, ledger, transfer)
    everyone = np.arange(SHAPE.num_experts)
    demand = Demand(everyone, np.ones_like(everyone), np.zeros(SHAPE.num_experts, np.bool_))
    host.read_ahead.expect(make_facts(demand))
    host.start_for_later()
    expected = [expert for expert, _ in transfer.reads.values()]
    assert expected == list(range(min(num_slots, SHAPE.num_experts)))
    for expert, read in transfer.reads.values():
        if expert in ended:
            read.set_result(1)

    claimed = host.claim(coming, absent)

    wanted = [expert for expert in expected if expert in absent and coming == EXPECTED]
    assert [(read.layer, read.expert) for read in claimed] == [(EXPECTED, each) for each in wanted]
    assert host.stats.num_ahead == len(wanted)
    assert host.stats.num_wasted == len(expected) - len(wanted)
    for slot, (expert, read) in transfer.reads.items():
        assert ledger.is_free(slot) == (expert not in wanted and read.done())
    for expert, read in transfer.reads.values():
        if not read.done() and expert not in wanted:
            read.set_result(1)
    host.settle()
    assert ledger.num_free == num_slots - len(wanted) and host.num_set_aside == 0
    assert host.claim(coming, absent) == []
    for read in claimed:
        if not read.ticket.done():
            assert isinstance(read.ticket, Future)
            read.ticket.set_result(1)
        host.take_in(read)
        host.bind(read)
    assert np.flatnonzero(ledger.is_resident(EXPECTED)).tolist() == wanted
    ledger.check_integrity()
