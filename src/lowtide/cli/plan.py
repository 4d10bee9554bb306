"""`lowtide plan`: show the memory table before any weight is read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group as Lines
from rich.text import Text

from lowtide.cli.command import takes
from lowtide.cli.generate import ModelName
from lowtide.cli.opening import Planned, make_plan
from lowtide.cli.options import Settings
from lowtide.cli.outlook import context_note, outlook, per_second, verdict
from lowtide.cli.passes import passes_object, passes_table
from lowtide.cli.report import json_line, plan_object, plan_table
from lowtide.cli.screen import number_table, stdout_console
from lowtide.config import format_size
from lowtide.errors import UnsupportedError
from lowtide.option import Group
from lowtide.plan import FormatPlan, MemoryPlan, faster_format

if TYPE_CHECKING:
    from lowtide.engine.planning.passes import PlannedPasses

PROMPTS = {
    True: "prompts of generate and chat go through the model's chat template (--raw: as they are)",
    False: "no chat template: prompts are continued as they are",
}

_FORMATS_NOTE = (
    "--format q8 and q4 round weights and can change answers: lowtide quality measures by how "
    "much, lowtide pack rounds safetensors once and saves the result"
)


@takes(
    Group.ENGINE,
    Group.HUB,
    "plot",
    Group.OUTPUT,
    help_texts={"plot": "Draw the memory of passes into this file (LLaDA, LLaDA-MoE, Dream)."},
)
def plan(model: ModelName, *, settings: Settings) -> None:
    """Show the memory that a model needs and would get here, and why."""
    picture = settings.text("plot")
    with redirect_stdout(sys.stderr):
        if picture is not None:
            from lowtide.cli.plotting import check_plot

            check_plot(Path(picture))
        planned = make_plan(model, settings)
        if picture is not None:
            _draw(planned.passes, model, Path(picture))
    if settings.flag("json"):
        faster = faster_format(planned.by_format, planned.memory.formats)
        told: dict[str, object] = {
            "chat_template": planned.has_chat_template,
            "max_positions": planned.config.max_positions,
            "by_format": [format_object(row) for row in planned.by_format],
            "faster_format": None if faster is None else faster.format,
        }
        if planned.passes is not None:
            told["passes"] = passes_object(planned.passes)
        print(json_line({**plan_object(planned.memory), **told}))
    else:
        _print(planned, model)


def _print(planned: Planned, model: str) -> None:
    console = stdout_console()
    console.print(verdict(planned.memory, planned.by_format))
    console.print(plan_table(planned.memory))
    console.print(outlook(planned.memory))
    if note := context_note(planned.memory, planned.config):
        console.print(note)
    if planned.passes is not None:
        console.print(passes_table(planned.passes, model))
    console.print(formats_table(planned.by_format, planned.memory))
    if planned.has_chat_template is not None:
        console.print(PROMPTS[planned.has_chat_template])


def _draw(passes: PlannedPasses | None, model: str, path: Path) -> None:
    if passes is None:
        raise UnsupportedError(
            "--plot draws the passes of bidirectional models (LLaDA, LLaDA-MoE, Dream), whose "
            "memory depends on the context; leave it out for this one."
        )
    from lowtide.cli.passes_picture import draw

    draw(passes, model, path)


def formats_table(rows: Sequence[FormatPlan], plan: MemoryPlan) -> Lines:
    """Make a table of formats: their bytes, share of resident experts (if any) and speed."""
    columns: dict[str, Callable[[FormatPlan], str]] = {
        "format": lambda row: row.format,
        "weights": lambda row: format_size(row.weight_bytes),
        "experts resident" if plan.num_experts else "fits": _share if plan.num_experts else _fits,
        "expected tokens/s": _speed,
    }
    table = number_table("by format", list(columns), left=["format"])
    for row in rows:
        table.add_row(*[cell(row) for cell in columns.values()])
    return Lines(table, Text(_FORMATS_NOTE)) if len(rows) > 1 else Lines(table)


def format_object(row: FormatPlan) -> dict[str, object]:
    """Return a format's row for `--json`."""
    told = asdict(row)
    del told["speed"], told["at_most"]
    speeds = {"tokens_per_s": row.speed and row.speed._asdict()}
    return told | speeds | {"at_most_tokens_per_s": row.at_most}


def _fits(row: FormatPlan) -> str:
    return "no" if row.resident_share is None else "yes"


def _share(row: FormatPlan) -> str:
    return "does not fit" if row.resident_share is None else f"{row.resident_share:.0%}"


def _speed(row: FormatPlan) -> str:
    if row.resident_share is None:
        return "-"
    if row.speed is not None:
        return per_second(row.speed.likely)
    return "unknown" if row.at_most is None else f"at most {per_second(row.at_most)}"
