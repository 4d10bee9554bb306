"""Pages with parts that are written from results; all else in them is people's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from reporting.results import ResultsError

Block = Callable[[], str]
_PART = re.compile(r"<!-- measured: (\S+) -->\n(.*?)<!-- end of measured -->", re.DOTALL)
_MARK = re.compile(r"<!-- (?:measured: \S+|end of measured) -->")


def rewritten(page: str, blocks: Mapping[str, Block]) -> str:
    """The page with every part between `measured` marks as its block says.

    Raises:
        ResultsError: marks without partners, a part of unknown name, or results that a block lacks.
    """
    if len(_MARK.findall(page)) != 2 * len(_PART.findall(page)):
        raise ResultsError("A mark of a measured part stands without its partner.")
    return _PART.sub(lambda part: _part(part.group(1), blocks), page)


def part_names(page: str) -> list[str]:
    """The names of its measured parts, in order."""
    return [name for name, _ in _PART.findall(page)]


def _part(name: str, blocks: Mapping[str, Block]) -> str:
    if name not in blocks:
        raise ResultsError(f"No block is called {name!r}; there are {', '.join(sorted(blocks))}.")
    return f"<!-- measured: {name} -->\n{blocks[name]()}\n<!-- end of measured -->"
