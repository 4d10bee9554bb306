"""`GrammarMask`: which tokens of one answer's grammar may come next."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lowtide.core import BoolArray
from lowtide.serve.grammar_compiler import Compiled
from lowtide.serve.grammar_reasons import reason_of


class GrammarMask:
    """Which tokens one answer may go on with: decoding's `TokenMask`.

    failure: why the form could not be kept to, or "". The answer then ends.
    """

    def __init__(self, compiled: Compiled, vocab_size: int) -> None:
        self._compiled, self._vocab_size = compiled, vocab_size  # held: its memory is counted
        self._matcher = compiled.matcher()
        self.failure = ""
        self._note_failure()

    @property
    def is_free(self) -> bool:
        """See `TokenMask`."""
        return False

    @property
    def is_over(self) -> bool:
        """Whether nothing more can come, or the form cannot be kept to."""
        return self._matcher.is_stopped()

    def allowed(self) -> BoolArray:
        """See `TokenMask`."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._note_failure()
        is_allowed: BoolArray = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(
            np.bool_
        )
        return is_allowed

    def permits(self, token_id: int) -> bool:
        """See `TokenMask`: never, so that a text that is certain is written in its usual tokens."""
        return False

    def fits(self, token_id: int) -> bool:
        """Whether a text of the grammar may go on with this token, usual or not."""
        return self._matcher.validate_tokens([token_id]) == 1

    def take(self, token_id: int) -> None:
        """See `TokenMask`."""
        self._matcher.consume_token(token_id)
        self._note_failure()

    def try_take(self, token_ids: Sequence[int]) -> bool:
        """Goes on with all of them, or says that it cannot."""
        return self._matcher.try_consume_tokens(list(token_ids)) == len(token_ids)

    def _note_failure(self) -> None:
        if not self.failure and self._matcher.is_error():
            self.failure = reason_of(self._matcher.get_error())
