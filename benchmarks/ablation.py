"""DALI's parts one by one, and every preset, at the published dimensions of its three models.

Qwen3-30B-A3B, DeepSeek-V2-Lite and Mixtral-8x7B on DALI's machine (`dali-3090`), simulated:
everything on the host, then the greedy assignment, prefetch and the cache added in turn; decode
at batch 4 to 128 beside the ratios that DALI reports; prefill; decode lengths and what planning
takes at each. Half of the experts are resident. No weights of these sizes are here, so routing is
synthetic: tokens of a sequence are as alike as those of the recorded demo chat model, beyond what
chance makes them, which there does not fade with distance; half of the preference is the
sequence's own and half the model's, which alone a calibration on other sequences can know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from common.arguments import run_script
from common.record import Recorder, Row, say
from common.simulated import (
    VARIANTS,
    ceilings,
    make_parser,
    make_setting,
    policy_s,
    published,
    replay,
    summary,
    trace_shape,
)
from common.synth_trace import preference_for, synth_decode_trace
from common.traces import Run, record_all

from lowtide.core import Costs, MoEShape
from lowtide.lab.calibration_report import step_similarity
from lowtide.policies.assignment import Greedy
from lowtide.policies.catalogue import NUM_PREFETCH
from lowtide.policies.placement import Static
from lowtide.policies.prefetch import Residual
from lowtide.policies.presets import recipe
from lowtide.policies.recipe import Recipe, Setting
from lowtide.profiles import load_profile
from lowtide.replay.simulator import simulate
from lowtide.replay.trace import Trace

MACHINE = "dali-3090"
RESIDENT_SHARE = 0.5
PUBLISHED: Mapping[str, Mapping[str, float]] = {
    "decode": {"layer-split": 3.97, "moe-lightning": 1.48, "hybrimoe": 1.32},
    "prefill": {"layer-split": 7.62, "moe-lightning": 2.45, "hybrimoe": 2.00},
}
"""DALI's own speed over each, as its paper reports it (means over its models and batches;
prefill on DeepSeek-V2-Lite only). Its layer-wise splits: llama.cpp here, KTransformers 2.16 and
3.80."""
STAGES: Mapping[str, Recipe] = {
    "all on the host": recipe("all-host"),
    "+ greedy": Recipe(lambda s: Static.first(_nobody(s), s.num_experts), lambda s: Greedy()),
    "+ prefetch": Recipe(
        lambda s: Static.first(_nobody(s), s.num_experts),
        lambda s: Greedy(),
        lambda s: Residual(NUM_PREFETCH.of(s)),
    ),
    "+ cache": recipe("dali"),
}
"""DALI's Figure 19, in its order: nobody is resident before the cache comes."""
PUBLISHED_STAGES = {"+ greedy": 4.1, "+ prefetch": 1.09, "+ cache": 1.38}
"""What each stage gains over the one before."""
STAGE_SHARE = 0.25
STAGE_PREFETCH = {"Qwen3-30B-A3B": 8, "Mixtral-8x7B": 1}
"""Figure 19's cache ratio and prefetch sizes; DeepSeek-V2-Lite keeps those of Figure 12."""


def _nobody(setting: Setting) -> list[int]:
    return [0] * setting.num_layers


class Model(NamedTuple):
    """A model and DALI's options for it."""

    family: str
    options: Mapping[str, int]

    @property
    def shape(self) -> MoEShape:
        return published(self.family)


MODELS = {
    "Qwen3-30B-A3B": Model("qwen3_moe", {"num_prefetch": 4, "u_size": 8}),
    "DeepSeek-V2-Lite": Model("deepseek_v2", {"num_prefetch": 4, "u_size": 8}),
    "Mixtral-8x7B": Model("mixtral", {"num_prefetch": 1, "u_size": 1}),
}


class Load(NamedTuple):
    """A batch and its answer's length."""

    num_sequences: int
    num_prompt: int
    num_new: int


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--layers", type=int, help="of each model (all)")
    options = parser.parse_args()
    excess = _recorded_excess()
    settings = {
        "profile": MACHINE,
        "resident_share": RESIDENT_SHARE,
        "layers": options.layers or "all",
        "similarity_beyond_chance": excess,
    }
    recorder = Recorder("ablation", settings, options.out)
    for name in options.models[:1] if options.quick else options.models:
        _measure(recorder, name, excess, options.layers, options.quick)


def _recorded_excess() -> float:
    """Cosine of neighbouring tokens of the demo chat model, from 0 by chance to 1."""
    [trace] = record_all([Run("demo:chat", 1, 4, 64)])
    chance = trace.shape.num_experts_per_token / trace.shape.num_experts
    return (float(step_similarity(trace.blocks()).mean()) - chance) / (1 - chance)


def _measure(
    recorder: Recorder, name: str, excess: float, num_layers: int | None, is_quick: bool
) -> None:
    model = MODELS[name]
    costs = load_profile(MACHINE).costs(model.shape)
    recorder.write("ceiling", {"model": name, **ceilings(costs)})
    chance = model.shape.num_experts_per_token / model.shape.num_experts
    preference = preference_for(chance + excess * (1 - chance), trace_shape(model.shape))
    for batch in (4, 8) if is_quick else (4, 8, 16, 32, 64, 128):
        load = Load(batch, 64, 16 if is_quick else 32)
        say(f"{name}, batch {batch}")
        trace, setting = make_case(model, costs, load, preference, num_layers)
        _decode(recorder, {"model": name, "batch": batch, "preference": preference}, trace, setting)
    lengths = (128,) if is_quick else (128, 256, 512, 1024)
    for length in lengths:
        say(f"{name}, {length} tokens")
        trace, setting = make_case(model, costs, Load(4, 32, length), preference, num_layers or 8)
        _lengths(recorder, {"model": name, "batch": 4, "length": length}, trace, setting)
    for num_prompt in (64,) if is_quick else (64, 512, 2048):
        trace, setting = make_case(model, costs, Load(1, num_prompt, 1), preference)
        _prefill(recorder, {"model": name, "prompt_tokens": num_prompt}, trace, setting)


def make_case(
    model: Model, costs: Costs, load: Load, preference: float, num_layers: int | None = None
) -> tuple[Trace, Setting]:
    """A run, and the setting that other sequences of the same model calibrate."""
    shape = trace_shape(model.shape)
    if num_layers is not None:
        shape = shape._replace(num_layers=num_layers)
    trace, known = (
        synth_decode_trace(
            shape,
            num_sequences=load.num_sequences,
            num_prompt=load.num_prompt,
            num_new=load.num_new,
            skew=preference,
            taste=preference,
            text=text,
        )
        for text in (0, 1)
    )
    num_residents = round(RESIDENT_SHARE * shape.num_experts)
    setting = make_setting(trace, costs, num_residents, known)
    return trace, setting.having(**model.options)


def _decode(recorder: Recorder, facts: Row, trace: Trace, setting: Setting) -> None:
    hits = trace.hits()
    _stages(recorder, facts, trace, setting)
    reports = replay(trace, hits, setting, VARIANTS)
    dali, lowtide = reports["dali"].tokens_per_s, reports["lowtide"].tokens_per_s
    for name, report in reports.items():
        row = {
            **facts,
            "preset": name,
            "dali_over_this": dali / report.tokens_per_s,
            "published_dali_over_this": PUBLISHED["decode"].get(name),
            "lowtide_over_this": lowtide / report.tokens_per_s,
        }
        recorder.write("decode", {**row, **summary(report)})


def _stages(recorder: Recorder, facts: Row, trace: Trace, setting: Setting) -> None:
    """DALI's breakdown, each stage over the one before."""
    model = str(facts["model"])
    num_ahead = STAGE_PREFETCH.get(model, int(str(MODELS[model].options["num_prefetch"])))
    residents = [round(STAGE_SHARE * setting.num_experts)] * setting.num_layers
    of_figure = replace(setting, capacity=residents).having(num_prefetch=num_ahead)
    hits, last = trace.hits(), 0.0
    for name, made in STAGES.items():
        report = simulate(trace, made, of_figure, hits=hits)
        row = {
            **facts,
            "stage": name,
            "over_the_one_before": report.tokens_per_s / last if last else None,
            "published": PUBLISHED_STAGES.get(name),
        }
        recorder.write("stage", {**row, **summary(report)})
        last = report.tokens_per_s


def _lengths(recorder: Recorder, facts: Row, trace: Trace, setting: Setting) -> None:
    """Some presets at one answer length, and how long deciding took beside simulated time."""
    hits = trace.hits()
    names: Sequence[str] = ("layer-split", "hybrimoe", "dali", "lowtide")
    reports = replay(trace, hits, setting, names)
    for name, report in reports.items():
        spent_s = policy_s(recipe(VARIANTS[name].preset), setting, trace)
        row = {
            **facts,
            "preset": name,
            "dali_over_this": reports["dali"].tokens_per_s / report.tokens_per_s,
            "planning_us_per_layer": 1e6 * float(np.median(spent_s.sum(axis=1))),
            "planning_share": float(spent_s.sum()) / report.total_s,
        }
        recorder.write("length", {**row, **summary(report)})


def _prefill(recorder: Recorder, facts: Row, trace: Trace, setting: Setting) -> None:
    """The prompt alone: seconds of its passes."""
    prompt = trace.beginning(len(trace.passes) - 1)
    reports = replay(prompt, prompt.hits(), setting, VARIANTS)
    num_rows = len(prompt.ids)
    for name, report in reports.items():
        row = {
            **facts,
            "preset": name,
            "dali_over_this": report.total_s / reports["dali"].total_s,
            "published_dali_over_this": PUBLISHED["prefill"].get(name),
            "lowtide_over_this": report.total_s / reports["lowtide"].total_s,
            **summary(report),
            "tokens_per_s": num_rows / report.total_s,
        }
        recorder.write("prefill", row)


if __name__ == "__main__":
    run_script(main)
