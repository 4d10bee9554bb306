"""State of one diffusion request: prompt and answer, filled block by block."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import numpy as np

from lowtide.core import BoolArray, FloatArray, IntArray
from lowtide.decode import sampling
from lowtide.decode.request import Committed, Draft, Event, Finished, Request
from lowtide.memory.kv_cache import KVRange


class DraftSequence(abc.ABC):
    """Tokens of one request, their masks, and the part of the answer that was reported.

    Positions from `block_start` to `block_end` are being filled; earlier ones are final. Subclasses
    decide when each is written. Masks are a boolean array, never "equal to the mask id".
    """

    def __init__(
        self, request: Request, mask_token_id: int, length: int, first_block_start: int
    ) -> None:
        num_prompt = len(request.prompt)
        self.request = request
        self.kv = KVRange(0, 0)  # until it has room
        self.tokens = np.full(length, mask_token_id, np.int64)
        self.tokens[:num_prompt] = request.prompt
        self.is_finished = False
        self.num_cached = self.num_exact = self.num_resumed = 0  # see `Running`
        self.has_begun = False
        self.cuts: set[int] = set()
        self._mask_token_id = mask_token_id
        self._is_masked = np.arange(length) >= num_prompt
        # For drafts: the pass that wrote each token (0: none), and what is shown where none has.
        self._draft_steps = np.zeros(length, np.int64)
        self._draft_tokens = self.tokens.copy()
        self._draft_confidence = np.zeros(length, np.float32)
        eos_token_ids = () if request.params.ignore_eos else request.eos_token_ids
        self._eos = np.array(sorted(eos_token_ids), np.int64)
        self._block_start = first_block_start
        self._num_forwards = 0
        self._num_reported = 0  # new tokens that went out as committed

    @property
    @abc.abstractmethod
    def block_length(self) -> int:
        """Number of tokens of a block; the last block may be shorter."""

    @property
    def num_known(self) -> int:
        """Number of tokens before the active block, which are final."""
        return self._block_start

    @property
    def _block_end(self) -> int:
        return min(self._block_start + self.block_length, len(self.tokens))

    @property
    def active_block(self) -> slice:
        """The positions being filled."""
        return slice(self._block_start, self._block_end)

    def _is_answered(self) -> bool:
        """Return True if an end token is written with no mask before it."""
        start = len(self.request.prompt)
        is_masked = self._is_masked[start : self._block_end]
        is_eos = np.isin(self.tokens[start : self._block_end], self._eos) & ~is_masked
        return bool(is_eos.any()) and not is_masked[: int(is_eos.argmax())].any()

    def _finish_block(self, is_answered: bool) -> list[Event]:
        """Move to the next block, or end. is_answered: leave masks after the end token."""
        self._block_start = self._block_end
        answer, is_stopped = self._answer(), self.request.is_stopped
        is_ended = bool(answer) and answer[-1] in self._eos
        if is_ended or (is_stopped is not None and is_stopped(answer)):
            return self._finish(answer, "stop")
        if is_answered or self._block_start == len(self.tokens):
            return self._finish(answer, "length")
        return self._commit(answer)

    def _finish(self, answer: Sequence[int], reason: str) -> list[Event]:
        self.is_finished = True
        finished = Finished(
            self.request.id, tuple(answer), reason, self._num_forwards, self.num_resumed
        )
        return [*self._commit(answer), finished]

    def _commit(self, answer: Sequence[int]) -> list[Event]:
        tokens = tuple(answer[self._num_reported :])
        self._num_reported = len(answer)
        return [Committed(self.request.id, tokens)] if tokens else []

    def _answer(self) -> list[int]:
        """Return the new tokens before the active block.

        They are cut at `max_tokens` and after the first end token.
        """
        start = len(self.request.prompt)
        stop = min(self._block_start, start + self.request.max_tokens)
        answer = self.tokens[start:stop]
        is_eos = np.isin(answer, self._eos)
        num_tokens = int(is_eos.argmax()) + 1 if is_eos.any() else len(answer)
        return [int(token) for token in answer[:num_tokens]]

    def _note(
        self,
        positions: IntArray,
        tokens: IntArray,
        confidence: FloatArray | sampling.FloatArray,
        is_written: BoolArray,
    ) -> None:
        """Record for drafts what a pass, already counted, chose at `positions`.

        is_written: which of these tokens it wrote.
        """
        is_told = is_written | self._is_masked[positions]
        told = positions[is_told]
        self._draft_tokens[told], self._draft_confidence[told] = (
            tokens[is_told],
            confidence[is_told],
        )
        self._draft_steps[positions[is_written]] = self._num_forwards

    def _draft(self) -> Draft:
        block = self.active_block
        return Draft(
            request=self.request.id,
            block_start=self._block_start,
            tokens=tuple(self.tokens[block].tolist()),
            is_masked=tuple(self._is_masked[block].tolist()),
            num_forwards=self._num_forwards,
            num_shown=self._num_shown(),
            steps=tuple(self._draft_steps[block].tolist()),
            candidates=tuple(self._draft_tokens[block].tolist()),
            confidence=tuple(self._draft_confidence[block].tolist()),
        )

    def _num_shown(self) -> int:
        """Return the number of active positions up to the answer's end as written so far."""
        num_prompt = len(self.request.prompt)
        first = max(self._block_start, num_prompt)
        stop = min(self._block_end, num_prompt + self.request.max_tokens)
        is_eos = np.isin(self.tokens[first:stop], self._eos) & ~self._is_masked[first:stop]
        if is_eos.any():
            stop = first + int(is_eos.argmax()) + 1
        return stop - self._block_start
