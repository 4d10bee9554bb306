"""The kernels' C++: the parts that are loaded by themselves, and what their files are made of.

The core is all that weights in bfloat16 need. What multiplies with another format is a part for
each of its types, which registers itself with the part that its folder is.
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
"""Where their includes begin."""

CORE, DECISIONS, PACKING, PACKED, ROUNDED = "core", "decisions", "packing", "packed", "rounded"
_CORE_FOLDERS = ("team", "dense", "experts", "layer")

_INCLUDE = re.compile(rb'^#include "([^"]+)"', re.MULTILINE)


class Part(NamedTuple):
    """Files that become one library."""

    name: str
    sources: tuple[Path, ...]
    folder: Path = KERNELS_FOLDER  # where their includes begin


def part(name: str) -> Part:
    """The part of that name: a folder's, or FOLDER/TYPE."""
    folder, _, of_type = name.partition("/")
    if of_type:
        return Part(name, (KERNELS_FOLDER / folder / "types" / f"{of_type}.cpp",))
    folders = _CORE_FOLDERS if name == CORE else (folder,)
    found = (path for each in folders for path in (KERNELS_FOLDER / each).glob("*.cpp"))
    return Part(name, tuple(sorted(found)))


def block_types() -> list[str]:
    """Names of the formats in blocks that there are compiled products with."""
    return sorted(path.stem for path in (KERNELS_FOLDER / PACKED / "types").glob("*.cpp"))


def all_parts() -> list[str]:
    """Names of all parts, each behind what it needs."""
    types = block_types()
    of_types = [f"{folder}/{name}" for folder in (PACKED, ROUNDED) for name in types]
    return [CORE, DECISIONS, PACKING, PACKED, ROUNDED, *of_types]


def with_needed(names: Iterable[str]) -> list[str]:
    """These parts and those that they need, which come before them."""
    needed = [(CORE, name.partition("/")[0], name) for name in names]
    return list(dict.fromkeys(each for of_one in needed for each in of_one))


class Digests:
    """Of what files are compiled from: their own bytes, headers', flags, and what else is named."""

    def __init__(self, *more: bytes) -> None:
        self._more = (*more, " ".join(FLAGS).encode(), platform.machine().encode())
        self._contents: dict[Path, bytes] = {}

    def of(self, sources: Sequence[Path], folder: Path) -> str:
        """folder: where their includes begin."""
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
