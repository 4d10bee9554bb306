"""Device tier: expert slots behind a link, filled from the host tier.

Work is queued without waiting, except at a layer's one synchronisation. The tier decides nothing:
policies choose which experts run here, are fetched and stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowtide.core import Costs, IntArray, Step, StepKind
from lowtide.experts.capacity import Capacity
from lowtide.experts.device import Device, ExpertGroup
from lowtide.experts.early_gate import EarlyGate
from lowtide.experts.host_reads import HostReads
from lowtide.experts.host_tier import HostTier
from lowtide.experts.idle_time import IdleTime
from lowtide.experts.link import Link
from lowtide.experts.policy_facts import HostInputs, routed_tokens
from lowtide.experts.rows import ExpertRows, LayerCall, is_long
from lowtide.experts.slots import NO_SLOT
from lowtide.experts.work import Plan
from lowtide.memory.pinned_copies import to_host
from lowtide.policies.answers import check_experts
from lowtide.policies.decision import Policies
from lowtide.policies.prefetch import Ahead, NoPrefetch, PrefetchOutcome
from lowtide.progress import Progress
from lowtide.threads.event import Event

_START = Step(StepKind.PREFILL, 0)
MAX_COUNTS = 64  # kept until they are added up together: small operators cost a launch each


class WholeLayer(NamedTuple):
    """All experts of a layer, in these slots."""

    group: ExpertGroup
    slot_bytes: bytes  # of the ledger's row


class DeviceTier:
    """Device with its link; counts the demand of layers that are wholly resident."""

    def __init__(
        self, device: Device, link: Link, costs: Costs, close: Callable[[], None] | None = None
    ) -> None:
        """Combine the two; `close`: frees device and resources, by default the device only."""
        self.device = device
        self.link = link
        self.ledger = link.ledger
        self.costs = costs
        self.close = device.close if close is None else close
        self.early_gate: EarlyGate | None = None
        self.wave_size = max(1, costs.num_staging // 2)  # the other half arrives meanwhile
        self._idle = IdleTime(link.ledger.num_layers)
        # By layer: all of its experts, if all were resident when they last ran.
        self._whole: list[WholeLayer | None] = [None] * link.ledger.num_layers
        self._whole_version = 0  # counts changes of them
        self._whole_table = b""  # the ledger's, when all layers were there last
        # Hits in layers whose experts are all resident: counted where nothing waits for the count.
        self._num_hits = torch.zeros((), dtype=torch.int64, device=device.torch_device)
        self._counts: list[Tensor] = []  # of the last of these layers, each [num_experts]

    def whole(self, layer: int, capacity: Capacity) -> ExpertGroup | None:
        """Return all experts of a layer if they are resident and may stay without a decision.

        It is the same object as long as they keep their slots.
        """
        slots, whole = self.ledger.table[layer], self._whole[layer]
        if whole is None or slots.tobytes() != whole.slot_bytes:
            if slots.min() == NO_SLOT:
                return None
            group = ExpertGroup(layer, np.arange(len(slots)), slots.copy())
            self._whole[layer] = whole = WholeLayer(group, slots.tobytes())
            self._whole_version += 1
        if capacity.has_changed and capacity.is_short(layer, self.ledger.num_resident):
            return None
        return whole.group

    def settle_whole(self, capacity: Capacity) -> int | None:
        """Make the groups of `whole` of all layers; return a number that changes with any of them.

        None if an expert is absent, if layers may have to evict, and while the link has something
        to do between layers.
        """
        slots = self.ledger.table.tobytes()
        if slots != self._whole_table:
            if self.ledger.table.min() == NO_SLOT:
                return None
            for layer in range(self.ledger.num_layers):
                self.whole(layer, capacity)
            self._whole_table = slots
        return None if capacity.has_changed or self.link.is_in_use else self._whole_version

    def begin_whole(self, counts: Tensor) -> None:
        """Begin a layer whose experts are all resident, without any synchronisation.

        counts [num_experts], on the device: pairs of each expert.
        """
        self._idle.end()
        self._counts.append(counts)
        if len(self._counts) == MAX_COUNTS:
            self.add_counts()

    @property
    def num_hits(self) -> int:
        """Number of activated experts in layers whose experts were all resident."""
        self.add_counts()
        return int(self._num_hits)

    def look(self, call: LayerCall, policies: Policies) -> HostInputs:
        """Copy a layer's input, routing and prediction of the next layer to host memory.

        It is the layer's one synchronisation. A long pass leaves its input on the device.
        """
        x, (experts, weights), scores = call.x, call.routing, call.scores
        num_experts = self.ledger.num_experts
        if is_long(len(x)):
            experts, routed = experts.cpu(), None
            if policies.asks_routing:
                scores = None if scores is None else scores.cpu()
                routed = routed_tokens(experts, weights.cpu(), scores)
            return HostInputs(None, experts, routed, rows=ExpertRows.at_host(experts, num_experts))
        predicted, gate, prefetch = None, self.early_gate, policies.prefetch
        if gate is not None and not isinstance(prefetch, NoPrefetch):
            if prefetch.wants_prediction(call.layer + 1):
                predicted = self._predict(gate, call)
        weights = to_host(weights) if policies.asks_routing else weights
        scores = None if scores is None else to_host(scores)
        host_x, experts = self.device.to_host(x, experts)
        self._idle.end()
        routed = routed_tokens(experts, weights, scores) if policies.asks_routing else None
        rows = ExpertRows.at_host(experts, num_experts)
        tokens = None if predicted is None else predicted.numpy()
        return HostInputs(host_x, experts, routed, tokens, rows)

    def look_ahead(self, plan: Plan, outcome: PrefetchOutcome | None) -> None:
        """Queue the prefetches that the policy wants for the next layer.

        outcome: of those for this one, if there were any.
        """
        facts, at_host, prefetch = plan.facts, plan.at_host, plan.policies.prefetch
        if outcome is not None:
            prefetch.record(outcome)
        if isinstance(prefetch, NoPrefetch):
            return
        following = facts.layer + 1
        prefetch.observe(facts)
        if following < self.link.ledger.num_layers:
            is_kept, is_long = self.link.is_kept(following), at_host.x is None
            ahead = Ahead(following, is_kept, at_host.predicted, is_long)
            chosen = prefetch.choose(ahead)
            if len(chosen):
                if plan.policies.is_checked:
                    check_experts("prefetches", chosen, self.link.ledger.num_experts)
                self.link.look_ahead(following, chosen)

    def finish(self, layer: int, num_rows: int) -> None:
        """Make all outputs visible to the caller's next work; the link goes on meanwhile."""
        is_in_use = self.link.is_in_use
        if is_in_use:
            self.link.pump(self._idle.expected_s(layer, self.costs.dense_s.at(num_rows)))
        self._idle.begin(layer)
        self.device.join()
        if is_in_use:
            self.link.confirm()

    def end_pass(self, host: HostTier) -> None:
        """End a pass: carry out the moves that are owed, and wait for them."""
        self.link.end_pass()
        owed = self.link.take_owed()
        for layer, experts in owed.items():
            for expert, host_slot in self._in_host_memory(host, layer, experts):
                self.link.move(layer, expert, host_slot)
        if owed:
            self.link.wait_for_moves()

    def load(self, host: HostTier, initial: Sequence[IntArray], progress: Progress) -> None:
        """Make exactly `initial[layer]` resident, through host memory."""
        self._whole = [None] * self.ledger.num_layers
        self._whole_table = b""
        absent = [self.link.keep(layer, experts) for layer, experts in enumerate(initial)]
        slot_bytes = host.slots.layout.num_bytes
        total_bytes, done_bytes = sum(map(len, absent)) * slot_bytes, 0
        for layer, experts in enumerate(absent):
            for expert, host_slot in self._in_host_memory(host, layer, experts):
                self.link.load(layer, expert, host_slot)
                done_bytes += slot_bytes
                progress("loading experts onto the device", done_bytes, total_bytes)

    def pause(self) -> None:
        """Between passes: end all work and all copies, so that slots may be emptied and moved.

        Raises DeviceError if a copy failed; then nothing is in flight.
        """
        self.device.drain()
        try:
            self.link.pause()
        except BaseException:
            self.link.abandon()
            raise

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Pause; nothing uses or fills a slot within the context."""
        self.pause()
        yield

    def evict(self, layer: int, expert: int) -> None:
        """Evict a resident, after `pause`."""
        self.ledger.evict(layer, expert)

    def abandon(self) -> None:
        """Recover from a failure: free all slots, once nothing uses or fills them."""
        self.device.drain()
        self.link.abandon()

    def _in_host_memory(self, host: HostTier, layer: int, experts: IntArray) -> HostReads:
        moves = host.own_moves(_START, layer, experts)
        reads = HostReads(host, layer, experts)
        reads.obey(moves)
        return reads

    def _predict(self, gate: EarlyGate, call: LayerCall) -> Tensor | None:
        """Queue the early gate's prediction of the next layer; in host memory after `to_host`."""
        predicted = gate.predict(call.layer, call.x, call.workspace)
        return None if predicted is None else self.device.stage(predicted)

    def end_whole_pass(self, use: Event) -> None:
        """Make copies into any slot wait for `use`, the end of a pass that graphs repeated."""
        self.link.note_whole_pass(use)
        self._idle.forget()

    def drop_counts(self) -> None:
        """Forget counts that were not added up."""
        self._counts.clear()

    def add_counts(self) -> None:
        """Queue the adding up of counts so far."""
        counts, self._counts = self._counts, []
        if counts:
            self._num_hits += torch.stack(counts).count_nonzero()
