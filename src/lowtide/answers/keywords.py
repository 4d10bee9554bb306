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
    """Memory to use: 12G, 80% of the machine's, or auto; beside a GPU, for experts only."""

    gpu_memory: str | int
    """GPU memory to use: 12G, 80%, or auto."""

    policy: str
    """Policy that keeps experts in memory; auto chooses one."""

    policy_options: Mapping[str, str] | None
    """Option of the policy, such as tau=4."""

    device: str
    """Device to compute on: auto, cpu, cuda, or emulated (for tests)."""

    device_options: Mapping[str, str] | None
    """Option of the emulated device, such as link_GBps=2."""

    context: int | None
    """Most tokens of prompt and answer, such as 8192 or 8k; running requests share them. Default:
    the model's, at most 4,096 (serve: more, where memory allows)."""

    dtype: str | None
    """Data type to compute in, such as float32; default: the checkpoint's."""

    format: str | None
    """Format of weights in memory: own (as stored), q8 or q4 (rounded to 8 or 4 bits: less memory,
    may change answers), or auto (the one that plan finds faster)."""

    expert_dtype: str | None
    """Like `format`, for experts only."""

    dense_dtype: str | None
    """Like `format`, for everything but experts."""

    activations: str
    """Activations: int8 rounds those multiplied with q8, q4 or GGUF weights (faster, may change
    answers); own rounds none; auto rounds for GGUF types that lose almost nothing by it."""

    kernels: str
    """Kernels: auto, or reference (plain torch: slow, for comparison)."""

    kv_cache: bool | str
    """KV cache: true keeps keys and values, false recomputes them; prefix and dual (LLaDA, Dream)
    keep more and approximate."""

    cache: str
    """Reuse the KV cache of earlier requests: on (any shared prefix), exact (only where tokens
    cannot change), off."""

    cache_dir: str | os.PathLike[str] | None
    """Private folder that keeps conversations' KV caches for later runs, unencrypted (not on a
    GPU)."""

    cache_disk: str | int
    """Most to keep in `cache_dir`: 8GiB, 10% of the disk; the longest unused goes first."""

    elastic: bool
    """Use memory that the context does not need yet for experts, or return it to the system if all
    experts fit (not on a GPU)."""

    cores: int | str | Sequence[int] | None
    """Cores to compute on: a number (chosen among those that no other lowtide holds) or a list such
    as 0,2-3; the process keeps to them until it ends."""

    check_weights: bool
    """Read all weights first and refuse infinities and NaN."""

    calibration: str | os.PathLike[str] | None
    """File from lowtide calibrate, if not in its default place."""

    config_overrides: Mapping[str, object] | None
    """Override a value of config.json, such as mask_token_id=7."""

    offline: bool
    """Use only models that are on this machine."""

    block_length: int | None
    """Block length of `logits` (block diffusion)."""

    seed: int | None
    """Seed of requests that bring none."""

    progress: Progress | bool | None
    """Called with (stage, bytes done, bytes in all) while loading; true shows a line on standard
    error, and so does the default on a terminal or in a notebook."""


class AnswerKeywords(TypedDict, total=False):
    """Fields of `SamplingParams` and `DiffusionParams`."""

    max_tokens: int | None
    """Longest answer in tokens; unset: all that the context leaves (LLaDA, Dream: 256 at most)."""

    temperature: float | None
    """How freely tokens are drawn: 0 always takes the likeliest; unset: the model's own, or 0."""

    top_k: int | None
    """Draw only from the k likeliest tokens; 0 is off."""

    top_p: float | None
    """Draw only from the likeliest tokens that together have this probability, such as 0.9; 1 is
    off."""

    min_p: float | None
    """Draw no token below this share of the likeliest one's probability, such as 0.05."""

    repetition_penalty: float | None
    """Above 1, makes tokens that are in prompt or answer already less likely; 1 is off."""

    presence_penalty: float | None
    """Above 0, makes tokens that are in the answer already less likely; 0 is off."""

    frequency_penalty: float | None
    """The same for each time that they are in it; 0 is off."""

    seed: int | None
    """Equal seeds draw equal answers, whatever else runs beside; unset: 0."""

    stop: str | Sequence[str] | None
    """Text that ends the answer, and is no part of it."""

    ignore_eos: bool
    """Go on where the model ends its text."""

    logprobs: int | None
    """Report how likely each token was, and this many of the likeliest in its place."""

    diffusion: DiffusionParams
    """How a diffusion model fills its blocks."""

    n: int
    """How many answers to write to each prompt."""

    block_length: int | None
    """Tokens that are filled in together; unset: the family's number, or the whole answer."""

    steps: int | None
    """Steps to fill a block (LLaDA2) or the whole answer, divided among its blocks (LLaDA, Dream);
    fewer are faster."""

    threshold: float | None
    """Write a token once its probability is above this, such as 0.9; less is faster."""

    remasking: str | None
    """Rule by which a step chooses the tokens it writes: low_confidence, random, origin,
    maskgit_plus, topk_margin, entropy, confidence_threshold, factor."""

    edit_threshold: float | None
    """Replace a written token once another's probability is above this (LLaDA2.1)."""

    max_post_steps: int | None
    """Passes that may still edit a block that is full."""

    cfg_scale: float | None
    """Guidance: how strongly the prompt counts; above 0 each pass costs double."""

    eos_early_stop: bool | None
    """Stop where the text ends; do not fill the rest of the block; unset: where the answer is the
    same."""

    eps: float | None
    """Dream: where its schedule of steps ends; unset: 0.001."""

    alg_temp: float | None
    """Dream: temperature of drawing which positions are written; 0 takes the surest."""

    factor: float | None
    """Rule factor: more writes more tokens at once, less surely; unset: 1."""
