"""Read small JSON files of a model folder without trusting them.

Bounds the size, refuses duplicate keys, and turns every defect of a file into one typed error.
Knows nothing of what the keys mean.
"""

from __future__ import annotations

import codecs
import difflib
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lowtide.errors import CheckpointError, LowtideError
from lowtide.files.mistaken import HEAD_BYTES, mistaken
from lowtide.files.regular_file import FETCH_AGAIN, read_regular

MAX_VALUES = 4_000_000
"""Most separators and brackets in a file: half a million tensors, 100 bytes each parsed."""

_SHOWN_CHARS = 120
_SHOWN_BITS = 256  # a longer integer is described: printing it could cost more than reading it


def read_object(
    path: Path,
    max_bytes: int,
    error: type[LowtideError] = CheckpointError,
    way_out: str = FETCH_AGAIN,
) -> dict[str, Any]:
    """Read the JSON object in a file; raises `error` for anything else, with this `way_out`."""
    data = read_regular(path, max_bytes, error, way_out).removeprefix(codecs.BOM_UTF8)
    return parse_object(data, str(path), error, way_out)


def parse_object(
    data: bytes,
    source: str,
    error: type[LowtideError] = CheckpointError,
    way_out: str = FETCH_AGAIN,
) -> dict[str, Any]:
    """Parse a JSON object in UTF-8; `source` names it in the `error` raised for anything else."""
    num_values = sum(data.count(mark) for mark in (b",", b"[", b"{"))
    if num_values > MAX_VALUES:
        problem = f"has about {num_values} values; at most {MAX_VALUES} are read"
        raise error(f"{source} {problem}; {way_out}.")
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_object)
    except RecursionError:
        raise error(f"{source} is nested too deeply to be read; {way_out}.") from None
    except ValueError as reason:
        found = mistaken(data[:HEAD_BYTES])
        if found:
            raise error(f"{source} is {found}.") from None
        problem = f"is not valid JSON: {shown(reason)}" if data.strip() else "is empty"
        raise error(f"{source} {problem}; {way_out}.") from None
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise error(f"{source} must hold a JSON object, not a {kind}; {way_out}.")
    return value


def fault_of(error: Exception) -> str:
    """Return an error's text without Python's advice to programmers.

    It has some for integers of thousands of digits.
    """
    return str(error).partition("; use sys.")[0]


def shown(value: object) -> str:
    """Format a value for an error message: escaped, and cut if it is long."""
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str | bytes):
        text = repr(value[: _SHOWN_CHARS + 1])
    elif isinstance(value, dict | list | tuple):
        text = f"a {type(value).__name__} of {len(value)} values"
    elif isinstance(value, Exception):
        text = printable(fault_of(value).encode("ascii", "backslashreplace").decode("ascii"))
    else:
        text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."


def meant(name: str, known: Iterable[str]) -> str:
    """Return ` Did you mean NAME?` for an unknown name, or "" if none is similar."""
    near = difflib.get_close_matches(str(name), [*known], 1)
    return f" Did you mean {near[0]}?" if near else ""


def listed(names: Sequence[str]) -> str:
    """Format the first few of many names for a message."""
    first = ", ".join(names[:3])
    return first if len(names) <= 3 else f"{first} and {len(names) - 3} more"


def printable(text: str) -> str:
    """Escape characters that could move a terminal's cursor or change its colour."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def as_text(name: str) -> str:
    """Return a file's name in Unicode, with bytes that are not UTF-8 replaced."""
    return os.fsencode(name).decode(errors="replace")


def as_json(value: Any) -> Any:
    """Convert a value for JSON: numpy's numbers to Python's, infinities and NaN to null."""
    if isinstance(value, Mapping):
        return {str(key): as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    if hasattr(value, "tolist"):
        return as_json(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {shown(key)} occurs twice in one object")
    return result
