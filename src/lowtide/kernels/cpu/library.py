"""Loader of the compiled kernels: a wheel's own, or built at first use and cached.

A wheel has them in `built/`, in one library that is named by its sources; one of other sources than
those beside it is not loaded. Elsewhere they are in the user's cache (building.py).
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lowtide.errors import InternalError, UnsupportedError
from lowtide.kernels.cpu.building import build_library, kept_libraries, library_name
from lowtide.kernels.cpu.sources import (
    CORE,
    KERNELS_FOLDER,
    Digests,
    Part,
    part,
    whole,
    with_needed,
)
from lowtide.progress import Progress, no_progress

loaded: dict[str, ctypes.CDLL] = {}
"""Parts that this process has loaded, by name."""

_loading = threading.Lock()


def load_kernels() -> ctypes.CDLL:
    """Load the core of the kernels, once per process; see `load_parts`."""
    return load_part(CORE)


def load_part(name: str) -> ctypes.CDLL:
    """Load a part of the kernels and its dependencies, once per process; see `load_parts`."""
    if name not in loaded:
        load_parts([name])
    return loaded[name]


def load_parts(names: Sequence[str], report: Progress = no_progress) -> None:
    """Load these parts of the kernels and their dependencies, each once per process.

    Missing ones are compiled together, with progress to `report`. Raises UnsupportedError if one
    cannot be compiled or loaded, StorageError if the cache cannot be written or is not this user's
    own.
    """
    with _loading:  # later parts find the functions of earlier ones
        wanted = [part(name) for name in with_needed(names) if name not in loaded]
        loaded.update(_load(wanted, report, ctypes.RTLD_GLOBAL))


def load_library(source: Path) -> ctypes.CDLL:
    """Load a C++ file that is compiled alone; raises what `load_parts` raises."""
    alone = Part(source.stem, (source,), source.parent)
    return _load([alone], no_progress, ctypes.DEFAULT_MODE)[alone.name]


def _load(parts: Sequence[Part], report: Progress, mode: int) -> dict[str, ctypes.CDLL]:
    """Load parts in this order; calls into them release the GIL."""
    found = dict[str, ctypes.CDLL]()
    for each in parts:
        built = _built_path(each)
        if built is None:
            break
        try:
            found[each.name] = ctypes.CDLL(str(built), mode)
        except OSError:  # compiled for a newer system than this: compile it here
            break
    missing = [each for each in parts if each.name not in found]
    kept = kept_libraries(missing, report) if missing else []
    for each, path in zip(missing, kept, strict=True):
        try:
            found[each.name] = ctypes.CDLL(str(path), mode)
        except OSError as error:
            raise UnsupportedError(f"{path} cannot be loaded: {error}.") from error
    return found


def _built_path(of: Part) -> Path | None:
    """Return the path of a wheel's library that has a part, or None."""
    if not (folder := of.folder / "built").exists():
        return None
    path = folder / (
        _name_of_whole() if of.folder == KERNELS_FOLDER else library_name(of, Digests())
    )
    return path if path.exists() else None


@functools.cache
def _name_of_whole() -> str:
    return library_name(whole(), Digests())


def build_kernels(package: Path, compiler: Sequence[str], machine: str) -> None:
    """Compile all parts into one library in the copy of this package at `package`, for a wheel.

    compiler: command that compiles for `machine`, named as `platform.machine` names it there.
    Raises UnsupportedError if it fails.
    """
    build_library(whole(), built_folder(package), compiler, machine)


def built_folder(package: Path) -> Path:
    """Return the folder of the compiled kernels in a copy of this package."""
    return package / KERNELS_FOLDER.relative_to(KERNELS_FOLDER.parents[1]) / "built"


def functions_of(
    library: ctypes.CDLL, types: Mapping[str, tuple[Any, ...]]
) -> dict[str, ctypes._NamedFuncPointer]:
    """Bind `lowtide_` functions of a library, by name, as objects of their own.

    Attributes of the library are shared and stay unchanged. types: result type, then argument
    types, by name.
    """
    functions = {name: library[f"lowtide_{name}"] for name in types}
    for name, function in functions.items():
        function.restype, function.argtypes = types[name][0], types[name][1:]
    return functions


class Field(NamedTuple):
    """Field of a struct, or a type of blocks."""

    name: str
    type: str  # of a number, "address", or a struct's name
    start: int  # bytes before it; or the weights of a block
    num_bytes: int
    length: int  # of an array; 0: none


def fields_of(library: ctypes.CDLL, name: str) -> list[Field]:
    """List the fields of a library's struct, or its types of blocks: "BlockType" (layouts.cpp)."""
    kind, place = ctypes.c_char_p(), (ctypes.c_long * 3)()
    types = ctypes.c_char_p, ctypes.c_char_p, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p
    layout = functions_of(library, {"layout": types})["layout"]
    found: list[Field] = []
    addresses = ctypes.addressof(kind), ctypes.addressof(place)
    while (field := layout(name.encode(), len(found), *addresses)) is not None:
        found.append(Field(field.decode(), (kind.value or b"").decode(), *place))
    return found


_NUMBERS: Mapping[str, type[Any]] = {
    "int": ctypes.c_int,
    "long": ctypes.c_long,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "address": ctypes.c_void_p,
}


@functools.cache
def struct(name: str) -> type[ctypes.Structure]:
    """Make the twin of a struct of the compiled kernels, by the fields that they name.

    The caller that fills one in keeps alive what it points to. Raises InternalError if there is no
    such struct, or ctypes would lay it out otherwise.
    """
    found = fields_of(load_kernels(), name)
    if not found:
        raise InternalError(f"The compiled library has no struct {name}.")
    kinds = [_NUMBERS.get(field.type) or struct(field.type) for field in found]
    fields = [
        (field.name, kind * field.length if field.length else kind)
        for field, kind in zip(found, kinds, strict=True)
    ]
    made: type[ctypes.Structure] = type(name, (ctypes.Structure,), {"_fields_": fields})
    for field in found:
        own = getattr(made, field.name)
        if (own.offset, own.size) != (field.start, field.num_bytes):
            raise InternalError(
                f"{name}.{field.name} is at {own.offset} with {own.size} bytes here, and at "
                f"{field.start} with {field.num_bytes} in the compiled library."
            )
    return made
