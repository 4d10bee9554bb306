"""Cost and gain of weights of fewer bits in the trained demo models.

Rows of lowtide quality: likelihood, agreement and KL beside the model as it is stored, on the same
questions that training left out and in decoding's own passes; with them the bytes of all weights,
those read from disk in a pass, and tokens per second. With everything in memory, and in a budget
that holds a quarter of the experts as they are stored. Models are loaded one after the other, and
again for every round of answers, so that all formats take turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from statistics import median
from typing import Any

from common.arguments import make_parser, run_script
from common.ceilings import memory_ceiling
from common.record import Recorder, Row, say

from lowtide import LLM
from lowtide.engine.opening.config import EngineConfig
from lowtide.engine.opening.model import open_model
from lowtide.engine.planning.format_plans import plan_by_format
from lowtide.engine.planning.planner import Planner
from lowtide.lab.bench import Load, Preset, take_turns
from lowtide.lab.budgets import budget_of_share
from lowtide.lab.quality import QualityWork, quality
from lowtide.lab.quality import Row as Scored
from lowtide.lab.quality_settings import QualitySetting
from lowtide.lab.quality_text import Scope
from lowtide.llm import plan_model
from lowtide.model_folder.demo_tasks import held_out_text
from lowtide.params import SamplingParams

MODELS = ("demo:autoregressive", "demo:diffusion")
CONTEXT, PROMPT_TOKENS = 512, 64
FORMATS: Mapping[str, Mapping[str, str]] = {
    "own": {},
    "q8": {"format": "q8"},
    "q4": {"format": "q4"},
    "q8, int8 activations": {"format": "q8", "activations": "int8"},
    "q4, int8 activations": {"format": "q4", "activations": "int8"},
}
SHARES = (1.0, 0.25)
"""Shares of the stored experts that a budget holds."""

Lane = tuple[float, str]
"""A share of the budget, and a format."""


def main() -> None:
    options = _options()
    named = ("tokens", "repeats", "new")
    settings = {name: getattr(options, name) for name in named}
    recorder = Recorder("format quality", settings, options.out)
    recorder.write("ceiling", memory_ceiling())
    text = held_out_text()
    for model in options.models:
        measure(recorder, model, text, options)


def measure(recorder: Recorder, model: str, text: str, options: argparse.Namespace) -> None:
    shared: dict[str, Any] = {"context": CONTEXT, "device": "cpu"}
    plan = plan_model(model, **shared)
    lanes: dict[Lane, Mapping[str, object]] = {
        (share, name): {"host_memory": budget_of_share(plan, share), **format}
        for share in SHARES
        for name, format in FORMATS.items()
    }
    say(f"{model}: {len(lanes)} lanes ...")
    opened = open_model(model, EngineConfig(**shared))
    facts, asked = opened.facts, opened.options.asked
    planner = Planner.of(facts.config, opened.memory, asked)
    weight_bytes = {row.format: row.weight_bytes for row in plan_by_format(facts, asked, planner)}
    work = QualityWork(scope=Scope(options.tokens, 256), repeats=0).with_text(
        opened.facts.tokenizer, text
    )
    report = quality(
        model, [QualitySetting(options=each) for each in lanes.values()], work, **shared
    )
    prompt = list(work.token_ids[:PROMPT_TOKENS])
    load = Load(prompt, prompt, SamplingParams(max_tokens=options.new, ignore_eos=True))
    speeds = _speeds(model, lanes, load, options.repeats, shared)
    rows = dict(zip(lanes, report.rows, strict=True))
    for (share, name), scored in rows.items():
        own_bytes = weight_bytes[FORMATS[name].get("format", "own")]
        where: Row = {"model": model, "budget_share": share, "weight_bytes": own_bytes}
        mine, exact = speeds[share, name], speeds[share, "own"]
        speed = {"tokens_per_s": median(mine), "each_tokens_per_s": mine}
        over = {"speed_up": median(mine) / median(exact)}
        recorder.write(name, {**where, **_row(scored), **speed, **over})


def _row(scored: Scored) -> Row:
    """Return one lane's row, beside the model as it is stored with everything in memory."""
    assert scored.comparison is not None and scored.passes is not None
    return {
        "budget_bytes": scored.budget_bytes,
        "resident_share": scored.resident_share,
        "read_bytes_per_pass": scored.passes.per_pass("read_bytes"),
        **scored.comparison.as_dict(),
        "of_mask_ratio": {f"{r:g}": c.loss._asdict() for r, c in scored.of_ratio.items()},
    }


def _speeds(
    model: str,
    lanes: Mapping[Lane, Mapping[str, object]],
    load: Load,
    num_rounds: int,
    shared: Mapping[str, Any],
) -> dict[Lane, list[float]]:
    """Committed tokens per second of each lane in each round, loaded again."""
    speeds: dict[Lane, list[float]] = {lane: [] for lane in lanes}
    for _ in range(num_rounds):
        for lane, own in lanes.items():
            told: dict[str, Any] = {**shared, **own}
            with LLM(model, **told) as llm:
                [run] = take_turns(llm, [Preset("auto")], load, 1)
            speeds[lane].append(run.tokens_per_s.median)
    return speeds


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--tokens", type=int, default=2048, help="scored per lane")
    parser.add_argument("--new", type=int, default=64, help="new tokens of a timed answer")
    parser.add_argument("--repeats", type=int, default=5, help="timed answers per lane")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
