"""An answer as plain text, written as it comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, TYPE_CHECKING

from lowtide.cli.screen import printable

if TYPE_CHECKING:
    from lowtide.serve.parsing import AnswerParser
    from lowtide.serve.pieces import Piece

DIM, NOT_DIM = "\x1b[2m", "\x1b[22m"


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


class ThinkingWriter(TextWriter):
    """Writes thoughts dimmed and apart, on a terminal alone; `text` is the answer without them."""

    def __init__(self, out: IO[str], parser: AnswerParser, is_terminal: bool) -> None:
        super().__init__(out, True, is_terminal)
        self._parser = parser
        self._is_thought = False

    def commit(self, tokens: Sequence[int], text: str) -> None:
        """Tokens that are final; their text is made part by part."""
        self._write_pieces(self._parser.feed(tokens))

    def finish(self, text: str) -> None:
        """Writes what was held back, and a newline."""
        self._write_pieces(self._parser.finish())
        self._out.write("\n")
        self._out.flush()

    def _write_pieces(self, pieces: Sequence[Piece]) -> None:
        from lowtide.serve.pieces import Reasoning, Text

        for piece in pieces:
            if isinstance(piece, Reasoning) and self._is_terminal:
                self._is_thought = True
                self._out.write(DIM + printable(piece.text) + NOT_DIM)
                self._out.flush()
            elif isinstance(piece, Text):
                if self._is_thought:
                    self._out.write("\n\n")
                self._is_thought = False
                self._write(piece.text)
