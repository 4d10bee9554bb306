"""Request fields that several APIs share, with their bounds.

OpenAI's two older APIs refuse an unknown field by name, since it might change words. Known fields
that change no word are accepted and ignored.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lowtide.params import MAX_SEED, DiffusionParams, SamplingParams
from lowtide.serve.errors import Refusal

MAX_ANSWERS = 16
"""Most answers to one request; they all run at once."""

MAX_MESSAGES, MAX_TOOLS, MAX_CALLS = 8192, 512, 256  # of a request, of a message

MAX_STOPS, MAX_STOP_CHARS = 16, 1024

MAX_FIELDS = 1024
"""Most fields of a request or of an object in it: each unknown field makes an error."""

MAX_INTEGER = 2**31 - 1
MIN_TOP_P = 1e-6  # 0 asks for the likeliest token alone

StopString = Annotated[str, Field(max_length=MAX_STOP_CHARS)]
Stop = StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)]

_NEUTRAL: Mapping[str, object] = {
    "best_of": 1,
    "function_call": "none",
    "functions": [],
    "logit_bias": {},
    "modalities": ["text"],
    "suffix": "",
}
"""Unsupported fields, with the values that have no effect."""


class StreamOptions(BaseModel):
    """Additions to a stream. include_drafts: a diffusion model's blocks while they are filled."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # usage comes once, at the end
    include_obfuscation: bool | None = None  # padding against eavesdroppers: none is sent
    include_drafts: bool | None = None


class DrawFields(BaseModel):
    """Fields of `SamplingParams` that control how tokens are drawn, in every API."""

    model_config = ConfigDict(strict=True)

    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_INTEGER)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(2**63), le=MAX_SEED)
    stop: Stop | None = None

    def drawn(self, max_tokens: int | None, **more: Any) -> SamplingParams:
        """Return the sampling parameters; `more`: further fields. Raise UsageError."""
        asked = {name: getattr(self, name) for name in DrawFields.model_fields}
        # 0 and -1 turn a filter off, whatever the model's publisher recommends.
        if self.top_k is not None:
            asked["top_k"] = max(self.top_k, 0)
        if self.top_p is not None:
            asked["top_p"] = max(self.top_p, MIN_TOP_P)
        if self.seed is not None:
            asked["seed"] = self.seed % (MAX_SEED + 1)
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        asked["stop"] = [each for each in stop if each]
        return SamplingParams(max_tokens=max_tokens, **asked, **more)


class DiffusionFields(BaseModel):
    """The fields of `DiffusionParams`, by the same names."""

    model_config = ConfigDict(extra="forbid", strict=True)

    block_length: int | None = None
    steps: int | None = None
    threshold: float | None = None
    remasking: str | None = Field(default=None, max_length=64)
    edit_threshold: float | None = None
    max_post_steps: int | None = None
    cfg_scale: float | None = None
    eos_early_stop: bool | None = None
    eps: float | None = None
    alg_temp: float | None = None
    factor: float | None = None


class SamplingFields(DrawFields):
    """Fields of an answer in OpenAI's and Anthropic's APIs."""

    model: str | None = Field(None, max_length=512)
    stream: bool | None = None
    max_tokens: int | None = Field(None, ge=1, le=MAX_INTEGER)
    n: int = Field(1, ge=1, le=MAX_ANSWERS)
    ignore_eos: bool = False
    diffusion: DiffusionFields = DiffusionFields()
    # Accepted and ignored: no token depends on them.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    cache_prompt: Any = None
    keep_alive: Any = None

    @model_validator(mode="before")
    @classmethod
    def _without_what_asks_for_nothing(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        for fields in _objects(body):
            check_num_fields(fields)
        return {
            name: value
            for name, value in body.items()
            if value is not None and not (name in _NEUTRAL and _NEUTRAL[name] == value)
        }

    def sampling(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """Return the sampling parameters of an answer. Raise UsageError."""
        return self.drawn(
            max_tokens,
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            diffusion=DiffusionParams(**dict(self.diffusion)),
        )


class OpenAIFields(SamplingFields):
    """Fields that chat completions and completions share with no other API."""

    model_config = ConfigDict(extra="forbid")

    stream_options: StreamOptions = StreamOptions()
    return_progress: bool = False
    return_token_ids: bool = False


def check_num_fields(fields: dict[str, Any]) -> None:
    """Raise Refusal for an object with too many fields."""
    if len(fields) > MAX_FIELDS:
        raise Refusal(f"An object has {len(fields)} fields; at most {MAX_FIELDS} are accepted.")


def _objects(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the request and its nested objects, down to the second level."""
    yield body
    for value in body.values():
        if isinstance(value, dict):
            yield value
            yield from (each for each in value.values() if isinstance(each, dict))


# The system's own randomness takes Python's lock for 0.2 ms a number.
_ids = random.Random(secrets.randbits(256))


def new_id(prefix: str) -> str:
    """Return a unique id: agents merge messages that share one."""
    return f"{prefix}{_ids.getrandbits(128):032x}"
