"""Compiled kernels, loaded part by part: those of a wheel, or built at first use and kept.

A wheel has them in `built/`, named by their sources: others than those that lie beside them are
not loaded. Elsewhere they are in the user's cache (building.py).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lowtide.errors import InternalError, UnsupportedError
from lowtide.kernels.cpu.building import build_libraries, kept_libraries, library_name
from lowtide.kernels.cpu.sources import (
    CORE,
    KERNELS_FOLDER,
    Digests,
    Part,
    all_parts,
    part,
    with_needed,
)
from lowtide.progress import Progress, no_progress

_loaded: dict[str, ctypes.CDLL] = {}  # parts of this process, by name
_loading = threading.Lock()


def load_kernels() -> ctypes.CDLL:
    """Load the core of the kernels, once in a process; see `load_parts`."""
    return load_part(CORE)


def load_part(name: str) -> ctypes.CDLL:
    """Load a part of the kernels and what it needs, once in a process; see `load_parts`."""
    if name not in _loaded:
        load_parts([name])
    return _loaded[name]


def load_parts(names: Sequence[str], report: Progress = no_progress) -> None:
    """Load these parts of the kernels and what they need, each once in a process; those that are
    nowhere yet are compiled together, which `report` is told of.

    Raises UnsupportedError where one cannot be compiled or loaded, StorageError where the cache
    cannot be written or is not this user's own.
    """
    with _loading:  # later parts find the functions of earlier ones
        wanted = [part(name) for name in with_needed(names) if name not in _loaded]
        _loaded.update(_load(wanted, report, ctypes.RTLD_GLOBAL))


def load_library(source: Path) -> ctypes.CDLL:
    """Load a C++ file that is compiled alone; raises what `load_parts` does."""
    alone = Part(source.stem, (source,), source.parent)
    return _load([alone], no_progress, ctypes.DEFAULT_MODE)[alone.name]


def _load(parts: Sequence[Part], report: Progress, mode: int) -> dict[str, ctypes.CDLL]:
    """In this order; calls into them do not hold the GIL."""
    found, digests = dict[str, ctypes.CDLL](), Digests()
    for each in parts:
        built = _built_folder(each) / library_name(each, digests)
        if not built.exists():
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


def _built_folder(of: Part) -> Path:
    """Where a wheel has it compiled."""
    return of.folder / "built"


def build_kernels(package: Path) -> None:
    """Compile all parts into the copy of this package at `package`, for a wheel.

    Raises UnsupportedError if there is no compiler or it fails.
    """
    parts = [part(name) for name in all_parts()]
    built = package / KERNELS_FOLDER.relative_to(KERNELS_FOLDER.parents[1]) / "built"
    build_libraries(parts, built)


def functions_of(
    library: ctypes.CDLL, types: Mapping[str, tuple[Any, ...]]
) -> dict[str, ctypes._NamedFuncPointer]:
    """`lowtide_` functions of a library by name, of their own: those of its attributes are shared.

    types: of each name, what the function answers and, after it, what it takes.
    """
    functions = {name: library[f"lowtide_{name}"] for name in types}
    for name, function in functions.items():
        function.restype, function.argtypes = types[name][0], types[name][1:]
    return functions


Places = Sequence[tuple[str, int, int]]
"""Name, offset and bytes of each field; or name, weights and bytes of each type of blocks."""


def check_layouts(library: ctypes.CDLL, structs: Mapping[str, type[ctypes.Structure]]) -> None:
    """Raises InternalError where a struct that the library is handed is another there: of other
    fields, or these at other places.
    """
    for name, struct in structs.items():
        own = [
            (field, getattr(struct, field).offset, getattr(struct, field).size)
            for field, *_ in struct._fields_
        ]
        check_places(name, own, places_of(library, name))


def places_of(library: ctypes.CDLL, name: str) -> Places:
    """What a library has of a struct, or of "BlockType" (layouts.cpp)."""
    types = ctypes.c_char_p, ctypes.c_char_p, ctypes.c_long, ctypes.c_void_p
    layout = functions_of(library, {"layout": types})["layout"]
    place = (ctypes.c_long * 2)()
    found: list[tuple[str, int, int]] = []
    while (field := layout(name.encode(), len(found), place)) is not None:
        found.append((field.decode(), place[0], place[1]))
    return found


def check_places(name: str, own: Places, found: Places) -> None:
    """Raises InternalError where these are not those that the library has."""
    for ours, theirs in zip_longest(own, found):
        if ours != theirs:
            raise InternalError(
                f"{name} has {ours} here and {theirs} in the compiled library: a name, and the "
                "two numbers that layouts.cpp has for it."
            )
