"""What `lowtide serve` was measured to do under load."""

from __future__ import annotations

from pathlib import Path

from lowtide.lab.bench import Spread
from reporting.results import Line, Results
from reporting.tables import Cell, Row, giga, is_tie, number, shown, turns_of, with_range

_SCRIPT = "serve_load"
_LOAD = (
    "server",
    "clients",
    "tokens/s",
    "to the first token, s: half, 99%",
    "each further, ms: half, 99%",
    "refused",
    "resident before, after",
)
_BESIDE = ("", "served, ms", "Python, ms", "served over Python", "asked", "served over bare pass")
_DISK = (
    "clients",
    "tokens/s",
    "of the longer of reading and computing",
    "asked",
    "over one client",
    "asked",
    "read",
)


def served_load(results: Results, page: Path) -> str:
    """Clients with everything in memory."""
    rows = [([line], _load(line)) for line in _lines(results, "memory", "load")]
    return shown(_SCRIPT, _LOAD, rows, page)


def beside_python(results: Results, page: Path) -> str:
    """A whole answer, and a next turn's first token, through the server and in Python."""
    rows: list[Row] = [
        ([line], ("an answer", *_beside(line), "")) for line in _lines(results, "memory", "python")
    ]
    for line in _lines(results, "turns", "turns"):
        bare = with_range(Spread.of(line["each_over_bare"]))
        rows.append(([line], ("a turn's first token", *_beside(line), bare)))
    return shown(_SCRIPT, _BESIDE, rows, page)


def served_disk(results: Results, page: Path) -> str:
    """Clients of a model a quarter of whose experts are in memory."""
    lines = _lines(results, "disk", "load")
    rows = [([line], _disk(line)) for line in lines if line["lane"] == "disk"]
    return shown(_SCRIPT, _DISK, rows, page)


def _lines(results: Results, part: str, what: str) -> list[Line]:
    """One part's newest lines, those of peers that were not there left out."""
    if not results.has(_SCRIPT, part=part):
        return []
    lines = results.newest(_SCRIPT, part=part).of(what)
    return [line for line in lines if "not_installed" not in line.row]


def _load(line: Line) -> tuple[Cell, ...]:
    return (
        line["lane"],
        str(line["clients"]),
        _range(line, "tokens_per_s"),
        _waited(line, "first_s", 1) + _without(line),
        _waited(line, "token_s", 1e3),
        str(line["num_refused"]),
        f"{giga(line['resident_before_bytes'])}, {giga(line['resident_after_bytes'])}",
    )


def _without(line: Line) -> Cell:
    """Requests that had no first token when the time was over: the waits are of the others."""
    count = line["num_without_token"]
    return f"; {count} without" if count else ""


def _beside(line: Line) -> tuple[Cell, ...]:
    served, python = (
        Spread.of([1e3 * s for s in line[f"each_{name}_s"]]) for name in ("served", "python")
    )
    over = _range(line, "over_python") + (", a tie" if is_tie(served, python) else "")
    wanted = f"at most {line['wanted_over_python']}"
    return (with_range(served), with_range(python), over, wanted)


def _disk(line: Line) -> tuple[Cell, ...]:
    wanted = line["wanted_over_one"]
    return (
        str(line["clients"]),
        _range(line, "tokens_per_s"),
        _range(line, "of_bound"),
        number(line["wanted_of_bound"]),
        number(line["over_one"]),
        number(wanted) if wanted else "",
        giga(line["read_bytes"]),
    )


def _range(line: Line, name: str) -> Cell:
    turns = turns_of(line, name)
    return "" if turns is None else with_range(turns)


def _waited(line: Line, name: str, unit: float) -> Cell:
    values = (line[f"{name}_p50"], line[f"{name}_p99"])
    return ", ".join("none" if value is None else number(unit * value) for value in values)
