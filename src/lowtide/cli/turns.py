"""What was said so far in a conversation, and the prompt that it makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lowtide.cli.prompt import system_message
from lowtide.errors import UsageError

if TYPE_CHECKING:
    from lowtide.cli.answer import Prompt


class Turns:
    """Turns of a user and a model. With a chat template they are messages; without, one text."""

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
        """What the model is told first."""
        return self._system

    def set_system(self, text: str | None) -> None:
        """Raises UsageError where there is no template to place it."""
        if text is not None and not self.has_template:
            raise UsageError(
                "There is no chat template that would place a system message: this model continues "
                "the text; say it at the beginning."
            )
        self._system = text

    def prompt_with(self, line: str) -> Prompt:
        """The prompt that has `line` as its newest."""
        if not self.has_template:
            return "".join(said + answer for said, answer in self._turns) + line
        return [*self.messages(), {"role": "user", "content": line}]

    def messages(self) -> list[dict[str, str]]:
        """All that was said, in the form that chat APIs take."""
        messages = system_message(self._system)
        for said, answer in self._turns:
            messages.append({"role": "user", "content": said})
            messages.append({"role": "assistant", "content": answer})
        return messages

    def add(self, line: str, answer: str) -> None:
        self._turns.append((line, answer))

    def take_back(self) -> tuple[str, str]:
        """Forgets the newest turn, message and answer. Raises UsageError where there is none."""
        if not self._turns:
            raise UsageError("There is no message yet to answer again.")
        return self._turns.pop()

    def drop_oldest(self) -> None:
        del self._turns[0]

    def clear(self) -> None:
        """All but what the model is told first."""
        self._turns.clear()
