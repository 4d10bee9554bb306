"""Default context of a server: the model's own, if its KV cache fits a share of the memory."""

from __future__ import annotations

from collections.abc import Callable

from lowtide.config import ModelConfig
from lowtide.errors import PlanError
from lowtide.plan import MemoryPlan

KV_SHARE = 4
"""The KV cache may take one part in this many of the memory budget."""

AGENT_TOKENS = 32_768
"""Coding agents start with 10,000 to 20,000 tokens and add to them at every turn."""

_STEP_TOKENS = 256


def served_context(
    plan_with: Callable[[int], MemoryPlan], config: ModelConfig, least_tokens: int
) -> int:
    """Return the model's maximum context, or the largest that fits a share of the budget.

    At least `least_tokens`. Raises the errors of `plan_with` for that many.
    """
    least = min(least_tokens, config.max_positions)
    tier = plan_with(least).fast_tier
    if not config.decoding.keeps_keys or not tier.kv_cache_bytes:
        return least  # every pass has the whole text: more room makes all passes larger
    bytes_per_token = tier.kv_cache_bytes / least
    room = int(tier.budget_bytes / KV_SHARE / bytes_per_token)
    context = min(config.max_positions, room // _STEP_TOKENS * _STEP_TOKENS)
    while context > least:
        try:
            found = plan_with(context).fast_tier
        except PlanError:  # what else grows with it takes the rest
            context //= 2
            continue
        taken = (found.kv_cache_bytes + found.state_bytes) * KV_SHARE / found.budget_bytes
        if not found.state_bytes or taken <= 1:
            return context
        context = min(context - 1, int(context / taken)) // _STEP_TOKENS * _STEP_TOKENS
    return least


def agent_note(context: int) -> str:
    """Return a warning naming the agents that need a longer context; empty if none does."""
    if context >= AGENT_TOKENS:
        return ""
    return (
        f"The context is {context:,} tokens: Codex CLI and Claude Code will not work below "
        f"{AGENT_TOKENS:,}. Give --context {AGENT_TOKENS} where the model has as many positions, "
        "and memory for it; chat clients work."
    )
