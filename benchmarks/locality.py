"""Routing as real models have it, and which preset is fastest under it.

Published models were measured to ask for much the same experts from one token to the next, each
text for experts of its own, and for few that all texts have in common. A synthetic routing has
these three as numbers (`Preference`), which are fitted here to what others measured on one model
and held against two more. Beside it stands a static routing: favourites that never change, and
nothing else, fitted to the same model's LRU cache.

Then every preset that `auto` chooses from is replayed under both, experts on disk without a device
and experts in host memory beside one, answer after answer, the calibration from other answers.
`auto` takes what was fastest on the calibration's routing. A preset is as good as in the worse of
the two routings.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from itertools import product

from common.arguments import make_parser, run_script
from common.published_routing import (
    FITTED,
    HELD_OUT,
    NUM_LAYERS,
    Preference,
    PublishedModel,
)
from common.record import Recorder, Row, say
from common.simulated import make_setting, published, trace_shape
from common.synth_trace import synth_decode_trace

from lowtide.core import Costs, Curve
from lowtide.lab.baselines import COMPARED
from lowtide.lab.profiles import load_profile
from lowtide.lab.simulation.host_alone import compare_alone
from lowtide.lab.simulation.simulator import Report, compare
from lowtide.replay.trace import Trace

SHARES = (0.125, 0.25, 0.5)
HOMES = {"disk": "laptop-8gb", "host": "rtx3090"}
"""Of absent experts, and the machine: on disk it has no device."""
DISK_BYTES_PER_S = 3.5e9  # 70% of a PCIe 4.0 drive of the middle range, assumed

BATCHES = (1, 4)
EXPERTS = published("qwen3_moe")  # as those of `FITTED`
NUM_ROUNDS = 4  # of answers, one after the other
MOST_ROWS = 512  # that costs are asked for
FIRST_STEP, LAST_STEP = 0.4, 0.02  # of a parameter, while a routing is fitted
MAX_LOCALITY = 0.99


def main() -> None:
    options = _options()
    settings = {"layers": NUM_LAYERS, "new_tokens": options.new, "rounds": NUM_ROUNDS}
    recorder = Recorder("locality", settings, options.out)
    routings = {"local": fitted(FITTED, Preference._fields), "static": fitted_static(FITTED)}
    for name, preference in routings.items():
        recorder.write("routing", {"routing": name, **preference._asdict()})
        say(f"{name}: {preference}")
    for model in (FITTED, *HELD_OUT):
        _hold(recorder, model, routings)
    speeds: dict[tuple[str, str], list[dict[str, float]]] = {}
    for (routing, preference), home, batch in product(routings.items(), HOMES, BATCHES):
        cells = {
            str(share): measure_cell(preference, home, batch, share, options.new)
            for share in SHARES
        }
        facts: Row = {"routing": routing, "home": home, "num_sequences": batch}
        recorder.write("presets", {**facts, "by_share": cells})
        speeds.setdefault((home, routing), []).extend(cell["of_best"] for cell in cells.values())
    for home in HOMES:
        recorder.write("worse routing", {"home": home, **verdict(home, list(routings), speeds)})


def fitted(model: PublishedModel, names: Sequence[str]) -> Preference:
    """Fit the named parameters to a model's rates by least squares, with ever smaller steps."""
    best = Preference(**dict.fromkeys(names, 0.5))
    least, step = _loss(model, best), FIRST_STEP
    while step >= LAST_STEP:
        tried = [_moved(best, name, sign * step) for name in names for sign in (1, -1)]
        losses = {one: _loss(model, one) for one in tried if one != best}
        found = min(losses, key=lambda one: losses[one])
        if losses[found] < least:
            best, least = found, losses[found]
        else:
            step /= 2
    return best


def fitted_static(model: PublishedModel) -> Preference:
    """Favourites that all answers have in common and nothing else, by the LRU cache's hits."""
    cached = tuple(rate for rate in model.rates if rate.of == "in an LRU cache")
    return fitted(model._replace(rates=cached), ["skew"])


def _moved(preference: Preference, name: str, step: float) -> Preference:
    most = MAX_LOCALITY if name == "locality" else float("inf")
    value = min(most, max(0.0, getattr(preference, name) + step))
    return preference._replace(**{name: value})


def _loss(model: PublishedModel, preference: Preference) -> float:
    reached = model.reached(preference)
    pairs = zip(reached, model.rates, strict=True)
    return sum((here - rate.published) ** 2 for here, rate in pairs)


def _hold(recorder: Recorder, model: PublishedModel, routings: Mapping[str, Preference]) -> None:
    """The model's rates beside those of the routings, of another seed than the fit's."""
    reached = {name: model.reached(preference, seed=1) for name, preference in routings.items()}
    for place, rate in enumerate(model.rates):
        here = {name: round(values[place], 4) for name, values in reached.items()}
        row = {"model": model.name, "is_fitted": model is FITTED, **rate._asdict(), "here": here}
        recorder.write("rate", row)
        say(f"{model.name}, {rate.of} at {rate.at:g}: {rate.published}, here {here}")


def measure_cell(preference: Preference, home: str, batch: int, share: float, num_new: int) -> Row:
    """The presets' speeds over the fastest one's, and what `auto` does."""
    trace, known = (
        synth_decode_trace(
            trace_shape(EXPERTS._replace(num_layers=NUM_LAYERS)),
            num_sequences=batch,
            num_rounds=NUM_ROUNDS,
            num_prompt=32,
            num_new=num_new,
            text=text,
            **preference._asdict(),
        )
        for text in (0, 1)
    )
    reports, before = (_reports(one, known, home, share) for one in (trace, known))
    chosen = max(before, key=lambda name: before[name].tokens_per_s)
    most = max(report.tokens_per_s for report in reports.values())
    of_best = {name: round(one.tokens_per_s / most, 4) for name, one in reports.items()}
    return {
        "of_best": {**of_best, "auto": of_best[chosen]},
        "auto_chooses": chosen,
        "hit_rates": {name: round(one.hit_rate, 4) for name, one in reports.items()},
    }


def _reports(trace: Trace, known: Trace, home: str, share: float) -> dict[str, Report]:
    costs = load_profile(HOMES[home]).costs(EXPERTS)
    if home == "disk":
        costs = _without_device(costs)
    setting = make_setting(trace, costs, round(share * trace.shape.num_experts), known)
    names = COMPARED
    replay = compare_alone if home == "disk" else compare
    return dict(zip(names, replay(trace, names, setting), strict=True))


def _without_device(costs: Costs) -> Costs:
    """The host runs every expert, and reads each that is absent."""
    host_s, read_s = costs.host_s, costs.expert_bytes / DISK_BYTES_PER_S
    absent_s = Curve([(rows, max(read_s, host_s.at(rows))) for rows in (1, MOST_ROWS)])
    return Costs(costs.expert_bytes, read_s, absent_s, host_s, Curve([(1, 0.0)]), 0.0)


def verdict(
    home: str,
    routings: Sequence[str],
    speeds: Mapping[tuple[str, str], Sequence[Mapping[str, float]]],
) -> dict[str, object]:
    """Average each preset's speeds by routing and order the presets by their worse average.

    The averages are geometric, over shares and batches. speeds: by home and routing, cells of
    speeds over the best one.
    """
    means = {
        name: {
            routing: _mean([cell[name] for cell in speeds[home, routing]]) for routing in routings
        }
        for name in speeds[home, routings[0]][0]
    }
    order = sorted(means, key=lambda name: -min(means[name].values()))
    return {"of_best": means, "order": order}


def _mean(values: Sequence[float]) -> float:
    return round(statistics.geometric_mean(values), 4)


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--new", type=int, default=64, help="tokens of an answer")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
