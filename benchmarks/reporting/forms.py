"""Forms of a line's values in the cells of `report.toml`, `{key:form}`."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from lowtide.lab.bench import Spread
from reporting.results import Line
from reporting.tables import Cell, giga, is_tie, number, percent, ratio, turns_of, with_range

_FIELD = re.compile(r"\{([^{}:]*)(?::([^{}]*))?\}")
_UNITS = {"": 1.0, "milli": 1e3, "micro": 1e6}
_ALPHAS = ("0.5", "0.75", "0.95", "0.99")


def cell(template: str, line: Line, lines: Sequence[Line], names: Mapping[str, str]) -> Cell:
    """Fill in a template. lines: the rows of its table; names: values in other words."""

    def filled(field: re.Match[str]) -> str:
        key, form = field[1], field[2] or ""
        if not key:
            return OF_LINES[form](line)
        if "/" in key:
            return _of_two(line, *key.split("/"), form)
        if form == "over first":
            return "" if line is lines[0] else ratio(spread(line, key), spread(lines[0], key))
        if form.startswith("range"):
            return _range(line, key, form.removeprefix("range").strip())
        value = _value(line, key)
        return names[value] if form == "name" else formatted(value, form)

    return _FIELD.sub(filled, template)


def formatted(value: Any, form: str) -> Cell:
    """Write a value: in a form of `FORMS`, or as Python formats it. None is nothing."""
    if form in FORMS:
        return FORMS[form](value)
    if form.startswith("after "):
        return str(value).removeprefix(form.removeprefix("after "))
    return "" if value is None else format(value, form)


def spread(line: Line, key: str) -> Spread:
    """Take all turns that a line has of a value, however few."""
    return Spread.of(line[f"each_{key}"])


def _value(line: Line, key: str) -> Any:
    first, *others = key.split(".")
    value = line[first]
    for name in others:
        value = value[name]
    return value


def _range(line: Line, key: str, form: str) -> Cell:
    turns = turns_of(line, key)
    if turns is None:
        return ""
    if form in _UNITS:
        return with_range(Spread(*(_UNITS[form] * value for value in turns)))
    median, least, most = (format(value, form) for value in turns)
    return f"{median} ({least} to {most})"


def _of_two(line: Line, one: str, other: str, form: str) -> Cell:
    """Compare the turns of two values of a line, if it has both."""
    if f"each_{other}" not in line.row:
        return ""
    ours, theirs = spread(line, one), spread(line, other)
    if form == "ratio":
        return ratio(ours, theirs)
    tie = ", a tie" if is_tie(ours, theirs) else ""
    return tie if form == "tie" else percent(1 - ours.median / theirs.median) + tie


def reads(line: Line) -> Cell:
    """Bytes over the whole time, computing included, and the share of what the disk gave then."""
    if not line["read_bytes"]:
        return "none"
    rate = line["read_bytes"] / (line["num_forwards"] * line["s_per_forward"]) / 1e9
    ceiling = statistics.mean(line[f"random_read_{when}_GBps"] for when in ("before", "after"))
    return f"{number(rate)} GB/s, {percent(rate / ceiling)} of the ceiling"


def _without_token(line: Line) -> Cell:
    """Requests that had no first token when the time was over: the waits are of the others."""
    count = line["num_without_token"]
    return f"; {count} without" if count else ""


def _peers(line: Line) -> Cell:
    peers = line["peers_of_alpha"]
    return ", ".join(f"{peers[alpha]:.1f}" for alpha in _ALPHAS) + f" of {line['num_experts'] - 1}"


def lost(line: Line) -> Cell:
    """Nats that a setting loses, and their standard error."""
    difference = line["loss_difference"]
    return f"{difference['mean']:.3f} ± {difference['error'] or 0:.3f}"


def _chunks(line: Line) -> Cell:
    divided = [f"{name} {count}" for name, count in line["chunks"].items() if count > 1]
    return ", ".join(divided) or "whole"


def _off_plan(line: Line) -> Cell:
    return f"{line['off_bytes'] / 1e6:+.1f}" + ("" if line["is_as_planned"] else ", beyond the aim")


FORMS = {
    "number": lambda value: "none" if value is None else number(value),
    "number or nothing": lambda value: number(value) if value else "",
    "milli": lambda value: "none" if value is None else number(1e3 * value),
    "percent": percent,
    "giga": giga,
    "mega": lambda value: number(value / 1e6),
    "+mega": lambda value: f"{value / 1e6:+.1f}",
    "yes": lambda value: "yes" if value else "no",
    "share of experts": lambda value: (
        "everything" if value == 1 else f"{percent(value)} of the experts as stored"
    ),
}
"""Forms of one value."""
OF_LINES = {
    "reads": reads,
    "without token": _without_token,
    "peers": _peers,
    "lost": lost,
    "chunks": _chunks,
    "off plan": _off_plan,
}
"""Forms of a whole line."""
