"""A model folder's chat template: which it is, and the prompt that it makes of messages.

It is a program out of a model folder, run by `template_worker.py` in a bounded process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowtide.errors import CheckpointError, UsageError
from lowtide.files.json_file import printable, shown
from lowtide.files.regular_file import read_regular

MAX_TEMPLATE_CHARS = 256 << 10
MAX_TEXT_CHARS = 64 << 20

TEMPLATE_MEMORY_BYTES = 512 << 20
TEMPLATE_CPU_S = 2
TEMPLATE_WALL_S = 20  # a busy machine may take seconds to start a process

ROLES = ("system", "user", "assistant", "tool")

Message = Mapping[str, Any]

_NAMED = ("name", "template")  # of several chat templates each has these


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
    """Renders in a child process (why: see `template_worker`).

    Raises UsageError for bad messages, options that are no JSON, and a template that fails.
    """
    variables = {**options, "messages": _checked_messages(messages)}
    try:
        size = len(json.dumps(variables))
    except (TypeError, ValueError) as error:
        raise UsageError(f"Template options must be plain JSON values: {error}.") from None
    if size > MAX_TEXT_CHARS:
        raise UsageError(f"The conversation has {size} characters, more than {MAX_TEXT_CHARS}.")
    request = {
        "template": template,
        "variables": variables,
        "max_output_chars": 4 * size + (64 << 10),
        "max_memory_bytes": TEMPLATE_MEMORY_BYTES + 16 * size,
        "max_cpu_s": TEMPLATE_CPU_S,
    }
    answer = _ask_worker(json.dumps(request))
    if "text" not in answer:
        raise UsageError(
            f"The model's chat template failed: {printable(str(answer.get('error')))}."
        )
    return str(answer["text"])


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
        return read_regular(path, max_bytes, CheckpointError).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not text in UTF-8: {error}.") from error


def _checked_messages(messages: object) -> list[dict[str, str]]:
    if not isinstance(messages, list | tuple) or not messages:
        raise UsageError("A conversation must be a list of at least one message.")
    return [_checked_message(message, i) for i, message in enumerate(messages)]


def _checked_message(message: object, index: int) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise UsageError(f"Message {index} must have a role and a content, not be {message!r:.80}.")
    message = {**message, "content": _joined_parts(message.get("content"), index)}
    for name in ("role", "content"):
        if not isinstance(message.get(name), str):
            raise UsageError(
                f"Message {index} needs a string {name}, not {message.get(name)!r:.80}."
            )
    if message["role"] not in ROLES:
        raise UsageError(
            f"Message {index} has the role {message['role']!r:.80}; "
            f"known roles: {', '.join(ROLES)}."
        )
    unknown = sorted(str(name) for name in message if name not in ("role", "content"))
    if unknown:
        raise UsageError(f"Message {index} has fields that are not known: {', '.join(unknown)}.")
    return {"role": message["role"], "content": message["content"]}


def _joined_parts(content: object, index: int) -> object:
    """The text of OpenAI's content parts, part by line; anything else as it is."""
    if not isinstance(content, list | tuple):
        return content
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(text, str):
            raise UsageError(
                f"Message {index} has a part {part!r:.80}; only text is read: "
                '{"type": "text", "text": ...}.'
            )
        texts.append(text)
    return "\n".join(texts)


def _ask_worker(request: str) -> dict[str, Any]:
    worker = Path(__file__).with_name("template_worker.py")
    # -P: this package's own folder must not become a place where the child finds modules.
    command = [sys.executable, "-P", str(worker)]
    try:
        done = subprocess.run(
            command, input=request.encode(), capture_output=True, timeout=TEMPLATE_WALL_S
        )
        answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"The model's chat template did not finish within {TEMPLATE_WALL_S} s; "
            "give a plain text prompt instead."
        ) from None
    except ValueError:
        if done.returncode >= 0:
            detail = printable(done.stderr.decode(errors="replace").strip()[-300:])
            raise UsageError(f"The model's chat template could not be rendered: {detail}") from None
        raise UsageError(
            f"The model's chat template was stopped (signal {-done.returncode}): it used more than "
            f"{TEMPLATE_CPU_S} s of processor time or {TEMPLATE_MEMORY_BYTES} bytes of memory."
        ) from None
    except OSError as error:
        raise UsageError(f"No process could be started to render the template: {error}.") from error
    return answer if isinstance(answer, dict) else {}
