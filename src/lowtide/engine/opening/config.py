"""`EngineConfig`: options of opening and running a model, declared and checked in one place.

Imports no torch, since the command line makes its flags from it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from lowtide.core import CacheMode, Reuse
from lowtide.engine.opening.device_choice import check_device, resolve_device
from lowtide.engine.opening.option_checks import check_cache
from lowtide.engine.opening.weight_formats import FormatRequest
from lowtide.errors import UnsupportedError, UsageError
from lowtide.formats.plain import SAFETENSORS_NAME
from lowtide.option import Group, check_options, option
from lowtide.params import MAX_SEED
from lowtide.plan import AUTO_FORMAT, INT8_ROWS, OWN_FORMAT
from lowtide.policies.presets import check_policy
from lowtide.progress import Progress, no_progress
from lowtide.threads.cores import Cores, parse_cores

MAX_PASS_ROWS = 512
"""Rows of the largest forward pass. Independent of the budget, because the division of rows into
passes must be."""

MAX_BLOCK_LENGTH = MAX_PASS_ROWS // 2
"""A block's first step also carries the block before it."""

_engine = partial(option, Group.ENGINE)
_python = partial(option, Group.PYTHON)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of `LLM`; each field's help is its documentation (docs/options.md).

    Sizes are bytes, `10GiB`, `80%` (of this machine) or `auto`.
    """

    host_memory: str | int = _engine(
        "Memory to use: 12G, 80% of the machine's, or auto; with a GPU, for experts only.",
        "auto",
        short="--memory",
        is_common=True,
    )
    gpu_memory: str | int = _engine("GPU memory to use: 12G, 80%, or auto.", "auto", is_common=True)
    policy: str = _engine(
        "Policy that keeps experts in memory; auto chooses one.",
        "auto",
        is_common=True,
    )
    policy_options: Mapping[str, str] = _engine(
        "Option of the policy, such as tau=4.", dict, name="policy_option"
    )
    device: str = _engine("Device to compute on: auto, cpu, cuda, or emulated (for tests).", "auto")
    device_options: Mapping[str, str] = _engine(
        "Option of the emulated device, such as link_GBps=2.", dict, name="device_option"
    )
    context: int | None = _engine(
        "Most tokens of prompt and answer together, such as 8192. On a GPU, or if all "
        "experts fit, running requests share it. Default: the model's, at most 4,096 (serve: more "
        "if memory allows).",
        low=1,
        high=2**28,
        is_common=True,
    )
    dtype: str | None = _engine(
        "Data type to compute in, such as float32; default: the checkpoint's."
    )
    format: str | None = _engine(
        "Format of weights in memory: own (as stored), q8 or q4 (rounded to 8 or 4 bits: less "
        "memory, may change answers), or auto (the fastest by lowtide plan).",
        is_common=True,
    )
    expert_dtype: str | None = _engine("Like `format`, for experts only.")
    dense_dtype: str | None = _engine("Like `format`, for everything but experts.")
    activations: str = _engine(
        "Activations: int8 rounds those multiplied with q8, q4 or GGUF weights (faster, may change "
        "answers); own rounds none; auto rounds for GGUF types that lose almost nothing by it.",
        AUTO_FORMAT,
        choices=(AUTO_FORMAT, OWN_FORMAT, INT8_ROWS),
    )
    kernels: str = _engine(
        "Kernels: auto, or reference (plain torch: slow, for comparison).",
        "auto",
        choices=("auto", "reference"),
    )
    kv_cache: bool | str = _engine(
        "KV cache: true keeps keys and values, false recomputes them; prefix and dual (LLaDA, "
        "Dream) keep more and approximate.",
        True,
    )
    cache: str = _engine(
        "Reuse the KV cache of earlier requests: on (any shared prefix), exact (only where tokens "
        "cannot change), off.",
        Reuse.ON.value,
        choices=tuple(reuse.value for reuse in Reuse),
    )
    cache_dir: str | os.PathLike[str] | None = _engine(
        "Private folder that keeps conversations' KV caches for later runs, unencrypted (not on a "
        "GPU)."
    )
    cache_disk: str | int = _engine(
        "Most to keep in `cache_dir`: 8GiB, 10% of the disk; the longest unused goes first.", "8GiB"
    )
    cores: int | str | Sequence[int] | None = _engine(
        "Cores to compute on: a number (chosen among those that no other lowtide holds) or a list "
        "such as 0,2-3; the process keeps to them until it ends."
    )
    check_weights: bool = _engine("Read all weights first and refuse infinities and NaN.", False)
    calibration: str | os.PathLike[str] | None = _engine(
        "File from lowtide calibrate, if not in its default place."
    )
    config_overrides: Mapping[str, object] = _engine(
        "Override a value of config.json, such as mask_token_id=7.", dict, name="config_override"
    )
    offline: bool = option(Group.HUB, "Use only models that are on this machine.", False)
    block_length: int | None = _python(
        "Block length of `logits` (block diffusion).", low=1, high=MAX_BLOCK_LENGTH
    )
    seed: int | None = _python("Seed of requests that bring none.", high=MAX_SEED)
    progress: Progress | bool | None = _python(
        "Called with (stage, bytes done, bytes in all) while loading; true shows a line on "
        "standard error, and so does the default on a terminal or in a notebook."
    )

    def __post_init__(self) -> None:
        check_options(self)
        check_device(self.device, self.device_options)
        if resolve_device(self.device) == "cpu" and self.gpu_memory not in ("auto", 0, "0"):
            raise UsageError(
                f"`gpu_memory` {self.gpu_memory!r}: there is no GPU in use; leave it out."
            )
        if self.dtype is not None and self.dtype not in SAFETENSORS_NAME:
            raise UnsupportedError(
                f"`dtype` {self.dtype!r} is not supported; choose one of the names "
                f"{', '.join(SAFETENSORS_NAME)}."
            )
        if self.format == AUTO_FORMAT and self.activations == INT8_ROWS:
            raise UsageError(
                f"`activations` {self.activations!r} needs weights in a format that is named, and "
                "`format` 'auto' may leave them as they are stored: name the format, or leave "
                "`activations` out."
            )
        _ = self.formats, self.kept_cores  # refused now if they cannot be
        check_policy(self.policy, self.policy_options)
        check_cache(self)

    @property
    def formats(self) -> FormatRequest:
        return FormatRequest.of(self.format, self.expert_dtype, self.dense_dtype)

    @property
    def cache_mode(self) -> CacheMode:
        return CacheMode(self.kv_cache) if isinstance(self.kv_cache, str) else CacheMode.EXACT

    @property
    def kept_cores(self) -> Cores | None:
        """The cores, or their number, that the process is bound to; None: all it may use."""
        return None if self.cores is None else parse_cores(self.cores)

    @property
    def report(self) -> Progress:
        """Callback for progress of loading."""
        return self.progress if callable(self.progress) else no_progress
