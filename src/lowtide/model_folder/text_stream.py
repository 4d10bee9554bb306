"""Convert token ids to text as they come, as far as the decoder allows."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""Names of single-byte tokens in sentence-piece vocabularies."""

_CHARACTER = re.compile(
    rb"[\x00-\x7f]|[\xc2-\xdf][\x80-\xbf]|\xe0[\xa0-\xbf][\x80-\xbf]|\xed[\x80-\x9f][\x80-\xbf]"
    rb"|[\xe1-\xec\xee\xef][\x80-\xbf]{2}|\xf0[\x90-\xbf][\x80-\xbf]{2}|\xf4[\x80-\x8f][\x80-\xbf]{2}"
    rb"|[\xf1-\xf3][\x80-\xbf]{3}"
)
"""A character in UTF-8."""

_NAME_CHARS = frozenset("<0x123456789ABCDEFabcdef>")


class Decoding(Protocol):
    """Decoder of token ids."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of all ids."""
        ...


class TextStream:
    """Decoder of ids as they come, which returns complete characters only.

    The texts of all `push` calls and of `finish`, joined, are the text of all ids. If later ids may
    change any earlier text (`is_local` is False), all of it comes at the end. is_text: returns
    False for an id that makes no text.
    """

    _MAX_HELD_CHARS = 3
    """Replacement characters of an unfinished character, one per byte."""

    _WINDOW_TOKENS = 64
    _KEPT_TOKENS = 16
    """Ids kept of a window that is cut.

    A decoder treats a text's first word differently, and no character has as many tokens.
    """

    _MAX_CHARACTER_TOKENS = 4
    """Most tokens of a character, one for each byte: of so many neighbouring places, one is between
    two characters."""

    def __init__(
        self,
        tokenizer: Decoding,
        is_local: bool = True,
        is_text: Callable[[int], bool] | None = None,
    ) -> None:
        self._tokenizer, self._is_local, self._is_text = tokenizer, is_local, is_text
        self._window: list[int] = []  # the latest ids
        self._num_sent = 0  # characters of the window's text that were handed out

    def begin_after(self, ids: Sequence[int]) -> None:
        """Begin a text that continues these ids, so that its first word keeps its space."""
        self._window = self._texts(ids)[-self._KEPT_TOKENS :]
        text = self._tokenizer.decode(self._window)
        self._num_sent = len(text) - self._num_open(text)  # half a character is still to come

    def copy(self) -> TextStream:
        """Return an independent stream in the same state."""
        return copy.copy(self)

    def push(self, ids: Sequence[int]) -> str:
        """Return the new text that is certain after these ids; may be empty."""
        self._window = [*self._window, *self._texts(ids)]  # copies share the list
        if not self._is_local:
            return ""
        text = self._tokenizer.decode(self._window)
        new = self._take(text[: len(text) - self._num_open(text)])
        if len(self._window) > self._WINDOW_TOKENS:
            self._shorten(text)
        return new

    def finish(self) -> str:
        """Return the text held back. The stream can then begin a new text."""
        new = self._take(self._tokenizer.decode(self._window))
        self._window, self._num_sent = [], 0
        return new

    def _texts(self, ids: Sequence[int]) -> list[int]:
        return list(ids) if self._is_text is None else [i for i in ids if self._is_text(i)]

    def _num_open(self, text: str) -> int:
        """Return the number of characters at the end that may still change."""
        return min(len(text) - len(text.rstrip("\ufffd")), self._MAX_HELD_CHARS)

    def _take(self, text: str) -> str:
        new = text[self._num_sent :]
        self._num_sent += len(new)
        return new

    def _shorten(self, text: str) -> None:
        """Keep the last ids of a window, from the first place that is within no character."""
        num_held = len(text) - self._num_sent
        for num_more in range(self._MAX_CHARACTER_TOKENS):
            num_kept = self._KEPT_TOKENS + num_more
            head, tail = self._window[:-num_kept], self._window[-num_kept:]
            before, after = self._tokenizer.decode(head), self._tokenizer.decode(tail)
            is_apart = text.startswith(before) and text.endswith(after)
            is_apart &= len(before) + len(after) <= len(text)
            if is_apart and len(after) > num_held:
                self._window, self._num_sent = tail, len(after) - num_held
                return


_LISTS = ("normalizers", "pretokenizers", "processors", "decoders")
"""Keys of parts made of steps."""


def steps_of(part: Any) -> list[Mapping[str, Any]]:
    """Return the steps of a part of a tokenizer, in order, as in `tokenizer.json`."""
    if part is None:
        return []
    found: list[Mapping[str, Any]] = []
    left: list[Mapping[str, Any]] = [json.loads(part.__getstate__())]
    while left:
        step = left.pop()
        steps = next((step[name] for name in _LISTS if name in step), None)
        if steps is None:
            found.append(step)
        else:
            left += steps[::-1]
    return found


def is_local(steps: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if later tokens change no earlier text, except the last character.

    True of steps on single tokens, and of steps on the ends of a text.
    """
    is_joined = False
    for place, step in enumerate(steps):
        kind, pattern = step.get("type"), step.get("pattern", {}).get("String")
        if kind == "ByteFallback" and not all(map(_keeps_bytes, steps[:place])):
            return False
        if is_joined and not (
            kind in ("Fuse", "Strip") or (kind == "Replace" and pattern and len(pattern) == 1)
        ):
            return False
        is_joined |= kind in ("Fuse", "ByteLevel")
    return True


def _keeps_bytes(step: Mapping[str, Any]) -> bool:
    """Return True if a step before `ByteFallback` leaves byte tokens unchanged."""
    pattern = step.get("pattern", {}).get("String", "")
    return step.get("type") == "Replace" and bool(pattern) and _NAME_CHARS.isdisjoint(pattern)


def with_valid_bytes(tokens: list[str]) -> list[str]:
    """Replace byte tokens that form no character, as sentencepiece does.

    The tokenizers library would drop all characters of such a run.
    """
    found = list(tokens)
    values = [BYTE_TOKEN.fullmatch(token) for token in tokens]
    start = 0
    while start < len(tokens):
        end = start
        run = bytearray()
        while end < len(tokens) and (value := values[end]) is not None:
            run.append(int(value[1], 16))
            end += 1
        found[start:end] = _shown(found[start:end], bytes(run))
        start = end + 1
    return found


def _shown(tokens: list[str], run: bytes) -> list[str]:
    is_valid = [False] * len(run)
    for match in _CHARACTER.finditer(run):
        is_valid[match.start() : match.end()] = [True] * len(match[0])
    return [t if good else "\ufffd" for t, good in zip(tokens, is_valid, strict=True)]
