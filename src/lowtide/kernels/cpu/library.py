"""Loader of the compiled kernels: a wheel's own, or built at first use and cached.

A wheel has them in `built/`, named by their sources; libraries of other sources than those beside
them are not loaded. Elsewhere they are in the user's cache (building.py).
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
    """Load the core of the kernels, once per process; see `load_parts`."""
    return load_part(CORE)


def load_part(name: str) -> ctypes.CDLL:
    """Load a part of the kernels and its dependencies, once per process; see `load_parts`."""
    if name not in _loaded:
        load_parts([name])
    return _loaded[name]


def load_parts(names: Sequence[str], report: Progress = no_progress) -> None:
    """Load these parts of the kernels and their dependencies, each once per process.

    Missing ones are compiled together, with progress to `report`. Raises UnsupportedError if one
    cannot be compiled or loaded, StorageError if the cache cannot be written or is not this user's
    own.
    """
    with _loading:  # later parts find the functions of earlier ones
        wanted = [part(name) for name in with_needed(names) if name not in _loaded]
        _loaded.update(_load(wanted, report, ctypes.RTLD_GLOBAL))


def load_library(source: Path) -> ctypes.CDLL:
    """Load a C++ file that is compiled alone; raises what `load_parts` raises."""
    alone = Part(source.stem, (source,), source.parent)
    return _load([alone], no_progress, ctypes.DEFAULT_MODE)[alone.name]


def _load(parts: Sequence[Part], report: Progress, mode: int) -> dict[str, ctypes.CDLL]:
    """Load parts in this order; calls into them release the GIL."""
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
    """Return the folder of a wheel's compiled part."""
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
    """Bind `lowtide_` functions of a library, by name, as objects of their own.

    Attributes of the library are shared and stay unchanged. types: result type, then argument
    types, by name.
    """
    functions = {name: library[f"lowtide_{name}"] for name in types}
    for name, function in functions.items():
        function.restype, function.argtypes = types[name][0], types[name][1:]
    return functions


Places = Sequence[tuple[str, int, int]]
"""Name, offset and bytes of each field; or name, weights and bytes of each block type."""


def check_layouts(library: ctypes.CDLL, structs: Mapping[str, type[ctypes.Structure]]) -> None:
    """Check that the library's structs have the same fields at the same offsets.

    Raises InternalError where one differs.
    """
    for name, struct in structs.items():
        own = [
            (field, getattr(struct, field).offset, getattr(struct, field).size)
            for field, *_ in struct._fields_
        ]
        check_places(name, own, places_of(library, name))


def places_of(library: ctypes.CDLL, name: str) -> Places:
    """Return the layout of a library's struct, or of its "BlockType" (layouts.cpp)."""
    types = ctypes.c_char_p, ctypes.c_char_p, ctypes.c_long, ctypes.c_void_p
    layout = functions_of(library, {"layout": types})["layout"]
    place = (ctypes.c_long * 2)()
    found: list[tuple[str, int, int]] = []
    while (field := layout(name.encode(), len(found), place)) is not None:
        found.append((field.decode(), place[0], place[1]))
    return found


def check_places(name: str, own: Places, found: Places) -> None:
    """Check a layout against the library's; InternalError if they differ."""
    for ours, theirs in zip_longest(own, found):
        if ours != theirs:
            raise InternalError(
                f"{name} has {ours} here and {theirs} in the compiled library: a name, and the "
                "two numbers that layouts.cpp has for it."
            )
