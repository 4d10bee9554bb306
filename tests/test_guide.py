"""docs/guide.md shows what was printed; README's table is the planner's; the picture is a run's."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / "tools"


def tool(name: str) -> dict[str, Any]:
    sys.path.insert(0, str(TOOLS))
    try:
        return runpy.run_path(str(TOOLS / f"{name}.py"))
    finally:
        sys.path.remove(str(TOOLS))


@pytest.fixture(scope="module")
def walk() -> dict[str, Any]:
    return tool("walk")


@pytest.fixture(scope="module")
def kept(walk: dict[str, Any]) -> list[dict[str, Any]]:
    return list(json.loads(walk["KEPT"].read_text(encoding="utf-8")))


def test_the_guide_shows_what_was_printed(walk: dict[str, Any], kept: list[dict[str, Any]]) -> None:
    page = walk["PAGE"].read_text(encoding="utf-8")
    steps = walk["steps"](page)
    assert [step.content for step in steps] == [one["commands"] for one in kept]
    width = str(walk["WIDTHS"][0])
    for step, one in zip(steps, kept, strict=True):
        assert step.output.strip("\n") == one["outputs"][width].strip("\n")
    assert page.count("```") == 4 * len(steps), "a block that nobody runs"


def test_nothing_is_wider_than_the_terminal_nor_a_traceback(
    walk: dict[str, Any], kept: list[dict[str, Any]]
) -> None:
    for one in kept:
        for columns in walk["WIDTHS"]:
            text = one["outputs"][str(columns)]
            assert text and "Traceback" not in text
            assert max(map(len, text.splitlines())) <= columns


def test_a_plan_is_still_what_the_guide_shows(
    walk: dict[str, Any], kept: list[dict[str, Any]]
) -> None:
    """The cheapest of its commands; `tools/walk.py` runs all."""
    step = walk["steps"](walk["PAGE"].read_text(encoding="utf-8"))[1]
    [printed] = walk["walked"]([step], walk["WIDTHS"][0])
    shown = kept[1]["outputs"][str(walk["WIDTHS"][0])]
    assert walk["normalised"](printed) == walk["normalised"](shown), "run tools/walk.py"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="an sdist has no history to clone")
def test_what_is_walked_is_a_fresh_clone(walk: dict[str, Any], tmp_path: Path) -> None:
    source = walk["fresh_clone"](tmp_path / "clone")
    command = "python -c 'import lowtide; print(lowtide.__file__)'"
    [printed] = walk["walked"]([walk["Step"]("sh", command, "")], 300, source)
    assert printed.strip() == str(source / "lowtide" / "__init__.py")


def test_the_table_of_models_is_the_planner_s() -> None:
    """Within 2%: the machine's number of cores has its share in the workspace."""
    table = tool("models_table")
    written, made = table["written"](), table["table"]()
    numbers = table["numbers"]
    assert len(numbers(made)) > 50
    assert numbers(written) == pytest.approx(numbers(made), rel=0.02, abs=0.1), (
        "run tools/models_table.py"
    )
    names = [[row.split("|")[1] for row in text.splitlines()] for text in (written, made)]
    assert names[0] == names[1]


# a terminal


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("one\r\ntwo", "one\ntwo"),
        ("abc\rx", "xbc"),
        ("one\r\ntwo\x1b[1A\r\x1b[2Knew", "new\ntwo"),
        ("12345678901", "1234567890\n1"),
        ("1234567890\r\nx", "1234567890\nx"),
        ("a\x1b[3Cb\x1b[1D\x1b[Kc", "a   c"),
        ("\x1b[1;32mgreen\x1b[0m\x1b[?25l\x1b]0;title\x07", "green"),
        ("one\r\ntwo\r\nthree\x1b[2A\r\x1b[J", ""),
    ],
)
def test_a_screen_obeys(written: str, shown: str) -> None:
    terminal = tool("terminal")
    for cut in range(len(written)):
        screen = terminal["Screen"](10)
        screen.feed(written[:cut])
        screen.feed(written[cut:])
        assert screen.text() == shown


def test_a_command_is_recorded_with_what_is_typed(tmp_path: Path) -> None:
    terminal = tool("terminal")
    script = "printf '> '; read line; echo \"got $line\"; tput cols; exit 3"
    environment = {"PATH": "/usr/bin:/bin", "TERM": "xterm"}
    done = terminal["recorded"](["sh", "-c", script], 44, tmp_path, environment, ["hello"])
    text = done.screen(44).text()
    assert done.exit_code == 3 and "> hello\ngot hello" in text


# the picture


def test_the_picture_is_small_and_shows_its_last_frame_without_moving() -> None:
    live = tool("live_picture")
    text = live["PICTURE"].read_text(encoding="utf-8")
    assert len(text.encode()) < live["MAX_BYTES"]
    root = ElementTree.fromstring(text)
    groups = [child for child in root if child.tag.endswith("}g")]
    assert len(groups) > 10
    assert [group.get("display") for group in groups] == ["none"] * (len(groups) - 1) + ["inline"]
    assert "░" in text and "Solve sudoku" in text
