"""What a user may ask of a generation: `SamplingParams` and `DiffusionParams`.

Values only, checked where they are made; a field left at `None` takes the model family's
published default. `Wishes` are the same fields as keywords of a call. Imports no torch, so that a
wrong flag is refused at once.
"""

from __future__ import annotations

import difflib
import numbers
import operator
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypedDict, cast

from lowtide.errors import UnsupportedError, UsageError
from lowtide.files.json_file import shown

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
MAX_SAMPLES = 1024
DEFAULT_MAX_TOKENS = 256
MAX_SEED = 2**63 - 1


def check_int(name: str, value: object, low: int, high: int = MAX_TOKENS_LIMIT) -> int:
    """`value` as Python's integer. Raises UsageError."""
    number = as_number(value)
    if isinstance(number, bool) or not isinstance(number, int) or not low <= number <= high:
        raise UsageError(f"{name} must be an integer from {low} to {high}, not {shown(value)}.")
    return number


def as_number(value: Any) -> Any:
    """Python's number in place of another, such as numpy's, which a loop over an array gives; all
    else as it is."""
    if isinstance(value, int | float) or str(getattr(value, "dtype", "")).endswith("bool"):
        return value
    with suppress(TypeError, RuntimeError):  # no integer, or a tensor without its numbers
        return operator.index(value)
    with suppress(OverflowError):
        return float(value) if isinstance(value, numbers.Real) else value
    return value


def _check_float(name: str, value: object, low: float, high: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:  # type: ignore[operator]
        raise UsageError(f"{name} must be a number from {low} to {high}, not {shown(value)}.")


def take_numbers(params: object, names: Sequence[str]) -> None:
    """`as_number` of these fields of a frozen dataclass."""
    for name in names:
        object.__setattr__(params, name, as_number(getattr(params, name)))


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
        take_numbers(self, field_names(DiffusionParams))
        for name, low in (("block_length", 1), ("steps", 1), ("max_post_steps", 0)):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), low)
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

    max_tokens: new tokens at most. `None`: 256, or what the context leaves to the prompt where that
        is less; not all of a large context, because every answer of a batch reserves its room.
        Whole blocks where `diffusion` has a block length.
    temperature: 0 is the arg-max, always; above 0 tokens are drawn.
    top_k, top_p: draw only from the k likeliest tokens; from the least set with mass p.
    min_p: draw only tokens at least this share as likely as the likeliest.
    repetition_penalty: logits of tokens that the prompt or the answer has are divided by this
        where positive and multiplied where negative; 1 is off, above 1 discourages.
    presence_penalty, frequency_penalty: taken from a token's logit if the answer has it, and
        once for each time that it has; 0 is off.
    seed: equal seeds give equal tokens, whatever else runs beside.
    stop: strings, or one, that end the answer (they are not part of it).
    ignore_eos: go on after the end-of-text token.
    logprobs: report log-probabilities of the answer's tokens, each with those of this many of
        the likeliest ones at its place (0: of the token alone).
    diffusion: for diffusion models only; they in turn have no penalties and no `logprobs`.
    n: answers to each prompt; the first draws with the prompt's seed, the others with seeds that
        are made of it.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    diffusion: DiffusionParams = field(default_factory=DiffusionParams)
    n: int = 1

    def __post_init__(self) -> None:
        take_numbers(self, field_names(SamplingParams))
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1)
        check_int("n", self.n, 1, MAX_SAMPLES)
        _check_float("temperature", self.temperature, 0.0, 100.0)
        if self.top_k is not None:
            check_int("top_k", self.top_k, 1)
        for name, low, high in _RANGES:
            if getattr(self, name) is not None:
                _check_float(name, getattr(self, name), low, high)
        if self.seed is not None:
            check_int("seed", self.seed, 0, MAX_SEED)
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        stop = () if stop is None else stop
        is_list = isinstance(stop, Sequence)
        if not is_list or not all(isinstance(string, str) and string for string in stop):
            raise UsageError(
                "stop must be a text or a list of texts, none of them empty (left out: none), not "
                f"{self.stop!r}."
            )
        if not isinstance(self.ignore_eos, bool):
            raise UsageError(f"ignore_eos must be true or false, not {self.ignore_eos!r}.")
        if not isinstance(self.diffusion, DiffusionParams):
            raise UsageError(f"diffusion must be DiffusionParams, not {self.diffusion!r}.")

    @property
    def most_tokens(self) -> int:
        """`max_tokens`, or its default while it is not counted what the context leaves: in whole
        blocks of the length that is asked for, one at least."""
        if self.max_tokens is not None:
            return self.max_tokens
        block_length = self.diffusion.block_length or 1
        return max(block_length, DEFAULT_MAX_TOKENS - DEFAULT_MAX_TOKENS % block_length)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, also of one string."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


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


class Wishes(TypedDict, total=False):
    """Fields of `SamplingParams` and `DiffusionParams` as keywords: `generate(prompt, n=3)`."""

    max_tokens: int | None
    n: int
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    ignore_eos: bool
    logprobs: int | None
    diffusion: DiffusionParams
    block_length: int | None
    steps: int | None
    threshold: float | None
    remasking: str | None
    edit_threshold: float | None
    max_post_steps: int | None
    cfg_scale: float | None
    eos_early_stop: bool | None
    eps: float | None
    alg_temp: float | None
    factor: float | None


ELSEWHERE = {
    "best_of": "n",
    "do_sample": "temperature (0 takes the likeliest token, above 0 draws)",
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens (new tokens alone)",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "num_return_sequences": "n",
    "repeat_penalty": "repetition_penalty",
    "sampling_params": "params",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "temp": "temperature",
    "top_logprobs": "logprobs",
    "use_tqdm": "progress",
}
"""What other programs call what is called otherwise here."""


def with_wishes(params: SamplingParams | None, wishes: Wishes) -> SamplingParams:
    """`params`, or those of no wishes, with what `wishes` name put in its place.

    Raises UsageError for a keyword that there is not, and for a value that cannot be.
    """
    own, diffusion = field_names(SamplingParams), field_names(DiffusionParams)
    given = cast(dict[str, Any], wishes)
    for name in given:
        if name not in own and name not in diffusion:
            way_out = hint(name, [*own, *diffusion], ELSEWHERE)
            raise UsageError(f"{name!r} is not a parameter of an answer. {way_out}")
    made = replace(
        params or SamplingParams(), **{name: given[name] for name in own if name in given}
    )
    inner = {name: given[name] for name in diffusion if name in given}
    return replace(made, diffusion=replace(made.diffusion, **inner)) if inner else made


def listed_params(params: object) -> list[SamplingParams]:
    """Parameters that were given one by one. Raises UsageError for anything else."""
    each: list[SamplingParams] = []
    for one in params if isinstance(params, Sequence) else [params]:
        if not isinstance(one, SamplingParams):
            raise UsageError(f"params must be SamplingParams or a list of them, not {one!r}.")
        each.append(one)
    return each


def hint(name: str, known: Sequence[str], elsewhere: Mapping[str, str]) -> str:
    """What a user who wrote `name` may have meant."""
    if name in elsewhere:
        return f"It is called {elsewhere[name]} here."
    near = difflib.get_close_matches(name, known, n=1)
    return f"Did you mean {near[0]}?" if near else f"Known: {', '.join(known)}."
