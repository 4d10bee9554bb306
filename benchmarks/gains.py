"""Gain of each of the four papers here: switched off, then on, all else alike.

TIDE: residents that are refreshed at an interval beside those that are chosen once. DALI: its
greedy assignment beside one that fetches every absent expert. Mosaic: the longest sequence whose
step fits, by its plans, beside whole logits and undivided operators. BuddyMoE: absent experts that
are replaced beside those that are waited for. The demo models run beside an emulated device, or
from disk; TIDE and DALI once more with SmolLM2's weights, whose MLPs are split into experts.
"""

from __future__ import annotations

import argparse
import runpy
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from common.arguments import add_parts, make_parser, run_script
from common.masked_shapes import NARROW, num_masked
from common.planned_model import HeadForm, StepModel
from common.record import Recorder, say
from common.texts import text_for, token_ids

from lowtide import LLM, SamplingParams
from lowtide.lab.calibrate import calibrate
from lowtide.llm import plan_model
from lowtide.policies.assignment import AllFetch
from lowtide.policies.catalogue import CATALOGUE

PARTS = ("TIDE", "DALI", "Mosaic", "BuddyMoE", "SmolLM2")
DIFFUSION, AUTOREGRESSIVE = "demo:diffusion", "demo:autoregressive"
PROMPTS = tuple(f"Sort {a} {b} {a + b} {abs(a - b)}" for a, b in ((93, 21), (40, 12), (7, 66)))
REAL_WEIGHTS = Path(__file__).parents[1] / "tools" / "real_weights.py"
CONTEXT = 512
OWN_TAU = 4
"""The preset's own interval."""

NEVER = 999_999
"""TIDE's interval in steps that no answer has."""

MAX_LENGTH = 1 << 22


@dataclass(frozen=True)
class Side:
    """A setting with one paper's method, or without it."""

    model: str
    command: str
    options: Mapping[str, Any]


def main() -> None:
    options = _options()
    settings = {
        "share": options.share,
        "num_tokens": options.tokens,
        "num_prompts": len(PROMPTS),
        "repeats": options.repeats,
    }
    recorder = Recorder("gains", settings, options.out)
    if "TIDE" in options.parts:
        _compare(recorder, "TIDE", _tide(DIFFUSION, options), options)
    if "DALI" in options.parts:
        _compare(recorder, "DALI", _dali(AUTOREGRESSIVE, options), options)
    if "SmolLM2" in options.parts:
        model = str(runpy.run_path(str(REAL_WEIGHTS))["forms"]()["paired"])
        _compare(recorder, "TIDE", _tide(model, options), options)
        _compare(recorder, "DALI", _dali(model, options), options)
    if "BuddyMoE" in options.parts:
        with tempfile.TemporaryDirectory() as folder:
            _compare(recorder, "BuddyMoE", _buddymoe(options, Path(folder)), options)
    if "Mosaic" in options.parts:
        _lengths(recorder, options)


def _tide(model: str, options: argparse.Namespace) -> tuple[Side, Side]:
    given = _beside_device(model, options.share)

    def side(tau: int) -> Side:
        command = f"--device emulated --policy tide --policy-option tau={tau}"
        return Side(model, command, {**given, "policy": "tide", "policy_options": {"tau": tau}})

    return side(NEVER), side(OWN_TAU)


def _dali(model: str, options: argparse.Namespace) -> tuple[Side, Side]:
    given, dali = _beside_device(model, options.share), CATALOGUE["dali"]
    fetching = replace(dali, assignment=lambda s: AllFetch())
    return (
        Side(model, "dali, AllFetch() as its assignment", {**given, "policy": fetching}),
        Side(model, "--device emulated --policy dali", {**given, "policy": "dali"}),
    )


def _buddymoe(options: argparse.Namespace, folder: Path) -> tuple[Side, Side]:
    path = folder / "calibration.npz"
    with LLM(AUTOREGRESSIVE, device="cpu") as llm:
        ids = token_ids(llm, text_for(AUTOREGRESSIVE))
        calibrate(llm, ids, AUTOREGRESSIVE, num_pieces=8, buddies=True).save(path)
    plan = plan_model(AUTOREGRESSIVE, device="cpu", context=CONTEXT)
    given = {"device": "cpu", "host_memory": _between(plan, options.share)}
    given |= {"policy": "buddymoe", "calibration": str(path)}

    def side(miss: str) -> Side:
        command = f"--policy buddymoe --policy-option miss={miss}"
        return Side(AUTOREGRESSIVE, command, {**given, "policy_options": {"miss": miss}})

    return side("wait"), side("buddy")


def _beside_device(model: str, share: float) -> dict[str, Any]:
    plan = plan_model(model, device="emulated", context=CONTEXT)
    return {"device": "emulated", "gpu_memory": _between(plan, share)}


def _between(plan: Any, share: float) -> int:
    """The least budget and a share of what everything needs beyond it."""
    return int(plan.minimum_bytes + share * (plan.full_bytes - plan.minimum_bytes))


def _compare(
    recorder: Recorder, paper: str, sides: tuple[Side, Side], options: argparse.Namespace
) -> None:
    """Both sides in turns; the words of the second beside the first's."""
    runs: list[list[dict[str, Any]]] = [[], []]
    for _ in range(options.repeats):
        for one, side in zip(runs, sides, strict=True):
            one.append(_run(side, options.tokens))
    for name, side, of_side in zip(("off", "on"), sides, runs, strict=True):
        rates = [one["tokens_per_s"] for one in of_side]
        values = {
            "paper": paper,
            "side": name,
            "model": side.model if side.model.startswith("demo:") else Path(side.model).name,
            **of_side[-1],
            "tokens_per_s": statistics.median(rates),
            "each_tokens_per_s": rates,
            "are_words_changed": of_side[-1]["ids"] != runs[0][-1]["ids"],
            "command": side.command,
        }
        del values["ids"]
        recorder.write("side", values)
        say(f"{paper}, {name}: {statistics.median(rates):.1f} tokens/s")


def _run(side: Side, num_tokens: int) -> dict[str, Any]:
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    with LLM(side.model, context=CONTEXT, **side.options) as llm:
        llm.generate(list(PROMPTS[:1]), params)  # residents settle
        before, start_s = llm.stats(), time.perf_counter()
        found = llm.generate(list(PROMPTS), params)
        seconds, after = time.perf_counter() - start_s, llm.stats()
    used = {name: after[name] - before.get(name, 0) for name in after}
    num_activated = used["num_hits"] + used["num_misses"]
    return {
        "ids": [one.token_ids for one in found],
        "tokens_per_s": sum(len(one.token_ids) for one in found) / seconds,
        "hit_rate": used["num_hits"] / num_activated if num_activated else 1.0,
        "link_bytes": used.get("link_bytes", 0),
        "read_bytes": used["read_bytes"],
    }


def _lengths(recorder: Recorder, options: argparse.Namespace) -> None:
    """Longest sequences of a narrow LLaDA, half of them prompt, by plans of both kinds."""
    folder, masked_of = NARROW.folder(2), partial(num_masked, prompt_share=0.5)
    free_bytes = options.free_MB * 10**6
    whole = StepModel(folder, form=HeadForm.ALL).longest_whole(free_bytes, masked_of, MAX_LENGTH)
    planned = StepModel(folder).longest(free_bytes, masked_of, MAX_LENGTH)
    for name, num_tokens in (("off", whole), ("on", planned)):
        values = {
            "paper": "Mosaic",
            "side": name,
            "model": NARROW.name,
            "free_bytes": free_bytes,
            "longest_tokens": num_tokens,
            "are_words_changed": False,
            "command": f"benchmarks/gains.py --parts Mosaic --free-MB {options.free_MB}",
        }
        recorder.write("side", values)
        say(f"Mosaic, {name}: {num_tokens} tokens")


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add_parts(parser, PARTS)
    parser.add_argument("--share", type=float, default=0.3, help="of the memory for all experts")
    parser.add_argument("--tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--repeats", type=int, default=3, help="turns of both sides")
    parser.add_argument("--free-MB", type=int, default=1000, help="for a step of Mosaic's")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
