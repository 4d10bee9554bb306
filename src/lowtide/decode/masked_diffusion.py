"""Masked diffusion: an answer of masks, filled in any order by a model that sees all of it.

Every position of such a model sees every other, so nothing of a pass can be kept for the next:
each feeds a sequence whole, and with guidance a second time without its prompt. Keeping keys and
values nevertheless, while a block is filled, is an approximation (`core.CacheMode`): then only the
first pass of a block is whole. Logits are computed only of what may still change. Many sequences,
each at its own step, share a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lowtide.core import CacheMode, IntArray, RowKind, Step, StepKind, align_up
from lowtide.decode.batch_decoder import BatchDecoder, Scheduled, joined, rows_of
from lowtide.decode.candidates import Candidates
from lowtide.decode.logits import rows_that_predict
from lowtide.decode.masked_sequence import MaskedSequence
from lowtide.decode.request import Event, Request
from lowtide.decode.row_reading import RowModel, Rows, read_logits, read_statistics
from lowtide.kernels.row_statistics import Wanted
from lowtide.layers.batch import Batch, Segment
from lowtide.memory.chunking import LogitNeeds, bucket
from lowtide.memory.kv_cache import GRANULE_TOKENS, KVCache


class MaskedDiffusion(BatchDecoder[MaskedSequence]):
    """Decodes requests, one forward pass at a time, over one bidirectional model.

    In exact mode its KV cache holds what a layer needs of a pass and nothing longer; in others it
    has room for all layers. logits_shift: see `logits.rows_that_predict`. is_measured_as_drawn: see
    `candidates.Reading`.
    """

    def __init__(
        self,
        model: RowModel,
        kv_cache: KVCache,
        mask_token_id: int,
        max_rows: int,
        *,
        logits_shift: int = 0,
        is_measured_as_drawn: bool = False,
        cache_mode: CacheMode = CacheMode.EXACT,
    ) -> None:
        super().__init__(kv_cache, max_rows)
        self._model = model
        self._mask_token_id = mask_token_id
        self._logits_shift = logits_shift
        self._is_measured_as_drawn = is_measured_as_drawn
        self._cache_mode = cache_mode

    def step(self) -> list[Event]:
        self._admit()
        turns = self._next_pass()
        while not self._see_to_memory((turn.sequence, turn.sequence.kv.capacity) for turn in turns):
            turns = self._next_pass()
        if not turns:
            return []
        with torch.inference_mode():
            hidden = self._model.forward(self._batch(turns))
            candidates = self._read(hidden, turns)
        if self._cache_mode is not CacheMode.EXACT:  # what it has of them is wanted again
            for turn in turns:
                turn.sequence.kv.num_written = turn.sequence.kv.capacity
        self._num_passes += 1
        events: list[Event] = []
        for turn, found in zip(turns, candidates, strict=True):
            events += turn.sequence.denoised(found)
        self._settle(turn.sequence for turn in turns)
        return events

    def _num_tokens(self, request: Request) -> int:
        return _num_copies(request) * align_up(_length(request), GRANULE_TOKENS)

    def _room_tokens(self, request: Request, num_known: int) -> int:
        return self._num_tokens(request)  # its first pass is over all of it

    def _begin(self, request: Request) -> MaskedSequence:
        return MaskedSequence(request, self._mask_token_id, self._is_measured_as_drawn)

    def _pause(self, sequence: MaskedSequence) -> None:
        super()._pause(sequence)
        if self._cache_mode is not CacheMode.EXACT:
            sequence.restart_block()

    def _next_pass(self) -> list[Scheduled[MaskedSequence]]:
        """Who takes part in the next pass, with which positions; at most `max_rows` rows in all."""
        turns: list[Scheduled[MaskedSequence]] = []
        num_rows = 0
        for sequence in self._running:
            first, stop = self._fed(sequence)
            length, num_copies = stop - first, _num_copies(sequence.request)
            if num_rows + num_copies * length <= self._max_rows:
                turns.append(Scheduled(sequence, first, stop, num_rows, num_copies))
                num_rows += num_copies * length
        return turns

    def _fed(self, sequence: MaskedSequence) -> tuple[int, int]:
        """The first position of a sequence that its next pass computes, and that behind the last;
        of all others it finds keys and values as the block's first pass left them.
        """
        length, block = len(sequence.tokens), sequence.active_block
        if self._cache_mode is CacheMode.EXACT or not sequence.num_block_passes:
            return 0, length
        # From the hidden state that gives the block's first logits on.
        first = max(0, block.start - self._logits_shift)
        return first, block.stop if self._cache_mode is CacheMode.DUAL else length

    def _kind(self, turn: Scheduled[MaskedSequence]) -> RowKind:
        """Keys and values of a block's first pass are kept for those after it."""
        is_kept = self._cache_mode is not CacheMode.EXACT and not turn.sequence.num_block_passes
        return RowKind.COMMIT if is_kept else RowKind.DRAFT

    def _batch(self, turns: Sequence[Scheduled[MaskedSequence]]) -> Batch:
        is_alone = len(self._running) == 1
        index = turns[0].sequence.num_block_passes if is_alone else self._num_passes
        rows = [
            rows_of(turn.sequence.request, self._kind(turn), turn.end - turn.start)
            for turn in turns
        ]
        step = Step(StepKind.DENOISE, index, joined(rows), self._is_last(turns))
        logit_rows, asked = _asked(turns)
        return replace(self._make_batch(turns, step), logit_rows=logit_rows, asked=asked)

    def _copies(self, turn: Scheduled[MaskedSequence]) -> list[tuple[IntArray, Segment]]:
        """The sequence, and the second time, which guidance asks for, without its prompt."""
        sequence, first, stop, _, num_copies = turn
        texts, length = (sequence.tokens, sequence.unconditional_tokens()), len(sequence.tokens)
        return [
            (
                texts[copy][first:stop],
                Segment(
                    start,
                    start + turn.length,
                    first,
                    block_length=length,
                    kv=sequence.kv.part(copy, num_copies),
                    sees_to=length,
                ),
            )
            for copy, start in enumerate(turn.starts)
        ]

    def _read(self, hidden: Tensor, turns: Sequence[Scheduled[MaskedSequence]]) -> list[Candidates]:
        """A candidate for every wanted position of each turn."""
        found = [Candidates.empty(len(turn.sequence.wanted)) for turn in turns]
        for (_, needs_logits), indices in _kinds(turns).items():
            read = self._read_logits if needs_logits else self._read_statistics
            read(hidden, [turns[i] for i in indices], [found[i] for i in indices])
        return found

    def _read_statistics(
        self,
        hidden: Tensor,
        turns: Sequence[Scheduled[MaskedSequence]],
        found: Sequence[Candidates],
    ) -> None:
        rows = _joined([_rows(turn, self._logits_shift) for turn in turns])
        statistics = read_statistics(self._model, hidden, rows, _wanted(turns))
        start = 0
        for turn, candidates in zip(turns, found, strict=True):
            positions = turn.sequence.wanted
            own = statistics.part(start + np.arange(len(positions)))
            with self._choosing_for(turn.sequence):
                candidates.put(slice(None), Candidates.likeliest(own, positions))
            start += len(positions)

    def _read_logits(
        self,
        hidden: Tensor,
        turns: Sequence[Scheduled[MaskedSequence]],
        found: Sequence[Candidates],
    ) -> None:
        for turn, candidates in zip(turns, found, strict=True):
            sequence = turn.sequence
            rows = _rows(turn, self._logits_shift)
            for part, logits in read_logits(self._model, hidden, rows):
                with self._choosing_for(sequence):
                    candidates.put(part, sequence.choose(logits, part))


def _rows(turn: Scheduled[MaskedSequence], logits_shift: int) -> Rows:
    """The hidden states that the logits of the wanted positions come from."""
    own = rows_that_predict(turn.sequence.wanted - turn.first, logits_shift) + turn.start
    if turn.num_copies == 1:
        return Rows(own)
    return Rows(own, own + turn.length, np.full(len(own), turn.sequence.cfg_scale + 1))


def _kinds(turns: Sequence[Scheduled[MaskedSequence]]) -> dict[tuple[bool, bool], list[int]]:
    """Those whose logits are looked at together: by whether they are guided, and whether they need
    more than statistics.
    """
    kinds: dict[tuple[bool, bool], list[int]] = {}
    for index, turn in enumerate(turns):
        kind = (turn.num_copies > 1, turn.sequence.reading.needs_logits)
        kinds.setdefault(kind, []).append(index)
    return kinds


def _wanted(turns: Sequence[Scheduled[MaskedSequence]]) -> Wanted:
    readings = [turn.sequence.reading for turn in turns]
    return Wanted(
        second=any(reading.needs_second for reading in readings),
        entropy=any(reading.needs_entropy for reading in readings),
    )


def _asked(turns: Sequence[Scheduled[MaskedSequence]]) -> tuple[int, tuple[LogitNeeds, ...]]:
    """The rows whose statistics are asked for after a pass, of each kind at most, and the kinds;
    rows in buckets, so that a request has few.
    """
    num_rows, asked = 0, []
    for (is_guided, needs_logits), indices in _kinds(turns).items():
        if not needs_logits:
            of_kind = [turns[i] for i in indices]
            num_read = sum(len(turn.sequence.wanted) for turn in of_kind)
            most = sum(turn.sequence.request.max_tokens for turn in of_kind)
            num_rows = max(num_rows, bucket(num_read, max(num_read, most)))
            asked.append(LogitNeeds(*_wanted(of_kind), is_guided))
    return num_rows, tuple(sorted(asked))


def _joined(rows: Sequence[Rows]) -> Rows:
    """All of them; guidance is for all or none."""
    own = np.concatenate([each.own for each in rows])
    others = [each.other for each in rows if each.other is not None]
    factors = [each.factors for each in rows if each.factors is not None]
    if not others:
        return Rows(own)
    return Rows(own, np.concatenate(others), np.concatenate(factors))


def _num_copies(request: Request) -> int:
    """How often a pass feeds a sequence."""
    return 2 if request.params.diffusion.cfg_scale else 1


def _length(request: Request) -> int:
    return len(request.prompt) + request.max_tokens
