"""Compare the simulator's time of a pass with the measured one, on the emulated device.

Experts and the link take what is emulated; from one run with all experts on the host it is measured
what a layer takes besides its experts and a pass besides its layers.
Then every preset answers from its own first residents, in turn, and the routing of that very
answer is replayed. A prediction holds if it is within 5% of the median or within the repeats.
Beside each time are the counts that it is made of, measured and predicted; on a machine that others
use, only those and a device that is slowed down (`--slowdown`) mean anything.

`--home disk` has no device: part of the experts is in memory, the host runs all and reads those
that are absent, past the page cache. The replay is what `auto` goes by there: a layer takes its
other work, which is that of a run with all experts in memory, and the longer of reading and
computing its experts, as the engine measured both, less what reads ahead of a layer save.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from common.arguments import make_parser, run_script
from common.ceilings import memory_ceiling
from common.disk_home import DiskTrack, measure_in_memory, replay_costs
from common.emulated import (
    BETWEEN,
    SLOWDOWN,
    Learned,
    Model,
    Stretch,
    Track,
    device_options,
    find_model,
    learn,
    temporary_folder,
)
from common.record import Recorder, Row, say
from common.simulated import VARIANTS

from lowtide.core import Costs, Curve
from lowtide.lab.bench import Spread
from lowtide.lab.emulated.device import HOST
from lowtide.lab.simulation.foresight import measured_accuracy
from lowtide.lab.simulation.host_alone import compare_alone
from lowtide.lab.simulation.simulator import Report, simulate
from lowtide.policies.recipe import PolicyInputs
from lowtide.replay.calibration import Calibration
from lowtide.replay.trace import Trace

NAMES = ("all-host", "layer-split", "static", "fiddler", "lru", "edgemoe", "moe-lightning")
NAMES += ("hybrimoe", "tide", "dali", "lowtide")
PLACED = ("static", "layer-split", "lru", "edgemoe", "hybrimoe", "tide", "dali", "lowtide")
"""Presets whose residents differ: nothing else of them is in use without a device."""
LIMIT = 0.05
COUNTED = {
    "hits": "num_hits",
    "fetched": "num_fetched",
    "moved": "num_moved",
    "prefetched": "num_prefetched",
    "moves_asked": "num_moves_asked",
    "moves_done": "num_moves_done",
}
"""Counts of a run: name in a report, and name in the runtime's counts."""
COUNTED_ON_DISK = {"hits": "num_hits", "reads": "num_fetched"}


class MeasuredCosts(NamedTuple):
    """Costs of the replay, measured on this machine."""

    costs: Costs
    pass_s: float  # of each pass, besides its MoE layers


def main() -> None:
    options = _options()
    model = find_model(options.model, options.layers)
    settings = {
        "model": options.model,
        "layers": model.num_layers,
        "new_tokens": options.new,
        "share": options.share,
        "repeats": options.repeats,
        "home": options.home,
    }
    if options.home == "host":
        settings |= {"slowdown": options.slowdown, "device": "emulated"}
    recorder = Recorder("simulate", settings, options.out)
    with temporary_folder() as folder:
        learned, path = learn(model, Path(folder), options.new)
        recorder.write("ceiling", memory_ceiling())
        if options.home == "disk":
            _validate_disk(recorder, model, learned, path, options)
        else:
            _validate_device(recorder, model, learned, path, options)


def _validate_device(
    recorder: Recorder, model: Model, learned: Learned, path: Path, options: argparse.Namespace
) -> None:
    """Beside an emulated device, with all experts in host memory."""
    calibration, names = Calibration.load(path), options.presets or NAMES
    speeds = device_options(model, options.slowdown)
    with Track.open(model, options.share, speeds, path) as track:
        recorder.write("device", track.describe())
        found: list[MeasuredCosts] = []
        taken = _take_turns(
            partial(_answer, track, learned),
            names,
            options.repeats,
            before=lambda: found.append(_measure_costs(track, learned)),
        )
        measured = sorted(found, key=lambda each: each.pass_s)[len(found) // 2]
        recorder.write("costs", _costs_row(measured))
        capacity = track.llm.plan.residents_per_layer
    trace = first_answer(learned.trace)
    for name, stretches in taken.items():
        report = simulate(
            trace,
            VARIANTS[name].preset,
            _policy_inputs(calibration, capacity, measured.costs, name),
            pass_s=measured.pass_s,
            gate_accuracy=measured_accuracy(calibration),
        )
        _write(recorder, name, report, stretches, COUNTED)


def _validate_disk(
    recorder: Recorder, model: Model, learned: Learned, path: Path, options: argparse.Namespace
) -> None:
    """Without a device, with the experts on disk that are not in memory."""
    calibration, names = Calibration.load(path), options.presets or PLACED
    memory, trace = measure_in_memory(model, learned), first_answer(learned.trace)
    with DiskTrack.open(model, options.share, path) as track:
        costs, capacity = track.measure(), track.llm.plan.residents_per_layer
        around_s, ahead = track.around_reads_s(learned), track.ahead_slots(calibration)
        taken = _take_turns(partial(_answer_from_disk, track, learned), names, options.repeats)
    hits = trace.hits()
    one_by_one_s = float(np.where(hits > 0, costs.device_s(hits), 0.0).sum()) / len(trace.passes)
    costs = replay_costs(costs, memory, one_by_one_s, around_s, trace.shape.num_layers)
    row: Row = {"read_ms": 1e3 * costs.link_s, "pass_in_memory_ms": 1e3 * memory.pass_s}
    row["experts_of_a_pass_ms"] = 1e3 * memory.experts_s
    row |= {"one_by_one_ms": 1e3 * one_by_one_s, "around_reads_ms": 1e3 * around_s}
    recorder.write("costs", {**row, "layer_besides_ms": 1e3 * costs.dense_s.at(1)})
    for name, stretches in taken.items():
        setting = _policy_inputs(calibration, capacity, costs, name)
        [report] = compare_alone(trace, [VARIANTS[name].preset], setting, ahead)
        _write(recorder, name, report, stretches, COUNTED_ON_DISK)


def _policy_inputs(
    calibration: Calibration, capacity: Sequence[int], costs: Costs, name: str
) -> PolicyInputs:
    setting = PolicyInputs(
        capacity,
        calibration.shape.num_experts,
        costs,
        frequency=calibration.frequency,
        following=calibration.following,
        hits=calibration.trace.hits(),
    )
    return setting.having(**VARIANTS[name].options)


def _write(
    recorder: Recorder,
    name: str,
    report: Report,
    stretches: Sequence[Stretch],
    counts: Mapping[str, str],
) -> None:
    predicted_s = report.total_s / report.num_passes
    row = {**compared(predicted_s, stretches), **counted(report, stretches, counts)}
    recorder.write("validate", {"policy": name, **row})
    say(
        f"{name}: predicted {row['predicted_ms']} ms, measured {row['measured_ms']} "
        f"({row['least_ms']} to {row['most_ms']}): {'holds' if row['holds'] else 'is off'}"
    )


def compared(predicted_s: float, stretches: Sequence[Stretch]) -> Row:
    """A prediction beside what was measured, per pass."""
    spread = Spread.of([stretch.s_per_pass for stretch in stretches])
    error = predicted_s / spread.median - 1
    return {
        "predicted_ms": round(1e3 * predicted_s, 2),
        "measured_ms": round(1e3 * spread.median, 2),
        "least_ms": round(1e3 * spread.least, 2),
        "most_ms": round(1e3 * spread.most, 2),
        "error": error,
        "spread": (spread.most - spread.least) / spread.median,
        "holds": abs(error) <= LIMIT or spread.least <= predicted_s <= spread.most,
    }


def counted(
    report: Report, stretches: Sequence[Stretch], counts: Mapping[str, str] = COUNTED
) -> Row:
    """Counts of an answer: each turn's, and those that were predicted."""
    return {
        name: {
            "predicted": getattr(report, count),
            "measured": [round(one.totals[count]) for one in stretches],
        }
        for name, count in counts.items()
    }


def first_answer(trace: Trace) -> Trace:
    """The passes of the first of two answers of the same number of tokens."""
    num_committed = np.cumsum([one.num_committed for one in trace.passes])
    num_passes = int(np.searchsorted(num_committed, trace.num_committed // 2)) + 1
    num_rows = sum(one.num_rows for one in trace.passes[:num_passes])
    return replace(trace, passes=trace.passes[:num_passes], ids=trace.ids[:num_rows])


def _take_turns(
    answer: Callable[[str], Stretch],
    names: Sequence[str],
    num_repeats: int,
    before: Callable[[], None] = lambda: None,
) -> dict[str, list[Stretch]]:
    """before: called before every turn of all."""
    taken: dict[str, list[Stretch]] = {name: [] for name in names}
    for _ in range(num_repeats):
        before()
        for name in names:
            taken[name].append(answer(name))
    return taken


def _answer_from_disk(track: DiskTrack, learned: Learned, name: str) -> Stretch:
    track.adopt(*VARIANTS[name])
    return track.answer(learned)


def _answer(track: Track, learned: Learned, name: str) -> Stretch:
    """The first prompt's, as the trace has it: nothing has been asked before."""
    track.adopt(*VARIANTS[name])
    return track.answer(learned.prompts[0], learned.params, learned.token_ids[0])


def _measure_costs(track: Track, learned: Learned) -> MeasuredCosts:
    """Return the costs of experts and the link as they are emulated, to the tick.

    A sample of one expert would add a thread's wake-up to each. The costs of this machine's own
    computing come from a run without a device.
    """
    runtime, speeds = track.runtime, track.device.speeds
    _answer(track, learned, "all-host")  # warms
    alone = _answer(track, learned, "all-host").totals
    num_passes, num_layers = alone["num_passes"], track.llm.config.num_moe_layers
    dense_s = alone[BETWEEN] / (num_passes * max(1, num_layers - 1))
    layers_s = alone["experts_s"] / num_passes + num_layers * dense_s
    costs = runtime.policies.costs
    return MeasuredCosts(
        replace(
            costs,
            link_s=speeds.link_s(costs.expert_bytes),
            device_s=speeds.device_s,
            host_s=speeds.host_s,
            dense_s=Curve([(1, dense_s)]),
            sync_s=max(0.0, alone["experts_s"] - alone[HOST]) / (num_passes * num_layers),
        ),
        pass_s=alone["seconds"] / num_passes - layers_s,
    )


def _costs_row(measured: MeasuredCosts) -> Row:
    costs = measured.costs
    return {
        "link_ms": 1e3 * costs.link_s,
        "device_ms": [round(1e3 * costs.device_s.at(n), 4) for n in (1, 8, 64)],
        "host_ms": [round(1e3 * costs.host_s.at(n), 4) for n in (1, 8, 64)],
        "layer_overhead_ms": 1e3 * costs.sync_s,
        "between_layers_ms": 1e3 * costs.dense_s.at(1),
        "rest_of_pass_ms": 1e3 * measured.pass_s,
    }


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--validate", action="store_true", required=True, help="predict, measure and compare"
    )
    parser.add_argument(
        "--home",
        choices=("host", "disk"),
        default="host",
        help="of absent experts: host memory beside an emulated device, or disk without one",
    )
    parser.add_argument(
        "--presets", nargs="+", choices=NAMES, help="(all that mean anything there)"
    )
    parser.add_argument("--model", default="synth:llada2", help="model")
    parser.add_argument("--layers", type=int, default=4, help="of the synthetic model")
    parser.add_argument("--share", type=float, default=0.5, help="of the experts, resident")
    parser.add_argument("--new", type=int, default=32, help="new tokens of an answer")
    parser.add_argument("--slowdown", type=float, help=f"of the device ({SLOWDOWN:g})")
    parser.add_argument("--repeats", type=int, default=7, help="turns of each preset")
    options = parser.parse_args()
    if options.home == "disk":
        if options.slowdown is not None:
            parser.error("--slowdown is a device's, and --home disk has none.")
        if others := set(options.presets or PLACED) - set(PLACED):
            parser.error(f"--home disk tells {', '.join(PLACED)} apart, not {', '.join(others)}.")
    options.slowdown = SLOWDOWN if options.slowdown is None else options.slowdown
    return options


if __name__ == "__main__":
    run_script(main)
