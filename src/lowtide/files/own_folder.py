"""A private folder: no other user may write to it, and links in it are not followed.

Files in it are created for this user alone.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_bytes, token_hex
from typing import NamedTuple

from lowtide.errors import StorageError, UsageError

SECRET_BYTES = 32

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class FolderEntry(NamedTuple):
    """A regular file's name and status when it was listed."""

    name: str
    num_bytes: int
    inode: int
    used_ns: int  # last write or use, since the epoch


class OwnFolder:
    """A folder held by its descriptor, so that a change of its path has no effect.

    Methods take plain file names and raise OSError.
    """

    def __init__(self, path: Path, is_made: bool = True) -> None:
        """is_made: create the folder, for this user alone, if it is missing.

        Raises UsageError for a link and for a folder that belongs to or is writable by another
        user, StorageError for a missing one.
        """
        self.path = path
        try:
            if is_made:
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and os.path.islink(path):
                raise UsageError(f"{path} is a link: name the folder that it leads to.") from None
            text = error.strerror if isinstance(error, OSError) else str(error)
            told = f"The folder {path} cannot be opened: {text}"
            raise StorageError(f"{told}; name one of your own that exists.") from error
        try:
            _check_owner(path, os.fstat(self._descriptor))
        except UsageError:
            self.close()
            raise

    def close(self) -> None:
        """Close the folder's descriptor."""
        os.close(self._descriptor)

    def entries(self) -> list[FolderEntry]:
        """List the regular files."""
        # A separate descriptor: threads sharing one would share its position in the listing.
        descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._descriptor)
        found = []
        try:
            with os.scandir(descriptor) as listed:
                for one in listed:
                    with suppress(FileNotFoundError):
                        status = one.stat(follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode):
                            numbers = status.st_size, status.st_ino, status.st_mtime_ns
                            found.append(FolderEntry(one.name, *numbers))
        finally:
            os.close(descriptor)
        return found

    def open(self, name: str) -> int:
        """Open a regular file of this user for reading; return its descriptor."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # O_NONBLOCK: never waits for a pipe
        descriptor = os.open(name, flags, dir_fd=self._descriptor)
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
            return descriptor
        os.close(descriptor)
        raise OSError(errno.EPERM, "it is not a file of this user's")

    @contextmanager
    def writing(self, name: str, is_new: bool = False) -> Iterator[int]:
        """Yield the descriptor of a new private file that replaces `name` once it is on the disk.

        With `is_new` raises FileExistsError if `name` exists. An exception leaves nothing behind.
        """
        draft = f"{name}.{token_hex(4)}"
        flags, own = os.O_WRONLY | os.O_CREAT | os.O_EXCL, self._descriptor
        descriptor = os.open(draft, flags, 0o600, dir_fd=own)
        try:
            yield descriptor
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            if is_new:
                os.link(draft, name, src_dir_fd=own, dst_dir_fd=own)
            else:
                os.rename(draft, name, src_dir_fd=own, dst_dir_fd=own)
        finally:
            os.close(descriptor)
            self.remove(draft)

    def touch(self, name: str) -> None:
        """Mark a file as used now."""
        os.utime(name, dir_fd=self._descriptor, follow_symlinks=False)

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._descriptor)


def own_secret(folder: OwnFolder, name: str) -> bytes:
    """Return a secret of `SECRET_BYTES` from a private file, creating it at first use.

    Raises StorageError for a file that is anything else.
    """
    path = folder.path / name
    try:
        try:
            descriptor = folder.open(name)
        except FileNotFoundError:
            with suppress(FileExistsError), folder.writing(name, is_new=True) as draft:
                os.write(draft, token_bytes(SECRET_BYTES))
            descriptor = folder.open(name)
        try:
            secret, mode = os.pread(descriptor, SECRET_BYTES + 1, 0), os.fstat(descriptor).st_mode
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            way_out = "make room on its disk"
        elif os.path.lexists(path):
            way_out = "remove it, and a new one is made"
        else:
            way_out = "name a folder that you can write to"
        raise StorageError(
            f"The key {path} cannot be used: {error.strerror}; {way_out}."
        ) from error
    if len(secret) != SECRET_BYTES or mode & _OTHERS:
        raise StorageError(
            f"{path} is not a key of {SECRET_BYTES} bytes that this user alone can read (mode "
            f"{stat.S_IMODE(mode):04o}): remove it, and a new one is made. What was stored "
            "under the old one is not used then."
        )
    return secret


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise UsageError(
            f"{path} is a folder of user {status.st_uid}, and this is user {os.geteuid()}: name "
            "one of your own."
        )
    if status.st_mode & _OTHERS_WRITE:
        raise UsageError(
            f"Other users may write to {path} (mode {stat.S_IMODE(status.st_mode):04o}): chmod 700 "
            "it, or name another folder."
        )
