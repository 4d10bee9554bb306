"""Refuses, by name, options that have no meaning for a kind of model."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lowtide.config import ModelConfig, parse_size
from lowtide.core import Reuse
from lowtide.devices.kind import OWN_DEVICES
from lowtide.engine.opening.device_choice import resolve_device
from lowtide.errors import UnsupportedError, UsageError
from lowtide.policies.presets import substitutes

if TYPE_CHECKING:
    from lowtide.engine.opening.config import EngineConfig


def as_reference(model: object) -> str | os.PathLike[str]:
    """Return a model's name or path. Raise UsageError for anything else."""
    if not isinstance(model, str | os.PathLike):
        raise UsageError(
            f"A model is a folder, a GGUF file, a hub id or a demo's name, not {model!r}."
        )
    return model


def check_cache(options: EngineConfig) -> None:
    """Raise UsageError for contradictory options of kept KV caches; needs no model."""
    if options.cache == Reuse.EXACT.value and substitutes(options.policy, options.policy_options):
        raise UsageError(
            "`cache` 'exact' gives the ids of a run that computes everything, and `policy` "
            f"{options.policy!r} may change them: leave one of the two out."
        )
    if not parse_size(options.cache_disk, total=2**62):
        raise UsageError(
            "`cache_disk` leaves no room: give a size such as 8GiB, or no `cache_dir`."
        )
    if options.cache_dir is not None and resolve_device(options.device) == "cuda":
        raise UnsupportedError(
            "`cache_dir` on a GPU: keys there are not written yet. Leave it out."
        )


def check_without_experts(config: ModelConfig, options: EngineConfig) -> None:
    """Raise UsageError or UnsupportedError for options about experts."""
    name = config.architecture
    if options.policy != "auto" or options.policy_options:
        raise UsageError(
            f"`policy` {options.policy!r}: {name} has no experts, so there is nothing to place; "
            "leave the policy and its options out."
        )
    for option in ("calibration", "expert_dtype"):
        if getattr(options, option) is not None:
            raise UsageError(f"`{option}`: {name} has no experts; leave this out.")
    if options.device not in OWN_DEVICES:
        raise UnsupportedError(
            f"`device` {options.device!r} computes experts, and {name} has none; choose "
            '`device="cpu"`.'
        )


def check_exact_keys(config: ModelConfig, options: EngineConfig) -> None:
    """Raise UnsupportedError for an approximate KV cache if the model's is exact."""
    name = config.architecture
    if isinstance(options.kv_cache, str):
        raise UnsupportedError(
            f"`kv_cache` {options.kv_cache!r} is for bidirectional models (LLaDA, LLaDA-MoE, "
            f"Dream); {name} keeps exact keys and values, so leave it true."
        )
