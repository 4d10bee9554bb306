"""State of one autoregressive request, and the choice of its next token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowtide.core import PassRows, RowKind
from lowtide.decode.penalties import has_penalties, penalise
from lowtide.decode.request import (
    Committed,
    Event,
    Finished,
    Prefill,
    Request,
    TokenLogprobs,
    TokenMask,
)
from lowtide.decode.sampling import ArgMax, Sampling, choose_next
from lowtide.memory.kv_cache import KVRange


class Choice(NamedTuple):
    """A next token, with its log-probabilities if requested."""

    token: int
    logprobs: TokenLogprobs | None


class CausalSequence:
    """One running request: its known tokens and its number of cached tokens.

    Knows nothing of other sequences or of the model.
    """

    block_length = 1
    num_block_passes = None
    is_expected_to_end = False  # it may go on after any token

    def __init__(self, request: Request) -> None:
        self.request = request
        self.kv = KVRange(0, 0)  # until it has room
        self.tokens = np.zeros(request.canvas_length, np.int64)
        self.tokens[: len(request.prompt)] = request.prompt
        self.num_known = len(request.prompt)
        self.num_cached = self.num_exact = self.num_resumed = 0  # see `Running`
        self.has_begun = False
        self.cuts: set[int] = set()
        self.is_finished = False
        self.sampling = Sampling.of(request.params, request.seed)
        self._eos = frozenset(() if request.params.ignore_eos else request.eos_token_ids)
        self._answer: list[int] = []
        self._logprobs: list[TokenLogprobs] = []

    @property
    def num_rows(self) -> int:
        """Number of rows to feed before the next token is chosen: 1 once the prompt is cached."""
        return self.num_known - self.num_cached

    @property
    def has_answer(self) -> bool:
        """True once at least one new token is known."""
        return bool(self._answer)

    @property
    def needs_logits(self) -> bool:
        """True if the next token is chosen from a whole row of logits instead of its arg-max."""
        params, mask = self.request.params, self.request.mask
        if (mask is not None and not mask.is_free) or params.logprobs is not None:
            return True
        return self.sampling.temperature > 0 or has_penalties(params)

    def pass_rows(self, first: int, stop: int) -> PassRows:
        """Return the kinds of the rows of positions `first` to `stop`."""
        num_given = min(max(0, len(self.request.prompt) - first), stop - first)
        kinds = np.full(stop - first, RowKind.DECODE, np.uint8)
        kinds[:num_given] = RowKind.PROMPT
        return PassRows(np.full(stop - first, self.request.id), kinds)

    def prepare(self, logits: Tensor) -> Tensor | None:
        """Apply penalties and the token mask to logits [vocab] in host memory, in place.

        Returns the log-probabilities before that, if requested.
        """
        params, mask = self.request.params, self.request.mask
        raw = None if params.logprobs is None else logits.log_softmax(dim=-1)
        penalise(logits, self.tokens[: self.num_known], len(self.request.prompt), params)
        if mask is not None and not mask.is_free and not self._is_permitted(logits, mask):
            logits.masked_fill_(torch.from_numpy(~mask.allowed()), -math.inf)
        return raw

    def _is_permitted(self, logits: Tensor, mask: TokenMask) -> bool:
        """Return True if the arg-max suffices and the mask permits it: the cheaper test."""
        if self.sampling.temperature > 0:
            return False
        return mask.permits(int(logits.numpy().argmax()))

    def prefilled(self, stop: int) -> list[Event]:
        """Advance after a pass up to position `stop` with known tokens left to feed."""
        self.num_cached = stop
        return [Prefill(self.request.id, stop, self.num_known)]

    def advanced(self, choice: Choice, use_kv_cache: bool) -> list[Event]:
        """Advance after a pass over all known tokens: add the new token, and end if due."""
        self.num_cached = self.num_known if use_kv_cache else 0
        self.tokens[self.num_known] = choice.token
        self.num_known += 1
        self._answer.append(choice.token)
        if self.request.mask is not None:
            self.request.mask.take(choice.token)
        logprobs = () if choice.logprobs is None else (choice.logprobs,)
        self._logprobs += logprobs
        events: list[Event] = [Committed(self.request.id, (choice.token,), logprobs)]
        reason = self._finish_reason()
        return events if reason is None else [*events, self._finish(reason)]

    def _finish_reason(self) -> str | None:
        is_stopped = self.request.is_stopped
        if self._answer[-1] in self._eos or (is_stopped is not None and is_stopped(self._answer)):
            return "stop"
        return "length" if len(self._answer) == self.request.max_tokens else None

    def _finish(self, reason: str) -> Finished:
        self.is_finished = True
        return Finished(
            request=self.request.id,
            token_ids=tuple(self._answer),
            finish_reason=reason,
            num_forwards=len(self._answer),
            num_resumed=self.num_resumed,
            logprobs=tuple(self._logprobs),
        )


def choose(logits: Tensor | ArgMax, sequences: Sequence[CausalSequence]) -> list[Choice]:
    """Choose each sequence's next token from its row of logits, float32 [n, vocab]; overwritten.

    Sequences that do not `needs_logits` need only the arg-max.
    """
    raw: list[Tensor | None] = [None] * len(sequences)
    if not isinstance(logits, ArgMax):
        raw = [
            sequence.prepare(row) for sequence, row in zip(sequences, logits.unbind(), strict=True)
        ]
    samplings = [sequence.sampling for sequence in sequences]
    tokens = choose_next(logits, samplings, [sequence.num_known for sequence in sequences])
    counts = [sequence.request.params.logprobs or 0 for sequence in sequences]
    return [
        Choice(token, None if row is None else logprobs_of(row, token, num_top))
        for token, row, num_top in zip(tokens.tolist(), raw, counts, strict=True)
    ]


def logprobs_of(row: Tensor, token: int, num_top: int) -> TokenLogprobs:
    """Return the log-probabilities of a token and of the likeliest tokens. row: [vocab]."""
    values, ids = torch.topk(row, min(num_top, row.shape[0]))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(token, float(row[token]), top)
