"""Gain and cost of each part of Mosaic: the longest sequence at r_p 0.5, part by part.

Cumulative: its manager (one plan for all transients in one arena, results in their inputs' places,
no concatenation; logits of all rows materialised), mask-only logits (those of masked rows,
materialised), chunking (all operators and the head's rows divided as far as it takes), and what the
paper does not have: a head whose logits are reduced where they were computed. All of it is planned,
for published shapes, with all layers' bytes charged against the cap; nothing is run and no weight
is needed. What fusing the head gains in time is measured: the head alone, by turns.

Then, since a CPU has no caching allocator: what (b) and (c), compiled, would make CUDA's reserve,
their allocations replayed by its rules, beside what is alive at most (the paper: 21.8 to 78.3%
more). And lazy against static chunking (the paper's Figure 15: 5.5 to 21.5% less time): operators
divided only where the cap of 24 GB wants it, against the chunk counts of the longest sequence.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from common.arguments import add_parts, make_parser, run_script
from common.masked_shapes import MODELS, MaskedShape, masked_shapes, num_masked, settings_of
from common.memory import MemoryLimit
from common.planned_model import UNDIVIDED, HeadForm, PlannedStep, StepModel
from common.record import Recorder, say
from common.worker import in_process

MEASUREMENTS = ("longest", "head", "reserved", "lazy")
NUM_LAYERS = 2
GIGA = 1_000_000_000
MAX_TOKENS = 1 << 24
TRACED = ("ported", "compiled")
"""Sides of which it is asked what CUDA's allocator would reserve."""

NO_LIMIT = MemoryLimit("none", "a step's memory is measured, not limited")


class Part(NamedTuple):
    """A step with one part of Mosaic more than the one before."""

    name: str
    form: HeadForm
    is_masked_only: bool
    is_divided: bool

    def longest(self, model: StepModel, free_bytes: int, share: float) -> int:
        """The longest sequence that there is a plan for. model: of this form; share: r_p."""
        masked_of = partial(num_masked, prompt_share=share if self.is_masked_only else 0.0)
        find = model.longest if self.is_divided else model.longest_whole
        return find(free_bytes, masked_of, MAX_TOKENS)


PARTS = (
    Part("manager", HeadForm.ALL, is_masked_only=False, is_divided=False),
    Part("mask-only", HeadForm.MASKED, is_masked_only=True, is_divided=False),
    Part("chunking", HeadForm.MASKED, is_masked_only=True, is_divided=True),
    Part("fused head", HeadForm.FUSED, is_masked_only=True, is_divided=True),
)


def main() -> None:
    options = _options()
    settings = {
        "num_layers": NUM_LAYERS,
        "prompt_share": options.share,
        "traced_lengths": options.traced,
        "timed_lengths": options.timed,
        "repeats": options.repeats,
    }
    recorder = Recorder("mosaic_ablation", settings, options.out)
    for shape in masked_shapes(options.models):
        if "longest" in options.parts:
            _ablate(recorder, shape, options)
        if "head" in options.parts:
            _time_head(recorder, shape, options)
        if "reserved" in options.parts:
            for side, num_tokens in product(options.sides, options.traced):
                _reserve(recorder, shape, side, num_tokens)
        if "lazy" in options.parts:
            _time_chunking(recorder, shape, options)


def _ablate(recorder: Recorder, shape: MaskedShape, options: argparse.Namespace) -> None:
    """The longest sequence of every part under each cap."""
    with tempfile.TemporaryDirectory() as folder:
        place = shape.config_alone(NUM_LAYERS, Path(folder))
        models = {form: StepModel(place, form=form) for form in HeadForm}
        for cap in options.caps:
            free_bytes = int(cap * GIGA) - shape.weight_bytes
            longest = {
                part.name: part.longest(models[part.form], free_bytes, options.share)
                for part in PARTS
            }
            fused, most = models[HeadForm.FUSED], longest[PARTS[-1].name]
            values = {
                "model": shape.name,
                "cap_gb": cap,
                "free_bytes": free_bytes,
                "longest": longest,
                "binding": fused.plan(most, num_masked(most, options.share), free_bytes).binding,
            }
            recorder.write("planned parts", values)
            say(f"{shape.name}, {cap:g} GB: {longest}")


def _time_head(recorder: Recorder, shape: MaskedShape, options: argparse.Namespace) -> None:
    """The head alone over masked rows, its logits materialised and not, by turns."""
    folder = shape.folder(NUM_LAYERS)
    models = {form: StepModel(folder, form=form) for form in (HeadForm.MASKED, HeadForm.FUSED)}
    with torch.inference_mode(), models[HeadForm.FUSED].loaded() as engine:
        for num_tokens in options.timed:
            masked = num_masked(num_tokens, options.share)
            heads = {}
            for form, model in models.items():
                step = PlannedStep(engine, model.plan_of(num_tokens, masked, UNDIVIDED), form)
                heads[form.value] = step.head_alone()
            times_s: dict[str, list[float]] = {name: [] for name in heads}
            for turn, (name, run) in product(range(1 + options.repeats), heads.items()):
                start_s = time.perf_counter()
                run()
                if turn:  # the first warms up
                    times_s[name].append(time.perf_counter() - start_s)
            values = {"model": shape.name, "num_tokens": num_tokens, "num_masked": masked}
            recorder.write("head alone", {**values, "times_s": times_s})
            say(f"{shape.name}, {num_tokens} tokens, the head alone: {times_s}")


def _reserve(recorder: Recorder, shape: MaskedShape, side: str, num_tokens: int) -> None:
    """Record the bytes that CUDA's caching allocator would reserve for this side's step."""
    task = {
        "shape": settings_of(shape),
        "side": side,
        "num_layers": NUM_LAYERS,
        "num_tokens": num_tokens,
    }
    row = in_process("masked trace", task, NO_LIMIT, 0)
    values = {"model": shape.name, "side": side, "num_tokens": num_tokens, **row}
    recorder.write("reserved", {**values, "paper": "21.8 to 78.3%"})
    say(
        f"{shape.name}, {side}, {num_tokens} tokens: alive {row['live_bytes'] / 1e6:.0f} MB, "
        f"reserved {row['reserved_bytes'] / 1e6:.0f} MB ({row['inflation']:+.1%}), resident here "
        f"{row['resident_bytes'] / 1e6:.0f} MB"
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
            each_s = {name: [each[name] for each in rounds] for name in steps}
            times_s = {name: statistics.median(seconds) for name, seconds in each_s.items()}
            saved = 1 - times_s["lazy"] / times_s["static"]
            values = {
                "model": shape.name,
                "num_tokens": num_tokens,
                **{f"{name}_s": seconds for name, seconds in times_s.items()},
                **{f"each_{name}_s": seconds for name, seconds in each_s.items()},
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
    parser.add_argument("--traced", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--timed", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--repeats", type=int, default=5, help="steps of each, in turn")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
