"""An answer as plain text, written as it comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO

from lowtide.cli.screen import printable


class TextWriter:
    """Writes to `out` the text that is certain with committed tokens.

    Of a model without a tokenizer (not `has_text`) ids. On a terminal control characters are shown,
    not obeyed.
    """

    def __init__(self, out: IO[str], has_text: bool, is_terminal: bool) -> None:
        self._out = out
        self._has_text = has_text
        self._is_terminal = is_terminal
        self.text = ""  # what a user who stops the answer has seen

    def commit(self, tokens: Sequence[int], text: str) -> None:
        """Tokens that are final, and the text that became certain with them."""
        self._write(text if self._has_text else "".join(f"{token} " for token in tokens))

    def finish(self, text: str) -> None:
        """Takes the engine's own text of the whole answer: writes what is left, and a newline."""
        self._write(text.removeprefix(self.text) if text.startswith(self.text) else "")
        self._out.write("\n")
        self._out.flush()

    def _write(self, text: str) -> None:
        self.text += text
        self._out.write(printable(text) if self._is_terminal else text)
        self._out.flush()
