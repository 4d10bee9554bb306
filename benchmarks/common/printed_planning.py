"""DALI's and HybriMoE's planning as their papers print it, an expert at a time in torch's tensors.

They decide what `Greedy` and `HybriMoEThreshold` decide, many times slower: for DALI's Table 6,
which is of an implementation in Python whose form the paper leaves open.
"""

from __future__ import annotations

import torch

from lowtide.core import Assignment, Facts
from lowtide.policies.assignment import HybriMoEThreshold, divide, is_here, prices


class PrintedGreedy:
    """Algorithm 1, line by line."""

    def __call__(self, facts: Facts) -> Assignment:
        price, experts = prices(facts), torch.tensor(facts.demand.experts)
        t_gpu, t_cpu = torch.zeros(2, len(facts.is_kept), dtype=torch.float64)
        t_gpu[experts] = torch.tensor(price.device_s)
        t_cpu[experts] = torch.tensor(price.host_s)
        on_gpu = torch.zeros(len(t_gpu), dtype=torch.bool)
        gpu_end, cpu_end = torch.zeros(2, dtype=torch.float64)
        for expert in torch.argsort((t_gpu - t_cpu).abs(), descending=True, stable=True):
            gpu_time, cpu_time = t_gpu[expert], t_cpu[expert]
            if gpu_time == 0 and cpu_time == 0:
                continue
            if gpu_end + gpu_time <= cpu_end + cpu_time:
                on_gpu[expert] = True
                gpu_end = gpu_end + gpu_time
            else:
                cpu_end = cpu_end + cpu_time
        return divide(facts.demand, on_gpu[experts].numpy())


class PrintedThreshold:
    """HybriMoE's rule as DALI tells it: whoever has `min_tokens` tokens is the device's."""

    def __init__(self, rule: HybriMoEThreshold) -> None:
        self._min_tokens = rule.min_tokens

    def __call__(self, facts: Facts) -> Assignment:
        demand = facts.demand
        experts = torch.tensor(demand.experts)
        workload = torch.zeros(len(facts.is_kept), dtype=torch.int64)
        workload[experts] = torch.tensor(demand.num_tokens)
        on_gpu = torch.zeros(len(workload), dtype=torch.bool)
        on_gpu[experts] = torch.tensor(is_here(facts))
        for expert in range(len(workload)):
            if workload[expert] == 0:
                continue
            if facts.can_fetch and workload[expert] >= self._min_tokens:
                on_gpu[expert] = True
        return divide(demand, on_gpu[experts].numpy())
