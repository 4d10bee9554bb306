"""Markdown of measurements, by one rule for all tables.

What was timed has at least three turns, and their range stands beside the median; ratios of ranges
that overlap are ties. A row links every line that it is made of. A table is of one machine, which
its caption names; rows of another one have a table of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from lowtide.lab.bench import Spread
from reporting.results import Line, ResultsError, Run

Cell = str
Row = tuple[Sequence[Line], Sequence[Cell]]
"""The lines that a row is made of, and what its columns say."""

MIN_TURNS = 3
"""Turns of whatever was timed, at least: a line with fewer is on no page."""


MOST_LINKS = 4
"""Most links to one file in a row whose lines do not follow each other."""


def turns_of(line: Line, name: str, at_least: int = MIN_TURNS) -> Spread | None:
    """Return the spread of a line's turns, from all of them or from their median and range.

    A line has all turns under `each_...`, or their median beside `least` and `most`. Returns None
    for fewer than `at_least` turns and for a line without a range.
    """
    each = line.row.get(f"each_{name}")
    if each is not None:
        return Spread.of(each) if len(each) >= at_least else None
    num_turns = line.row.get("num_turns", line["settings"].get("repeats", 1))
    if num_turns < at_least or "least" not in line.row or line.row.get(name) is None:
        return None
    return Spread(line[name], line["least"], line["most"])


def table(head: Sequence[str], rows: Sequence[Row], page: Path) -> str:
    """A table whose last column links each row to its lines. page: relative to the repository.

    Raises ResultsError for rows of several machines: see `by_machine`.
    """
    machines = sorted({_machine(line) for lines, _ in rows for line in lines})
    if len(machines) > 1:
        raise ResultsError(f"One table has rows of {'; '.join(machines)}.")
    text = [f"| {' | '.join([*head, 'line'])} |", "|---" * (len(head) + 1) + "|"]
    text += [f"| {' | '.join([*cells, links(lines, page)])} |" for lines, cells in rows]
    return "\n".join(text)


def by_machine(head: Sequence[str], rows: Sequence[Row], page: Path) -> str:
    """A table and its caption for each machine, in the order of the rows."""
    machines: dict[str, list[Row]] = {}
    for lines, cells in rows:
        machines.setdefault(_machine(lines[0]), []).append((lines, cells))
    parts = []
    for own in machines.values():
        parts += [table(head, own, page), captions([line for lines, _ in own for line in lines])]
    return "\n\n".join(parts)


def shown(
    script: str, head: Sequence[str], rows: Sequence[Row], page: Path, command: str = ""
) -> str:
    """`by_machine`, or that there is nothing to show yet, and the command that changes it."""
    return by_machine(head, rows, page) if rows else not_measured(script, command)


def not_measured(script: str, command: str = "") -> str:
    command = command or f"make bench ONLY={script}"
    return (
        f"Not measured yet in {MIN_TURNS} turns or more: `{command}` writes the "
        "lines, `make report` this part of the page."
    )


def caption(run: Run) -> str:
    """Machine, date and commit of a run, and how busy the machine was."""
    return captions(run.lines)


def captions(lines: Sequence[Line]) -> str:
    """Write a caption for every run that these lines are from, machine by machine."""
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
    gpu = f", {line['settings']['gpu']}" if "gpu" in line["settings"] else ""
    return f"{machine['num_cores']} cores of {machine['cpu']}, {memory}{gpu}"


def link(line: Line, page: Path) -> Cell:
    """A link from a page to a line of results."""
    up = "../" * (len(page.parts) - 1)
    return f"[{line.number}]({up}{line.path.as_posix()}#L{line.number})"


def links(lines: Sequence[Line], page: Path) -> Cell:
    """Link all lines; of a run of three and more, link only its first and last.

    Many runs in one file also become two links: the others lie between these.
    """
    ordered = sorted({(line.path, line.number): line for line in lines}.items())
    told = []
    for _, of_file in groupby(ordered, lambda one: one[0][0]):
        own = [line for _, line in of_file]
        runs = [
            [line for _, line in run]
            for _, run in groupby(enumerate(own), lambda one: one[1].number - one[0])
        ]
        if len(runs) > MOST_LINKS:
            told.append(f"{len(own)} of {link(own[0], page)} to {link(own[-1], page)}")
            continue
        for run in runs:
            each = [link(line, page) for line in run]
            told += each if len(each) < 3 else [f"{each[0]} to {each[-1]}"]
    return ", ".join(told)


def number(value: float) -> Cell:
    """Three digits, as a person reads them."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def percent(share: float | None) -> Cell:
    return "" if share is None else f"{share:.0%}"


def giga(num_bytes: float) -> Cell:
    return f"{number(num_bytes / 1e9)} GB"


def with_range(turns: Spread) -> Cell:
    """The median, and the least and the most."""
    return f"{number(turns.median)} ({number(turns.least)} to {number(turns.most)})"


def is_tie(one: Spread, other: Spread) -> bool:
    """Return True if their ranges overlap."""
    return one.least <= other.most and other.least <= one.most


def ratio(ours: Spread, theirs: Spread) -> Cell:
    """Ours over theirs by medians; a lead within the range of either is called a tie."""
    return number(ours.median / theirs.median) + (", a tie" if is_tie(ours, theirs) else "")
