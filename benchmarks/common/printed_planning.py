"""DALI's and HybriMoE's planning as their papers print it: in plain Python, an expert at a time.

They decide what `Greedy` and `HybriMoEThreshold` decide, slower: for DALI's Table 6, which is of an
implementation in Python whose form the paper leaves open. Each expert's two times are looked up by
themselves, as line 3 and 4 of Algorithm 1 have it.
"""

from __future__ import annotations

import numpy as np

from lowtide.core import Assignment, Facts
from lowtide.policies.assignment import HybriMoEThreshold, divide, is_here


class PrintedGreedy:
    """Algorithm 1, line by line; experts that are on their way are absent."""

    def __call__(self, facts: Facts) -> Assignment:
        t_gpu, t_cpu = _times(facts)
        by_difference = sorted(
            range(len(t_gpu)), key=lambda expert: abs(t_gpu[expert] - t_cpu[expert]), reverse=True
        )
        on_gpu = [False] * len(t_gpu)
        gpu_end = cpu_end = 0.0
        for expert in by_difference:
            gpu_time, cpu_time = t_gpu[expert], t_cpu[expert]
            if gpu_time == 0 and cpu_time == 0:
                continue
            if gpu_end + gpu_time <= cpu_end + cpu_time:
                on_gpu[expert] = True
                gpu_end += gpu_time
            else:
                cpu_end += cpu_time
        return divide(facts.demand, np.array(on_gpu, np.bool_)[facts.demand.experts])


class PrintedThreshold:
    """HybriMoE's rule as DALI tells it: whoever has `min_tokens` tokens is the device's."""

    def __init__(self, rule: HybriMoEThreshold) -> None:
        self._min_tokens = rule.min_tokens

    def __call__(self, facts: Facts) -> Assignment:
        workload, here = _workload(facts), set(facts.demand.experts[is_here(facts)].tolist())
        t_gpu, t_cpu = _times(facts)
        on_gpu, gpu_end, cpu_end = [False] * len(workload), 0.0, 0.0
        for expert, num_tokens in enumerate(workload):
            if num_tokens == 0:
                continue
            if expert in here or (facts.can_fetch and num_tokens >= self._min_tokens):
                on_gpu[expert] = True
                gpu_end += t_gpu[expert]
            else:
                cpu_end += t_cpu[expert]
        return divide(facts.demand, np.array(on_gpu, np.bool_)[facts.demand.experts])


def _workload(facts: Facts) -> list[int]:
    """Tokens of every expert of the layer."""
    workload = [0] * len(facts.is_kept)
    demand = facts.demand
    for expert, num_tokens in zip(demand.experts.tolist(), demand.num_tokens.tolist(), strict=True):
        workload[expert] = num_tokens
    return workload


def _times(facts: Facts) -> tuple[list[float], list[float]]:
    """t_gpu and t_cpu of every expert of the layer, none for those without tokens."""
    costs, workload = facts.costs, _workload(facts)
    resident = set(facts.demand.experts[facts.demand.is_resident].tolist())
    absent_s = costs.fetch_s if facts.can_fetch else np.inf
    t_gpu, t_cpu = [0.0] * len(workload), [0.0] * len(workload)
    for expert, num_tokens in enumerate(workload):
        if num_tokens:
            transfer_s = 0.0 if expert in resident else absent_s
            t_gpu[expert] = max(transfer_s, costs.device_s.at(num_tokens))
            t_cpu[expert] = max(costs.disk_read_s, costs.host_s.at(num_tokens))
    return t_gpu, t_cpu
