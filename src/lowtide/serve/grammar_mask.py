"""Token mask of an answer that follows a grammar."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lowtide.core import BoolArray
from lowtide.serve.grammar_compiler import Compiled
from lowtide.serve.grammar_reasons import reason_of


class GrammarMask:
    """`TokenMask` that allows the tokens with which one answer's grammar can continue.

    failure: why the grammar could not be enforced, or "". The answer then ends.
    """

    def __init__(self, compiled: Compiled, vocab_size: int) -> None:
        self._compiled, self._vocab_size = compiled, vocab_size  # held: its memory is counted
        self._matcher = compiled.matcher()
        self.failure = ""
        self._note_failure()

    @property
    def is_free(self) -> bool:
        return False

    @property
    def is_over(self) -> bool:
        """True if the grammar has ended or cannot be enforced."""
        return self._matcher.is_stopped()

    def allowed(self) -> BoolArray:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._note_failure()
        is_allowed: BoolArray = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(
            np.bool_
        )
        return is_allowed

    def permits(self, token_id: int) -> bool:
        """Return False: only `allowed` decides, so that forced text gets its usual tokens."""
        return False

    def fits(self, token_id: int) -> bool:
        """Return True if the grammar allows this token next, even if it is not the usual one."""
        return self._matcher.validate_tokens([token_id]) == 1

    def take(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)
        self._note_failure()

    def try_take(self, token_ids: Sequence[int]) -> bool:
        """Consume all of the tokens. Return False if they do not fit."""
        return self._matcher.try_consume_tokens(list(token_ids)) == len(token_ids)

    def _note_failure(self) -> None:
        if not self.failure and self._matcher.is_error():
            self.failure = reason_of(self._matcher.get_error())
