"""A function that a model may call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call. parameters: the JSON schema of its arguments; strict:
    they are certain to be of it; grammar: in Lark, of the one text that it takes, or "".
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    strict: bool = False
    grammar: str = ""

    def declaration(self) -> dict[str, Any]:
        """As chat templates read it."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}
