"""Markdown of measurements: a caption that says where and when, a row that says which line."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from reporting.results import Line, Run

Cell = str


def table(head: Sequence[str], rows: Sequence[tuple[Line, Sequence[Cell]]], page: Path) -> str:
    """A table whose last column links each row to the line that it was made of.

    rows: the line and what the other columns say of it. page: relative to the repository.
    """
    lines = [f"| {' | '.join([*head, 'line'])} |", "|---" * (len(head) + 1) + "|"]
    lines += [f"| {' | '.join([*cells, link(line, page)])} |" for line, cells in rows]
    return "\n".join(lines)


def caption(run: Run) -> str:
    """Machine, date and commit of a run, and how busy the machine was."""
    return captions(run.lines)


def captions(lines: Sequence[Line]) -> str:
    """Of every run that these lines are of, machine by machine."""
    runs: dict[str, dict[str, None]] = {}
    for line in lines:
        when = f"{line['date'][:10]} on commit {line['commit']}"
        runs.setdefault(_machine(line), {})[when] = None
    said = [f"{', '.join(each)}, {machine}" for machine, each in runs.items()]
    loads = [line["machine"].get("load_1min", 0.0) for line in lines]
    return f"Measured {'; '.join(said)}; load {min(loads):.1f} to {max(loads):.1f}."


def _machine(line: Line) -> str:
    machine = line["machine"]
    memory = f"{machine['memory_bytes'] / 1e9:.0f} GB"
    return f"{machine['num_cores']} cores of {machine['cpu']}, {memory}"


def link(line: Line, page: Path) -> Cell:
    """A link from a page to a line of results."""
    up = "../" * (len(page.parts) - 1)
    return f"[{line.number}]({up}{line.path.as_posix()}#L{line.number})"


def number(value: float) -> Cell:
    """Three digits, as a person reads them."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def percent(share: float | None) -> Cell:
    return "" if share is None else f"{share:.0%}"


def giga(num_bytes: float) -> Cell:
    return f"{number(num_bytes / 1e9)} GB"


def median_and_spread(values: Sequence[float]) -> Cell:
    """The median, and the least and the most where there are several."""
    middle = number(statistics.median(values))
    if len(values) == 1:
        return middle
    return f"{middle} ({number(min(values))} to {number(max(values))})"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Cell:
    """Ours over theirs by medians; a lead within the spread of either is called a tie."""
    of_medians = statistics.median(ours) / statistics.median(theirs)
    is_tie = min(ours) <= max(theirs) and min(theirs) <= max(ours)
    return number(of_medians) + (", a tie" if is_tie else "")
