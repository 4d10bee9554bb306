"""Compiled kernels: those of a wheel, or built with the system's compiler at first use and kept.

A wheel has them in `built/`, named by their sources: others than those that lie beside them are
not loaded. Elsewhere they are in the user's cache.

A library is code that this process will run: its folder and file must belong to this user alone,
no other user may be able to replace the folder, and a digest at the file's end says that it is
whole.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lowtide.errors import InternalError, StorageError, UnsupportedError
from lowtide.files.folders import cache_folder
from lowtide.files.json_file import printable

_COMPILERS = ("c++", "g++", "clang++")
# Nothing of this machine: variants are chosen at run time. Nothing that changes arithmetic either.
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-pthread")
_LIMIT_S = 120.0
_WHEEL_LIMIT_S = 900.0  # of a library: no answer waits, and other builds may have the cores
_POLL_S = 0.005
_DAY_S = 86400.0
_OLD_S = {"build-*": _DAY_S, "*.so": 30 * _DAY_S}  # what is that old goes: see `_remove_old`
_MOST_CHARS = 500  # of a compiler's error
_DIGEST_BYTES = hashlib.sha256().digest_size
_SYSTEM_FOLDERS = tuple(map(Path, ("/", "/home", "/tmp", "/var", "/var/tmp")))
"""Root's on every Linux, whatever number root has in a container's user namespace."""

KERNELS_FOLDER = Path(__file__).parent
"""Where their includes begin."""

KERNELS = tuple(sorted(KERNELS_FOLDER.rglob("*.cpp")))
"""The sources of the one library, which a wheel has compiled."""

_log = logging.getLogger(__name__)


@functools.cache
def load_kernels() -> ctypes.CDLL:
    """`load_library` of the kernels, once in a process."""
    return load_library(*KERNELS)


def load_library(*sources: Path) -> ctypes.CDLL:
    """C++ files below one folder, compiled and loaded as one; calls into it do not hold the GIL.

    Several are called as that folder. Raises UnsupportedError where it cannot be compiled or
    loaded, StorageError where the cache cannot be written or is not this user's own.
    """
    built = _built(sources)
    if built.exists():
        with suppress(OSError):  # compiled for a newer system than this: compile it here
            return ctypes.CDLL(str(built))
    compiler = find_compiler()
    try:
        key = _digest(sources, _run([[compiler, "--version"]]))
        path = _private_folder() / f"{_name(sources)}-{key}.so"
        _note_use(path)  # first: then no other process takes it for an old one
        if not _is_whole(path):
            _build(sources, compiler, path)
    except OSError as error:
        raise StorageError(
            f"{error.filename or cache_folder()} cannot be used: {error.strerror or error}; "
            "XDG_CACHE_HOME names another cache folder."
        ) from error
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise UnsupportedError(f"{path} cannot be loaded: {error}.") from error


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
    fields, or these at other places."""
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


def build_kernels(package: Path) -> None:
    """Compiles `KERNELS` into the copy of this package at `package`, for a wheel.

    Raises UnsupportedError if there is no compiler or it fails.
    """
    path = package / _built(KERNELS).relative_to(KERNELS_FOLDER.parents[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        _compile(KERNELS, find_compiler(), path, Path(folder), _WHEEL_LIMIT_S)


def find_compiler() -> str:
    """The path of a C++ compiler; raises UnsupportedError where there is none."""
    for name in _COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    raise UnsupportedError(f"There is no C++ compiler; install one of {', '.join(_COMPILERS)}.")


def _built(sources: Sequence[Path]) -> Path:
    """Where a wheel has these compiled."""
    return _folder(sources) / "built" / f"{_name(sources)}-{_digest(sources)}.so"


def _name(sources: Sequence[Path]) -> str:
    return sources[0].stem if len(sources) == 1 else _folder(sources).name


def _folder(sources: Sequence[Path]) -> Path:
    """The one that all are below, where their includes begin."""
    return Path(os.path.commonpath([path.parent for path in sources]))


def _digest(sources: Sequence[Path], *more: bytes) -> str:
    headers = sorted(_folder(sources).rglob("*.hpp"))
    contents = [path.read_bytes() for path in (*sources, *headers)]
    parts = [*contents, *more, " ".join(_FLAGS).encode(), platform.machine().encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _private_folder() -> Path:
    """Raises StorageError if others could put something there."""
    folder = cache_folder() / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.is_symlink() or not _is_private(folder.stat()):
        raise StorageError(
            f"{folder} does not belong to this user alone; remove it, or make it so (chmod 700)."
        )
    for parent in sorted({*folder.absolute().parents, *folder.resolve().parents}):
        _check_parent(parent, folder)
    return folder


def _check_parent(parent: Path, folder: Path) -> None:
    """Who may rename what is in `parent` may put another folder in this one's place.

    Raises StorageError if that is a user beside this one and root. A group is believed: many
    systems give every user one of their own.
    """
    facts = parent.stat()
    is_open = facts.st_mode & stat.S_IWOTH and not facts.st_mode & stat.S_ISVTX
    is_trusted = parent in _SYSTEM_FOLDERS or facts.st_uid in (0, os.getuid())
    if is_trusted and not is_open:
        return
    why = "may be written by anybody" if is_open else "belongs to another user"
    raise StorageError(
        f"{parent} {why}, who could replace the compiled kernels in {folder}; XDG_CACHE_HOME names "
        "another cache folder."
    )


def _is_private(facts: os.stat_result) -> bool:
    """This user's, and not for others to write."""
    return facts.st_uid == os.getuid() and not facts.st_mode & 0o022


def _is_whole(path: Path) -> bool:
    """Whether `path` is this user's file and ends with the digest of what is before."""
    try:
        facts = path.lstat()
        if not stat.S_ISREG(facts.st_mode) or not _is_private(facts):
            return False
        content = path.read_bytes()
    except FileNotFoundError:
        return False
    image, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    return hashlib.sha256(image).digest() == digest


def _note_use(path: Path) -> None:
    with suppress(OSError):  # a cache that may only be read, or has no such file
        os.utime(path, follow_symlinks=False)


def _remove_old(folder: Path) -> None:
    """What killed compilations left, and libraries of other sources that nothing loads any more."""
    for pattern, limit_s in _OLD_S.items():
        for path in folder.glob(pattern):
            with suppress(OSError):  # another process is at it, too
                if time.time() - path.lstat().st_mtime > limit_s:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _build(sources: Sequence[Path], compiler: str, path: Path) -> None:
    """Writes the file whole or not at all: another process may be at it, too."""
    _remove_old(path.parent)
    _log.warning("Compiling kernels for this processor (once).")  # takes seconds
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
        built = Path(folder) / path.name
        _compile(sources, compiler, built, Path(folder), _LIMIT_S)
        with built.open("ab") as file:  # what follows its sections is nothing to a loader
            file.write(hashlib.sha256(built.read_bytes()).digest())
        built.chmod(0o700)
        built.replace(path)


def _compile(
    sources: Sequence[Path], compiler: str, out: Path, scratch: Path, limit_s: float
) -> None:
    """Each file by itself, the largest first, then all to one library."""
    by_size = sorted(sources, key=lambda path: path.stat().st_size, reverse=True)
    objects = [scratch / f"{path.stem}.o" for path in by_size]
    each = zip(by_size, objects, strict=True)
    compile_one = [compiler, *_FLAGS, f"-I{_folder(sources)}", "-c"]
    commands = [[*compile_one, str(path), "-o", str(made)] for path, made in each]
    _run(commands, scratch, limit_s)
    _run([[compiler, *_FLAGS, "-shared", *map(str, objects), "-o", str(out)]], scratch, limit_s)


def _run(
    commands: Sequence[list[str]], scratch: Path | None = None, limit_s: float = _LIMIT_S
) -> bytes:
    """What they write to their output, as many at once as there are cores; `scratch`: for their
    temporary files, by default the system's. limit_s: of each.

    If this is interrupted, or one fails, all whole groups of processes end: a compiler's own do
    the work.
    """
    environment = {**os.environ, "LC_ALL": "C"}  # `_telling_line` reads English
    if scratch is not None:
        environment["TMPDIR"] = str(scratch)
    waiting, running, output = list(commands), list[_Running](), b""
    try:
        while waiting or running:
            while waiting and len(running) < len(os.sched_getaffinity(0)):
                running.append(_Running(waiting.pop(0), environment, limit_s))
            for one in [each for each in running if each.has_ended()]:
                running.remove(one)
                output += one.output()
            time.sleep(_POLL_S)
    except BaseException:
        for each in running:
            each.stop()
        raise
    return output


class _Running:
    """A command. Its caller asks until it has ended."""

    def __init__(self, command: list[str], environment: Mapping[str, str], limit_s: float) -> None:
        self._name, self._limit_s, self._start_s = command[0], limit_s, time.monotonic()
        self._output, self._errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            command,
            stdout=self._output,
            stderr=self._errors,
            env=environment,
            start_new_session=True,
        )

    def has_ended(self) -> bool:
        """Raises UnsupportedError beyond the limit."""
        if self._process.poll() is not None:
            return True
        if time.monotonic() - self._start_s > self._limit_s:
            raise UnsupportedError(f"{self._name} has not ended within {self._limit_s:g} s.")
        return False

    def output(self) -> bytes:
        """Raises UnsupportedError where it failed."""
        with self._output, self._errors:
            if self._process.returncode:
                self._errors.seek(0)
                said = _telling_line(self._errors.read())
                raise UnsupportedError(f"{self._name} failed: {said}.")
            self._output.seek(0)
            return self._output.read()

    def stop(self) -> None:
        with self._output, self._errors, suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _telling_line(errors: bytes) -> str:
    """The first line of an error in a compiler's output: hundreds may follow from it."""
    lines = errors.decode(errors="replace").strip().splitlines()
    telling = [line for line in lines if "error:" in line] or lines[-1:]
    return (
        printable(telling[0].strip()[:_MOST_CHARS]).rstrip(".") if telling else "it did not say why"
    )
