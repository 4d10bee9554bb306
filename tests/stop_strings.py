"""Plain model of stop strings: the text that they leave."""

from __future__ import annotations

from collections.abc import Sequence


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """`text` before the earliest of the stop strings; all of it where there is none."""
    ends = [end for string in stop if (end := text.find(string)) >= 0]
    return text[: min(ends, default=None)]
