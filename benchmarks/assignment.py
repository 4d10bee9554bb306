"""Assignment: how near to the optimum each policy comes, and what deciding costs.

On recorded demand, with the residents that TIDE's refresh one step earlier leaves: the makespan
of DALI's cost model (device and host side by side, an expert on the device takes the longer of
its transfer and its computation) against the exact optimum; and the makespan when the link works
beside the device, which is what a step really takes. Then the time that each preset's policies
take per layer at 256 experts: before the layer's work can start (the assignment, and the placement
where a step waits for its moves), and beside that work (placement and prefetch).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from common.arguments import run_script
from common.exact import Beam, Exact
from common.record import Recorder, Row, say
from common.simulated import (
    VARIANTS,
    ceilings,
    make_parser,
    make_setting,
    policy_s,
    published,
    trace_shape,
)
from common.synth_trace import locality_for, synth_trace
from common.traces import Run, record_all

from lowtide.core import Assignment, Costs, Demand, Facts, Step, StepKind
from lowtide.errors import UsageError
from lowtide.policies.assignment import (
    AllFetch,
    AllHost,
    Assign,
    Balance,
    Fiddler,
    Greedy,
    HybriMoEGreedy,
    HybriMoEThreshold,
    LayerSplit,
    is_on_device,
    makespan,
    prices,
)
from lowtide.policies.presets import recipe
from lowtide.policies.split import FixedShare
from lowtide.policies.tau import FollowDrift, best_residents
from lowtide.profiles import load_profile
from lowtide.replay.simulator import simulate
from lowtide.replay.trace import Trace, demand_of

RUNS = {
    "demo:diffusion": (Run("demo:diffusion", 1, 6, 64), "llada2"),
    "synth:llada2": (Run("synth:llada2", 1, 3, 96), "llada2"),
    "demo:chat, 8 at once": (Run("demo:chat", 8, 2, 48), "qwen3_moe"),
    "synth:qwen3_moe, 8 at once": (Run("synth:qwen3_moe", 8, 2, 32), "qwen3_moe"),
}
SHARES = (0.25, 0.5, 0.75)
MACHINES = ("rtx3090", "a100-40gb")
_MAX_STATES = 1 << 14  # of the exact search, per layer

Maker = Callable[[Costs], Assign]
POLICIES: Mapping[str, Maker] = {
    "greedy": lambda costs: Greedy(),
    "balance": lambda costs: Balance(),
    "beam 2": lambda costs: Beam(2),
    "exact": lambda costs: Exact(_MAX_STATES),
    "all host": lambda costs: AllHost(),
    "all fetch": lambda costs: AllFetch(),
    "fiddler": lambda costs: Fiddler(),
    "fiddler threshold": lambda costs: Fiddler(by_threshold=True),
    "hybrimoe threshold": HybriMoEThreshold,
    "hybrimoe greedy": lambda costs: HybriMoEGreedy(),
    "fixed half": lambda costs: FixedShare(0.5),
    "layer on the host": lambda costs: LayerSplit(),
}


class Solved(NamedTuple):
    """A layer's demand and the makespan of its exact optimum."""

    demand: Demand
    best_s: float


class Timed(NamedTuple):
    """What one policy did with every demand: makespans in its two readings, and its own time."""

    optimum_share: float  # of the exact optimum's speed, mean
    worst_share: float
    overlapped_s: float  # of all layers, link beside device
    policy_us: float  # median


def main() -> None:
    options = make_parser(__doc__).parse_args()
    recorder = Recorder("assignment", {"max_states": _MAX_STATES}, options.out)
    names = list(RUNS)[:1] if options.quick else list(RUNS)
    traces = record_all([RUNS[name][0] for name in names])
    for name, trace in zip(names, traces, strict=True):
        for machine in MACHINES[:1] if options.quick else MACHINES:
            _compare(recorder, name, trace, machine, options.quick)
    _time_presets(recorder, options.quick)


def _compare(recorder: Recorder, name: str, trace: Trace, machine: str, is_quick: bool) -> None:
    shape = published(RUNS[name][1])
    costs = load_profile(machine).costs(shape)
    say(f"{name}, {machine}")
    facts: Row = {"trace": RUNS[name][0].name, "experts_of": RUNS[name][1], "profile": machine}
    recorder.write("ceiling", {**facts, **ceilings(costs)})
    for share in SHARES[:1] if is_quick else SHARES:
        num_residents = round(share * trace.shape.num_experts)
        demands = [d for d in _demands(trace, num_residents) if len(d.experts)]
        demands = demands[:: max(1, len(demands) // (40 if is_quick else 120))]
        solved = _solvable(demands, costs)
        most = [int(one.demand.num_tokens.max()) for one in solved]
        dense_s = float(np.mean([costs.dense_s.at(num_tokens) for num_tokens in most]))
        for policy, maker in POLICIES.items():
            timed = _judge(maker(costs), solved, costs)
            step_s = timed.overlapped_s / len(solved) + dense_s + costs.sync_s
            row: Row = {
                **facts,
                "residents": num_residents,
                "num_layers": len(solved),
                "num_unsolved": len(demands) - len(solved),
                "policy": policy,
                **timed._asdict(),
                "layer_us": 1e6 * step_s,
                "policy_share_of_layer": 1e-6 * timed.policy_us / step_s,
            }
            recorder.write("assignment", row)


def _demands(trace: Trace, num_residents: int) -> Iterator[Demand]:
    """Each layer's demand of the passes that generate, with the residents one step earlier."""
    resident = np.zeros((trace.shape.num_layers, trace.shape.num_experts), np.bool_)
    for one, hits in zip(trace.passes, trace.hits(), strict=True):
        if one.step.kind is not StepKind.PREFILL:
            for layer, counts in enumerate(hits):
                yield demand_of(counts, resident[layer])
        resident = best_residents(hits, resident, num_residents)


def _solvable(demands: list[Demand], costs: Costs) -> list[Solved]:
    """Those whose optimum is found within the states allowed."""
    exact, solved = Exact(_MAX_STATES), []
    for demand in demands:
        facts = _facts(demand, costs)
        try:
            mask = is_on_device(demand, exact(facts))
        except UsageError:
            continue
        solved.append(Solved(demand, makespan(prices(facts), mask)))
    return solved


def _facts(demand: Demand, costs: Costs) -> Facts:
    """A layer that has room for nobody, with an idle link."""
    num_experts = int(demand.experts[-1]) + 1
    is_kept = np.zeros(num_experts, np.bool_)
    is_kept[demand.experts[demand.is_resident]] = True
    return Facts(Step(StepKind.DENOISE, 0), 0, demand, is_kept, np.zeros(1, np.int64), costs)


def _judge(assign: Assign, solved: list[Solved], costs: Costs) -> Timed:
    shares, seconds, overlapped_s = [], [], 0.0
    for demand, best_s in solved:
        facts = _facts(demand, costs)
        start_s = time.perf_counter()
        work = assign(facts)
        seconds.append(time.perf_counter() - start_s)
        shares.append(best_s / makespan(prices(facts), is_on_device(demand, work)))
        overlapped_s += _overlapped_s(demand, work, costs)
    return Timed(
        statistics.mean(shares), min(shares), overlapped_s, 1e6 * statistics.median(seconds)
    )


def _overlapped_s(demand: Demand, work: Assignment, costs: Costs) -> float:
    """Seconds of a layer whose fetches arrive one by one while residents run."""
    tokens = dict(zip(demand.experts.tolist(), demand.num_tokens.tolist(), strict=True))
    device_s = sum(costs.device_s.at(tokens[e]) for e in work.resident.tolist())
    for place, expert in enumerate(work.fetch.tolist()):
        device_s = max(device_s, (place + 1) * costs.fetch_s) + costs.device_s.at(tokens[expert])
    return max(device_s, sum(costs.host_s.at(tokens[e]) for e in work.host.tolist()))


def _time_presets(recorder: Recorder, is_quick: bool) -> None:
    """Each preset's own time, on a block-diffusion run of 256 experts; median over layers."""
    shape = published("llada2")._replace(num_layers=4 if is_quick else 20)
    routed = trace_shape(shape)
    locality = locality_for(0.985, routed, 32, skew=0.5)
    trace, known = (
        synth_trace(routed, num_blocks=2, steps_per_block=12, locality=locality, skew=0.5, seed=s)
        for s in (0, 1)
    )
    costs = load_profile("rtx3090").costs(shape)
    setting = make_setting(trace, costs, 128, known)
    step_s = simulate(trace, "lowtide", setting).total_s / len(trace.passes) / shape.num_layers
    cases = {
        name: (recipe(one.preset), setting.having(**one.options)) for name, one in VARIANTS.items()
    }
    online = setting.having(tau=FollowDrift())
    cases |= {
        "tide online": (recipe("tide"), online),
        "lowtide online": (recipe("lowtide"), online),
    }
    for name, (made, its_setting) in cases.items():
        seconds = policy_s(made, its_setting, trace)
        total_s, (before_s, beside_s) = seconds.sum(axis=1), np.median(seconds, axis=0)
        row: Row = {
            "preset": name,
            "before_us": 1e6 * float(before_s),
            "beside_us": 1e6 * float(beside_s),
            "median_us": 1e6 * float(np.median(total_s)),
            "mean_us": 1e6 * float(total_s.mean()),
            "least_us": 1e6 * float(total_s.min()),
            "is_begun_within_50_us": bool(before_s <= 50e-6),
            "is_within_50_us": bool(np.median(total_s) <= 50e-6),
            "share_of_lowtide_layer": float(before_s) / step_s,
        }
        recorder.write("policy time", row)


if __name__ == "__main__":
    run_script(main)
