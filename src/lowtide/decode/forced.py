"""Teacher forcing: a text that is there already goes through decoding's own passes.

The decoders are those that write answers, with the same passes, positions and steps; only what a
pass would have chosen is given, and the logits that it would have chosen from are handed out. An
autoregressive model is given the next token after every pass. A diffusion model gets each block
several times over its cached prefix, with fewer and fewer of its tokens masked, and then whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from lowtide.core import BoolArray, IntArray
from lowtide.decode.autoregressive import Autoregressive
from lowtide.decode.block_diffusion import BlockDiffusion
from lowtide.decode.block_sequence import BlockPrediction, BlockSequence
from lowtide.decode.candidates import Candidates, Reading
from lowtide.decode.causal_sequence import CausalSequence, Choice
from lowtide.decode.masked_diffusion import MaskedDiffusion
from lowtide.decode.masked_sequence import MaskedSequence
from lowtide.decode.request import Event, Request
from lowtide.decode.sampling import ArgMax, Sampling
from lowtide.errors import InternalError, UsageError

OnLogits = Callable[[int, IntArray, Tensor], None]
"""Looks at what tokens would have been chosen from: which of the text's masks hid them (0 in an
autoregressive model), their positions [n], and logits, float32 [n, vocab] in host memory, valid
until this returns and not to be changed."""


@dataclass(frozen=True, slots=True, eq=False)
class ForcedText:
    """A text and how it is read.

    token_ids [n]; the first `num_context` of them, at least one, are a prompt. masks: for diffusion
    models, bool [n] each, in the order in which they hide the text, block by block; none of them
    hides a token of the prompt.

    An autoregressive model's first token behind the prompt is chosen in a pass over the prompt,
    not in one of decoding, and its logits are not handed out.
    """

    token_ids: Sequence[int]
    num_context: int
    masks: tuple[BoolArray, ...] = ()

    def check(self, writes_in_order: bool) -> None:
        """Raises UsageError for a text that cannot be read so."""
        num_tokens = len(self.token_ids)
        num_least = self.num_context + (2 if writes_in_order else 1)
        if self.num_context < 1 or num_tokens < num_least:
            raise UsageError(
                f"A text of {num_tokens} tokens, {self.num_context} of them a prompt: it takes at "
                f"least 1 of a prompt and {num_least - self.num_context} behind it."
            )
        if bool(self.masks) == writes_in_order:
            raise UsageError("Masks are for diffusion models, which need at least one.")
        for mask in self.masks:
            if mask.shape != (num_tokens,) or mask[: self.num_context].any():
                raise UsageError(
                    f"A mask is bool [{num_tokens}] and hides none of the first {self.num_context} "
                    "tokens."
                )


class _OfText:
    """Put before a decoder or a sequence, whose further arguments are its own: it has one text."""

    def __init__(self, text: ForcedText, on_logits: OnLogits, *others: Any, **options: Any) -> None:
        super().__init__(*others, **options)
        self._text, self._on_logits = text, on_logits


class ForcedAutoregressive(_OfText, Autoregressive):
    """Reads one text. Its request asks for whole rows of logits (`logprobs`)."""

    def _choose_tokens(
        self, logits: Tensor | ArgMax, sequences: Sequence[CausalSequence]
    ) -> list[Choice]:
        [sequence] = sequences
        position = sequence.num_known
        if sequence.has_answer:
            self._on_logits(0, np.array([position]), _rows(logits))
        return [Choice(int(self._text.token_ids[position]), None)]


class ForcedBlockDiffusion(_OfText, BlockDiffusion):
    """Reads one text."""

    def _begin(self, request: Request) -> BlockSequence:
        found = _ForcedBlocks(self._text, self._on_logits, request, self._mask_token_id)
        found.hide()
        return found


class ForcedMaskedDiffusion(_OfText, MaskedDiffusion):
    """Reads one text, all behind its prompt as one block."""

    def _begin(self, request: Request) -> MaskedSequence:
        found = _ForcedMasked(self._text, self._on_logits, request, self._mask_token_id, False)
        found.hide()
        return found


class _ForcedBlocks(_OfText, BlockSequence):
    """A text, block by block. What is behind its end in the last block stays masked."""

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
        self._on_logits(self._num_steps, prediction.positions[part], _rows(logits))

    def denoised(self, prediction: BlockPrediction, use_kv_cache: bool) -> list[Event]:
        self._num_forwards += 1
        self._num_steps += 1
        self.num_cached = self._block_start if use_kv_cache else 0
        if self._num_steps < len(self._text.masks):
            self.hide()
            return []
        self._num_steps = 0
        self._show(np.zeros(len(self._text.token_ids), np.bool_))
        events = self._finish_block(is_answered=False)
        if not self.is_finished:
            self.hide()
        return events

    def hide(self) -> None:
        self._show(self._text.masks[self._num_steps])

    def _show(self, mask: BoolArray) -> None:
        """The active block, but for what `mask` hides of it."""
        block = slice(self._block_start, min(self._block_end, len(self._text.token_ids)))
        given = np.asarray(self._text.token_ids[block], np.int64)
        self.tokens[block] = np.where(mask[block], self._mask_token_id, given)
        self._is_masked[block] = mask[block]


class _ForcedMasked(_OfText, MaskedSequence):
    """A text whose tokens behind the prompt are hidden by one mask after the other."""

    @property
    def reading(self) -> Reading:
        return Reading(Sampling(), excluded=self._mask_token_id)  # takes whole rows of logits

    @property
    def is_expected_to_end(self) -> bool:
        return self.num_block_passes + 1 == len(self._text.masks)

    def choose(self, logits: Tensor, part: slice) -> Candidates:
        self._on_logits(self.num_block_passes, self.wanted[part], logits)
        return Candidates.empty(len(logits))

    def denoised(self, candidates: Candidates) -> list[Event]:
        self._num_forwards += 1
        self.num_block_passes += 1
        if self.num_block_passes < len(self._text.masks):
            self.hide()
            return []
        return self._finish(list(self._text.token_ids[self._text.num_context :]), "length")

    def hide(self) -> None:
        mask = self._text.masks[self.num_block_passes]
        self.tokens[:] = np.where(mask, self._mask_token_id, self._text.token_ids)
        self._is_masked[:] = mask
        self.wanted = np.flatnonzero(mask)


def _rows(logits: Tensor | ArgMax) -> Tensor:
    if isinstance(logits, ArgMax):
        raise InternalError("A text is read, and only the arg-max of its logits came.")
    return logits
