"""Questions of multiple choice, as a file has them.

One JSON object per line: `context`, a text that is not empty; `choices`, two texts or more that may
follow it, each with the space that it begins with if it does; `answer`, the index of the right one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from lowtide.errors import StorageError, UsageError
from lowtide.files.regular_file import read_from

MAX_FILE_BYTES = 1 << 26
MAX_QUESTION_CHARS = 1 << 20  # each is made into tokens once more for every choice
MAX_CHOICES = 64

_FORMAT = '{"context": "...", "choices": ["...", "..."], "answer": 0}'


class ChoiceQuestion(NamedTuple):
    """One line of the file."""

    context: str
    choices: tuple[str, ...]
    answer: int


def read_questions(path: Path) -> list[ChoiceQuestion]:
    """Read a file's questions.

    Raises StorageError if it cannot be read, UsageError with the line of an invalid question.
    """
    try:
        with path.open("rb") as file:
            data = read_from(file, MAX_FILE_BYTES + 1, f"The questions {path}")
    except OSError as reason:
        told = f"The questions {path} cannot be read: {reason.strerror}"
        raise StorageError(f"{told}; give a file with one a line, as {_FORMAT}.") from reason
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(f"{path} has more than {MAX_FILE_BYTES} bytes; give a part of it.")
    try:
        # By newlines alone: within a text JSON allows other ends of lines as they are.
        lines = data.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError:
        raise UsageError(f"The questions {path} are not in UTF-8; save them so.") from None
    found = [
        _question(line, f"{path}, line {n}") for n, line in enumerate(lines, 1) if line.strip()
    ]
    if not found:
        raise UsageError(f"{path} has no question: one a line, as {_FORMAT}.")
    return found


def _question(line: str, where: str) -> ChoiceQuestion:
    if len(line) > MAX_QUESTION_CHARS:
        raise UsageError(
            f"{where} has {len(line)} characters, a question at most {MAX_QUESTION_CHARS}: give "
            "the end of its context, which is all that a model reads of a long one."
        )
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise UsageError(f"{where} is not JSON; a question is {_FORMAT}.") from None
    if not isinstance(value, dict) or not {"context", "choices", "answer"} <= set(value):
        raise UsageError(f"{where} has not all of context, choices and answer: {_FORMAT}.")
    context, choices, answer = value["context"], value["choices"], value["answer"]
    if not isinstance(context, str) or not context:
        raise UsageError(f"{where}: context is a text that is not empty.")
    is_list = isinstance(choices, list) and 2 <= len(choices) <= MAX_CHOICES
    if not is_list or not all(isinstance(choice, str) and choice for choice in choices):
        raise UsageError(f"{where}: choices are 2 to {MAX_CHOICES} texts, none of them empty.")
    for text in (context, *choices):
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise UsageError(
                f"{where} has half of a surrogate pair, which is not a character: mend it."
            )
    is_index = isinstance(answer, int) and not isinstance(answer, bool)
    if not is_index or not 0 <= answer < len(choices):
        raise UsageError(
            f"{where}: answer is the index of the right choice, 0 to {len(choices) - 1}, not "
            f"{answer!r}."
        )
    return ChoiceQuestion(context, tuple(choices), answer)
