"""What `lowtide calibrate --buddies` adds: which experts may stand in for which (BuddyMoE, 3.3)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from lowtide.core import Progress, WeightArray
from lowtide.errors import UsageError
from lowtide.lab.buddies import CoActivations, needed_tokens
from lowtide.lab.buddy_wish import BuddyWish
from lowtide.lab.expert_similarity import num_inputs, output_similarity, weight_similarity
from lowtide.llm import LLM
from lowtide.policies.buddy_lists import Ranking
from lowtide.policies.buddy_profile import BuddyProfile
from lowtide.replay.trace import TraceShape


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
    least_tokens: int  # of a piece
    prompt_tokens: int  # of a piece, at most
    new_tokens: int  # of its answer


def check_length(shape: TraceShape, num_tokens: int, use: TextUse) -> None:
    """Raises UsageError, which says what would do, where a text of `num_tokens` is too short for
    buddies. What it asks for does for all that a calibration finds out."""
    needed, stride = needed_tokens(shape), num_tokens // max(1, use.num_pieces)
    num_learning = max(0, use.num_learning(use.num_pieces))
    found = 0
    if stride >= use.least_tokens:
        found = num_learning * (min(stride, use.prompt_tokens) + use.new_tokens)
    if found >= needed:
        return
    most = use.prompt_tokens + use.new_tokens
    pieces = max(2, use.num_pieces)
    while use.num_learning(pieces) * most < needed:
        pieces += 1
    length = math.ceil(needed / use.num_learning(pieces)) - use.new_tokens
    raise UsageError(
        f"Buddies of {shape.num_experts} experts, {shape.num_experts_per_token} per token, take at "
        f"least {needed} tokens of text and answers to learn from, and this text of {num_tokens} "
        f"has {found} in {num_learning} of {use.num_pieces} pieces; give "
        f"{pieces * max(use.least_tokens, length)} tokens or more in --pieces {pieces}."
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
