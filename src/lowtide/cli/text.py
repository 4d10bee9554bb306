"""An answer as plain text, written as it comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, TYPE_CHECKING

from lowtide.cli.screen import printable

if TYPE_CHECKING:
    from lowtide.model_folder.tokenizer import Tokenizer


class TextWriter:
    """Writes the text of committed tokens to `out`, up to where a stop string may have begun.

    Without a tokenizer it writes ids. On a terminal control characters are shown, not obeyed.
    """

    def __init__(
        self, out: IO[str], tokenizer: Tokenizer | None, stop: Sequence[str], is_terminal: bool
    ) -> None:
        self._out = out
        self._stream = None if tokenizer is None else tokenizer.stream(stop)
        self._is_terminal = is_terminal
        self.text = ""  # what a user who stops the answer has seen

    def commit(self, tokens: Sequence[int]) -> None:
        """Tokens that are final."""
        if self._stream is None:
            self._write("".join(f"{token} " for token in tokens))
        else:
            self._write(self._stream.push(tokens))

    def finish(self, text: str) -> None:
        """Takes the engine's own text of the whole answer: writes what is left, and a newline."""
        self._write(text.removeprefix(self.text) if text.startswith(self.text) else "")
        self._out.write("\n")
        self._out.flush()

    def _write(self, text: str) -> None:
        self.text += text
        self._out.write(printable(text) if self._is_terminal else text)
        self._out.flush()
