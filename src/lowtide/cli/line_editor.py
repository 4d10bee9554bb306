"""Lines that a user types: edited and remembered where the system has a library for that."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from lowtide.errors import StorageError
from lowtide.files.folders import state_folder

try:
    import readline
except ImportError:  # Python was built without it: lines are what the terminal makes of them
    readline = None  # type: ignore[assignment]

MAX_LINES = 1000
QUOTES = '"""'


class LineEditor:
    """Reads turns of a conversation from standard input, on a terminal with history.

    Lines are kept in `history`, for this user's eyes only, when it is left. A turn that begins
    with three quotes goes on to the next three.
    """

    def __init__(self, commands: Sequence[str], history: Path | None = None) -> None:
        self._commands = commands
        self._history = history or _kept_history()
        self._has_editor = readline is not None and sys.stdin.isatty() and sys.stdout.isatty()

    def __enter__(self) -> LineEditor:
        if self._has_editor:
            readline.set_history_length(MAX_LINES)
            readline.set_completer_delims(" ")
            readline.set_completer(self._completed)
            readline.parse_and_bind("tab: complete")
            with suppress(OSError):  # there is none yet, or none that can be read
                if self._history is not None:
                    readline.read_history_file(self._history)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._has_editor:
            readline.set_completer(None)
            with suppress(OSError):  # a history is no reason to end in an error
                if self._history is not None:
                    _keep(self._history)

    def read(self) -> str | None:
        """The next turn, or None at the end of input. Raises KeyboardInterrupt."""
        is_typed = sys.stdin.isatty()
        try:
            line = input("> " if is_typed else "")
            if not line.startswith(QUOTES):
                return line
            text = line.removeprefix(QUOTES)
            while QUOTES not in text:
                text += "\n" + input("  " if is_typed else "")
            return text.partition(QUOTES)[0].strip("\n")
        except EOFError:
            return None

    def _completed(self, begun: str, number: int) -> str | None:
        """The so manieth command that begins so."""
        found = [name for name in self._commands if begun and name.startswith(begun)]
        return found[number] if number < len(found) else None


def _kept_history() -> Path | None:
    """Where lines are kept; None for a user who has no home."""
    try:
        return state_folder() / "chat_history"
    except StorageError:
        return None


def _keep(history: Path) -> None:
    history.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(history, os.O_CREAT | os.O_WRONLY, 0o600))
    readline.write_history_file(history)
