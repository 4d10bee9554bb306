"""Line editor of chat, based on prompt_toolkit: editing, pasting and a history."""

from __future__ import annotations

import errno
import os
import sys
import termios
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lowtide.errors import StorageError
from lowtide.files.folders import state_folder

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History

QUOTES = '"""'


class LineEditor:
    """Reader of a conversation's turns from standard input.

    On a terminal a pasted text is one message, and messages are kept in `history`, readable by this
    user alone (None: not kept). A turn that begins with three quotes continues to the next three.
    """

    def __init__(self, commands: Sequence[str], history: Path | None) -> None:
        self._is_typed = sys.stdin.isatty()
        can_edit = self._is_typed and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._session = _session(commands, history) if can_edit else None

    def read(self) -> str | None:
        """Return the next turn, or None at the end of input. Raises KeyboardInterrupt."""
        try:
            line = self._line("> ")
            if not line.startswith(QUOTES):
                return line
            text = line.removeprefix(QUOTES)
            while QUOTES not in text:
                text += "\n" + self._line("  ")
            said, _, rest = text.partition(QUOTES)
            # Text after the closing quotes: they belong to the text, such as a pasted file's.
            return QUOTES + text if rest.strip() else said.strip("\n")
        except EOFError:
            return None
        except OSError as error:
            if error.errno != errno.EIO:  # EIO: the terminal is gone
                raise
            return None

    def _line(self, prompt: str) -> str:
        if self._session is not None:
            return self._session.prompt(prompt)
        return input(prompt if self._is_typed else "")


def history_file() -> Path | None:
    """Return the history's path, or None for a user without a home."""
    try:
        return state_folder() / "chat_history"
    except StorageError:
        return None


@contextmanager
def without_echo() -> Iterator[None]:
    """Hide what is typed during an answer; it waits for the next prompt."""
    try:
        before = termios.tcgetattr(sys.stdin)
    except (OSError, ValueError, termios.error):  # no terminal
        yield
        return
    unseen = list(before)
    unseen[3] &= ~(termios.ECHO | termios.ICANON)  # Ctrl-C still interrupts
    termios.tcsetattr(sys.stdin, termios.TCSANOW, unseen)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def _session(commands: Sequence[str], history: Path | None) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import InMemoryHistory
    from prompt_toolkit.output.vt100 import Vt100_Output

    kept: History = InMemoryHistory()
    if history is not None:
        with suppress(OSError):  # a missing history is not an error
            history.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(history, os.O_CREAT | os.O_APPEND | os.O_RDWR, 0o600))
            kept = _file_history(history)
    completer = WordCompleter(list(commands), sentence=True)
    # The cursor's position is not needed; without this, terminals that lack it cause a warning.
    output = Vt100_Output.from_pty(sys.stdout, term=os.environ.get("TERM"))
    output.enable_cpr = False
    return PromptSession(
        history=kept, completer=completer, complete_while_typing=False, output=output
    )


def _file_history(path: Path) -> History:
    from prompt_toolkit.history import FileHistory

    class LenientHistory(FileHistory):
        """History that ignores a full disk, so that the conversation continues."""

        def store_string(self, string: str) -> None:
            with suppress(OSError):
                super().store_string(string)

    return LenientHistory(str(path))
