"""What a user may ask of a generation: `SamplingParams` and `DiffusionParams`.

Values only, checked where they are made; a field left at `None` takes the model family's
published default. Imports no torch, so that a wrong flag is refused at once.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from lowtide.config.sampling import PublishedSampling
from lowtide.errors import UnsupportedError, UsageError
from lowtide.files.json_file import meant
from lowtide.option import Group, check_options, option

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
DEFAULT_CANVAS_TOKENS = 256
"""New tokens of a bidirectional model, all computed in each pass, where no number is given."""
MAX_SEED = 2**63 - 1

_denoising = partial(option, Group.DIFFUSION)
_sampling = partial(option, Group.SAMPLING)


def _knows_its_fields(made: Any) -> Any:
    """Has a dataclass refuse an unknown field with UsageError, and say what may be meant."""
    init = made.__init__

    @functools.wraps(init)
    def checked(self: object, /, *values: object, **given: object) -> None:
        known = field_names(made)
        unknown = next((name for name in given if name not in known), None)
        if unknown is not None:
            inner = field_names(DiffusionParams)
            elsewhere = {name: f"diffusion=DiffusionParams({name}=...)" for name in inner}
            way_out = hint(unknown, known, {**ELSEWHERE, **elsewhere})
            raise UsageError(f"{made.__name__} has no field {unknown!r}. {way_out}")
        init(self, *values, **given)

    made.__init__ = checked
    return made


@_knows_its_fields
@dataclass(frozen=True, slots=True)
class DiffusionParams:
    """How a diffusion model fills its blocks; an unset field is the family's published default.

    Each field's help is its documentation; docs/python.md has the rules of `remasking`.
    """

    block_length: int | None = _denoising(
        "Tokens that are filled in together; unset: the family's number, or the whole answer.",
        low=1,
    )
    steps: int | None = _denoising(
        "Steps to fill a block (LLaDA2) or the whole answer, divided among its blocks (LLaDA, "
        "Dream); fewer are faster.",
        low=1,
    )
    threshold: float | None = _denoising(
        "Write a token once its probability is above this, such as 0.9; less is faster.", high=1
    )
    remasking: str | None = _denoising(
        f"Rule by which a step chooses the tokens it writes: {', '.join(REMASKING_RULES)}.",
        choices=REMASKING_RULES,
    )
    edit_threshold: float | None = _denoising(
        "Replace a written token once another's probability is above this (LLaDA2.1).", high=1
    )
    max_post_steps: int | None = _denoising("Passes that may still edit a block that is full.")
    cfg_scale: float | None = _denoising(
        "Guidance: how strongly the prompt counts; above 0 each pass costs double.", high=1e4
    )
    eos_early_stop: bool | None = _denoising(
        "Stop where the text ends; do not fill the rest of the block; unset: where the answer is "
        "the same."
    )
    eps: float | None = _denoising(
        "Dream: where its schedule of steps ends; unset: 0.001.", low=1e-9, high=0.999
    )
    alg_temp: float | None = _denoising(
        "Dream: temperature of drawing which positions are written; 0 takes the surest.", high=1e4
    )
    factor: float | None = _denoising(
        "Rule factor: more writes more tokens at once, less surely; unset: 1.", high=1e4
    )

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def can_edit(self) -> bool:
        """Whether written tokens may be replaced; no probability is above 1."""
        return self.edit_threshold is not None and self.edit_threshold < 1


AUTOREGRESSIVE_ONLY: Mapping[str, float | None] = {
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logprobs": None,
}
"""Fields of `SamplingParams` that mean nothing where tokens are not written one by one, with the
values that ask for nothing."""


@_knows_its_fields
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one prompt is to be answered; each field's help is its documentation (docs/python.md)."""

    max_tokens: int | None = _sampling(
        "Longest answer in tokens; unset: all that the context leaves (LLaDA, Dream: 256 at most).",
        low=1,
        is_common=True,
    )
    temperature: float | None = _sampling(
        "How freely tokens are drawn: 0 always takes the likeliest; unset: the model's own, or 0.",
        high=100,
        is_common=True,
    )
    top_k: int | None = _sampling("Draw only from the k likeliest tokens; 0 is off.")
    top_p: float | None = _sampling(
        "Draw only from the likeliest tokens that together have this probability, such as 0.9; 1 "
        "is off.",
        low=1e-6,
        high=1,
    )
    min_p: float | None = _sampling(
        "Draw no token below this share of the likeliest one's probability, such as 0.05.", high=1
    )
    repetition_penalty: float | None = _sampling(
        "Above 1, makes tokens that are in prompt or answer already less likely; 1 is off.",
        low=0.01,
        high=100,
    )
    presence_penalty: float | None = _sampling(
        "Above 0, makes tokens that are in the answer already less likely; 0 is off.",
        low=-2,
        high=2,
    )
    frequency_penalty: float | None = _sampling(
        "The same for each time that they are in it; 0 is off.", low=-2, high=2
    )
    seed: int | None = _sampling(
        "Equal seeds draw equal answers, whatever else runs beside; unset: 0.", high=MAX_SEED
    )
    stop: str | Sequence[str] | None = _sampling(
        "Text that ends the answer, and is no part of it.", ()
    )
    ignore_eos: bool = _sampling("Go on where the model ends its text.", False)
    logprobs: int | None = _sampling(
        "Report how likely each token was, and this many of the likeliest in its place (--json).",
        high=MAX_TOP_LOGPROBS,
    )
    diffusion: DiffusionParams = option(
        Group.PYTHON, "How a diffusion model fills its blocks.", DiffusionParams
    )
    n: int = _sampling("How many answers to write to each prompt.", 1, low=1, high=MAX_SAMPLES)

    def __post_init__(self) -> None:
        check_options(self)
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        stop = () if stop is None else stop
        is_list = isinstance(stop, Sequence)
        if not is_list or not all(isinstance(string, str) and string for string in stop):
            raise UsageError(
                "stop must be a text or a list of texts, none of them empty (left out: none), not "
                f"{self.stop!r}."
            )
        if not isinstance(self.diffusion, DiffusionParams):
            raise UsageError(f"diffusion must be DiffusionParams, not {self.diffusion!r}.")

    @property
    def most_tokens(self) -> int:
        """`max_tokens`, or the default of an answer that is computed whole: in whole blocks of the
        length that is asked for, one at least.
        """
        if self.max_tokens is not None:
            return self.max_tokens
        block_length = self.diffusion.block_length or 1
        return max(block_length, DEFAULT_CANVAS_TOKENS - DEFAULT_CANVAS_TOKENS % block_length)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, also of one string."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


def check_kind(params: SamplingParams, architecture: str, is_diffusion: bool) -> None:
    """Raises UnsupportedError for what means nothing to a model of this kind, by name."""
    asked: object = params if is_diffusion else params.diffusion
    unset: Mapping[str, object] = dict.fromkeys(field_names(DiffusionParams))
    off = AUTOREGRESSIVE_ONLY if is_diffusion else unset
    given = [name for name, value in off.items() if getattr(asked, name) not in (None, value)]
    if given:
        reason = "does not write its tokens one by one" if is_diffusion else "has no blocks to fill"
        raise UnsupportedError(f"{', '.join(given)}: {architecture} {reason}; leave this out.")


def field_names(params: type[SamplingParams] | type[DiffusionParams]) -> list[str]:
    """The names a user can set, in order."""
    return [f.name for f in fields(params)]


ELSEWHERE = {
    "do_sample": "temperature (0 takes the likeliest token, above 0 draws)",
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "num_predict": "max_tokens",
    "num_return_sequences": "n",
    "repeat_penalty": "repetition_penalty",
    "sampling_params": "params",
    "stop_sequences": "stop",
    "temp": "temperature",
    "use_tqdm": "progress",
}
"""What other programs call what is called otherwise here."""


def with_keywords(params: SamplingParams | None, given: Mapping[str, object]) -> SamplingParams:
    """`params`, or their defaults, with the fields of both kinds that `given` names replaced.

    Raises UsageError for a keyword that there is not, and for a value that cannot be.
    """
    own, diffusion = field_names(SamplingParams), field_names(DiffusionParams)
    for name in given:
        if name not in own and name not in diffusion:
            way_out = hint(name, [*own, *diffusion], ELSEWHERE)
            raise UsageError(f"{name!r} is not a parameter of an answer. {way_out}")
    made = replace(params or SamplingParams(), **_among(own, given))
    inner = _among(diffusion, given)
    return replace(made, diffusion=replace(made.diffusion, **inner)) if inner else made


def _among(names: Sequence[str], given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in names if name in given}


def with_published(params: SamplingParams, published: PublishedSampling) -> SamplingParams:
    """`params` with what the model's publisher says in place of what is unset; filters of draws
    only where there are any.
    """
    names = [name for name in published._fields if getattr(params, name) is None]
    if not (published.temperature if params.temperature is None else params.temperature):
        names = [name for name in names if name in ("temperature", "repetition_penalty")]
    return replace(params, **{name: getattr(published, name) for name in names})


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
    return meant(name, known).strip() or f"Known: {', '.join(known)}."
