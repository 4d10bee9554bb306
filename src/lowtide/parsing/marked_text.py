"""An answer's tokens, one by one, as text and the marks in it: `<think>`, `<tool_call>`, ...

A mark that the tokenizer has as one token is that token alone: the same letters written otherwise
are text, for a model that speaks of a mark does not make one. Others are found in the text.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from lowtide.model_folder.tokenizer import Tokenizer, num_begun


class Mark(NamedTuple):
    """A mark that was found. text: as it is written."""

    text: str


def last_mark(
    tokenizer: Tokenizer, token_ids: Sequence[int], marks: Collection[str]
) -> tuple[str, list[int]]:
    """The last of `marks` that is a token among others, and the tokens behind it; "" and nothing
    where there is none."""
    by_id = {tokenizer.token_id(mark): mark for mark in marks}
    for place in range(len(token_ids) - 1, -1, -1):
        mark = by_id.get(token_ids[place])
        if mark is not None:
            return mark, list(token_ids[place + 1 :])
    return "", []


class MarkedText:
    """Owns the decoder of one answer, and what of its text may still begin a mark.

    The items of all `push` calls and of `finish`, joined, are the text of all tokens, marks
    included.
    """

    def __init__(self, tokenizer: Tokenizer, marks: Collection[str]) -> None:
        ids = {mark: tokenizer.token_id(mark) for mark in marks}
        self._by_id = {token: mark for mark, token in ids.items() if token is not None}
        self._written = [mark for mark, token in ids.items() if token is None]
        self._stream = tokenizer.stream()
        self._held = ""

    def push(self, token_id: int) -> Iterator[str | Mark]:
        """What is certain after one more token."""
        mark = self._by_id.get(token_id)
        if mark is None:
            yield from self._divided(self._stream.push([token_id]))
        else:
            yield from self.finish()
            yield Mark(mark)

    def finish(self) -> Iterator[str | Mark]:
        """What was held back. Another text may follow."""
        yield from self._divided(self._stream.finish())
        held, self._held = self._held, ""
        if held:
            yield held

    def _divided(self, new: str) -> Iterator[str | Mark]:
        """The text held back and new text, at the marks that are written as text."""
        text, self._held = self._held + new, ""
        while places := [(text.find(mark), mark) for mark in self._written if mark in text]:
            place, mark = min(places)
            if place:
                yield text[:place]
            yield Mark(mark)
            text = text[place + len(mark) :]
        num_held = max((num_begun(text, mark) for mark in self._written), default=0)
        certain, self._held = text[: len(text) - num_held], text[len(text) - num_held :]
        if certain:
            yield certain
