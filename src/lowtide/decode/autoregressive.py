"""Autoregressive decoding: one token per sequence and pass, long prompts in chunks beside them.

A sequence feeds what it knows and has not cached: first its prompt, then each new token. Those
that feed one token come first in every pass, prompts take the rows that are left, in the order in
which they came: a long prompt starves no other, and running sequences ride along with its chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lowtide.core import Reuse, Step, StepKind
from lowtide.decode.batch_decoder import BatchDecoder, Model, Scheduled, callers, joined
from lowtide.decode.causal_sequence import CausalSequence, Choice, choose
from lowtide.decode.logits import tiled_logits
from lowtide.decode.request import Event, Request
from lowtide.decode.sampling import ArgMax, rows_not_finite
from lowtide.errors import NumericError
from lowtide.memory.kv_cache import KVCache

CHUNK_MULTIPLE = 16
"""A part of a prompt that is not its last has a multiple of so many rows."""


class Autoregressive(BatchDecoder[CausalSequence]):
    """Decodes requests, one forward pass at a time, over one model and one KV cache.

    With `use_kv_cache=False` everything is computed again for every token: a slow reference.
    `max_rows` is at least `CHUNK_MULTIPLE`.
    """

    _can_mask = True

    def __init__(
        self,
        model: Model,
        kv_cache: KVCache,
        max_rows: int,
        use_kv_cache: bool = True,
        reuse: Reuse = Reuse.OFF,
    ) -> None:
        super().__init__(kv_cache, max_rows, reuse)
        self._model = model
        self._use_kv_cache = use_kv_cache

    def step(self) -> list[Event]:
        self._admit()
        turns = self._next_pass()
        while not self._see_to_memory((turn.sequence, turn.stop) for turn in turns):
            turns = self._next_pass()
        if not turns:
            return []
        kind = _kind(turns)
        has_prompts = any(turn.length > 1 for turn in turns)
        with self.prompt_share.measured(has_prompts), torch.inference_mode():
            rows = joined([turn.sequence.pass_rows(turn.first, turn.stop) for turn in turns])
            batch = self._make_batch(turns, Step(kind, self._num_passes, rows))
            hidden = self._model.forward(batch)
            choices = self._choose(hidden, turns)
        self._num_passes += kind is StepKind.DECODE
        if len(turns) == 1:
            self._kept.note_pass(turns[0].sequence, turns[0].first, turns[0].stop)
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

    def _begin(self, request: Request) -> CausalSequence:
        return CausalSequence(request)

    def _next_pass(self) -> list[Scheduled[CausalSequence]]:
        """Who takes part in the next pass, with which positions; at most `max_rows` in all."""
        turns: list[Scheduled[CausalSequence]] = []
        num_free = self._max_rows
        prompts = [sequence for sequence in self._running if sequence.num_rows > 1]
        answers = [sequence for sequence in self._running if sequence.num_rows == 1]
        holds_back = self.prompt_share.holds_back(callers(prompts), callers(answers))
        for sequence in answers if holds_back else [*answers, *prompts]:
            num_rows = sequence.num_rows
            if num_rows > num_free:
                num_rows = num_free // CHUNK_MULTIPLE * CHUNK_MULTIPLE
            if num_rows:
                first, start = sequence.num_cached, self._max_rows - num_free
                turns.append(Scheduled(sequence, first, first + num_rows, start))
                num_free -= num_rows
        return turns

    def _choose(
        self, hidden: Tensor, turns: Sequence[Scheduled[CausalSequence]]
    ) -> list[Choice | None]:
        """The next token of every turn that fed all that its sequence knows."""
        wanted = [i for i, turn in enumerate(turns) if turn.stop == turn.sequence.num_known]
        choices: list[Choice | None] = [None] * len(turns)
        if wanted:
            sequences = [turns[i].sequence for i in wanted]
            needs_logits = np.array([sequence.needs_logits for sequence in sequences])
            rows = np.array([turns[i].end - 1 for i in wanted])
            for part, logits in tiled_logits(self._model, hidden, rows, needs_logits):
                try:
                    chosen = self._choose_tokens(logits, sequences[part])
                except NumericError:
                    self._blame(sequences[part][row] for row in rows_not_finite(logits))
                    raise
                for i, choice in zip(wanted[part], chosen, strict=True):
                    choices[i] = choice
        return choices

    def _choose_tokens(
        self, logits: Tensor | ArgMax, sequences: Sequence[CausalSequence]
    ) -> list[Choice]:
        """The next token of each sequence, from its row of logits."""
        return choose(logits, sequences)


def _kind(turns: Sequence[Scheduled[CausalSequence]]) -> StepKind:
    """A pass over parts of prompts only is a prefill; with one running sequence it decodes."""
    is_decode = any(turn.sequence.has_answer for turn in turns)
    return StepKind.DECODE if is_decode else StepKind.PREFILL
