"""`Tokenizer`: text to token ids and back, and chat messages to a prompt.

Everything comes from `tokenizer.json` (or `vocab.json` and `merges.txt`), `tokenizer_config.json`
and `chat_template.jinja`; a model's own Python code is never run. Knows nothing of models and
imports no torch.
"""

from __future__ import annotations

import base64
import codecs
import functools
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any

import tokenizers
from tokenizers import models, processors

from lowtide.errors import CheckpointError, LowtideError, UsageError
from lowtide.files.json_file import printable, read_object, shown
from lowtide.files.regular_file import read_own
from lowtide.model_folder.byte_level_files import (
    byte_alphabet,
    has_byte_level_files,
    read_byte_level_files,
)
from lowtide.model_folder.chat_messages import Message
from lowtide.model_folder.chat_template import MAX_TEXT_CHARS, ChatTemplates, read_templates
from lowtide.model_folder.text_pieces import PIECE_CHARS, WORK_BYTES, TextPieces
from lowtide.model_folder.text_stream import TextStream, is_local, steps_of, with_valid_bytes

TOKENIZER_NAME = "tokenizer.json"
CONFIG_NAME = "tokenizer_config.json"

NO_TEMPLATE = f"{CONFIG_NAME} has no chat_template and there is no chat_template.jinja"

NO_TOKENIZER = "This model has no tokenizer.json, or its GGUF file no tokenizer"

# A text is divided among no threads: they would outlive it, and a fork of the process warn of them.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

MAX_TOKENIZER_BYTES = 128 << 20
MAX_CONFIG_BYTES = 16 << 20
MAX_TOKEN_ID = 2**31 - 1
MAX_ADDED_TOKENS = 4096  # added to every text, such as BOS
MAX_GROWTH = 4096  # most characters that one may become; XLNet's bound is 2592
_SHOWN_CHARS = 20  # from the fault of a text on
MAX_TURNS = 4  # pieces encoded concurrently


class TooManyTokens(UsageError):
    """Raised for a text with too many tokens. num_tokens: a lower bound of their number."""

    def __init__(self, num_tokens: int, most: int) -> None:
        super().__init__(
            f"The text has at least {num_tokens} tokens, more than {most}; shorten it."
        )
        self.num_tokens = num_tokens


class Tokenizer:
    """One folder's tokenizer, special tokens and chat template.

    vocab_size: its largest token id plus one (a model's vocabulary may be padded beyond it).
    eos_token_ids: ids that end a text, as far as the tokenizer knows them.
    bos_token_id: None if the folder names none.
    """

    @classmethod
    def load(cls, folder: Path) -> Tokenizer | None:
        """Load the tokenizer of a model folder; None if it has none that is supported.

        Raises CheckpointError for files that are too large or malformed.
        """
        config = _read_config(folder)
        if not _has_tokenizer(folder, config):
            return None
        templates = read_templates(folder, config)
        failure = f"{folder}: its tokenizer's files and {CONFIG_NAME} do not make a tokenizer"
        with blamed(failure, "Fetch them again"):
            return cls(_read_backend(folder, config), config, templates)

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: Mapping[str, Any],
        templates: ChatTemplates | None,
        no_template: str = NO_TEMPLATE,
    ) -> None:
        """no_template: the reason why there is no template."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._templates, self._no_template = templates, no_template
        self._special = _special_tokens(config)
        steps = steps_of(backend.decoder)
        self._is_local = is_local(steps)
        self._byte_ids = _byte_ids(backend) if _has_byte_tokens(steps) else frozenset()
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        eos = self._special_id("eos_token")
        self.eos_token_ids = () if eos is None else (eos,)
        self.bos_token_id = self._special_id("bos_token")
        self._begins_texts = backend.encode("").ids[:1] == [self.bos_token_id]
        # Bound concurrent encodings, and so their memory.
        self._turns = (BoundedSemaphore(MAX_TURNS), BoundedSemaphore(1))

    @property
    def has_chat_template(self) -> bool:
        return self._templates is not None

    def template_names(self, variable: str) -> bool:
        """Return True if the chat template mentions a variable."""
        return self._templates is not None and self._templates.names(variable)

    def encode(self, text: str, *, add_special: bool = True, most: int | None = None) -> list[int]:
        """Encode a text; `add_special` adds the tokenizer's tokens for prompts.

        A token that already begins the text is not added again. A long text is cut where that
        changes no id (`text_pieces.py`), to save memory. Raises UsageError for text that is too
        long or not valid Unicode, TooManyTokens as soon as there are more than `most`,
        CheckpointError if the tokenizer fails.
        """
        ids: list[int] = []
        for _, part in self._parts(text, add_special, most):
            ids += part
            _check_most(len(ids), most)
        return ids[self._num_doubled(ids, add_special) :]

    def places(self, text: str, *, add_special: bool = True) -> list[int]:
        """Return the character positions at which the tokens of `encode` begin.

        Tokens of one character share its position; an added token has that of the next. Raises as
        `encode`.
        """
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        for of_part, part in self._parts(text, add_special):
            ids += part
            offsets += of_part
        end, places = 0, []
        for start, next_end in offsets[self._num_doubled(ids, add_special) :]:
            # A tokenizer may count a word without the space before it.
            places.append(min(start, end) if next_end else end)
            end = max(end, next_end)
        return places

    def _num_doubled(self, ids: Sequence[int], add_special: bool) -> int:
        """Return the number of first tokens that the text already began with."""
        return int(add_special and self._begins_texts and ids[1:2] == [self.bos_token_id])

    def _parts(
        self, text: str, add_special: bool, most: int | None = None
    ) -> Iterator[tuple[list[tuple[int, int]], list[int]]]:
        """Yield character ranges and ids of the tokens, part by part."""
        if len(text) > MAX_TEXT_CHARS:
            raise UsageError(
                f"The text has {len(text)} characters, more than {MAX_TEXT_CHARS}; shorten it."
            )
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            near = shown(text[error.start : error.start + _SHOWN_CHARS])
            raise UsageError(
                f"The text is not valid Unicode at character {error.start}: {near}."
            ) from None
        if len(text) <= PIECE_CHARS:
            found = self._encoding(text, add_special)
            yield found.offsets, found.ids
            return
        _check_most(self._pieces.least_tokens(text), most)
        before, after = self._added_ids if add_special else ([], [])
        yield [(0, 0)] * len(before), before
        for place, piece in self._pieces(text):
            found = self._encoding(piece, False)
            yield [(start + place, end + place) for start, end in found.offsets], found.ids
        yield [(0, 0)] * len(after), after

    def _encoding(self, text: str, add_special: bool) -> tokenizers.Encoding:
        failure = f"This model's tokenizer failed on a text of {len(text)} characters"
        is_long = len(text) > 2 * PIECE_CHARS  # one that cannot be cut
        with blamed(failure, "Give token ids instead of text"), self._turns[is_long]:
            # A batch of one: `encode` keeps Python's lock, so that no other thread runs meanwhile.
            [found] = self._backend.encode_batch([text], add_special_tokens=add_special)
        return found

    def work_bytes(self, num_bytes: int, num_tokens: int) -> int:
        """Bound the memory for encoding texts of `num_bytes`, at most `num_tokens` tokens each.

        This covers one text that cannot be cut, and pieces of others.
        """
        most = self._pieces.most_chars(num_tokens)
        whole = num_bytes if most is None else min(num_bytes, most * 4)
        return (whole + MAX_TURNS * 4 * PIECE_CHARS) * WORK_BYTES

    @cached_property
    def _pieces(self) -> TextPieces:
        return TextPieces(self._backend)

    @cached_property
    def _added_ids(self) -> tuple[list[int], list[int]]:
        """Ids added before and after every text."""
        [alone] = self._encoding("a", False).ids[:1] or [-1]
        whole = self._encoding("a", True).ids
        place = whole.index(alone) if alone in whole else len(whole)
        return whole[:place], whole[place + 1 :]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Decode token ids; ids without a token (of a padded vocabulary) are skipped.

        Raises UsageError for ids that no vocabulary can have, CheckpointError if the tokenizer
        fails.
        """
        for i in ids:
            if not 0 <= i <= MAX_TOKEN_ID:
                raise UsageError(f"Token id {i} is outside 0 to {MAX_TOKEN_ID}.")
        failure = f"This model's tokenizer failed to write {len(ids)} tokens as text"
        with blamed(failure, "Without its tokenizer.json the model answers in token ids"):
            if not self._byte_ids or self._byte_ids.isdisjoint(ids):
                return str(self._backend.decode(list(ids), skip_special_tokens=skip_special))
            left_out = self.special_texts if skip_special else {}
            tokens = [self._backend.id_to_token(i) for i in ids if i not in left_out]
            known = [token for token in tokens if token is not None]
            return str(self._backend.decoder.decode(with_valid_bytes(known)))

    def token_id(self, text: str) -> int | None:
        """Return the id of exactly this token, or None."""
        found = self._backend.token_to_id(text)
        return None if found is None else int(found)

    @functools.cached_property
    def special_texts(self) -> Mapping[int, str]:
        """Special tokens, which decoding leaves out, by id."""
        added = self._backend.get_added_tokens_decoder()
        return {token_id: str(token) for token_id, token in added.items() if token.special}

    def as_json(self) -> str:
        """Return the tokenizer as the contents of a `tokenizer.json`."""
        return str(self._backend.to_str())

    def piece(self, token_id: int) -> str:
        """Return one token for display: never empty, leading space kept.

        Part of a character appears as the tokenizer spells it.
        """
        raw = self._backend.id_to_token(token_id) if 0 <= token_id <= MAX_TOKEN_ID else None
        if raw is None:
            return f"<{token_id}>"
        text = self.decode([token_id], skip_special=False)
        if "\ufffd" in text:
            return str(raw)
        if raw.startswith("\u2581"):  # decoders drop a space in front of a text's first word
            text = self.decode([token_id, token_id], skip_special=False)[len(text) :]
        return text or str(raw)

    def piece_bytes(self, token_id: int) -> bytes | None:
        """Return one token's bytes, perhaps part of a character; None if they are not known."""
        text = self.decode([token_id], skip_special=False) if 0 <= token_id <= MAX_TOKEN_ID else ""
        if text and "\ufffd" not in text:
            return self.piece(token_id).encode()
        raw = self._backend.id_to_token(token_id) if 0 <= token_id <= MAX_TOKEN_ID else None
        if raw is None:
            return None
        if match := re.fullmatch(r"<0x([0-9A-F]{2})>", raw):
            return bytes([int(match[1], 16)])
        known = byte_alphabet()
        return bytes(known[c] for c in raw) if all(c in known for c in raw) else None

    def stream(self) -> TextStream:
        """Make a decoder for ids that come a few at a time."""
        return TextStream(self, self._is_local, self.is_text)

    def is_text(self, token_id: int) -> bool:
        """Return True if an id makes text: no special token and within the vocabulary."""
        return token_id < self.vocab_size and token_id not in self.special_texts

    def check_vocabulary(self, config_vocab_size: int) -> None:
        """Raise CheckpointError if the tokenizer has ids beyond the model's vocabulary."""
        if self.vocab_size > config_vocab_size:
            raise CheckpointError(
                f"The tokenizer has ids up to {self.vocab_size - 1}, but the model's vocabulary "
                f"ends at {config_vocab_size - 1}; tokenizer.json and config.json do not belong "
                "together. Fetch both from one model."
            )

    def encode_chat(
        self,
        messages: Sequence[Message],
        options: Mapping[str, object] | None = None,
        most: int | None = None,
    ) -> list[int]:
        """Encode a conversation, with the template's special tokens; most: see `encode`."""
        return self.encode(self.render_chat(messages, options), add_special=False, most=most)

    def render_chat(
        self, messages: Sequence[Message], options: Mapping[str, object] | None = None
    ) -> str:
        """Render a conversation by the model's own template in a bounded process.

        messages: see `chat_messages.py`; a last one by the assistant is to be continued.
        options: further variables of the template, such as `enable_thinking`, or `tools`, the
          declarations of functions that may be called.

        Raises UsageError without a template, for bad messages, and if the template fails.
        """
        if self._templates is None:
            raise UsageError(
                f"This model has no chat template ({self._no_template}); give it a plain text "
                "prompt."
            )
        return self._templates.render(messages, {**self._special, **(options or {})})

    def _special_id(self, name: str) -> int | None:
        text = self._special.get(name)
        return None if text is None else self.token_id(text)


def has_chat_template(folder: Path) -> bool:
    """Return True if a folder has a chat template, without reading its tokenizer.

    Raises CheckpointError as `Tokenizer.load`.
    """
    config = _read_config(folder)
    return _has_tokenizer(folder, config) and read_templates(folder, config) is not None


def num_begun(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that may begin a stop string or mark."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)


@contextmanager
def blamed(failure: str, way_out: str) -> Iterator[None]:
    """Convert any failure of the tokenizers library to CheckpointError.

    A panic of Rust code derives from BaseException alone.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, LowtideError):
        raise
    except BaseException as error:
        reason = printable(str(error)[:300]) or type(error).__name__
        raise CheckpointError(f"{failure}: {reason}. {way_out}.") from error


def _check_most(num_tokens: int, most: int | None) -> None:
    if most is not None and num_tokens > most:
        raise TooManyTokens(num_tokens, most)


def begin_texts(backend: tokenizers.Tokenizer, bos: str) -> None:
    """Make texts begin with this token, if it exists, unless no special tokens are wanted."""
    number = backend.token_to_id(bos)
    if number is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, number)]
        )


def _has_tokenizer(folder: Path, config: Mapping[str, Any]) -> bool:
    return os.path.lexists(folder / TOKENIZER_NAME) or has_byte_level_files(folder, config)


def _read_backend(folder: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    path = folder / TOKENIZER_NAME
    is_whole = os.path.lexists(path)
    backend = _read_tokenizer(path) if is_whole else read_byte_level_files(folder, config)
    bos = _special_tokens(config).get("bos_token")
    adds_nothing = not backend.num_special_tokens_to_add(is_pair=False)
    if bos and config.get("add_bos_token") is True and adds_nothing:
        begin_texts(backend, bos)  # as transformers does, above all for DeepSeek
    return backend


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_NAME
    return read_object(path, MAX_CONFIG_BYTES) if os.path.lexists(path) else {}


def _read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    data = read_own(path, MAX_TOKENIZER_BYTES).removeprefix(codecs.BOM_UTF8)
    with blamed(f"{path} is not a tokenizer that can be read", "Fetch it again"):
        backend = tokenizers.Tokenizer.from_buffer(data)
        num_added = backend.num_special_tokens_to_add(is_pair=False)
        encoded = _growth(backend.normalizer) * _growth(backend.pre_tokenizer)
        growth = max(encoded * _num_copies(backend.post_processor), _growth(backend.decoder))
        if isinstance(backend.model, models.BPE):
            backend.model.dropout = None  # of training: a text would have other ids each time
    if num_added > MAX_ADDED_TOKENS:
        raise CheckpointError(
            f"{path} adds {num_added} special tokens to every text; at most {MAX_ADDED_TOKENS} "
            "are accepted. Fetch it again."
        )
    if growth > MAX_GROWTH:
        raise CheckpointError(
            f"{path} may make {shown(growth)} characters of one; at most {MAX_GROWTH} are "
            "accepted. Fetch it again."
        )
    return backend


def _growth(part: Any) -> int:
    """Return a bound on the factor by which a part may lengthen a long text."""
    return math.prod(map(_growth_of_step, steps_of(part)))


def _growth_of_step(step: Mapping[str, Any]) -> int:
    kind = step.get("type", "")
    if kind == "Replace":
        replaced, length = len(step["pattern"].get("String", "")), len(step["content"])
        # Nothing, or an expression, may match between any two characters.
        return max(1, -(-length // replaced)) if replaced else 1 + length
    if kind == "Prepend":
        return 1 + len(step["prepend"])
    if kind == "Precompiled":
        return _longest_replacement(base64.b64decode(step["precompiled_charsmap"]))
    if kind == "ByteLevel":
        return 4 + bool(step.get("add_prefix_space"))  # a character for each byte
    return _GROWTHS.get(kind, 1)


_GROWTHS = {
    "NFC": 3,  # forms and cases by Unicode's own tables
    "NFD": 4,
    "NFKC": 18,
    "NFKD": 18,
    "Lowercase": 2,
    "BertNormalizer": 3,
    "Metaspace": 2,  # a character before each word
    "WordPiece": 2,
    "CTC": 2,  # a space for a text that may be empty
    "BPEDecoder": 2,
}
"""Steps that lengthen texts by their kind alone."""


def _longest_replacement(charsmap: bytes) -> int:
    """Return the most characters that a map of SentencePiece puts for one.

    Behind the trie of what is replaced, its size before it, are the replacements, each with a NUL.
    """
    num_bytes = int.from_bytes(charsmap[:4], "little")
    return max(1, *map(len, charsmap[4 + num_bytes :].decode().split("\0")))


def _num_copies(post_processor: Any) -> int:
    """Return how often a text is in what its templates make of it."""
    templates = [step["single"] for step in steps_of(post_processor) if "single" in step]
    return math.prod(max(1, sum("Sequence" in part for part in each)) for each in templates)


def _has_byte_tokens(steps: Sequence[Mapping[str, Any]]) -> bool:
    return any(step.get("type") == "ByteFallback" for step in steps)


def _byte_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    """Return the ids of single-byte tokens."""
    names = (f"<0x{value:{form}}>" for value in range(0x100) for form in ("02X", "02x"))
    return frozenset(i for name in names if (i := backend.token_to_id(name)) is not None)


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Read `eos_token` and others as plain strings: the file has strings or objects."""
    special = {}
    for name, value in config.items():
        if not name.endswith("_token"):
            continue
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            special[name] = text
    return special
