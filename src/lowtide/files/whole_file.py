"""Files written whole or not at all: what was at their path before stays until then.

A link is followed: what it leads to is replaced, and the link stays.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from tempfile import NamedTemporaryFile
from typing import IO

from lowtide.errors import StorageError


@contextmanager
def whole_file(path: Path, noun: str) -> Iterator[IO[bytes]]:
    """A file to write, which takes the place of `path` once all of it is on the disk.

    `noun` ("trace") names the file in the StorageError that a failing write raises.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{token_hex(4)}")
    try:
        _check_replaceable(target)
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as reason:
        raise _refusal(path, noun, reason) from reason
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def check_writable(path: Path, noun: str) -> None:
    """Makes the folder that `path` names; raises StorageError where that fails, or `whole_file`
    would: before a long run, not after it."""
    target = Path(os.path.realpath(path))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _check_replaceable(target)
        with NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}."):
            pass
    except OSError as reason:
        raise _refusal(path, noun, reason) from reason


def _check_replaceable(path: Path) -> None:
    """A file that took the place of /dev/null would be it for every program."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a folder")
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is a device or a pipe, and only a file is replaced")


def _refusal(path: Path, noun: str, reason: OSError) -> StorageError:
    return StorageError(f"{noun.capitalize()} {path} cannot be written: {reason.strerror}.")
