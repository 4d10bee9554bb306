"""Parameters of a generation: `SamplingParams` and `DiffusionParams`.

Values are checked when they are made; a field left at `None` takes the model family's published
default. Imports no torch, so that a wrong flag is refused at once.
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
"""Default answer length of a bidirectional model, which computes all new tokens in each pass."""
MAX_SEED = 2**63 - 1

_denoising = partial(option, Group.DIFFUSION)
_sampling = partial(option, Group.SAMPLING)


def _refuses_unknown_fields(made: Any) -> Any:
    """Make a dataclass raise UsageError for an unknown field and suggest the right name."""
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


@_refuses_unknown_fields
@dataclass(frozen=True, slots=True)
class DiffusionParams:
    """Parameters of a diffusion model's blocks; unset fields are the family's published defaults.

    The fields' help is their documentation; docs/python.md has the rules of `remasking`.
    """

    block_length: int | None = _denoising(
        "Number of tokens denoised together; unset: the family's, or the whole answer.",
        low=1,
    )
    steps: int | None = _denoising(
        "Steps to fill a block (LLaDA2) or the whole answer, divided among its blocks (LLaDA, "
        "Dream); fewer are faster.",
        low=1,
    )
    threshold: float | None = _denoising(
        "Write a token above this probability, such as 0.9; less is faster.", high=1
    )
    remasking: str | None = _denoising(
        f"Rule by which a step chooses the tokens it writes: {', '.join(REMASKING_RULES)}.",
        choices=REMASKING_RULES,
    )
    edit_threshold: float | None = _denoising(
        "Replace a written token if another one is above this probability (LLaDA2.1).", high=1
    )
    max_post_steps: int | None = _denoising("Most passes that may still edit a full block.")
    cfg_scale: float | None = _denoising(
        "Guidance strength of the prompt; above 0 each pass costs double.", high=1e4
    )
    eos_early_stop: bool | None = _denoising(
        "Stop at the end of the text instead of filling the block; unset: if the answer stays "
        "the same."
    )
    eps: float | None = _denoising(
        "Dream: time at which its schedule of steps ends; unset: 0.001.", low=1e-9, high=0.999
    )
    alg_temp: float | None = _denoising(
        "Dream: temperature for drawing the positions to write; 0 takes the surest.", high=1e4
    )
    factor: float | None = _denoising(
        "Rule factor: a higher value writes more tokens at once, less surely; unset: 1.", high=1e4
    )

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def can_edit(self) -> bool:
        """True if written tokens may be replaced (no probability is above 1)."""
        return self.edit_threshold is not None and self.edit_threshold < 1


AUTOREGRESSIVE_ONLY: Mapping[str, float | None] = {
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logprobs": None,
}
"""Fields of `SamplingParams` for autoregressive models only, with their neutral values."""


@_refuses_unknown_fields
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of one request; the fields' help is their documentation (docs/python.md)."""

    max_tokens: int | None = _sampling(
        "Most tokens of the answer; unset: as many as the context leaves (LLaDA, Dream: 256).",
        low=1,
        is_common=True,
    )
    temperature: float | None = _sampling(
        "Randomness of sampling: 0 always takes the likeliest token; unset: the model's own, or 0.",
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
        "Drop tokens below this share of the likeliest one's probability, such as 0.05.", high=1
    )
    repetition_penalty: float | None = _sampling(
        "Above 1: discourage tokens of the prompt and the answer; 1 is off.",
        low=0.01,
        high=100,
    )
    presence_penalty: float | None = _sampling(
        "Above 0: discourage tokens of the answer; 0 is off.",
        low=-2,
        high=2,
    )
    frequency_penalty: float | None = _sampling(
        "Above 0: discourage a token once for each time it is in the answer; 0 is off.",
        low=-2,
        high=2,
    )
    seed: int | None = _sampling(
        "Random seed; equal seeds give equal answers, whatever else runs; unset: 0.", high=MAX_SEED
    )
    stop: str | Sequence[str] | None = _sampling(
        "Text that ends the answer and is not part of it.", ()
    )
    ignore_eos: bool = _sampling("Continue after the model's end-of-text token.", False)
    logprobs: int | None = _sampling(
        "Report log-probabilities of each token and of this many alternatives (--json).",
        high=MAX_TOP_LOGPROBS,
    )
    diffusion: DiffusionParams = option(
        Group.PYTHON, "Parameters of a diffusion model's blocks.", DiffusionParams
    )
    n: int = _sampling("Number of answers to each prompt.", 1, low=1, high=MAX_SAMPLES)

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
        """`max_tokens`, or the default length of a bidirectional answer.

        The default is a multiple of `block_length`, at least one block.
        """
        if self.max_tokens is not None:
            return self.max_tokens
        block_length = self.diffusion.block_length or 1
        return max(block_length, DEFAULT_CANVAS_TOKENS - DEFAULT_CANVAS_TOKENS % block_length)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


def check_kind(params: SamplingParams, architecture: str, writes_in_order: bool) -> None:
    """Raise UnsupportedError, by name, for parameters that this kind of model does not have."""
    asked: object = params.diffusion if writes_in_order else params
    unset: Mapping[str, object] = dict.fromkeys(field_names(DiffusionParams))
    off = unset if writes_in_order else AUTOREGRESSIVE_ONLY
    given = [name for name, value in off.items() if getattr(asked, name) not in (None, value)]
    if given:
        verb = "is" if len(given) == 1 else "are"
        kinds = ("autoregressive", "diffusion")
        wanted, present = reversed(kinds) if writes_in_order else kinds
        raise UnsupportedError(
            f"{', '.join(f'`{name}`' for name in given)} {verb} for {wanted} models; "
            f"{architecture} is {'an' if present[0] == 'a' else 'a'} {present} model. "
            "Leave this out."
        )


@functools.cache
def field_names(params: type[SamplingParams] | type[DiffusionParams]) -> tuple[str, ...]:
    """List the names of the fields in order."""
    return tuple(f.name for f in fields(params))


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
"""Other libraries' names of parameters -> their names here."""


def with_keywords(params: SamplingParams | None, given: Mapping[str, object]) -> SamplingParams:
    """Replace fields of both classes by name, starting from `params` or the defaults.

    Raises UsageError for an unknown name or a bad value.
    """
    if not given:
        return params or SamplingParams()
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
    """Fill unset parameters with the publisher's values; filters only if tokens are drawn."""
    names = [name for name in published._fields if getattr(params, name) is None]
    if not (published.temperature if params.temperature is None else params.temperature):
        names = [name for name in names if name in ("temperature", "repetition_penalty")]
    return replace(params, **{name: getattr(published, name) for name in names})


def listed_params(params: object) -> list[SamplingParams]:
    """Return parameters that were given one by one as a list.

    Raises UsageError for anything else.
    """
    each: list[SamplingParams] = []
    for one in params if isinstance(params, Sequence) else [params]:
        if not isinstance(one, SamplingParams):
            raise UsageError(f"params must be SamplingParams or a list of them, not {one!r}.")
        each.append(one)
    return each


def hint(name: str, known: Sequence[str], elsewhere: Mapping[str, str]) -> str:
    """Suggest the name that a user who wrote `name` may have meant."""
    if name in elsewhere:
        return f"It is called {elsewhere[name]} here."
    return meant(name, known).strip() or f"Known: {', '.join(known)}."
