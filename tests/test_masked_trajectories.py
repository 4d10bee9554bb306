"""Random models of random configs, with random requests in one batch and any budget.

Every row of tokens on the way is the one that the published loop writes over transformers' logits.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from family_models import MASKED, VOCAB, Written, write_model
from published_loops import confidence_of, published_choice
from torch import Tensor
from whole import token_rows

from lowtide import LLM, DiffusionParams, SamplingParams
from lowtide.config import Canvas
from lowtide.decode.masked_options import resolve
from lowtide.llm import plan_model

MASK = 95
TIE = 2e-5
"""Probabilities, or what a rule goes by, so near each other that either may come first."""

ASKED: tuple[dict[str, Any], ...] = (
    {"remasking": "low_confidence"},
    {"remasking": "low_confidence", "cfg_scale": 1.5},
    {"remasking": "maskgit_plus", "eps": 0.2},
    {"remasking": "topk_margin", "cfg_scale": 0.5},
    {"remasking": "entropy", "eps": 0.5},
    {"remasking": "confidence_threshold", "threshold": 0.05},
    {"remasking": "confidence_threshold", "threshold": 1.0, "cfg_scale": 3.0},
    {"remasking": "factor", "factor": 1.5},
    {"remasking": "factor", "factor": 0.0},
)
PROMPTS = (1, 1, 2, 9, 30)
"""Tokens."""


class Asked(NamedTuple):
    """A request: its prompt may have any token, that of masks too."""

    prompt: list[int]
    max_tokens: int
    diffusion: DiffusionParams

    @property
    def num_rows(self) -> int:
        return (len(self.prompt) + self.max_tokens) * (2 if self.diffusion.cfg_scale else 1)


@pytest.mark.parametrize("family", MASKED)
@pytest.mark.parametrize("seed", range(7))
def test_random_models_write_what_the_published_loop_does(
    family: str, seed: int, tmp_path: Path
) -> None:
    rng = random.Random(f"{family} {seed}")
    written = write_model(family, seed + 100, tmp_path)
    asked = [random_request(rng, ASKED[(seed + i) % len(ASKED)]) for i in (0, 3, 7)]
    context = max(each.num_rows for each in asked) + 16
    plan = plan_model(written.folder, context=context)
    budget = (plan.minimum_bytes, (plan.minimum_bytes + plan.full_bytes) // 2)[seed % 2]
    with LLM(written.folder, context=context, host_memory=budget) as llm:
        params = [
            SamplingParams(max_tokens=each.max_tokens, ignore_eos=True, diffusion=each.diffusion)
            for each in asked
        ]
        found = token_rows(llm, [each.prompt for each in asked], params)
        decoding = llm.config.decoding
    assert isinstance(decoding, Canvas)
    for each, rows in zip(asked, found, strict=True):
        diffusion = resolve(each.diffusion, decoding.defaults, each.max_tokens, family)
        assert_published(written, each._replace(diffusion=diffusion), rows)


def random_request(rng: random.Random, rule: dict[str, Any]) -> Asked:
    num_blocks, length = rng.choice([1, 1, 2, 3]), rng.choice([1, 2, 5, 8])
    has_steps = rule["remasking"] not in ("confidence_threshold", "factor")
    steps = num_blocks * rng.choice([1, 2, 3, 2 * length + 1]) if has_steps else None
    diffusion = DiffusionParams(block_length=length, steps=steps, **rule)
    prompt = [rng.randrange(VOCAB) for _ in range(rng.choice(PROMPTS))]
    return Asked(prompt, num_blocks * length, diffusion)


def assert_published(written: Written, asked: Asked, rows: list[list[int]]) -> None:
    """Up to a tie, if there is one. Models that predict masks are for other tests."""
    row, start = torch.tensor(rows[0]), len(asked.prompt)
    is_masked = torch.arange(len(row)) >= start
    length = asked.diffusion.block_length or asked.max_tokens
    step = num_left_over = 0
    for after in rows[1:]:
        if not is_masked[start : start + length].any():
            start, step, num_left_over = start + length, 0, 0
        block = slice(start, start + length)
        p = guided_logits(written, row, asked)[block].double().softmax(-1)
        if (p.argmax(-1) == MASK)[is_masked[block]].any():
            return
        confidence = confidence_of(p, asked.diffusion)
        surest = confidence.where(is_masked[block], -torch.inf).argsort(
            descending=True, stable=True
        )
        surest = surest[: int(is_masked[block].sum())]
        chosen, num_left_over = published_choice(
            asked.diffusion, confidence, surest, step, steps_of(asked), length, num_left_over
        )
        row[start + chosen], is_masked[start + chosen] = p.argmax(-1)[chosen], False
        if row.tolist() != after:
            assert distance_to_a_tie(p[surest], confidence[surest], asked.diffusion) < TIE
            return
        step += 1
    assert not is_masked.any()


def guided_logits(written: Written, row: Tensor, asked: Asked) -> Tensor:
    logits, scale = written.oracle(row.tolist()), asked.diffusion.cfg_scale
    if not scale:
        return logits
    without = row.clone()
    without[: len(asked.prompt)] = MASK
    other = written.oracle(without.tolist())
    return other + (scale + 1) * (logits - other)


def steps_of(asked: Asked) -> int | None:
    """Of a block."""
    steps, length = asked.diffusion.steps, asked.diffusion.block_length or asked.max_tokens
    return None if steps is None else steps // (asked.max_tokens // length)


def distance_to_a_tie(p: Tensor, confidence: Tensor, diffusion: DiffusionParams) -> float:
    """Of masked places, the surest first."""
    best, second = p.topk(2).values.unbind(-1)
    distances = [best - second, confidence[:-1] - confidence[1:]]
    if diffusion.threshold is not None:
        distances.append((confidence - diffusion.threshold).abs())
    if diffusion.factor is not None:
        bounds = 1 - diffusion.factor / torch.arange(2, len(confidence) + 2)
        distances.append((confidence - bounds).abs())
    return float(torch.cat(distances).min())
