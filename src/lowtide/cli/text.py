"""Write an answer as plain text while it is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO

from lowtide.cli.screen import printable

DIM, NOT_DIM = "\x1b[2m", "\x1b[22m"


class TextWriter:
    """Writes text to `out` as tokens are committed.

    Without a tokenizer (not `has_text`) token ids are written. On a terminal thoughts come before
    the text, dimmed, and control characters are made visible; elsewhere thoughts are left out.
    """

    def __init__(self, out: IO[str], has_text: bool, is_terminal: bool) -> None:
        self._out = out
        self._has_text = has_text
        self._is_terminal = is_terminal
        self._is_thought = False  # what was written last
        self.text = ""  # what a user who stops the answer has seen of it, thoughts apart

    def commit(self, tokens: Sequence[int], text: str, reasoning: str = "") -> None:
        """Write final tokens and their text."""
        if reasoning and self._is_terminal:
            self._is_thought = True
            self._out.write(DIM + printable(reasoning) + NOT_DIM)
            self._out.flush()
        self._write(text if self._has_text else "".join(f"{token} " for token in tokens))

    def finish(self, text: str) -> None:
        """Write the rest of the engine's own text of the whole answer, and a newline."""
        self._write(text.removeprefix(self.text) if text.startswith(self.text) else "")
        self._out.write("\n")
        self._out.flush()

    def _write(self, text: str) -> None:
        if text and self._is_thought:
            self._out.write("\n\n")
            self._is_thought = False
        self.text += text
        self._out.write(printable(text) if self._is_terminal else text)
        self._out.flush()
