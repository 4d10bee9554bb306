"""Token mask for answers that may call a tool but need not.

Before a call the mask only watches for the mark that begins one. From the mark to the call's end it
enforces the tools' schemas; after that the answer is free again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from llguidance import LLTokenizer

from lowtide.core import BoolArray
from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.parsing.channels import CHANNEL, MESSAGE, START, has_channels
from lowtide.parsing.thoughts import thought_marks_of
from lowtide.serve.grammar_compiler import Compiled
from lowtide.serve.grammar_mask import GrammarMask
from lowtide.serve.grammar_text import Opening


class _WrittenToken(NamedTuple):
    token_id: int
    text: bytes


class CallMask:
    """`TokenMask` of one answer. Calls inside the model's thoughts are not constrained.

    Two calls escape the schemas: one whose mark ends within a token that already contains an
    unfitting continuation, and one whose grammar becomes too complex.
    """

    failure = ""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocabulary: LLTokenizer,
        vocab_size: int,
        openings: Sequence[tuple[Opening, Compiled]],
        is_thinking: bool,
    ) -> None:
        self._vocabulary, self._vocab_size, self._openings = vocabulary, vocab_size, openings
        self._special = tokenizer.special_texts
        marks = thought_marks_of(tokenizer)
        both = () if marks is None else map(tokenizer.token_id, marks.both)
        self._thoughts = dict(zip(both, (True, False), strict=False))
        self._is_thinking, self._is_header = is_thinking, has_channels(tokenizer)
        self._num_held = max(len(opening.mark.encode()) for opening, _ in openings) - 1
        self._written: list[_WrittenToken] = []  # in which letters of a mark may have begun
        self._call: GrammarMask | None = None

    @property
    def is_free(self) -> bool:
        return self._call is None

    def allowed(self) -> BoolArray:
        if self._call is not None:
            allowed = self._call.allowed()
            if not self._call.failure:
                return allowed
            self._call = None
        return np.ones(self._vocab_size, np.bool_)

    def permits(self, token_id: int) -> bool:
        return self._call is None or self._call.fits(token_id)

    def take(self, token_id: int) -> None:
        if self._call is None:
            self._look(token_id)
            return
        self._call.take(token_id)
        if self._call.is_over:
            self._call = None

    def _look(self, token_id: int) -> None:
        """Start enforcing a call if this token completes a call's mark."""
        self._is_thinking = self._thoughts.get(token_id, self._is_thinking)
        special = self._special.get(token_id)
        if special is not None:
            self._written.clear()
            self._is_header = special in (CHANNEL, START) or (
                self._is_header and special != MESSAGE
            )
        if self._is_thinking:
            return
        for opening, compiled in self._openings:
            if opening.token_id == token_id:
                self._begin(compiled, [token_id])
                return
        if special is None:
            self._look_for_letters(token_id)

    def _look_for_letters(self, token_id: int) -> None:
        self._written.append(_WrittenToken(token_id, self._vocabulary.decode_bytes([token_id])))
        text = b"".join(each.text for each in self._written)
        for opening, compiled in self._openings:
            if opening.token_id is None and (self._is_header or not opening.in_header):
                place = text.find(opening.mark.encode())
                if place >= 0:
                    self._drop(len(text) - place)
                    self._begin(compiled, [each.token_id for each in self._written])
                    return
        self._drop(self._num_held)

    def _drop(self, num_bytes: int) -> None:
        """Remove tokens, except as many as hold the last `num_bytes` bytes."""
        left = sum(len(each.text) for each in self._written)
        while self._written and left - len(self._written[0].text) >= num_bytes:
            left -= len(self._written.pop(0).text)

    def _begin(self, compiled: Compiled, token_ids: Sequence[int]) -> None:
        self._written.clear()
        call = GrammarMask(compiled, self._vocab_size)
        if call.try_take(token_ids) and not call.is_over:
            self._call = call
