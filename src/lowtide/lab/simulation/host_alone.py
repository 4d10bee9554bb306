"""Replays a routing trace without a device: the host runs every expert.

Absent experts are read from disk while present ones are computed; policies choose which they
replace. A layer takes its dense part, then the longer of reading and computing and, if it reads,
the overhead around its reads.

After a layer's last read the disk reads ahead for the next layer, as `AheadSlots` allows; a trial
turns that off if it saves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lowtide.core import Demand, Facts, IntArray, Moves, Step
from lowtide.lab.simulation.foresight import guesses
from lowtide.lab.simulation.host_reads_ahead import NONE_AHEAD, AheadSlots, ReplayedAhead
from lowtide.lab.simulation.simulator import (
    Report,
    count_substitutions,
    replayable,
    substituted_facts,
)
from lowtide.policies.presets import recipe
from lowtide.policies.recipe import PolicyInputs
from lowtide.replay.trace import RoutedPass, Trace, demand_of


def compare_alone(
    trace: Trace, presets: Sequence[str], inputs: PolicyInputs, ahead: AheadSlots = NONE_AHEAD
) -> list[Report]:
    """Replay `trace` under each preset's placement; return the reports in that order.

    inputs.costs: `link_s` is a read, `device_s` an expert in memory, as lowtide's own placement
    uses them without a device; `sync_s` is the overhead of a layer that waits for reads. In a
    report the link is the disk, and prefetches are reads ahead.
    """
    hits = trace.hits()
    foreseen: Sequence[IntArray | None] = [None] * len(trace.passes)
    if ahead.gate_accuracy is not None:
        foreseen = list(guesses(trace, ahead.gate_accuracy, inputs.seed))
    reports = []
    for preset in presets:
        run = HostReplay(preset, inputs, ahead)
        passes = zip(trace.passes, hits, trace.iter_routed(), foreseen, strict=True)
        for one, pass_hits, of_rows, predicted in passes:
            run.begin_pass(one.step)
            for layer in range(inputs.num_layers):
                run.layer(layer, of_rows, one.num_rows, pass_hits[layer], predicted)
            run.end_pass(one.step, pass_hits, one.num_committed)
        count_substitutions(run.report, run.policies)
        reports.append(run.report)
    return reports


class HostReplay:
    """A replay on the host alone: its residents, advanced layer by layer.

    is_resident [layers, experts]: after the last layer that was replayed.
    """

    def __init__(self, preset: str, inputs: PolicyInputs, ahead: AheadSlots = NONE_AHEAD) -> None:
        self.report = Report(preset, expert_bytes=inputs.costs.expert_bytes)
        self.policies = replayable(recipe(preset).policies_without_device(inputs))
        self.is_resident = np.zeros((inputs.num_layers, inputs.num_experts), np.bool_)
        for layer, is_resident in enumerate(self.is_resident):
            is_resident[self.policies.placement.initial(layer)] = True
        self._ahead = ReplayedAhead(ahead, self.is_resident, inputs.costs.fetch_s)
        self._idle_s = 0.0  # the disk's, from a layer's last read to its end
        self._began_s, self._num_read = 0.0, 0  # when the pass began, and what was read in it
        self._is_compiled = False  # the pass

    def begin_pass(self, step: Step) -> None:
        self._began_s, self._num_read = self.report.total_s, self.report.num_fetched
        num_residents = np.count_nonzero(self.is_resident, axis=1)
        self.policies.begin_pass(step, num_residents, self.policies.capacity)

    def layer(
        self,
        layer: int,
        routed: RoutedPass,
        num_rows: int,
        hits: IntArray,
        predicted: IntArray | None = None,
    ) -> None:
        """Replay a layer of a pass. hits [experts]; predicted [layers, experts]: by early gates."""
        policies, is_resident = self.policies, self.is_resident[layer]
        demand = demand_of(hits, is_resident)
        is_kept = is_resident.copy()
        facts = Facts(
            routed.step,
            layer,
            demand,
            is_kept,
            policies.capacity,
            policies.costs,
            can_fetch=False,
            has_idle_link=False,
            routing=routed.routing(layer) if policies.asks_routing else None,
            is_here=is_kept,
        )
        run = substituted_facts(facts, policies.substitute(facts))
        moves = policies.moves(facts, policies.decide(facts, run))
        is_resident[moves.admit] = True
        is_resident[moves.later] = True  # when the layer comes again
        is_resident[moves.evict] = False
        self._count(demand if run is None else run.demand, moves, num_rows)
        self._is_compiled = policies.substitution is None and self._ahead.is_compiled(num_rows)
        if self._is_compiled:
            self._ahead.expect_by_gate(facts, len(moves.evict), predicted)
        else:
            self._ahead.expect_by_demand(facts, run)

    def _count(self, demand: Demand, moves: Moves, num_rows: int) -> None:
        """Count a layer's time: its reads beside its computation, and the overhead."""
        costs, report = self.policies.costs, self.report
        num_hits = int(np.count_nonzero(demand.is_resident))
        compute_s = float(costs.device_s(demand.num_tokens).sum())
        num_read = len(demand.experts) - num_hits + len(moves.later)
        dense_s = own_s = costs.dense_s.at(num_rows)
        ahead, outcome = self._ahead.claim(demand, self._idle_s + dense_s)
        read_s = max(0.0, num_read * costs.fetch_s - ahead.saved_s)
        self._idle_s = max(0.0, compute_s - read_s)
        if num_hits < len(demand.experts):
            own_s += costs.sync_s
        report.prefetch.add(outcome)
        report.num_prefetched += outcome.num_hits + outcome.num_late + outcome.num_wasted
        report.num_moves_asked += moves.num_asked
        report.num_moves_done += len(moves.admit) + len(moves.later)
        report.count_hits(demand)
        report.num_fetched += num_read
        report.host_s += own_s + compute_s
        report.link_s += read_s + ahead.done_s
        report.total_s += own_s + max(read_s, compute_s)
        report.bound_s["host"] += own_s + compute_s
        report.bound_s["link"] += max(0.0, read_s - compute_s)

    def end_pass(self, step: Step, hits: IntArray, num_committed: int) -> None:
        """End a pass. hits [layers, experts]."""
        self.policies.end_pass(step, hits)
        if self._is_compiled and self.report.num_fetched > self._num_read:
            self._ahead.note_seconds(self.report.total_s - self._began_s)
        self.report.num_passes += 1
        self.report.num_tokens += num_committed
