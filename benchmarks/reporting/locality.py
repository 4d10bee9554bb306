"""The measured part of docs/policies.md on routing as published models have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from reporting.results import Line, Results, Run
from reporting.tables import Cell, Row, caption, not_measured, number, percent, table

_ROUTINGS = ("local", "static")
_HOMES = {"disk": "on disk, no device", "host": "in host memory, beside a device"}
_RATES = ("model", "share of a token's experts", "measured", "local", "static", "measured by")


def locality(results: Results, page: Path) -> str:
    """Show the routings' rates beside the published ones, and the fastest presets under each."""
    if not results.has("locality"):
        return not_measured("locality")
    run = results.newest("locality")
    presets, verdicts = run.of("presets"), run.of("worse routing")
    [first, *_] = presets[0]["by_share"].values()
    names = [name for name in first["of_best"] if name != "auto"]
    head = ("experts", "requests", "routing", *(f"`{name}`" for name in names), "`auto` chooses")
    order = ("experts", *(f"`{name}`" for name in (*names, "auto")))
    rates: list[Row] = [([line], _rate(line)) for line in run.of("rate")]
    parts = [
        _drawn(run),
        table(_RATES, rates, page),
        "Speed over the fastest policy's, at 12.5, 25 and 50% of the experts in memory:",
        table(head, [([line], _presets(line, names)) for line in presets], page),
        "Means of all cells (geometric), under the local; the static routing:",
        table(order, [([line], _verdict(line, (*names, "auto"))) for line in verdicts], page),
        caption(run),
    ]
    return "\n\n".join(parts)


def _drawn(run: Run) -> str:
    """The parameters of each routing."""
    told = {
        line["routing"]: f"skew {number(line['skew'])}, taste {number(line['taste'])}, locality "
        f"{number(line['locality'])}"
        for line in run.of("routing")
    }
    return "; ".join(f"{name} routing: {told[name]}" for name in _ROUTINGS) + "."


def _rate(line: Line) -> Sequence[Cell]:
    at = line["at"]
    place = percent(at) if at < 1 or "cache" in line["of"] else f"{at:g}"
    what = f"{line['of']}, {place}"
    here = [percent(line["here"][name]) for name in _ROUTINGS]
    fit = "" if line["is_fitted"] else ", held out"
    return (line["model"] + fit, what, percent(line["published"]), *here, line["source"])


def _presets(line: Line, names: Sequence[str]) -> Sequence[Cell]:
    cells = line["by_share"].values()
    speeds = [", ".join(number(cell["of_best"][name]) for cell in cells) for name in names]
    chosen = ", ".join(f"`{cell['auto_chooses']}`" for cell in cells)
    at = (_HOMES[line["home"]], str(line["num_sequences"]), line["routing"])
    return (*at, *speeds, chosen)


def _verdict(line: Line, names: Sequence[str]) -> Sequence[Cell]:
    means: Mapping[str, Mapping[str, float]] = line["of_best"]
    best = line["order"][0]
    cells = [_both(means[name], is_best=name == best) for name in names]
    return (_HOMES[line["home"]], *cells)


def _both(means: Mapping[str, float], is_best: bool) -> Cell:
    told = "; ".join(number(means[name]) for name in _ROUTINGS)
    return f"**{told}**" if is_best else told
