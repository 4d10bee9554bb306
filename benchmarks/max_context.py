"""Longest sequence of LLaDA-8B, Dream-7B and LLaDA-MoE within 24 and 40 GB, and a run of one.

The sides take one denoising step as published, lowtide the same by its plan: (a) the family's class
in transformers, (b) the official forward for a flat batch, (c) that compiled, sampling included.
Every side's line, and every step that is run, has a process of its own.

Caps: models have the published shapes and two layers; the bytes of all other layers are charged
against the cap. The other sides' memory grows in a straight line with the sequence: it is measured
at three lengths or more (glibc returns freed memory at once, since heaps that keep it would bend
the line), and the longest sequence is where the line meets the cap. lowtide's is the longest that
there is a plan for. The published step computes all logits, so only lowtide's depends on r_p, the
prompt's share of all tokens.

Run: a narrow LLaDA is taken through a step of a length that its lines and plans were not measured
at, on every side, and held against them.

The paper's ratios are 32.98 (a), 26.74 (b) and 15.89 (c), over both GPUs, all models and r_p.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from common.arguments import add_parts, make_parser, run_script
from common.growth import Growth
from common.masked_memory import OURS
from common.masked_shapes import (
    MODELS,
    NARROW,
    MaskedShape,
    masked_shapes,
    num_masked,
    settings_of,
)
from common.masked_sides import SIDES
from common.memory import MemoryLimit
from common.planned_model import StepModel
from common.record import Recorder, say
from common.worker import in_process

PARTS = ("caps", "run")
NUM_LAYERS = 2
MAX_RESIDUAL = 0.01
MAX_TOKENS = 1 << 24
GIGA = 1_000_000_000
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""glibc's: larger buffers are mappings of their own, which end when they are freed."""

NO_LIMIT = MemoryLimit("none", "a step's memory is measured, not limited")


@dataclass
class Line:
    """Memory of another side's step, by length."""

    shape: MaskedShape
    side: str
    step_bytes: dict[int, float] = field(default_factory=dict)

    def measure(self, lengths: Sequence[int]) -> list[dict[str, Any]]:
        """One step of each length, in one process: it reads and compiles but once."""
        task = {**_task(self.shape), "side": self.side, "lengths": lengths}
        steps: list[dict[str, Any]] = in_process("side steps", task, NO_LIMIT, 0, GIVES_BACK)[
            "steps"
        ]
        return steps

    @property
    def growth(self) -> Growth:
        return Growth.through(self.step_bytes)


def main() -> None:
    options = _options()
    settings = {
        "num_layers": NUM_LAYERS,
        "prompt_share": options.share,
        "their_lengths": options.their_lengths,
        "run_tokens": options.run,
    }
    recorder = Recorder("max_context", settings, options.out)
    if "caps" in options.parts:
        for shape in masked_shapes(options.models):
            _reach(recorder, shape, options)
    if "run" in options.parts:
        _run(recorder, options)


def _reach(recorder: Recorder, shape: MaskedShape, options: argparse.Namespace) -> None:
    """The longest sequences of one model under every cap, by lines and by plans."""
    folder = shape.folder(NUM_LAYERS)
    lines = _lines(recorder, shape, options)
    masked_of = partial(num_masked, prompt_share=options.share)
    model = StepModel(folder)
    for cap in options.caps:
        free_bytes = int(cap * GIGA) - shape.weight_bytes
        planned = model.longest(free_bytes, masked_of, MAX_TOKENS)
        values: dict[str, object] = {
            "model": shape.name,
            "cap_bytes": int(cap * GIGA),
            "prompt_share": options.share,
            "planned_tokens": planned,
        }
        for line in lines:
            num_tokens = max(1, line.growth.longest(free_bytes))
            values[f"{line.side}_num_tokens"] = num_tokens
            values[f"over_{line.side}"] = planned / num_tokens
        recorder.write("cell", values)
        say(f"{shape.name}, {cap:g} GB: {values}")


def _run(recorder: Recorder, options: argparse.Namespace) -> None:
    """One step of the narrow model on each side, beside what its line, or plan, says of it."""
    NARROW.folder(NUM_LAYERS)
    for line in _lines(recorder, NARROW, options):
        [row] = line.measure([options.run])
        _hold(recorder, line.side, options.run, row, line.growth.at(options.run))
    row = _planned_step(NARROW, options.run, options.share)
    _hold(recorder, OURS, options.run, row, row["planned_bytes"])


def _planned_step(shape: MaskedShape, num_tokens: int, prompt_share: float) -> dict[str, Any]:
    """lowtide's, divided as far as it goes; prompt_share: the others compute all logits."""
    planned = {"num_tokens": num_tokens, "prompt_share": prompt_share, "chunks": "most"}
    return in_process("masked step", {**_task(shape), **planned}, NO_LIMIT, 0, GIVES_BACK)


def _task(shape: MaskedShape) -> dict[str, Any]:
    return {"shape": settings_of(shape), "num_layers": NUM_LAYERS}


def _hold(
    recorder: Recorder, side: str, num_tokens: int, row: dict[str, Any], expected_bytes: float
) -> None:
    off = row["step_bytes"] / expected_bytes - 1
    names = {"model": NARROW.name, "side": side, "num_tokens": num_tokens}
    recorder.write("run", {**names, **row, "expected_bytes": expected_bytes, "off": off})
    say(
        f"{NARROW.name}, {num_tokens} tokens, {side}: {row['step_bytes'] / 1e6:.0f} MB, "
        f"{off:+.2%} of what was expected, {row['step_s']:.1f} s"
    )


def _lines(recorder: Recorder, shape: MaskedShape, options: argparse.Namespace) -> list[Line]:
    """The other sides', measured and recorded."""
    return [_line(recorder, Line(shape, side), options.their_lengths) for side in options.sides]


def _line(recorder: Recorder, line: Line, lengths: Sequence[int]) -> Line:
    names: dict[str, object] = {"model": line.shape.name, "side": line.side}
    for num_tokens, row in zip(lengths, line.measure(lengths), strict=True):
        line.step_bytes[num_tokens] = row["step_bytes"]
        recorder.write("step", {**names, "num_tokens": num_tokens, **row})
    growth = line.growth
    is_straight = growth.residual <= MAX_RESIDUAL
    recorder.write("growth", {**names, **growth._asdict(), "is_straight": is_straight})
    say(
        f"{line.shape.name}, {line.side}: {growth.slope:.0f} bytes per token, residual "
        f"{growth.residual:.2%}{'' if is_straight else ' (NOT a straight line)'}"
    )
    return line


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add_parts(parser, PARTS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="which")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--caps", type=float, nargs="+", default=[24.0, 40.0], help="in GB")
    parser.add_argument("--share", type=float, default=0.5, help="r_p")
    parser.add_argument("--their-lengths", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--run", type=int, default=16384, help="tokens of the step that is run")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
