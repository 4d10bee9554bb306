"""Markdown of a model's text as a tree of plain elements, for the page to build.

No HTML is made: the page makes each element by its name, and text stays text. HTML in the text is
text. Links lead to http and https alone, and images become links.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token

Node = str | list[Any]
"""A text, or an element: its tag, its attributes, its children."""

MAX_CHARS = 32 << 10
"""Longest text that is rendered: more would take seconds of the interpreter's lock."""

MAX_DEPTH = 12
"""Deepest nesting of lists and quotes; deeper ones stay text."""

FIRST_HEADING, LAST_HEADING = 3, 6
"""Levels of headings in an answer: the page has those above."""

_LINKS = ("http://", "https://")

_SAFE_LINK = {"rel": "noopener noreferrer", "target": "_blank"}


def _parser() -> MarkdownIt:
    parser = MarkdownIt("js-default", {"html": False, "maxNesting": MAX_DEPTH})
    parser.validateLink = lambda url: url.lower().startswith(_LINKS)  # type: ignore[method-assign]
    return parser


_PARSER = _parser()


def nodes_of(text: str) -> list[Node]:
    """Return the elements of a text."""
    return _built(_PARSER.parse(text))


def _built(tokens: Iterable[Token]) -> list[Node]:
    """Return the elements of markdown-it's flat list of tokens."""
    found: list[Node] = []
    open_lists = [found]  # of children, the innermost last
    heading = _Headings()
    for token in tokens:
        if token.hidden:  # a paragraph of a list without blank lines
            continue
        if token.nesting < 0:
            open_lists.pop()
            continue
        if token.type == "inline":
            open_lists[-1] += _built(token.children or ())
            continue
        tag = heading.tag(int(token.tag[1])) if token.type == "heading_open" else token.tag
        is_linked = any(each[:1] == ["a"] for each in open_lists)
        node = [tag, _attributes(token)] if token.nesting else _leaf(token, is_linked)
        open_lists[-1].append(node)
        if isinstance(node, list) and token.nesting > 0:
            open_lists.append(node)
    return found


class _Headings:
    """Gives headings levels below the page's own, without gaps."""

    def __init__(self) -> None:
        self._offset: int | None = None
        self._last = FIRST_HEADING - 1

    def tag(self, level: int) -> str:
        if self._offset is None:
            self._offset = FIRST_HEADING - level
        low = max(FIRST_HEADING, level + self._offset)
        self._last = min(low, self._last + 1, LAST_HEADING)
        return f"h{self._last}"


def _leaf(token: Token, is_linked: bool) -> Node:
    """Return an element without children. is_linked: it is part of a link."""
    match token.type:
        case "softbreak" | "hardbreak":  # as in other chats: a line of an answer stays one
            return ["br", {}]
        case "hr":
            return ["hr", {}]
        case "code_inline":
            return ["code", {}, token.content]
        case "fence" | "code_block":
            return ["pre", {}, ["code", {}, token.content]]
        case "image" if not is_linked:
            url = str(token.attrs["src"])
            return ["a", {"href": url, **_SAFE_LINK}, token.content or url]
        case _:
            return token.content


def _attributes(token: Token) -> dict[str, Any]:
    if token.type == "link_open":
        return {"href": token.attrs["href"], **_SAFE_LINK}
    if token.type == "ordered_list_open" and "start" in token.attrs:
        return {"start": token.attrs["start"]}
    if token.type in ("th_open", "td_open") and "style" in token.attrs:
        return {"class": str(token.attrs["style"]).replace("text-align:", "align-")}
    return {}
