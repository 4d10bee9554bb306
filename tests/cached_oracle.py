"""Fast-dLLM's prefix and dual caches over transformers' models, and the published loop over blocks.

Trajectories with kept keys and values are compared with these, one request at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from published_loops import published_rows
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from lowtide.params import DiffusionParams


class KeptKeys(DynamicCache):
    """Keys and values of a whole text, in which those of `first` and what follows are renewed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = 0
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        if layer_idx not in self._kept:
            self._kept[layer_idx] = (key_states.clone(), value_states.clone())
        for kept, new in zip(self._kept[layer_idx], (key_states, value_states), strict=True):
            kept[:, :, self.first : self.first + new.shape[2]] = new
        return self._kept[layer_idx]


def cached_trajectory(
    oracle: PreTrainedModel,
    prompt: list[int],
    max_tokens: int,
    diffusion: DiffusionParams,
    mask: int,
    mode: str,
    logits_shift: int,
) -> list[list[int]]:
    """Return the rows of tokens as `published_rows` does, with kept keys and values.

    Each block's first step computes everything, as every step does under `exact`. Later steps
    compute the block and, under `prefix`, the tokens behind it; with shifted logits also the
    position before the block, whose hidden state gives the first logits.
    """
    caches: tuple[KeptKeys, KeptKeys]

    def logits(row: Tensor, block: slice, step: int) -> Tensor:
        nonlocal caches
        if step == 0:
            caches = KeptKeys(), KeptKeys()
        first = block.start - logits_shift if step and mode != "exact" else 0
        stop = block.stop if step and mode == "dual" else len(row)
        found = kept_logits(oracle, row, first, stop, caches[0])
        if diffusion.cfg_scale:
            without = row.clone()
            without[: len(prompt)] = mask
            other = kept_logits(oracle, without, first, stop, caches[1])
            found = other + (diffusion.cfg_scale + 1) * (found - other)
        before = torch.arange(block.start, block.stop) - logits_shift
        return found[before - first]

    return published_rows(prompt, max_tokens, diffusion, mask, logits)


def kept_logits(
    oracle: PreTrainedModel, row: Tensor, first: int, stop: int, cache: KeptKeys
) -> Tensor:
    """Logits [stop - first, vocab] of positions that see the whole row."""
    cache.first = first
    hidden = oracle.model(
        input_ids=row[None, first:stop],
        position_ids=torch.arange(first, stop)[None],
        attention_mask=torch.zeros(1, 1, stop - first, len(row)),
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state[0]
    return oracle.lm_head(hidden).float()
