"""Reads small JSON files of a model folder, trusting nothing about them.

Bounds the size, refuses a key that is given twice, and turns every way a file can be wrong into
one typed error. Knows nothing of what the keys mean.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from lowtide.errors import CheckpointError

_SHOWN_CHARS = 120
_SHOWN_BITS = 256  # a longer integer is described: printing it could cost more than reading it


def read_object(
    path: Path, max_bytes: int, error: type[CheckpointError] = CheckpointError
) -> dict[str, Any]:
    """The JSON object in the file at `path`; raises `error` if there is none to be had."""
    size = file_bytes(path, error)
    if size > max_bytes:
        raise error(f"{path} has {size} bytes; at most {max_bytes} are read.")
    try:
        data = path.read_bytes()
    except OSError as reason:
        raise error(f"{path} cannot be read: {reason.strerror}.") from reason
    return parse_object(data, str(path), error)


def parse_object(
    data: bytes, source: str, error: type[CheckpointError] = CheckpointError
) -> dict[str, Any]:
    """The JSON object that `data` is, in UTF-8; `source` names it in the `error` raised if not."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_object)
    except RecursionError:
        raise error(f"{source} is nested too deeply to be read.") from None
    except ValueError as reason:
        raise error(f"{source} is not valid JSON: {shown(reason)}.") from None
    if not isinstance(value, dict):
        raise error(f"{source} must hold a JSON object, not a {type(value).__name__}.")
    return value


def file_bytes(path: Path, error: type[CheckpointError] = CheckpointError) -> int:
    """Size of a regular file (or of the one that a link leads to); raises `error` otherwise."""
    try:
        status = path.stat()
    except FileNotFoundError:
        raise error(f"{path} is missing.") from None
    except (OSError, ValueError) as reason:
        raise error(f"{path} cannot be read: {shown(reason)}.") from reason
    if not stat.S_ISREG(status.st_mode):
        raise error(f"{path} is not a regular file.")
    return status.st_size


def shown(value: object) -> str:
    """`value` as an error message can print it: escaped, and cut where it gets long."""
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str | bytes):
        text = repr(value[: _SHOWN_CHARS + 1])
    elif isinstance(value, dict | list | tuple):
        text = f"a {type(value).__name__} of {len(value)} values"
    elif isinstance(value, Exception):
        text = str(value).encode("ascii", "backslashreplace").decode("ascii")
    else:
        text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {shown(key)} occurs twice in one object")
            seen.add(key)
    return result
