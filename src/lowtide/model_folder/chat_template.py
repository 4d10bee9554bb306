"""A model's chat templates, and rendering of a conversation to a prompt.

A template is a program from a model folder, run by `template_worker.py` in a bounded process.
Messages are checked in `chat_messages.py`.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowtide.errors import CheckpointError, UnsupportedError, UsageError
from lowtide.files.json_file import printable, shown
from lowtide.files.long_json import write_json
from lowtide.files.regular_file import FETCH_AGAIN, read_own
from lowtide.model_folder.chat_messages import (
    checked_messages,
    forms,
    in_short,
    with_thinking,
    without_empty_end,
)
from lowtide.model_folder.template_process import TEMPLATES

TEMPLATE_NAME = "chat_template.jinja"
TOOL_TEMPLATE_NAME = "additional_chat_templates/tool_use.jinja"

MAX_TEMPLATE_CHARS = 256 << 10
MAX_TEXT_CHARS = 64 << 20

TEMPLATE_MEMORY_BYTES = 512 << 20
TEMPLATE_CPU_S = 2
TEMPLATE_WALL_S = 20  # a busy machine may take seconds to start a process

_READS_THINKING = re.compile(r"""\.thinking\b|["']thinking["']""")

_SAID = ("system", "user")
"""Roles whose turns are never left out."""

_NAMED = ("name", "template")  # fields of each of several templates


class _Refusal(UsageError):
    """Raised if a chat template fails on a conversation or refuses it."""


@dataclass(frozen=True)
class ChatTemplates:
    """A model's templates. with_tools: for conversations with tools, if separate."""

    default: str
    with_tools: str | None = None

    def names(self, variable: str) -> bool:
        """Return True if a template mentions a variable."""
        return variable in self.default or variable in (self.with_tools or "")

    def render(self, messages: object, options: Mapping[str, object]) -> str:
        """Render a conversation in the first of its `forms` that the template takes completely.

        A last answer that has begun ends the prompt. Raises UsageError for bad messages, options
        that are not JSON, a template that fails, and an answer that cannot be continued;
        UnsupportedError for tools that no template shows.
        """
        template = self.default
        if options.get("tools"):
            template = self.default if self.with_tools is None else self.with_tools
            if "tools" not in template:
                raise UnsupportedError(
                    "This model's chat template has no tools: the model would never see them. "
                    "Leave tools out, or take a model that was made for them."
                )
        return _Conversation(template, options).prompt(checked_messages(messages))


def read_templates(folder: Path, config: Mapping[str, Any]) -> ChatTemplates | None:
    """Read `chat_template.jinja` and its tool template, or those of the tokenizer's config.

    Returns None without any. Raises CheckpointError for one of a wrong type or too long.
    """
    given = config.get("chat_template")
    named: dict[str, object] = {"default": given}
    if isinstance(given, list):
        named = _named_templates(given, folder)
    if os.path.lexists(folder / TEMPLATE_NAME):
        named = {"default": _read_text(folder / TEMPLATE_NAME)}
    if os.path.lexists(folder / TOOL_TEMPLATE_NAME):
        named["tool_use"] = _read_text(folder / TOOL_TEMPLATE_NAME)
    return checked_templates(named.get("default"), named.get("tool_use"), folder)


def checked_templates(default: object, with_tools: object, where: Path) -> ChatTemplates | None:
    """Check templates; a single one serves all conversations.

    Raises CheckpointError for a wrong type or a text that is too long.
    """
    texts = [_checked_template(each, where) for each in (default, with_tools)]
    if texts[0] is None:
        return None if texts[1] is None else ChatTemplates(texts[1])
    return ChatTemplates(texts[0], texts[1])


def _checked_template(template: object, where: Path) -> str | None:
    if template is None:
        return None
    if not isinstance(template, str):
        raise CheckpointError(
            f"{where}: chat_template must be a string or a list of named ones, "
            f"not {type(template).__name__}; correct it, or {FETCH_AGAIN}."
        )
    if len(template) > MAX_TEMPLATE_CHARS:
        raise CheckpointError(
            f"{where}: the chat template has {len(template)} characters; "
            f"at most {MAX_TEMPLATE_CHARS} are accepted: shorten it."
        )
    return template.removeprefix("\ufeff")  # a byte order mark is not part of a prompt


@dataclass(frozen=True)
class _Conversation:
    """A chat template, and its variables other than the messages."""

    template: str
    options: Mapping[str, object]

    def prompt(self, messages: list[dict[str, Any]]) -> str:
        """Render as `ChatTemplates.render`."""
        messages = without_empty_end(messages)
        refusal, found = None, []
        candidates = forms(messages)
        for form in candidates:
            try:
                text = self._text(form)
            except _Refusal as error:
                refusal = refusal or error
                continue
            if len(candidates) == 1 or self._is_whole(form):
                return text
            found.append(text)
        if found:
            return found[0]  # no form is better than the conversation as it is
        raise refusal or UsageError("A conversation must be a list of at least one message.")

    def _text(self, messages: list[dict[str, Any]]) -> str:
        """Render the prompt up to an answer, or to the end of one that has begun."""
        if messages[-1]["role"] != "assistant":
            return self._rendered(messages, is_begun=False)
        # As in transformers: a mark shows where the template's text after the answer begins. A
        # template that trims removes the mark's space; then the text's is removed, too.
        mark = f"{secrets.token_hex(12)} "
        last = messages[-1] | {"content": messages[-1]["content"] + mark}
        text = self._rendered([*messages[:-1], last], is_begun=True)
        end = text.rfind(mark.strip())
        if end < 0:
            raise UsageError(
                "The answer that is begun cannot be continued: the model's chat template leaves it "
                "out. End the conversation with a user's message."
            )
        return text[:end] if text.startswith(mark, end) else text[:end].rstrip()

    def _is_whole(self, messages: list[dict[str, Any]]) -> bool:
        """Return True if each system and user turn is in the prompt.

        Turns are found by marks that replace their texts, since equal words may occur elsewhere.
        """
        common = secrets.token_hex(8)
        marks = [f"{common}{place:08x}" for place in range(len(messages))]
        marked = [in_short(*each) for each in zip(messages, marks, strict=True)]
        tools = self.options.get("tools")
        few = {"tools": tools[:1]} if isinstance(tools, list) else {}
        conversation = _Conversation(self.template, {**self.options, **few})
        try:
            text = conversation._rendered(marked, is_begun=messages[-1]["role"] == "assistant")
        except _Refusal:
            return True  # it was taken in full
        shown = set(re.findall(f"{common}[0-9a-f]{{8}}", text))  # one search, however many turns
        left_out = [
            place
            for place, (message, mark) in enumerate(zip(messages, marks, strict=True))
            if message["role"] in _SAID and message["content"].strip() and mark not in shown
        ]
        # A template that has the role may leave it out at times: Mistral's, after a tool's result.
        has_role = left_out == [0] and messages[0]["role"] == "system" and self._has_system_role()
        return has_role or not left_out

    def _has_system_role(self) -> bool:
        """Return True if a first system turn before a user's appears in the prompt."""
        mark = secrets.token_hex(8)
        turns = [{"role": "system", "content": mark}, {"role": "user", "content": "hello"}]
        try:
            return mark in self._rendered(turns, is_begun=False)
        except _Refusal:
            return False

    def _rendered(self, messages: list[dict[str, Any]], is_begun: bool) -> str:
        variables = {**self.options, "add_generation_prompt": not is_begun}
        if not _READS_THINKING.search(self.template):
            return _rendered(self.template, variables | {"messages": messages})
        named = with_thinking(messages)
        try:
            return _rendered(self.template, variables | {"messages": named})
        except _Refusal:
            in_one = with_thinking(messages, in_place_of_content=True)
            if in_one == named:
                raise
            return _rendered(self.template, variables | {"messages": in_one})


def _rendered(template: str, variables: Mapping[str, object]) -> str:
    """Render in the bounded process (see `template_worker`)."""
    try:
        size = len(write_json(variables))
    except (TypeError, ValueError) as error:
        raise UsageError(f"Template options must be plain JSON values: {error}.") from None
    except RecursionError:
        raise UsageError("The conversation or a tool is nested too deeply; flatten it.") from None
    if size > MAX_TEXT_CHARS:
        raise UsageError(f"The conversation has {size} characters, more than {MAX_TEXT_CHARS}.")
    request = {
        "template": template,
        "variables": variables,
        "max_output_chars": 4 * size + (64 << 10),
        "max_memory_bytes": TEMPLATE_MEMORY_BYTES + 16 * size,
        "max_cpu_s": TEMPLATE_CPU_S,
    }
    answer = TEMPLATES.ask(request, TEMPLATE_WALL_S)
    if "text" not in answer:
        reason = printable(str(answer.get("error"))).rstrip(".")
        raise _Refusal(f"The model's chat template failed: {reason}.")
    return str(answer["text"])


def _named_templates(named: list[Any], folder: Path) -> dict[str, object]:
    """Map names to templates; a single one is the default under any name."""
    for i, entry in enumerate(named):
        values = [entry.get(key) for key in _NAMED] if isinstance(entry, dict) else [None]
        if not all(isinstance(value, str) for value in values):
            raise CheckpointError(
                f"{folder}: entry {i} of the {len(named)} in chat_template must have a name and a "
                f"template, both strings; it has {', '.join(map(shown, values))}. Correct it, or "
                f"{FETCH_AGAIN}."
            )
    templates: dict[str, object] = {entry["name"]: entry["template"] for entry in named}
    if "default" in templates:
        return templates
    if len(templates) == 1:
        return {"default": next(iter(templates.values()))}
    raise CheckpointError(
        f"{folder}: chat_template lists {len(named)} templates and none is named 'default'; give "
        "that name to one of them."
    )


def _read_text(path: Path) -> str:
    try:
        return read_own(path, 4 * MAX_TEMPLATE_CHARS).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not text in UTF-8: {error}; {FETCH_AGAIN}.") from error
