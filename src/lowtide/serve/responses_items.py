"""The items of `/v1/responses`, in and out of a conversation.

Tools keep two names: the flat one that the model calls them by, and the form in which the API's
client knows them (in a namespace, or as a custom tool whose input is a text and not JSON).
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lowtide.parsing.call_json import parsed
from lowtide.parsing.tools import Tool
from lowtide.serve.conversation import ToolCall, Turn, joined, unread
from lowtide.serve.errors import Refusal
from lowtide.serve.json_fields import name_at, object_at, objects_at, text_at

_SEALED = "lowtide:"

_INPUT = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_CHARACTERS = re.compile(
    r'(?:[^"\\]+|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|\\u(?=[0-9a-fA-F]{0,3}[^0-9a-fA-F]))*"
)
"""Whole characters of a JSON text: neither half an escape nor half of a surrogate pair."""

_CLOSED = re.compile(r'(?:"\s*\}?\s*|\\[\\u0-9a-fA-F]*)\Z')
"""The end of such a text: its quote and brace, or an escape that was cut."""

_TEXT_PARTS = {"input_text", "output_text", "text", "summary_text", "reasoning_text"}

_HOSTED_ITEMS = {
    "code_interpreter_call",
    "computer_call",
    "file_search_call",
    "image_generation_call",
    "mcp_list_tools",
    "tool_search_call",
    "tool_search_output",
    "web_search_call",
}
"""Traces of tools that run at a provider: a model that knows its answer needs none of them."""

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


@dataclass(frozen=True, slots=True)
class ToolForm:
    """How a tool is called in the API. is_custom: with a text in place of JSON arguments."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass(slots=True)
class ToolSet:
    """A request's tools: what the model is shown, by flat name, and their forms in the API.

    ignored: types of tools that a provider would run itself.
    """

    tools: dict[str, Tool] = field(default_factory=dict)
    forms: dict[str, ToolForm] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)

    def add(self, declared: object, where: str, namespace: str | None = None) -> None:
        """Takes a list of tools in the API's form; one that comes again replaces the earlier."""
        for i, tool in enumerate(objects_at(declared, where)):
            place = f"{where}[{i}]"
            kind = text_at(tool.get("type"), f"{place}.type")
            if kind == "namespace" and namespace is None:
                name = name_at(tool.get("name"), f"{place}.name")
                self.add(tool.get("tools"), f"{place}.tools", name)
            elif kind in ("function", "custom"):
                self._add_one(tool, place, namespace)
            else:
                self.ignored.append(f"tools.{kind}")

    def _add_one(self, tool: Mapping[str, Any], where: str, namespace: str | None) -> None:
        is_custom = tool["type"] == "custom"
        form = ToolForm(name_at(tool.get("name"), f"{where}.name"), namespace, is_custom)
        description = text_at(tool.get("description") or "", f"{where}.description")
        if is_custom:
            shown = _custom_tool(flat_name(form.name, namespace), description, tool, where)
        else:
            parameters = object_at(tool.get("parameters") or {}, f"{where}.parameters")
            is_strict = tool.get("strict") is True
            shown = Tool(flat_name(form.name, namespace), description, parameters, is_strict)
        self.tools[shown.name], self.forms[shown.name] = shown, form


def flat_name(name: str, namespace: str | None) -> str:
    """What the model calls a tool: a chat template knows no namespaces."""
    return name if not namespace else f"{namespace.rstrip('_')}__{name.lstrip('_')}"


def _custom_tool(name: str, description: str, tool: Mapping[str, Any], where: str) -> Tool:
    """A function of one text. The model is told its grammar, and held to a Lark one."""
    format, grammar = object_at(tool.get("format") or {}, f"{where}.format"), ""
    if format.get("type") == "grammar":
        syntax = text_at(format.get("syntax"), f"{where}.format.syntax")
        definition = text_at(format.get("definition"), f"{where}.format.definition")
        description = joined(
            [description, f"The input is a text of this grammar ({syntax}):", definition]
        )
        grammar = definition if syntax == "lark" else ""
    parameters = {
        "type": "object",
        "properties": {"input": {"type": "string", "description": "The whole input, as a text."}},
        "required": ["input"],
    }
    return Tool(name, description, parameters, grammar=grammar)


class CustomInput:
    """The text of a custom tool's call, from the arguments with which its function is called, as
    they come."""

    def __init__(self) -> None:
        self._arguments = self._sent = ""
        self._place = 0  # in the arguments, behind what was sent; 0: the text has not begun

    def push(self, arguments: str) -> str:
        """What is certain of the text with more of the arguments."""
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
        """What is left of it: all, where the arguments have another form."""
        value = parsed(self._arguments)
        text = value.get("input") if isinstance(value, Mapping) else None
        if isinstance(text, str) and text.startswith(self._sent):
            return text[len(self._sent) :]
        if value is None and self._place:  # no JSON: quotes that are not escaped
            return _CLOSED.sub("", self._arguments[self._place :])
        return "" if self._place else self._arguments


def _decoded(text: str) -> str:
    """What stands in JSON between quotes. A backslash that escapes nothing is one, and line breaks
    are taken: models forget to escape them."""
    escaped = re.sub(
        r'(\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))|\\', lambda found: found[1] or r"\\", text
    )
    return str(json.loads(f'"{escaped}"', strict=False))


def sealed(reasoning: str) -> str:
    """Thoughts in the field that clients send back unread. Encoded, not encrypted."""
    return _SEALED + base64.b64encode(reasoning.encode()).decode()


def _unsealed(text: str) -> str:
    """Empty for what another server has sealed."""
    if not text.startswith(_SEALED):
        return ""
    try:
        return base64.b64decode(text.removeprefix(_SEALED), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""


@dataclass(slots=True)
class ItemReader:
    """Reads a request's input.

    tools: also those that came among the items. ignored: what was left out.
    """

    tools: ToolSet
    ignored: list[str] = field(default_factory=list)

    def turns(self, items: object) -> list[Turn]:
        """Raises Refusal for items that cannot be read, by their place."""
        if isinstance(items, str):
            return [Turn("user", items)]
        read = [
            self._turn(item, f"input[{i}]") for i, item in enumerate(objects_at(items, "input"))
        ]
        return [turn for turn in read if turn is not None]

    def _turn(self, item: Mapping[str, Any], where: str) -> Turn | None:
        """None for an item that is no turn."""
        kind = text_at(item.get("type", "message"), f"{where}.type")
        if kind == "message":
            role = _ROLES.get(text_at(item.get("role"), f"{where}.role"))
            if role is None:
                raise Refusal(f"{where}.role {item['role']!r:.80} is not known.", param=where)
            return Turn(role, _content(item.get("content"), f"{where}.content"))
        if kind == "reasoning":
            return Turn("assistant", "", _thoughts(item, where))
        if kind in ("function_call", "custom_tool_call"):
            return Turn("assistant", "", tool_calls=(_call(item, where),))
        if kind in ("function_call_output", "custom_tool_call_output"):
            call_id = name_at(item.get("call_id"), f"{where}.call_id")
            text = _content(item.get("output"), f"{where}.output", self.ignored)
            return Turn("tool", text, tool_call_id=call_id)
        if kind == "additional_tools":
            self.tools.add(item.get("tools"), f"{where}.tools")
            return None
        if kind in _HOSTED_ITEMS:
            self.ignored.append(f"{where}.{kind}")
            return None
        raise Refusal(
            f"{where}: items of type {kind!r:.80} are not supported: nothing is stored here, and "
            "texts, tool calls and their outputs are what is read.",
            param=where,
            code="unsupported",
        )


def _call(item: Mapping[str, Any], where: str) -> ToolCall:
    call_id = name_at(item.get("call_id"), f"{where}.call_id")
    namespace = item.get("namespace")
    if namespace is not None:
        namespace = name_at(namespace, f"{where}.namespace")
    name = flat_name(name_at(item.get("name"), f"{where}.name"), namespace)
    if item["type"] == "function_call":
        arguments = text_at(item.get("arguments"), f"{where}.arguments")
        return ToolCall(call_id, name, arguments or "{}")
    value = text_at(item.get("input"), f"{where}.input")
    return ToolCall(call_id, name, json.dumps({"input": value}, ensure_ascii=False))


def _thoughts(item: Mapping[str, Any], where: str) -> str:
    """Thoughts as they were written, if they come back at all; else their summary."""
    for name in ("content", "summary"):
        text = _content(item.get(name) or [], f"{where}.{name}")
        if text:
            return text
    return _unsealed(text_at(item.get("encrypted_content") or "", f"{where}.encrypted_content"))


def _content(value: object, where: str, ignored: list[str] | None = None) -> str:
    """The text of a message or an output: a text, or a list of parts that are texts. ignored: gets
    the names of other parts, of which the model is told; without it they are refused."""
    if isinstance(value, str):
        return value
    return joined(list(_texts(objects_at(value, where), where, ignored)))


def _texts(
    parts: Iterable[Mapping[str, Any]], where: str, ignored: list[str] | None
) -> Iterator[str]:
    for i, part in enumerate(parts):
        kind = text_at(part.get("type"), f"{where}[{i}].type")
        if kind == "refusal":
            yield text_at(part.get("refusal"), f"{where}[{i}].refusal")
        elif kind in _TEXT_PARTS:
            yield text_at(part.get("text"), f"{where}[{i}].text")
        elif ignored is not None:
            ignored.append(f"{where}[{i}].{kind}")
            yield unread(kind)
        else:
            raise Refusal(
                f"{where}[{i}]: parts of type {kind!r} are not supported; models read text here.",
                param=f"{where}[{i}]",
                code="unsupported",
            )
