"""The folder of a packing: locked by one process, with notes that identify its contents."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

from lowtide.config.quantisation import PACKED_METHOD
from lowtide.errors import CheckpointError, UsageError
from lowtide.files.json_file import parse_object
from lowtide.model_writing.safetensors_writer import check_disk_space, unwritable_folder

_NOTES = "packing.json"
_MAX_NOTES_BYTES = 64 << 20
_NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO)  # of a link, a folder, a socket


@contextmanager
def reserved(out: Path, notes: Mapping[str, object], needed_bytes: int) -> Iterator[None]:
    """Lock the folder until everything is written, and note its source.

    Raises UsageError if it has other contents or is locked by another process, then StorageError if
    the disk has too little room; a refusal leaves nothing behind.
    """
    if not os.path.exists(out):
        check_disk_space(out, needed_bytes)  # before it is made
    with _opened_notes(out) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UsageError(f"Another process packs into {out}; wait for it.") from error
        found = file.read(_MAX_NOTES_BYTES + 1) or b""
        text = json.dumps(notes, sort_keys=True).encode()
        if found and not _are_notes(found):
            raise UsageError(_what_is_there(out, _NOTES, is_interrupted=False))
        try:
            if found != text:  # else they stay: a full disk may not take them once more
                _check_is_empty(out, is_interrupted=bool(found))
            check_disk_space(out, needed_bytes)
            if found != text:
                _replace(file, text)
        except BaseException as error:
            if not found:
                (out / _NOTES).unlink()
            if isinstance(error, OSError):
                raise unwritable_folder(out, error) from error
            raise
        yield
        (out / _NOTES).unlink()


def _opened_notes(out: Path) -> FileIO:
    """Open the notes in a folder, creating empty ones.

    Raises UsageError if something else has their name, StorageError if they cannot be created.
    """
    # A link would have another file written, a pipe would be waited for.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
    try:
        out.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(out / _NOTES, flags, 0o644)
    except OSError as error:
        if error.errno in _NO_FILE and os.path.lexists(out / _NOTES):
            raise UsageError(_what_is_there(out, _NOTES, is_interrupted=False)) from error
        raise unwritable_folder(out, error) from error
    file = FileIO(descriptor, "r+")  # with no buffer, whose end would fail once more
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise UsageError(_what_is_there(out, _NOTES, is_interrupted=False))
    return file


def _are_notes(text: bytes) -> bool:
    """Return True if a text is a packing's notes."""
    with suppress(CheckpointError):
        is_whole = len(text) <= _MAX_NOTES_BYTES
        return is_whole and parse_object(text, _NOTES).keys() == {"source", "formats", "inputs"}
    return False


def _check_is_empty(out: Path, is_interrupted: bool) -> None:
    """Raise UsageError if the folder has more than notes."""
    others = sorted(path.name for path in out.iterdir() if path.name != _NOTES)
    if others:
        raise UsageError(_what_is_there(out, others[0], is_interrupted))


def _replace(file: FileIO, text: bytes) -> None:
    file.seek(0)
    file.truncate()
    while text:
        text = text[file.write(text) :]


def _what_is_there(out: Path, name: str, is_interrupted: bool) -> str:
    """Explain why nothing is packed into a folder, and what to do."""
    if is_interrupted:
        return (
            f"{out} holds {name}, which is not of this packing: one that was interrupted had other "
            "formats, or its source has changed since. Remove it, or choose a new folder."
        )
    with suppress(OSError, ValueError, TypeError, LookupError):  # whatever else may lie there
        packed: Any = config_of(out)["quantization_config"]
        if packed["quant_method"] == PACKED_METHOD:
            experts, dense = packed["formats"]["experts"], packed["formats"]["dense"]
            return (
                f"{out} is packed already, whole, with experts in {experts} and dense weights in "
                f"{dense}: run it as it is. To pack once more, remove it or choose a new folder."
            )
    return f"{out} holds {name}, which is not of this packing; choose a new folder."


def config_of(folder: Path) -> dict[str, object]:
    config: dict[str, object] = json.loads((folder / "config.json").read_bytes())
    return config
