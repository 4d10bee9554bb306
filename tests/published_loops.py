"""LLaDA's and Dream's published loop over blocks, with the rules of both and of Fast-dLLM."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lowtide.params import DiffusionParams

BlockLogits = Callable[[Tensor, slice, int], Tensor]
"""Logits [block, vocab] of a row, a block of it and the number of the step within that block."""


def published_rows(
    prompt: list[int], max_tokens: int, diffusion: DiffusionParams, mask: int, logits: BlockLogits
) -> list[list[int]]:
    """Token rows before the first step and after each, at temperature 0.

    Parameters are resolved ones.
    """
    length, row = diffusion.block_length, torch.tensor([*prompt, *[mask] * max_tokens])
    rows = [row.tolist()]
    steps = None if diffusion.steps is None else diffusion.steps // (max_tokens // length)
    for start in range(len(prompt), len(row), length):
        block, num_left_over, step = slice(start, start + length), 0, 0
        while (is_masked := row[block] == mask).any():
            p = logits(row, block, step).double().softmax(-1)
            confidence = confidence_of(p, diffusion)
            surest = confidence.where(is_masked, -torch.inf).argsort(descending=True, stable=True)
            surest = surest[: int(is_masked.sum())]
            chosen, num_left_over = published_choice(
                diffusion, confidence, surest, step, steps, length, num_left_over
            )
            row[start + chosen] = p.argmax(-1)[chosen]
            rows.append(row.tolist())
            step += 1
    return rows


def confidence_of(p: Tensor, diffusion: DiffusionParams) -> Tensor:
    """By which masked places are chosen, of probabilities [places, vocab]."""
    if diffusion.remasking == "entropy":
        return (p * (p + 1e-10).log()).sum(-1)
    best, second = p.topk(2).values.unbind(-1)
    return best - second if diffusion.remasking == "topk_margin" else best


def published_choice(
    diffusion: DiffusionParams,
    confidence: Tensor,
    surest: Tensor,
    step: int,
    steps: int | None,
    length: int,
    num_left_over: int,
) -> tuple[Tensor, int]:
    """Choose the places of `surest` to write; return them and the rest of a bound step."""
    num_masked = len(surest)
    if diffusion.remasking == "low_confidence":
        return surest[: length // steps + (step < length % steps)], 0
    if diffusion.remasking == "confidence_threshold":
        num_most = num_masked
        if steps is not None:
            num_most = length // steps + (step < length % steps) if step < steps else 0
            num_most = max(1, num_most + num_left_over)
        kept = [
            i
            for n, i in enumerate(surest[:num_most])
            if n == 0 or confidence[i] >= diffusion.threshold
        ]
        return torch.stack(kept), min(num_most, num_masked) - len(kept)
    if diffusion.remasking == "factor":
        bounds = [1 - diffusion.factor / (n + 1) for n in range(1, num_masked + 1)]
        fails = [n for n in range(1, num_masked) if confidence[surest[n]] < bounds[n]]
        return surest[: min([num_masked, *fails])], 0
    times = torch.linspace(1, diffusion.eps, steps + 1)
    is_last = step >= steps - 1
    share = 1 - times[min(step, steps - 1) + 1] / times[min(step, steps - 1)]
    num_tokens = num_masked if is_last else int(torch.tensor(num_masked) / 1 * share)
    return surest[:num_tokens], 0
