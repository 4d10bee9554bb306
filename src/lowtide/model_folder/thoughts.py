"""Which of an answer's tokens are thoughts: what a model writes before the answer it is asked for.

By the tokens that mark them: `<think>` and `</think>` (Qwen3, DeepSeek, GLM), or the channels of
gpt-oss, of which only `final` is the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from lowtide.model_folder.tokenizer import Tokenizer


class Part(NamedTuple):
    """Some of an answer's tokens, in order."""

    is_thought: bool
    token_ids: list[int]


class Thoughts(Protocol):
    """Divides the tokens of one answer as they come."""

    def divide(self, token_ids: Sequence[int]) -> Iterator[Part]:
        """The next tokens in parts; the marks between them are in none."""
        ...


def thoughts_of(tokenizer: Tokenizer, prompt: Sequence[int]) -> Thoughts | None:
    """For the answer to a prompt; None for a model whose tokenizer has no such marks."""
    names = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
    ids = [tokenizer.token_id(name) for name in names]
    if None not in ids:
        return _Channels(tokenizer, *(mark for mark in ids if mark is not None), prompt=prompt)
    begin, end = tokenizer.token_id("<think>"), tokenizer.token_id("</think>")
    if begin is None or end is None:
        return None
    return _Marked(begin, end, prompt)


class _Marked:
    """Thoughts between two tokens; a template may have written the first."""

    def __init__(self, begin: int, end: int, prompt: Sequence[int]) -> None:
        self._begin, self._end = begin, end
        marks = [token for token in prompt if token in (begin, end)]
        self._is_thought = bool(marks) and marks[-1] == begin

    def divide(self, token_ids: Sequence[int]) -> Iterator[Part]:
        """See `Thoughts`."""
        part: list[int] = []
        for token in token_ids:
            if token in (self._begin, self._end):
                if part:
                    yield Part(self._is_thought, part)
                part, self._is_thought = [], token == self._begin
            else:
                part.append(token)
        if part:
            yield Part(self._is_thought, part)


class _Channels:
    """Messages, each behind a header that names its channel."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        start: int,
        channel: int,
        message: int,
        *ends: int,
        prompt: Sequence[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._start, self._channel, self._message, self._ends = start, channel, message, ends
        opened = [token for token in prompt if token in (start, message, *ends)]
        # A template ends with the beginning of a header; a text without any is an answer.
        self._header: list[int] | None = [] if opened and opened[-1] == start else None
        self._is_thought = False

    def divide(self, token_ids: Sequence[int]) -> Iterator[Part]:
        """See `Thoughts`."""
        part: list[int] = []
        for token in token_ids:
            if token == self._message:
                name = self._tokenizer.decode(self._header or [])
                self._header, self._is_thought = None, not name.strip().startswith("final")
            elif token in (self._start, self._channel, *self._ends):
                if part:
                    yield Part(self._is_thought, part)
                part, self._header = [], []
            elif self._header is not None:
                self._header.append(token)
            else:
                part.append(token)
        if part:
            yield Part(self._is_thought, part)
