"""Block diffusion: blocks one after the other, the tokens inside a block in order of confidence.

A model of this kind sees a block of masked positions whole and everything before it, so what is
before can be cached exactly, once it has been through the model as it finally is. A pass of a
sequence feeds everything that is not so cached, up to the end of its active block: finished
blocks become cached in the first pass of the next one. Many sequences, each at its own block and
step, share a pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lowtide.core import Reuse, Step, StepKind
from lowtide.decode.batch_decoder import BatchDecoder, Model, Scheduled, callers, joined
from lowtide.decode.block_sequence import BlockPrediction, BlockSequence
from lowtide.decode.logits import tiled_logits
from lowtide.decode.request import Event, Request
from lowtide.layers.batch import Batch
from lowtide.memory.kv_cache import KVCache


class BlockDiffusion(BatchDecoder[BlockSequence]):
    """Decodes requests, one forward pass at a time, over one model and one KV cache.

    With `use_kv_cache=False` everything is computed again for every pass: a slow reference.
    """

    def __init__(
        self,
        model: Model,
        kv_cache: KVCache,
        mask_token_id: int,
        max_rows: int,
        use_kv_cache: bool = True,
        reuse: Reuse = Reuse.OFF,
    ) -> None:
        super().__init__(kv_cache, max_rows, reuse)
        self._model = model
        self._mask_token_id = mask_token_id
        self._use_kv_cache = use_kv_cache

    def step(self) -> list[Event]:
        self._admit()
        kind, turns = self._next_pass()
        while not self._see_to_memory((turn.sequence, turn.stop) for turn in turns):
            kind, turns = self._next_pass()
        if not turns:
            return []
        is_prefill = kind is StepKind.PREFILL
        with self.prompt_share.measured(is_prefill), torch.inference_mode():
            hidden = self._model.forward(self._batch(kind, turns))
            if is_prefill:
                if len(turns) == 1:
                    self._kept.note_pass(turns[0].sequence, turns[0].first, turns[0].stop)
                return [turn.sequence.prefilled(turn.stop) for turn in turns]
            predictions = self._predict(hidden, turns)
        self._num_passes += 1
        events: list[Event] = []
        for turn, prediction in zip(turns, predictions, strict=True):
            events += turn.sequence.denoised(prediction, self._use_kv_cache)
        self._settle(turn.sequence for turn in turns)
        return events

    def _begin(self, request: Request) -> BlockSequence:
        return BlockSequence(request, self._mask_token_id)

    def _next_pass(self) -> tuple[StepKind, list[Scheduled[BlockSequence]]]:
        """Who takes part in the next pass, with which positions; at most `max_rows` in all.

        Sequences with more to feed than a pass holds come first, with whole blocks that are final,
        but where another caller's answers have to have their share of the time.
        """
        prompts = [sequence for sequence in self._running if sequence.num_rows > self._max_rows]
        answers = [sequence for sequence in self._running if sequence.num_rows <= self._max_rows]
        turns: list[Scheduled[BlockSequence]] = []
        num_free = self._max_rows
        if not self.prompt_share.holds_back(callers(prompts), callers(answers)):
            for sequence in prompts:
                length = sequence.request.block_length
                num_blocks = min(sequence.num_rows - length, num_free) // length
                if num_blocks:
                    turns.append(self._turn(sequence, num_blocks * length, num_free))
                    num_free -= num_blocks * length
        if turns:
            return StepKind.PREFILL, turns
        for sequence in answers:
            if sequence.num_rows <= num_free:
                turns.append(self._turn(sequence, sequence.num_rows, num_free))
                num_free -= sequence.num_rows
        return StepKind.DENOISE, turns

    def _turn(
        self, sequence: BlockSequence, num_rows: int, num_free: int
    ) -> Scheduled[BlockSequence]:
        first = sequence.num_cached
        return Scheduled(sequence, first, first + num_rows, self._max_rows - num_free)

    def _batch(self, kind: StepKind, turns: Sequence[Scheduled[BlockSequence]]) -> Batch:
        is_alone = len(self._running) == 1
        index = turns[0].sequence.num_block_passes if is_alone else self._num_passes
        rows = joined([turn.sequence.pass_rows(turn.first, turn.stop) for turn in turns])
        is_last = kind is StepKind.DENOISE and self._is_last(turns)
        return self._make_batch(turns, Step(kind, index, rows, is_last))

    def _predict(
        self, hidden: Tensor, turns: Sequence[Scheduled[BlockSequence]]
    ) -> list[BlockPrediction]:
        """What the model would write in each turn's block, logits computed tile by tile."""
        predictions, rows, needs_logits, starts = [], [], [], [0]
        for sequence, first, _, start, _ in turns:
            wanted = sequence.wanted_positions()
            rows.append(start + wanted - first)
            needs_logits.append(np.full(len(wanted), sequence.needs_logits))
            starts.append(starts[-1] + len(wanted))
            predictions.append(BlockPrediction.empty(sequence.request.block_length, wanted))
        for tile, logits in tiled_logits(
            self._model, hidden, np.concatenate(rows), np.concatenate(needs_logits)
        ):
            for turn, prediction, start in zip(turns, predictions, starts, strict=False):
                low = max(start, tile.start)
                high = min(start + len(prediction.positions), tile.stop)
                if low < high:
                    part = logits[low - tile.start : high - tile.start]
                    with self._choosing_for(turn.sequence):
                        turn.sequence.choose(part, prediction, slice(low - start, high - start))
        return predictions
