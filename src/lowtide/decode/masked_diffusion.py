"""Masked diffusion: an answer of masks, filled in any order by a model that sees all of it.

Every position of such a model sees every other, so nothing of a pass can be kept for the next:
each feeds a sequence whole, and with guidance a second time without its prompt. Logits are
computed only of what may still change. Many sequences, each at its own step, share a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowtide.core import IntArray, Step, StepKind, align_up
from lowtide.decode.batch_decoder import BatchDecoder
from lowtide.decode.candidates import Candidates
from lowtide.decode.logits import rows_that_predict
from lowtide.decode.masked_sequence import MaskedSequence
from lowtide.decode.request import Event, Request
from lowtide.decode.row_reading import RowModel, Rows, read_logits, read_statistics
from lowtide.errors import PlanError, UsageError
from lowtide.kernels.row_statistics import Wanted
from lowtide.layers.batch import Batch, Segment
from lowtide.memory.kv_cache import GRANULE_TOKENS, KVCache, KVRange


class MaskedDiffusion(BatchDecoder[MaskedSequence]):
    """Decodes requests, one forward pass at a time, over one bidirectional model.

    Its KV cache holds what a layer needs of a pass and nothing longer. logits_shift: see
    `logits.rows_that_predict`. is_measured_as_drawn: see `candidates.Reading`.
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
    ) -> None:
        super().__init__(kv_cache, max_rows)
        self._model = model
        self._mask_token_id = mask_token_id
        self._logits_shift = logits_shift
        self._is_measured_as_drawn = is_measured_as_drawn

    def step(self) -> list[Event]:
        self._admit()
        turns = self._next_pass()
        self._taking_part = [turn.sequence.request for turn in turns]
        with torch.inference_mode():
            hidden = self._model.forward(self._batch(turns))
            candidates = self._read(hidden, turns)
        self._num_passes += 1
        events: list[Event] = []
        for turn, found in zip(turns, candidates, strict=True):
            events += turn.sequence.denoised(found)
        self._settle(turn.sequence for turn in turns)
        return events

    def _check(self, request: Request) -> None:
        for name in ("remasking", "block_length"):
            if getattr(request.params.diffusion, name) is None:
                raise UsageError(f"Request {request.id} has no {name}, and no default to take.")
        num_rows = _num_copies(request) * _length(request)
        if num_rows > self._max_rows:
            raise PlanError(
                f"{num_rows} rows are more than the {self._max_rows} of a forward pass; raise "
                "context or lower max_tokens."
            )

    def _num_tokens(self, request: Request) -> int:
        return _num_copies(request) * align_up(_length(request), GRANULE_TOKENS)

    def _begin(self, request: Request, kv: KVRange) -> MaskedSequence:
        return MaskedSequence(request, kv, self._mask_token_id, self._is_measured_as_drawn)

    def _next_pass(self) -> list[_Turn]:
        """Who takes part in the next pass, whole; at most `max_rows` rows in all."""
        turns: list[_Turn] = []
        num_rows = 0
        for sequence in self._running:
            length = len(sequence.tokens)
            num_copies = _num_copies(sequence.request)
            if num_rows + num_copies * length <= self._max_rows:
                starts = tuple(num_rows + copy * length for copy in range(num_copies))
                turns.append(_Turn(sequence, starts))
                num_rows += num_copies * length
        return turns

    def _batch(self, turns: Sequence[_Turn]) -> Batch:
        token_ids, positions, segments = [], [], []
        for turn in turns:
            length = len(turn.sequence.tokens)
            token_ids += turn.token_ids()
            positions += [np.arange(length)] * len(turn.starts)
            segments += turn.segments()
        is_alone = len(self._running) == 1
        index = turns[0].sequence.num_block_passes if is_alone else self._num_passes
        return Batch(
            token_ids=torch.from_numpy(np.concatenate(token_ids)),
            positions=torch.from_numpy(np.concatenate(positions)),
            segments=tuple(segments),
            step=Step(StepKind.DENOISE, index),
        )

    def _read(self, hidden: Tensor, turns: Sequence[_Turn]) -> list[Candidates]:
        """A candidate for every wanted position of each turn."""
        found = [Candidates.empty(len(turn.sequence.wanted)) for turn in turns]
        kinds: dict[tuple[bool, bool], list[int]] = {}
        for index, turn in enumerate(turns):
            kind = (turn.is_guided, turn.sequence.reading.needs_logits)
            kinds.setdefault(kind, []).append(index)
        for (_, needs_logits), indices in kinds.items():
            read = self._read_logits if needs_logits else self._read_statistics
            read(hidden, [turns[i] for i in indices], [found[i] for i in indices])
        return found

    def _read_statistics(
        self, hidden: Tensor, turns: Sequence[_Turn], found: Sequence[Candidates]
    ) -> None:
        readings = [turn.sequence.reading for turn in turns]
        wanted = Wanted(
            second=any(reading.needs_second for reading in readings),
            entropy=any(reading.needs_entropy for reading in readings),
        )
        rows = _joined([turn.rows(self._logits_shift) for turn in turns])
        statistics = read_statistics(self._model, hidden, rows, wanted)
        start = 0
        for turn, candidates in zip(turns, found, strict=True):
            positions = turn.sequence.wanted
            part = slice(start, start + len(positions))
            own = Candidates.likeliest(statistics.part(part), positions)
            candidates.put(slice(None), own)
            start = part.stop

    def _read_logits(
        self, hidden: Tensor, turns: Sequence[_Turn], found: Sequence[Candidates]
    ) -> None:
        for turn, candidates in zip(turns, found, strict=True):
            sequence = turn.sequence
            rows = turn.rows(self._logits_shift)
            for part, logits in read_logits(self._model, hidden, rows):
                candidates.put(part, sequence.choose(logits, part))


class _Turn(NamedTuple):
    """A sequence's part in a pass: its rows begin at each of `starts`; the second time, which
    guidance asks for, without the prompt."""

    sequence: MaskedSequence
    starts: tuple[int, ...]

    @property
    def is_guided(self) -> bool:
        return len(self.starts) > 1

    def token_ids(self) -> list[IntArray]:
        copies = [self.sequence.tokens, self.sequence.unconditional_tokens()]
        return copies[: len(self.starts)]

    def segments(self) -> list[Segment]:
        length, kv = len(self.sequence.tokens), self.sequence.kv
        capacity = align_up(length, GRANULE_TOKENS)
        return [
            Segment(
                start=start,
                stop=start + length,
                first_position=0,
                block_length=length,
                # Good for this pass only: the cache may move what it was cut from.
                kv=KVRange(kv.start + copy * capacity, capacity),
            )
            for copy, start in enumerate(self.starts)
        ]

    def rows(self, logits_shift: int) -> Rows:
        """The hidden states that the wanted logits come from."""
        own = rows_that_predict(self.sequence.wanted, logits_shift)
        if not self.is_guided:
            return Rows(own + self.starts[0])
        factors = np.full(len(own), self.sequence.cfg_scale + 1)
        return Rows(own + self.starts[0], own + self.starts[1], factors)


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
    return len(request.prompt) + request.params.max_tokens
