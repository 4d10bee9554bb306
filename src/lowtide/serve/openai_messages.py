"""Messages and tools of `/v1/chat/completions`, read into a conversation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from lowtide.parsing.tools import Tool
from lowtide.serve.conversation import Conversation, ToolCall, Turn, joined
from lowtide.serve.errors import Refusal

Name = Annotated[str, Field(min_length=1, max_length=256)]
MAX_MESSAGES, MAX_TOOLS, MAX_CALLS, MAX_PARTS = 8192, 512, 256, 1024

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


class CalledFunction(BaseModel):
    """What a call is of."""

    name: Name
    arguments: str = ""


class CallField(BaseModel):
    """A call that an assistant made."""

    id: str = Field("", max_length=256)
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
    tool_call_id: str | None = Field(None, max_length=256)

    def turn(self, where: str) -> Turn:
        """Raises Refusal for what no model here reads, by its place."""
        for name in ("function_call", "audio", "images"):
            if (self.model_extra or {}).get(name):
                raise _unsupported(f"{where}.{name}")
        calls = [ToolCall(c.id, c.function.name, c.function.arguments) for c in self.calls]
        is_answer = self.role == "assistant"
        return Turn(
            role="system" if self.role == "developer" else self.role,
            text=self._text(f"{where}.content"),
            reasoning=(self.reasoning_content or self.reasoning or "") if is_answer else "",
            tool_calls=tuple(calls) if is_answer else (),
            tool_call_id=(self.tool_call_id or "") if self.role == "tool" else "",
        )

    @property
    def calls(self) -> list[CallField]:
        return self.tool_calls or []

    def _text(self, where: str) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        texts = []
        for index, part in enumerate(self.content):
            kind = part.get("type")
            text = part.get(_TEXT_PARTS.get(str(kind), ""))
            if not isinstance(text, str):
                raise _unsupported(f"{where}[{index}]", f"parts of type {kind!r:.40}")
            texts.append(text)
        return joined(texts)


class DeclaredFunction(BaseModel):
    """A tool's declaration. `strict` asks for arguments that are certain to be of the schema."""

    name: Name
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
        return Tool(
            declared.name,
            declared.description or "",
            declared.parameters or {},
            strict=bool(declared.strict),
        )


class NamedFunction(BaseModel):
    """The name of a function."""

    name: Name


class NamedChoice(BaseModel):
    """The one function that must be called."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedChoice


def conversation_of(messages: list[ChatMessage], tools: list[ToolField] | None) -> Conversation:
    """Raises Refusal for a message that cannot be read."""
    turns = tuple(message.turn(f"messages[{i}]") for i, message in enumerate(messages))
    return Conversation(turns, tuple(each.tool() for each in tools or []))


def chosen_tool(choice: ToolChoice | None, conversation: Conversation) -> str:
    """auto, none, required or a function's name. Raises Refusal for one that is not declared."""
    if choice is None or isinstance(choice, str):
        if choice == "required" and not conversation.tools:
            raise Refusal("tool_choice is 'required' and there are no tools.", param="tool_choice")
        return choice or "auto"
    name = choice.function.name
    if name not in {tool.name for tool in conversation.tools}:
        raise Refusal(f"tool_choice names {name!r}, which is no tool.", param="tool_choice")
    return name


def _unsupported(where: str, what: str = "no text") -> Refusal:
    return Refusal(
        f"{where}: not supported ({what}): models read text here.",
        param=where,
        code="unsupported",
    )
