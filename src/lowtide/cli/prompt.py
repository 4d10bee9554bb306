"""Read a prompt from a flag, token ids or standard input, and prepare it for a model."""

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
    """A prompt as given, before the model's chat template is known.

    content: text or token ids. system: system message. is_raw: no template. think: switch thinking
    on or off; None leaves it to the model.
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
        """Return True if the model's chat template makes the prompt."""
        if self.is_raw or isinstance(self.content, list):
            return False
        return tokenizer is not None and tokenizer.has_chat_template

    def token_ids(self, llm: LLM) -> list[int]:
        """Return the prompt's token ids. Raises UsageError."""
        prompt = self.prompt(llm.tokenizer)
        options = think_options(self.think, llm.tokenizer)
        return llm.token_ids(prompt, raw=self.is_raw, template_options=options)

    def prompt(self, tokenizer: Tokenizer | None) -> Prompt:
        """Return the prompt: text, token ids or messages.

        Raises UsageError for `system` without a template.
        """
        if isinstance(self.content, str) and self.is_templated(tokenizer):
            return [*system_message(self.system), {"role": "user", "content": self.content}]
        if self.system is not None:
            raise UsageError(
                "--system: this model has no chat template that would place it; put it into the "
                "prompt."
            )
        return self.content


def think_options(think: bool | None, tokenizer: Tokenizer | None) -> dict[str, object]:
    """Return the template's variable for thinking; raises UsageError if it has none."""
    if think is None:
        return {}
    if tokenizer is None or not tokenizer.template_names("enable_thinking"):
        raise UsageError(
            "--think, --no-think: this model's chat template has no enable_thinking, so thinking "
            "cannot be switched; leave it out."
        )
    return {"enable_thinking": think}


def system_message(text: str | None) -> list[dict[str, str]]:
    return [] if text is None else [{"role": "system", "content": text}]


def read_prompt(text: str | None, ids: str | None, model: str = "MODEL") -> str | list[int]:
    """Return the prompt of `-p` or `--prompt-ids`, or read it from standard input.

    Standard input is read for `-p -`, or if neither is given and input is piped. Text from `-p` is
    followed, after an empty line, by a file or pipe on standard input. Raises UsageError if there
    is no prompt, if there are two, or if it is empty or not UTF-8.
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
    prompt = _read_stdin() if text is None or text == "-" else _decoded(text)
    if not prompt:
        raise UsageError("the prompt is empty: give at least one character.")
    if text not in (None, "-") and _has_piped_input() and (more := _read_stdin()):
        return f"{prompt}\n\n{more}"
    return prompt


def parse_ids(text: str) -> list[int]:
    """Parse token ids such as "5 17 3" or "5,17,3"; raises UsageError if there are none."""
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
    """Return True if standard input is a file or a pipe; print a note while a pipe is silent.

    Terminals, devices and sockets are not read beside a text.
    """
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):  # closed, or no file of the system
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
    """Read all of standard input, without the one newline that `echo` and editors add."""
    with contextlib.suppress(OSError):  # some programs leave it non-blocking, and reads end early
        os.set_blocking(sys.stdin.fileno(), True)
    content = read_from(sys.stdin.buffer, MAX_PROMPT_BYTES + 1, "standard input", UsageError)
    if len(content) > MAX_PROMPT_BYTES:
        raise UsageError(f"the prompt on standard input is above {MAX_PROMPT_BYTES} bytes.")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt on standard input is not UTF-8: {error}.") from None
    return text.removesuffix("\n").removesuffix("\r")


def _decoded(text: str) -> str:
    """Decode an argument that the system's encoding turned into surrogates."""
    try:
        has_surrogates = any("\ud800" <= character <= "\udfff" for character in text)
        return os.fsencode(text).decode() if has_surrogates else text
    except UnicodeError:
        raise UsageError("the prompt is not valid UTF-8.") from None
