"""Files that may change at any time: opened without blocking, and recognised when replaced.

What is checked is what was opened: a pipe never blocks a reader, a device is never read, and a
checked file is the one that is read later. Links are followed, since the hub's cache consists of
links to blobs.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO, NamedTuple

from lowtide.errors import CheckpointError, LowtideError, StorageError
from lowtide.files.mistaken import HEAD_BYTES, mistaken

FETCH_AGAIN = "fetch the model again"
"""Way out of a model's file that is missing or damaged: the end of an error message."""
OTHER_DRIVE = "Try again, or copy the model to another drive."
"""Way out of a read of weights that fails."""


class RegularFile(NamedTuple):
    """Identity of a file when it was checked. Holds nothing open."""

    path: Path
    num_bytes: int
    # Device, inode, nanoseconds of the last write and of the last change, which cannot be set back.
    identity: tuple[int, int, int, int]

    @classmethod
    def at(cls, path: Path, error: type[LowtideError] = StorageError) -> RegularFile:
        """Check the file at `path`; raises `error` if there is none."""
        with open_regular(path, error) as (_, file):
            return file

    def open(self, flags: int = 0) -> int:
        """Open this very file for reading; `flags` are added to those of `os.open`.

        Raises StorageError if it cannot be opened or has changed.
        """
        descriptor, now = _open(self.path, StorageError, flags)
        if now != self:
            os.close(descriptor)
            raise StorageError(
                f"{self.path} was changed or replaced after it was checked ({self.num_bytes} "
                f"bytes then, {now.num_bytes} now); open the model again."
            )
        return descriptor

    def check(self, descriptor: int) -> None:
        """Raise StorageError if the open file was written to since it was checked.

        Weights of two versions make no model.
        """
        now = os.fstat(descriptor)
        if now.st_size < self.num_bytes:
            raise StorageError(
                f"{self.path} ends at byte {now.st_size} of {self.num_bytes}: it was truncated "
                "after it was opened. Fetch it again."
            )
        times = (now.st_mtime_ns, now.st_ctime_ns)
        if now.st_nlink == 0:  # deleting a file changes its ctime, not its contents
            times = (now.st_mtime_ns, self.identity[3])
        if now.st_size != self.num_bytes or times != self.identity[2:]:
            raise StorageError(
                f"{self.path} was written to after it was opened; open the model again."
            )


def is_in_memory(descriptor: int) -> bool:
    """Return True for a file on a file system in memory (only known on Linux)."""
    device = os.fstat(descriptor).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return False
    # proc(5): the device is the third word, the file system's type the first after the dash.
    return any(
        mount.split()[2] == number and mount.partition(" - ")[2].split()[0] in ("tmpfs", "ramfs")
        for mount in mounts
    )


@contextmanager
def open_regular(
    path: Path, error: type[LowtideError] = StorageError, way_out: str = ""
) -> Iterator[tuple[BinaryIO, RegularFile]]:
    """Open a regular file for reading; yield it and its identity.

    Raises `error`, with this `way_out`, if it is missing, not regular or cannot be opened.
    """
    descriptor, file = _open(path, error, way_out=way_out)
    with open(descriptor, "rb") as stream:
        yield stream, file


def read_regular(
    path: Path, max_bytes: int, error: type[LowtideError] = StorageError, way_out: str = ""
) -> bytes:
    """Read a whole file; raises `error` if it cannot be read or exceeds `max_bytes`."""
    with open_regular(path, error, way_out) as (stream, file):
        # It may grow meanwhile, and the size of some files is not known before they are read.
        data = read_from(stream, max_bytes + 1, path, error)
    num_bytes = max(file.num_bytes, len(data))
    if num_bytes > max_bytes:
        problem = f"has {num_bytes} bytes; at most {max_bytes} are read"
        raise error(f"{path} {problem}{_clause(way_out)}.")
    return data


def read_own(path: Path, max_bytes: int) -> bytes:
    """Read a model's file as `read_regular`; raises CheckpointError, also for a web page."""
    data = read_regular(path, max_bytes, CheckpointError, FETCH_AGAIN)
    found = mistaken(data[:HEAD_BYTES])
    if found is not None:
        raise CheckpointError(f"{path} is {found}.")
    return data


def read_from(
    stream: IO[bytes], num_bytes: int, path: Path | str, error: type[LowtideError] = StorageError
) -> bytes:
    """Read the next bytes of an open file; raises `error` if it cannot be read."""
    try:
        data: bytes | None = stream.read(num_bytes)
    except OSError as reason:
        raise error(f"{path} cannot be read: {reason.strerror}.") from reason
    if data is None:  # EAGAIN, which network file systems may return
        raise error(
            f"{path} cannot be read: its file system has no bytes of it at present ("
            f"{os.strerror(errno.EAGAIN)}). Try again, or copy it to a local disk."
        )
    return data


def _clause(way_out: str) -> str:
    return f"; {way_out}" if way_out else ""


def _open(
    path: Path, error: type[LowtideError], flags: int = 0, way_out: str = ""
) -> tuple[int, RegularFile]:
    try:
        # Without O_NONBLOCK this waits for a pipe's other end.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | flags)
    except FileNotFoundError:
        detail = ": its link leads nowhere" if os.path.islink(path) else ""
        raise error(f"{path} is missing{detail}{_clause(way_out)}.") from None
    except PermissionError as reason:
        told = f"{path} cannot be opened: {reason.strerror}"
        raise error(f"{told}; give this user the right to read it.") from reason
    except (OSError, ValueError) as reason:
        text = reason.strerror if isinstance(reason, OSError) else str(reason)
        raise error(f"{path} cannot be opened: {text}.") from reason
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise error(f"{path} is not a regular file{_clause(way_out)}.")
    os.set_blocking(descriptor, True)
    identity = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
    return descriptor, RegularFile(path, status.st_size, identity)
