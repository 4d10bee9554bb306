"""Compare presets with hindsight: their share of the oracle's speed and hits.

The oracle keeps, of each layer's own slots, those wanted soonest (Belady's replacement, its first
residents chosen, experts admitted only when they are demanded) and divides the absent as `lowtide`
does; it does not prefetch, so that a preset that does may pass it. The most hits are those of the
same replacement with all layers' slots shared. Six recorded runs, each with presets calibrated on
other prompts, and synthetic decoding of DALI's three models.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import NamedTuple

from common.arguments import make_parser, run_script
from common.dali_models import MODELS, Load, make_case
from common.most_hits import most_hits
from common.record import Recorder, Row, say
from common.simulated import VARIANTS, generating_passes, make_setting, published
from common.simulated import replay as replay_variants
from common.traces import RECORDED, record_with_known

from lowtide.core import IntArray
from lowtide.lab.profiles import load_profile
from lowtide.lab.simulation.simulator import simulate
from lowtide.policies.presets import ORACLE
from lowtide.policies.recipe import PolicyInputs
from lowtide.replay.trace import Trace

SHARES = (0.25, 0.5, 0.75)
MACHINES = ("dali-3090", "rtx3090", "a100-40gb", "h100")
SYNTHETIC_BATCHES = (4, 32)
NUM_LAYERS = 4  # of the synthetic models
PREFERENCE = 0.5  # of the model and of each sequence


class Run(NamedTuple):
    """A trace and, machine by machine, what it is replayed with."""

    name: str
    routing: str  # "recorded" or "synthetic"
    trace: Trace
    settings: dict[tuple[str, float], PolicyInputs]


def main() -> None:
    options = _options()
    recorder = Recorder("hindsight", {"synthetic_layers": NUM_LAYERS}, options.out)
    for run in _runs():
        hits = run.trace.hits()
        for machine in MACHINES:
            shares = [share for name, share in run.settings if name == machine]
            cells = {
                str(share): measure_cell(run.trace, hits, run.settings[machine, share])
                for share in shares
            }
            facts: Row = {"trace": run.name, "routing": run.routing, "machine_profile": machine}
            recorder.write("shares", {**facts, "by_share": cells})
            least = min(cell["of_oracle"]["lowtide"] for cell in cells.values())
            say(f"{run.name}, {machine}: lowtide at least {least:.2f} of the oracle")


def _runs() -> Iterator[Run]:
    for one, trace, known in record_with_known(RECORDED):
        shape = published(one.sizes_of)._replace(
            num_layers=trace.shape.num_layers, num_experts=trace.shape.num_experts
        )
        settings = {
            (machine, share): make_setting(
                trace, load_profile(machine).costs(shape), round(share * shape.num_experts), known
            )
            for machine in MACHINES
            for share in SHARES
        }
        yield Run(one.run.name, "recorded", trace, settings)
    for name, model in MODELS.items():
        for batch in SYNTHETIC_BATCHES:
            load, settings = Load(batch, 64, 64), {}
            for machine in MACHINES:
                costs = load_profile(machine).costs(model.shape)
                trace, settings[machine, 0.5] = make_case(
                    model, costs, load, PREFERENCE, NUM_LAYERS
                )
            yield Run(f"{name}, batch {batch}", "synthetic", generating_passes(trace), settings)


def measure_cell(
    trace: Trace, hits: IntArray, setting: PolicyInputs
) -> dict[str, dict[str, float]]:
    """Each preset's shares, and its speed over the best other preset's."""
    reports = replay_variants(trace, hits, setting, VARIANTS)
    oracle = simulate(trace, ORACLE, setting, hits=hits)
    most = max(1, most_hits(hits, sum(setting.capacity)))
    speeds = {name: report.tokens_per_s for name, report in reports.items()}

    def best_other(name: str) -> float:
        return max(speed for other, speed in speeds.items() if other != name)

    return {
        "of_oracle": {n: round(speed / oracle.tokens_per_s, 4) for n, speed in speeds.items()},
        "of_most_hits": {n: round(one.num_hits / most, 4) for n, one in reports.items()},
        "over_best_other": {"lowtide": round(speeds["lowtide"] / best_other("lowtide"), 4)},
    }


def _options() -> argparse.Namespace:
    return make_parser(__doc__).parse_args()


if __name__ == "__main__":
    run_script(main)
