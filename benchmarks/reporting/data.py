"""The parts of pages that `report.toml` describes: tables of lines, and claims of papers."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any

from reporting import claims
from reporting.forms import cell
from reporting.pages import Block
from reporting.results import Line, Results
from reporting.tables import Row, not_measured, shown, turns_of

SPECIFICATION = Path(__file__).parents[1] / "report.toml"


@cache
def specification() -> Mapping[str, Any]:
    return tomllib.loads(SPECIFICATION.read_text(encoding="utf-8"))


def parts(results: Results, page: Path) -> Mapping[str, Block]:
    """Every part that is data, by the name in its mark."""
    given = specification()
    made = {name: partial(_tables, results, page, each) for name, each in given["part"].items()}
    select = partial(_named, results)
    made |= {
        name: partial(claims.shown_claims, results, page, each, select)
        for name, each in given["claims"].items()
    }
    return made | {"evidence-dali": partial(claims.dali, results, page, given["dali"])}


def selected(results: Results, given: Mapping[str, Any]) -> list[Line]:
    """The lines that a table or a claim is made of: see the head of `report.toml`."""
    benchmark = given.get("benchmark", given.get("script"))
    if "by" in given:
        lines = results.newest_lines(benchmark, given["what"], given["by"])
    elif "each" in given:
        lines = results.newest_of_each(benchmark, given["each"])
    elif results.has(benchmark, **given.get("settings", {})):
        has = given.get("has_lines_of", ())
        run = results.newest(benchmark, with_lines_of=has, **given.get("settings", {}))
        lines = list(run.lines)
    else:
        return []
    return [line for line in lines if _is_wanted(line, given)]


def _is_wanted(line: Line, given: Mapping[str, Any]) -> bool:
    whats = given.get("what", "*")
    whats = [whats] if isinstance(whats, str) else whats
    return (
        any(_fits(line["what"], what) for what in whats)
        and all(_fits(line[name], value) for name, value in given.get("where", {}).items())
        and not any(_fits(line[name], value) for name, value in given.get("unless", {}).items())
        and ("has" not in given or given["has"] in line.row)
        and ("lacks" not in given or given["lacks"] not in line.row)
        and ("timed" not in given or turns_of(line, given["timed"]) is not None)
    )


def _fits(value: object, wanted: object) -> bool:
    if isinstance(value, str) and isinstance(wanted, str):
        return fnmatchcase(value, wanted)
    return value == wanted


def _named(results: Results, name: str) -> list[Line]:
    return selected(results, specification()["lines"][name])


def _tables(results: Results, page: Path, tables: Sequence[Mapping[str, Any]]) -> str:
    told = []
    for table in tables:
        rows, command = _rows(results, table), table.get("command", "")
        head = table.get("head") or [name for name, _ in table["cells"]]
        if rows or not table.get("optional"):
            told += [table["text"]] if "text" in table else []
            told.append(shown(table["script"], head, rows, page, command))
    return "\n\n".join(told) or not_measured(tables[0]["script"])


def _rows(results: Results, table: Mapping[str, Any]) -> list[Row]:
    rows: list[Row] = []
    for kind in table.get("rows", [table]):
        lines = selected(results, {**table, **kind})
        templates = [one if isinstance(one, str) else one[1] for one in kind["cells"]]
        names = table.get("names", {})
        rows += [([line], [cell(each, line, lines, names) for each in templates]) for line in lines]
    return rows
