"""The turns of a conversation and the prompt that they make."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING

from lowtide.cli.prompt import MAX_PROMPT_BYTES, system_message
from lowtide.errors import UsageError
from lowtide.files.json_file import parse_object
from lowtide.files.regular_file import read_from, read_regular
from lowtide.files.whole_file import whole_file

if TYPE_CHECKING:
    from lowtide.cli.answer import Prompt


class Turns:
    """Turns of a user and a model: messages with a chat template, else one text."""

    def __init__(
        self,
        has_template: bool,
        system: str | None = None,
        template_options: Mapping[str, object] | None = None,
    ) -> None:
        """template_options: further variables of the template."""
        self.has_template = has_template
        self.template_options = template_options or {}
        self._turns: list[tuple[str, str]] = []
        self._system: str | None = None
        self.set_system(system)

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def system(self) -> str | None:
        """The system message."""
        return self._system

    def set_system(self, text: str | None) -> None:
        """Set the system message; raises UsageError without a chat template."""
        if text is not None and not self.has_template:
            raise UsageError(
                "There is no chat template that would place a system message: this model continues "
                "the text; say it at the beginning."
            )
        self._system = text

    def prompt_with(self, line: str, first: int = 0) -> Prompt:
        """Make a prompt from the turns from `first` on, followed by `line`."""
        if not self.has_template:
            return "".join(said + answer for said, answer in self._turns[first:]) + line
        return [*self.messages(first), {"role": "user", "content": line}]

    def messages(self, first: int = 0) -> list[dict[str, str]]:
        """Return the turns from `first` on as messages of chat APIs."""
        messages = system_message(self._system)
        for said, answer in self._turns[first:]:
            messages.append({"role": "user", "content": said})
            messages.append({"role": "assistant", "content": answer})
        return messages

    def add(self, line: str, answer: str) -> None:
        self._turns.append((line, answer))

    @property
    def last_answer(self) -> str:
        """The newest answer, or an empty string."""
        return self._turns[-1][1] if self._turns else ""

    def take_back(self) -> tuple[str, str]:
        """Remove and return the newest turn: message and answer.

        Raises UsageError if there is none.
        """
        if not self._turns:
            raise UsageError("There is no message yet to answer again.")
        return self._turns.pop()

    def put_back(self, line: str, answer: str) -> None:
        """Put a removed turn back, replacing an answer that was stopped before its first word."""
        if self._turns and self._turns[-1] == (line, ""):
            del self._turns[-1]
        self.add(line, answer)

    def drop_oldest(self, count: int) -> None:
        del self._turns[:count]

    def clear(self) -> None:
        """Remove all turns but keep the system message."""
        self._turns.clear()

    def save(self, path: Path) -> None:
        """Write `{"messages": [{"role": ..., "content": ...}, ...]}`. Raises StorageError."""
        text = json.dumps({"messages": self.messages()}, ensure_ascii=False, indent=1)
        with whole_file(path, "conversation", _is_conversation) as file:
            # A loaded file may hold lone surrogates; JSON escapes them.
            file.write(text.encode(errors="backslashreplace") + b"\n")

    def load(self, path: Path) -> None:
        """Load turns from a file.

        Raises UsageError, and changes nothing, if it holds no conversation.
        """
        way_out = "/save FILE writes a conversation that can be loaded"
        data = read_regular(path, MAX_PROMPT_BYTES, UsageError, way_out)
        try:
            messages = parse_object(data, str(path), UsageError).get("messages")
        except UsageError:
            messages = None
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise UsageError(
                f"{path} is not a saved conversation, which is a JSON object with a list of "
                "messages, each with a role and a text, as /save writes it."
            )
        texts = [(message["role"], message["content"]) for message in messages]
        system = texts.pop(0)[1] if texts and texts[0][0] == "system" else None
        said, answers = texts[::2], texts[1::2]
        if {role for role, _ in said} - {"user"} or {role for role, _ in answers} - {"assistant"}:
            raise UsageError(
                f"{path}: after a system message, user and assistant take turns, as /save writes "
                "them."
            )
        if len(said) != len(answers):
            raise UsageError(
                f"{path} ends with a message of the user; an answer to it is missing. Add it, or "
                "take the message away."
            )
        self.set_system(system)
        self._turns = [(line, answer) for (_, line), (_, answer) in zip(said, answers, strict=True)]


def _is_conversation(file: IO[bytes]) -> bool:
    try:
        found = parse_object(read_from(file, MAX_PROMPT_BYTES, "it", UsageError), "", UsageError)
    except UsageError:
        return False
    messages = found.get("messages")
    return list(found) == ["messages"] and isinstance(messages, list)


def _is_message(message: object) -> bool:
    if not isinstance(message, dict):
        return False
    return all(isinstance(message.get(key), str) for key in ("role", "content"))
