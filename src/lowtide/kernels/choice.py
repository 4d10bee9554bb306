"""Choice of the kernels that a model computes with."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
from collections.abc import Iterable

import torch

from lowtide.errors import StorageError, UnsupportedError
from lowtide.formats import MatrixFormat
from lowtide.formats.convert import Pack, pack
from lowtide.kernels.compiled import CompiledKernels, compiled_name
from lowtide.kernels.cpu.buddies import CompiledBuddies
from lowtide.kernels.cpu.few_rows import FewRows
from lowtide.kernels.cpu.library import load_kernels, load_part, load_parts
from lowtide.kernels.cpu.packed import PackedOperators, parts_of
from lowtide.kernels.cpu.packing import CompiledPacking
from lowtide.kernels.cpu.sources import CORE, DECISIONS, PACKING
from lowtide.kernels.cpu.variants import VARIANTS
from lowtide.kernels.reference import REFERENCE, Kernels, name_with_rows
from lowtide.progress import Progress, no_progress

_log = logging.getLogger(__name__)

HOST = torch.device("cpu")

why_not: dict[tuple[str, ...], str] = {}
"""By parts that this process cannot load: the reason, which has been logged."""


def choose_kernels(
    option: str,
    dtype: torch.dtype,
    device: torch.device = HOST,
    rounded: frozenset[str] = frozenset(),
    formats: Iterable[MatrixFormat] = (),
    report: Progress = no_progress,
    packs: bool = False,
) -> Kernels:
    """Choose the kernels for computation in `dtype` on `device`; option: `auto` or `reference`.

    rounded: names of the formats whose products round rows to int8. formats: those of the weights;
    their parts of the compiled kernels are loaded, or built, now (progress goes to `report`). Parts
    of other formats are loaded at first use. packs: with them what rounds weights as they are read.

    On a CPU where nothing can be compiled, `auto` is the reference too, with one warning in the
    log. On a GPU the option concerns only the experts, and their device chooses.
    """
    if device.type == "cuda":
        return REFERENCE if why_no_triton(device) else _triton()
    is_compiled = option != "reference" and dtype == torch.bfloat16
    parts = (CORE, *[PACKING] * packs, *parts_of(formats, rounded))
    if is_compiled and _are_loaded(parts, report):
        return _compiled(load_kernels(), rounded)
    return Kernels(rounded) if rounded else REFERENCE


@functools.cache
def choose_pack(option: str) -> Pack:
    """Choose the function that rounds weights to q8 or q4 as they are read.

    Where it cannot be compiled, that is numpy's, with one warning.
    """
    if option == "reference":
        return pack
    try:
        load_part(PACKING)
        return CompiledPacking(load_kernels())
    except (StorageError, UnsupportedError) as error:
        _log.warning("%s Weights are rounded to 8 or 4 bits by numpy, which is slow.", error)
        return pack


def possible_names(
    option: str, dtype: torch.dtype, rounded: frozenset[str] = frozenset()
) -> tuple[str, ...]:
    """List the CPU kernels that `choose_kernels` may return, best first; compiles nothing.

    Arguments as for `choose_kernels`.
    """
    names = [REFERENCE.name]
    if option != "reference" and dtype == torch.bfloat16:
        names = [*map(compiled_name, reversed(VARIANTS)), *names]
    return tuple(name_with_rows(name, rounded) for name in names)


@functools.cache
def why_no_triton(device: torch.device) -> str | None:
    """Return the reason why Triton's kernels cannot be used on a GPU, or None.

    Triton compiles a part of itself with a C compiler into a cache folder at first use: the first
    call tries that.
    """
    if importlib.util.find_spec("triton") is None:
        return "this torch has no Triton"
    try:
        _triton().sort_pairs(torch.zeros((1, 1), dtype=torch.int64, device=device), 1)
    except Exception as error:  # whatever may be missing there
        return f"Triton fails with {type(error).__name__}: {error}"
    return None


@functools.cache
def compiled_buddies() -> CompiledBuddies | None:
    """Load the compiled decisions; None, with one warning, where they cannot be compiled."""
    try:
        return CompiledBuddies(load_part(DECISIONS))
    except (StorageError, UnsupportedError) as error:
        _log.warning("%s Decisions will take longer: they are made in Python.", error)
        return None


def _triton() -> Kernels:
    from lowtide.kernels.triton_kernels import TritonKernels

    return TritonKernels()


def _are_loaded(parts: tuple[str, ...], report: Progress) -> bool:
    """Load parts of the kernels; return False, with one warning, where that is impossible."""
    if parts in why_not:
        return False
    try:
        load_parts(parts, report)
    except (StorageError, UnsupportedError) as error:
        if str(error) not in why_not.values():
            _log.warning(
                "%s torch's products are used instead: answers take longer, and words may differ, "
                "since those products round otherwise.",
                error,
            )
        why_not[parts] = str(error)
        return False
    return True


@functools.cache
def _compiled(built: ctypes.CDLL, rounded: frozenset[str]) -> Kernels:
    rounding = PackedOperators(built, rounds_rows=True) if rounded else None
    return CompiledKernels(FewRows(built), PackedOperators(built), rounding, rounded)
