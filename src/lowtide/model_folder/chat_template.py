"""A model folder's chat template: which it is, and the prompt that it makes of messages.

It is a program out of a model folder, run by `template_worker.py` in a bounded process. What
messages may hold is in `chat_messages.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowtide.errors import CheckpointError, UnsupportedError, UsageError
from lowtide.files.json_file import printable, shown
from lowtide.files.regular_file import read_own
from lowtide.model_folder.chat_messages import checked_messages, with_later_systems_as_user
from lowtide.model_folder.template_process import TEMPLATES

MAX_TEMPLATE_CHARS = 256 << 10
MAX_TEXT_CHARS = 64 << 20

TEMPLATE_MEMORY_BYTES = 512 << 20
TEMPLATE_CPU_S = 2
TEMPLATE_WALL_S = 20  # a busy machine may take seconds to start a process

_NAMED = ("name", "template")  # of several chat templates each has these


class _Refusal(UsageError):
    """A chat template that fails on a conversation, or refuses it."""


def read_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The folder's `chat_template.jinja`, else what `tokenizer_config.json` holds, or None.

    Raises CheckpointError for one of a wrong type or too long.
    """
    path = folder / "chat_template.jinja"
    if os.path.lexists(path):
        template: object = _read_text(path, 4 * MAX_TEMPLATE_CHARS)
    else:
        template = config.get("chat_template")
    if isinstance(template, list):
        template = _default_template(template, folder)
    return checked_template(template, folder)


def checked_template(template: object, where: Path) -> str | None:
    """What a model has for one; raises CheckpointError for a wrong type or a text too long."""
    if template is None:
        return None
    if not isinstance(template, str):
        raise CheckpointError(
            f"{where}: chat_template must be a string or a list of named ones, "
            f"not {type(template).__name__}."
        )
    if len(template) > MAX_TEMPLATE_CHARS:
        raise CheckpointError(
            f"{where}: the chat template has {len(template)} characters; "
            f"at most {MAX_TEMPLATE_CHARS} are accepted."
        )
    return template


def render_template(template: str, messages: object, options: Mapping[str, object]) -> str:
    """Renders in the bounded process (why: see `template_worker`).

    A system turn behind the first message that the template refuses, or leaves out, is said by
    the user instead, in its place. Raises UsageError for bad messages, options that are no JSON,
    and a template that fails.
    """
    if options.get("tools") and "tools" not in template:
        raise UnsupportedError(
            "This model's chat template has no tools: the model would never see them. Leave tools "
            "out, or take a model that was made for them."
        )
    checked = checked_messages(messages)
    later = [m["content"].strip() for m in checked[1:] if m["role"] == "system"]
    if not later:
        return _rendered(template, checked, options)
    try:
        text = _rendered(template, checked, options)
        if all(content in text for content in later):
            return text
    except _Refusal:
        pass
    return _rendered(template, with_later_systems_as_user(checked), options)


def _rendered(template: str, messages: list[dict[str, Any]], options: Mapping[str, object]) -> str:
    if ".thinking" in template:
        messages = [_with_thinking(message) for message in messages]
    variables = {**options, "messages": messages}
    try:
        size = len(json.dumps(variables))
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
        raise _Refusal(f"The model's chat template failed: {printable(str(answer.get('error')))}.")
    return str(answer["text"])


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """Thoughts by the name that gpt-oss's template has for them: beside a call only where no text
    is."""
    thoughts = message.get("reasoning_content")
    if thoughts is None or ("tool_calls" in message and message["content"]):
        return message
    return message | {"thinking": thoughts}


def _default_template(named: list[Any], folder: Path) -> object:
    """The template named `default` among several, or the only one."""
    for i, entry in enumerate(named):
        values = [entry.get(key) for key in _NAMED] if isinstance(entry, dict) else [None]
        if not all(isinstance(value, str) for value in values):
            raise CheckpointError(
                f"{folder}: entry {i} of the {len(named)} in chat_template must have a name and a "
                f"template, both strings; it has {', '.join(map(shown, values))}."
            )
    templates = {entry["name"]: entry["template"] for entry in named}
    if "default" in templates:
        return templates["default"]
    if len(templates) == 1:
        return next(iter(templates.values()))
    raise CheckpointError(
        f"{folder}: chat_template lists {len(named)} templates and none is named 'default'."
    )


def _read_text(path: Path, max_bytes: int) -> str:
    try:
        return read_own(path, max_bytes, CheckpointError).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not text in UTF-8: {error}.") from error
