"""Split an answer's tokens into text and marks such as `<think>` and `<tool_call>`.

A mark that the tokenizer has as one token is that token alone: the same letters written otherwise
are text, since a model that writes about a mark does not use it. Other marks are found in the text.
Special tokens that are not marks are reported, too: inside a value of a call they are text.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from lowtide.model_folder.tokenizer import Tokenizer, num_begun


class Mark(NamedTuple):
    """A mark as written."""

    text: str


class Special(NamedTuple):
    """A special token that is not a mark, as written."""

    text: str


Item = str | Mark | Special

_FEW_TOKENS = 64
"""Tokens that are first decoded together; twice as many each time there is no mark in them."""


def last_mark(
    tokenizer: Tokenizer, token_ids: Sequence[int], marks: Collection[str]
) -> tuple[str, list[int]]:
    """Return the last token of a text that is one of `marks`, and the tokens after it.

    Returns "" and nothing if there is none.
    """
    by_id = {tokenizer.token_id(mark): mark for mark in marks}
    for place in range(len(token_ids) - 1, -1, -1):
        mark = by_id.get(token_ids[place])
        if mark is not None:
            return mark, list(token_ids[place + 1 :])
    return "", []


class MarkedText:
    """Splitter that owns the detokenizer of one answer, and text that may still begin a mark.

    The items of all `push` calls and of `finish`, joined, are the text of all tokens, including
    marks and special tokens, except a special token at the very end, which ends the answer.
    """

    def __init__(self, tokenizer: Tokenizer, marks: Collection[str]) -> None:
        ids = {mark: tokenizer.token_id(mark) for mark in marks}
        self._by_id = {token: mark for mark, token in ids.items() if token is not None}
        self._written = [mark for mark, token in ids.items() if token is None]
        self._special = tokenizer.special_texts
        self._stream = tokenizer.stream()
        self._held = ""
        self._last = ""  # a special token, if another one follows

    def parts(self, token_ids: Sequence[int]) -> Iterator[tuple[list[Item], int]]:
        """Yield text and marks that are certain, each with the number of tokens it comes from.

        Tokens without marks are decoded together: one by one would take longer than the pass of a
        small model.
        """
        place, most = 0, _FEW_TOKENS
        while place < len(token_ids):
            run = self._plain(token_ids[place : place + most])
            if run and self._last:
                yield [Special(self._last)], 0
                self._last = ""
            text = self._plain_text(run)
            if text is None and len(run) > 1:
                most = len(run) // 2  # it contains a mark: try the text before it
                continue
            if text is None:
                run = token_ids[place : place + 1]
                yield list(self.push(run[0])), 1
            else:
                yield ([text] if text else []), len(run)
            place += len(run)
            most *= 2

    def _plain(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Return the tokens before the first mark or special token."""
        places = (i for i, t in enumerate(token_ids) if t in self._by_id or t in self._special)
        return token_ids[: next(places, len(token_ids))]

    def _plain_text(self, token_ids: Sequence[int]) -> str | None:
        """Return the certain text of plain tokens; None, changing nothing, if there is a mark."""
        if len(token_ids) < 2:
            return None
        stream = self._stream.copy()
        text = self._held + stream.push(token_ids)
        if any(mark in text for mark in self._written):
            return None
        self._stream, self._held = stream, ""
        return "".join(str(item) for item in self._divided(text))

    def push(self, token_id: int) -> Iterator[Item]:
        """Yield the items that are certain after one more token."""
        if self._last:
            yield Special(self._last)
        mark = self._by_id.get(token_id)
        self._last = "" if mark is not None else self._special.get(token_id, "")
        if mark is None:
            yield from self._divided(self._stream.push([token_id]))
            if self._last:
                yield from self._rest()
        else:
            yield from self.finish()
            yield Mark(mark)

    def finish(self) -> Iterator[Item]:
        """Yield the text held back. Another text may follow."""
        yield from self._divided(self._stream.finish())
        yield from self._rest()

    def _rest(self) -> Iterator[Item]:
        held, self._held = self._held, ""
        if held:
            yield held

    def _divided(self, new: str) -> Iterator[Item]:
        """Divide held and new text at marks written as text."""
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
