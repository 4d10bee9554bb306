"""Files written whole or not at all: what was at their path before stays until then."""

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
    temporary = path.with_name(f".{path.name}.{token_hex(4)}")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as reason:
        raise _refusal(path, noun, reason) from reason
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def check_writable(path: Path, noun: str) -> None:
    """Makes the folder that `path` names; raises StorageError where that fails, or `whole_file`
    would: before a long run, not after it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
            pass
    except OSError as reason:
        raise _refusal(path, noun, reason) from reason


def _refusal(path: Path, noun: str, reason: OSError) -> StorageError:
    return StorageError(f"{noun.capitalize()} {path} cannot be written: {reason.strerror}.")
