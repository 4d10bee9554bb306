"""What OpenAI's two older APIs share: bounded fields of a request, ids, usage.

A field that is not known is refused by its name, because it might change words; those that change
none are taken and not used.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.params import MAX_SEED, DiffusionParams, SamplingParams
from lowtide.parsing.pieces import Done, Frame, Prefilled
from lowtide.serve.errors import Refusal

MAX_ANSWERS = 16
"""Answers to one request, which all run at once."""

MAX_STOPS, MAX_STOP_CHARS = 16, 1024

MAX_FIELDS = 1024
"""Most fields of a request, or of an object in it: an unknown one makes an error of its own."""

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
"""Fields that are not supported, with the values that ask for nothing."""


class StreamOptions(BaseModel):
    """What a stream carries besides the answer. include_drafts: a diffusion model's blocks while
    they are filled.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # usage comes once, at the end
    include_obfuscation: bool | None = None  # padding against eavesdroppers: none is sent
    include_drafts: bool | None = None


class DrawFields(BaseModel):
    """How tokens are drawn, in every API."""

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
        """What is asked of each answer; more: further parameters. Raises UsageError for what is
        out of range.
        """
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            # What a request switches off is off, whatever the model's publisher says.
            top_k=None if self.top_k is None else max(self.top_k, 0),
            top_p=None if self.top_p is None else max(self.top_p, MIN_TOP_P),
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=None if self.seed is None else self.seed % (MAX_SEED + 1),
            stop=[each for each in stop if each],
            **more,
        )


class DiffusionFields(BaseModel):
    """How a diffusion model fills its blocks: `DiffusionParams`, by the same names."""

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
    """Which model answers, and how."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = Field(None, max_length=512)
    stream: bool | None = None
    stream_options: StreamOptions = StreamOptions()
    return_progress: bool = False
    return_token_ids: bool = False
    max_tokens: int | None = Field(None, ge=1, le=MAX_INTEGER)
    n: int = Field(1, ge=1, le=MAX_ANSWERS)
    ignore_eos: bool = False
    diffusion: DiffusionFields = DiffusionFields()
    # Taken and not used: no token depends on them.
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
        """What is asked of each answer. Raises UsageError for what is out of range."""
        return self.drawn(
            max_tokens,
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            diffusion=DiffusionParams(**dict(self.diffusion)),
        )


def check_num_fields(fields: dict[str, Any]) -> None:
    """Raises Refusal for an object of too many fields."""
    if len(fields) > MAX_FIELDS:
        raise Refusal(f"An object has {len(fields)} fields; at most {MAX_FIELDS} are accepted.")


def _objects(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A request and the objects in it, two deep."""
    yield body
    for value in body.values():
        if isinstance(value, dict):
            yield value
            yield from (each for each in value.values() if isinstance(each, dict))


def new_id(prefix: str) -> str:
    """Unlike every other one: an agent merges messages of one id."""
    return prefix + uuid.uuid4().hex


def usage_of(ends: Sequence[Done], num_each: int = 1) -> dict[str, Any]:
    """The tokens of a request; num_each: answers to each prompt, one prompt after the other."""
    num_prompt = sum(end.num_prompt for end in ends[::num_each])
    num_new = sum(end.num_new for end in ends)
    cached = sum(end.num_resumed for end in ends[::num_each])
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": sum(end.num_reasoning for end in ends)},
    }


def frame_fields(frame: Frame) -> dict[str, Any]:
    """A draft, beside a choice that adds nothing to the answer."""
    return {
        "type": "diffusion_frame",
        "text": frame.text,
        "masked": frame.num_masked,
        "step": frame.num_forwards,
    }


def progress_fields(progress: Prefilled) -> dict[str, Any]:
    """How far the prompt is, as llama.cpp tells it."""
    counts = {"total": progress.num_total, "processed": progress.num_done}
    return {"prompt_progress": counts}


def token_text(token_id: int, tokenizer: Tokenizer | None) -> str:
    """One token for display."""
    return f"<{token_id}>" if tokenizer is None else tokenizer.piece(token_id)
