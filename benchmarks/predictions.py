"""The speed that a loaded model predicts beside that of its run: models, budgets, formats.

What is kept of the models is forgotten first. Each case is then loaded `--runs` times, each time
with another prompt: the first prediction is by what loading measured (and, from a model's second
case on, by runs of others), the next ones by the case's own last run, too. The ceiling of a factor
is 1: what was predicted came true. A line for each run, then one over all of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

from common.arguments import make_parser, run_script
from common.models import model_folder
from common.record import Recorder, Row, say

from lowtide import LLM, SamplingParams
from lowtide.errors import UnsupportedError
from lowtide.files import folders
from lowtide.lab.budgets import budget_of_share
from lowtide.llm import plan_model
from lowtide.plan import OWN_FORMAT

MODELS = ("demo:autoregressive", "demo:diffusion", "qwen3_moe", "olmoe", "llada2", "gpt_oss")
SHARES = (1.0, 0.5, 0.0)
"""Shares of the experts in memory; the demos run with all of them alone."""

WITHIN = 1.4
"""The factor between what was likely and what was measured that nine of ten runs are to keep."""


class Case(NamedTuple):
    model: str
    folder: str
    share: float
    format: str


def main() -> None:
    given = _options()
    settings = {name: value for name, value in vars(given).items() if name != "out"}
    recorder = Recorder("predictions", settings, given.out)
    folders_of = {name: _folder(name) for name in given.models}
    _forget([Path(folder).resolve() for folder in folders_of.values()])
    rows = []
    for case in _cases(folders_of, given.formats):
        for number in range(given.runs):
            say(f"{case.model}, {case.share:.0%} of the experts, {case.format}, run {number + 1}")
            try:
                row = _run(case, number, given.new)
            except UnsupportedError as error:  # a file that is rounded already has no q4
                say(f"  left out: {error}")
                break
            if row is not None:
                rows.append(recorder.write("prediction", row))
    recorder.write("all predictions", _summary(rows))


def _cases(folders_of: dict[str, str], formats: list[str]) -> Iterator[Case]:
    for model, folder in folders_of.items():
        for name in formats:
            for share in SHARES if not model.startswith("demo:") else SHARES[:1]:
                yield Case(model, folder, share, name)


def _run(case: Case, number: int, num_new: int) -> Row | None:
    """None where the load was disturbed, so that it predicts nothing."""
    options = {"device": "cpu", "context": 256, "format": case.format, "progress": False}
    plan = plan_model(case.folder, **{k: v for k, v in options.items() if k != "progress"})
    budget = plan.full_bytes if case.share == 1.0 else budget_of_share(plan, case.share)
    with LLM(case.folder, host_memory=budget, **options) as llm:  # type: ignore[arg-type]
        speed = llm.plan.prediction and llm.plan.prediction.speed
        if speed is None:
            say("  nothing is predicted: the machine was not quiet as the model was loaded")
            return None
        drawn = Random(number)
        prompt = drawn.choices(range(3, min(4096, llm.config.vocab_size)), k=20)
        params = SamplingParams(max_tokens=num_new, ignore_eos=True, temperature=0.0)
        llm.generate([prompt], params, progress=False)
        measured = llm.stats()["tokens_per_s"]
    factor = max(measured / speed.likely, speed.likely / measured)
    return {
        "model": case.model,
        "share": case.share,
        "format": case.format,
        "run": number + 1,
        "least_tokens_per_s": speed.least,
        "likely_tokens_per_s": speed.likely,
        "most_tokens_per_s": speed.most,
        "measured_tokens_per_s": measured,
        "factor": factor,
        "is_within": factor <= WITHIN,
        "width": speed.most / speed.least,
    }


def _summary(rows: list[Row]) -> Row:
    first = [row for row in rows if row["run"] == 1]
    later = [row for row in rows if row["run"] != 1]
    return {
        "num_runs": len(rows),
        "num_within": sum(bool(row["is_within"]) for row in rows),
        "num_first": len(first),
        "num_first_within": sum(bool(row["is_within"]) for row in first),
        "num_later": len(later),
        "num_later_within": sum(bool(row["is_within"]) for row in later),
        "largest_factor": max((float(str(row["factor"])) for row in rows), default=0.0),
        "widest": max((float(str(row["width"])) for row in rows), default=0.0),
    }


def _folder(name: str) -> str:
    return name if name.startswith("demo:") else str(model_folder(None, "small", name))


def _forget(models: list[Path]) -> None:
    """Delete what is kept of the speed of these models, and of demos."""
    for path in (folders.cache_folder() / "speeds").glob("*.json"):
        of = Path(json.loads(path.read_text(encoding="utf-8"))["of"]["model"])
        if of in models or of.parent.name == "demo":
            path.unlink()


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--formats", nargs="+", default=[OWN_FORMAT, "q4"], help="of weights")
    parser.add_argument("--new", type=int, default=200, help="tokens of an answer")
    parser.add_argument("--runs", type=int, default=3, help="loads of each case")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
