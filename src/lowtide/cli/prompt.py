"""Where a prompt comes from: a flag, token ids, or standard input."""

from __future__ import annotations

import re
import sys

from lowtide.errors import UsageError

MAX_PROMPT_BYTES = 16 * 2**20
MAX_TOKEN_ID = 2**31 - 1


def read_prompt(text: str | None, ids: str | None) -> str | list[int]:
    """The prompt that `-p` or `--prompt-ids` names; `-p -`, or neither with piped input, reads it.

    Raises UsageError if there is none, if there are two, or if it is empty or not UTF-8.
    """
    if text is not None and ids is not None:
        raise UsageError("give either -p or --prompt-ids, not both.")
    if ids is not None:
        return parse_ids(ids)
    if text is None and sys.stdin.isatty():
        raise UsageError("no prompt: give -p TEXT, --prompt-ids, or pipe the text in.")
    prompt = _read_stdin() if text is None or text == "-" else _checked(text)
    if not prompt:
        raise UsageError("the prompt is empty: give at least one character after -p.")
    return prompt


def parse_ids(text: str) -> list[int]:
    """Token ids from "5 17 3" or "5,17,3"; UsageError if one is no id or there are none."""
    words = re.split(r"[\s,]+", text.strip())
    if words == [""]:
        raise UsageError('the prompt is empty: --prompt-ids wants token ids such as "5 17 3".')
    return [_token_id(word) for word in words]


def _token_id(word: str) -> int:
    if not re.fullmatch(r"[0-9]{1,10}", word) or int(word) > MAX_TOKEN_ID:
        raise UsageError(
            f"--prompt-ids: {word[:40]!r} is not a token id (an integer from 0 to {MAX_TOKEN_ID})."
        )
    return int(word)


def _read_stdin() -> str:
    """All of standard input, without the one newline that `echo` and editors add."""
    content = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
    if len(content) > MAX_PROMPT_BYTES:
        raise UsageError(f"the prompt on standard input is above {MAX_PROMPT_BYTES} bytes.")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt on standard input is not UTF-8: {error}.") from None
    return text.removesuffix("\n").removesuffix("\r")


def _checked(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:  # an argument's bytes that are not UTF-8 arrive as surrogates
        raise UsageError("the prompt is not valid UTF-8.") from None
    return text
