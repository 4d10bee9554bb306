"""An answer as plain text, written as it comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, Protocol

from lowtide.cli.screen import printable


class TextStream(Protocol):
    """Decodes ids a few at a time, into complete characters."""

    def push(self, ids: Sequence[int]) -> str: ...


class Decoder(Protocol):
    """What the writer needs of a tokenizer."""

    def stream(self) -> TextStream: ...


class TextWriter:
    """Writes the text of committed tokens to `out`, up to where a stop string may have begun.

    Without a tokenizer it writes ids. On a terminal control characters are shown, not obeyed.
    """

    def __init__(
        self, out: IO[str], decoder: Decoder | None, stop: Sequence[str], is_terminal: bool
    ) -> None:
        self._out = out
        self._stream = None if decoder is None else decoder.stream()
        self._stop = stop
        self._is_terminal = is_terminal
        self._num_held = max(map(len, stop), default=1) - 1
        self._held = ""  # not written: a stop string may have begun in it
        self._is_stopped = False
        self.text = ""  # what a user who stops the answer has seen

    def commit(self, tokens: Sequence[int]) -> None:
        """Tokens that are final."""
        if self._stream is None:
            self._write("".join(f"{token} " for token in tokens))
            return
        self._held += self._stream.push(tokens)
        self._is_stopped |= any(string in self._held for string in self._stop)
        if not self._is_stopped:
            num_sure = max(0, len(self._held) - self._num_held)
            sure, self._held = self._held[:num_sure], self._held[num_sure:]
            self._write(sure)

    def finish(self, text: str) -> None:
        """Takes the engine's own text of the whole answer: writes what is left, and a newline."""
        self._write(text.removeprefix(self.text) if text.startswith(self.text) else "")
        self._out.write("\n")
        self._out.flush()

    def _write(self, text: str) -> None:
        self.text += text
        self._out.write(printable(text) if self._is_terminal else text)
        self._out.flush()
