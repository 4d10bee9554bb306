"""Writes safetensors files as a stream: header first, then one tensor after the other.

A file appears under its name only when it is whole; until then it is `NAME.partial`, which is
removed on any failure. Knows nothing of models; what the bytes mean is the caller's business.

The format: eight bytes little-endian header length, a JSON header padded with spaces so that
the data starts on a multiple of eight, the data without holes in the header's order.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol

from lowtide.errors import InternalError, StorageError

ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I8": 1, "U8": 1, "I16": 2, "I32": 4, "I64": 8}

_LEAST_ALIGNMENT = 8

Buffer = bytes | bytearray | memoryview


class OutputTensor(NamedTuple):
    """One tensor of a file to be written."""

    name: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class OutputFile(Protocol):
    """What the writer needs of a file; tests hand in one that fails where they want."""

    def write(self, data: Buffer, /) -> int | None: ...
    def flush(self) -> None: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...


OpenFile = Callable[[Path], OutputFile]


def open_for_writing(path: Path) -> OutputFile:
    """A new file. Tensors are large, so nothing of it is buffered or kept in the page cache."""
    return _UncachedFile(path)


class SafetensorsWriter:
    """A file being written; use it as a context manager.

    Leaving the block normally makes the file whole under its own name, leaving it by any
    exception (Ctrl-C too) removes every byte.
    """

    def __init__(
        self,
        path: Path,
        entries: Sequence[OutputTensor],
        *,
        metadata: Mapping[str, str] | None = None,
        alignment: int = _LEAST_ALIGNMENT,
        open_file: OpenFile = open_for_writing,
    ) -> None:
        """Nothing is written yet. alignment: of the data in the file, in bytes. Raises
        InternalError for two tensors of one name."""
        if len({e.name for e in entries}) != len(entries):
            raise InternalError(f"{path.name} would hold two tensors of one name.")
        self.path = path
        self.entries = tuple(entries)
        self._header = header_bytes(entries, metadata or {}, alignment)
        # Once: it is asked for at every write.
        self._num_bytes = len(self._header) + sum(e.num_bytes for e in entries)
        self._open_file = open_file
        self._partial = partial_path(path)
        self._file: OutputFile | None = None
        self._written_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Size of the finished file."""
        return self._num_bytes

    @property
    def is_whole(self) -> bool:
        """Whether a file of that size is there: it appears under its name only when it is whole.
        Raises StorageError where it cannot be known."""
        return file_bytes(self.path) == self._num_bytes

    @property
    def missing_bytes(self) -> int:
        """What is left to write, with what an earlier run was killed over given back. Raises
        StorageError."""
        return 0 if self.is_whole else self._num_bytes - (file_bytes(self._partial) or 0)

    def __enter__(self) -> SafetensorsWriter:
        """Raises StorageError if the disk has too little room or the file cannot be made."""
        try:
            self._partial.unlink(missing_ok=True)  # of a killed run: written again, and in its room
            check_disk_space(self.path.parent, self.num_bytes)
            self._file = self._open_file(self._partial)
            self._write_all(self._header)
        except BaseException as error:
            self._discard()
            self._raise_storage_error(error)
            raise
        return self

    def write(self, data: Buffer) -> None:
        """The next bytes of the data, in pieces of any size. Raises StorageError."""
        try:
            self._write_all(data)
        except OSError as error:
            self._raise_storage_error(error)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._discard()
            return
        try:
            self._finish()
        except BaseException as failure:
            self._discard()
            self._raise_storage_error(failure)
            raise

    def _write_all(self, data: Buffer) -> None:
        if self._file is None:
            raise InternalError(f"{self.path.name} is not open for writing.")
        rest = memoryview(data).cast("B")
        if self._written_bytes + len(rest) > self.num_bytes:
            raise InternalError(f"{self.path.name}: more data than its header declares.")
        while len(rest):
            # The kernel may take less than it is given, at most 2 GiB in one call.
            num_bytes = _write_some(self._file, rest)
            self._written_bytes += num_bytes
            rest = rest[num_bytes:]

    def _finish(self) -> None:
        if self._file is None or self._written_bytes != self.num_bytes:
            raise InternalError(
                f"{self.path.name}: {self._written_bytes} of {self.num_bytes} bytes were written."
            )
        file, self._file = self._file, None
        try:
            file.flush()
            os.fsync(file.fileno())
        finally:
            file.close()
        os.replace(self._partial, self.path)

    def _discard(self) -> None:
        file, self._file = self._file, None
        try:
            if file is not None:
                file.close()
        except OSError:
            pass  # closing may report the failure that is on its way up already
        finally:
            with suppress(OSError):
                self._partial.unlink()

    def _raise_storage_error(self, error: BaseException) -> None:
        if isinstance(error, OSError):
            raise StorageError(
                f"Writing {self.path} failed after {self._written_bytes} of {self.num_bytes} "
                f"bytes: {error.strerror or error}; {_free_text(self.path.parent)}."
            ) from error


def write_text_file(path: Path, text: str, *, open_file: OpenFile = open_for_writing) -> None:
    """Writes a small file whole or not at all. Raises StorageError."""
    partial = partial_path(path)
    try:
        _write_and_sync(partial, text.encode(), open_file)
        os.replace(partial, path)
    except OSError as error:
        raise StorageError(
            f"Writing {path} failed: {error.strerror or error}; {_free_text(path.parent)}."
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def partial_path(path: Path) -> Path:
    """Where a file lies while it is being written."""
    return path.with_name(path.name + ".partial")


def file_bytes(path: Path) -> int | None:
    """Size of the file at `path`, None where there is none. Raises StorageError where it cannot be
    say: the folder is closed, or a name too long."""
    try:
        facts = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}.") from error
    return facts.st_size if stat.S_ISREG(facts.st_mode) else None


def header_bytes(
    entries: Sequence[OutputTensor],
    metadata: Mapping[str, str],
    alignment: int = _LEAST_ALIGNMENT,
) -> bytes:
    """The eight length bytes and the padded JSON header of a file with these tensors."""
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
    """Raises StorageError if a folder's disk has less free space than this, also of a folder that
    is still to be made."""
    try:
        present = next((each for each in (folder, *folder.parents) if each.exists()), folder)
        free_bytes = shutil.disk_usage(present).free
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error.strerror or error}.") from error
    if free_bytes < need_bytes:
        raise StorageError(
            f"{folder} needs {need_bytes} bytes of disk and {free_bytes} are free; make room, or "
            "choose another folder."
        )


class _UncachedFile:
    """Sends each stretch to the disk as soon as it is written, and gives its pages back.

    Otherwise a checkpoint larger than memory drives everything else out of the page cache, and
    the kernel spends longer on finding fresh pages than on writing: 2 GB took 4.3 s this way,
    6 to 11 s without, interleaved on one machine.
    """

    _STRETCH_BYTES = 32 << 20

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb", buffering=0)
        self._num_bytes = 0
        self._synced_bytes = 0

    def write(self, data: Buffer, /) -> int:
        num_bytes = self._file.write(memoryview(data)[: self._STRETCH_BYTES]) or 0
        self._num_bytes += num_bytes
        if self._num_bytes - self._synced_bytes >= self._STRETCH_BYTES:
            self._give_back()
        return num_bytes

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()

    def _give_back(self) -> None:
        if hasattr(os, "posix_fadvise"):  # not everywhere; it only saves time and memory
            os.fdatasync(self.fileno())
            stretch = self._num_bytes - self._synced_bytes
            os.posix_fadvise(self.fileno(), self._synced_bytes, stretch, os.POSIX_FADV_DONTNEED)
        self._synced_bytes = self._num_bytes


def _write_and_sync(path: Path, data: bytes, open_file: OpenFile) -> None:
    file = open_file(path)
    try:
        rest = memoryview(data)
        while len(rest):
            rest = rest[_write_some(file, rest) :]
        file.flush()
        os.fsync(file.fileno())
    finally:
        file.close()


def _write_some(file: OutputFile, data: memoryview) -> int:
    num_bytes = file.write(data)
    if not num_bytes:
        raise OSError("nothing was written")
    return num_bytes


def _free_text(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free} bytes are free there"
    except OSError:
        return "its disk cannot be asked for free space"
