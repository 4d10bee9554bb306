"""Maps a device's name to a device. Imports torch only when called."""

from __future__ import annotations

from collections.abc import Mapping

from lowtide.devices.kind import KINDS, OWN_DEVICES
from lowtide.errors import UnsupportedError, UsageError

_BFLOAT16_CAPABILITY = (8, 0)
"""CUDA's least compute capability with tensor cores for bfloat16 (Ampere)."""


def check_device(name: str, options: Mapping[str, str]) -> None:
    """Raise UsageError for an unknown device or device option; needs no model."""
    if name.startswith("cuda:"):
        raise UnsupportedError(
            f"`device` {name!r}: one GPU is used, the first that this process sees. Choose "
            '`device="cuda"`; '
            "the environment's CUDA_VISIBLE_DEVICES says which GPUs a process sees."
        )
    if name not in (*OWN_DEVICES, *KINDS):
        known = ", ".join([*OWN_DEVICES, *KINDS])
        raise UsageError(f"`device` {name!r} is not known; choose one of {known}.")
    if name not in OWN_DEVICES:
        KINDS[name].check_options(options)
    elif options:
        others = " or ".join(KINDS)
        raise UsageError(
            f"`device_options` {', '.join(options)} belong to `device` {others}, not to {name}."
        )
    if name == "cuda" and not _has_gpu():
        raise UnsupportedError(
            "`device` 'cuda': this PyTorch sees no GPU. Choose "
            '`device="cpu"`, or install the PyTorch build for your GPU.'
        )


def resolve_device(name: str) -> str:
    """Return the device's name; `auto` is the GPU if there is one, else the CPU."""
    if name == "auto":
        return "cuda" if _has_gpu() else "cpu"
    return name


def check_compute_dtype(device: str, dtype: str) -> None:
    """Raise UnsupportedError for bfloat16 on a GPU that has no products of it.

    torch emulates them there, many times slower, and says nothing.
    """
    if device != "cuda" or dtype != "bfloat16":
        return
    import torch

    capability = torch.cuda.get_device_capability(0)
    if capability < _BFLOAT16_CAPABILITY:
        name, found, least = (
            torch.cuda.get_device_name(0),
            *(".".join(map(str, each)) for each in (capability, _BFLOAT16_CAPABILITY)),
        )
        raise UnsupportedError(
            f"bfloat16 on {name}: this GPU has compute capability {found}, and multiplies bfloat16 "
            f'from {least} on. Choose `dtype="float16"`, or `device="cpu"`.'
        )


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
