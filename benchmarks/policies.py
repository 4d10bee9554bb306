"""Every preset on one machine: on the emulated link, and replayed on the papers' machines.

On the emulated device one engine is handed from preset to preset, round by round: the same slots,
costs, calibration and prompts. Each turn begins with the preset's own first residents; those that
move theirs write answers first that are not counted. Every answer is compared with that of all
experts resident. After the first round only presets go on whose expectation is not yet decided, and
those that may be the fastest. The same run's routing is then replayed in simulated time
with experts of the published size.

A block takes 16 passes, two tokens each, as published models write several at once; one token at
a time, which random weights would do, is twice the passes and routes more alike.

Time is emulated: ratios mean something, tokens per second do not. `busy` says which part of the
machine worked for what share of the time, so that a lost advantage can be found.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.arguments import make_parser, run_script
from common.ceilings import memory_ceiling
from common.emulated import (
    Learned,
    Stretch,
    Track,
    device_options,
    find_model,
    learn,
    median_speed,
    stretches_row,
    temporary_folder,
)
from common.most_hits import most_hits
from common.record import Recorder, Row, say
from common.simulated import VARIANTS, ceilings, make_setting, published, replay, summary

from lowtide.errors import PlanError
from lowtide.lab.profiles import load_profile
from lowtide.lab.simulation.simulator import simulate
from lowtide.policies.presets import ORACLE
from lowtide.replay.trace import Trace

MODELS = ("demo:diffusion", "synth:llada2")
SHARES = (0.25, 0.5, 0.75)
MACHINES = ("rtx3090", "a100-40gb")
SIMULATED = "llada2"  # whose experts' size the replay takes

EXPECTED: Mapping[tuple[str, str], float] = {
    ("tide", "tide tau=1"): 1.2,
    ("tide", "tide tau=1 waits"): 1.2,
    ("dali", "hybrimoe"): 1.3,
    ("dali", "layer-split"): 1.3,
}
"""Speed of the first over that of the second, at least."""

UNMOVED = ("all-host", "on-demand", "static", "fiddler", "fiddler threshold", "layer-split")
UNMOVED += ("moe-lightning",)
"""Presets whose residents never change: nothing has to settle before they are measured."""

CLOSE = 0.25
"""Further turns are for presets whose speed, or ratio, is within this share of what decides."""

NUM_WARM = 2  # answers before the one that counts
STEPS = 16  # of a block


def main() -> None:
    options = _options()
    names = tuple(VARIANTS)
    for name in options.models:
        model = find_model(name, options.layers)
        settings = {
            "model": name,
            "layers": model.num_layers,
            "new_tokens": options.new,
            "repeats": options.repeats,
            "steps": STEPS,
            "num_warm": NUM_WARM,
            "device": "emulated",
        }
        recorder = Recorder("policies", settings, options.out)
        with temporary_folder() as folder:
            learned, calibration = learn(model, Path(folder), options.new, 1 + NUM_WARM, STEPS)
            recorder.write("ceiling", memory_ceiling())
            speeds = device_options(model)
            for share in SHARES:
                with Track.open(model, share, speeds, calibration) as track:
                    _measure(recorder, track, share, learned, names, options.repeats)
        for machine in MACHINES:
            _simulate(recorder, machine, SIMULATED, SHARES, learned.trace, learned.known, names)


def _measure(
    recorder: Recorder,
    track: Track,
    share: float,
    learned: Learned,
    names: tuple[str, ...],
    num_repeats: int,
) -> None:
    facts: Row = {"share": share}
    recorder.write("device", {**facts, **track.describe()})
    taken: dict[str, list[Stretch]] = {}
    for _ in range(num_repeats):
        for name in contenders(names, taken):
            try:
                track.adopt(*VARIANTS[name])
            except PlanError as error:
                recorder.write("refused", {**facts, "policy": name, "reason": str(error)})
                continue
            taken.setdefault(name, []).append(_take_turn(track, name, learned))
    for name, stretches in taken.items():
        recorder.write("emulated", {**facts, "policy": name, **stretches_row(stretches)})
    # Few layers leave the rest of a pass a share that no model has: so also without it.
    for time, seconds in (("emulated", "seconds"), ("emulated, experts alone", "experts_s")):
        speeds = {name: median_speed(stretches, seconds) for name, stretches in taken.items()}
        _record_expectations(recorder, {**facts, "time": time}, speeds)


def contenders(names: Sequence[str], taken: Mapping[str, Sequence[Stretch]]) -> list[str]:
    """Return the presets of the next turn: all at first, then those with an open expectation."""
    if not taken:
        return list(names)
    speeds = {name: median_speed(stretches, "seconds") for name, stretches in taken.items()}
    least = (1 - CLOSE) * max(speeds.values())
    close = {"lowtide", *(name for name, speed in speeds.items() if speed >= least)}
    best = max(("tide", "dali"), key=lambda name: speeds.get(name, 0.0))
    for (one, other), expected in {**EXPECTED, ("lowtide", best): 1.15}.items():
        if one in speeds and other in speeds:
            if abs(speeds[one] / speeds[other] / expected - 1) <= CLOSE:
                close |= {one, other}
    return [name for name in speeds if name in close]


def _take_turn(track: Track, name: str, learned: Learned) -> Stretch:
    """Answer prompts, beginning with the preset's first residents, which have been adopted."""
    prompts = list(zip(learned.prompts, learned.token_ids, strict=True))
    for prompt, ids in prompts[-1:] if name in UNMOVED else prompts:
        stretch = track.answer(prompt, learned.params, ids)
    return stretch


def _simulate(
    recorder: Recorder,
    machine: str,
    sizes_of: str,
    shares: tuple[float, ...],
    trace: Trace,
    known: Trace,
    names: tuple[str, ...],
) -> None:
    """sizes_of: the published model whose experts' size the replay takes."""
    num_layers, num_experts = trace.shape[:2]
    shape = published(sizes_of)._replace(num_layers=num_layers, num_experts=num_experts)
    costs, hits = load_profile(machine).costs(shape), trace.hits()
    facts: Row = {"machine_profile": machine, "experts_of": sizes_of}
    recorder.write("ceiling", {**facts, **ceilings(costs)})
    for share in shares:
        setting = make_setting(trace, costs, round(share * num_experts), known)
        reports = replay(trace, hits, setting, names)
        at = {**facts, "share": share}
        oracle_s = simulate(trace, ORACLE, setting, hits=hits).total_s
        most = max(1, most_hits(hits, sum(setting.capacity)))
        for name, report in reports.items():
            row = {**at, "policy": name, **summary(report)}
            row["share_of_oracle"] = oracle_s / report.total_s
            row["share_of_most_hits"] = report.num_hits / most
            recorder.write("simulated", row)
        speeds = {name: report.tokens_per_s for name, report in reports.items()}
        _record_expectations(recorder, {**at, "time": machine}, speeds)


def _record_expectations(recorder: Recorder, facts: Row, speeds: Mapping[str, float]) -> None:
    values = expectations(speeds)
    recorder.write("ratios", {**facts, **values})
    shown = ", ".join(f"{name} {value:.2f}" for name, value in values.items())
    say(f"{facts['time']} {float(str(facts['share'])):.0%}: {shown}")


def expectations(speeds: Mapping[str, float]) -> dict[str, float]:
    """The ratios that are expected, by name; `EXPECTED` has the least of the first ones.

    `lowtide / best other` shall be at least 1 everywhere, `lowtide / tide or dali` 1.15 somewhere.
    """
    ratios = {
        f"{one} / {other}": speeds[one] / speeds[other]
        for one, other in EXPECTED
        if one in speeds and other in speeds
    }
    others = {name: speed for name, speed in speeds.items() if name != "lowtide"}
    ratios["lowtide / best other"] = speeds["lowtide"] / max(others.values())
    ratios["lowtide / tide or dali"] = speeds["lowtide"] / max(speeds["tide"], speeds["dali"])
    return ratios


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS, help="models to measure, in turn")
    parser.add_argument("--layers", type=int, default=4, help="of the synthetic model")
    parser.add_argument("--new", type=int, default=32, help="new tokens of an answer")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each preset")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
