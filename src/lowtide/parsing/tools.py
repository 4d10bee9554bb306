from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call.

    parameters: the JSON schema of its arguments.
    strict: the arguments are forced to match the schema.
    grammar: in Lark, of its only string parameter, or "".
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    strict: bool = False
    grammar: str = ""

    def declaration(self) -> dict[str, Any]:
        """Return the declaration that chat templates read."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}
