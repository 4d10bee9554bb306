"""The items of `/v1/responses`, in and out of a conversation.

Tools keep two names: the flat one that the model calls them by, and the form in which the API's
client knows them (in a namespace, or as a custom tool whose input is a text and not JSON).
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field

from lowtide.parsing.tools import Tool
from lowtide.serve.conversation import ToolCall, Turn
from lowtide.serve.custom_tools import custom_arguments, custom_tool
from lowtide.serve.errors import Refusal
from lowtide.serve.json_fields import PlacedObject, objects_at, words_of
from lowtide.serve.openai_fields import MAX_MESSAGES, MAX_TOOLS

_SEALED = "lowtide:"

_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_TEXT_FIELDS = {**dict.fromkeys(_TEXT_PARTS, "text"), "refusal": "refusal"}

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
        for tool in objects_at(declared, where, MAX_TOOLS):
            kind = tool.text("type")
            if kind == "namespace" and namespace is None:
                self.add(tool.get("tools"), tool.at("tools"), tool.name("name"))
            elif kind in ("function", "custom"):
                self._add_one(tool, namespace)
            else:
                self.ignored.append(f"tools.{kind}")

    def _add_one(self, tool: PlacedObject, namespace: str | None) -> None:
        form = ToolForm(tool.name("name"), namespace, tool.fields["type"] == "custom")
        name, description = flat_name(form.name, namespace), tool.text("description", "")
        if form.is_custom:
            form_of = tool.object("format", {})
            is_grammar = form_of.get("type") == "grammar"
            asked = (form_of.text("syntax"), form_of.text("definition")) if is_grammar else None
            shown = custom_tool(name, description, asked)
        else:
            parameters = tool.object("parameters", {}).fields
            shown = Tool(name, description, parameters, tool.get("strict") is True)
        self.tools[name], self.forms[name] = shown, form
        if len(self.tools) > MAX_TOOLS:
            raise Refusal(f"At most {MAX_TOOLS} tools are accepted in all.", param="tools")


def flat_name(name: str, namespace: str | None) -> str:
    """What the model calls a tool: a chat template knows no namespaces."""
    return name if not namespace else f"{namespace.rstrip('_')}__{name.lstrip('_')}"


def called_name(item: PlacedObject) -> str:
    """The flat name of the tool that a call, or a choice, names."""
    namespace = None if item.get("namespace") is None else item.name("namespace")
    return flat_name(item.name("name"), namespace)


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
        read = map(self._turn, objects_at(items, "input", MAX_MESSAGES))
        return [turn for turn in read if turn is not None]

    def _turn(self, item: PlacedObject) -> Turn | None:
        """None for an item that is no turn."""
        kind = item.text("type") if "type" in item.fields else "message"
        if kind == "message":
            role = _ROLES[item.one_of("role", _ROLES)]
            return Turn(role, _words(item.get("content"), item.at("content")))
        if kind == "reasoning":
            return Turn("assistant", "", _thoughts(item))
        if kind in ("function_call", "custom_tool_call"):
            return Turn("assistant", "", tool_calls=(_call(item),))
        if kind in ("function_call_output", "custom_tool_call_output"):
            text = _words(item.get("output"), item.at("output"), self.ignored)
            return Turn("tool", text, tool_call_id=item.name("call_id"))
        if kind == "additional_tools":
            self.tools.add(item.get("tools"), item.at("tools"))
            return None
        if kind in _HOSTED_ITEMS:
            self.ignored.append(item.at(kind))
            return None
        raise Refusal(
            f"{item.where}: items of type {kind[:80]!r:.80} are not supported: nothing is stored "
            "here, and texts, tool calls and their outputs are what is read.",
            param=item.where,
            code="unsupported",
        )


def _call(item: PlacedObject) -> ToolCall:
    if item.fields["type"] == "function_call":
        arguments = item.text("arguments") or "{}"
    else:
        arguments = custom_arguments(item.text("input"))
    return ToolCall(item.name("call_id"), called_name(item), arguments)


def _thoughts(item: PlacedObject) -> str:
    """Thoughts as they were written, if they come back at all; else their summary."""
    for name in ("content", "summary"):
        if text := _words(item.get(name, []), item.at(name)):
            return text
    return _unsealed(item.text("encrypted_content", ""))


def _words(value: object, where: str, ignored: list[str] | None = None) -> str:
    return words_of(value, where, "parts", _TEXT_FIELDS, ignored)
