"""DALI's figures and tables, each published number beside the one that is simulated here.

Figures 12 to 14, 17 to 19 and 22 and Tables 4, 6, 8 and 9, all in one setting: DALI's machine as
its figures show it (`dali-3090`), the published shapes of its three models, synthetic routing,
early gates that err at the published rates. What `dali-3090` was fitted to is written as fitted,
and what only says another number again as its repetition. Table 6 has the processor time of
policies beside simulated time, Table 8 the features of the demo models; all else is deterministic.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from common.arguments import make_parser, run_script
from common.dali_models import MODELS, STAGE_PREFETCH, STAGE_SHARE, STAGES, Load, make_case
from common.dali_published import (
    FIGURE_12,
    FIGURE_13,
    FIGURE_17,
    FIGURE_18,
    FIGURE_18D,
    FIGURE_19,
    FIGURE_22,
    TABLE_4,
    TABLE_6,
    TABLE_8,
    TABLE_9,
)
from common.published_numbers import Numbers
from common.record import Recorder
from common.simulated import generating_passes, policy_s, trace_shape
from common.synth_trace import synth_decode_trace
from common.texts import text_for
from exchange import BATCHES, MACHINE, combined
from fit_profiles import FIGURE_14, TABLE_4_STEPS, Shipped, dali_anchors, dali_cases
from fit_profiles import TABLE_4 as FITTED_TABLE_4

from lowtide import LLM
from lowtide.core import Facts, IntArray, Step, StepKind
from lowtide.lab.best_assignments import MAX_STATES, exact_mask
from lowtide.lab.calibrate import foresee, learn, split
from lowtide.lab.profiles import load_profile
from lowtide.lab.simulation.simulator import simulate
from lowtide.policies.assignment import (
    greedy_mask,
    makespan,
    prices,
)
from lowtide.policies.catalogue import NUM_PREFETCH
from lowtide.policies.placement import Placement
from lowtide.policies.presets import recipe
from lowtide.policies.recipe import PolicyInputs, Recipe
from lowtide.replay.calibration import GATES
from lowtide.replay.trace import Trace, demand_of

PREFERENCE = 0.5  # of the model and of each sequence, as in `exchange.py`
STAGE_MODELS = ("Qwen3-30B-A3B", "Mixtral-8x7B")
STAGE_BATCHES = (8, 16, 32, 64)
NUM_NEW = 64
CACHE_SHARES = (0.25, 0.5, 0.75)
LENGTHS = (128, 256, 512, 1024)
NUM_PIECES = 12  # of the text, for Table 8

DEMOS = {"Qwen": "demo:chat", "Mixtral": "demo:diffusion"}
"""Whose features stand where the weights are not here."""


class Case(NamedTuple):
    """One model and batch in one phase."""

    part: Trace
    setting: PolicyInputs
    hits: IntArray

    def seconds(self, made: str | Recipe) -> float:
        return simulate(self.part, made, self.setting, hits=self.hits).total_s

    def having(self, share: float, **options: int) -> Case:
        """With another share of the experts resident."""
        residents = [round(share * self.setting.num_experts)] * self.setting.num_layers
        setting = replace(self.setting, capacity=residents).having(**options)
        return self._replace(setting=setting)


def main() -> None:
    options = _options()
    recorder = Recorder("dali", {"profile": MACHINE, "layers": options.layers}, options.out)
    numbers = Numbers(recorder)
    for part in options.parts:
        PARTS[part](numbers, options)


def speeds_over_others(numbers: Numbers, options: argparse.Namespace) -> None:
    """Figures 12 and 13."""
    models, batches = list(MODELS), BATCHES
    decode = [case for name in models for case in make_cases(name, batches, options.layers)]
    _over_others(numbers, "Figure 12", FIGURE_12, decode)
    prefill = make_cases("DeepSeek-V2-Lite", batches, options.layers, StepKind.PREFILL)
    _over_others(numbers, "Figure 13", FIGURE_13, list(prefill))


def _over_others(
    numbers: Numbers, place: str, published: Mapping[str, tuple[str, float]], cases: list[Case]
) -> None:
    dali_s = [case.seconds("dali") for case in cases]
    said: dict[str, str] = {}  # of each preset first
    for of, (preset, value) in published.items():
        ratios = [case.seconds(preset) / s for case, s in zip(cases, dali_s, strict=True)]
        numbers.write(place, of, value, ratios, repeats=said.get(preset, ""))
        said.setdefault(preset, f"{place}, {of}")


def parts_one_by_one(numbers: Numbers, options: argparse.Namespace) -> None:
    """Figure 19, and the greedy of Figure 14, which the machine was fitted to."""
    anchors = dali_anchors(dali_cases(), Shipped(MACHINE))
    for name, value in FIGURE_14.items():
        here = value * anchors[f"Figure 14, {name}"]
        numbers.fitted("Figure 14", f"{name} over everything on the host", value, here)
    gains = [
        stage_gains(name, case)
        for name in STAGE_MODELS
        for case in make_cases(name, STAGE_BATCHES, options.layers)
    ]
    for stage, value in FIGURE_19.items():
        # The greedy over everything on the host is what the machine was fitted to.
        repeats = "Figure 14" if stage == "+ greedy" else ""
        numbers.write("Figure 19", stage, value, [one[stage] for one in gains], repeats=repeats)


def stage_gains(name: str, case: Case) -> dict[str, float]:
    """Return each stage's gain over the one before."""
    setting = case.setting
    num_ahead = STAGE_PREFETCH.get(name, NUM_PREFETCH.of(setting))
    own = case.having(STAGE_SHARE, num_prefetch=num_ahead)
    seconds = [own.seconds(made) for made in STAGES.values()]
    gains = [before / after for before, after in zip(seconds, seconds[1:], strict=False)]
    return dict(zip(list(STAGES)[1:], gains, strict=True))


def caches(numbers: Numbers, options: argparse.Namespace) -> None:
    """Figure 17: HybriMoE's placement in DALI, from the same first residents."""
    gains = []
    for name in MODELS:
        [case] = make_cases(name, (4,), options.layers)
        for own in map(case.having, CACHE_SHARES):
            other_s, dali_s = (
                own.seconds(combined((place, "dali", "dali"))) for place in ("hybrimoe", "dali")
            )
            gains.append(other_s / dali_s)
    numbers.write("Figure 17", "its cache over HybriMoE's", FIGURE_17, gains)


def window_hits(numbers: Numbers, options: argparse.Namespace) -> None:
    """Figure 18c, by the two differences in the text."""
    [case] = make_cases("DeepSeek-V2-Lite", (4,), options.layers)

    def hit_rate(window: tuple[int, int]) -> float:
        return simulate(case.part, _windowed(window), case.setting, hits=case.hits).hit_rate

    for (window, other), value in FIGURE_18.items():
        more = hit_rate(window) - hit_rate(other)
        numbers.write("Figure 18", f"{window} over {other}, hit rate", value, [more], neutral=0.0)


def hits_over_tokens(numbers: Numbers, options: argparse.Namespace) -> None:
    """Figure 18d: the hit rate of each layer, over groups of eight tokens of an answer."""
    [case] = make_cases("Mixtral-8x7B", (4,), options.layers)
    report = simulate(case.part, _windowed((8, 1)), case.setting, hits=case.hits)
    rates = report.hit_rates(8)  # [groups, layers]
    of_groups = {f"tokens_{8 * i}": float(mean) for i, mean in enumerate(rates.mean(axis=1), 1)}
    best = float(rates[-1].max())
    of = "hit rate of the last 8 tokens, in the layer with most"
    numbers.write("Figure 18", of, FIGURE_18D, [best], neutral=0.0, details=of_groups)


def longer_answers(numbers: Numbers, options: argparse.Namespace) -> None:
    """Figure 22, by the means in the text: of Mixtral, prompts of 32 tokens."""
    loads = [Load(16, 32, num_new) for num_new in LENGTHS]
    cases = [_decoding("Mixtral-8x7B", load, options.layers) for load in loads]
    _over_others(numbers, "Figure 22", FIGURE_22, cases)


def greedy_and_optimum(numbers: Numbers, options: argparse.Namespace) -> None:
    """Table 4: no expert is resident; the greedy's own seconds were fitted to."""
    anchors = dali_anchors(dali_cases(), Shipped(MACHINE))
    names = {model.family: name for name, model in MODELS.items()}
    for (family, batch), value in FITTED_TABLE_4.items():
        here = value * anchors[f"Table 4, {family}, batch {batch}"]
        of = f"{names[family]}, batch {batch}: seconds of {TABLE_4_STEPS} steps, greedy"
        numbers.fitted("Table 4", of, value, here)
    for (name, batch), (optimum_s, greedy_s) in TABLE_4.items():
        of = f"{name}, batch {batch}: the greedy's share of the optimum's speed"
        shares = optimum_shares(name, batch, 8)
        numbers.write("Table 4", of, optimum_s / greedy_s, shares)


def optimum_shares(name: str, batch: int, num_new: int) -> list[float]:
    """Of two layers and some steps: the least makespan over the greedy's."""
    shape = MODELS[name].shape
    costs = load_profile(MACHINE).costs(shape)
    few = trace_shape(shape)._replace(num_layers=2)
    trace = synth_decode_trace(few, num_sequences=batch, num_prompt=1, num_new=num_new)
    no_residents, shares = np.zeros(shape.num_experts, np.bool_), []
    for hits in generating_passes(trace).hits():
        for layer, counts in enumerate(hits):
            demand = demand_of(counts, no_residents)
            room = np.zeros(2, np.int64)
            step = Step(StepKind.DECODE, 0)
            price = prices(Facts(step, layer, demand, no_residents, room, costs))
            best_s = makespan(price, exact_mask(price, MAX_STATES))
            shares.append(best_s / makespan(price, greedy_mask(price)))
    return shares


def scheduling(numbers: Numbers, options: argparse.Namespace) -> None:
    """Table 6: processor time of the policies beside simulated time; DeepSeek, batch 8."""
    for preset, by_length in TABLE_6.items():
        cases = {n: _decoding("DeepSeek-V2-Lite", Load(8, 64, n), 2) for n in by_length}
        layer_s = {n: case.seconds(preset) / _num_decisions(case) for n, case in cases.items()}
        for length, case in cases.items():
            planned_s = _planning_s(preset, case)
            us = {"planned_us": 1e6 * planned_s, "layer_us": 1e6 * layer_s[length]}
            share = planned_s / (planned_s + layer_s[length])
            of, value = f"{preset}, {length} tokens", by_length[length]
            numbers.write("Table 6", of, value, [share], neutral=0.0, details=us)


def _decoding(name: str, load: Load, num_layers: int) -> Case:
    """Half of the experts resident."""
    model = MODELS[name]
    costs = load_profile(MACHINE).costs(model.shape)
    trace, setting = make_case(model, costs, load, PREFERENCE, num_layers)
    part = generating_passes(trace)
    return Case(part, setting, part.hits())


def _num_decisions(case: Case) -> int:
    return len(case.part.passes) * case.setting.num_layers


def _planning_s(preset: str, case: Case) -> float:
    """Seconds of one layer's planning."""
    # Everything is decided alike each time, so the least of a decision's times is its own.
    made = recipe(preset)
    turns = [policy_s(made, case.setting, case.part, time.thread_time) for _ in range(3)]
    return float(np.minimum.reduce(turns).sum()) / _num_decisions(case)


def features(numbers: Numbers, options: argparse.Namespace) -> None:
    """Table 8, of the demo models: no weights of the published ones are here."""
    for name, demo in DEMOS.items():
        with LLM(demo) as llm:
            learning, testing = split(llm, text_for(demo), NUM_PIECES)
            _, residual = learn(llm, learning, demo)
            cosine = foresee(llm, testing, demo, residual).accuracy.cosine
        raw, corrected = cosine  # of each layer
        pairs = zip(GATES, cosine, strict=True)
        details = {f"{gate}_cosine": float(one.mean()) for gate, one in pairs}
        published_raw, published_corrected = TABLE_8[name]
        numbers.write(
            "Table 8",
            f"{name} ({demo} here), cosine with the residual less without",
            published_corrected - published_raw,
            (corrected - raw).tolist(),
            neutral=0.0,
            details=details,
        )


def windows(numbers: Numbers, options: argparse.Namespace) -> None:
    """Table 9: tokens per second of a sequence, of all layers by some, over HybriMoE's."""
    for name, by_window in TABLE_9.items():
        [case] = make_cases(name, (32,), options.layers)
        speeds = {w: _sequence_speed(name, case, _windowed(w)) for w in by_window}
        for window, value in by_window.items():
            if window is not None:
                details = {"tokens_per_s": speeds[window], "published_tokens_per_s": value}
                numbers.write(
                    "Table 9",
                    f"{name}, {window} over HybriMoE",
                    value / by_window[None],
                    [speeds[window] / speeds[None]],
                    details=details,
                )


def _windowed(window: tuple[int, int] | None) -> Recipe:
    """DALI's with another window, or HybriMoE's."""
    if window is None:
        return recipe("hybrimoe")
    dali, (w_size, u_size) = recipe("dali"), window

    def place(setting: PolicyInputs) -> Placement:
        return dali.placement(setting.having(w_size=w_size, u_size=u_size))

    return replace(dali, placement=place)


def _sequence_speed(name: str, case: Case, made: Recipe) -> float:
    report = simulate(case.part, made, case.setting, hits=case.hits)
    share = case.setting.num_layers / MODELS[name].shape.num_layers
    return share * report.num_passes / report.total_s


def make_cases(
    name: str,
    batches: tuple[int, ...],
    num_layers: int,
    phase: StepKind = StepKind.DECODE,
) -> Iterator[Case]:
    """Prompts of 64 tokens and 64 new ones, half of the experts resident."""
    model = MODELS[name]
    costs = load_profile(MACHINE).costs(model.shape)
    for batch in batches:
        load = Load(batch, 64, NUM_NEW)
        trace, setting = make_case(model, costs, load, PREFERENCE, num_layers)
        part = generating_passes(trace)
        if phase is StepKind.PREFILL:
            part = trace.beginning(len(trace.passes) - NUM_NEW)
            # A plan for it is made of prompts alone.
            setting = replace(setting, hits=np.asarray(setting.hits)[:-NUM_NEW])
        yield Case(part, setting, part.hits())


PARTS: Mapping[str, Callable[[Numbers, argparse.Namespace], None]] = {
    "figures-12-13": speeds_over_others,
    "figures-14-19": parts_one_by_one,
    "figure-17": caches,
    "figure-18": window_hits,
    "figure-18d": hits_over_tokens,
    "figure-22": longer_answers,
    "table-4": greedy_and_optimum,
    "table-6": scheduling,
    "table-8": features,
    "table-9": windows,
}


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--layers", type=int, default=8, help="of each model, simulated")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
