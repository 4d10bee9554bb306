"""Writer of an answer's pieces, without the blank lines that only separate its parts."""

from __future__ import annotations

from lowtide.parsing.pieces import CallArguments, CallBegun, Piece, Reasoning, Text


class PieceWriter:
    """Collects the pieces of one answer.

    Line breaks at the beginning of a part are dropped, and blanks at the end of a part that another
    one follows: templates add them when the answer is part of the next prompt. The first part keeps
      its beginning, the last one its end.
    """

    def __init__(self) -> None:
        self.is_reasoning = False
        self.num_calls = 0
        self.follows_call = False  # nothing was written since
        self.has_words = False  # the part that is written
        self._pieces: list[Piece] = []
        self._is_beginning = False  # of a part that has another one before it
        self._told: set[bool] = set()  # False once text was written, True once thoughts were
        self._is_new = False  # nothing of the part was written
        self._blanks = ""  # at the end so far

    def turn_to(self, is_reasoning: bool) -> None:
        """Begin another part."""
        self.is_reasoning, self.has_words = is_reasoning, False
        self._is_beginning, self._is_new, self._blanks = True, True, ""

    def write(self, text: str) -> None:
        """Append to the part."""
        if self._is_beginning:
            text = text.lstrip("\n")
            if not text:
                return
            self._is_beginning = False
        text = self._blanks + text
        certain = text.rstrip()
        self._blanks = text[len(certain) :]
        if certain:
            self.follows_call = False
            is_new_part = self._is_new and self.is_reasoning in self._told
            kind = Reasoning if self.is_reasoning else Text
            self._pieces.append(kind(certain, is_new_part))
            self._told.add(self.is_reasoning)
            self.has_words = True
            self._is_new = False

    def begin_call(self, call_id: str, name: str) -> None:
        """Begin a call, whose arguments follow."""
        self._pieces.append(CallBegun(self.num_calls, call_id, name))
        self.num_calls += 1
        self.follows_call = True
        self.turn_to(is_reasoning=False)

    def arguments(self, text: str) -> None:
        """Append to the arguments of the latest call."""
        if text:
            self._pieces.append(CallArguments(self.num_calls - 1, text))

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """Write a whole call. arguments: a JSON object as text."""
        self.begin_call(call_id, name)
        self.arguments(arguments)

    def take_over(self, other: PieceWriter) -> None:
        """Append the pieces of another writer, renumbering its calls."""
        for piece in other.finish():
            if isinstance(piece, CallBegun):
                self.begin_call(piece.id, piece.name)
            elif isinstance(piece, CallArguments):
                self.arguments(piece.text)
            elif isinstance(piece, Text):
                self.write(piece.text)

    def take(self) -> list[Piece]:
        """Return the pieces since the last call."""
        taken, self._pieces = self._pieces, []
        return taken

    def finish(self) -> list[Piece]:
        """Return the last pieces."""
        if self._blanks and not self.is_reasoning:
            self._pieces.append(Text(self._blanks))
        return self.take()
