"""Custom tools: one text for the API's client, a function of one parameter for the model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from lowtide.parsing.call_json import parsed
from lowtide.parsing.tools import Tool
from lowtide.serve.conversation import joined
from lowtide.serve.grammar_text import Constraint

_INPUT = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_CHARACTERS = re.compile(
    r'(?:[^"\\]+|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|\\u(?=[0-9a-fA-F]{0,3}[^0-9a-fA-F]))*"
)
"""Complete characters inside a JSON string: no partial escape or surrogate pair at the end."""

_OF_ESCAPES = "\\u0123456789abcdefABCDEF"


def custom_tool(name: str, description: str, grammar: tuple[str, str] | None) -> Tool:
    """Make a function tool with one text parameter, `input`.

    grammar: syntax and definition of the text; shown to the model and, if Lark or regex, enforced.
    """
    lark = ""
    if grammar is not None:
        syntax, definition = grammar
        description = joined(
            [description, f"The input is a text of this grammar ({syntax}):", definition]
        )
        forms = {"lark": Constraint.lark, "regex": Constraint.regex}
        lark = forms[syntax](definition).text if syntax in forms else ""
    parameters = {
        "type": "object",
        "properties": {"input": {"type": "string", "description": "The whole input, as a text."}},
        "required": ["input"],
    }
    return Tool(name, description, parameters, grammar=lark)


def custom_arguments(text: str) -> str:
    """Return the function's JSON arguments for a custom call's text."""
    return json.dumps({"input": text}, ensure_ascii=False)


class CustomInput:
    """Extracts a custom call's text from streamed JSON arguments."""

    def __init__(self) -> None:
        self._arguments = self._sent = ""
        self._place = 0  # in the arguments, after what was sent; 0: the text has not begun

    def push(self, arguments: str) -> str:
        """Add arguments; return the new text that is certain."""
        self._arguments += arguments
        begin = None if self._place else _INPUT.match(self._arguments)
        self._place = begin.end() if begin else self._place
        found = _CHARACTERS.match(self._arguments, self._place) if self._place else None
        if found is None:
            return ""
        self._place = found.end()
        text = _decoded(found[0])
        self._sent += text
        return text

    def finish(self) -> str:
        """Return the rest of the text; all arguments as they are if they have another form."""
        value = parsed(self._arguments)
        text = value.get("input") if isinstance(value, Mapping) else None
        if isinstance(text, str) and text.startswith(self._sent):
            return text[len(self._sent) :]
        if value is None and self._place:  # no JSON: quotes that are not escaped
            return _without_end(self._arguments[self._place :])
        return "" if self._place else self._arguments


def _without_end(text: str) -> str:
    """Remove the JSON string's quote and brace, or an escape that was cut off."""
    body = text.rstrip().removesuffix("}").rstrip()
    if body.endswith('"'):
        return body[:-1]
    place = text.find("\\", len(text.rstrip(_OF_ESCAPES)))
    return text if place < 0 else text[:place]


def _decoded(text: str) -> str:
    """Decode the inside of a JSON string leniently.

    Models forget escapes: a lone backslash stands for itself, and raw line breaks are accepted.
    """
    escaped = re.sub(
        r'(\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))|\\', lambda found: found[1] or r"\\", text
    )
    return str(json.loads(f'"{escaped}"', strict=False))
