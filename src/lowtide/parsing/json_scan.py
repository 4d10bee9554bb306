"""Find the end of a JSON value that comes in parts, and track its strings."""

from __future__ import annotations

import re

_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = {"{}": re.compile(r'["{}]'), "[]": re.compile(r'["\[\]]')}


class JsonScan:
    """Scanner of one object or list: strings and its own kind of brackets.

    depth: brackets that are open already. Other JSON syntax is not checked.
    """

    def __init__(self, depth: int = 0, brackets: str = "{}") -> None:
        self.is_string = False  # the next character is a string's
        self._depth, self._opening = depth, brackets[0]
        self._outside = _OUTSIDE[brackets]
        self._is_escaped = False

    def end(self, text: str) -> int | None:
        """Take more of the text; return where the value ends in it, or None where it goes on."""
        place = 0
        while place < len(text):
            if self._is_escaped:
                self._is_escaped = False
                place += 1
                continue
            found = (_IN_STRING if self.is_string else self._outside).search(text, place)
            if found is None:
                return None
            char, place = found[0], found.end()
            if char == "\\":
                self._is_escaped = True
            elif char == '"':
                self.is_string = not self.is_string
            else:
                self._depth += 1 if char == self._opening else -1
                if self._depth <= 0:
                    return place
        return None
