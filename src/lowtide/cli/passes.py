"""Passes of a bidirectional model in words: chunks, memory and the longest context."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from lowtide.cli.screen import number_table
from lowtide.config import format_size

if TYPE_CHECKING:
    from lowtide.engine.planning.passes import PlannedPass, PlannedPasses
    from lowtide.memory.pass_planner import PassPlan


def passes_table(passes: PlannedPasses, model: str) -> Group:
    """Make a table with a row per share of masks, and the longest context below."""
    num_tokens = passes.steps[0].num_tokens
    table = steps_table(passes.steps, f"passes over {num_tokens} tokens")
    return Group(table, Text(_longest(passes, model)))


def steps_table(steps: Sequence[PlannedPass], title: str) -> Table:
    """Make a table of each operator's chunks, the memory needed, and the operator that binds."""
    operators = list(dict.fromkeys(name for step in steps for name in step.chunks))
    columns = ["masked", *(f"{operator} chunks" for operator in operators), "needs", "binds"]
    table = number_table(title, columns, left=["binds"])
    for step in steps:
        counts = [str(step.chunks.get(operator, "each tile")) for operator in operators]
        masked = f"{step.num_masked} ({step.num_masked / step.num_tokens:.0%})"
        table.add_row(masked, *counts, format_size(step.needed_bytes), step.binding)
    return table


def pass_caption(found: PassPlan | None) -> str:
    """Describe the current pass in one line if any operator is divided; else return ""."""
    if found is None or all(count == 1 for count in found.chunks.values()):
        return ""
    chunks = ", ".join(f"{operator} {count}" for operator, count in found.chunks.items())
    counts, needed = found.counts, format_size(found.needed_bytes)
    return (
        f"{counts.tokens} tokens, {counts.logit_rows} masked: {needed}; chunks: {chunks}; "
        f"{found.binding} binds"
    )


def passes_object(passes: PlannedPasses) -> dict[str, object]:
    """Return the passes for `--json`."""
    steps = [step._asdict() | {"held": [list(held) for held in step.held]} for step in passes.steps]
    return passes._asdict() | {"fixed": dict(passes.fixed), "steps": steps}


def _longest(passes: PlannedPasses, model: str) -> str:
    if passes.longest_context is None:
        return "longest context: known only without --kv-cache"
    offered = format_size(passes.offered_bytes)
    if not passes.longest_context:
        return f"longest context in {offered}: none"
    or_more = " or more" if passes.longest_context == passes.most_tried else ""
    line = f"longest context in {offered}: {passes.longest_context} tokens{or_more}"
    if passes.longest_context > passes.max_positions:
        return f"{line}; {model} was made for {passes.max_positions}"
    return f"{line} (lowtide plan {shlex.quote(model)} --context {passes.longest_context})"
