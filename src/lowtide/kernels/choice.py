"""Which kernels a model computes with: chosen once, here, and handed to all that compute."""

from __future__ import annotations

import functools
import importlib.util
import logging
from typing import Any

import torch

from lowtide.errors import StorageError, UnsupportedError
from lowtide.formats.convert import Pack, pack
from lowtide.kernels.compiled import CompiledKernels, compiled_name
from lowtide.kernels.compiled_packed import PackedKernels
from lowtide.kernels.compiled_quantised import QuantisedKernels
from lowtide.kernels.cpu.buddies import CompiledBuddies
from lowtide.kernels.cpu.few_rows import VARIANTS, FewRows
from lowtide.kernels.cpu.ggml import GgmlOperators
from lowtide.kernels.cpu.packed import PackedOperators
from lowtide.kernels.cpu.quantised import QuantisedOperators
from lowtide.kernels.cpu.sectioned import SectionedOperators
from lowtide.kernels.reference import REFERENCE, Kernels

_log = logging.getLogger(__name__)

HOST = torch.device("cpu")


def choose_kernels(
    option: str,
    dtype: torch.dtype,
    device: torch.device = HOST,
    has_quantised: bool = False,
    has_packed: bool = False,
    has_sectioned: bool = False,
    rounds_rows: bool = False,
) -> Kernels:
    """The kernels of what computes in `dtype` on `device`; option: `auto` or `reference`.
    has_quantised, has_packed, has_sectioned: whether some weights are in q8 or q4, in a packed type
    of GGUF files, or as checkpoints that other tools rounded are kept, whose kernels are compiled
    then, too. rounds_rows: `activations="int8"`.

    On the host, where nothing can be compiled, `auto` is the reference too, with one notice in
    the log. On a GPU the option is about its experts alone, which its device chooses.
    """
    if device.type == "cuda":
        return REFERENCE if why_no_triton(device) else _triton()
    if option == "reference" or dtype != torch.bfloat16:
        return Kernels(rounds_rows) if rounds_rows else REFERENCE
    operators = quantised_operators(rounds_rows) if has_quantised else None
    if operators is not None:
        return _compiled_with(operators)
    if has_packed or (has_sectioned and not rounds_rows):
        return _compiled_for_packed(has_packed, rounds_rows)
    return Kernels(rounds_rows) if rounds_rows else _compiled()


def choose_pack(option: str) -> Pack:
    """What makes weights into q8 or q4 as they are read."""
    operators = None if option == "reference" else quantised_operators()
    return pack if operators is None else operators.pack


def possible_names(option: str, dtype: torch.dtype) -> tuple[str, ...]:
    """Names of the host's kernels that `choose_kernels` may give, best first; compiles nothing."""
    if option == "reference" or dtype != torch.bfloat16:
        return (REFERENCE.name,)
    return *map(compiled_name, reversed(VARIANTS)), REFERENCE.name


@functools.cache
def why_no_triton(device: torch.device) -> str | None:
    """Why Triton's kernels cannot be used on a GPU; None where they can.

    Triton builds a part of itself with a C compiler, into a cache folder, when it is first used:
    the first call tries that out.
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
    """What substitutes; None where nothing can be compiled, with one notice in the log."""
    try:
        return CompiledBuddies.load()
    except (StorageError, UnsupportedError) as error:
        _log.warning("%s Substitution will take longer: it is decided in Python.", error)
        return None


@functools.cache
def quantised_operators(rounds_rows: bool = False) -> QuantisedOperators | None:
    """None where nothing can be compiled, with one notice in the log."""
    try:
        return QuantisedOperators.load(rounds_rows=rounds_rows)
    except (StorageError, UnsupportedError) as error:
        _log.warning("%s Weights of 8 and 4 bits are unpacked by torch, which is slow.", error)
        return None


def _triton() -> Kernels:
    from lowtide.kernels.triton_kernels import TritonKernels

    return TritonKernels()


@functools.cache
def _compiled() -> Kernels:
    try:
        return CompiledKernels(FewRows.load())
    except (StorageError, UnsupportedError) as error:
        _log.warning("%s Single tokens will take longer: torch's products are used.", error)
        return REFERENCE


@functools.cache
def _compiled_for_packed(is_of_gguf: bool, rounds_rows: bool) -> Kernels:
    try:
        packed: PackedOperators[Any] = (
            GgmlOperators.load(rounds_rows=rounds_rows) if is_of_gguf else SectionedOperators.load()
        )
    except (StorageError, UnsupportedError) as error:
        _log.warning("%s Packed weights are unpacked by numpy, which is slow.", error)
        return _without_formats(rounds_rows)
    try:
        return PackedKernels(FewRows.load(), packed)
    except (StorageError, UnsupportedError):  # said by `_compiled`
        return _without_formats(rounds_rows)


@functools.cache
def _compiled_with(operators: QuantisedOperators) -> Kernels:
    try:
        return QuantisedKernels(FewRows.load(), operators)
    except (StorageError, UnsupportedError):  # said by `_compiled`
        return _without_formats(operators.rounds_rows)


def _without_formats(rounds_rows: bool) -> Kernels:
    """Where nothing compiled multiplies with other weights than bfloat16."""
    return Kernels(rounds_rows=True) if rounds_rows else _compiled()
