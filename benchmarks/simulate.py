"""Is the simulator right? Predicted against measured time of a pass, on the emulated device.

Costs are measured in this process just before: experts on either side, the link, and from one run
with all experts on the host what a layer takes besides its experts and a pass besides its layers.
Then every preset answers from its own first residents, in turn, and the routing of that very
answer is replayed. A prediction holds if it is within 15% of the median or within the repeats.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from common.arguments import run_script
from common.ceilings import memory_ceiling
from common.emulated import (
    Learned,
    Stretch,
    Track,
    device_options,
    find_model,
    learn,
    temporary_folder,
)
from common.record import Recorder, Row, say
from common.simulated import VARIANTS

from lowtide.core import Costs
from lowtide.devices.emulated import HOST, EmulatedDevice
from lowtide.hardware.measure import measure_costs
from lowtide.lab.bench import Spread
from lowtide.memory.arena import Arena
from lowtide.policies.recipe import Setting
from lowtide.replay.calibration import Calibration
from lowtide.replay.foresight import measured_accuracy
from lowtide.replay.simulator import simulate
from lowtide.replay.trace import Trace

NAMES = ("all-host", "layer-split", "static", "fiddler", "lru", "edgemoe", "moe-lightning")
NAMES += ("hybrimoe", "tide", "dali", "lowtide")
LIMIT = 0.15


class MeasuredCosts(NamedTuple):
    """What the replay is made with."""

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
        "device": "emulated",
    }
    recorder = Recorder("simulate", settings, options.out)
    with temporary_folder() as folder:
        learned, path = learn(model, Path(folder), options.new)
        calibration = Calibration.load(path)
        recorder.write("ceiling", memory_ceiling())
        with Track.open(model, options.share, device_options(model), path) as track:
            recorder.write("device", track.describe())
            measured = _measure_costs(track, learned)
            recorder.write("costs", _costs_row(measured))
            taken = _take_turns(track, learned, options.repeats)
            capacity = track.llm.plan.residents_per_layer
    trace = first_answer(learned.trace)
    for name, stretches in taken.items():
        setting = Setting(
            capacity,
            trace.shape.num_experts,
            measured.costs,
            frequency=calibration.frequency,
            following=calibration.following,
            hits=calibration.trace.hits(),
        )
        setting = setting.having(**VARIANTS[name].options)
        report = simulate(
            trace,
            VARIANTS[name].preset,
            setting,
            pass_s=measured.pass_s,
            gate_accuracy=measured_accuracy(calibration),
        )
        predicted_s = report.total_s / report.num_passes
        row = recorder.write("validate", {"policy": name, **compared(predicted_s, stretches)})
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


def first_answer(trace: Trace) -> Trace:
    """The passes of the first of two answers of the same number of tokens."""
    num_committed = np.cumsum([one.num_committed for one in trace.passes])
    num_passes = int(np.searchsorted(num_committed, trace.num_committed // 2)) + 1
    num_rows = sum(one.num_rows for one in trace.passes[:num_passes])
    return replace(trace, passes=trace.passes[:num_passes], ids=trace.ids[:num_rows])


def _take_turns(track: Track, learned: Learned, num_repeats: int) -> dict[str, list[Stretch]]:
    taken: dict[str, list[Stretch]] = {name: [] for name in NAMES}
    for _ in range(num_repeats):
        for name in NAMES:
            taken[name].append(_answer(track, learned, name))
    return taken


def _answer(track: Track, learned: Learned, name: str) -> Stretch:
    """The first prompt's, as the trace has it: nothing has been asked before."""
    track.adopt(*VARIANTS[name])
    return track.answer(learned.prompts[0], learned.params, learned.token_ids[0])


def _measure_costs(track: Track, learned: Learned) -> MeasuredCosts:
    """All but the layers' overhead from its own streams, that from a run without a device."""
    runtime, opened = track.runtime, track.llm._engine.opened
    layout, shape = opened.slot_layout, opened.config.moe_shape
    num_slots = 4 * shape.num_experts_per_token
    arena = Arena(num_slots * layout.num_bytes)
    executor = track.llm._engine.executor
    device = EmulatedDevice(
        arena,
        layout,
        num_slots,
        track.device.speeds,
        opened.kernels,
        cores_per_expert=executor.cores_per_expert,
    )
    with closing(device):
        costs = measure_costs(
            shape,
            layout,
            executor,
            dense_bytes=layout.num_bytes,
            device=device,
            kernels=opened.kernels,
        ).costs
    _answer(track, learned, "all-host")  # warms
    alone = _answer(track, learned, "all-host")
    taken = alone.totals
    num_layers = shape.num_layers * taken["num_passes"]
    return MeasuredCosts(
        replace(
            costs,
            dense_s=runtime.policies.costs.dense_s.scaled(0.0),  # in `pass_s`
            sync_s=max(0.0, taken["experts_s"] - taken[HOST]) / num_layers,
            num_staging=runtime.policies.costs.num_staging,
        ),
        pass_s=(taken["seconds"] - taken["experts_s"]) / taken["num_passes"],
    )


def _costs_row(measured: MeasuredCosts) -> Row:
    costs = measured.costs
    return {
        "link_ms": 1e3 * costs.link_s,
        "device_ms": [round(1e3 * costs.device_s.at(n), 4) for n in (1, 8, 64)],
        "host_ms": [round(1e3 * costs.host_s.at(n), 4) for n in (1, 8, 64)],
        "layer_overhead_ms": 1e3 * costs.sync_s,
        "rest_of_pass_ms": 1e3 * measured.pass_s,
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--validate", action="store_true", required=True, help="predict, measure and compare"
    )
    parser.add_argument("--model", default="synth:llada2", help="model (synth:llada2)")
    parser.add_argument("--layers", type=int, default=4, help="of the synthetic model (4)")
    parser.add_argument("--share", type=float, default=0.5, help="of the experts, resident (0.5)")
    parser.add_argument("--new", type=int, default=32, help="new tokens of an answer (32)")
    parser.add_argument("--repeats", type=int, default=None, help="turns of each preset (7)")
    parser.add_argument("--out", type=Path, help="append the JSON lines to this file too")
    parser.add_argument("--quick", action="store_true", help="few repeats: a look, not a result")
    options = parser.parse_args()
    options.repeats = options.repeats or (2 if options.quick else 7)
    return options


if __name__ == "__main__":
    run_script(main)
