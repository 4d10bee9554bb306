"""Numbers that were measured stand between marks, where `make report` writes them from lines.

Outside of them the pages below may have settings, promises and what papers say, each named here.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from reporting.blocks import PAGES
from reporting.repeatable import is_repeatable
from reporting.results import MACHINE

ROOT = Path(__file__).resolve().parents[1]
NUMBER = r"\d+(?:[.,]\d+)*"
UNITS = r"%|tokens/s|[kMGT]i?B/s|µs|us\b|ms\b|s\b|seconds|times\b|nats\b|x\b"
MEASURED = re.compile(
    rf"{NUMBER}(?:(?:,| to| and) {NUMBER})* ?(?:{UNITS})|(?<![\w.]){NUMBER}\.\d\d+|\b\d\.\d\d+\b"
)
"""Pattern of a speed, a time, a share or a ratio."""
MADE = "Measured 20"  # when, on what: the last line of a part
LEFT_OUT = (
    r"<!-- measured: \S+ -->.*?<!-- end of measured -->",
    r"<!-- models -->.*?<!-- end of models -->",  # the planner's, by `tools/models_table.py`
    r"^```.*?^```",  # commands and what one printed
    r"^ {4}.*?$",
    r"`[^`\n]*`",
    r"\]\([^)\n]*\)",
)
ALLOWED = {
    "README.md": (
        "Python 3.11",
        "weigh 1.3 times the machine's memory",
        "the file is 1.3 times the free memory",
    ),
    "docs/measured.md": (),
    "docs/formats.md": (  # bytes a weight, by each format's layout
        "blocks of 128 x 128",
        "1.0625, 0.5625",
        "1.00024 (float32 scales)",
        "0.594, 0.547, 0.523",
        "0.563, 0.531, 0.516",
        "1.063, 1.031, 1.016",
        "0.53125",
        "1.0625 · 0.820 · 0.75 · 0.6875 · 0.625",
        "0.5625 · 0.531 · 0.430 · 0.328",
        "0.430 · 0.383 · 0.320 · 0.289 · 0.258",
        "below 1.00 where fewer bytes",
    ),
    "CHANGELOG.md": ("a range of 1.4 times to both sides",),
    "docs/tour.md": (),
    "docs/evidence.md": (
        "on both sides by 15% of the published",
        "1.30 becomes 1.255 to 1.345",
    ),
    "docs/policies.md": (
        "that would have been 1% faster is taken",
        "at least 2% faster",
        "and 0.05 unless it is given",
        "25, 50 and 75% of the experts resident",
        "if it is within 5% of the median",
        "0.3 ms of other work in a layer is assumed",
        "of synthetic runs (four layers) at 50%",
    ),
    "docs/memory.md": (
        "a range of 1.4 times to both sides",  # of a prediction
        "at most 1% or 33.6 MB",  # the aim
        "below 1.00 where lowtide is faster",
        "the paper has 0.77 and 0.96 on its GPUs",
        "the paper has at most 2% for them",
        "The aim is 90% of the disk's ceiling",
        "at most 1.1 times the larger of reading and computing",
    ),
    "docs/buddymoe.md": (
        "0.05 unless you say otherwise",
        "to take 100 µs at most",
        "(0.95; one number",
        "0.95 takes about 20 of 31 peers",  # of the printed tables above it
        "would be 13% if all were alike",
        "bounds from 1% to all of the mass",
    ),
    "docs/quality.md": (
        "its agreement 100% at each of them",
        "then 0.15 (",
    ),
}
"""Settings, aims and promises by page, word for word."""


def measured_numbers(page: str, allowed: tuple[str, ...] = ()) -> list[str]:
    """Return the numbers outside of marks that look measured, with some words around them."""
    for pattern in LEFT_OUT:
        page = re.sub(pattern, lambda left_out: "`" * bool(left_out), page, flags=re.S | re.M)
    for phrase in allowed:
        page = page.replace(phrase, "")
    return [page[max(0, m.start() - 40) : m.end() + 20] for m in MEASURED.finditer(page)]


@pytest.mark.parametrize("name", ALLOWED)
def test_measured_numbers_stand_between_marks(name: str) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")
    page = "\n".join(line for line in page.splitlines() if "metrics.json" not in line)
    assert not measured_numbers(page, ALLOWED[name])
    rotten = [phrase for phrase in ALLOWED[name] if not measured_numbers(phrase)]
    assert not rotten, "these need no leave"


def test_what_looks_measured() -> None:
    for text in ("12.5 tokens/s.", "1.4 to 1.7 times", "92% of it", "0.85 of it", "30 us."):
        assert measured_numbers(text), text
    for text in (
        "A model of 16.3 B parameters (30.3 GiB) in 12 GiB, 64 new tokens, LLaDA2.0.",
        "`--share 0.25` and\n\n```sh\n12 tokens/s\n```\n",
        "<!-- measured: a -->\n12 tokens/s\n<!-- end of measured -->",
    ):
        assert not measured_numbers(text), text


PARTS = re.compile(r"<!-- measured: \S+ -->\n(.*?)<!-- end of measured -->", re.S)
LINK = re.compile(r"\]\(([^)#\s]+\.jsonl)#L(\d+)\)")
TO = re.compile(LINK.pattern + r" to \[\d+" + LINK.pattern)


@functools.cache
def results_of(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines()


def linked(row: str, page: Path) -> list[dict[str, Any]]:
    """The lines of results that a row links, from one link to another those between them, too."""
    found = {(target, int(number)): None for target, number in LINK.findall(row)}
    for target, first, same, last in TO.findall(row):
        assert target == same, row
        found |= {(target, number): None for number in range(int(first), int(last))}
    files = {target: results_of((ROOT / page.parent / target).resolve()) for target, _ in found}
    assert all(1 <= number <= len(files[target]) for target, number in found), row
    return [json.loads(files[target][number - 1]) for target, number in found]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_row_leads_to_lines_that_count(page: Path) -> None:
    """Every row links lines of `docs/results/` that count, and a table has one machine.

    Rows are those of tables between marks, and in the README sentences there too. A line counts if
    it is a commit's own, not refused, and of a call of `make bench` or `make bench-large`.
    """
    for part in PARTS.findall((ROOT / page).read_text(encoding="utf-8")):
        machines: set[str] = set()
        for row in part.splitlines():
            is_head = row.startswith("|") and row.rstrip(" |").endswith(("line", "---"))
            is_told = page.name == "README.md" and re.search(r"\d", row)
            is_told = is_told and not row.startswith((MADE, "Not measured"))
            lines = linked(row, page)
            if not row.startswith("|"):
                machines = set()
            if is_told and not is_head or row.startswith("|") and not is_head:
                assert lines, row
            for line in lines:
                assert not line["commit"].endswith("+") and "refused" not in line, row
                assert is_repeatable(line), row
            machines |= {json.dumps(machine_of(line)) for line in lines}
            assert len(machines) <= 1, row


def machine_of(line: dict[str, Any]) -> list[Any]:
    return [line["machine"][name] for name in MACHINE]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_what_was_timed_stands_beside_its_range(page: Path) -> None:
    for part in PARTS.findall((ROOT / page).read_text(encoding="utf-8")):
        head: list[str] = []
        for row in part.splitlines():
            cells = row.split(" | ") if row.startswith("|") else []
            head = cells and (head or cells)
            for name, cell in zip(head, cells, strict=False):
                is_timed = "tokens/s" in name and not name.startswith(("simulated", "first answer"))
                if is_timed and cell is not name and re.search(r"\d", cell):
                    assert " to " in cell, row


def test_links_from_one_line_to_another_take_those_between() -> None:
    file = "../docs/results/2026-11-26-tau.jsonl"
    row = f"| a | [2]({file}#L2) to [4]({file}#L4), [9]({file}#L9) |"
    text = results_of((ROOT / "docs" / file).resolve())
    wanted = [str(json.loads(text[place])) for place in (1, 2, 3, 8)]
    assert sorted(map(str, linked(row, Path("docs/measured.md")))) == sorted(wanted)


def test_lines_of_other_arguments_do_not_count() -> None:
    settings = {"rows": [1, 32], "means": 9, "passes": 20}
    line = {"benchmark": "buddy time", "what": "substitution", "settings": settings}
    assert is_repeatable(line)
    assert is_repeatable(line | {"settings": settings | {"rows": [32]}})  # a part of a run
    assert not is_repeatable(line | {"settings": settings | {"rows": [1, 2]}})
    assert not is_repeatable(line | {"settings": settings | {"means": 8}})
    assert not is_repeatable(line | {"benchmark": "no script"})


def test_a_line_of_one_length_is_that_of_any_call_with_this_length() -> None:
    """Whatever else its run measured, and however long that was."""
    settings = {"prompt_share": 0.5, "lengths": [1024, 32768], "traced_lengths": [9999]}
    line = {"benchmark": "planned_memory", "what": "planned", "settings": settings}
    assert is_repeatable(line | {"num_tokens": 1024})
    assert not is_repeatable(line | {"num_tokens": 32768})
    even = line | {"what": "evenness", "num_tokens": 2048}
    assert is_repeatable(even) and not is_repeatable(even | {"num_tokens": 1024})
    assert not is_repeatable(even | {"settings": settings | {"prompt_share": 0.1}})
