"""The longest sequence of LLaDA-8B, Dream-7B and LLaDA-MoE within 24 and 40 GB.

The sides take one denoising step as published, lowtide the same by its plan: (a) the family's
class in transformers, (b) the official forward for a flat batch, (c) that compiled. Models have the
published shapes and two layers; the bytes of all other layers are charged against the cap. Every
measurement has a process of its own. What a step takes grows in a straight line with the sequence:
it is measured at three lengths or more (lowtide's with all operators divided as far as it takes;
glibc gives back at once what any side frees, or what its heaps keep would bend the line), and the
longest sequence is where the line meets the cap. Where that fits in this machine and in
`--max-step` seconds it is run, and each cell says which. r_p is the prompt's share of all tokens;
the published step computes all logits, so only lowtide's depends on it.

The paper's ratios are 32.98 (a), 26.74 (b) and 15.89 (c), over both GPUs, all models and r_p.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from common.arguments import make_parser, run_script
from common.growth import MIN_POINTS, Cell, Growth, StepTime, mean_ratios
from common.masked_memory import OURS
from common.masked_shapes import MODELS, MaskedShape, masked_shapes, num_masked, settings_of
from common.masked_sides import SIDES
from common.memory import MemoryLimit
from common.planned_model import StepModel
from common.record import Recorder, say
from common.worker import in_process

from lowtide.hardware.memory import available_memory_bytes

PAPER = {"transformers": 32.98, "ported": 26.74, "compiled": 15.89}
NUM_LAYERS = 2
MAX_RESIDUAL = 0.01
MAX_RUN_BYTES = 23 << 30
PROCESS_BYTES = 1 << 30
"""What a process holds beside weights and its step: interpreter, libraries, compiled code."""

MAX_TOKENS = 1 << 24
GIGA = 1_000_000_000
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""glibc's: larger buffers are mappings of their own, which end when they are freed."""

NO_LIMIT = MemoryLimit("none", "a step's memory is measured, not limited")


@dataclass
class Line:
    """What one side's step takes, by length."""

    shape: MaskedShape
    side: str
    prompt_share: float
    step_bytes: dict[int, float] = field(default_factory=dict)
    step_s: dict[int, float] = field(default_factory=dict)

    def measure(self, num_tokens: int) -> dict[str, Any]:
        row = in_process("masked step", self._settings(num_tokens), NO_LIMIT, 0, GIVES_BACK)
        self.add(num_tokens, row)
        return row

    def add(self, num_tokens: int, row: Mapping[str, Any]) -> None:
        """What a step was measured to take."""
        self.step_bytes[num_tokens] = row["step_bytes"]
        self.step_s[num_tokens] = row["step_s"]

    @property
    def growth(self) -> Growth:
        return Growth.through(self.step_bytes)

    def can_run(self, num_tokens: int, max_step_s: float) -> bool:
        """Whether one step of so many tokens fits here, by what shorter ones took."""
        needed_bytes = self.growth.at(num_tokens) + self.shape.cut_bytes(NUM_LAYERS)
        free_bytes = min(MAX_RUN_BYTES, available_memory_bytes())
        step_s = StepTime.through(self.step_s).at(num_tokens)
        return needed_bytes + PROCESS_BYTES <= free_bytes and step_s <= max_step_s

    def _settings(self, num_tokens: int) -> dict[str, Any]:
        return {
            "shape": settings_of(self.shape),
            "side": self.side,
            "num_layers": NUM_LAYERS,
            "num_tokens": num_tokens,
            "prompt_share": self.prompt_share,
            "chunks": "most",
        }


def main() -> None:
    options = _options()
    settings = {
        "num_layers": NUM_LAYERS,
        "our_lengths": options.lengths,
        "their_lengths": options.their_lengths,
        "max_step_s": options.max_step,
        "theirs": None if options.theirs is None else options.theirs.name,
    }
    recorder = Recorder("max_context", settings, options.out)
    cells: list[Cell] = []
    for shape in masked_shapes(options.models):
        cells += _cells(recorder, shape, options)
    for side, ratio in mean_ratios(cells).items():
        paper = PAPER[side]
        recorder.write(
            "mean ratio", {"side": side, "ratio": ratio, "paper": paper, "num_cells": len(cells)}
        )
        say(f"lowtide over {side}: {ratio:.2f} times (paper {paper}), {len(cells)} cells")


def _cells(recorder: Recorder, shape: MaskedShape, options: argparse.Namespace) -> list[Cell]:
    """All of one model."""
    shape.folder(NUM_LAYERS)
    known = [] if options.theirs is None else options.theirs.read_text().splitlines()
    theirs = {
        side: _known_line([json.loads(row) for row in known], Line(shape, side, 0.0))
        or _line(recorder, Line(shape, side, 0.0), options.their_lengths)
        for side in options.sides
    }
    caps_bytes = [int(cap * GIGA) for cap in options.caps]
    reached = {
        (side, cap): _reach(recorder, line, cap, options.max_step)
        for side, line in theirs.items()
        for cap in caps_bytes
    }
    model = StepModel(shape.folder(NUM_LAYERS))
    cells = []
    for share in options.shares:
        line = Line(shape, OURS, share)
        if not options.planned:
            _line(recorder, line, options.lengths)
        for cap in caps_bytes:
            planned = model.longest(
                cap - shape.weight_bytes, partial(num_masked, prompt_share=share), MAX_TOKENS
            )
            ours: dict[str, Any] = {"num_tokens": planned // 16 * 16, "how": "planned"}
            if not options.planned:
                ours = _reach(recorder, line, cap, options.max_step)
            others = {side: reached[side, cap] for side in theirs}
            cells.append(Cell(shape.name, cap, share, ours["num_tokens"], _tokens(others)))
            _record(recorder, cells[-1], {OURS: ours, **others}, planned)
    return cells


def _line(recorder: Recorder, line: Line, lengths: Sequence[int]) -> Line:
    """Measured at all of these lengths, and recorded."""
    for num_tokens in lengths:
        row = line.measure(num_tokens)
        recorder.write("step", {**_names(line), "num_tokens": num_tokens, **row})
    growth = line.growth
    is_straight = growth.residual <= MAX_RESIDUAL
    recorder.write("growth", {**_names(line), **growth._asdict(), "is_straight": is_straight})
    say(
        f"{line.shape.name}, {line.side}: {growth.slope:.0f} bytes per token, residual "
        f"{growth.residual:.2%}{'' if is_straight else ' (NOT a straight line)'}"
    )
    return line


def _known_line(rows: Sequence[Mapping[str, Any]], line: Line) -> Line | None:
    """As an earlier run has measured it; None where it has not."""
    names = {"what": "step", **_names(line)}
    for row in rows:
        if names.items() <= row.items():
            line.add(row["num_tokens"], row)
    return line if len(line.step_bytes) >= MIN_POINTS else None


def _reach(recorder: Recorder, line: Line, cap_bytes: int, max_step_s: float) -> dict[str, Any]:
    """The longest sequence under a cap, and how that is known."""
    free_bytes = cap_bytes - line.shape.weight_bytes
    num_tokens = line.growth.longest(free_bytes) // 16 * 16
    reached = {"num_tokens": num_tokens, "how": "extrapolated"}
    if num_tokens and line.can_run(num_tokens, max_step_s):
        row = Line(line.shape, line.side, line.prompt_share).measure(num_tokens)
        reached |= {"how": "run", "over_cap": row["step_bytes"] / free_bytes}
        recorder.write("longest step", {**_names(line), "cap_bytes": cap_bytes, **reached, **row})
    return reached


def _record(
    recorder: Recorder, cell: Cell, reached: Mapping[str, Mapping[str, Any]], planned_tokens: int
) -> None:
    values: dict[str, object] = {
        "model": cell.model,
        "cap_bytes": cell.cap_bytes,
        "prompt_share": cell.prompt_share,
        "planned_tokens": planned_tokens,
    }
    for side, found in reached.items():
        values |= {f"{side}_{name}": value for name, value in found.items()}
    values |= {f"over_{side}": ratio for side, ratio in cell.ratios.items()}
    recorder.write("cell", values)
    parts = [
        f"{side} {tokens} ({reached[side]['how']}, {cell.ratios[side]:.1f} times)"
        for side, tokens in cell.theirs_tokens.items()
    ]
    say(
        f"{cell.model}, {cell.cap_bytes / GIGA:g} GB, r_p {cell.prompt_share}: lowtide "
        f"{cell.ours_tokens} ({reached[OURS]['how']}; planned {planned_tokens}), "
        + ", ".join(parts)
    )


def _tokens(reached: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    return {side: max(1, found["num_tokens"]) for side, found in reached.items()}


def _names(line: Line) -> dict[str, object]:
    names: dict[str, object] = {"model": line.shape.name, "side": line.side}
    return names | ({"prompt_share": line.prompt_share} if line.side == OURS else {})


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="which")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--caps", type=float, nargs="+", default=[24.0, 40.0], help="in GB")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.5, 0.9], help="r_p")
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=[4096, 8192, 16384],
        help="of lowtide's",
    )
    parser.add_argument("--their-lengths", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument(
        "--planned", action="store_true", help="lowtide's longest sequences by plan, not measured"
    )
    parser.add_argument(
        "--theirs", type=Path, help="the other sides' steps are those of this file of JSON lines"
    )
    parser.add_argument(
        "--max-step", type=float, default=120.0, help="seconds of a step that is run"
    )
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
