"""Messages and tools of `/v1/chat/completions`, read into a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from lowtide.parsing.tools import Tool
from lowtide.serve.conversation import Conversation, ToolCall, Turn, checked_choice, joined
from lowtide.serve.custom_tools import custom_arguments, custom_tool
from lowtide.serve.errors import Refusal
from lowtide.serve.json_fields import MAX_NAME_CHARS, MAX_PARTS, unsupported, words_of

MAX_MESSAGES, MAX_TOOLS, MAX_CALLS = 8192, 512, 256

_THOUGHT_PARTS = {"thinking": "thinking", "reasoning": "text", "redacted_thinking": ""}
"""Parts of an assistant's message that are its thoughts, and where their text is."""

_TEXT_FIELDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


class NamedFunction(BaseModel):
    """A function, by its name."""

    name: str = Field(min_length=1, max_length=MAX_NAME_CHARS)


class CalledFunction(NamedFunction):
    """What a call is of."""

    arguments: str = ""


class CalledCustom(NamedFunction):
    """What a call of a custom tool is of."""

    input: str = ""


class CallField(BaseModel):
    """A call that an assistant made, of a function or of a custom tool."""

    id: str = Field("", max_length=MAX_NAME_CHARS)
    type: Literal["function", "custom"] = "function"
    function: CalledFunction | None = None
    custom: CalledCustom | None = None

    def call(self, where: str) -> ToolCall:
        """As a conversation has it. Raises Refusal for one that does not say what it is of."""
        if self.type == "custom" and self.custom is not None:
            return ToolCall(self.id, self.custom.name, custom_arguments(self.custom.input))
        if self.type == "custom" or self.function is None:
            raise Refusal(f"{where}.{self.type}: Field required", param=where)
        return ToolCall(self.id, self.function.name, self.function.arguments)


class ChatMessage(BaseModel):
    """One message. Fields without a meaning here are left out, unless they hold words."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[dict[str, Any]], Field(max_length=MAX_PARTS)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Annotated[list[CallField], Field(max_length=MAX_CALLS)] | None = None
    tool_call_id: str | None = Field(None, max_length=MAX_NAME_CHARS)

    def turn(self, where: str) -> Turn:
        """Raises Refusal for what no model here reads, by its place."""
        for name in ("function_call", "audio", "images"):
            if (self.model_extra or {}).get(name):
                raise unsupported(f"{where}.{name}", "such fields")
        content, thoughts = self.content or "", ""
        if self.role == "assistant" and isinstance(content, list):
            thoughts = joined([_thought(part) for part in content])
            content = [part for part in content if part.get("type") not in _THOUGHT_PARTS]
        text = words_of(content, f"{where}.content", "parts", _TEXT_FIELDS)
        if self.role == "tool":
            return Turn(self.role, text, tool_call_id=self.tool_call_id or "")
        if self.role != "assistant":
            return Turn("system" if self.role == "developer" else self.role, text)
        made = enumerate(self.tool_calls or ())
        calls = [call.call(f"{where}.tool_calls[{i}]") for i, call in made]
        reasoning = self.reasoning_content or self.reasoning or thoughts
        return Turn(self.role, text, reasoning, tuple(calls))


def _thought(part: Mapping[str, Any]) -> str:
    """The thoughts in a part of an assistant's message: a text, or parts of one."""
    told = part.get(_THOUGHT_PARTS.get(part.get("type", ""), ""))
    if isinstance(told, list):
        told = joined(
            [t for p in told if isinstance(p, dict) and isinstance(t := p.get("text"), str)]
        )
    return told if isinstance(told, str) else ""


class DeclaredFunction(NamedFunction):
    """A tool's declaration. `strict` asks for arguments that are certain to be of the schema."""

    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class GrammarField(BaseModel):
    """A grammar that a custom tool's text is of."""

    syntax: str = Field(max_length=MAX_NAME_CHARS)
    definition: str


class CustomFormat(BaseModel):
    """What a custom tool's text is."""

    type: Literal["text", "grammar"]
    grammar: GrammarField | None = None


class DeclaredCustom(NamedFunction):
    """A custom tool's declaration: it is called with one text."""

    description: str | None = None
    format: CustomFormat | None = None


class ToolField(BaseModel):
    """A tool that the model may call."""

    type: Literal["function", "custom"]
    function: DeclaredFunction | None = None
    custom: DeclaredCustom | None = None

    def tool(self, where: str) -> Tool:
        """As a conversation has it. Raises Refusal for one that is not declared."""
        function, custom = self.function, self.custom
        if self.type == "custom" and custom is not None:
            format = custom.format
            grammar = None if format is None else format.grammar
            if format is not None and format.type == "grammar" and grammar is None:
                place = f"{where}.custom.format.grammar"
                raise Refusal(f"{place}: Field required", param=place)
            asked = None if grammar is None else (grammar.syntax, grammar.definition)
            return custom_tool(custom.name, custom.description or "", asked)
        if self.type == "custom" or function is None:
            raise Refusal(f"{where}.{self.type}: Field required", param=where)
        parameters, strict = function.parameters or {}, bool(function.strict)
        return Tool(function.name, function.description or "", parameters, strict)


class NamedChoice(BaseModel):
    """The one tool that must be called, or that may be."""

    type: Literal["function", "custom"]
    function: NamedFunction | None = None
    custom: NamedFunction | None = None

    def name(self) -> str:
        """Raises Refusal for a choice that names no tool."""
        named = self.custom if self.type == "custom" else self.function
        if named is None:
            raise Refusal(f"tool_choice.{self.type}: Field required", param="tool_choice")
        return named.name


class AllowedTools(BaseModel):
    """The tools that may be called. mode: whether one of them must be."""

    mode: Literal["auto", "required"] = "auto"
    tools: list[NamedChoice] = Field(max_length=MAX_TOOLS)


class AllowedChoice(BaseModel):
    """Some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedChoice | AllowedChoice


def conversation_of(messages: list[ChatMessage], tools: list[ToolField]) -> Conversation:
    """Raises Refusal for a message that cannot be read."""
    turns = tuple(message.turn(f"messages[{i}]") for i, message in enumerate(messages))
    return Conversation(turns, tuple(each.tool(f"tools[{i}]") for i, each in enumerate(tools)))


def chosen_tools(choice: ToolChoice, conversation: Conversation) -> tuple[Conversation, str]:
    """The conversation with the tools that may be called, and the choice among them as `Ask` has
    it. Raises Refusal for one that is not declared.
    """
    names = {tool.name for tool in conversation.tools}
    if isinstance(choice, str):
        return conversation, checked_choice(choice, False, names)
    if isinstance(choice, NamedChoice):
        return conversation, checked_choice(choice.name(), True, names)
    allowed = {checked_choice(each.name(), True, names) for each in choice.allowed_tools.tools}
    tools = tuple(tool for tool in conversation.tools if tool.name in allowed)
    mode = checked_choice(choice.allowed_tools.mode, False, allowed)
    return Conversation(conversation.turns, tools), mode
