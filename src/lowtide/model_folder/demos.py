"""The bundled models: which there are, where they lie, and what they can be asked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

DEMO_FOLDER = Path(__file__).parents[1] / "demo"
DEMO_NAMES = ("diffusion", "autoregressive")
OLD_DEMO_NAMES = {"chat": "autoregressive"}


class Task(NamedTuple):
    """Something that demos were trained on. example: a question; pattern: all of them."""

    does: str
    example: str
    pattern: re.Pattern[str]


def _asked(does: str, example: str, pattern: str) -> Task:
    return Task(does, example, re.compile(pattern))


_ROMAN = r"([1-9]\d?|[123]\d\d)"

TASKS = {
    "sum": _asked("adds", "47 + 85", r"\d\d? \+ \d\d?( =)?|What is \d\d? \+ \d\d?\?"),
    "sort": _asked("sorts", "Sort 93 21 57 40 12", r"[Ss]ort( [1-9]\d){3,6}"),
    "roman": _asked(
        "writes Roman numerals", "Roman 148", rf"Roman {_ROMAN}|{_ROMAN} in Roman numerals"
    ),
    "json end": _asked("ends JSON", 'Close {"age": [12, 7', r"(Close|Complete) [\[{].*\d"),
    "json value": _asked(
        "looks up a key",
        'Get age of {"age": 12, "size": 7}',
        r'(Get|What is) [a-z]+ of \{("[a-z]+": \d+(, )?){2,4}\}\??',
    ),
}
"""What both demos do, as `model_folder/demo_tasks.py` draws it."""

SUDOKU = _asked(
    "solves sudokus of six rows (make demo)",
    "",
    r"Solve sudoku:(\n[1-6.]{3} [1-6.]{3}){6}",
)


def tasks_of(path: Path) -> tuple[Task, ...]:
    """What a demo at this place can be asked; nothing where there is none."""
    if path.parent != DEMO_FOLDER:
        return ()
    return (*TASKS.values(), SUDOKU) if path.name == "diffusion" else tuple(TASKS.values())


def can_answer(tasks: tuple[Task, ...], question: str) -> bool:
    """Whether a question is one of the tasks."""
    return any(task.pattern.fullmatch(question.strip()) for task in tasks)


def told(tasks: tuple[Task, ...]) -> str:
    """What a demo can be asked, for people."""
    each = [f"{task.does} ({task.example})" if task.example else task.does for task in tasks]
    return f"This demo {', '.join(each)}; what it says to anything else means nothing."
