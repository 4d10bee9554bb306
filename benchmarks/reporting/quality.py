"""Measured parts of docs/quality.md and docs/buddymoe.md.

They show the cost and the saving of settings that change words, and test if a model has any experts
that can stand in for others.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from lowtide.lab.bench import Spread
from reporting.forms import lost
from reporting.fronts import MIN_ANSWERS, front_picture, shown_share
from reporting.results import Line, Results
from reporting.tables import (
    Cell,
    Row,
    captions,
    not_measured,
    number,
    percent,
    ratio,
    shown,
    table,
    turns_of,
    with_range,
)

_PICTURE = "![What each way with absent experts loses, beside its speed](buddymoe.svg)"
_HEAD = ("agree", "right", "bytes over exact")
_SPEEDS = ("tokens/s", "over exact")
_FULL = (
    "model",
    "resident",
    "lane",
    "tokens/s",
    "over exact",
    "GB read per token",
    "ms waited per absent expert",
    "substitution, us of a layer",
    "share of the layer",
)
_TIMES = ("lane", "", "rows", "one decision, us", "both, us", "what was saved, us")
_AIMS = ("expected", "met in cells", "missed in")
_ALPHAS = ("0.5", "0.75", "0.95", "0.99")
_PROFILE = (
    "model",
    "layer",
    "concentration",
    "affinity, nats",
    "most and least chosen over the mean",
    f"peers that cover {', '.join(_ALPHAS)}",
)
_FORMATS = (
    "model",
    "budget",
    "format",
    "weights, MB",
    "resident",
    "loss, nats",
    "nats lost",
    "KL",
    "agree",
    "right",
    "MB read per pass",
    "tokens/s",
)


def buddies(results: Results, page: Path) -> str:
    """Show a table of the lanes for each model and tier, and one of the expectations.

    A lane has its loss at every share of residents, and the rest at the share nearest to 3 of 8.
    The last table counts the cells that met each expectation.
    """
    if not results.has("buddy"):
        return not_measured("buddy")
    lines = results.newest_of_each("buddy", "tier")
    cells = [line for line in lines if "resident_share" in line.row]
    lanes = [line for line in cells if line["what"] != "expected" and "loss" in line.row]
    parts = [_PICTURE] if front_picture(results) is not None else []
    for (model, tier), group in groupby(lanes, lambda line: (line["model"], line["tier"])):
        parts.append(f"`{model}`, {tier}:\n\n{_lanes(list(group), shown_share(lanes), page)}")
    return "\n\n".join([*parts, table(_AIMS, _aims(cells), page), captions(cells)])


def _lanes(lines: Sequence[Line], chosen_share: float, page: Path) -> str:
    """Describe the lanes of one model on one tier."""
    shares = sorted({line["resident_share"] for line in lines}, reverse=True)
    by_lane: dict[str, dict[float, Line]] = {}
    for line in lines:
        by_lane.setdefault(line["what"], {})[line["resident_share"]] = line
    is_timed = any(turns_of(line, "tokens_per_s", MIN_ANSWERS) for line in lines)
    names = (*_HEAD, *_SPEEDS) if is_timed else _HEAD
    head = [f"nats lost, {percent(share)} resident" for share in shares]
    head += [f"{name}, {percent(chosen_share)}" for name in names]
    exact = by_lane["exact"][chosen_share]
    rows: list[Row] = []
    for lane, at in by_lane.items():
        losses = [lost(at[share]) if share in at else "" for share in shares]
        more: Sequence[Cell] = [""] * len(names)
        if chosen_share in at:
            more = _lane(at[chosen_share], exact, is_timed)
        rows.append((list(at.values()), (lane, *losses, *more)))
    return table(("lane", *head), rows, page)


def buddies_full(results: Results, page: Path) -> str:
    """Published dimensions from disk: speed, and what a miss takes under each policy."""
    if not results.has("buddy full"):
        return not_measured("buddy_full")
    lines = results.newest("buddy full").lines
    exact = {_place(line): line for line in lines if line["what"] == "exact"}
    timed = [line for line in lines if turns_of(line, "tokens_per_s", MIN_ANSWERS)]
    rows: list[Row] = [([line], _full(line, exact[_place(line)])) for line in timed]
    aims = _aims(lines)
    parts = [shown("buddy_full", _FULL, rows, page)]
    return "\n\n".join([*parts, *([shown("buddy_full", _AIMS, aims, page)] if aims else [])])


def _lane(line: Line, exact: Line, is_timed: bool) -> tuple[Cell, ...]:
    exact_bytes = exact["bytes_per_pass"]
    cells = (
        percent(line["agreement"]["mean"]),
        percent(line["accuracy"]["mean"]),
        "" if not exact_bytes else percent(line["bytes_per_pass"] / exact_bytes),
    )
    if not is_timed:
        return cells
    own, of_exact = (turns_of(one, "tokens_per_s", MIN_ANSWERS) for one in (line, exact))
    if own is None or of_exact is None:
        return (*cells, "", "")
    return (*cells, with_range(own), ratio(own, of_exact) if line is not exact else "")


def _full(line: Line, exact: Line) -> tuple[Cell, ...]:
    own, of_exact = (turns_of(one, "tokens_per_s") for one in (line, exact))
    assert own is not None and of_exact is not None
    return (
        line["model"],
        percent(line["resident_share"]),
        line["what"],
        with_range(own),
        ratio(own, of_exact) if line is not exact else "",
        number(line["read_bytes_per_token"] / 1e9),
        with_range(Spread.of(line["each_waited_ms"])),
        *_substitution(line),
    )


def _substitution(line: Line) -> tuple[Cell, Cell]:
    """Return the time of a layer's substitution; empty cells if none was measured."""
    if "each_substitution_us" not in line.row:
        return "", ""
    share = Spread.of(line["each_share_of_layers"])
    range_of = f"{share.median:.2%} ({share.least:.2%} to {share.most:.2%})"
    return with_range(Spread.of(line["each_substitution_us"])), range_of


def _place(line: Line) -> tuple[object, ...]:
    return tuple(line.row.get(name) for name in ("model", "tier", "resident_share"))


def _aims(lines: Sequence[Line]) -> list[Row]:
    """Count the cells (model, tier, share) that met each expectation and name those that missed it.

    Expectations of speed count only where lanes had their turns.
    """
    by_claim: dict[str, dict[tuple[object, ...], Line]] = {}
    for line in lines:
        if line["what"] == "expected" and not _is_of_few_turns(line):
            by_claim.setdefault(line["claim"], {})[_place(line)] = line
    rows: list[Row] = []
    for claim, cells in by_claim.items():
        missed = [line for line in cells.values() if not line["is_met"]]
        met = f"{len(cells) - len(missed)} of {len(cells)}"
        rows.append((list(cells.values()), (claim, met, "; ".join(map(_cell, missed)))))
    return rows


def _is_of_few_turns(line: Line) -> bool:
    """Return True if the line is about a speed of fewer turns than pages show."""
    is_of_speed = "as fast" in line["claim"] or "on the front" in line["claim"]
    return is_of_speed and line["settings"]["repeats"] < MIN_ANSWERS


def _cell(line: Line) -> Cell:
    place = [line["model"], line.row.get("tier"), percent(line["resident_share"])]
    return " ".join(filter(None, place))
