"""Parse and write large JSON values without blocking other threads.

The library's C code holds the interpreter lock from the first value to the last, a fifth of a
second for 250,000 values, during which a server's event loop stands still. Its Python code does
not.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

FEW_VALUES = 8192
"""Largest number of values handled by C code at once, in a few milliseconds."""


def parse_json(text: str, parse_number: Callable[[str], Any] | None = None) -> Any:
    """Parse JSON as `json.loads`; parse_number: for floats, NaN and Infinity."""
    decoder = json.JSONDecoder(parse_float=parse_number, parse_constant=parse_number)
    if sum(map(text.count, ",[{")) > FEW_VALUES:
        decoder.scan_once = json.scanner.py_make_scanner(decoder)  # type: ignore[attr-defined]
    return decoder.decode(text)


def write_json(value: object, *, ensure_ascii: bool = True) -> str:
    """Write JSON as `json.dumps`."""
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii)
    if has_few_values(value):
        return encoder.encode(value)
    return "".join(encoder.iterencode(value))


def has_few_values(value: object) -> bool:
    """Return True if a value holds at most `FEW_VALUES` values."""
    num_left, level = FEW_VALUES, [value]
    while level:
        num_left -= len(level)
        below: list[object] = []
        for each in level:
            if isinstance(each, dict | list | tuple):
                if len(each) > num_left:
                    return False
                below.extend(each.values() if isinstance(each, dict) else each)
        level = below
    return num_left >= 0
