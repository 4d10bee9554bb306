"""Keywords of `LLM(...)` and of `generate(...)`, for type checkers and editors.

Written by tools/options_page.py from `EngineConfig`, `SamplingParams` and `DiffusionParams`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TypedDict

from lowtide.params import DiffusionParams
from lowtide.policies.recipe import Recipe
from lowtide.progress import Progress


class ModelKeywords(TypedDict, total=False):
    """Options of a model."""

    host_memory: str | int
    """Memory to use: 12G, 80% of the machine's, or auto; with a GPU, for experts only."""

    gpu_memory: str | int
    """GPU memory to use: 12G, 80%, or auto."""

    policy: str | Recipe
    """Policy that keeps experts in memory; auto chooses one."""

    policy_options: Mapping[str, str] | None
    """Option of the policy, such as tau=4."""

    device: str
    """Device to compute on: auto, cpu, cuda, or emulated (for tests)."""

    device_options: Mapping[str, str] | None
    """Option of the emulated device, such as link_GBps=2."""

    context: int | None
    """Most tokens of prompt and answer together, such as 8192. On a GPU, or if all experts fit,
    running requests share it. Default: the model's, at most 4,096 (serve: more if memory
    allows)."""

    dtype: str | None
    """Data type to compute in, such as float32; default: the checkpoint's."""

    format: str | None
    """Format of weights in memory: own (as stored), q8 or q4 (rounded to 8 or 4 bits: less memory,
    may change answers), or auto (the fastest by lowtide plan)."""

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
    """Most tokens of the answer; unset: as many as the context leaves (LLaDA, Dream: 256)."""

    temperature: float | None
    """Randomness of sampling: 0 always takes the likeliest token; unset: the model's own, or 0."""

    top_k: int | None
    """Draw only from the k likeliest tokens; 0 is off."""

    top_p: float | None
    """Draw only from the likeliest tokens that together have this probability, such as 0.9; 1 is
    off."""

    min_p: float | None
    """Drop tokens below this share of the likeliest one's probability, such as 0.05."""

    repetition_penalty: float | None
    """Above 1: discourage tokens of the prompt and the answer; 1 is off."""

    presence_penalty: float | None
    """Above 0: discourage tokens of the answer; 0 is off."""

    frequency_penalty: float | None
    """Above 0: discourage a token once for each time it is in the answer; 0 is off."""

    seed: int | None
    """Random seed; equal seeds give equal answers, whatever else runs; unset: 0."""

    stop: str | Sequence[str] | None
    """Text that ends the answer and is not part of it."""

    ignore_eos: bool
    """Continue after the model's end-of-text token."""

    logprobs: int | None
    """Report log-probabilities of each token and of this many alternatives."""

    diffusion: DiffusionParams
    """Parameters of a diffusion model's blocks."""

    n: int
    """Number of answers to each prompt."""

    block_length: int | None
    """Number of tokens denoised together; unset: the family's, or the whole answer."""

    steps: int | None
    """Steps to fill a block (LLaDA2) or the whole answer, divided among its blocks (LLaDA, Dream);
    fewer are faster."""

    threshold: float | None
    """Write a token above this probability, such as 0.9; less is faster."""

    remasking: str | None
    """Rule by which a step chooses the tokens it writes: low_confidence, random, origin,
    maskgit_plus, topk_margin, entropy, confidence_threshold, factor."""

    edit_threshold: float | None
    """Replace a written token if another one is above this probability (LLaDA2.1)."""

    max_post_steps: int | None
    """Most passes that may still edit a full block."""

    cfg_scale: float | None
    """Guidance strength of the prompt; above 0 each pass costs double."""

    eos_early_stop: bool | None
    """Stop at the end of the text instead of filling the block; unset: if the answer stays the
    same."""

    eps: float | None
    """Dream: time at which its schedule of steps ends; unset: 0.001."""

    alg_temp: float | None
    """Dream: temperature for drawing the positions to write; 0 takes the surest."""

    factor: float | None
    """Rule factor: a higher value writes more tokens at once, less surely; unset: 1."""
