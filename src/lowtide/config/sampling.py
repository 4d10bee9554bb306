"""The publisher's sampling parameters: `generation_config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from lowtide.config.fields import Fields


class PublishedSampling(NamedTuple):
    """Values for unset fields of `SamplingParams`; None: no filter."""

    temperature: float = 0.0  # 0 takes the likeliest token
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def read_sampling(generation: Mapping[str, object]) -> PublishedSampling:
    """Read sampling parameters as transformers does.

    Tokens are drawn if `do_sample` is true, at temperature 1 by default; a repetition penalty
    applies in any case. Raises ConfigError for an impossible value.
    """
    fields = Fields(generation, file="generation_config.json")
    penalty = fields.optional_number("repetition_penalty", low=0.01, high=100.0)
    penalty = None if penalty == 1 else penalty
    if generation.get("do_sample") is not True:
        return PublishedSampling(repetition_penalty=penalty)
    temperature = fields.optional_number("temperature", low=0.0, high=100.0)
    top_k = fields.optional_number("top_k", low=0, high=2**31 - 1)
    top_p = fields.optional_number("top_p", low=0.0, high=1.0)
    return PublishedSampling(
        temperature=1.0 if temperature is None else temperature,
        top_k=int(top_k) if top_k else None,
        top_p=top_p if top_p and top_p < 1 else None,
        min_p=fields.optional_number("min_p", low=0.0, high=1.0) or None,
        repetition_penalty=penalty,
    )
