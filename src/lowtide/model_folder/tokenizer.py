"""Text to token ids and back, and chat messages to a prompt: `Tokenizer`, `TextStream`.

Everything comes from `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`; a
model's own Python code is never run. Knows nothing of models and imports no torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from lowtide.errors import CheckpointError, UsageError
from lowtide.files.json_file import file_bytes, read_object

MAX_TOKENIZER_BYTES = 128 << 20
MAX_CONFIG_BYTES = 16 << 20
MAX_TEMPLATE_CHARS = 256 << 10
MAX_TEXT_CHARS = 64 << 20
MAX_TOKEN_ID = 2**31 - 1

TEMPLATE_MEMORY_BYTES = 512 << 20
TEMPLATE_CPU_S = 2
TEMPLATE_WALL_S = 20  # a busy machine may take seconds to start a process

ROLES = ("system", "user", "assistant", "tool")

Message = Mapping[str, str]


class Tokenizer:
    """One folder's tokenizer, special tokens and chat template.

    vocab_size: its largest token id plus one (a model's vocabulary may be padded beyond it).
    eos_token_ids: ids that end a text, as far as the tokenizer knows them.
    mask_token_id, bos_token_id, pad_token_id: None where the folder names none.
    """

    @classmethod
    def load(cls, folder: Path) -> Tokenizer | None:
        """The tokenizer of a model folder; None if it has no `tokenizer.json`.

        Raises CheckpointError for files that are too large or not what they should be.
        """
        path = folder / "tokenizer.json"
        if not path.exists():
            return None
        _check_size(path, MAX_TOKENIZER_BYTES)
        config_path = folder / "tokenizer_config.json"
        config = read_object(config_path, MAX_CONFIG_BYTES) if config_path.exists() else {}
        return cls(_read_tokenizer(path), config, _read_template(folder, config))

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: Mapping[str, Any],
        chat_template: str | None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._template = chat_template
        self._special = _special_tokens(config)
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        eos = self._special_id("eos_token")
        self.eos_token_ids = () if eos is None else (eos,)
        self.bos_token_id = self._special_id("bos_token")
        self.pad_token_id = self._special_id("pad_token")
        mask = self._special_id("mask_token")
        # LLaDA2's tokenizer has the token but its configuration does not name it.
        self.mask_token_id = self.token_id("<|mask|>") if mask is None else mask

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a text; `add_special` lets the tokenizer add what it adds to a prompt.

        Raises UsageError for text that is too long or not valid Unicode.
        """
        if len(text) > MAX_TEXT_CHARS:
            raise UsageError(
                f"The text has {len(text)} characters, more than {MAX_TEXT_CHARS}; shorten it."
            )
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError(f"The text is not valid Unicode at character {error.start}.") from None
        return list(self._backend.encode(text, add_special_tokens=add_special).ids)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of token ids; ids without a token (a padded vocabulary's) are nothing.

        Raises UsageError for ids that no vocabulary can have.
        """
        for i in ids:
            if not 0 <= i <= MAX_TOKEN_ID:
                raise UsageError(f"Token id {i} is outside 0 to {MAX_TOKEN_ID}.")
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special))

    def token_id(self, text: str) -> int | None:
        """The id of exactly this token, or None."""
        found = self._backend.token_to_id(text)
        return None if found is None else int(found)

    def piece(self, token_id: int) -> str:
        """One token for display, on its own: never empty, leading space kept.

        A token that is part of a character appears as the tokenizer spells it.
        """
        raw = self._backend.id_to_token(token_id) if 0 <= token_id <= MAX_TOKEN_ID else None
        if raw is None:
            return f"<{token_id}>"
        text = self.decode([token_id], skip_special=False)
        if not text or "\ufffd" in text:
            return str(raw)
        # Sentence-piece decoders drop the space in front of a text's first word.
        return f" {text}" if raw.startswith("\u2581") and not text.startswith(" ") else text

    def stream(self, stop: Sequence[str] = ()) -> TextStream:
        """A decoder for ids that come a few at a time."""
        return TextStream(self, stop)

    def check_vocabulary(self, config_vocab_size: int) -> None:
        """Raises CheckpointError if the tokenizer has ids that the model has no row for."""
        if self.vocab_size > config_vocab_size:
            raise CheckpointError(
                f"The tokenizer has ids up to {self.vocab_size - 1}, but the model's vocabulary "
                f"ends at {config_vocab_size - 1}; tokenizer.json and config.json do not belong "
                "together."
            )

    def encode_chat(
        self, messages: Sequence[Message], add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation; special tokens are those the template writes."""
        return self.encode(self.render_chat(messages, add_generation_prompt), add_special=False)

    def render_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        options: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt of a conversation, by the model's own template in a bounded process.

        messages: each with a role (`system`, `user`, `assistant`, `tool`) and a content, both
        strings. options: further variables of the template, such as `enable_thinking`.
        Raises UsageError without a template, for bad messages, and when the template fails.
        """
        if self._template is None:
            raise UsageError(
                "This model has no chat template (tokenizer_config.json has no chat_template and "
                "there is no chat_template.jinja); give it a plain text prompt."
            )
        variables = dict(self._special) | dict(options or {})
        variables["messages"] = _checked_messages(messages)
        variables["add_generation_prompt"] = add_generation_prompt
        return _render(self._template, variables)

    def _special_id(self, name: str) -> int | None:
        text = self._special.get(name)
        return None if text is None else self.token_id(text)


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """`text` before the earliest of the stop strings; all of it where there is none."""
    ends = [end for string in stop if (end := text.find(string)) >= 0]
    return text[: min(ends, default=None)]


class TextStream:
    """Decodes ids as they come and hands out what is certain: complete characters, and none of
    those with which a stop string may have begun.

    The texts of all `push` calls and of `finish`, joined, are the text of all ids together, cut
    at the first of the stop strings; `is_stopped` as soon as there is one.
    """

    # A decoder may show an unfinished character, or a whole run of byte tokens that ends in one,
    # as replacement characters that later ids turn into text: such an end is held back this far.
    _MAX_HELD_CHARS = 16
    _WINDOW_TOKENS = 64

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.is_stopped = False
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._held = ""  # complete characters that may begin a stop string
        self._window: list[int] = []  # the latest ids
        self._sent = ""  # of the window's text, what was handed out

    def push(self, ids: Sequence[int]) -> str:
        """The new text that is certain after these ids; may be empty."""
        self._window += ids
        text = self._tokenizer.decode(self._window)
        end = text.rstrip("\ufffd")
        if len(text) - len(end) > self._MAX_HELD_CHARS:
            end = text[: -self._MAX_HELD_CHARS]
        new = self._take(end)
        if self._sent == text and len(self._window) > self._WINDOW_TOKENS:
            self._shorten()
        return self._before_stop(new)

    def finish(self) -> str:
        """What was held back. The stream can go on afterwards with a new text."""
        new = self._before_stop(self._take(self._tokenizer.decode(self._window))) + self._held
        self._window, self._sent, self._held = [], "", ""
        return new

    def _before_stop(self, new: str) -> str:
        """What of the characters held back and `new` ones is before any stop string."""
        text, self._held = self._held + new, ""
        if self.is_stopped:
            return ""
        cut = cut_at_stop(text, self._stop)
        self.is_stopped = len(cut) < len(text)
        if self.is_stopped:
            return cut
        num_held = max((_num_begun(text, string) for string in self._stop), default=0)
        certain = text[: len(text) - num_held]
        self._held = text[len(certain) :]
        return certain

    def _take(self, text: str) -> str:
        if not text.startswith(self._sent):
            return ""
        new = text[len(self._sent) :]
        self._sent = text
        return new

    def _shorten(self) -> None:
        # Some ids stay, because a decoder treats the first word of a text differently.
        window = self._window[-self._WINDOW_TOKENS // 4 :]
        text = self._tokenizer.decode(window)
        if text and not text.startswith("\ufffd"):  # else it would cut a character in two
            self._window, self._sent = window, text


def _num_begun(text: str, stop: str) -> int:
    """With how many of its last characters `text` may have begun a stop string."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)


def _check_size(path: Path, max_bytes: int) -> None:
    size_bytes = file_bytes(path)
    if size_bytes > max_bytes:
        raise CheckpointError(f"{path} has {size_bytes} bytes; at most {max_bytes} are accepted.")


def _read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    # A panic of the Rust library is not an Exception, and its errors are bare Exceptions.
    except BaseException as error:
        raise CheckpointError(
            f"{path} is not a tokenizer that can be read: {str(error)[:300]}."
        ) from error


def _read_text(path: Path, max_bytes: int) -> str:
    _check_size(path, max_bytes)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error


def _read_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The folder's `chat_template.jinja`, else what `tokenizer_config.json` holds."""
    path = folder / "chat_template.jinja"
    if path.exists():
        template: object = _read_text(path, 4 * MAX_TEMPLATE_CHARS)
    else:
        template = config.get("chat_template")
    if isinstance(template, list):
        template = _default_template(template, folder)
    if template is None:
        return None
    if not isinstance(template, str):
        raise CheckpointError(
            f"{folder}: chat_template must be a string or a list of named ones, "
            f"not {type(template).__name__}."
        )
    if len(template) > MAX_TEMPLATE_CHARS:
        raise CheckpointError(
            f"{folder}: the chat template has {len(template)} characters; "
            f"at most {MAX_TEMPLATE_CHARS} are accepted."
        )
    return template


def _default_template(named: list[Any], folder: Path) -> object:
    """Of several templates the one named `default`, or the only one."""
    templates = {e["name"]: e.get("template") for e in named if isinstance(e, dict) and "name" in e}
    if "default" in templates:
        return templates["default"]
    if len(templates) == 1:
        return next(iter(templates.values()))
    raise CheckpointError(
        f"{folder}: chat_template lists {len(named)} templates and none is named 'default'."
    )


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`eos_token` and its like, as plain strings: the file has strings or objects."""
    special = {}
    for name, value in config.items():
        if not name.endswith("_token"):
            continue
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            special[name] = text
    return special


def _checked_messages(messages: object) -> list[dict[str, str]]:
    if not isinstance(messages, list | tuple) or not messages:
        raise UsageError("A conversation must be a list of at least one message.")
    return [_checked_message(message, i) for i, message in enumerate(messages)]


def _checked_message(message: object, index: int) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise UsageError(f"Message {index} must have a role and a content, not be {message!r:.80}.")
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


def _render(template: str, variables: Mapping[str, Any]) -> str:
    """Renders in a child process (why: see `template_worker`). Raises UsageError if it fails."""
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
        raise UsageError(f"The model's chat template failed: {answer.get('error')}.")
    return str(answer["text"])


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
            detail = done.stderr.decode(errors="replace").strip()[-300:]
            raise UsageError(f"The model's chat template could not be rendered: {detail}") from None
        raise UsageError(
            f"The model's chat template was stopped (signal {-done.returncode}): it used more than "
            f"{TEMPLATE_CPU_S} s of processor time or {TEMPLATE_MEMORY_BYTES} bytes of memory."
        ) from None
    except OSError as error:
        raise UsageError(f"No process could be started to render the template: {error}.") from error
    return answer if isinstance(answer, dict) else {}
