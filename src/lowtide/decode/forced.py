"""Teacher forcing: a text that is there already goes through decoding's own passes.

The decoders are those that write answers, with the same passes, positions and steps; only what a
pass would have chosen is given, and the logits that it would have chosen from are handed out. An
autoregressive model is given the next token after every pass. A diffusion model gets each block
several times over its cached prefix, with fewer and fewer of its tokens masked, and then whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from lowtide.core import BoolArray, CacheMode, IntArray
from lowtide.decode.autoregressive import Autoregressive
from lowtide.decode.batch_decoder import Model
from lowtide.decode.block_diffusion import BlockDiffusion
from lowtide.decode.block_sequence import BlockPrediction, BlockSequence
from lowtide.decode.candidates import Candidates, Reading
from lowtide.decode.causal_sequence import CausalSequence, Choice
from lowtide.decode.masked_diffusion import MaskedDiffusion
from lowtide.decode.masked_sequence import MaskedSequence
from lowtide.decode.request import Event, Request
from lowtide.decode.row_reading import RowModel
from lowtide.decode.sampling import ArgMax, Sampling
from lowtide.errors import InternalError, UsageError
from lowtide.memory.kv_cache import KVCache


class OnLogits(Protocol):
    """Looks at what a token would have been chosen from."""

    def __call__(self, mask: int, positions: IntArray, logits: Tensor) -> None:
        """logits: float32 [n, vocab] in host memory, of the tokens at `positions` [n], valid until
        this returns and not to be changed; mask: which of the text's masks hid them, 0 in an
        autoregressive model."""
        ...


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

    def check(self, is_diffusion: bool) -> None:
        """Raises UsageError for a text that cannot be read so."""
        num_tokens = len(self.token_ids)
        num_least = self.num_context + (1 if is_diffusion else 2)
        if self.num_context < 1 or num_tokens < num_least:
            raise UsageError(
                f"A text of {num_tokens} tokens, {self.num_context} of them a prompt: it takes at "
                f"least 1 of a prompt and {num_least - self.num_context} behind it."
            )
        if bool(self.masks) != is_diffusion:
            raise UsageError("Masks are for diffusion models, which need at least one.")
        for mask in self.masks:
            if mask.shape != (num_tokens,) or mask[: self.num_context].any():
                raise UsageError(
                    f"A mask is bool [{num_tokens}] and hides none of the first {self.num_context} "
                    "tokens."
                )


class ForcedAutoregressive(Autoregressive):
    """Reads one text. Its request asks for whole rows of logits (`logprobs`)."""

    def __init__(
        self,
        model: Model,
        kv_cache: KVCache,
        max_rows: int,
        text: ForcedText,
        on_logits: OnLogits,
        *,
        use_kv_cache: bool = True,
    ) -> None:
        super().__init__(model, kv_cache, max_rows, use_kv_cache)
        self._text = text
        self._on_logits = on_logits

    def _choose_tokens(
        self, logits: Tensor | ArgMax, sequences: Sequence[CausalSequence]
    ) -> list[Choice]:
        [sequence] = sequences
        position = sequence.num_known
        if sequence.has_answer:
            self._on_logits(0, np.array([position]), _rows(logits))
        return [Choice(int(self._text.token_ids[position]), None)]


class ForcedBlockDiffusion(BlockDiffusion):
    """Reads one text."""

    def __init__(
        self,
        model: Model,
        kv_cache: KVCache,
        mask_token_id: int,
        max_rows: int,
        text: ForcedText,
        on_logits: OnLogits,
        *,
        use_kv_cache: bool = True,
    ) -> None:
        super().__init__(model, kv_cache, mask_token_id, max_rows, use_kv_cache)
        self._text = text
        self._on_logits = on_logits

    def _begin(self, request: Request) -> BlockSequence:
        return _ForcedBlocks(request, self._mask_token_id, self._text, self._on_logits)


class ForcedMaskedDiffusion(MaskedDiffusion):
    """Reads one text, all behind its prompt as one block."""

    def __init__(
        self,
        model: RowModel,
        kv_cache: KVCache,
        mask_token_id: int,
        max_rows: int,
        text: ForcedText,
        on_logits: OnLogits,
        *,
        logits_shift: int = 0,
        cache_mode: CacheMode = CacheMode.EXACT,
    ) -> None:
        super().__init__(
            model,
            kv_cache,
            mask_token_id,
            max_rows,
            logits_shift=logits_shift,
            cache_mode=cache_mode,
        )
        self._text = text
        self._on_logits = on_logits

    def _begin(self, request: Request) -> MaskedSequence:
        return _ForcedMasked(request, self._mask_token_id, self._text, self._on_logits)


class _ForcedBlocks(BlockSequence):
    """A text, block by block. What is behind its end in the last block stays masked."""

    def __init__(
        self,
        request: Request,
        mask_token_id: int,
        text: ForcedText,
        on_logits: OnLogits,
    ) -> None:
        super().__init__(request, mask_token_id)
        self._text = text
        self._on_logits = on_logits
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
        self._on_logits(self._num_steps, prediction.positions[part], _rows(logits))

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
        """The active block, but for what `mask` hides of it."""
        block = slice(self._block_start, min(self._block_end, len(self._text.token_ids)))
        given = np.asarray(self._text.token_ids[block], np.int64)
        self.tokens[block] = np.where(mask[block], self._mask_token_id, given)
        self._is_masked[block] = mask[block]


class _ForcedMasked(MaskedSequence):
    """A text whose tokens behind the prompt are hidden by one mask after the other."""

    def __init__(
        self,
        request: Request,
        mask_token_id: int,
        text: ForcedText,
        on_logits: OnLogits,
    ) -> None:
        super().__init__(request, mask_token_id, is_measured_as_drawn=False)
        self._text = text
        self._on_logits = on_logits
        self._hide()

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
            self._hide()
            return []
        return self._finish(list(self._text.token_ids[self._text.num_context :]), "length")

    def _hide(self) -> None:
        mask = self._text.masks[self.num_block_passes]
        self.tokens[:] = np.where(mask, self._mask_token_id, self._text.token_ids)
        self._is_masked[:] = mask
        self.wanted = np.flatnonzero(mask)


def _rows(logits: Tensor | ArgMax) -> Tensor:
    if isinstance(logits, ArgMax):
        raise InternalError("A text is read, and only the arg-max of its logits came.")
    return logits
