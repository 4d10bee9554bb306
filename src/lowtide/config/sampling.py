"""How a model's publisher would have its tokens drawn: `generation_config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from lowtide.errors import ConfigError
from lowtide.files.json_file import shown


class PublishedSampling(NamedTuple):
    """What stands for fields of `SamplingParams` that are left unset. None: nothing."""

    temperature: float = 0.0  # 0 takes the likeliest token
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def read_sampling(generation: Mapping[str, object]) -> PublishedSampling:
    """As transformers reads it: tokens are drawn where `do_sample` is true, at temperature 1 where
    none is named, and a repetition penalty holds in any case. Raises ConfigError for a value that
    cannot be."""
    penalty = _number(generation, "repetition_penalty", 0.01, 100.0)
    penalty = None if penalty == 1 else penalty
    if generation.get("do_sample") is not True:
        return PublishedSampling(repetition_penalty=penalty)
    temperature, top_k = (
        _number(generation, "temperature", 0.0, 100.0),
        _number(generation, "top_k", 0, 2**31 - 1),
    )
    top_p, min_p = _number(generation, "top_p", 0.0, 1.0), _number(generation, "min_p", 0.0, 1.0)
    return PublishedSampling(
        temperature=1.0 if temperature is None else temperature,
        top_k=int(top_k) if top_k else None,
        top_p=top_p if top_p and top_p < 1 else None,
        min_p=min_p or None,
        repetition_penalty=penalty,
    )


def _number(generation: Mapping[str, object], name: str, low: float, high: float) -> float | None:
    value = generation.get(name)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:  # type: ignore[operator]
        raise ConfigError(
            f"generation_config.json: {name} {shown(value)} is not a number from {low} to {high}."
        )
    return value  # type: ignore[return-value]
