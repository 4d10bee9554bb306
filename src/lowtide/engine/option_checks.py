"""Options of another kind than they have to be, or that mean nothing to a kind of model, refused by
name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import UnionType
from typing import TYPE_CHECKING

from lowtide.config import ModelConfig
from lowtide.decode.row_reading import HeadForm
from lowtide.errors import UnsupportedError, UsageError
from lowtide.files.json_file import shown
from lowtide.kernels.int8_rows import INT8
from lowtide.plan import AUTO_FORMAT, OWN_FORMAT

if TYPE_CHECKING:
    from lowtide.engine.opening import EngineConfig


def check_kinds(options: EngineConfig) -> None:
    """Raises UsageError for a value of another type than its option's."""
    kinds: list[tuple[str, type | UnionType, str]] = [
        ("device", str, "a name such as 'auto'"),
        ("calibration", str | os.PathLike | None, "the path of a file"),
        ("dtype", str | None, "a name such as 'bfloat16'"),
    ]
    for name in ("offline", "elastic", "check_weights", "unsafe"):
        kinds.append((name, bool, "true or false"))
    for name in ("device_options", "policy_options", "config_overrides"):
        kinds.append((name, Mapping, "a mapping of names to values"))
    for name, kind, noun in kinds:
        value = getattr(options, name)
        if not isinstance(value, kind):
            raise UsageError(f"{name} must be {noun}, not {value!r}.")


def as_reference(model: object) -> str | os.PathLike[str]:
    """What names a model. Raises UsageError for what names nothing."""
    if not isinstance(model, str | os.PathLike):
        raise UsageError(
            f"A model is a folder, a GGUF file, a hub id or a demo's name, not {model!r}."
        )
    return model


def check_integer(name: str, value: int | None, low: int, high: int) -> None:
    """Raises UsageError for an option that is given and no integer from `low` to `high`."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if value is not None and not (is_integer and low <= value <= high):
        raise UsageError(f"{name} must be an integer from {low} to {high}, not {shown(value)}.")


def check_without_experts(config: ModelConfig, options: EngineConfig) -> None:
    """Raises UsageError or UnsupportedError for options that are about experts."""
    name = config.architecture
    if options.policy != "auto" or options.policy_options:
        raise UsageError(
            f"Policy {options.policy!r}: {name} has no experts, so there is nothing to place; "
            "leave the policy and its options out."
        )
    for option in ("calibration", "expert_dtype"):
        if getattr(options, option) is not None:
            raise UsageError(f"{option}: {name} has no experts; leave this out.")
    if options.elastic:
        raise UsageError(
            f"elastic: {name} has no experts that the KV cache's unused memory could hold; leave "
            "this out."
        )
    if options.device == "emulated":
        raise UnsupportedError(
            f"An emulated device computes experts, and {name} has none; choose --device cpu."
        )


def check_not_bidirectional(config: ModelConfig, options: EngineConfig) -> None:
    """Raises UnsupportedError for options that are about models whose positions all see each
    other."""
    name = config.architecture
    if isinstance(options.kv_cache, str):
        raise UnsupportedError(
            f"kv_cache {options.kv_cache!r} approximates what bidirectional models (LLaDA, "
            f"LLaDA-MoE, Dream) would compute again; {name} keeps exact keys and values: leave it "
            "true."
        )
    if options.head_form != HeadForm.FUSED.value:
        raise UnsupportedError(
            f"head_form {options.head_form!r} is for bidirectional models; leave it out for {name}."
        )


def check_activations(activations: str, format: str | None) -> None:
    """Raises UsageError."""
    known = (OWN_FORMAT, INT8)
    if activations not in known:
        raise UsageError(f"activations {activations!r} is not known; choose {', '.join(known)}.")
    if format == AUTO_FORMAT and activations != OWN_FORMAT:
        raise UsageError(
            f"activations {activations!r} needs weights in a format that is named, and "
            "format 'auto' may leave them as they are stored: name the format, or leave "
            "activations out."
        )
