"""Where a prompt comes from, a flag, token ids or standard input, and what becomes of it."""

from __future__ import annotations

import contextlib
import io
import os
import re
import select
import shlex
import stat
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowtide.errors import UsageError
from lowtide.files.regular_file import read_from

if TYPE_CHECKING:
    from lowtide.cli.answer import Prompt
    from lowtide.llm import LLM
    from lowtide.model_folder.tokenizer import Tokenizer

MAX_PROMPT_BYTES = 16 * 2**20
MAX_TOKEN_ID = 2**31 - 1
SILENT_PIPE_S = 2.0


@dataclass(frozen=True)
class Question:
    """What was asked, before it is known whether the model has a chat template.

    content: text or token ids. system: what the model is told first. is_raw: no template. think:
    whether the model is to think first, None as it does by itself.
    """

    content: str | list[int]
    system: str | None = None
    is_raw: bool = False
    think: bool | None = None

    def __post_init__(self) -> None:
        if self.system is not None and isinstance(self.content, list):
            raise UsageError("--system is text for a chat template, and token ids have none.")
        if self.system is not None and self.is_raw:
            raise UsageError("--system is placed by the chat template, which --raw leaves out.")
        if self.think is not None and (self.is_raw or isinstance(self.content, list)):
            raise UsageError("--think, --no-think are for the chat template, which is left out.")

    def is_templated(self, tokenizer: Tokenizer | None) -> bool:
        """Whether the model's chat template makes the prompt."""
        if self.is_raw or isinstance(self.content, list):
            return False
        return tokenizer is not None and tokenizer.has_chat_template

    def token_ids(self, llm: LLM) -> list[int]:
        """What the model is given, as ids. Raises UsageError."""
        prompt = self.prompt(llm.tokenizer)
        options = think_options(self.think, llm.tokenizer)
        return llm.token_ids(prompt, raw=self.is_raw, template_options=options)

    def prompt(self, tokenizer: Tokenizer | None) -> Prompt:
        """What the model is given. Raises UsageError for `system` without a template."""
        if isinstance(self.content, str) and self.is_templated(tokenizer):
            return [*system_message(self.system), {"role": "user", "content": self.content}]
        if self.system is not None:
            raise UsageError(
                "--system: this model has no chat template that would place it; put it into the "
                "prompt."
            )
        return self.content


def think_options(think: bool | None, tokenizer: Tokenizer | None) -> dict[str, object]:
    """The chat template's variable that says whether to think. Raises UsageError where it has
    none.
    """
    if think is None:
        return {}
    if tokenizer is None or not tokenizer.template_names("enable_thinking"):
        raise UsageError(
            "--think, --no-think: this model's chat template has no enable_thinking; leave it out."
        )
    return {"enable_thinking": think}


def system_message(text: str | None) -> list[dict[str, str]]:
    """What a conversation begins with."""
    return [] if text is None else [{"role": "system", "content": text}]


def read_prompt(text: str | None, ids: str | None, model: str = "MODEL") -> str | list[int]:
    """The prompt that `-p` or `--prompt-ids` names; `-p -`, or neither with piped input, reads it.

    A text is followed, after an empty line, by what a file or a pipe holds on standard input.
    Raises UsageError if there is none, if there are two, or if it is empty or not UTF-8.
    """
    if text is not None and ids is not None:
        raise UsageError("give either -p or --prompt-ids, not both.")
    if ids is not None:
        return parse_ids(ids)
    if text is None and sys.stdin.isatty():
        raise UsageError(
            "no prompt: give it after the model, by -p TEXT or --prompt-ids, or pipe it in; to "
            f"talk, lowtide chat {shlex.quote(model)}."
        )
    prompt = _read_stdin() if text is None or text == "-" else _checked(text)
    if not prompt:
        raise UsageError("the prompt is empty: give at least one character after -p.")
    if text not in (None, "-") and _has_piped_input() and (more := _read_stdin()):
        return f"{prompt}\n\n{more}"
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


def _has_piped_input() -> bool:
    """Whether standard input is a file or a pipe: a terminal, a device or a socket is not read
    beside a text. Says what is waited for where a pipe is silent.
    """
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):  # closed, or none of the system's
        buffer = getattr(sys.stdin, "buffer", None)
        return isinstance(buffer, io.BufferedIOBase) and not buffer.closed
    if not stat.S_ISFIFO(mode):
        return stat.S_ISREG(mode)
    if not select.select([sys.stdin], [], [], SILENT_PIPE_S)[0]:
        print(
            "lowtide: waiting for standard input to end: its text is added to the prompt "
            "(< /dev/null leaves it out).",
            file=sys.stderr,
        )
    return True


def _read_stdin() -> str:
    """All of standard input, without the one newline that `echo` and editors add."""
    with contextlib.suppress(OSError):  # some programs leave it so that reads end too early
        os.set_blocking(sys.stdin.fileno(), True)
    content = read_from(sys.stdin.buffer, MAX_PROMPT_BYTES + 1, "standard input", UsageError)
    if len(content) > MAX_PROMPT_BYTES:
        raise UsageError(f"the prompt on standard input is above {MAX_PROMPT_BYTES} bytes.")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt on standard input is not UTF-8: {error}.") from None
    return text.removesuffix("\n").removesuffix("\r")


def _checked(text: str) -> str:
    """An argument that is not in the system's encoding arrives with surrogates for its bytes."""
    try:
        has_surrogates = any("\ud800" <= character <= "\udfff" for character in text)
        return os.fsencode(text).decode() if has_surrogates else text
    except UnicodeError:
        raise UsageError("the prompt is not valid UTF-8.") from None
