"""Writes safetensors files as a stream: the header, then the tensors in order.

A file gets its name only when complete; until then it is `NAME.partial`, which is removed on any
failure. Knows nothing of models and the meaning of bytes.

The format: eight bytes of little-endian header length, a JSON header padded with spaces so that the
data starts on a multiple of eight, and the data without gaps in the header's order.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from lowtide.errors import InternalError, StorageError

ITEM_BYTES = {
    **dict.fromkeys(("F8_E4M3", "I8", "U8"), 1),
    **dict.fromkeys(("BF16", "F16", "I16"), 2),
    **dict.fromkeys(("F32", "I32"), 4),
    "I64": 8,
}

_LEAST_ALIGNMENT = 8
_STRETCH_BYTES = 32 << 20

Buffer = bytes | bytearray | memoryview


class OutputTensor(NamedTuple):
    """One tensor of a file to be written."""

    name: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class SafetensorsWriter:
    """A file being written; use it as a context manager.

    Leaving the block normally makes the file whole under its own name, leaving it by any
    exception (Ctrl-C too) removes every byte.

    Each stretch is sent to the disk as soon as it is written, and its pages are given back.
    Otherwise a checkpoint larger than memory drives everything else out of the page cache, and
    the kernel spends longer on finding fresh pages than on writing: 2 GB took 4.3 s this way,
    6 to 11 s without, interleaved on one machine.
    """

    def __init__(
        self,
        path: Path,
        entries: Sequence[OutputTensor],
        *,
        metadata: Mapping[str, str] | None = None,
        alignment: int = _LEAST_ALIGNMENT,
    ) -> None:
        """Lay out the file; nothing is written yet.

        alignment: of the data in the file, in bytes. Raises InternalError for two tensors of one
        name.
        """
        if len({e.name for e in entries}) != len(entries):
            raise InternalError(f"{path.name} would hold two tensors of one name.")
        self.path = path
        self._header = header_bytes(entries, metadata or {}, alignment)
        # Once: it is asked for at every write.
        self.num_bytes = len(self._header) + sum(e.num_bytes for e in entries)
        self._partial = path.with_name(f"{path.name}.partial")
        self._file: FileIO | None = None
        self._written_bytes = self._synced_bytes = 0

    @property
    def is_whole(self) -> bool:
        """True if a file of the right size exists: it gets its name only when complete.

        Raises StorageError if that cannot be determined.
        """
        return _file_bytes(self.path) == self.num_bytes

    @property
    def missing_bytes(self) -> int:
        """The bytes left to write, after a killed run's remains are given back.

        Raises StorageError.
        """
        return 0 if self.is_whole else self.num_bytes - (_file_bytes(self._partial) or 0)

    def __enter__(self) -> SafetensorsWriter:
        """Raises StorageError if the disk has too little room or the file cannot be made."""
        with self._all_or_nothing():
            self._partial.unlink(missing_ok=True)  # of a killed run: written again, and in its room
            check_disk_space(self.path.parent, self.num_bytes)
            self._file = FileIO(self._partial, "w")
        self.write(self._header)
        return self

    def write(self, data: Buffer) -> None:
        """Write the next bytes, in pieces of any size. Raise StorageError."""
        if self._file is None:
            raise InternalError(f"{self.path.name} is not open for writing.")
        rest = memoryview(data).cast("B")
        if self._written_bytes + len(rest) > self.num_bytes:
            raise InternalError(f"{self.path.name}: more data than its header declares.")
        with self._all_or_nothing():
            while len(rest):  # the kernel may take less than it is given
                num_bytes = os.write(self._file.fileno(), rest[:_STRETCH_BYTES])
                self._written_bytes += num_bytes
                rest = rest[num_bytes:]
                self._give_back(self._file.fileno())

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._discard()
            return
        with self._all_or_nothing():
            if self._file is None or self._written_bytes != self.num_bytes:
                raise InternalError(
                    f"{self.path.name}: {self._written_bytes} of {self.num_bytes} bytes were "
                    "written."
                )
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._partial, self.path)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Remove the partial file on any failure; convert disk errors to StorageError."""
        try:
            yield
        except BaseException as error:
            self._discard()
            if isinstance(error, OSError):
                raise StorageError(
                    f"Writing {self.path} failed after {self._written_bytes} of {self.num_bytes} "
                    f"bytes: {error.strerror or error}; {_free_text(self.path.parent)}."
                ) from error
            raise

    def _discard(self) -> None:
        file, self._file = self._file, None
        with suppress(OSError):  # closing may report the failure that is on its way up already
            if file is not None:
                file.close()
        with suppress(OSError):
            self._partial.unlink()

    def _give_back(self, descriptor: int) -> None:
        num_bytes = self._written_bytes - self._synced_bytes
        if num_bytes < _STRETCH_BYTES:
            return
        if hasattr(os, "posix_fadvise"):  # not everywhere; it only saves time and memory
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, self._synced_bytes, num_bytes, os.POSIX_FADV_DONTNEED)
        self._synced_bytes = self._written_bytes


def header_bytes(
    entries: Sequence[OutputTensor],
    metadata: Mapping[str, str],
    alignment: int = _LEAST_ALIGNMENT,
) -> bytes:
    """Return the length bytes and the padded JSON header of a file with these tensors."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for entry in entries:
        stop = start + entry.num_bytes
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % alignment)
    return len(text).to_bytes(8, "little") + text


def check_disk_space(folder: Path, need_bytes: int) -> None:
    """Raise StorageError if a folder's disk has less than `need_bytes` free.

    The folder may not exist yet.
    """
    try:
        present = next((each for each in (folder, *folder.parents) if each.exists()), folder)
        free_bytes = shutil.disk_usage(present).free
    except OSError as error:
        raise unwritable_folder(folder, error) from error
    if free_bytes < need_bytes:
        raise StorageError(
            f"{folder} needs {need_bytes} bytes of disk and {free_bytes} are free; make room, or "
            "choose another folder."
        )


def unwritable_folder(path: Path, error: OSError) -> StorageError:
    """Make the error for a folder of a model that is written, or a file in it."""
    problem = f"cannot be written: {error.strerror or error}"
    return StorageError(f"{path} {problem}; choose another folder.")


def _file_bytes(path: Path) -> int | None:
    """Return the size of the file at `path`, None if there is none.

    Raises StorageError if it cannot be determined: the folder is closed, or a name too long.
    """
    try:
        facts = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise unwritable_folder(path, error) from error
    return facts.st_size if stat.S_ISREG(facts.st_mode) else None


def _free_text(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free} bytes are free there"
    except OSError:
        return "its disk cannot be asked for free space"
