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

    def spare_bytes(context: int) -> int | None:
        """Return the bytes that the share has beyond such a context; None: it cannot be planned."""
        try:
            found = plan_with(context).fast_tier
        except PlanError:  # what else grows with it takes the rest
            return None
        of_keys = tier.budget_bytes // KV_SHARE - found.kv_cache_bytes
        of_all = found.budget_bytes // KV_SHARE - found.kv_cache_bytes - found.state_bytes
        return min(of_keys, of_all)

    return _largest(spare_bytes, least, config.max_positions)


def _largest(spare_bytes: Callable[[int], int | None], least: int, most: int) -> int:
    """Return the largest context with bytes to spare, in whole steps, or one of the bounds.

    The bytes that a token takes differ from context to context (windows keep the last tokens
    alone), so contexts are tried: where a straight line between the bounds meets zero, and
    half-way between them after two tries on the same side.
    """
    low, high = least, most
    below, beyond = spare_bytes(low), spare_bytes(high)
    if low == high or below is None or below < 0:
        return low
    if beyond is not None and beyond >= 0:
        return high
    num_same, was_low = 0, False
    while (first := low // _STEP_TOKENS + 1) <= (last := (high - 1) // _STEP_TOKENS):
        share = 0.5 if beyond is None or num_same > 1 else below / (below - beyond)
        step = int(low + share * (high - low)) // _STEP_TOKENS
        tried = min(max(step, first), last) * _STEP_TOKENS
        found = spare_bytes(tried)
        is_low = found is not None and found >= 0
        num_same, was_low = num_same + 1 if is_low == was_low else 1, is_low
        if found is not None and found >= 0:
            low, below = tried, found
        else:
            high, beyond = tried, found
    return low


def agent_note(context: int) -> str:
    """Return a warning naming the agents that need a longer context; empty if none does."""
    if context >= AGENT_TOKENS:
        return ""
    return (
        f"The context is {context:,} tokens: Codex CLI and Claude Code will not work below "
        f"{AGENT_TOKENS:,}. Give --context {AGENT_TOKENS} where the model has as many positions, "
        "and memory for it; chat clients work."
    )
