"""Messages and tools of `/v1/chat/completions`, read into a conversation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from lowtide.parsing.tools import Tool
from lowtide.serve.conversation import Conversation, ToolCall, Turn, checked_choice
from lowtide.serve.json_fields import MAX_NAME_CHARS, unsupported, words_of

MAX_MESSAGES, MAX_TOOLS, MAX_CALLS, MAX_PARTS = 8192, 512, 256, 1024

_TEXT_FIELDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


class NamedFunction(BaseModel):
    """A function, by its name."""

    name: str = Field(min_length=1, max_length=MAX_NAME_CHARS)


class CalledFunction(NamedFunction):
    """What a call is of."""

    arguments: str = ""


class CallField(BaseModel):
    """A call that an assistant made."""

    id: str = Field("", max_length=MAX_NAME_CHARS)
    type: Literal["function"] = "function"
    function: CalledFunction


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
        text = words_of(self.content or "", f"{where}.content", "parts", _TEXT_FIELDS)
        if self.role == "tool":
            return Turn(self.role, text, tool_call_id=self.tool_call_id or "")
        if self.role != "assistant":
            return Turn("system" if self.role == "developer" else self.role, text)
        calls = [
            ToolCall(call.id, call.function.name, call.function.arguments)
            for call in self.tool_calls or ()
        ]
        return Turn(self.role, text, self.reasoning_content or self.reasoning or "", tuple(calls))


class DeclaredFunction(NamedFunction):
    """A tool's declaration. `strict` asks for arguments that are certain to be of the schema."""

    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolField(BaseModel):
    """A tool that the model may call."""

    type: Literal["function"]
    function: DeclaredFunction

    def tool(self) -> Tool:
        """As a conversation has it."""
        declared = self.function
        parameters, strict = declared.parameters or {}, bool(declared.strict)
        return Tool(declared.name, declared.description or "", parameters, strict)


class NamedChoice(BaseModel):
    """The one function that must be called."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


def conversation_of(messages: list[ChatMessage], tools: list[ToolField]) -> Conversation:
    """Raises Refusal for a message that cannot be read."""
    turns = tuple(message.turn(f"messages[{i}]") for i, message in enumerate(messages))
    return Conversation(turns, tuple(each.tool() for each in tools))


def chosen_tool(choice: ToolChoice, conversation: Conversation) -> str:
    """As `Ask` has it. Raises Refusal for one that is not declared."""
    names = {tool.name for tool in conversation.tools}
    if isinstance(choice, str):
        return checked_choice(choice, False, names)
    return checked_choice(choice.function.name, True, names)
