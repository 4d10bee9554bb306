"""Registry of formats: the files beside this one, and those registered by others."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

from lowtide.errors import UnsupportedError
from lowtide.formats.arranged import Arranged
from lowtide.formats.matrix import MatrixFormat

_registered: dict[str, MatrixFormat] = {}
_ARRANGED = ("awq", "compressed_tensors", "fp8", "gptq")
_BASES = ("arranged", "grouped_ints", "matrix", "mixed", "quantised_matrix")
_NO_FORMATS = (*_ARRANGED, *_BASES, "convert", "expert_inputs", "registry")


def formats() -> Mapping[str, MatrixFormat]:
    """Map names to all known formats."""
    _register_own()
    return MappingProxyType(_registered)


def format_of(dtype: str) -> MatrixFormat:
    """Return the format of a safetensors dtype, or of a matrix in several tensors by its name.

    Raises UnsupportedError.
    """
    arranged = _arranged().get(dtype)
    if arranged is not None:
        return arranged
    found = next((known for known in formats().values() if known.dtypes == (dtype,)), None)
    if found is None:
        raise UnsupportedError(
            f"Weights of type {dtype} cannot be loaded; supported: {', '.join(loadable_dtypes())}."
        )
    return found


def loadable_dtypes() -> tuple[str, ...]:
    """List the safetensors dtypes of formats that need only one tensor."""
    return tuple(
        known.dtypes[0]
        for known in formats().values()
        if len(known.dtypes) == 1 and known.in_safetensors
    )


def can_load(dtype: str) -> bool:
    """Return True for a dtype or format that can be loaded."""
    return dtype in _arranged() or any(known.dtypes == (dtype,) for known in formats().values())


def register(added: MatrixFormat) -> None:
    """Register a format; raises ValueError if its name or tensor type is taken."""
    for known in _registered.values():
        if known.name == added.name or known.dtypes == added.dtypes:
            raise ValueError(f"The format {added.name}: {known.name} has its name or its tensors.")
    _registered[added.name] = added


def unregister(name: str) -> None:
    """Remove a format; raises KeyError for an unknown name."""
    del _registered[name]


@cache
def _arranged() -> Mapping[str, Arranged]:
    """Map names to the formats of matrices stored in several tensors."""
    package = __name__.rpartition(".")[0]
    modules = [importlib.import_module(f"{package}.{name}") for name in _ARRANGED]
    return {each.name: each for module in modules for each in module.FORMATS.values()}


@cache
def _register_own() -> None:
    package = __name__.rpartition(".")[0]
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.name not in _NO_FORMATS:
            for own in importlib.import_module(f"{package}.{module.name}").FORMATS:
                register(own)
