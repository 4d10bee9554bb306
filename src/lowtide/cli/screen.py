"""The terminal: consoles, text made safe to print, tables and progress bars."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TextIO

from rich.console import Console
from rich.live import Live
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
"""Width of tables that do not go to a terminal, so that nothing is cut or broken."""

_USUAL_WIDTH = 80

# A model's text must not move the cursor or retitle the window of its reader.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Replace control characters, other than newline and tab, by U+FFFD."""
    return _CONTROL.sub("\ufffd", text.replace("\r\n", "\n"))


def stdout_console() -> Console:
    """Return a console on standard output, for answers and tables.

    If it is not a terminal, tables are as wide as their columns.
    """
    console = _console(sys.stdout)
    if not console.is_terminal:
        console.width = max(console.width, FILE_WIDTH)
    return console


def stderr_console() -> Console:
    """Return a console on standard error, for messages that accompany an answer."""
    return _console(sys.stderr)


def number_table(title: str, columns: Sequence[str], left: Sequence[str] = ()) -> Table:
    """Make an empty table whose columns hold numbers, except those of `left`."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right")
    return table


def can_redraw(console: Console) -> bool:
    """Return True for a terminal that can redraw lines."""
    return console.is_terminal and not console.is_dumb_terminal


class _Console(Console):
    """Console that raises BrokenPipeError, so that the command reports it."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def _console(file: TextIO) -> Console:
    """Make a console that breaks lines between words on a terminal, and nowhere else.

    A pipe or file is not a terminal even if FORCE_COLOR is set: a live view would be noise there.
    """
    is_terminal = None if file.isatty() else False
    console = _Console(
        file=file, force_terminal=is_terminal, highlight=False, markup=False, emoji=False
    )
    if not console.width:  # COLUMNS=0, or a terminal that does not know: nothing would be shown
        console.width = _USUAL_WIDTH
    console.soft_wrap = not console.is_terminal
    return console


def start_display(display: Live | Progress) -> None:
    """Start a live display; if a signal interrupts that, show the cursor again."""
    try:
        display.start()
    except BaseException:
        with suppress(IndexError):  # of a display that is only half started
            display.stop()
        display.console.show_cursor(True)
        raise


class ProgressBars:
    """Progress bars on standard error, one per stage; nothing is shown off a terminal.

    Called with (stage, done, total), like every progress callback of lowtide. A bar disappears when
    its stage ends, since the next stage may take long without one.
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
        start_display(self._progress)
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
