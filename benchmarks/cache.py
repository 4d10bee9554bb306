"""The cache of experts: what each placement keeps, and what that is worth.

All placements share DALI's assignment and no prefetch, so that only the cache differs: hit rate
and tokens per second over cache ratios, over DALI's window and swap sizes, and along the
generated sequence. Recorded routing of the demo models and of synthetic checkpoints, experts of
the published models' sizes, in simulated time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from common.arguments import run_script
from common.record import Recorder, Row, say
from common.simulated import ceilings, first_passes, make_parser, make_setting, published, summary
from common.traces import Run, record_all

from lowtide.core import IntArray, StepKind
from lowtide.policies.assignment import Greedy
from lowtide.policies.catalogue import Recipe, Setting, recipe
from lowtide.profiles import load_profile
from lowtide.simulate import Report, simulate
from lowtide.trace import Trace

PLACEMENTS: Mapping[str, Recipe] = {
    name: Recipe(recipe(preset).placement, lambda setting: Greedy(setting.costs))
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
NUM_PARTS = 4  # of the generated sequence


class Recorded(NamedTuple):
    """A recorded run, replayed with experts of `sizes_of`."""

    run: Run
    sizes_of: str


RECORDED = (
    Recorded(Run("demo:diffusion", 1, 6, 64), "llada2"),
    Recorded(Run("synth:llada2", 1, 3, 96), "llada2"),
    Recorded(Run("demo:chat", 1, 4, 64), "qwen3_moe"),
    Recorded(Run("demo:chat", 8, 2, 48), "qwen3_moe"),
    Recorded(Run("synth:qwen3_moe", 8, 2, 32), "qwen3_moe"),
)


def main() -> None:
    options = make_parser(__doc__).parse_args()
    recorder = Recorder("cache", {"assignment": "dali's greedy", "profile": MACHINE}, options.out)
    recorded = RECORDED[:1] if options.quick else RECORDED
    runs = [one.run for one in recorded]
    traces = record_all([*runs, *(run._replace(for_calibration=True) for run in runs)])
    for place, one in enumerate(recorded):
        _measure(recorder, one, traces[place], traces[place + len(runs)], options.quick)


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
            row = {**facts, "ratio": ratio, "placement": name, **summary(report)}
            recorder.write("ratio", row)
    for w_size, u_size in WINDOWS[:2] if is_quick else WINDOWS:
        setting = replace(settings[0.5], w_size=w_size, u_size=u_size)
        report = simulate(trace, PLACEMENTS["dali"], setting, hits=hits)
        recorder.write("window", {**facts, "w_size": w_size, "u_size": u_size, **summary(report)})
    for name, made in PLACEMENTS.items():
        parts = _along(trace, made, settings[0.5], hits)
        recorder.write("along the sequence", {**facts, "placement": name, "hit_rates": parts})


def _along(trace: Trace, made: Recipe, setting: Setting, hits: IntArray) -> list[float]:
    """Hit rates of the passes after each prefill, part by part of each sequence, means over all.

    Policies know only the past, so what a longer replay adds to a shorter one is its last part.
    """
    found, wanted = [0] * NUM_PARTS, [0] * NUM_PARTS
    start, done = 0, Report("none")
    for end in [*_prefills(trace)[1:], len(trace.passes)]:
        for part in range(NUM_PARTS):
            last = start + (end - start) * (part + 1) // NUM_PARTS
            report = simulate(first_passes(trace, last), made, setting, hits=hits[:last])
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
