"""TIDE's refresh interval: every tau, the paper's choice, the simulated best and chance.

TIDE's Tables 1 and 2 and Figures 1, 2, 4 and 5, in simulated time, on TIDE's machines within what
such hardware can do (`tide-a100`, `tide-h100`; how far that is from what they were fitted to is
written first). Routing is recorded: of the demo diffusion model and of a synthetic checkpoint, at
several blocks and thresholds, with experts of LLaDA2.0-mini's size. Beside it synthetic routing
with the shapes of LLaDA2.0-mini and LLaDA2.0-flash, which is given the cosine of neighbouring steps
that the paper reports (0.985), and therefore says nothing about that. Each interval twice: steps
that wait for what they move (the paper's Eq. 3; at tau = 1 its Mixtral-Offload baseline) and moves
that follow behind. Misses and migrations beside the paper's formulas.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from common.arguments import make_parser, run_script
from common.record import Recorder, Row, say
from common.simulated import (
    FLASH,
    ceilings,
    make_setting,
    published,
    replay,
    trace_shape,
)
from common.synth_trace import locality_for, synth_trace
from common.traces import Run, record_all
from fit_profiles import TIDE_BASELINES, Shipped, tide_anchor, tide_case

from lowtide.core import Costs, MoEShape
from lowtide.lab.calibration_report import distinct_experts, step_similarity
from lowtide.lab.profiles import load_profile
from lowtide.lab.simulation.simulator import Report, fastest_tau, simulate
from lowtide.policies.recipe import PolicyInputs
from lowtide.policies.tau import FollowDrift, drift, expected_migrations, miss_shares, paper_tau
from lowtide.replay.trace import Trace

SIMILARITY = 0.985  # TIDE, between neighbouring steps
TOKENS_PER_PASS = {"LLaDA2.0-mini": 2.6, "LLaDA2.0-flash": 3.08}  # the models' reports, means
SKEW = 0.5  # of the synthetic popularity: about 120 of 256 experts in a step of 32 tokens
NUM_DRAWS = 5  # of a random tau
SHARES = (0.125, 0.25, 0.5)
MODELS: Mapping[str, tuple[MoEShape, str]] = {
    "LLaDA2.0-mini": (published("llada2"), "tide-a100"),
    "LLaDA2.0-flash": (FLASH, "tide-h100"),
}
"""Shapes, and TIDE's machine for each."""


class Case(NamedTuple):
    """A trace, how it came about, and the machine it is replayed on."""

    model: str
    routing: str  # "synthetic" or "recorded"
    trace: Trace
    known: Trace  # another run, for what presets know beforehand
    machine: str
    costs: Costs
    block_length: int | None
    threshold: float | None


BLOCK_LENGTHS = (32, 64, 128)
THRESHOLDS = (0.7, 0.8, 0.9, 0.95)


def main() -> None:
    options = _options()
    settings = {"num_random": NUM_DRAWS, "similarity": SIMILARITY}
    settings["layers"] = options.layers or "all"
    recorder = Recorder("tau", settings, options.out)
    _anchors(recorder)
    for case in [*_synthetic(options.layers), *_recorded()]:
        _measure(recorder, case)


def _anchors(recorder: Recorder) -> None:
    """Compare each machine with the one number that it was fitted to."""
    for name, published_ratio in TIDE_BASELINES.items():
        here = tide_anchor(tide_case(name), Shipped(name))
        row: Row = {"machine_profile": name, "published": published_ratio, "here": here}
        recorder.write("anchor", row)


def _synthetic(num_layers: int | None) -> list[Case]:
    return [
        _synthetic_case(model, num_layers, block_length)
        for model in MODELS
        for block_length in BLOCK_LENGTHS
    ]


def _synthetic_case(model: str, num_layers: int | None, block_length: int) -> Case:
    shape, machine = MODELS[model]
    shape = shape._replace(num_layers=num_layers or shape.num_layers)
    locality = locality_for(SIMILARITY, trace_shape(shape), block_length, SKEW)
    num_steps = round(block_length / TOKENS_PER_PASS[model])

    def make(seed: int) -> Trace:
        return synth_trace(
            trace_shape(shape),
            num_blocks=max(1, 128 // block_length),
            steps_per_block=num_steps,
            block_length=block_length,
            locality=locality,
            skew=SKEW,
            seed=seed,
        )

    costs = load_profile(machine).costs(shape)
    return Case(model, "synthetic", make(0), make(1), machine, costs, block_length, None)


def _recorded() -> list[Case]:
    runs = [
        Run(model, 1, 2, max(64, block), block, threshold)
        for model in ("demo:diffusion", "synth:llada2")
        for block in BLOCK_LENGTHS
        for threshold in THRESHOLDS
    ]
    traces = record_all([*runs, *(run._replace(for_calibration=True) for run in runs)])
    machine = "tide-a100"
    costs = load_profile(machine).costs(published("llada2"))
    pairs = zip(runs, traces[: len(runs)], traces[len(runs) :], strict=True)
    return [
        Case(run.model, "recorded", trace, known, machine, costs, run.block_length, run.threshold)
        for run, trace, known in pairs
    ]


def _measure(recorder: Recorder, case: Case) -> None:
    blocks, hits = case.trace.blocks(), case.trace.hits()
    facts: Row = {
        "model": case.model,
        "routing": case.routing,
        "machine_profile": case.machine,
        "block_length": case.block_length,
        "threshold": case.threshold,
    }
    say(f"{case.model}, {case.routing}, block {case.block_length}, {case.threshold}")
    recorder.write("ceiling", {**facts, **ceilings(case.costs)})
    similar, distinct = step_similarity(blocks), distinct_experts(blocks)
    recorder.write(
        "routing",
        {
            **facts,
            "num_steps": max(map(len, blocks)),
            "tokens_per_pass": case.trace.num_committed / max(1, sum(map(len, blocks))),
            "similarity": float(similar.mean()),
            "similarity_at_5": float(step_similarity(blocks, 5).mean())
            if len(similar) > 5
            else None,
            "distinct_experts_by_step": [round(float(one), 1) for one in distinct],
        },
    )
    for share in SHARES:
        num_residents = round(share * case.trace.shape.num_experts)
        setting = make_setting(case.trace, case.costs, num_residents, case.known)
        for waits in (True, False):
            values = sweep(case, setting.having(waits=waits), hits)
            recorder.write("tau", {**facts, "residents": num_residents, "waits": waits, **values})
        others = replay(case.trace, hits, setting, ("lru", "fiddler", "dali", "lowtide"))
        speeds = {name: report.tokens_per_s for name, report in others.items()}
        recorder.write("others", {**facts, "residents": num_residents, **speeds})


def sweep(case: Case, setting: PolicyInputs, hits: np.ndarray) -> Row:
    """tokens/s of every tau, and of the ways to choose one."""
    blocks, costs, budget = case.trace.blocks(), case.costs, setting.capacity[0]
    num_steps = max(map(len, blocks))
    taus = range(1, min(num_steps, 32) + 1)  # the last one: once a block
    reports = {
        tau: simulate(case.trace, "tide", setting.having(tau=tau), hits=hits) for tau in taus
    }
    speeds = {tau: report.tokens_per_s for tau, report in reports.items()}
    d, misses = drift(blocks, budget), miss_shares(blocks, budget, max(taus))
    paper = paper_tau(d, misses, num_steps, budget, costs.fetch_s, costs.host_s.at(1))
    auto = min(taus, key=lambda tau: reports[tau].total_s)
    follows = setting.having(tau=FollowDrift(_start(case, setting)))
    online = simulate(case.trace, "tide", follows, hits=hits).tokens_per_s
    fiddler = simulate(case.trace, "fiddler", setting, hits=hits).tokens_per_s
    drawn = np.random.default_rng(0).choice(np.array(taus), NUM_DRAWS)
    return {
        **_ratios(speeds, paper, auto, [speeds[int(tau)] for tau in drawn]),
        "online_tokens_per_s": online,
        "online_over_best": online / max(speeds.values()),
        "auto_over_fiddler": speeds[auto] / fiddler,
        "paper_over_fiddler": speeds[paper] / fiddler,
        "drift": d,
        "taus": list(taus),
        "tokens_per_s_by_tau": _listed(speeds),
        "miss_share_by_tau": [round(float(one), 4) for one in misses],
        "moved_by_tau": [_num_moved(reports[tau]) for tau in taus],
        "expected_moved_by_tau": [
            round(_expected(case, d, budget, num_steps, tau)) for tau in taus
        ],
    }


def _start(case: Case, setting: PolicyInputs) -> int:
    """Return the tau at which `tau=auto` starts: the fastest for the other run's routing."""
    return fastest_tau(case.known, "tide", setting)


def _ratios(speeds: Mapping[int, float], paper: int, auto: int, drawn: list[float]) -> Row:
    mean = float(np.mean(drawn))
    return {
        "paper_tau": paper,
        "auto_tau": auto,
        "tau_1_tokens_per_s": speeds[1],
        "paper_tokens_per_s": speeds[paper],
        "auto_tokens_per_s": speeds[auto],
        "random_tokens_per_s": [round(one, 2) for one in drawn],
        "paper_over_tau_1": speeds[paper] / speeds[1],
        "auto_over_tau_1": speeds[auto] / speeds[1],
        "paper_over_random": speeds[paper] / mean,
        "auto_over_random": speeds[auto] / mean,
    }


def _listed(speeds: Mapping[int, float]) -> list[float]:
    return [round(one, 2) for one in speeds.values()]


def _num_moved(report: Report) -> int:
    return report.num_moved + report.num_fetched


def _expected(case: Case, d: float, budget: int, num_steps: int, tau: int) -> float:
    """TIDE's Eq. 5 over the whole run; the first refresh of all fills empty slots."""
    blocks = case.trace.blocks()
    per_block = expected_migrations(d, num_steps, budget, tau)
    return case.trace.shape.num_layers * len(blocks) * per_block


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--layers", type=int, help="of the synthetic models (all)")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
