"""Files written whole or not at all; the previous file stays until then.

Where a user names the path, an existing file is replaced only if lowtide wrote it as one of the
same kind, which `IsOwn` tells. `check_writable` checks before the work and `whole_file` before it
writes.

Links are followed: the target is replaced, and the link stays. /dev/stdout, /dev/stderr, a pipe and
a device such as /dev/null are written through once the contents are complete. A named pipe without
a reader is waited for then.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from tempfile import NamedTemporaryFile, TemporaryFile
from typing import IO

from lowtide.errors import StorageError

IsOwn = Callable[[IO[bytes]], bool]
"""Predicate on an open, non-empty file: True if lowtide wrote it as a file of the same kind."""

_STREAMS = {"/dev/stdout": 1, "/dev/stderr": 2}

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def whole_file(path: Path, noun: str, is_own: IsOwn | None = None) -> Iterator[IO[bytes]]:
    """Yield a file that replaces `path` once it is on the disk, or is written through `path`.

    `noun` ("trace") names the file in the StorageError raised if writing fails or an existing file
    is not `is_own`. Without `is_own` the path belongs to lowtide.
    """
    if is_own is not None:
        _check_own(path, noun, is_own)
    with _refusing(path, noun), _replacing(path) if _is_replaced(path) else _through(path) as file:
        yield file


def check_writable(path: Path, noun: str, is_own: IsOwn) -> None:
    """Make the folder of `path` and check that `whole_file` could write: before a long run.

    Raises StorageError.
    """
    _check_own(path, noun, is_own)
    with _refusing(path, noun):
        if _is_replaced(path):
            target = Path(os.path.realpath(path))
            target.parent.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}."):
                pass


def _check_own(path: Path, noun: str, is_own: IsOwn) -> None:
    """Raise StorageError if another program or a user wrote the existing file."""
    with _refusing(path, noun):
        if not _is_replaced(path) or not path.exists() or not path.stat().st_size:
            return
        with path.open("rb") as file:
            if is_own(file):
                return
    raise StorageError(
        f"{path} exists and is no {noun} that lowtide wrote, so it stays: choose another name, or "
        "remove it."
    )


@contextmanager
def _refusing(path: Path, noun: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        told = f"{noun.capitalize()} {path} cannot be written: {error.strerror or error}"
        way_out = "make room, or name" if error.errno in _FULL_DISK else "name"
        raise StorageError(f"{told}; {way_out} another file.") from error


def _is_replaced(path: Path) -> bool:
    """Return True if writing replaces what is at `path`, False if it goes through it.

    Raises OSError if neither is possible.
    """
    if str(path) in _STREAMS:
        return False
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:  # also where a link leads
        return True
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder")
    if not stat.S_ISREG(mode) and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return stat.S_ISREG(mode)


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{token_hex(4)}")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _through(path: Path) -> Iterator[IO[bytes]]:
    """Yield a temporary file and write it through `path` at the end."""
    number = _STREAMS.get(str(path))
    with TemporaryFile() as file:
        yield file
        file.seek(0)
        if number == 1:
            sys.stdout.flush()  # what was printed before comes first
        with open(path if number is None else os.dup(number), "wb") as through:
            shutil.copyfileobj(file, through)
