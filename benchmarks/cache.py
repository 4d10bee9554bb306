"""The cache of experts: what each placement keeps, and what that is worth.

All placements share DALI's assignment and no prefetch, so that only the cache differs: hit rate
and tokens per second over cache ratios, over DALI's window and swap sizes, and along the
generated sequence. Then `lowtide` as it is, with its residents divided among layers evenly, by
what it sees and by a calibration; there also synthetic layers of very different skew. Recorded
routing of the demo models and of synthetic checkpoints, experts of the published models' sizes,
in simulated time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from common.arguments import run_script
from common.record import Recorder, Row, say
from common.simulated import ceilings, make_parser, make_setting, published, summary
from common.synth_trace import synth_decode_trace
from common.traces import RECORDED, Recorded, record_with_known

from lowtide.core import IntArray, MoEShape, StepKind
from lowtide.policies.assignment import Greedy
from lowtide.policies.budgets import Budgets
from lowtide.policies.prefetch import NoPrefetch
from lowtide.policies.presets import recipe
from lowtide.policies.recipe import Recipe, Setting
from lowtide.profiles import load_profile
from lowtide.replay.oracle import most_hits
from lowtide.replay.simulator import Report, simulate
from lowtide.replay.trace import Trace, TraceShape

PLACEMENTS: Mapping[str, Recipe] = {
    name: replace(
        recipe(preset), assignment=lambda setting: Greedy(), prefetch=lambda setting: NoPrefetch()
    )
    for name, preset in {
        "lru": "lru",
        "score": "hybrimoe",
        "dali": "dali",
        "static": "fiddler",
        "tide": "tide",
        "lowtide": "lowtide",
    }.items()
}
RATIOS = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75)
WINDOWS = ((1, 8), (2, 8), (4, 1), (4, 4), (4, 8), (4, 16), (8, 8), (16, 8))  # w_size, u_size
MACHINE = "rtx3090"
BUDGET_MACHINES = ("rtx3090", "a100-40gb", "h100")
BUDGET_RATIOS = (0.25, 0.5, 0.75)
SKEWS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)  # of the layers of the uneven trace
NUM_PARTS = 4  # of the generated sequence


def main() -> None:
    options = make_parser(__doc__).parse_args()
    recorder = Recorder("cache", {"assignment": "dali's greedy", "profile": MACHINE}, options.out)
    recorded = RECORDED[:1] if options.quick else RECORDED
    for one, trace, known in record_with_known(recorded):
        _measure(recorder, one, trace, known, options.quick)
        _divide(recorder, one.run.name, published(one.sizes_of), trace, known)
    _divide(recorder, "uneven", published("llada2"), _uneven(text=0), _uneven(text=1))


def _measure(recorder: Recorder, one: Recorded, trace: Trace, known: Trace, is_quick: bool) -> None:
    sizes = published(one.sizes_of)
    shape = sizes._replace(num_layers=trace.shape.num_layers, num_experts=trace.shape.num_experts)
    costs = load_profile(MACHINE).costs(shape)
    facts: Row = {"trace": one.run.name, "experts_of": one.sizes_of}
    say(one.run.name)
    recorder.write("ceiling", {**facts, **ceilings(costs)})
    settings = {
        ratio: make_setting(trace, costs, round(ratio * shape.num_experts), known)
        for ratio in ((0.5,) if is_quick else RATIOS)
    }
    hits = trace.hits()
    for ratio, setting in settings.items():
        for name, made in PLACEMENTS.items():
            report = simulate(trace, made, setting, hits=hits)
            share = report.num_hits / max(1, most_hits(hits, sum(setting.capacity)))
            at: Row = {"ratio": ratio, "placement": name, "share_of_most_hits": share}
            row = {**facts, **at, **summary(report)}
            recorder.write("ratio", row)
    for w_size, u_size in WINDOWS[:2] if is_quick else WINDOWS:
        setting = settings[0.5].having(w_size=w_size, u_size=u_size)
        report = simulate(trace, PLACEMENTS["dali"], setting, hits=hits)
        recorder.write("window", {**facts, "w_size": w_size, "u_size": u_size, **summary(report)})
    for name, made in PLACEMENTS.items():
        parts = _along(trace, made, settings[0.5], hits)
        recorder.write("along the sequence", {**facts, "placement": name, "hit_rates": parts})


def _divide(recorder: Recorder, name: str, sizes: MoEShape, trace: Trace, known: Trace) -> None:
    """How much faster `lowtide` is than with even budgets, without a calibration and with one."""
    shape = sizes._replace(num_layers=trace.shape.num_layers, num_experts=trace.shape.num_experts)
    hits = trace.hits()
    for machine in BUDGET_MACHINES:
        costs = load_profile(machine).costs(shape)
        for ratio in BUDGET_RATIOS:
            calibrated = make_setting(trace, costs, round(ratio * shape.num_experts), known)
            unknown = replace(calibrated, frequency=None, following=None, hits=None)
            learnt, divided = (
                simulate(trace, "lowtide", one, hits=hits).tokens_per_s
                for one in (unknown, calibrated)
            )
            with _even_budgets():
                even, calibrated_even = (
                    simulate(trace, "lowtide", one, hits=hits).tokens_per_s
                    for one in (unknown, replace(calibrated, hits=None))
                )
            row: Row = {"trace": name, "profile": machine, "ratio": ratio, "tokens_per_s": even}
            row |= {
                "learnt_over_even": learnt / even,
                "divided_over_even": divided / calibrated_even,
            }
            recorder.write("budgets", row)


@contextmanager
def _even_budgets() -> Iterator[None]:
    """Inside, no slot moves from layer to layer."""
    begin_step = Budgets.begin_step
    Budgets.begin_step = lambda self, worth_s: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Budgets.begin_step = begin_step  # type: ignore[method-assign]


def _uneven(text: int) -> Trace:
    """Eight sequences whose layers have very different favourites: `SKEWS`."""
    layers = [
        synth_decode_trace(
            TraceShape(1, 128, 8),
            num_sequences=8,
            num_new=48,
            locality=0.3,
            skew=skew,
            taste=skew / 2,
            seed=seed,
            text=text,
        )
        for seed, skew in enumerate(SKEWS)
    ]
    shape = layers[0].shape._replace(num_layers=len(layers))
    return replace(layers[0], shape=shape, ids=np.concatenate([one.ids for one in layers], axis=1))


def _along(trace: Trace, made: Recipe, setting: Setting, hits: IntArray) -> list[float]:
    """Hit rates of the passes after each prefill, part by part of each sequence, means over all.

    Policies know only the past, so what a longer replay adds to a shorter one is its last part.
    """
    found, wanted = [0] * NUM_PARTS, [0] * NUM_PARTS
    start, done = 0, Report("none")
    for end in [*_prefills(trace)[1:], len(trace.passes)]:
        for part in range(NUM_PARTS):
            last = start + (end - start) * (part + 1) // NUM_PARTS
            report = simulate(trace.beginning(last), made, setting, hits=hits[:last])
            found[part] += report.num_hits - done.num_hits
            wanted[part] += report.num_activated - done.num_activated
            done = report
        start = end
    return [round(hit / max(1, all_), 4) for hit, all_ in zip(found, wanted, strict=True)]


def _prefills(trace: Trace) -> list[int]:
    """Passes with which a sequence begins."""
    kinds = [one.step.kind for one in trace.passes]
    return [
        index
        for index, kind in enumerate(kinds)
        if kind is StepKind.PREFILL and (not index or kinds[index - 1] is not StepKind.PREFILL)
    ]


if __name__ == "__main__":
    run_script(main)
