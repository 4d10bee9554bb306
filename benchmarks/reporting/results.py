"""Results: the lines of `docs/results/`, checked, and the runs that they make up."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from lowtide.errors import UsageError
from reporting.repeatable import is_repeatable

REQUIRED: Mapping[str, type] = {
    "benchmark": str,
    "what": str,
    "settings": dict,
    "machine": dict,
    "commit": str,
    "date": str,
}
"""Fields of every line, with their types; a text or an object is never empty."""
MACHINE = ("cpu", "num_cores", "memory_bytes")


class ResultsError(UsageError):
    """A line of results that says too little, or was measured on files that no commit has."""


@dataclass(frozen=True)
class Line:
    """One measurement, and where it is written."""

    path: Path
    number: int  # from 1
    row: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        if name not in self.row:
            raise ResultsError(f"{self.path}:{self.number} has no {name!r}: measure it again.")
        return self.row[name]

    @property
    def is_clean(self) -> bool:
        """True if the tree was a commit's (files in `docs/` aside)."""
        return not self["commit"].endswith("+")

    @property
    def counts(self) -> bool:
        """True if a page may show it: a commit's own, not refused, and of a repeatable call.

        Its script refuses a line; `make bench` and `make bench-large` make a repeatable call again.
        """
        return self.is_clean and "refused" not in self.row and is_repeatable(self.row)


@dataclass(frozen=True)
class Run:
    """Lines of one script with the same settings, commit and machine, in one file."""

    lines: tuple[Line, ...]

    def of(self, what: str) -> list[Line]:
        """Its measurements of that name, in the order of writing."""
        return [line for line in self.lines if line["what"] == what]

    @property
    def first(self) -> Line:
        return self.lines[0]

    @property
    def ended(self) -> str:
        """Date and time of the last line, UTC."""
        return str(self.lines[-1]["date"])

    @property
    def processor_s(self) -> float | None:
        """Processor time of its script up to the last line; None if lines are older than that."""
        return self.lines[-1].row.get("processor_s")


class Results:
    """All lines below a folder."""

    def __init__(self, lines: list[Line]) -> None:
        self.lines = lines
        self.runs = [Run(tuple(of_run)) for _, of_run in groupby(lines, key=_run_key)]

    @classmethod
    def load(cls, folder: Path, repository: Path) -> Results:
        """Reads `*.jsonl` of a folder; lines know it relative to the repository, as pages do.

        Raises:
            ResultsError: a line is not JSON, or lacks what it takes to judge it.
        """
        paths = sorted((repository / folder).glob("*.jsonl"))
        return cls([line for path in paths for line in _read(path, folder / path.name)])

    def has(self, benchmark: str, **settings: object) -> bool:
        """Return True if a run that counts has these settings among its own."""
        return any(_is_of(run, benchmark, settings) and run.first.counts for run in self.runs)

    def newest(
        self, benchmark: str, *, with_lines_of: Sequence[str] = (), **settings: object
    ) -> Run:
        """The last run of a script with these settings among others, of those that count.

        with_lines_of: measurements that it must have, where not every machine can take them.

        Raises:
            ResultsError: there is none.
        """
        runs = [run for run in self.runs if _is_of(run, benchmark, settings)]
        runs = [run for run in runs if all(map(run.of, with_lines_of))]
        counted = [run for run in runs if run.first.counts]
        if counted:
            return max(counted, key=lambda run: run.ended)
        asked = "".join(f", {name}={value}" for name, value in settings.items())
        asked += "".join(f", with {what}" for what in with_lines_of)
        reason = "there are no lines" if not runs else _why_refused(runs)
        raise ResultsError(f"Nothing to report of {benchmark!r}{asked}: {reason}.")

    def processor_s(self, script: str, lines: Sequence[Line]) -> float | None:
        """Return the processor time of a script's runs that these lines are from.

        Returns None if one of the runs does not say it, or none is the script's.
        """
        of_script = {
            (line.path, line.number)
            for line in lines
            if line["benchmark"].replace(" ", "_") == script
        }
        spent = [
            run.processor_s
            for run in self.runs
            if any((line.path, line.number) in of_script for line in run.lines)
        ]
        known = [seconds for seconds in spent if seconds is not None]
        return sum(known) if known and len(known) == len(spent) else None

    def newest_of_each(self, benchmark: str, key: str) -> list[Line]:
        """Return, for each value of a key, its lines in the last run that counts and has it."""
        found: dict[str, list[Line]] = {}
        for run in sorted(self.runs, key=lambda run: run.ended):
            if _is_of(run, benchmark, {}) and run.first.counts:
                own: dict[str, list[Line]] = {}
                for line in run.lines:
                    if key in line.row:
                        own.setdefault(str(line[key]), []).append(line)
                found |= own
        return [line for lines in found.values() for line in lines]

    def newest_lines(self, benchmark: str, what: str, keys: Sequence[str]) -> list[Line]:
        """Return the last line that counts for each combination of these keys."""
        found: dict[str, Line] = {}
        for line in sorted(self.lines, key=lambda line: str(line["date"])):
            if (line["benchmark"], line["what"]) == (benchmark, what) and line.counts:
                found[str([line[key] for key in keys])] = line
        return list(found.values())


def _why_refused(runs: list[Run]) -> str:
    first = runs[-1].first
    if first.is_clean:
        return f"{first.path}:{first.number} was measured as no call in benchmarks/bench.py does it"
    return (
        f"{first.path}:{first.number} was measured on files that differed from commit "
        f"{first['commit'].rstrip('+')}; commit them and measure again"
    )


def _is_of(run: Run, benchmark: str, settings: Mapping[str, object]) -> bool:
    given = run.first["settings"]
    return run.first["benchmark"] == benchmark and all(
        given.get(name) == value for name, value in settings.items()
    )


def _run_key(line: Line) -> tuple[str, ...]:
    machine = [str(line["machine"][name]) for name in MACHINE]
    settings = json.dumps(line["settings"], sort_keys=True)
    return (str(line.path), line["benchmark"], settings, line["commit"], *machine)


def _read(file: Path, path: Path) -> Iterator[Line]:
    try:
        texts = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ResultsError(f"{path} is not text in UTF-8: {error}.") from None
    for number, text in enumerate(texts, 1):
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            raise ResultsError(f"{path}:{number} is not JSON: {error}.") from None
        missing = _missing(row if isinstance(row, dict) else {})
        if missing:
            raise ResultsError(f"{path}:{number} does not say {', '.join(missing)}.")
        yield Line(path, number, row)


def _missing(row: Mapping[str, Any]) -> list[str]:
    """Return the names of required fields that a line lacks or has in another type."""
    missing = [
        f"{name} ({'an object' if kind is dict else 'a text'})"
        for name, kind in REQUIRED.items()
        if not isinstance(row.get(name), kind) or not row[name]
    ]
    return missing or [f"machine.{name}" for name in MACHINE if name not in row["machine"]]
