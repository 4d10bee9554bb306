"""Fast-dLLM's prefix and dual caches over transformers' models, one request at a time, and the
published loop over blocks: what a trajectory with kept keys and values must be."""

from __future__ import annotations

from typing import Any

import torch
from test_masked_diffusion import published_choice
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
    """Token rows before the first step and after each, at temperature 0.

    Parameters are resolved ones. Each block's first step computes everything, as all do under
    `exact`; the others the block and, under `prefix`, what follows it; with shifted logits also the
    position before the block, whose hidden state gives the first logits.
    """
    length, num_prompt = diffusion.block_length, len(prompt)
    row = torch.tensor([*prompt, *[mask] * max_tokens])
    rows, stop = [row.tolist()], len(row)
    steps = None if diffusion.steps is None else diffusion.steps // (max_tokens // length)
    for start in range(num_prompt, len(row), length):
        block, caches = slice(start, start + length), (KeptKeys(), KeptKeys())
        num_left_over, step, first, stop = 0, 0, 0, len(row)
        while (row[block] == mask).any():
            logits = kept_logits(oracle, row, first, stop, caches[0])
            if diffusion.cfg_scale:
                without = row.clone()
                without[:num_prompt] = mask
                other = kept_logits(oracle, without, first, stop, caches[1])
                logits = other + (diffusion.cfg_scale + 1) * (logits - other)
            before = torch.arange(start, start + length) - logits_shift
            logits = logits[before - first]
            p = logits.double().softmax(-1)
            confidence, tokens = p.max(-1)
            if diffusion.remasking == "topk_margin":
                top = p.sort(descending=True).values
                confidence = top[:, 0] - top[:, 1]
            if diffusion.remasking == "entropy":
                confidence = (p * (p + 1e-10).log()).sum(-1)
            is_masked = row[block] == mask
            surest = confidence.where(is_masked, -torch.inf).argsort(descending=True, stable=True)
            chosen, num_left_over = published_choice(
                diffusion,
                confidence,
                surest[: int(is_masked.sum())],
                step,
                steps,
                length,
                num_left_over,
            )
            row[start + chosen] = tokens[chosen]
            rows.append(row.tolist())
            step += 1
            if mode != "exact":
                first = start - logits_shift
            if mode == "dual":
                stop = start + length
    return rows


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
