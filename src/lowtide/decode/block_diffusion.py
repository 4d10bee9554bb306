"""Block diffusion: blocks in order; tokens within a block by confidence.

Such a model sees a masked block whole, and everything before it. So earlier tokens can be cached
exactly once they have passed through the model in their final form. A pass feeds everything from
the first uncached token to the end of the active block; a finished block is cached by the first
pass of the next. Sequences at different blocks and steps share a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from lowtide.config import Blocks, ModelConfig
from lowtide.core import BoolArray, IntArray, PassRows, StepKind
from lowtide.decode.block_sequence import BlockPrediction, BlockSequence
from lowtide.decode.forced import ForcedText, OnLogits, whole_rows
from lowtide.decode.kind import Blame, Kind, Schedule, Scheduled, UsualPass, callers
from lowtide.decode.logits import Model, tiled_logits
from lowtide.decode.masked_options import with_early_stop
from lowtide.decode.prompt_share import PromptShare
from lowtide.decode.request import Event, Request
from lowtide.decode.sampling import ArgMax, warn_if_never_drawn
from lowtide.errors import NumericError, UnsupportedError
from lowtide.params import AUTOREGRESSIVE_ONLY, DiffusionParams, SamplingParams

_WITHOUT_RULE = ("eps", "alg_temp", "factor")
"""Fields of bidirectional models' rules, which block diffusion does not have."""

_DEFAULTED = ("block_length", "steps", "threshold", "edit_threshold", "max_post_steps")


class BlockDiffusion(Kind[Blocks, BlockSequence, BlockPrediction]):
    """Fills blocks one after another."""

    absent_fields = frozenset({*AUTOREGRESSIVE_ONLY, *_WITHOUT_RULE, "cfg_scale", "remasking"})

    def resolved(self, asked: SamplingParams, config: ModelConfig) -> SamplingParams:
        warn_if_never_drawn(asked)
        _check_options(asked.diffusion)
        names = [name for name in _DEFAULTED if getattr(asked.diffusion, name) is None]
        unset = {name: getattr(self.decoding.defaults, name) for name in names}
        return with_early_stop(replace(asked, diffusion=replace(asked.diffusion, **unset)))

    def usual_pass(self, context: int) -> UsualPass:
        num_rows, defaults = self.decoding.block_length, self.decoding.defaults
        num_tokens = max(1.0, num_rows / defaults.steps)
        return UsualPass(num_rows, num_tokens, may_write_more=defaults.threshold is not None)

    def begin(self, request: Request) -> BlockSequence:
        return BlockSequence(request, self.mask_token_id)

    def schedule(
        self, running: Sequence[BlockSequence], max_rows: int, share: PromptShare
    ) -> Schedule[BlockSequence]:
        """Schedule long prompts first, in whole blocks; otherwise every sequence's active block.

        Answers come before prompts while another caller's answers are owed time.
        """
        prompts = [sequence for sequence in running if sequence.num_rows > max_rows]
        answers = [sequence for sequence in running if sequence.num_rows <= max_rows]
        entries: list[Scheduled[BlockSequence]] = []
        num_free = max_rows
        if not share.holds_back(callers(prompts), callers(answers)):
            for sequence in prompts:
                length = sequence.request.block_length
                num_blocks = min(sequence.num_rows - length, num_free) // length
                if num_blocks:
                    entries.append(_entry(sequence, num_blocks * length, max_rows - num_free))
                    num_free -= num_blocks * length
        if entries:
            return Schedule(StepKind.PREFILL, entries, has_prompts=True)
        for sequence in answers:
            if sequence.num_rows <= num_free:
                entries.append(_entry(sequence, sequence.num_rows, max_rows - num_free))
                num_free -= sequence.num_rows
        return Schedule(StepKind.DENOISE, entries)

    def pass_rows(self, entry: Scheduled[BlockSequence]) -> PassRows:
        return entry.sequence.pass_rows(entry.first, entry.stop)

    def choose(
        self,
        model: Model,
        hidden: Tensor,
        entries: Sequence[Scheduled[BlockSequence]],
        blame: Blame,
    ) -> list[BlockPrediction | None]:
        """Predict each entry's block, computing logits tile by tile."""
        if entries[0].is_final:  # all are: a prefill
            return [None] * len(entries)
        predictions, rows, needs_logits, starts = [], [], [], [0]
        for sequence, first, _, start, *_ in entries:
            wanted = sequence.wanted_positions()
            rows.append(start + wanted - first)
            needs_logits.append(np.full(len(wanted), sequence.needs_logits))
            starts.append(starts[-1] + len(wanted))
            predictions.append(BlockPrediction.empty(sequence.request.block_length, wanted))
        for tile, logits in tiled_logits(
            model, hidden, np.concatenate(rows), np.concatenate(needs_logits)
        ):
            for entry, prediction, start in zip(entries, predictions, starts, strict=False):
                low = max(start, tile.start)
                high = min(start + len(prediction.positions), tile.stop)
                if low < high:
                    part = logits[low - tile.start : high - tile.start]
                    try:
                        entry.sequence.choose(part, prediction, slice(low - start, high - start))
                    except NumericError:
                        blame([entry.sequence])
                        raise
        return [*predictions]

    def written(
        self, entry: Scheduled[BlockSequence], choice: BlockPrediction | None
    ) -> list[Event]:
        if choice is None:
            return entry.sequence.prefilled(entry.stop)
        return entry.sequence.denoised(choice, self.use_kv_cache)

    def forced(self, text: ForcedText, on_logits: OnLogits) -> BlockDiffusion:
        return _Forced(text, on_logits, self)


def _entry(sequence: BlockSequence, num_rows: int, start: int) -> Scheduled[BlockSequence]:
    first = sequence.num_cached
    return Scheduled(sequence, first, first + num_rows, start)


def _check_options(asked: DiffusionParams) -> None:
    """Raise UnsupportedError, by name, for options that block diffusion does not have."""
    if asked.cfg_scale:
        raise UnsupportedError(
            f"`cfg_scale` {asked.cfg_scale}: block diffusion models decode without guidance."
        )
    if asked.remasking not in (None, "low_confidence"):
        raise UnsupportedError(
            f"`remasking` {asked.remasking!r} is for bidirectional models; block diffusion "
            "models decode by low_confidence."
        )
    for name in _WITHOUT_RULE:
        if getattr(asked, name) is not None:
            raise UnsupportedError(
                f"`{name}`: block diffusion models have no rule that it is for; leave it out."
            )


class _Forced(BlockDiffusion):
    """Reads a given text."""

    def __init__(self, text: ForcedText, on_logits: OnLogits, kind: BlockDiffusion) -> None:
        super().__init__(kind.decoding, kind.use_kv_cache, kind.cache_mode)
        self._text, self._on_logits = text, on_logits

    def begin(self, request: Request) -> BlockSequence:
        return _ForcedSequence(self._text, self._on_logits, request, self.mask_token_id)


class _ForcedSequence(BlockSequence):
    """A given text, read block by block. Positions after its end stay masked."""

    def __init__(
        self, text: ForcedText, on_logits: OnLogits, request: Request, mask_token_id: int
    ) -> None:
        super().__init__(request, mask_token_id)
        self._text, self._on_logits = text, on_logits
        self._hide()

    @property
    def needs_logits(self) -> bool:
        return True

    @property
    def is_expected_to_end(self) -> bool:
        is_last_mask = self._num_steps + 1 == len(self._text.masks)
        return is_last_mask and self._block_end == len(self.tokens)

    def wanted_positions(self) -> IntArray:
        masked = super().wanted_positions()
        return masked[masked < len(self._text.token_ids)]

    def choose(self, logits: Tensor | ArgMax, prediction: BlockPrediction, part: slice) -> None:
        self._on_logits(self._num_steps, prediction.positions[part], whole_rows(logits))

    def denoised(self, prediction: BlockPrediction, use_kv_cache: bool) -> list[Event]:
        self._num_forwards += 1
        self._num_steps += 1
        self.num_cached = self._block_start if use_kv_cache else 0
        if self._num_steps < len(self._text.masks):
            self._hide()
            return []
        self._num_steps = 0
        self._show(np.zeros(len(self._text.token_ids), np.bool_))
        events = self._finish_block(is_answered=False)
        if not self.is_finished:
            self._hide()
        return events

    def _hide(self) -> None:
        self._show(self._text.masks[self._num_steps])

    def _show(self, mask: BoolArray) -> None:
        """Show the active block with the positions in `mask` hidden."""
        block = slice(self._block_start, min(self._block_end, len(self._text.token_ids)))
        given = np.asarray(self._text.token_ids[block], np.int64)
        self.tokens[block] = np.where(mask[block], self._mask_token_id, given)
        self._is_masked[block] = mask[block]
