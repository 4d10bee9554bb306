"""What a user may ask of a generation: `SamplingParams` and `DiffusionParams`.

Values only, checked where they are made; a field left at `None` takes the model family's
published default. Imports no torch, so that a wrong flag is refused at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from lowtide.errors import UnsupportedError, UsageError

MAX_TOKENS_LIMIT = 2**31 - 1
REMASKING_RULES = (
    "low_confidence",
    "random",
    "origin",
    "maskgit_plus",
    "topk_margin",
    "entropy",
    "confidence_threshold",
    "factor",
)
MAX_TOP_LOGPROBS = 20


def _check_int(name: str, value: object, low: int, high: int = MAX_TOKENS_LIMIT) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UsageError(f"{name} must be an integer from {low} to {high}, not {value!r}.")


def _check_float(name: str, value: object, low: float, high: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not low <= value <= high:  # type: ignore[arg-type, operator]
        raise UsageError(f"{name} must be a number from {low} to {high}, not {value!r}.")


_DIFFUSION_RANGES = (
    ("threshold", 0.0, 1.0),
    ("edit_threshold", 0.0, 1.0),
    ("cfg_scale", 0.0, 1e4),
    ("eps", 1e-9, 0.999),
    ("alg_temp", 0.0, 1e4),
    ("factor", 0.0, 1e4),
)


@dataclass(frozen=True, slots=True)
class DiffusionParams:
    """How a diffusion model fills its blocks. `None` means the family's published default.

    block_length: tokens denoised together; the whole answer where the family has no default.
        What is asked must divide a bidirectional model's answer, whose last block may be shorter
        by default.
    steps: denoising steps as the family's own code counts them. LLaDA2: per block, at least
        `block_length / steps` tokens each. LLaDA, LLaDA-MoE, Dream: over the whole answer, divided
        among its blocks; by default no more than new tokens.
    remasking: which tokens are written and which wait. LLaDA2 has `low_confidence`; the
        bidirectional models have all of these:
        `low_confidence`, `random` (LLaDA): as many tokens in every step, the most probable or any.
        `origin` (Dream): each token by chance, so that the masked share falls evenly to `eps`.
        `maskgit_plus`, `topk_margin`, `entropy` (Dream): as many as that share says, by
        probability, by distance from the second best, or by entropy.
        `confidence_threshold` (Fast-dLLM): all as probable as `threshold`, and the most probable.
        Takes the steps it needs, and no `steps`; but where the answer is one block for want of a
        default, these bound the tokens of each: what earlier ones left of an even share is allowed
        besides.
        `factor` (Fast-dLLM): the n most probable for the greatest n with
        (n + 1) * (1 - probability of the n-th) <= `factor`, one at least; as many steps as needed.
    threshold: LLaDA2: a masked token is written when its probability is above this. Others: see
        `confidence_threshold`.
    eps: time at which Dream's schedule ends; alg_temp: above 0, its three rules by confidence draw
        positions from a softmax at this temperature instead of taking the surest.
    factor: see `factor`.
    cfg_scale: classifier-free guidance, 0 is none: logits move away from what they are without
        the prompt by so many times the difference. Costs a second row for each.
    edit_threshold: LLaDA2.1 token editing: a written token is replaced when another one is the
        arg-max with a probability above this. `None` with a family that has no editing: off.
    max_post_steps: editing passes over a block without masks, at most.
    eos_early_stop: return as soon as the end-of-text token is written and everything before it
        is; otherwise the block is finished first.
    """

    block_length: int | None = None
    steps: int | None = None
    threshold: float | None = None
    remasking: str | None = None
    edit_threshold: float | None = None
    max_post_steps: int | None = None
    cfg_scale: float | None = None
    eos_early_stop: bool | None = None
    eps: float | None = None
    alg_temp: float | None = None
    factor: float | None = None

    def __post_init__(self) -> None:
        for name, low in (("block_length", 1), ("steps", 1), ("max_post_steps", 0)):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), low)
        for name, least, most in _DIFFUSION_RANGES:
            if getattr(self, name) is not None:
                _check_float(name, getattr(self, name), least, most)
        if self.remasking is not None and self.remasking not in REMASKING_RULES:
            raise UsageError(
                f"remasking {self.remasking!r} is not known; choose {', '.join(REMASKING_RULES)}."
            )
        if self.eos_early_stop is not None and not isinstance(self.eos_early_stop, bool):
            raise UsageError(f"eos_early_stop must be true or false, not {self.eos_early_stop!r}.")


_RANGES = (
    ("top_p", 1e-6, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.01, 100.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
)

AUTOREGRESSIVE_ONLY = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logprobs")
"""Fields of `SamplingParams` that mean nothing where tokens are not written one by one."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's wishes.

    max_tokens: new tokens at most.
    temperature: 0 is the arg-max, always; above 0 tokens are drawn.
    top_k, top_p: draw only from the k likeliest tokens; from the least set with mass p.
    min_p: draw only tokens at least this share as likely as the likeliest.
    repetition_penalty: logits of tokens that the prompt or the answer has are divided by this
        where positive and multiplied where negative; 1 is off, above 1 discourages.
    presence_penalty, frequency_penalty: taken from a token's logit if the answer has it, and
        once for each time that it has; 0 is off.
    seed: equal seeds give equal tokens, whatever else runs beside.
    stop: strings that end the answer (they are not part of it).
    ignore_eos: go on after the end-of-text token.
    logprobs: report log-probabilities of the answer's tokens, each with those of this many of
        the likeliest ones at its place (0: of the token alone).
    diffusion: for diffusion models only; they in turn have no penalties and no `logprobs`.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    diffusion: DiffusionParams = field(default_factory=DiffusionParams)

    def __post_init__(self) -> None:
        _check_int("max_tokens", self.max_tokens, 1)
        _check_float("temperature", self.temperature, 0.0, 100.0)
        if self.top_k is not None:
            _check_int("top_k", self.top_k, 1)
        for name, low, high in _RANGES:
            if getattr(self, name) is not None:
                _check_float(name, getattr(self, name), low, high)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, 2**63 - 1)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        is_list = isinstance(self.stop, Sequence) and not isinstance(self.stop, str)
        if not is_list or not all(isinstance(string, str) and string for string in self.stop):
            raise UsageError(f"stop must be a list of non-empty strings, not {self.stop!r}.")
        if not isinstance(self.ignore_eos, bool):
            raise UsageError(f"ignore_eos must be true or false, not {self.ignore_eos!r}.")
        if not isinstance(self.diffusion, DiffusionParams):
            raise UsageError(f"diffusion must be DiffusionParams, not {self.diffusion!r}.")


def check_kind(params: SamplingParams, architecture: str, is_diffusion: bool) -> None:
    """Raises UnsupportedError for what means nothing to a model of this kind, by name."""
    asked: object = params if is_diffusion else params.diffusion
    names = AUTOREGRESSIVE_ONLY if is_diffusion else field_names(DiffusionParams)
    given = [name for name in names if getattr(asked, name) is not None]
    if given:
        reason = "does not write its tokens one by one" if is_diffusion else "has no blocks to fill"
        raise UnsupportedError(f"{', '.join(given)}: {architecture} {reason}; leave this out.")


def field_names(params: type[SamplingParams] | type[DiffusionParams]) -> list[str]:
    """The names a user can set, in order."""
    return [f.name for f in fields(params)]
