"""Files written whole or not at all: what was at their path before stays until then.

A link is followed: what it leads to is replaced, and the link stays. A pipe, a device such as
/dev/null, and whatever standard output or error goes to are no files to be replaced: once it is
whole, what is written goes through them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from tempfile import NamedTemporaryFile, TemporaryFile
from typing import IO

from lowtide.errors import StorageError

_STANDARD = (1, 2)  # output and error


@contextmanager
def whole_file(path: Path, noun: str) -> Iterator[IO[bytes]]:
    """A file to write, which takes the place of `path` once all of it is on the disk, or goes
    through what is there.

    `noun` ("trace") names the file in the StorageError that a failing write raises.
    """
    try:
        with _replacing(path) if _is_replaced(path) else _passing_on(path) as file:
            yield file
    except OSError as reason:
        raise _refusal(path, noun, reason) from reason


def check_writable(path: Path, noun: str) -> None:
    """Makes the folder that `path` names; raises StorageError where that fails, or `whole_file`
    would: before a long run, not after it."""
    try:
        if not _is_replaced(path):
            return
        target = Path(os.path.realpath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}."):
            pass
    except OSError as reason:
        raise _refusal(path, noun, reason) from reason


def _is_replaced(path: Path) -> bool:
    """Whether a file takes the place of what is at `path`: of a device or a pipe it would be that
    for every program. Raises OSError for what can be neither replaced nor written through."""
    try:
        facts = path.stat()
    except FileNotFoundError:  # also where a link leads
        return True
    if stat.S_ISDIR(facts.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder")
    if _standard_stream(facts) is not None:
        return False
    if stat.S_ISREG(facts.st_mode):
        return True
    if not (stat.S_ISFIFO(facts.st_mode) or stat.S_ISCHR(facts.st_mode)):
        raise OSError(errno.EINVAL, "it is no file, pipe or character device")
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return False


def _standard_stream(facts: os.stat_result) -> int | None:
    """Which of this process's goes to the file of these `facts`, if any does."""
    for number in _STANDARD:
        with contextlib.suppress(OSError):  # closed
            if os.path.samestat(os.fstat(number), facts):
                return number
    return None


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
        with contextlib.suppress(OSError):
            temporary.unlink()


@contextmanager
def _passing_on(path: Path) -> Iterator[IO[bytes]]:
    """Through what is there, or the stream that goes to it: opened anew a file would be written
    from its beginning."""
    with TemporaryFile() as file:
        yield file
        file.seek(0)
        number = _standard_stream(path.stat())
        print(end="", flush=True)  # what was said before comes before
        with open(path if number is None else os.dup(number), "wb") as through:
            shutil.copyfileobj(file, through)


def _refusal(path: Path, noun: str, reason: OSError) -> StorageError:
    return StorageError(f"{noun.capitalize()} {path} cannot be written: {reason.strerror}.")
