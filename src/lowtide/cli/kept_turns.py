"""Conversations in files: JSON with the messages in the form that chat APIs take."""

from __future__ import annotations

import json
from pathlib import Path

from lowtide.cli.prompt import MAX_PROMPT_BYTES
from lowtide.cli.turns import Turns
from lowtide.errors import UsageError
from lowtide.files.json_file import read_object
from lowtide.files.whole_file import whole_file


def save_turns(turns: Turns, path: Path) -> None:
    """Writes `{"messages": [{"role": ..., "content": ...}, ...]}`. Raises StorageError."""
    text = json.dumps({"messages": turns.messages()}, ensure_ascii=False, indent=1)
    with whole_file(path, "conversation") as file:
        file.write(text.encode() + b"\n")


def load_turns(turns: Turns, path: Path) -> None:
    """Has `turns` hold what the file says. Raises UsageError where it holds no conversation, and
    leaves them as they were."""
    messages = read_object(path, MAX_PROMPT_BYTES, UsageError).get("messages")
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise UsageError(f"{path} holds no list of messages, each with a role and a text.")
    texts = [(message["role"], message["content"]) for message in messages]
    system = texts.pop(0)[1] if texts and texts[0][0] == "system" else None
    said, answers = texts[::2], texts[1::2]
    if {role for role, _ in said} - {"user"} or {role for role, _ in answers} - {"assistant"}:
        raise UsageError(f"{path}: after a system message, user and assistant take turns.")
    if len(said) != len(answers):
        raise UsageError(f"{path} ends with a message of the user; an answer to it is missing.")
    turns.set_system(system)
    turns.clear()
    for (_, line), (_, answer) in zip(said, answers, strict=True):
        turns.add(line, answer)


def _is_message(message: object) -> bool:
    if not isinstance(message, dict):
        return False
    return all(isinstance(message.get(key), str) for key in ("role", "content"))
