"""Maps a device's name to a device. Imports torch only when called."""

from __future__ import annotations

from collections.abc import Mapping

from lowtide.devices.kind import KINDS, OWN_DEVICES
from lowtide.errors import UnsupportedError, UsageError


def check_device(name: str, options: Mapping[str, str]) -> None:
    """Raise UsageError for an unknown device or device option; needs no model."""
    if name.startswith("cuda:"):
        raise UnsupportedError(
            f"Device {name!r}: one GPU is used, the first that this process sees. Choose --device "
            "cuda; the environment's CUDA_VISIBLE_DEVICES says which GPUs a process sees."
        )
    if name not in (*OWN_DEVICES, *KINDS):
        known = ", ".join([*OWN_DEVICES, *KINDS])
        raise UsageError(f"Device {name!r} is not known; choose one of {known}.")
    if name not in OWN_DEVICES:
        KINDS[name].check_options(options)
    elif options:
        others = " or ".join(KINDS)
        raise UsageError(
            f"Device options ({', '.join(options)}) belong to --device {others}, not to {name}."
        )
    if name == "cuda" and not _has_gpu():
        raise UnsupportedError(
            "Device 'cuda': this torch sees no GPU. Choose --device cpu, or install a torch build "
            "for your GPU."
        )


def resolve_device(name: str) -> str:
    """Return the device's name; `auto` is the GPU if there is one, else the CPU."""
    if name == "auto":
        return "cuda" if _has_gpu() else "cpu"
    return name


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
