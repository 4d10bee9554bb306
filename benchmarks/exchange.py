"""`dali` and `hybrimoe` taken apart: placement, assignment and prefetch exchanged one by one.

All 2 x 2 x 2 combinations of their parts, and HybriMoE's greedy as a third assignment, from the
same first residents, on DALI's machine as its figures show it: decode at several batches and
prompts, for the published shapes of its three models. A part's merit is how much faster its runs
are than those with the other preset's part in its place, over all combinations of the others
(geometric mean). Routing is synthetic, early gates err at the published rates.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
from common.arguments import make_parser, run_script
from common.dali_models import MODELS, PUBLISHED, Load, Model, make_case
from common.record import Recorder, Row, say
from common.simulated import generating_passes, summary

from lowtide.core import Facts, IntArray, Moves, Step, StepKind
from lowtide.lab.baselines import HybriMoEGreedy, HybriMoEThreshold
from lowtide.lab.profiles import load_profile
from lowtide.lab.simulation.simulator import Report, simulate
from lowtide.policies.assignment import Assign, Greedy
from lowtide.policies.catalogue import NUM_PREFETCH
from lowtide.policies.placement import Placement
from lowtide.policies.prefetch import NextGate, Residual
from lowtide.policies.presets import recipe
from lowtide.policies.ranks import Ranks
from lowtide.policies.recipe import PolicyInputs, Recipe
from lowtide.replay.trace import Trace

MACHINE = "dali-3090"
PLACEMENTS = ("dali", "hybrimoe")
ASSIGNMENTS = {
    "dali": lambda s: Greedy(),
    "hybrimoe": lambda s: HybriMoEThreshold(s.costs),
    "hybrimoe greedy": lambda s: HybriMoEGreedy(),
}
PREFETCHES = {
    "dali": lambda s: Residual(NUM_PREFETCH.of(s)),
    "hybrimoe": lambda s: NextGate(NUM_PREFETCH.of(s)),
}
BATCHES = (4, 8, 16, 32, 64, 128)
PARTS = ("placement", "assignment", "prefetch")
THRESHOLDS = (4, 8, 16, 32, 64)
"""Tokens from which HybriMoE fetches, if not from where a fetch is no slower than the host."""

Combination = tuple[str, str, str]


class Wrapped:
    """A placement that is asked in place of another."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def initial(self, layer: int) -> IntArray:
        return self._placement.initial(layer)

    def begin_pass(self, step: Step, num_residents: IntArray, capacity: IntArray) -> Ranks:
        return self._placement.begin_pass(step, num_residents, capacity)

    def end_pass(self, step: Step, hits: IntArray) -> None:
        self._placement.end_pass(step, hits)

    def update(self, facts: Facts) -> Moves:
        return self._placement.update(facts)


class Started(Wrapped):
    """Starts from the first residents of another preset."""

    def __init__(self, placement: Placement, first: Sequence[IntArray]) -> None:
        super().__init__(placement)
        self._first = first

    def initial(self, layer: int) -> IntArray:
        return self._first[layer]


def combined(names: Combination) -> Recipe:
    """The preset of these parts, with DALI's first residents."""
    placement, assignment, prefetch = names

    def place(setting: PolicyInputs) -> Placement:
        dali = recipe("dali").placement(setting)
        first = [dali.initial(layer) for layer in range(setting.num_layers)]
        return Started(recipe(placement).placement(setting), first)

    return Recipe(place, ASSIGNMENTS[assignment], PREFETCHES[prefetch])


def combinations() -> list[Combination]:
    return list(product(PLACEMENTS, ASSIGNMENTS, PREFETCHES))


def merits(seconds: Mapping[Combination, float]) -> dict[str, float]:
    """Return the speed of each of DALI's parts over HybriMoE's, the other parts being equal."""
    found = {}
    for place, part in enumerate(PARTS):
        logs = []
        for names, dali_s in seconds.items():
            if names[place] == "dali" and "hybrimoe greedy" not in names:
                other = tuple("hybrimoe" if i == place else n for i, n in enumerate(names))
                logs.append(np.log(seconds[other] / dali_s))
        found[part] = float(np.exp(np.mean(logs)))
    return found


def main() -> None:
    options = _options()
    settings = {"profile": MACHINE, "layers": options.layers or "all", "resident_share": 0.5}
    recorder = Recorder("exchange", settings, options.out)
    for name in options.models:
        for batch in BATCHES:
            _measure(recorder, name, MODELS[name], batch, options)


def _measure(
    recorder: Recorder, name: str, model: Model, batch: int, options: argparse.Namespace
) -> None:
    costs = load_profile(MACHINE).costs(model.shape)
    load = Load(batch, 64, 64)
    trace, setting = make_case(model, costs, load, options.preference, options.layers)
    num_prompts = sum(one.step.kind is StepKind.PREFILL for one in trace.passes)
    phases = {"decode": generating_passes(trace), "prefill": trace.beginning(num_prompts)}
    for phase, part in phases.items():
        hits = part.hits()
        reports = {
            names: simulate(part, combined(names), setting, hits=hits) for names in combinations()
        }
        facts: Row = {"model": name, "batch": batch, "phase": phase}
        for names, report in reports.items():
            row = {**facts, **dict(zip(PARTS, names, strict=True)), "seconds": report.total_s}
            recorder.write("combination", {**row, **summary(report)})
        _summarise(recorder, facts, reports, simulate_without(part, setting, hits))
        row = {**facts, **other_hybrimoes(part, setting, hits)}
        say(", ".join(f"{name} {value}" for name, value in row.items()))
        recorder.write("other hybrimoes", row)


def other_hybrimoes(part: Trace, setting: PolicyInputs, hits: IntArray) -> dict[str, float]:
    """Return DALI's time over HybriMoE's, for HybriMoE as DALI's authors may have run it.

    It runs with other thresholds, or with none of its cache in use.
    """
    dali_s = simulate(part, "dali", setting, hits=hits).total_s
    found = {}
    for tokens in THRESHOLDS:
        made = replace(recipe("hybrimoe"), assignment=_from_tokens(tokens))
        found[f"from {tokens} tokens"] = simulate(part, made, setting, hits=hits).total_s / dali_s
    empty = replace(setting, capacity=[0] * setting.num_layers)
    found["without residents"] = simulate(part, "hybrimoe", empty, hits=hits).total_s / dali_s
    return {name: round(value, 3) for name, value in found.items()}


def simulate_without(part: Trace, setting: PolicyInputs, hits: IntArray) -> float:
    """Seconds of `dali` where its swaps cost nothing to wait for: moves in idle link time."""
    made = recipe("dali")

    def place(setting: PolicyInputs) -> Placement:
        return _Unowed(made.placement(setting))

    return simulate(part, replace(made, placement=place), setting, hits=hits).total_s


class _Unowed(Wrapped):
    """Its moves wait for an idle link instead of being owed."""

    def update(self, facts: Facts) -> Moves:
        return super().update(facts)._replace(is_owed=False)


def _summarise(
    recorder: Recorder, facts: Row, reports: Mapping[Combination, Report], unowed_s: float
) -> None:
    seconds = {names: report.total_s for names, report in reports.items()}
    dali, hybrimoe = ("dali",) * 3, ("hybrimoe",) * 3
    values = {
        **merits(seconds),
        "dali_over_hybrimoe": seconds[hybrimoe] / seconds[dali],
        "dali_over_hybrimoe_greedy": seconds["hybrimoe", "hybrimoe greedy", "hybrimoe"]
        / seconds[dali],
        "swaps_in_idle_time_over_dali": seconds[dali] / unowed_s,
        "published": PUBLISHED[str(facts["phase"])]["hybrimoe"],
        "dali_hits": reports[dali].hit_rate,
        "hybrimoe_hits": reports[hybrimoe].hit_rate,
    }
    recorder.write("merit", {**facts, **values})
    shown = ", ".join(f"{name} {value:.2f}" for name, value in values.items())
    say(f"{facts['model']}, batch {facts['batch']}, {facts['phase']}: {shown}")


def _from_tokens(tokens: int) -> Callable[[PolicyInputs], Assign]:
    """HybriMoE's assignment with another threshold."""
    return lambda setting: HybriMoEThreshold(setting.costs, tokens)


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--layers", type=int, help="of each model (all)")
    parser.add_argument(
        "--preference", type=float, default=0.5, help="of the model and of each sequence"
    )
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
