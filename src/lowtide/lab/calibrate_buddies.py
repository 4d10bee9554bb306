"""What `lowtide calibrate --buddies` adds: which experts may stand in for which (BuddyMoE, 3.3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from lowtide.core import WeightArray
from lowtide.errors import UsageError
from lowtide.lab.buddies import CoActivations, needed_tokens
from lowtide.lab.buddy_wish import BuddyWish
from lowtide.lab.expert_similarity import num_inputs, output_similarity, weight_similarity
from lowtide.llm import LLM
from lowtide.policies.buddy_lists import Ranking
from lowtide.policies.buddy_profile import BuddyProfile
from lowtide.replay.trace import TraceShape

Progress = Callable[[str, int, int], None]
"""Called with what is done, how much of it, and how much there is."""


def counting(llm: LLM, wish: BuddyWish) -> CoActivations:
    """The observer to run the text under. Raises UsageError for a wish that cannot be,
    UnsupportedError for a model whose tokens choose one expert each."""
    shape = TraceShape(*llm.config.moe_shape)
    wish.check(shape.num_layers, shape.num_experts)
    return CoActivations(shape, num_inputs(llm) if wish.has(Ranking.OUTPUTS) else 0)


class TextUse(NamedTuple):
    """How a calibration uses a text."""

    num_pieces: int
    num_learning: Callable[[int], int]  # of so many pieces, those that are learnt from
    prompt_tokens: int  # of a piece, at most
    new_tokens: int  # of its answer


def check_length(shape: TraceShape, prompts: Sequence[Sequence[int]], use: TextUse) -> None:
    """Raises UsageError, which says what would do, where `prompts`, those that are learnt from,
    are too short for buddies."""
    needed = needed_tokens(shape)
    found = sum(len(prompt) + use.new_tokens for prompt in prompts)
    if found >= needed:
        return
    most = use.prompt_tokens + use.new_tokens
    pieces = use.num_pieces
    while use.num_learning(pieces) * most < needed:
        pieces += 1
    length = max(1, math.ceil(needed / use.num_learning(pieces)) - use.new_tokens)
    raise UsageError(
        f"Buddies of {shape.num_experts} experts, {shape.num_experts_per_token} per token, take at "
        f"least {needed} tokens of text and answers to learn from, and this text has {found} in "
        f"{len(prompts)} of {use.num_pieces} pieces; give {pieces * length} tokens or more in "
        f"--pieces {pieces}."
    )


def make_profile(
    llm: LLM, seen: CoActivations, wish: BuddyWish, progress: Progress | None = None
) -> BuddyProfile:
    """The profile of what `counting` saw, with the similarities that were wished for."""
    similarity: dict[Ranking, WeightArray] = {}
    if wish.has(Ranking.OUTPUTS):
        similarity[Ranking.OUTPUTS] = output_similarity(llm, seen, progress)
    if wish.has(Ranking.WEIGHTS):
        similarity[Ranking.WEIGHTS] = weight_similarity(llm, progress)
    profile = seen.profile(llm.fingerprint, wish.rule, similarity)
    if wish.list_size is None:
        return profile
    return replace(profile, rule=profile.fitted_to(wish.list_size, wish.rule))
