"""Measures the error of prefix and dual caches: how far their answers agree with exact ones.

The same prompt is answered with the cache and with everything recomputed. The two answers soon
diverge, so each written token is also judged at its place: is it the exact model's likeliest token
in the same text?
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lowtide.decode.request import Draft, Event
from lowtide.llm import LLM
from lowtide.params import DiffusionParams, SamplingParams


@dataclass(frozen=True, slots=True)
class Agreement:
    """An answer with an approximate cache, at temperature 0, compared with the exact one."""

    kv_cache: str
    num_tokens: int  # of each answer
    num_equal: int  # places where both have the same token
    first_different: int | None  # the first place where they do not
    num_likeliest: int  # tokens that the exact model holds likeliest where they were written

    @property
    def equal_share(self) -> float:
        return self.num_equal / self.num_tokens

    @property
    def likeliest_share(self) -> float:
        return self.num_likeliest / self.num_tokens


def agreement(
    model: str | Path,
    kv_cache: str,
    prompt: Sequence[int],
    max_tokens: int = 24,
    **options: Any,
) -> Agreement:
    """Compare an approximate cache with the exact run.

    kv_cache: `prefix` or `dual`; options: `LLM`'s. The answer has several blocks, so that one has
    others before and after it. Raises as `LLM` does.
    """
    num_blocks = max(n for n in (1, 2, 3) if max_tokens % n == 0)
    diffusion = DiffusionParams(block_length=max_tokens // num_blocks, remasking="low_confidence")
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, diffusion=diffusion)
    chosen = {**options, "kv_cache": kv_cache}
    with LLM(model, **chosen) as llm:
        events: list[Event] = []
        [found] = llm.generate([list(prompt)], params, on_event=events.append)
        drafts = [event for event in events if isinstance(event, Draft)]
        num_likeliest = _num_likeliest(llm, prompt, drafts, max_tokens)
    with LLM(model, **{**options, "kv_cache": True}) as llm:
        [exact] = llm.generate([list(prompt)], params)
    is_equal = [a == b for a, b in zip(found.token_ids, exact.token_ids, strict=True)]
    return Agreement(
        kv_cache=kv_cache,
        num_tokens=max_tokens,
        num_equal=sum(is_equal),
        first_different=None if all(is_equal) else is_equal.index(False),
        num_likeliest=num_likeliest,
    )


def _num_likeliest(
    llm: LLM, prompt: Sequence[int], drafts: Sequence[Draft], max_tokens: int
) -> int:
    """Count the tokens of all drafts that are the arg-max of `llm.logits` in the draft before.

    `llm.logits` caches nothing.
    """
    mask_token_id = llm.config.decoding.mask_token_id or 0
    row = torch.tensor([*prompt, *[mask_token_id] * max_tokens])
    is_masked = torch.arange(len(row)) >= len(prompt)
    num_found = 0
    for draft in drafts:
        block = slice(draft.block_start, draft.block_start + len(draft.tokens))
        after = torch.tensor(draft.tokens)
        is_written = is_masked[block] & ~torch.tensor(draft.is_masked)
        likeliest = llm.logits(row.tolist())[block].argmax(-1)
        num_found += int((is_written & (likeliest == after)).sum())
        row[block] = after
        is_masked[block] = torch.tensor(draft.is_masked)
    return num_found
