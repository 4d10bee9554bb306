"""Shared parts of the simulated benchmarks: published shapes, presets with options, and records."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from common.record import Row
from lowtide.core import Costs, Facts, FloatArray, IntArray, MoEShape, StepKind
from lowtide.families import families, read_config
from lowtide.lab.baselines import break_even_tokens
from lowtide.lab.simulation.simulator import Report, calibrate, simulate
from lowtide.policies.prefetch import Ahead
from lowtide.policies.recipe import PolicyInputs, Recipe
from lowtide.replay.trace import Trace, TraceShape, demand_of


class Variant(NamedTuple):
    """A preset with options of its own, as a row of results."""

    preset: str
    options: Mapping[str, Any] = {}


VARIANTS: Mapping[str, Variant] = {
    "all-host": Variant("all-host"),
    "on-demand": Variant("on-demand"),
    "static": Variant("static"),
    "lru": Variant("lru"),
    "fiddler": Variant("fiddler"),
    "fiddler threshold": Variant("fiddler", {"by_threshold": True}),
    "edgemoe": Variant("edgemoe"),
    "layer-split": Variant("layer-split"),
    "moe-lightning": Variant("moe-lightning"),
    "hybrimoe": Variant("hybrimoe"),
    "hybrimoe greedy": Variant("hybrimoe", {"by_greedy": True}),
    "tide tau=1 waits": Variant("tide", {"tau": 1, "waits": True}),
    "tide tau=1": Variant("tide", {"tau": 1}),
    "tide waits": Variant("tide", {"waits": True}),
    "tide": Variant("tide"),
    "dali": Variant("dali"),
    "lowtide": Variant("lowtide"),
}
"""Every preset that is compared. `hybrimoe` is the static threshold that DALI compares itself
with, `hybrimoe greedy` assigns as its released code does; `tide tau=1 waits` is the paper's
Mixtral-Offload: every step waits for the experts it moves."""

FLASH = MoEShape(31, 256, 8, 4096, 1024)
"""LLaDA2.0-flash's experts: 24 MiB each in bfloat16."""


def published(family: str) -> MoEShape:
    """The experts of the model whose dimensions `synth FAMILY --size full` has."""
    return read_config(families()[family].sizes()["full"].config).moe_shape


def trace_shape(shape: MoEShape) -> TraceShape:
    return TraceShape(*shape)


def make_setting(
    trace: Trace,
    costs: Costs,
    num_residents: int,
    known: Trace | None = None,
    known_hits: IntArray | None = None,
) -> PolicyInputs:
    """`num_residents` in every layer; `known`: another trace of the model, to calibrate on."""
    setting = PolicyInputs([num_residents] * trace.shape.num_layers, trace.shape.num_experts, costs)
    if known is None:
        return setting
    calibration = calibrate(known)
    hits = known.hits() if known_hits is None else known_hits
    return replace(
        setting, frequency=calibration.frequency, following=calibration.following, hits=hits
    )


def replay(
    trace: Trace, hits: IntArray, setting: PolicyInputs, names: Iterable[str]
) -> dict[str, Report]:
    """Simulate each of the named `VARIANTS` over a trace; hits: `trace.hits()`."""
    return {
        name: simulate(
            trace,
            VARIANTS[name].preset,
            setting.having(**VARIANTS[name].options),
            hits=hits,
        )
        for name in names
    }


def ceilings(costs: Costs) -> Row:
    """The least and most that sharing a layer between host and device could give.

    The host alone takes a time t for its experts; with a device that does some of them meanwhile
    at the rate r, in units of the host's own, the two take t / (1 + r) at perfect balance: with
    residents r is the device's rate, with absent experts the link's.
    """
    host_s, device_s = costs.host_s.at(1), costs.device_s.at(1)
    return {
        "expert_bytes": costs.expert_bytes,
        "host_us": 1e6 * host_s,
        "device_us": 1e6 * device_s,
        "fetch_us": 1e6 * costs.fetch_s,
        "perfect_balance_over_host_residents": 1 + host_s / device_s,
        "perfect_balance_over_host_fetched": 1 + host_s / costs.fetch_s,
        "break_even_tokens": break_even_tokens(costs),
    }


def summary(report: Report) -> Row:
    """A report's row in the results."""
    waited = {f"{name}_bound_share": s / report.total_s for name, s in report.bound_s.items()}
    return {
        "tokens_per_s": report.tokens_per_s,
        "hit_rate": report.hit_rate,
        "num_fetched": report.num_fetched,
        "num_moved": report.num_moved,
        "num_moves_asked": report.num_moves_asked,
        "num_moves_done": report.num_moves_done,
        "num_prefetched": report.num_prefetched,
        "moved_GB": report.moved_bytes / 1e9,
        "binds": report.binds,
        "foresight": report.foresight,
        **waited,
    }


def generating_passes(trace: Trace) -> Trace:
    """The passes after the prompt's."""
    num_prefill = sum(one.step.kind is StepKind.PREFILL for one in trace.passes)
    rows = slice(sum(one.num_rows for one in trace.passes[:num_prefill]), None)
    return replace(
        trace,
        passes=trace.passes[num_prefill:],
        ids=trace.ids[rows],
        weights=trace.weights[rows],
        requests=trace.requests[rows],
        kinds=trace.kinds[rows],
    )


def policy_s(
    made: Recipe,
    setting: PolicyInputs,
    trace: Trace,
    clock: Callable[[], float] = time.perf_counter,
) -> FloatArray:
    """Seconds per layer of the passes that generate: before its work can start, and beside it.

    Moves are carried out at once. clock: whose seconds; a thread's own where others are at work.
    [layers of all passes, 2]
    """
    policies = made.policies(setting)
    placement, num_layers = policies.placement, setting.num_layers
    resident = np.zeros((num_layers, setting.num_experts), np.bool_)
    for layer in range(num_layers):
        resident[layer, placement.initial(layer)] = True
    nothing = np.full(setting.num_experts, np.inf)
    seconds = []
    for one, hits in zip(trace.passes, trace.hits(), strict=True):
        for layer in range(num_layers):
            demand = demand_of(hits[layer], resident[layer])
            following = (layer + 1) % num_layers
            is_kept, due_s = resident[layer], nothing[demand.experts]
            capacity, costs = policies.capacity, setting.costs
            start_s = clock()
            facts = Facts(one.step, layer, demand, is_kept, capacity, costs, due_s)
            decision = policies.decide(facts)
            decided_s = clock()
            moves = policies.moves(facts, decision)
            policies.prefetch.observe(facts)
            policies.prefetch.choose(Ahead(following, resident[following], hits[following]))
            end_s = clock()
            resident[layer, moves.admit] = True
            resident[layer, moves.evict] = False
            if one.step.kind is not StepKind.PREFILL:
                seconds.append((decided_s - start_s, end_s - decided_s))
    return np.array(seconds)
