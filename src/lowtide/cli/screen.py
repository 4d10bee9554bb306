"""The terminal: consoles for the two streams, text made safe to print, tables, progress bars."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

FILE_WIDTH = 1000
"""Columns that a table may have which is not shown on a terminal: nothing is cut or broken."""

# A model's text must not move the cursor or retitle the window of its reader.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """`text` with control characters, other than newline and tab, shown as U+FFFD."""
    return _CONTROL.sub("\ufffd", text.replace("\r\n", "\n"))


def stdout_console() -> Console:
    """A console on standard output: answers, tables that were asked for.

    Where that is no terminal, tables have room for their columns.
    """
    console = _console(sys.stdout)
    if not console.is_terminal:
        console.width = max(console.width, FILE_WIDTH)
    return console


def stderr_console() -> Console:
    """A console on standard error: everything that accompanies an answer."""
    return _console(sys.stderr)


def number_table(title: str, columns: Sequence[str], left: Sequence[str] = ()) -> Table:
    """A table without rows, whose columns hold numbers but for those of `left`."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right")
    return table


def can_redraw(console: Console) -> bool:
    """Whether there is a terminal that lets what it shows be written over."""
    return console.is_terminal and not console.is_dumb_terminal


class _Console(Console):
    """One that leaves it to the command to say that its reader has gone."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def _console(file: TextIO) -> Console:
    """Lines are broken between words on a terminal, and nowhere else.

    A pipe or a file is none, also where FORCE_COLOR asks for colours: a live view would be noise.
    """
    is_terminal = None if file.isatty() else False
    console = _Console(
        file=file, force_terminal=is_terminal, highlight=False, markup=False, emoji=False
    )
    console.soft_wrap = not console.is_terminal
    return console


class ProgressBars:
    """A bar per stage on standard error, on a terminal only; elsewhere nothing is shown.

    Called with (stage, done, total), as everything in lowtide that takes long reports. A bar goes
    when its stage has ended: what comes next may take long without a bar.
    """

    def __init__(self) -> None:
        console = stderr_console()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not can_redraw(console),
        )
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        name = stage.partition(": ")[0]
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(stage, total=total)
        self._progress.update(
            self._tasks[name],
            description=stage,
            completed=done,
            total=total,
            visible=done < total,
        )

    def __enter__(self) -> ProgressBars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
