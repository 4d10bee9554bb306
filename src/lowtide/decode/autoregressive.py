"""Autoregressive decoding: one token per sequence and pass, long prompts in chunks.

A sequence feeds its known tokens that are not cached: first its prompt, then each new token. In
each pass, sequences that feed one token come first; prompts take the remaining rows in order of
arrival. So a long prompt starves no other sequence, and running ones share its passes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from lowtide.config import Causal, ModelConfig
from lowtide.core import PassRows, StepKind
from lowtide.decode.causal_sequence import CausalSequence, Choice, choose
from lowtide.decode.forced import ForcedText, OnLogits, whole_rows
from lowtide.decode.kind import Blame, Kind, Schedule, Scheduled, UsualPass, callers
from lowtide.decode.logits import Model, tiled_logits
from lowtide.decode.prompt_share import PromptShare
from lowtide.decode.request import Event, Request
from lowtide.decode.sampling import ArgMax, rows_not_finite, warn_if_never_drawn
from lowtide.errors import NumericError
from lowtide.layers.few_rows import MAX_SHORT_ROWS
from lowtide.memory.workspace import TILE_ROWS
from lowtide.params import DiffusionParams, SamplingParams, field_names, with_published

CHUNK_MULTIPLE = 16
"""Chunks of a prompt, except its last, have a multiple of this many rows."""

STATE_CHUNK = 64
"""With states, chunks of a prompt end at multiples of it, as layers compute in chunks of so many
positions. Copies of states elsewhere end no pass."""


class Autoregressive(Kind[Causal, CausalSequence, Choice]):
    """Writes one token per sequence and pass. A pass has at least `CHUNK_MULTIPLE` rows."""

    absent_fields = frozenset(field_names(DiffusionParams))

    def resolved(self, asked: SamplingParams, config: ModelConfig) -> SamplingParams:
        params = with_published(asked, config.sampling)
        warn_if_never_drawn(params)
        return params

    def usual_pass(self, context: int) -> UsualPass:
        return UsualPass(1, 1.0)

    def begin(self, request: Request) -> CausalSequence:
        return CausalSequence(request)

    def schedule(
        self, running: Sequence[CausalSequence], max_rows: int, share: PromptShare
    ) -> Schedule[CausalSequence]:
        """Schedule answers first, then prompts; a pass with only partial prompts is a prefill."""
        entries: list[Scheduled[CausalSequence]] = []
        num_free = max_rows
        prompts = [sequence for sequence in running if sequence.num_rows > 1]
        answers = [sequence for sequence in running if sequence.num_rows == 1]
        holds_back = share.holds_back(callers(prompts), callers(answers))
        for sequence in answers if holds_back else [*answers, *prompts]:
            first, start = sequence.num_cached, max_rows - num_free
            num_rows = _fed_rows(sequence, first, num_free)
            if num_rows:
                entries.append(Scheduled(sequence, first, first + num_rows, start))
                num_free -= num_rows
        is_decode = any(entry.sequence.has_answer for entry in entries)
        has_prompts = any(entry.length > 1 for entry in entries)
        return Schedule(StepKind.DECODE if is_decode else StepKind.PREFILL, entries, has_prompts)

    def lengthened(
        self, entry: Scheduled[CausalSequence], max_rows: int, max_chunks: int, is_alone: bool
    ) -> Scheduled[CausalSequence]:
        """Add chunks, but no short ones: those are passes of their own, which round elsewhere.

        In company all are whole passes, since others would take the rows that are left.
        """
        least_rows = MAX_SHORT_ROWS + 1 if is_alone else max_rows
        sequence, num_rows = entry.sequence, entry.length
        ends: list[int] = []
        stop = entry.first
        while num_rows >= least_rows and len(ends) < max_chunks:
            ends.append(stop := stop + num_rows)
            num_rows = _fed_rows(sequence, stop, max_rows)
        if len(ends) < 2 or stop - entry.first <= TILE_ROWS:
            return entry
        return entry._replace(stop=stop, chunk_ends=tuple(ends))

    def pass_rows(self, entry: Scheduled[CausalSequence]) -> PassRows:
        return entry.sequence.pass_rows(entry.first, entry.stop)

    def choose(
        self,
        model: Model,
        hidden: Tensor,
        entries: Sequence[Scheduled[CausalSequence]],
        blame: Blame,
    ) -> list[Choice | None]:
        """Choose the next token of each entry that fed all known tokens of its sequence."""
        wanted = [i for i, entry in enumerate(entries) if entry.stop == entry.sequence.num_known]
        choices: list[Choice | None] = [None] * len(entries)
        if wanted:
            sequences = [entries[i].sequence for i in wanted]
            needs_logits = np.array([sequence.needs_logits for sequence in sequences])
            rows = np.array([entries[i].end - 1 for i in wanted])
            for part, logits in tiled_logits(model, hidden, rows, needs_logits):
                try:
                    chosen = self._choose_tokens(logits, sequences[part])
                except NumericError:
                    blame(sequences[part][row] for row in rows_not_finite(logits))
                    raise
                for i, choice in zip(wanted[part], chosen, strict=True):
                    choices[i] = choice
        return choices

    def _choose_tokens(
        self, logits: Tensor | ArgMax, sequences: Sequence[CausalSequence]
    ) -> list[Choice]:
        """Choose each sequence's next token from its row of logits."""
        return choose(logits, sequences)

    def written(self, entry: Scheduled[CausalSequence], choice: Choice | None) -> list[Event]:
        if choice is None:
            return entry.sequence.prefilled(entry.stop)
        return entry.sequence.advanced(choice, self.use_kv_cache)

    def forced(self, text: ForcedText, on_logits: OnLogits) -> Autoregressive:
        return _Forced(text, on_logits, self)


def _fed_rows(sequence: CausalSequence, first: int, num_free: int) -> int:
    """Return the number of rows that a sequence feeds from `first` on.

    num_free: rows that the pass has left.
    """
    num_rows = sequence.num_known - first
    if num_rows <= num_free:
        return num_rows
    in_chunks = (first + num_free) // STATE_CHUNK * STATE_CHUNK - first
    # Answers leave room for a chunk, unless passes are so short that they never have any.
    if sequence.kv.states is not None and in_chunks > 0:
        return in_chunks
    return num_free // CHUNK_MULTIPLE * CHUNK_MULTIPLE


class _Forced(Autoregressive):
    """Reads a given text. Its request asks for whole rows of logits (`logprobs`)."""

    def __init__(self, text: ForcedText, on_logits: OnLogits, kind: Autoregressive) -> None:
        super().__init__(kind.decoding, kind.use_kv_cache, kind.cache_mode)
        self._text, self._on_logits = text, on_logits

    def _choose_tokens(
        self, logits: Tensor | ArgMax, sequences: Sequence[CausalSequence]
    ) -> list[Choice]:
        [sequence] = sequences
        position = sequence.num_known
        if sequence.has_answer:
            self._on_logits(0, np.array([position]), whole_rows(logits))
        return [Choice(int(self._text.token_ids[position]), None)]
