"""Every preset on one machine: on the emulated link, and replayed on the papers' machines.

On the emulated device one engine is handed from preset to preset, round by round: the same slots,
costs, calibration and prompts. Each turn begins with the preset's own first residents and an
answer that is not counted. Every answer is compared with that of all experts resident. The same
run's routing is then replayed in simulated time with experts of the published size.

Time is emulated: ratios mean something, tokens per second do not. `busy` says which part of the
machine worked for what share of the time, so that a lost advantage can be found.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from common.arguments import run_script
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
from common.record import Recorder, Row, say
from common.simulated import VARIANTS, ceilings, make_setting, published, replay, summary

from lowtide.errors import PlanError
from lowtide.profiles import load_profile

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

QUICK_VARIANTS = ("layer-split", "hybrimoe", "tide tau=1 waits", "tide tau=1", "tide", "dali")
QUICK_VARIANTS += ("lowtide",)


def main() -> None:
    options = _options()
    names = QUICK_VARIANTS if options.quick else tuple(VARIANTS)
    shares = (0.5,) if options.quick else SHARES
    for name in options.models:
        model = find_model(name, options.layers)
        settings = {
            "model": name,
            "layers": model.num_layers,
            "new_tokens": options.new,
            "repeats": options.repeats,
            "device": "emulated",
        }
        recorder = Recorder("policies", settings, options.out)
        with temporary_folder() as folder:
            learned, calibration = learn(model, Path(folder), options.new)
            recorder.write("ceiling", memory_ceiling())
            speeds = device_options(model)
            for share in shares:
                with Track(model, share, speeds, calibration) as track:
                    _measure(recorder, track, share, learned, names, options.repeats)
        for machine in MACHINES:
            _simulate(recorder, machine, shares, learned, names)


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
    taken: dict[str, list[Stretch]] = {name: [] for name in names}
    for _ in range(num_repeats):
        for name in names:
            try:
                track.adopt(*VARIANTS[name])
            except PlanError as error:
                recorder.write("refused", {**facts, "policy": name, "reason": str(error)})
                continue
            stretches = [
                track.answer(prompt, learned.params, ids)
                for prompt, ids in zip(learned.prompts, learned.token_ids, strict=True)
            ]
            taken[name].append(stretches[-1])
    taken = {name: stretches for name, stretches in taken.items() if stretches}
    for name, stretches in taken.items():
        recorder.write("emulated", {**facts, "policy": name, **stretches_row(stretches)})
    # Few layers leave the rest of a pass a share that no model has: so also without it.
    for time, seconds in (("emulated", "seconds"), ("emulated, experts alone", "experts_s")):
        speeds = {name: median_speed(stretches, seconds) for name, stretches in taken.items()}
        _record_expectations(recorder, {**facts, "time": time}, speeds)


def _simulate(
    recorder: Recorder,
    machine: str,
    shares: tuple[float, ...],
    learned: Learned,
    names: tuple[str, ...],
) -> None:
    trace, known = learned.trace, learned.known
    num_layers, num_experts = trace.shape[:2]
    shape = published(SIMULATED)._replace(num_layers=num_layers, num_experts=num_experts)
    costs, hits = load_profile(machine).costs(shape), trace.hits()
    facts: Row = {"machine_profile": machine, "experts_of": SIMULATED}
    recorder.write("ceiling", {**facts, **ceilings(costs)})
    for share in shares:
        setting = make_setting(trace, costs, round(share * num_experts), known)
        reports = replay(trace, hits, setting, names)
        at = {**facts, "share": share}
        for name, report in reports.items():
            recorder.write("simulated", {**at, "policy": name, **summary(report)})
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--models", nargs="+", default=MODELS, help="models to measure, in turn")
    parser.add_argument("--layers", type=int, default=4, help="of the synthetic model (4)")
    parser.add_argument("--new", type=int, default=None, help="new tokens of an answer (64)")
    parser.add_argument("--repeats", type=int, default=None, help="turns of each preset (5)")
    parser.add_argument("--out", type=Path, help="append the JSON lines to this file too")
    parser.add_argument("--quick", action="store_true", help="few presets: a look, not a result")
    options = parser.parse_args()
    options.new = options.new or (32 if options.quick else 64)
    options.repeats = options.repeats or (1 if options.quick else 5)
    return options


if __name__ == "__main__":
    run_script(main)
