"""A grammar in llguidance's Lark while it is written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lowtide.errors import UsageError
from lowtide.files.long_json import write_json
from lowtide.serve.exact_integers import check_integers, without_inexact

BLANKS = r"[ \t\r\n]{1,64}"
"""White space between JSON's parts: without a bound a model may write line breaks to the limit."""

MAX_GRAMMAR_CHARS = 256 << 10

MAX_IN_ANY_ORDER = 64
"""Most parts that are taken in any order: llguidance counts them in a number of 64 bits."""


class LarkText:
    """Collects numbered rules and the other grammars that they use.

    Raises UsageError once they are too long: each of a thousand parameters may bring a copy of the
    schema that it refers to.
    """

    def __init__(self) -> None:
        self._rules = [r"TEXT: /(.|\n)*/"]
        self._others: list[dict[str, str]] = []
        self._num_chars = 0

    def rule(self, body: str, option: str = "") -> str:
        """Add a rule; return its name."""
        name = self.later()
        self.define(name, body, option)
        return name

    def later(self) -> str:
        """Return the name of a rule that `define` adds, and that may refer to itself."""
        self._rules.append("")
        return f"rule_{len(self._rules) - 1}"

    def define(self, name: str, body: str, option: str = "") -> None:
        self._num_chars += len(body)
        check_length(self._num_chars)
        self._rules[int(name.removeprefix("rule_"))] = f"{name}{option}: {body}"

    def in_any_order(self, pairs: Iterable[tuple[str, bool]], separator: str = "") -> str:
        """Return an expression of parts in any order, each once at most, with a separator between.

        Those that are paired with True must all occur. More than `MAX_IN_ANY_ORDER` have to keep
        their order.
        """
        parts, num_chars = list[tuple[str, bool]](), 0
        for part, is_required in pairs:  # each may be long, as they may share what they refer to
            num_chars += len(part)
            check_length(num_chars)
            parts.append((part, is_required))
        if not parts:
            return '""'
        if len(parts) > MAX_IN_ANY_ORDER:
            return self._in_order(parts, separator)
        ones = [self.rule(part) for part, _ in parts]
        bits = sorted(range(len(parts)), key=lambda place: not parts[place][1])
        num_required = sum(is_required for _, is_required in parts)
        end = f'"" %if is_ones([0:{num_required}])' if num_required else '""'
        first = self.later()
        more = self.later() if separator else first
        for name, before in {first: "", more: separator}.items():
            options = [
                f"{before} {ones[place]} {more}::set_bit({bit}) %if bit_clear({bit})"
                for bit, place in enumerate(bits)
            ]
            self.define(name, " | ".join([end, *options]), "::_")
        return f"{first}::0x0"

    def _in_order(self, parts: Sequence[tuple[str, bool]], separator: str) -> str:
        """Write a rule of optional and required parts in their order.

        With a separator, required parts come first, so that each further part can bring its
        separator.
        """
        if not separator:
            return " ".join(part if is_required else f"({part})?" for part, is_required in parts)
        needed = [part for part, is_required in parts if is_required]
        others = [part for part, is_required in parts if not is_required]
        more = " ".join(f"({separator} {part})?" for part in others)
        if needed:
            return f"{f' {separator} '.join(needed)} {more}"
        begins, num_chars = [], 0
        for place, part in enumerate(others):
            rest = " ".join(f"({separator} {after})?" for after in others[place + 1 :])
            begins.append(f"{part} {rest}")
            num_chars += len(begins[-1])
            check_length(num_chars)
        return f"({' | '.join(begins)})?"

    def text_without(self, mark: str) -> str:
        """Return the name of a terminal for text without a mark; for any text if the mark is ""."""
        if not mark:
            return "TEXT"
        return self.terminal(rf"TEXT & ~/(.|\n)*{re.escape(mark)}(.|\n)*/")

    def terminal(self, body: str) -> str:
        """Add a terminal; return its name."""
        name = f"TERMINAL_{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def schema(self, schema: Mapping[str, Any], is_lenient: bool = False) -> str:
        """Add a rule for JSON that fits a schema; return its name.

        is_lenient: ignore unsupported keywords. Raises UsageError for integers that the grammar
        cannot enforce exactly.
        """
        if is_lenient:
            schema = without_inexact(schema)
        check_integers(schema)
        options = {"whitespace_pattern": BLANKS, "lenient": is_lenient}
        return self.rule(f"%json {write_json({**schema, 'x-guidance': options})}")

    def grammar(self, lark: str) -> str:
        """Add a complete grammar; return its name."""
        name = f"other_{len(self._others)}"
        self._others.append({"name": name, "lark_grammar": lark})
        return f"@{name}"

    def whole(self, start: str) -> str:
        """Return all grammars in llguidance's JSON form."""
        lark = "\n".join([f"start: {start}", *self._rules])
        return json.dumps({"grammars": [{"lark_grammar": lark}, *self._others]})


def check_length(num_chars: int) -> None:
    """Raise UsageError for a grammar that is too long."""
    if num_chars > MAX_GRAMMAR_CHARS:
        raise UsageError(
            f"The form and its tools make a grammar of at least {num_chars} characters; at most "
            f"{MAX_GRAMMAR_CHARS} are accepted."
        )
