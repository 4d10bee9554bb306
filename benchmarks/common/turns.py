"""A conversation's next turn, and the pass that it takes, run bare over the same keys."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from common.inside import run_between_passes, states_of
from lowtide import LLM, SamplingParams
from lowtide.core import Step, StepKind
from lowtide.decode.request import Committed, Draft
from lowtide.engine.running.engine import Engine
from lowtide.layers.batch import Batch, Segment

NEW_TOKENS = 24
"""Tokens of each answer, and of the user's next turn."""

LAST_TURN = 8


class Turn(NamedTuple):
    """One answer: seconds to its first token, its ids, and the prompt tokens found in the cache."""

    first_s: float
    token_ids: list[int]
    num_cached: int


def timed_turns(llm: LLM, num_behind: int) -> list[tuple[float, float]]:
    """Of turns 2 to 8 of a conversation, in seconds: to the first token, and of the bare pass.

    num_behind: tokens of the first turn's prompt.
    """
    text = text_ids(llm, num_behind, 0)
    text += answered(llm, text)
    times = []
    for turn in range(2, LAST_TURN + 1):
        prompt = [*text, *text_ids(llm, NEW_TOKENS, turn)]
        # Behind the turn, states at its beginning may have made way for later ones.
        is_before = turn % 2 or llm.config.has_states
        before = [bare_pass_s(llm, prompt)] if is_before else []
        first_s, answer, num_cached = next_turn(llm, prompt)
        if num_cached < num_behind - 64:
            raise SystemExit(f"Turn {turn} took over {num_cached} tokens of {num_behind}.")
        [bare_s] = before or [bare_pass_s(llm, prompt, num_cached)]
        times.append((first_s, bare_s))
        text = [*prompt, *answer]
    return times


def as_ratios(times: Sequence[tuple[float, float]]) -> dict[str, object]:
    """Medians of `timed_turns`, and the first tokens over the bare passes."""
    ratios = [turn_s / bare_s for turn_s, bare_s in times]
    return {
        "first_s": statistics.median(turn_s for turn_s, _ in times),
        "bare_s": statistics.median(bare_s for _, bare_s in times),
        "ratio": statistics.median(ratios),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "wanted_ratio": 1.10,
    }


def answered(llm: LLM, prompt: list[int]) -> list[int]:
    return llm.generate([prompt], turn_params())[0].token_ids


def next_turn(llm: LLM, prompt: list[int]) -> Turn:
    """The answer to a conversation so far."""
    start_s, first_s = time.perf_counter(), 0.0

    def note(event: object) -> None:
        nonlocal first_s
        if not first_s and isinstance(event, Committed | Draft):
            first_s = time.perf_counter() - start_s

    [completion] = llm.generate([prompt], turn_params(), note)
    return Turn(first_s, completion.token_ids, completion.usage.cached_tokens)


def bare_pass_s(llm: LLM, prompt: list[int], num_cached: int | None = None) -> float:
    """Seconds of the pass of a prompt's new rows; the keys before them are copied beforehand.

    num_cached: as many as the turn took over; by default all that is kept.
    """

    def work(engine: Engine) -> float:
        cache, block_length = engine.kv_cache, engine.model.config.decoding.block_length
        kept = cache.kept[-1]
        first = min(num_cached or kept.num_written, kept.num_written)
        ids = list(prompt)
        if block_length > 1:  # the block that is filled next, masked
            first = first // block_length * block_length
            mask = engine.model.config.decoding.mask_token_id or 0
            ids += [mask] * (block_length - len(ids) % block_length)
        states = states_of(cache)
        if states is not None and kept.states is not None:  # those of the copy have room
            needed = first, kept.num_written
            others = [place for place in kept.states.snapshots if place not in needed]
            states.drop(kept.states, *others)
        kv = cache.branch(kept, first, len(ids))
        rows = len(ids) - first
        batch = Batch(
            torch.tensor(ids[first:]),
            torch.arange(first, len(ids)),
            (Segment(0, rows, first, block_length, kv),),
            Step(StepKind.DENOISE if block_length > 1 else StepKind.DECODE, 0),
        )
        try:
            cache.prepare(kv, len(ids))
            start_s = time.perf_counter()
            with torch.inference_mode():
                hidden = engine.model.forward(batch)
                engine.model.logits(hidden[-block_length:].clone()).argmax(-1)
            return time.perf_counter() - start_s
        finally:
            cache.free(kv)

    return run_between_passes(llm, work)


def turn_params() -> SamplingParams:
    return SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)


def text_ids(llm: LLM, count: int, seed: int) -> list[int]:
    """Seeded ids of text: special ones lie at the vocabulary's end."""
    draw = np.random.default_rng(seed)
    ids: Sequence[int] = draw.integers(1, llm.config.vocab_size * 9 // 10, count).tolist()
    return list(ids)
