"""State of one block diffusion request.

Applies the rules of `unmask.py` to one sequence; knows nothing of the model, the KV cache or other
sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from lowtide.core import BoolArray, IntArray, PassRows, RowKind
from lowtide.decode.draft_sequence import DraftSequence
from lowtide.decode.request import Event, Prefill, Request
from lowtide.decode.sampling import ArgMax, FloatArray, Sampling, choose_tokens
from lowtide.decode.unmask import choose_edits, choose_fills, num_scheduled


class BlockPrediction(NamedTuple):
    """Candidates and their confidence in a block; valid only at `positions`."""

    positions: IntArray  # absolute
    candidates: IntArray  # [block_length]
    confidence: FloatArray  # [block_length]

    @classmethod
    def empty(cls, block_length: int, positions: IntArray) -> BlockPrediction:
        zeros = np.zeros(block_length, np.float32)
        return cls(positions, np.zeros(block_length, np.int64), zeros)


class BlockSequence(DraftSequence):
    """One running request: its tokens, its active block and its number of cached tokens.

    Positions before `num_cached` have the keys and values of their final tokens. The block at
    `block_start` is being filled.
    """

    def __init__(self, request: Request, mask_token_id: int) -> None:
        first_block_start = len(request.prompt) // request.block_length * request.block_length
        super().__init__(request, mask_token_id, request.canvas_length, first_block_start)
        self._is_prompt = ~self._is_masked
        self._sampling = Sampling.of(request.params, request.seed)
        self._num_steps = 0  # passes over the active block while it had masks
        self._num_post_steps = 0  # and while it had none

    @property
    def block_length(self) -> int:
        return self.request.block_length

    @property
    def num_rows(self) -> int:
        """Number of rows of the next denoising pass, with final tokens that are not cached."""
        return self._block_end - self.num_cached

    @property
    def num_block_passes(self) -> int:
        """Number of denoising passes over the active block so far."""
        return self._num_steps + self._num_post_steps

    @property
    def is_expected_to_end(self) -> bool:
        """True if the next denoising pass ends the answer whatever it predicts, except masks.

        Confident tokens, an end token or a pass without edits may end it sooner.
        """
        if self._block_end < len(self.tokens):
            return False
        num_masked, num_certain = int(self._is_masked[self.active_block].sum()), self._num_to_fill()
        if num_certain is not None and num_certain < num_masked:
            return False
        num_post_steps = self._num_post_steps + (not num_masked)
        return self.request.edit_threshold is None or num_post_steps >= self.request.max_post_steps

    def pass_rows(self, first: int, stop: int) -> PassRows:
        """Return the kinds of the rows of positions `first` to `stop`."""
        kinds = np.full(stop - first, RowKind.COMMIT, np.uint8)
        kinds[: max(0, len(self.request.prompt) - first)] = RowKind.PROMPT
        # A pass over a block without masks may leave it as it is, and then commits it.
        if self._is_masked[self.active_block].any():
            kinds[max(0, self._block_start - first) :] = RowKind.DRAFT
        return PassRows(np.full(stop - first, self.request.id), kinds)

    def wanted_positions(self) -> IntArray:
        """Positions [n] of the active block whose logits are needed."""
        is_wanted = self._is_masked[self.active_block] | self._is_editable()
        return np.flatnonzero(is_wanted) + self._block_start

    @property
    def needs_logits(self) -> bool:
        """True if candidates are chosen from whole rows of logits instead of their arg-max."""
        return self._sampling.temperature > 0 or self._num_to_fill() is None

    def choose(self, logits: Tensor | ArgMax, prediction: BlockPrediction, part: slice) -> None:
        """Set the candidates at `prediction.positions[part]` from their logits [n, vocab]."""
        positions = prediction.positions[part]
        chosen = choose_tokens(
            logits,
            self._sampling,
            positions,
            self._num_forwards,
            excluded=self._mask_token_id if self._num_to_fill() is None else None,
        )
        block_positions = positions - self._block_start
        prediction.candidates[block_positions], prediction.confidence[block_positions] = chosen

    def prefilled(self, stop: int) -> list[Event]:
        """Advance after a pass over final tokens up to position `stop`."""
        self.num_cached = stop
        return [Prefill(self.request.id, stop, self._block_start)]

    def denoised(self, prediction: BlockPrediction, use_kv_cache: bool) -> list[Event]:
        """Advance after a denoising pass: write tokens, and finish the block if rules say so."""
        had_masks = bool(self._is_masked[self.active_block].any())
        written = self._write(prediction)
        self._num_forwards += 1
        places = prediction.positions - self._block_start
        self._note(
            *(prediction.positions, prediction.candidates[places], prediction.confidence[places]),
            written[places],
        )
        self._num_steps += had_masks
        self._num_post_steps += not had_masks
        self.num_cached = self._block_start
        if not had_masks and not written.any():
            self.num_cached = self._block_end  # the pass saw the block as it stays
        if not use_kv_cache:
            self.num_cached = 0
        events: list[Event] = [self._draft()]
        is_answered = self._is_answered_early(written)
        if is_answered or self._is_block_finished(had_masks, written):
            self._num_steps = self._num_post_steps = 0
            events += self._finish_block(is_answered)
        return events

    def _write(self, prediction: BlockPrediction) -> BoolArray:
        """Fill and edit the active block; return the written positions, bool [block_length]."""
        request, tokens = self.request, self.tokens[self.active_block]
        is_masked = self._is_masked[self.active_block]
        _, candidates, confidence = prediction
        fills = choose_fills(is_masked, confidence, self._num_to_fill(), request.threshold)
        fills &= candidates != self._mask_token_id
        edits = np.zeros_like(fills)
        if request.edit_threshold is not None:
            edits = choose_edits(
                tokens,
                self._is_editable(),
                candidates,
                confidence,
                request.edit_threshold,
                self._mask_token_id,
            )
        written = fills | edits
        tokens[written] = candidates[written]
        is_masked[fills] = False
        return written

    def _num_to_fill(self) -> int | None:
        request = self.request
        return num_scheduled(request.block_length, request.steps, self._num_steps)

    def _is_editable(self) -> BoolArray:
        if self.request.edit_threshold is None:
            return np.zeros(self.request.block_length, np.bool_)
        return ~(self._is_masked[self.active_block] | self._is_prompt[self.active_block])

    def _is_block_finished(self, had_masks: bool, written: BoolArray) -> bool:
        if self._is_masked[self.active_block].any():
            return False
        if not had_masks and not written.any():
            return True
        is_final = self._num_post_steps >= self.request.max_post_steps
        return is_final or self.request.edit_threshold is None

    def _is_answered_early(self, written: BoolArray) -> bool:
        """Return True if the block may be left unfinished.

        That requires `eos_early_stop` and no mask before the first end token.
        """
        if not self.request.params.diffusion.eos_early_stop:
            return False
        if self.request.edit_threshold is None:
            return self._is_answered()
        # Where tokens may yet be replaced, the published decoder asks when one is written.
        is_eos_new = bool(np.isin(self.tokens[self.active_block][written], self._eos).any())
        return is_eos_new and self._is_answered()
