"""Complete options of masked diffusion: a request's own, with defaults filled in.

Options that contradict each other, or have no meaning for these models, are refused by name.
"""

from __future__ import annotations

from dataclasses import replace

from lowtide.config import DecodingDefaults
from lowtide.core import align_up
from lowtide.errors import UnsupportedError, UsageError
from lowtide.params import DiffusionParams, SamplingParams

COUNT_RULES = ("low_confidence", "random")
"""Rules that write equally many tokens in every step."""

RANKED_SHARE_RULES = ("maskgit_plus", "topk_margin", "entropy")
SHARE_RULES = ("origin", *RANKED_SHARE_RULES)
"""Rules that write as many tokens as Dream's falling masked share requires."""

THRESHOLD_RULE = "confidence_threshold"
FACTOR_RULE = "factor"

_RULES_OF = {
    "threshold": (THRESHOLD_RULE,),
    "factor": (FACTOR_RULE,),
    "eps": SHARE_RULES,
    "alg_temp": RANKED_SHARE_RULES,
}
"""Field -> the rules that use it."""

FOR_REWRITING = ("edit_threshold", "max_post_steps")
"""Fields of models that rewrite tokens, which these models do not."""

THRESHOLD, FACTOR, EPS = 0.9, 1.0, 1e-3
"""The values published by Fast-dLLM and Dream, for families that give none themselves."""

MAX_STEPS = 2**16
"""Most steps of Dream's schedule unless more tokens are new: the schedule stores each step."""


def resolve(
    asked: DiffusionParams, defaults: DecodingDefaults, max_tokens: int, architecture: str
) -> DiffusionParams:
    """Return `asked` with all fields that its rule uses; other fields are None.

    `steps` cover the whole answer and are a multiple of its number of blocks; None if unlimited.
    Raises UnsupportedError for options that these models do not have, UsageError for contradictory
    ones.
    """
    rule = asked.remasking or defaults.remasking
    _check_fields(asked, rule, architecture)
    block_length = _block_length(asked.block_length, defaults.block_length, max_tokens)
    threshold = _given(asked.threshold, defaults.threshold or THRESHOLD)
    return replace(
        asked,
        remasking=rule,
        block_length=block_length,
        steps=_steps(asked, defaults, rule, max_tokens, block_length),
        threshold=threshold if rule == THRESHOLD_RULE else None,
        factor=_given(asked.factor, FACTOR) if rule == FACTOR_RULE else None,
        eps=_given(asked.eps, defaults.eps or EPS) if rule in SHARE_RULES else None,
        cfg_scale=asked.cfg_scale or 0.0,
    )


def with_early_stop(params: SamplingParams) -> SamplingParams:
    """Return `params` with `eos_early_stop` set if it was unset.

    It saves passes after the end token where they cannot change the answer; editing can.
    """
    diffusion = params.diffusion
    if diffusion.eos_early_stop is not None:
        return params
    is_early = not (params.ignore_eos or diffusion.can_edit)
    return replace(params, diffusion=replace(diffusion, eos_early_stop=is_early))


def _check_fields(asked: DiffusionParams, rule: str, architecture: str) -> None:
    for name in FOR_REWRITING:
        if getattr(asked, name) is not None:
            raise UnsupportedError(
                f"`{name}`: {architecture} does not rewrite tokens; leave this out."
            )
    for name, rules in _RULES_OF.items():
        if getattr(asked, name) is not None and rule not in rules:
            raise UsageError(
                f"`{name}` {getattr(asked, name)} means nothing to `remasking` {rule!r}; leave it "
                f"out, or choose `remasking` {' or '.join(rules)}."
            )


def _block_length(asked: int | None, default: int | None, max_tokens: int) -> int:
    if asked is None:
        return min(default or max_tokens, max_tokens)
    if max_tokens % asked:
        raise UsageError(
            f"`block_length` {asked} does not divide `max_tokens` {max_tokens}: this model's "
            "answers are whole blocks."
        )
    return asked


def _steps(
    asked: DiffusionParams,
    defaults: DecodingDefaults,
    rule: str,
    max_tokens: int,
    block_length: int,
) -> int | None:
    num_blocks = -(-max_tokens // block_length)
    # Fast-dLLM bounds the threshold's steps only where it decodes without blocks.
    has_blocks = asked.block_length is not None or defaults.block_length is not None
    is_unbounded = rule == FACTOR_RULE or (rule == THRESHOLD_RULE and has_blocks)
    if asked.steps is not None and is_unbounded:
        where = " in blocks" if rule == THRESHOLD_RULE else ""
        raise UsageError(
            f"`steps` {asked.steps} mean nothing to `remasking` {rule!r}{where}, which takes as "
            "many as its tokens need; leave them out."
        )
    if asked.steps is not None and asked.steps % num_blocks:
        fewer = asked.steps - asked.steps % num_blocks
        choices = " or ".join(str(steps) for steps in (fewer, fewer + num_blocks) if steps)
        raise UsageError(
            f"{asked.steps} steps do not divide among {num_blocks} blocks of {block_length} "
            f"tokens; choose {choices}."
        )
    if rule in SHARE_RULES and (asked.steps or 1) > max(MAX_STEPS, max_tokens):
        raise UsageError(
            f"{asked.steps} steps for {max_tokens} tokens: `remasking` {rule!r} takes "
            f"{max(MAX_STEPS, max_tokens)} at most."
        )
    if rule in COUNT_RULES or rule in SHARE_RULES:
        return asked.steps or align_up(min(defaults.steps, max_tokens), num_blocks)
    return asked.steps


def _given(asked: float | None, default: float) -> float:
    return default if asked is None else asked
