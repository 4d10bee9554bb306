"""Prefetch: how well each predictor names the next layer's experts, and what that is worth.

Each run is recorded after a calibration on other text. First the accuracy of the n experts that a
predictor ranks highest (the share of them that is among the n with most tokens, as DALI counts),
then the same predictors at work in the simulator: DALI's cache and assignment, experts as large
as LLaDA2.0-mini's. Beside them stands a predictor that knows the truth: where even that gains
nothing, the link has no idle time to give. Early gates are replayed as they did predict, and
beside that with errors drawn at the rates measured on other held-out text and at those published.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from common.arguments import make_parser, run_script
from common.models import deep_demos, model_folder
from common.record import Recorder, say
from common.texts import text_for

from lowtide import LLM
from lowtide.core import Facts, FloatArray, IntArray, MoEShape, Step, StepKind
from lowtide.errors import UsageError
from lowtide.lab.baselines import Statistics
from lowtide.lab.calibrate import foresee, learn, split, top_share
from lowtide.lab.profiles import load_profile
from lowtide.lab.simulation.foresight import GateAccuracies
from lowtide.lab.simulation.simulator import Report, calibrate, simulate
from lowtide.policies.catalogue import NUM_PREFETCH
from lowtide.policies.prefetch import (
    Ahead,
    Combined,
    Gate,
    NextGate,
    NoPrefetch,
    Prefetch,
    PreviousStep,
    Residual,
)
from lowtide.policies.presets import recipe
from lowtide.policies.reads_ahead import GATE_ACCURACY
from lowtide.policies.recipe import PolicyInputs
from lowtide.replay.calibration import TOP_SIZES, GateAccuracy
from lowtide.replay.trace import Trace, demand_of

MODELS = ("demo:diffusion", "demo:chat", *deep_demos(), "synth")
RESIDENT_SHARES = (0.25, 0.5)
NUM_AHEAD = (1, 4)
HIDDEN_SIZE, EXPERT_SIZE = 2048, 512  # LLaDA2.0-mini's experts


@dataclass(frozen=True, slots=True)
class Run:
    """A recorded run, what early gates predicted of it, and what was known before it."""

    trace: Trace
    predicted: Mapping[Gate, list[IntArray]]
    accuracy: GateAccuracy  # of the gates, on this run
    measured: GateAccuracies  # of the gates, on another text
    setting: PolicyInputs

    @property
    def truth(self) -> Mapping[Gate, list[IntArray]]:
        """A gate that is never wrong."""
        return {Gate.RAW: list(self.trace.hits())}


def _combined(setting: PolicyInputs) -> Prefetch:
    num_ahead = NUM_PREFETCH.of(setting)
    last = PreviousStep(num_ahead, setting.num_layers, setting.num_experts)
    return Combined(num_ahead, Residual(num_ahead), last)


def _statistics(setting: PolicyInputs) -> Prefetch:
    return Statistics(NUM_PREFETCH.of(setting), np.asarray(setting.following))


class RandomPrefetch(Prefetch):
    """Any experts, drawn from a seed: what prefetching is worth without knowing anything."""

    def __init__(self, num_experts_ahead: int, num_experts: int, seed: int) -> None:
        super().__init__(num_experts_ahead)
        self._num_experts = num_experts
        self._draw = np.random.default_rng(seed)

    def score(self, ahead: Ahead) -> FloatArray:
        return 1.0 - self._draw.random(self._num_experts)  # in (0, 1]


_STEP = Step(StepKind.DECODE, 0)

PREDICTORS: Mapping[str, Callable[[PolicyInputs], Prefetch]] = {
    "random": lambda s: RandomPrefetch(NUM_PREFETCH.of(s), s.num_experts, s.seed),
    "statistics": _statistics,
    "previous step": lambda s: PreviousStep(NUM_PREFETCH.of(s), s.num_layers, s.num_experts),
    "raw gate": lambda s: NextGate(NUM_PREFETCH.of(s)),
    "residual gate": lambda s: Residual(NUM_PREFETCH.of(s)),
    "residual gate and previous step": _combined,
}


def main() -> None:
    options = _options()
    for name in options.model or MODELS:
        run = _record(name, options.pieces)
        settings = {
            "model": Path(name).name,
            "pieces": options.pieces,
            "machine": options.machine,
            "expert": [HIDDEN_SIZE, EXPERT_SIZE],
            "policy": "dali",
            "num_passes": len(run.trace.passes),
            "shape": run.trace.shape[:3],
        }
        recorder = Recorder("prefetch", settings, options.out)
        say(f"{name}: {len(run.trace.passes)} passes of {run.trace.shape[:3]}")
        _write_accuracies(recorder, run)
        costs = load_profile(options.machine).costs(_large_experts(run.trace))
        for share in RESIDENT_SHARES:
            capacity = [round(share * run.trace.shape.num_experts)] * run.trace.shape.num_layers
            for num_prefetch in NUM_AHEAD:
                setting = replace(run.setting, capacity=capacity, costs=costs)
                _write_gains(recorder, run, setting.having(num_prefetch=num_prefetch))


def _record(name: str, num_pieces: int) -> Run:
    """Calibrates on one part of a text and records another."""
    model = model_folder(None, "small") if name == "synth" else name
    with LLM(model) as llm:
        learning, testing = split(llm, text_for(name), 2 * num_pieces)
        say(f"{name}: calibrating on {len(learning)} pieces, testing on {len(testing)} ...")
        known, residual = learn(llm, learning, name)
        half = len(testing) // 2
        before = foresee(llm, testing[:half], name, residual)
        then = foresee(llm, testing[half:], name, residual)
    shape = known.shape
    frequency, following = calibrate(known)
    return Run(
        then.trace,
        then.predicted,
        then.accuracy,
        dict(zip(before.predicted, before.accuracy.routed, strict=True)),
        PolicyInputs(
            capacity=[0] * shape.num_layers,
            num_experts=shape.num_experts,
            costs=load_profile("rtx3090").costs(MoEShape(*shape)),
            frequency=frequency,
            following=following,
            options={"num_prefetch": max(TOP_SIZES)},
        ),
    )


def _write_accuracies(recorder: Recorder, run: Run) -> None:
    for name, make in PREDICTORS.items():
        tops = _top_shares(run, make(run.setting))
        values = {f"top_{n}": share for n, share in zip(TOP_SIZES, tops.tolist(), strict=True)}
        recorder.write("accuracy", {"predictor": name, **values})
        say(f"  {name:32} " + "  ".join(f"{k} {share:4.0%}" for k, share in values.items()))
    for gate, routed, cosine in zip(
        run.predicted, run.accuracy.routed, run.accuracy.cosine, strict=True
    ):
        values = {"routed": routed.tolist(), "cosine": cosine.tolist()}
        recorder.write("gate", {"gate": gate.value, **values})


def _top_shares(run: Run, prefetch: Prefetch) -> FloatArray:
    """The mean over passes and over the layers after the first, for each of `TOP_SIZES`."""
    shares: list[list[float]] = []
    no_residents = np.zeros(run.trace.shape.num_experts, np.bool_)
    for index, hits in enumerate(run.trace.hits()):
        for layer in range(len(hits) - 1):
            prefetch.observe(_facts(run, layer, hits))
            predicted = None
            if prefetch.gate is not Gate.NONE:
                predicted = run.predicted[prefetch.gate][index][layer + 1]
            score = prefetch.score(Ahead(layer + 1, no_residents, predicted))
            shares.append([top_share(score, hits[layer + 1], n) for n in TOP_SIZES])
        prefetch.observe(_facts(run, len(hits) - 1, hits))
    means: FloatArray = np.mean(shares, axis=0)
    return means


def _facts(run: Run, layer: int, hits: IntArray) -> Facts:
    """Of a layer with no residents. hits [layers, experts]."""
    no_residents = np.zeros(hits.shape[1], np.bool_)
    capacity = np.zeros(len(hits), np.int64)
    demand = demand_of(hits[layer], no_residents)
    return Facts(_STEP, layer, demand, no_residents, capacity, run.setting.costs)


def _write_gains(recorder: Recorder, run: Run, setting: PolicyInputs) -> None:
    none = _replay(run, setting, lambda s: NoPrefetch())
    perfect = _replay(run, setting, lambda s: NextGate(NUM_PREFETCH.of(s)), predictions=run.truth)
    _write_gain(recorder, setting, none, "the truth", "perfect", perfect)
    for name, make in PREDICTORS.items():
        report = _replay(run, setting, make, predictions=run.predicted)
        _write_gain(recorder, setting, none, name, "recorded", report)
        if make(setting).gate is not Gate.NONE:
            for source, accuracy in (("measured", run.measured), ("published", GATE_ACCURACY)):
                report = _replay(run, setting, make, gate_accuracy=accuracy)
                _write_gain(recorder, setting, none, name, f"errors at {source} rates", report)


def _replay(
    run: Run, setting: PolicyInputs, make: Callable[[PolicyInputs], Prefetch], **options: object
) -> Report:
    made = replace(recipe("dali"), prefetch=make)
    return simulate(run.trace, made, setting, hits=run.trace.hits(), **options)  # type: ignore[arg-type]


def _write_gain(
    recorder: Recorder,
    setting: PolicyInputs,
    none: Report,
    name: str,
    foresight: str,
    report: Report,
) -> None:
    outcome, num = report.prefetch, max(1, report.num_prefetched)
    values = {
        "predictor": name,
        "foresight": foresight,
        "residents": setting.capacity[0],
        "num_prefetch": NUM_PREFETCH.of(setting),
        "gain": none.total_s / report.total_s,
        "num_prefetched": report.num_prefetched,
        "hit_share": outcome.num_hits / num,
        "late_share": outcome.num_late / num,
        "wasted_share": outcome.num_wasted / num,
        "moved_bytes": report.moved_bytes,
    }
    recorder.write("end to end", values)
    say(
        f"  {values['residents']} resident, {values['num_prefetch']} ahead, {name} ({foresight}): "
        f"{values['gain']:.3f}x, {values['wasted_share']:.0%} wasted"
    )


def _large_experts(trace: Trace) -> MoEShape:
    return MoEShape(*trace.shape[:3], HIDDEN_SIZE, EXPERT_SIZE)


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--model", action="append", help=f"folder, hub id, or one of {', '.join(MODELS)} (all)"
    )
    parser.add_argument("--machine", default="rtx3090", help="hardware profile")
    parser.add_argument("--pieces", type=int, default=12, help="half of the text's pieces")
    options = parser.parse_args()
    if options.pieces < 4:
        raise UsageError(f"--pieces {options.pieces}: it takes 4, or a part has none to test on.")
    return options


if __name__ == "__main__":
    run_script(main)
