"""What each format of weights would give here: the table at a plan's end, and its first line."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lowtide.config import format_size
from lowtide.plan import FormatPlan, MemoryPlan, faster_format

_NOTE = (
    "--format q8 and q4 round weights as they are read (lowtide pack: once, of "
    "safetensors) and may change answers: lowtide quality says by how much"
)


def formats_table(rows: Sequence[FormatPlan], plan: MemoryPlan) -> Group:
    """Bytes of the weights, share of resident experts if there are any, predicted speed."""
    table = Table(title="by format", title_justify="left", title_style="bold")
    columns: dict[str, Callable[[FormatPlan], str]] = {
        "format": lambda row: row.format,
        "weights": lambda row: format_size(row.weight_bytes),
        "experts resident" if plan.num_experts else "fits": _share if plan.num_experts else _fits,
        "expected tokens/s": _speed,
    }
    for name in columns:
        table.add_column(name, justify="left" if name == "format" else "right")
    for row in rows:
        table.add_row(*[cell(row) for cell in columns.values()])
    return Group(table, Text(_NOTE)) if len(rows) > 1 else Group(table)


def faster_line(rows: Sequence[FormatPlan], plan: MemoryPlan) -> str:
    """The first line of a slow plan; nothing where no format would be faster."""
    faster = faster_format(rows, plan.formats)
    own = next((row for row in rows if row.format == "own"), None)
    if faster is None or own is None:
        return ""
    line = f"faster: --format {faster.format}, {_share(faster)} of the experts resident"
    if faster.tokens_per_s is not None and own.tokens_per_s is not None:
        times = faster.tokens_per_s / own.tokens_per_s
        line += f", about {times:.1f} times the tokens/s"
    return f"{line} (as stored: {_share(own)}); it may change answers"


def _fits(row: FormatPlan) -> str:
    return "no" if row.resident_share is None else "yes"


def _share(row: FormatPlan) -> str:
    return "does not fit" if row.resident_share is None else f"{row.resident_share:.0%}"


def _speed(row: FormatPlan) -> str:
    if row.resident_share is None:
        return "-"
    return "unknown" if row.tokens_per_s is None else f"{row.tokens_per_s:.3g}"
