"""Autoregressive decoding: one token per sequence and pass, long prompts in chunks beside them.

A sequence feeds what it knows and has not cached: first its prompt, then each new token. Those
that feed one token come first in every pass, prompts take the rows that are left, in the order in
which they came: a long prompt starves no other, and running sequences ride along with its chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowtide.core import RowKind, Step, StepKind
from lowtide.decode.batch_decoder import BatchDecoder, Model, joined, rows_of
from lowtide.decode.causal_sequence import CausalSequence, Choice, choose
from lowtide.decode.logits import tiled_logits
from lowtide.decode.request import Event, Request
from lowtide.decode.sampling import ArgMax
from lowtide.errors import UsageError
from lowtide.layers.batch import Batch, Segment
from lowtide.memory.kv_cache import KVCache, KVRange

CHUNK_MULTIPLE = 16
"""A part of a prompt that is not its last has a multiple of so many rows."""


class Autoregressive(BatchDecoder[CausalSequence]):
    """Decodes requests, one forward pass at a time, over one model and one KV cache.

    With `use_kv_cache=False` everything is computed again for every token: a slow reference.
    `max_rows` is at least `CHUNK_MULTIPLE`.
    """

    def __init__(
        self, model: Model, kv_cache: KVCache, max_rows: int, use_kv_cache: bool = True
    ) -> None:
        if max_rows < CHUNK_MULTIPLE:
            raise UsageError(f"max_rows must be at least {CHUNK_MULTIPLE}, not {max_rows}.")
        super().__init__(kv_cache, max_rows)
        self._model = model
        self._use_kv_cache = use_kv_cache

    def step(self) -> list[Event]:
        self._admit()
        turns = self._next_pass()
        self._see_to_memory((turn.sequence, turn.stop) for turn in turns)
        kind = _kind(turns)
        with torch.inference_mode():
            hidden = self._model.forward(_batch(turns, Step(kind, self._num_passes)))
            choices = self._choose(hidden, turns)
        self._num_passes += kind is StepKind.DECODE
        events: list[Event] = []
        for turn, choice in zip(turns, choices, strict=True):
            if choice is None:
                events += turn.sequence.prefilled(turn.stop)
            else:
                events += turn.sequence.advanced(choice, self._use_kv_cache)
        # A prompt in progress keeps its place, so that prompts are finished one after the other.
        advanced = [turn for turn, choice in zip(turns, choices, strict=True) if choice is not None]
        self._settle(turn.sequence for turn in advanced)
        return events

    def _check(self, request: Request) -> None:
        if not len(request.prompt):
            raise UsageError(f"Request {request.id} has an empty prompt; give one token.")

    def _begin(self, request: Request, kv: KVRange) -> CausalSequence:
        return CausalSequence(request, kv)

    def _next_pass(self) -> list[_TokenTurn]:
        """Who takes part in the next pass, with which positions; at most `max_rows` in all."""
        turns: list[_TokenTurn] = []
        num_free = self._max_rows
        for sequence in sorted(self._running, key=lambda sequence: sequence.num_rows > 1):
            num_rows = sequence.num_rows
            if num_rows > num_free:
                num_rows = num_free // CHUNK_MULTIPLE * CHUNK_MULTIPLE
            if num_rows:
                turns.append(
                    _TokenTurn(sequence, sequence.num_cached, sequence.num_cached + num_rows)
                )
                num_free -= num_rows
        return turns

    def _choose(self, hidden: Tensor, turns: Sequence[_TokenTurn]) -> list[Choice | None]:
        """The next token of every turn that fed all that its sequence knows."""
        ends = np.cumsum([turn.stop - turn.first for turn in turns])
        wanted = [i for i, turn in enumerate(turns) if turn.is_last]
        choices: list[Choice | None] = [None] * len(turns)
        if wanted:
            sequences = [turns[i].sequence for i in wanted]
            needs_logits = np.array([sequence.needs_logits for sequence in sequences])
            rows = ends[wanted] - 1
            for part, logits in tiled_logits(self._model, hidden, rows, needs_logits):
                chosen = self._choose_tokens(logits, sequences[part])
                for i, choice in zip(wanted[part], chosen, strict=True):
                    choices[i] = choice
        return choices

    def _choose_tokens(
        self, logits: Tensor | ArgMax, sequences: Sequence[CausalSequence]
    ) -> list[Choice]:
        """The next token of each sequence, from its row of logits."""
        return choose(logits, sequences)


class _TokenTurn(NamedTuple):
    """A sequence's part in a pass: its positions `first` to `stop`."""

    sequence: CausalSequence
    first: int
    stop: int

    @property
    def is_last(self) -> bool:
        """Whether nothing is left to feed, so that a next token can be chosen."""
        return self.stop == self.sequence.num_known


def _kind(turns: Sequence[_TokenTurn]) -> StepKind:
    """A pass over parts of prompts only is a prefill; with one running sequence it decodes."""
    is_decode = any(turn.sequence.has_answer for turn in turns)
    return StepKind.DECODE if is_decode else StepKind.PREFILL


def _batch(turns: Sequence[_TokenTurn], step: Step) -> Batch:
    segments, num_rows, rows = [], 0, []
    for sequence, first, stop in turns:
        num_given = min(max(0, len(sequence.request.prompt) - first), stop - first)
        rows.append(rows_of(sequence.request, RowKind.PROMPT, num_given))
        rows.append(rows_of(sequence.request, RowKind.DECODE, stop - first - num_given))
        segments.append(Segment(num_rows, num_rows + stop - first, first, 1, sequence.kv))
        num_rows += stop - first
    token_ids = np.concatenate([turn.sequence.tokens[turn.first : turn.stop] for turn in turns])
    positions = np.concatenate([np.arange(turn.first, turn.stop) for turn in turns])
    return Batch(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions),
        segments=tuple(segments),
        step=replace(step, rows=joined(rows)),
    )
