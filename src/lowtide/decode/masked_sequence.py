"""State of one masked diffusion request.

Applies the rules of `remasking.py` to one sequence; knows nothing of the model or other sequences.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lowtide.core import BoolArray, FloatArray, IntArray
from lowtide.decode import remasking
from lowtide.decode.candidates import Candidates, Reading, read_rows
from lowtide.decode.draft_sequence import DraftSequence
from lowtide.decode.masked_options import (
    COUNT_RULES,
    FACTOR_RULE,
    SHARE_RULES,
    THRESHOLD_RULE,
)
from lowtide.decode.request import Event, Request
from lowtide.decode.sampling import Sampling, uniforms
from lowtide.decode.unmask import num_scheduled


class MaskedSequence(DraftSequence):
    """One running request: its tokens, its active block and its schedule.

    `wanted` are the positions, ascending, that the next pass may write. Blocks begin with the
    answer. Its parameters come from `masked_options.resolve`.
    """

    def __init__(self, request: Request, mask_token_id: int, is_measured_as_drawn: bool) -> None:
        num_prompt, max_tokens = len(request.prompt), request.max_tokens
        super().__init__(request, mask_token_id, num_prompt + max_tokens, num_prompt)
        diffusion = request.params.diffusion
        self._rule = diffusion.remasking or ""
        self._sampling = Sampling.of(request.params, request.seed)
        self._is_measured_as_drawn = is_measured_as_drawn
        num_blocks = -(-max_tokens // self.block_length)
        self._steps = None if diffusion.steps is None else diffusion.steps // num_blocks
        self._times = self._make_times()
        self._num_steps = 0  # of the active block
        self._num_past_steps = 0  # of those before it
        self.num_block_passes = 0  # over the active block
        self._is_stuck = False  # the model would write nothing but masks
        self.wanted = self._next_wanted()

    @property
    def block_length(self) -> int:
        return self.request.params.diffusion.block_length or self.request.max_tokens

    @property
    def cfg_scale(self) -> float:
        """Strength of guidance; 0 is none."""
        return self.request.params.diffusion.cfg_scale or 0.0

    @property
    def num_steps(self) -> int:
        """Steps taken so far, including steps of `origin` that write nothing and need no pass."""
        return self._num_past_steps + self._num_steps

    @property
    def reading(self) -> Reading:
        """The numbers that the next pass needs of its rows."""
        return Reading(
            self._sampling,
            self._is_measured_as_drawn,
            needs_second=self._rule == "topk_margin",
            needs_entropy=self._rule == "entropy",
            excluded=self._mask_token_id if self._is_over or self._is_stuck else None,
        )

    def unconditional_tokens(self) -> IntArray:
        """The tokens without the prompt, for guidance."""
        tokens = self.tokens.copy()
        tokens[: len(self.request.prompt)] = self._mask_token_id
        return tokens

    def choose(self, logits: Tensor, part: slice) -> Candidates:
        """Return candidates at `wanted[part]` from their logits [n, vocab]; overwritten."""
        return read_rows(logits, self.reading, self.wanted[part], self.num_steps)

    def denoised(self, candidates: Candidates) -> list[Event]:
        """Advance after a pass: write the rule's choice of the candidates at `wanted`."""
        is_chosen = self._choose(candidates)
        is_written = is_chosen & (candidates.tokens != self._mask_token_id)
        positions = self.wanted[is_written]
        self.tokens[positions] = candidates.tokens[is_written]
        self._is_masked[positions] = False
        self._is_stuck = not self._has_schedule and not len(positions)
        self._num_forwards += 1
        self._note(self.wanted, candidates.tokens, candidates.probability, is_written)
        self.num_block_passes += 1
        self._num_steps += 1
        events: list[Event] = [self._draft()]
        is_answered = bool(self.request.params.diffusion.eos_early_stop) and self._is_answered()
        if is_answered or not self._num_masked:
            self._num_past_steps += self._num_steps
            self._num_steps = self.num_block_passes = 0
            events += self._finish_block(is_answered)
        if not self.is_finished:
            self.wanted = self._next_wanted()
        return events

    def restart_block(self) -> None:
        """Begin the active block's passes again, since its keys and values are gone."""
        self.tokens[self.active_block] = self._mask_token_id
        self._is_masked[self.active_block] = True
        self._draft_steps[self.active_block] = 0
        self._draft_tokens[self.active_block] = self._mask_token_id
        self._num_steps = self.num_block_passes = 0
        self._is_stuck = False
        self.wanted = self._next_wanted()

    @property
    def is_expected_to_end(self) -> bool:
        """True if the next pass writes everything left, by the rule alone."""
        if self._block_end < len(self.tokens):
            return False
        if self._rule in ("origin", "random") or self._is_over:
            return len(self.wanted) == self._num_masked
        num_certain = self._num_due() if self._has_schedule else 1
        return num_certain >= self._num_masked

    @property
    def _has_schedule(self) -> bool:
        return self._rule in COUNT_RULES or self._rule in SHARE_RULES

    @property
    def _is_over(self) -> bool:
        """True if the block has had its steps.

        The published decoders may leave masks where the model predicted masks. Here one more pass
        writes them, with the mask id excluded from the candidates.
        """
        return self._has_schedule and self._num_steps >= (self._steps or 0)

    def _make_times(self) -> FloatArray:
        """Return the times of a block in Dream's schedule; torch's rounding decides the counts."""
        eps = self.request.params.diffusion.eps
        if self._steps is None or eps is None:
            return np.ones(1)
        return torch.linspace(1, eps, self._steps + 1, dtype=torch.float32).double().numpy()

    def _next_wanted(self) -> IntArray:
        """Return the masked positions of the block that the next pass computes.

        Only the positions that will be written, if the choice needs no output of the model.
        """
        while True:
            masked = np.flatnonzero(self._is_masked[self.active_block]) + self._block_start
            if self._is_over or self._rule not in ("origin", "random"):
                return masked
            wanted = masked[self._choose_blindly(masked)]
            if len(wanted):
                return wanted
            self._num_steps += 1

    def _choose_blindly(self, masked: IntArray) -> BoolArray:
        numbers = self._numbers(masked)
        if self._rule == "origin":
            is_chosen: BoolArray = numbers < remasking.written_share(self._times, self._num_steps)
            return is_chosen
        return remasking.choose_surest(numbers, self._num_due())

    def _choose(self, candidates: Candidates) -> BoolArray:
        """Choose the candidates at `wanted` to write, bool [n]."""
        diffusion, rule = self.request.params.diffusion, self._rule
        if self._is_over or rule in ("origin", "random"):
            return np.ones(len(self.wanted), np.bool_)
        confidence = self._confidence(candidates)
        if rule == THRESHOLD_RULE:
            return remasking.choose_above(confidence, diffusion.threshold or 0.0, self._num_most())
        if rule == FACTOR_RULE:
            return remasking.choose_by_factor(confidence, diffusion.factor or 0.0)
        if diffusion.alg_temp:
            numbers = self._numbers(self.wanted)
            return remasking.choose_tempered(
                confidence, self._num_due(), diffusion.alg_temp, numbers
            )
        return remasking.choose_surest(confidence, self._num_due())

    def _confidence(self, candidates: Candidates) -> FloatArray:
        """Return the numbers by which the rule ranks candidates.

        For Dream's `topk_margin` it is the distance to the second best probability, for `entropy`
        the negative entropy, else the probability.
        """
        if self._rule == "topk_margin":
            return candidates.margin
        if self._rule == "entropy":
            return -candidates.entropy
        if self._has_schedule:
            return candidates.probability
        # A turn spent on a predicted mask would be no progress.
        is_mask = candidates.tokens == self._mask_token_id
        return np.where(is_mask, -np.inf, candidates.probability)

    def _num_due(self) -> int:
        """Return the number of tokens that a step of the schedule writes."""
        if self._rule in COUNT_RULES:
            return num_scheduled(self._num_tokens, self._steps or 1, self._num_steps) or 0
        return remasking.num_by_share(self._num_masked, self._times, self._num_steps)

    def _num_most(self) -> int | None:
        """Return the most tokens that a `confidence_threshold` step may write; None: no limit."""
        if self._steps is None:
            return None
        num_written = self._num_tokens - self._num_masked
        return remasking.num_allowed(self._num_tokens, self._steps, self._num_steps, num_written)

    @property
    def _num_tokens(self) -> int:
        """Number of tokens of the active block."""
        return self._block_end - self._block_start

    @property
    def _num_masked(self) -> int:
        return int(np.count_nonzero(self._is_masked[self.active_block]))

    def _numbers(self, positions: IntArray) -> FloatArray:
        """Return this step's random numbers in [0, 1), one for each position."""
        return uniforms(self._sampling.seed, len(self.tokens), self.num_steps)[positions]
