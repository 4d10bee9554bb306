"""The measured parts of docs/evidence.md: for each paper its headline numbers beside ours."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from reporting.forms import formatted, spread
from reporting.memory import part_gains
from reporting.papers import NEAR, effect, is_near
from reporting.results import Line, Results
from reporting.tables import MIN_TURNS, Cell, Row, by_machine, not_measured, shown

_HEAD = ("", "paper", "here", "verdict", "why", "command")
MAX_CELL = 100
"""Characters of a cell that names each of its numbers; of more their range is shown."""
Select = Callable[[str], list[Line]]


class Claim(NamedTuple):
    """A published number or range, and what there is for it."""

    of: str
    published: str
    low: float
    high: float
    values: Sequence[float]
    lines: Sequence[Line]  # that the values are made of; without any it is named below the table
    why: str
    command: str
    neutral: float = 1.0  # the value without any effect
    form: str = "number"
    test: str = "mean"  # what has to be in the range: the mean of the values, all, or the most
    processor_s: float | None = None  # that the command took, if its lines say so

    @property
    def is_reproduced(self) -> bool:
        """True if our value is in the published range, give or take `NEAR` of its effect."""
        low, high = (end - self.neutral for end in (self.low, self.high))
        low, high = low - NEAR * abs(low), high + NEAR * abs(high)
        values = {
            "all": self.values,
            "most": [max(self.values)],
            "mean": [statistics.fmean(self.values)],
        }[self.test]
        return all(low <= value - self.neutral <= high for value in values)

    @property
    def cells(self) -> Sequence[Cell]:
        here = formatted(statistics.fmean(self.values), self.form)
        if len(self.values) > 1:
            ends = (formatted(end, self.form) for end in (min(self.values), max(self.values)))
            here += f" ({' to '.join(ends)})"
        verdict = "reproduced" if self.is_reproduced else "differs"
        command = _command(self.command, self.processor_s)
        return (self.of, self.published, here, verdict, self.why, command)


def shown_claims(
    results: Results, page: Path, given: Sequence[Mapping[str, Any]], select: Select
) -> str:
    """Write a table of each machine's claims, then name those that there is nothing for."""
    claims = [_claim(results, each, select) for each in given]
    rows: list[Row] = [(claim.lines, claim.cells) for claim in claims if claim.lines]
    absent = [f"{claim.of} (`{claim.command}`)" for claim in claims if not claim.lines]
    parts = [by_machine(_HEAD, rows, page)] if rows else []
    if absent:
        parts.append(f"Not measured yet in {MIN_TURNS} turns or more: {'; '.join(absent)}.")
    return "\n\n".join(parts)


def _claim(results: Results, given: Mapping[str, Any], select: Select) -> Claim:
    lines = select(given["lines"]) if "lines" in given else []
    if "found" in given:
        values, lines = FOUND[given["found"]](results, lines)
    else:
        values = [line[given["value"]] for line in lines]
    own = {name: given[name] for name in ("neutral", "form", "test") if name in given}
    low, high = given["range"]
    at = (given["of"], given["published"], low, high)
    spent = results.processor_s(_script(given["command"]), lines)
    return Claim(*at, values, lines, given["why"], given["command"], processor_s=spent, **own)


def _script(command: str) -> str:
    return command.rpartition("ONLY=")[2]


def _command(command: str, processor_s: float | None) -> Cell:
    return f"`{command}`" + ("" if processor_s is None else f", {processor_s:,.0f} s")


Found = tuple[Sequence[float], Sequence[Line]]


def _gain_of(part: str) -> Callable[[Results, Sequence[Line]], Found]:
    """Make the function that finds a part of Mosaic's gain, which takes several lines."""

    def found(results: Results, _: Sequence[Line]) -> Found:
        gains, lines = part_gains(results)
        return gains[part], lines

    return found


def _last_over_first(_: Results, lines: Sequence[Line]) -> Found:
    distinct = [line["distinct_experts_by_step"] for line in lines]
    return [steps[-1] / steps[0] for steps in distinct], lines


def _longest_over_brute_force(_: Results, lines: Sequence[Line]) -> Found:
    return [line["longest"] / line["brute_force_longest"] for line in lines], lines


def _waited_over_exact(results: Results, buddies: Sequence[Line]) -> Found:
    if not buddies:
        return [], []
    exact = {line["model"]: line for line in results.newest("buddy full").of("exact")}
    waited = [
        spread(line, "waited_ms").median / spread(exact[line["model"]], "waited_ms").median
        for line in buddies
    ]
    return waited, [*buddies, *exact.values()]


def _share_of_a_layer(_: Results, lines: Sequence[Line]) -> Found:
    return [spread(line, "share_of_layers").median for line in lines], lines


def _share_of_cells(_: Results, lines: Sequence[Line]) -> Found:
    return ([statistics.fmean(line["is_met"] for line in lines)] if lines else []), lines


FOUND: Mapping[str, Callable[[Results, Sequence[Line]], Found]] = {
    **{f"gain of {part}": _gain_of(part) for part in ("manager", "mask-only", "chunking")},
    "last step over first": _last_over_first,
    "longest over brute force": _longest_over_brute_force,
    "waited over exact": _waited_over_exact,
    "share of a layer": _share_of_a_layer,
    "share of cells": _share_of_cells,
}
"""Values that are no key of a line."""


def dali(results: Results, page: Path, why: Mapping[str, str]) -> str:
    """Write DALI's figures and tables, all in one setting. why: of each of them."""
    if not results.has("dali"):
        return not_measured("dali")
    command = "make bench ONLY=dali"
    lines = results.newest("dali").of("number")
    command_cell = _command(command, results.processor_s(_script(command), lines))
    held_out = [line for line in lines if "repeats" not in line.row]
    by_place = {place: [one for one in held_out if one["place"] == place] for place in why}
    rows: list[Row] = [
        (of, (*_of_place(place, of), why[place], command_cell))
        for place, of in by_place.items()
        if of
    ]
    absent = ", ".join(place for place, of in by_place.items() if not of)
    head = ("", "numbers", "effect over the published one", *_HEAD[3:])
    told = shown("dali", head, rows, page)
    return f"{told}\n\nNot simulated yet: {absent} (`{command}`)." if absent else told


def _of_place(place: str, lines: Sequence[Line]) -> Sequence[Cell]:
    """The numbers of a figure or table, and how many are reproduced."""
    effects = list(map(effect, lines))
    told = ", ".join(f"{line['of']} {one:.2f}" for line, one in zip(lines, effects, strict=True))
    if len(told) > MAX_CELL:
        told = f"{min(effects):.2f} to {max(effects):.2f}"
    return (place, str(len(lines)), told, f"{sum(map(is_near, lines))} of {len(lines)} reproduced")
