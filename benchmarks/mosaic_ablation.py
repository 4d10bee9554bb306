"""What each part of Mosaic gives: the longest sequence at r_p 0.5, part by part, and what it costs.

Cumulative, from the official forward in torch's own allocator (b): its manager (one plan for all
transients in one arena, results in their inputs' places, no concatenation; logits of all rows
materialised), mask-only logits (those of masked rows, materialised), chunking (all operators and
the head's rows divided as far as it takes), and what the paper does not have: a head whose logits
are reduced where they were computed. Published shapes, two layers, the other layers' bytes charged
against the cap; each measured at three lengths and continued in a straight line.

Then, since a CPU has no caching allocator: what (b) and (c), compiled, would make CUDA's reserve,
their allocations replayed by its rules, beside what is alive at most (the paper: 21.8 to 78.3%
more). And lazy against static chunking (the paper's Figure 15: 5.5 to 21.5% less time): operators
divided only where the cap of 24 GB wants it, against the chunk counts of the longest sequence.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from itertools import product
from typing import Any, NamedTuple

import torch
from common.arguments import add_parts, make_parser, run_script
from common.growth import Growth
from common.masked_memory import OURS
from common.masked_shapes import MODELS, MaskedShape, masked_shapes, num_masked, settings_of
from common.memory import MemoryLimit
from common.planned_model import HeadForm, PlannedStep, StepModel
from common.record import Recorder, say
from common.worker import in_process

MEASUREMENTS = ("longest", "reserved", "lazy")
NUM_LAYERS = 2
GIGA = 1_000_000_000
MAX_TOKENS = 1 << 24
TRACED = ("ported", "compiled")
"""Sides of which it is asked what CUDA's allocator would reserve."""

UNDIVIDED = {"mlp": 1, "experts": 1, "attention": 1, "logits": 1}
NO_LIMIT = MemoryLimit("none", "a step's memory is measured, not limited")


class Part(NamedTuple):
    """A step with one part of Mosaic more than the one before."""

    name: str
    form: HeadForm
    is_masked_only: bool
    chunks: str | Mapping[str, int]
    paper: str  # what the part adds to the longest sequence there


PARTS = (
    Part("manager", HeadForm.ALL, False, UNDIVIDED, "+79 to 197%"),
    Part("mask-only", HeadForm.MASKED, True, UNDIVIDED, "+89 to 114%"),
    Part("chunking", HeadForm.MASKED, True, "most", "+221 to 673%"),
    Part("fused reduction", HeadForm.FUSED, True, "most", "none"),
)


def main() -> None:
    options = _options()
    settings = {
        "num_layers": NUM_LAYERS,
        "prompt_share": options.share,
        "lengths": options.lengths,
        "traced_lengths": options.traced,
        "timed_lengths": options.timed,
        "repeats": options.repeats,
    }
    recorder = Recorder("mosaic_ablation", settings, options.out)
    for shape in masked_shapes(options.models):
        shape.folder(NUM_LAYERS)
        if "longest" in options.parts:
            _ablate(recorder, shape, options)
        if "reserved" in options.parts:
            for side, num_tokens in product(options.sides, options.traced):
                _reserve(recorder, shape, side, num_tokens)
        if "lazy" in options.parts:
            _time_chunking(recorder, shape, options)


def _ablate(recorder: Recorder, shape: MaskedShape, options: argparse.Namespace) -> None:
    """Growth of (b) and of every part, and the longest sequences under each cap."""
    growths = {"ported": _growth(recorder, shape, "ported", {"side": "ported"}, options.lengths)}
    for part in PARTS:
        task = {
            "side": OURS,
            "prompt_share": options.share if part.is_masked_only else 0.0,
            "form": part.form.value,
            "chunks": part.chunks,
        }
        growths[part.name] = _growth(recorder, shape, part.name, task, options.lengths)
    papers = {part.name: part.paper for part in PARTS}
    for cap in options.caps:
        free_bytes = int(cap * GIGA) - shape.weight_bytes
        longest = {name: growth.longest(free_bytes) for name, growth in growths.items()}
        before = longest["ported"]
        said = [f"(b) {before}"]
        for name, num_tokens in longest.items():
            gain = num_tokens / max(1, before) - 1
            values = {
                "model": shape.name,
                "cap_gb": cap,
                "part": name,
                "num_tokens": num_tokens,
                "gain": gain,
                "paper": papers.get(name),
            }
            recorder.write("part", values)
            if name in papers:
                said.append(f"{name} {num_tokens} ({gain:+.0%}; paper {papers[name]})")
            before = num_tokens
        say(f"{shape.name}, {cap:g} GB: " + ", ".join(said))


def _growth(
    recorder: Recorder,
    shape: MaskedShape,
    name: str,
    task: Mapping[str, Any],
    lengths: list[int],
) -> Growth:
    step_bytes: dict[int, float] = {}
    for num_tokens in lengths:
        settings = {
            "shape": settings_of(shape),
            "num_layers": NUM_LAYERS,
            "num_tokens": num_tokens,
            **task,
        }
        row = in_process("masked step", settings, NO_LIMIT, 0)
        recorder.write("step", {"model": shape.name, "part": name, "num_tokens": num_tokens, **row})
        step_bytes[num_tokens] = row["step_bytes"]
    growth = Growth.through(step_bytes)
    recorder.write("growth", {"model": shape.name, "part": name, **growth._asdict()})
    return growth


def _reserve(recorder: Recorder, shape: MaskedShape, side: str, num_tokens: int) -> None:
    """What CUDA's caching allocator would reserve for this side's step."""
    task = {
        "shape": settings_of(shape),
        "side": side,
        "num_layers": NUM_LAYERS,
        "num_tokens": num_tokens,
    }
    row = in_process("masked trace", task, NO_LIMIT, 0)
    resident = in_process("masked step", task, NO_LIMIT, 0)["step_bytes"]
    values = {"model": shape.name, "side": side, "num_tokens": num_tokens, **row}
    recorder.write("reserved", {**values, "resident_bytes": resident, "paper": "21.8 to 78.3%"})
    say(
        f"{shape.name}, {side}, {num_tokens} tokens: alive {row['live_bytes'] / 1e6:.0f} MB, "
        f"reserved {row['reserved_bytes'] / 1e6:.0f} MB ({row['inflation']:+.1%}), resident here "
        f"{resident / 1e6:.0f} MB"
    )


def _time_chunking(recorder: Recorder, shape: MaskedShape, options: argparse.Namespace) -> None:
    """Steps divided lazily and statically, in turn."""
    model, share = StepModel(shape.folder(NUM_LAYERS)), options.share
    free_bytes = int(min(options.caps) * GIGA) - shape.weight_bytes
    longest = model.longest(free_bytes, lambda n: num_masked(n, share), MAX_TOKENS)
    static = model.plan(longest, num_masked(longest, share), free_bytes).chunks
    with torch.inference_mode(), model.loaded() as engine:
        for num_tokens in options.timed:
            masked = num_masked(num_tokens, share)
            plans = {
                "lazy": model.plan(num_tokens, masked, free_bytes),
                "static": model.plan_of(num_tokens, masked, static),
            }
            steps = {name: PlannedStep(engine, plan, model.form) for name, plan in plans.items()}
            rounds = [
                {name: step.seconds() for name, step in steps.items()}
                for _ in range(1 + options.repeats)
            ][1:]
            times_s = {name: statistics.median(each[name] for each in rounds) for name in steps}
            saved = 1 - times_s["lazy"] / times_s["static"]
            values = {
                "model": shape.name,
                "num_tokens": num_tokens,
                **{f"{name}_s": seconds for name, seconds in times_s.items()},
                **{f"{name}_chunks": dict(plan.chunks) for name, plan in plans.items()},
                "saved": saved,
                "paper": "5.5 to 21.5%",
            }
            recorder.write("lazy over static", values)
            say(f"{shape.name}, {num_tokens} tokens: lazy chunking saves {saved:.1%} of static's")


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add_parts(parser, MEASUREMENTS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="which")
    parser.add_argument("--sides", nargs="+", choices=TRACED, default=list(TRACED))
    parser.add_argument("--share", type=float, default=0.5, help="r_p")
    parser.add_argument("--caps", type=float, nargs="+", default=[24.0, 40.0], help="in GB")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--traced", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--timed", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--repeats", type=int, default=5, help="steps of each, in turn")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
