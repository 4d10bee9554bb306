"""Files written whole or not at all: what was at their path before stays until then.

A link is followed: what it leads to is replaced, and the link stays. A pipe, a device such as
/dev/null, whatever standard output or error goes to, and any stream that is named by its number
(/dev/fd/3) are no files to be replaced: once it is whole, what is written goes through them. A
named pipe without a reader is waited for then.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from tempfile import NamedTemporaryFile, TemporaryFile
from typing import IO

from lowtide.errors import StorageError

_STANDARD = (1, 2)  # output and error
_BY_NUMBER = ("/dev/fd", "/proc/self/fd")


@contextmanager
def whole_file(path: Path, noun: str) -> Iterator[IO[bytes]]:
    """A file to write, which takes the place of `path` once all of it is on the disk, or goes
    through what is there.

    `noun` ("trace") names the file in the StorageError that a failing write raises.
    """
    try:
        with _replacing(path) if _is_replaced(path) else _passing_on(path, noun) as file:
            yield file
    except OSError as reason:
        raise _refusal(path, noun, reason) from reason


def check_writable(path: Path, noun: str) -> None:
    """Makes the folder that `path` names; raises StorageError where that fails, or `whole_file`
    would: before a long run, not after it."""
    try:
        if not _is_replaced(path):
            with _in_temporary_folder(), TemporaryFile():
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
    number = _stream(path, facts)
    if number is not None:
        if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "it is open for reading only")
        return False
    if stat.S_ISREG(facts.st_mode):
        return True
    if not (stat.S_ISFIFO(facts.st_mode) or stat.S_ISCHR(facts.st_mode)):
        raise OSError(errno.EINVAL, "it is no file, pipe or character device")
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return False


def _stream(path: Path, facts: os.stat_result) -> int | None:
    """The number of the stream that `path` names, or of a standard one that goes there.

    facts: of what is at `path`."""
    folders = {os.path.realpath(each) for each in _BY_NUMBER}
    if path.name.isdecimal() and os.path.realpath(path.parent) in folders:
        return int(path.name)
    return _standard_stream(facts)


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
def _passing_on(path: Path, noun: str) -> Iterator[IO[bytes]]:
    """Through what is there, once it is whole; until then it is held in the temporary folder."""
    with _in_temporary_folder(), TemporaryFile() as file:
        yield file
        file.seek(0)
        try:
            _copy_through(file, path)
        except OSError as reason:
            raise _refusal(path, noun, reason) from reason


def _copy_through(file: IO[bytes], path: Path) -> None:
    """Into what is there, or the stream that goes to it: opened again a file would be written from
    its beginning."""
    facts = path.stat()
    if _standard_stream(facts) == 1:
        with contextlib.suppress(ValueError):  # closed
            print(end="", flush=True)  # what was said before comes before
    number = _stream(path, facts)
    with open(path if number is None else os.dup(number), "wb") as through:
        shutil.copyfileobj(file, through)


@contextmanager
def _in_temporary_folder() -> Iterator[None]:
    """Has an OSError say where it happened: not where the file was asked for."""
    try:
        yield
    except OSError as reason:
        folder = tempfile.tempdir  # None where there is none, as the reason says
        place = "" if folder is None else f" in the temporary folder {folder}"
        said = f"{reason.strerror or reason}{place}; TMPDIR names another"
        raise OSError(reason.errno, said) from reason


def _refusal(path: Path, noun: str, reason: OSError) -> StorageError:
    what = f"{noun.capitalize()} {path}"
    return StorageError(f"{what} cannot be written: {reason.strerror or reason}.")
