"""Keywords of `LLM(...)` and of `generate(...)`, for type checkers and editors.

Written by tools/options_page.py from `EngineConfig`, `SamplingParams` and `DiffusionParams`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TypedDict

from lowtide.params import DiffusionParams
from lowtide.progress import Progress


class ModelKeywords(TypedDict, total=False):
    """Options of a model."""

    host_memory: str | int
    gpu_memory: str | int
    policy: str
    policy_options: Mapping[str, str] | None
    device: str
    device_options: Mapping[str, str] | None
    context: int | None
    dtype: str | None
    format: str | None
    expert_dtype: str | None
    dense_dtype: str | None
    activations: str
    kernels: str
    kv_cache: bool | str
    cache: str
    cache_dir: str | os.PathLike[str] | None
    cache_disk: str | int
    elastic: bool
    cores: int | str | Sequence[int] | None
    check_weights: bool
    calibration: str | os.PathLike[str] | None
    config_overrides: Mapping[str, object] | None
    offline: bool
    block_length: int | None
    seed: int | None
    progress: Progress | bool | None


class AnswerKeywords(TypedDict, total=False):
    """Fields of `SamplingParams` and `DiffusionParams`."""

    max_tokens: int | None
    temperature: float | None
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
    n: int
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
