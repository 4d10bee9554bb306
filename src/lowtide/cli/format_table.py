"""Table of weight formats at the end of a plan: size, fit and speed of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

from rich.console import Group
from rich.text import Text

from lowtide.cli.outlook import per_second
from lowtide.cli.screen import number_table
from lowtide.config import format_size
from lowtide.plan import FormatPlan, MemoryPlan

_NOTE = (
    "--format q8 and q4 round weights and can change answers: lowtide quality measures by how "
    "much, lowtide pack rounds safetensors once and saves the result"
)


def formats_table(rows: Sequence[FormatPlan], plan: MemoryPlan) -> Group:
    """Make a table of weight bytes, share of resident experts (if any) and expected speed."""
    columns: dict[str, Callable[[FormatPlan], str]] = {
        "format": lambda row: row.format,
        "weights": lambda row: format_size(row.weight_bytes),
        "experts resident" if plan.num_experts else "fits": _share if plan.num_experts else _fits,
        "expected tokens/s": _speed,
    }
    table = number_table("by format", list(columns), left=["format"])
    for row in rows:
        table.add_row(*[cell(row) for cell in columns.values()])
    return Group(table, Text(_NOTE)) if len(rows) > 1 else Group(table)


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
