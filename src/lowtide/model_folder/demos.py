"""The bundled demo models and the tasks that they were trained on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

DEMO_FOLDER = Path(__file__).parents[1] / "demo"
DEMO_NAMES = ("diffusion", "autoregressive")
OLD_DEMO_NAMES = {"chat": "autoregressive"}


class Task(NamedTuple):
    """A task of demos. example: one question; pattern: all questions."""

    does: str
    example: str
    pattern: re.Pattern[str]


def _task(does: str, example: str, pattern: str) -> Task:
    return Task(does, example, re.compile(pattern))


_ROMAN = r"([1-9]\d?|[123]\d\d)"

TASKS = {
    "sum": _task("adds", "47 + 85", r"\d\d? \+ \d\d?( =)?|What is \d\d? \+ \d\d?\?"),
    "sort": _task("sorts", "Sort 93 21 57 40 12", r"[Ss]ort( [1-9]\d){3,6}"),
    "roman": _task(
        "writes Roman numerals", "Roman 148", rf"Roman {_ROMAN}|{_ROMAN} in Roman numerals"
    ),
    "json end": _task("ends JSON", 'Close {"age": [12, 7', r"(Close|Complete) [\[{].*\d"),
    "json value": _task(
        "looks up a key",
        'Get age of {"age": 12, "size": 7}',
        r'(Get|What is) [a-z]+ of \{("[a-z]+": \d+(, )?){2,4}\}\??',
    ),
}
"""Tasks of both demos, as drawn by `demo_tasks.py`."""

SUDOKU = _task(
    "solves sudokus of six rows (make demo)",
    "",
    r"Solve sudoku:(\n[1-6.]{3} [1-6.]{3}){6}",
)


def tasks_of(path: Path) -> tuple[Task, ...]:
    """Return the tasks of the demo at this path, or none."""
    if path.parent != DEMO_FOLDER:
        return ()
    return (*TASKS.values(), SUDOKU) if path.name == "diffusion" else tuple(TASKS.values())


def can_answer(tasks: tuple[Task, ...], question: str) -> bool:
    """Return True if a question is one of the tasks."""
    return any(task.pattern.fullmatch(question.strip()) for task in tasks)


def describe_tasks(tasks: tuple[Task, ...]) -> str:
    """Describe a demo's tasks in a sentence."""
    each = [f"{task.does} ({task.example})" if task.example else task.does for task in tasks]
    return f"This demo {', '.join(each)}; what it says to anything else means nothing."
