"""Parse and format sizes in bytes."""

from __future__ import annotations

import re
from fractions import Fraction

from lowtide.errors import UsageError
from lowtide.files.json_file import shown

MAX_SIZE_BYTES = 2**63 - 1


def parse_size(text: str | int, total: int | None = None) -> int:
    """Parse a size: "10GiB", "10GB", "1.5 MiB", "12G", "4096" or "80%" of `total`.

    A letter alone is a binary unit: "12G" is 12 GiB. A fraction of a byte is dropped. Raises
    UsageError for anything else, also for a bare number too small to be meant as bytes.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return _checked_bytes(text, text)
    match = _SIZE.fullmatch(text.strip()) if isinstance(text, str) and len(text) <= 64 else None
    if match is None:
        raise UsageError(f"{shown(text)} is not a size; write bytes, 12GiB, 12G, 12GB or 80%.")
    number, unit = Fraction(match[1]), match[2].lower()
    if not unit:
        return _checked_bytes(number, text)
    if unit != "%":
        return _checked_size(int(number * _UNIT_BYTES[unit]), text)
    if total is None:
        raise UsageError(f"{shown(text)} needs a whole to be a share of; write it in bytes or GiB.")
    if number > 100:
        raise UsageError(f"{shown(text)} is more than there is; write at most 100%.")
    return _checked_size(int(number * total / 100), text)


def format_size(num_bytes: int) -> str:
    """Format bytes in binary units: "30.3 GiB", "512 B"."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB"):
        if abs(size) < 1023.95:  # 1023.96 KiB would print as 1024.0 KiB
            break
        size, unit = size / 1024, larger
    return f"{num_bytes} B" if unit == "B" else f"{size:.1f} {unit}"


_LEAST_BYTES = 1000
"""Smaller bare numbers are probably meant in GiB."""
_UNIT_BYTES = {
    "b": 1,
    **{letter: 1024 ** (i + 1) for i, letter in enumerate("kmgtp")},
    **{f"{letter}b": 1000 ** (i + 1) for i, letter in enumerate("kmgtp")},
    **{f"{letter}ib": 1024 ** (i + 1) for i, letter in enumerate("kmgtp")},
}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(%|b|[kmgtp](?:i?b)?|)", re.IGNORECASE | re.ASCII)


def _checked_bytes(number: int | Fraction, text: object) -> int:
    """Check a bare number of bytes; 0 is allowed."""
    if 0 < number < _LEAST_BYTES or int(number) != number:
        raise UsageError(
            f"{shown(text)} would be bytes; did you mean {float(number):g}GiB? "
            "Write the unit: 12GiB, 12G, 12GB or 80%."
        )
    return _checked_size(int(number), text)


def _checked_size(num_bytes: int, text: object) -> int:
    if not 0 <= num_bytes <= MAX_SIZE_BYTES:
        raise UsageError(f"A size must be from 0 to {MAX_SIZE_BYTES} bytes, not {shown(text)}.")
    return num_bytes
