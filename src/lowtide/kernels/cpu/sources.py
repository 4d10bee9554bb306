"""Source files of the compiled kernels, and the parts that they are built into.

The core suffices for weights in bfloat16. Products with other formats are in one part per type,
which registers itself with the part of its folder.
"""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from lowtide.kernels.cpu.compiler import FLAGS

KERNELS_FOLDER = Path(__file__).parent
"""Folder that the sources' includes are relative to."""

CORE, DECISIONS, PACKING, PACKED, ROUNDED = "core", "decisions", "packing", "packed", "rounded"
WHOLE = (
    "kernels"  # all parts in one, as a wheel has them: each would bring the same runtime library
)
_CORE_FOLDERS = ("team", "dense", "experts", "layer")

_INCLUDE = re.compile(rb'^#include "([^"]+)"', re.MULTILINE)


class Part(NamedTuple):
    """Source files that become one library."""

    name: str
    sources: tuple[Path, ...]
    folder: Path = KERNELS_FOLDER  # where their includes begin


def part(name: str) -> Part:
    """Return the part of a name: a folder, or FOLDER/TYPE."""
    folder, _, of_type = name.partition("/")
    if of_type:
        return Part(name, (KERNELS_FOLDER / folder / "types" / f"{of_type}.cpp",))
    folders = _CORE_FOLDERS if name == CORE else (folder,)
    found = (path for each in folders for path in (KERNELS_FOLDER / each).glob("*.cpp"))
    return Part(name, tuple(sorted(found)))


def whole() -> Part:
    """Return the part that has all others' sources."""
    return Part(WHOLE, tuple(path for name in all_parts() for path in part(name).sources))


def block_types() -> list[str]:
    """List the block formats that have compiled products."""
    return sorted(path.stem for path in (KERNELS_FOLDER / PACKED / "types").glob("*.cpp"))


def all_parts() -> list[str]:
    """List the names of all parts, each after its dependencies."""
    types = block_types()
    of_types = [f"{folder}/{name}" for folder in (PACKED, ROUNDED) for name in types]
    return [CORE, DECISIONS, PACKING, PACKED, ROUNDED, *of_types]


def with_needed(names: Iterable[str]) -> list[str]:
    """List these parts and their dependencies, which come first."""
    needed = [(CORE, name.partition("/")[0], name) for name in names]
    return list(dict.fromkeys(each for of_one in needed for each in of_one))


class Digests:
    """Digests of sources, their headers, compiler flags, the machine they run on, and `more`."""

    def __init__(self, *more: bytes, machine: str = "") -> None:
        """Start without files; machine: as `platform.machine` there names it, by default this."""
        runs_on = machine or platform.machine()
        self._more = (*more, " ".join(FLAGS).encode(), runs_on.encode())
        self._contents: dict[Path, bytes] = {}

    def of(self, sources: Sequence[Path], folder: Path) -> str:
        """Return the digest of `sources`, whose includes are relative to `folder`."""
        files = [(path.relative_to(folder), self._content(path)) for path in sources]
        files += [(path, self._content(folder / path)) for path in self._headers(sources, folder)]
        parts = [part for path, content in files for part in (str(path).encode(), content)]
        return hashlib.sha256(b"\0".join((*parts, *self._more))).hexdigest()[:16]

    def _headers(self, sources: Sequence[Path], folder: Path) -> list[Path]:
        found: set[Path] = set()
        waiting = list(sources)
        while waiting:
            for name in _INCLUDE.findall(self._content(waiting.pop())):
                header = Path(name.decode())
                if header not in found:
                    found.add(header)
                    waiting.append(folder / header)
        return sorted(found)

    def _content(self, path: Path) -> bytes:
        if path not in self._contents:
            self._contents[path] = path.read_bytes()
        return self._contents[path]
