"""Replays a routing trace where there is no device: the host runs every expert.

What is absent is read from disk while what is there is computed, and the policies say whose place
it takes. So a layer takes its dense part and the longer of reading and computing; reads ahead of
a layer, and the time that policies themselves take, are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lowtide.core import Facts, IntArray, Step
from lowtide.policies.presets import recipe
from lowtide.policies.recipe import Setting
from lowtide.replay.simulator import Report
from lowtide.replay.trace import Trace, demand_of


def compare_alone(trace: Trace, presets: Sequence[str], setting: Setting) -> list[Report]:
    """Replays `trace` under each preset's placement; the reports in that order.

    setting.costs: `link_s` is a read, `device_s` an expert in memory, as lowtide's own placement
    takes them where there is no device. A report's link is the disk.
    """
    hits = trace.hits()
    reports = []
    for preset in presets:
        run = _Replay(preset, setting)
        for one, pass_hits in zip(trace.passes, hits, strict=True):
            for layer in range(setting.num_layers):
                run.layer(layer, one.step, one.num_rows, pass_hits[layer])
            run.end_pass(one.num_committed)
        reports.append(run.report)
    return reports


class _Replay:
    """Who is resident, moved on layer by layer."""

    def __init__(self, preset: str, setting: Setting) -> None:
        self.report = Report(preset, expert_bytes=setting.costs.expert_bytes)
        self._policies = recipe(preset).policies_without_device(setting)
        self._is_resident = np.zeros((setting.num_layers, setting.num_experts), np.bool_)
        for layer, is_resident in enumerate(self._is_resident):
            is_resident[self._policies.placement.initial(layer)] = True

    def layer(self, layer: int, step: Step, num_rows: int, hits: IntArray) -> None:
        """One layer of one pass. hits [experts]"""
        policies, report, is_resident = self._policies, self.report, self._is_resident[layer]
        costs = policies.costs
        demand = demand_of(hits, is_resident)
        facts = Facts(
            step,
            layer,
            demand,
            is_resident.copy(),
            policies.capacity,
            costs,
            can_fetch=False,
            has_idle_link=False,
        )
        moves = policies.moves(facts, policies.decide(facts))
        is_resident[moves.admit] = True
        is_resident[moves.evict] = False
        num_hits = int(np.count_nonzero(demand.is_resident))
        compute_s = float(costs.device_s(demand.num_tokens).sum())
        read_s = (len(demand.experts) - num_hits) * costs.fetch_s
        dense_s = costs.dense_s.at(num_rows)
        report.num_hits += num_hits
        report.num_activated += len(demand.experts)
        report.num_fetched += len(demand.experts) - num_hits
        report.host_s += dense_s + compute_s
        report.link_s += read_s
        report.total_s += dense_s + max(read_s, compute_s)
        report.bound_s["host"] += dense_s + compute_s
        report.bound_s["link"] += max(0.0, read_s - compute_s)

    def end_pass(self, num_committed: int) -> None:
        self.report.num_passes += 1
        self.report.num_tokens += num_committed
