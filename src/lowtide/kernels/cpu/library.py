"""Compiled kernels: those of a wheel, or built with the system's compiler at first use and kept.

A wheel has them in `built/`, named by their sources: others than those that lie beside them are
not loaded. Elsewhere they are in the user's cache.

A library is code that this process will run: its folder and file must belong to this user alone,
no other user may be able to replace the folder, and a digest at the file's end says that it is
whole.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from lowtide.errors import InternalError, StorageError, UnsupportedError
from lowtide.files.folders import cache_folder
from lowtide.files.json_file import printable

_COMPILERS = ("c++", "g++", "clang++")
# Nothing of this machine: variants are chosen at run time. Nothing that changes arithmetic either.
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-shared", "-fPIC", "-pthread")
_LIMIT_S = 120.0
_WHEEL_LIMIT_S = 900.0  # of a library: no answer waits, and other builds may have the cores
_MOST_CHARS = 500  # of a compiler's error
_DIGEST_BYTES = hashlib.sha256().digest_size
_FOLDER = Path(__file__).parent
_SYSTEM_FOLDERS = tuple(map(Path, ("/", "/home", "/tmp", "/var", "/var/tmp")))
"""Root's on every Linux, whatever number root has in a container's user namespace."""


def _sources(*names: str) -> tuple[Path, ...]:
    return tuple(_FOLDER / f"{name}.cpp" for name in names)


FEW_ROWS = _sources(
    *("few_rows", "experts", "attention", "rows", "router", "layer", "residency", "reader"),
    *("products", "team", "processor"),
)
QUANTISED = _sources(
    *("quantised", "quantised_int8", "quantised_pack", "processor", "borrowed_team")
)
GGML = _sources("ggml", "ggml_unpack", "ggml_products", "products", "processor", "borrowed_team")
GGML_INT8 = _sources("ggml_int8", "processor", "borrowed_team")
SECTIONED = _sources(
    *("sectioned", "sectioned_unpack", "sectioned_products", "products", "processor"),
    "borrowed_team",
)
BUDDIES = _sources("buddies", "buddy_counts", "balance")
LIBRARIES = (FEW_ROWS, QUANTISED, GGML, GGML_INT8, SECTIONED, BUDDIES)
"""What a wheel has compiled."""

_log = logging.getLogger(__name__)


def load_library(*sources: Path) -> ctypes.CDLL:
    """C++ files of one folder, compiled and loaded as one; calls into it do not hold the GIL.

    Called as the first of them. Raises UnsupportedError where it cannot be compiled or loaded,
    StorageError where the cache cannot be written or is not this user's own.
    """
    built = _built(sources)
    if built.exists():
        with suppress(OSError):  # compiled for a newer system than this: compile it here
            return ctypes.CDLL(str(built))
    compiler = find_compiler()
    try:
        path = _private_folder() / f"{sources[0].stem}-{_key(sources, compiler)}.so"
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


def load_borrowing(*sources: Path) -> ctypes.CDLL:
    """`load_library` of what has `borrowed_team.cpp`: its threads are those of `FEW_ROWS`."""
    library = load_library(*sources)
    of_process = ctypes.cast(load_library(*FEW_ROWS).lowtide_run_together, ctypes.c_void_p)
    library.lowtide_borrow_team(of_process)
    return library


def check_layouts(library: ctypes.CDLL, structs: Mapping[str, type[ctypes.Structure]]) -> None:
    """Raises InternalError where a struct that `FEW_ROWS` is handed is not as long as there."""
    layout = library["lowtide_layout"]
    layout.argtypes, layout.restype = [ctypes.c_char_p], ctypes.c_long
    for name, struct in structs.items():
        own, wanted = ctypes.sizeof(struct), layout(name.encode())
        if own != wanted:
            raise InternalError(
                f"{name} has {own} bytes here and {wanted} in the compiled library."
            )


def build_libraries(package: Path) -> None:
    """Compiles `LIBRARIES` into the copy of this package at `package`, for a wheel.

    Raises UnsupportedError if there is no compiler or it fails.
    """
    compiler = find_compiler()
    for sources in LIBRARIES:
        path = package / _built(sources).relative_to(_FOLDER.parents[1])
        path.parent.mkdir(parents=True, exist_ok=True)
        command = [compiler, *_FLAGS, *map(str, sources), "-o", str(path)]
        _run(command, limit_s=_WHEEL_LIMIT_S)


def find_compiler() -> str:
    """The path of a C++ compiler; raises UnsupportedError where there is none."""
    for name in _COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    raise UnsupportedError(f"There is no C++ compiler; install one of {', '.join(_COMPILERS)}.")


def _key(sources: Sequence[Path], compiler: str) -> str:
    """Differs wherever the library would."""
    return _digest(sources, _run([compiler, "--version"]))


def _built(sources: Sequence[Path]) -> Path:
    """Where a wheel has these compiled."""
    return sources[0].parent / "built" / f"{sources[0].stem}-{_digest(sources)}.so"


def _digest(sources: Sequence[Path], *more: bytes) -> str:
    headers = sorted(sources[0].parent.glob("*.hpp"))
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


def _build(sources: Sequence[Path], compiler: str, path: Path) -> None:
    """Writes the file whole or not at all: another process may be at it, too."""
    _log.warning("Compiling kernels for this processor (once).")  # takes seconds
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
        built = Path(folder) / path.name
        _run([compiler, *_FLAGS, *map(str, sources), "-o", str(built)], Path(folder))
        with built.open("ab") as file:  # what follows its sections is nothing to a loader
            file.write(hashlib.sha256(built.read_bytes()).digest())
        built.chmod(0o700)
        built.replace(path)


def _run(command: list[str], scratch: Path | None = None, limit_s: float | None = None) -> bytes:
    """What it writes to its output; `scratch`: for its temporary files, by default the system's.

    If this is interrupted, the whole group of processes ends: a compiler's own do the work.
    """
    limit_s = _LIMIT_S if limit_s is None else limit_s
    environment = {**os.environ, "LC_ALL": "C"}  # `_telling_line` reads English
    if scratch is not None:
        environment["TMPDIR"] = str(scratch)
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired as error:
            _end_group(process)
            raise UnsupportedError(f"{command[0]} has not ended within {limit_s:g} s.") from error
        except BaseException:
            _end_group(process)
            raise
    if process.returncode:
        raise UnsupportedError(f"{command[0]} failed: {_telling_line(errors)}.")
    return output


def _telling_line(errors: bytes) -> str:
    """The first line of an error in a compiler's output: hundreds may follow from it."""
    lines = errors.decode(errors="replace").strip().splitlines()
    telling = [line for line in lines if "error:" in line] or lines[-1:]
    return (
        printable(telling[0].strip()[:_MOST_CHARS]).rstrip(".") if telling else "it did not say why"
    )


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
