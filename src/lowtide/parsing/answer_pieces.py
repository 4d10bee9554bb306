"""Turn an answer's tokens into pieces, ending at the first stop string.

Stop strings apply to the answer's text, not to thoughts or calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lowtide.decode.request import Finished, Request
from lowtide.model_folder.tokenizer import Tokenizer, num_begun
from lowtide.parsing import AnswerParser, has_thoughts, parser_of
from lowtide.parsing.pieces import CallBegun, Done, Piece, Text


class PlainText:
    """Stand-in for `AnswerParser` that takes all tokens as text, thoughts included.

    Without a tokenizer there is no text. after: a prompt that the answer continues.
    """

    num_reasoning = 0

    def __init__(self, tokenizer: Tokenizer | None, after: Sequence[int] = ()) -> None:
        self._stream = None if tokenizer is None else tokenizer.stream()
        if self._stream is not None and after:
            self._stream.begin_after(after)

    def feed(self, token_ids: Sequence[int]) -> list[Piece]:
        return [] if self._stream is None else _as_text(self._stream.push(token_ids))

    def finish(self, is_cut: bool = False) -> list[Piece]:
        return [] if self._stream is None else _as_text(self._stream.finish())


class AnswerPieces:
    """The pieces of one answer as its tokens come.

    parallel_calls: accept several calls; otherwise the answer ends where a second one begins.
    """

    def __init__(
        self,
        reader: AnswerParser | PlainText,
        stop: Sequence[str] = (),
        parallel_calls: bool = True,
    ) -> None:
        self._reader = reader
        self._stop = StopStrings(stop)
        self._parallel_calls = parallel_calls
        self._num_calls = 0
        self._is_new_part = False  # the next text begins a new part
        self.is_complete = False  # no more tokens are wanted

    def push(self, token_ids: Sequence[int]) -> list[Piece]:
        """Return the pieces that are certain after these tokens."""
        return self._taken(self._reader.feed(token_ids))

    def finish(self, is_cut: bool = False) -> list[Piece]:
        """Return the pieces held back; is_cut: the answer ended at its length limit."""
        pieces = self._taken(self._reader.finish(is_cut))
        return pieces if self.is_complete else [*pieces, *self._rest()]

    def done(self, request: Request, finished: Finished) -> Done:
        """Return the last piece."""
        reason = finished.finish_reason
        return Done(
            reason="tool_calls" if reason == "stop" and self._num_calls else reason,
            num_prompt=len(request.prompt),
            num_new=len(finished.token_ids),
            num_resumed=finished.num_resumed,
            num_reasoning=self._reader.num_reasoning,
            stop_string=self._stop.found,
            token_ids=finished.token_ids,
        )

    def _rest(self) -> list[Piece]:
        """Return the text held back."""
        rest = _as_text(self._stop.finish(), self._is_new_part)
        self._is_new_part &= not rest
        return rest

    def _taken(self, pieces: Sequence[Piece]) -> list[Piece]:
        taken: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, CallBegun):
                self.is_complete |= bool(self._num_calls) and not self._parallel_calls
                self._num_calls += not self.is_complete
            if self.is_complete:
                break
            if isinstance(piece, Text):
                before = self._stop.finish() if piece.is_new_part else ""
                new = self._stop.push(piece.text)
                self._is_new_part |= piece.is_new_part
                taken += [*_as_text(before), *_as_text(new, self._is_new_part)]
                self._is_new_part &= not new
                self.is_complete = self._stop.found is not None
            else:
                taken += [*self._rest(), piece]
        return taken


class CompletionTest:
    """Predicate for a decoder: True once the pieces of the ids so far are complete."""

    def __init__(self, pieces: AnswerPieces) -> None:
        self._pieces = pieces
        self._num_seen = 0

    def __call__(self, token_ids: Sequence[int]) -> bool:
        try:
            self._pieces.push(token_ids[self._num_seen :])
        except Exception:  # end only this answer; its own reader will raise the same error
            return True
        self._num_seen = len(token_ids)
        return self._pieces.is_complete


class StopStrings:
    """Cuts a text that comes in parts before the first stop string; `found` is that string."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._held = ""  # may begin one
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Return the text that certainly belongs to no stop string."""
        text, self._held = self._held + text, ""
        places = [(text.find(each), each) for each in self._strings if each in text]
        if places:
            end, self.found = min(places)
            return text[:end]
        num_held = max((num_begun(text, each) for each in self._strings), default=0)
        certain = text[: len(text) - num_held]
        self._held = text[len(certain) :]
        return certain

    def finish(self) -> str:
        """Return the text held back, which began no stop string."""
        held, self._held = self._held, ""
        return held


def _as_text(text: str, is_new_part: bool = False) -> list[Piece]:
    return [Text(text, is_new_part)] if text else []


def pieces_of(request: Request, tokenizer: Tokenizer | None) -> AnswerPieces:
    """Make the pieces of an answer to a request without tools.

    Thoughts are separated if the model's tokens mark them, unless the request is raw.
    """
    reader: AnswerParser | PlainText
    reader = PlainText(tokenizer, request.prompt if request.is_raw else ())
    if tokenizer is not None and not request.is_raw and has_thoughts(tokenizer):
        reader = parser_of(tokenizer, request.prompt)
    return AnswerPieces(reader, request.params.stop_strings)


def with_stop_test(request: Request, tokenizer: Tokenizer | None) -> Request:
    """Return the request with a test that ends decoding at a stop string."""
    if not request.params.stop_strings:
        return request
    # The engine's thread has a reader of its own, which is ahead of the readers of events.
    return replace(request, is_stopped=CompletionTest(pieces_of(request, tokenizer)))
