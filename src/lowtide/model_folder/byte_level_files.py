"""The tokenizer of a folder with `vocab.json` and `merges.txt` instead of `tokenizer.json`.

Dream and relatives are published so, with a Python class that is not run: it is byte-level BPE with
a word rule known by the class's name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers

from lowtide.errors import CheckpointError
from lowtide.files.json_file import read_object, shown
from lowtide.files.regular_file import FETCH_AGAIN, read_own
from lowtide.model_folder.gguf_pretokenizers import WORD_RULES, merged_pair

VOCABULARY_NAME, MERGES_NAME = "vocab.json", "merges.txt"

_MAX_FILE_BYTES = 16 << 20
_MAX_TOKENS = 1 << 21
_RULES = dict.fromkeys(
    ("DreamTokenizer", "Qwen2Tokenizer", "Qwen2TokenizerFast"), WORD_RULES["qwen2"]
)
_FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")


@cache
def byte_alphabet() -> Mapping[str, int]:
    """Map each character of a byte-level vocabulary to its byte (GPT-2's table).

    Visible characters stand for themselves, the other bytes follow from 256 on.
    """
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in seen]
    return {chr(b): b for b in seen} | {chr(0x100 + i): b for i, b in enumerate(others)}


def has_byte_level_files(folder: Path, config: Mapping[str, Any]) -> bool:
    """Return True if a folder has both files, and a known class in `tokenizer_config.json`."""
    are_there = all(os.path.lexists(folder / name) for name in (VOCABULARY_NAME, MERGES_NAME))
    return are_there and str(config.get("tokenizer_class")) in _RULES


def read_byte_level_files(folder: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Build the tokenizer of the two files, where `has_byte_level_files`.

    Raises CheckpointError for files that are too large or malformed; the tokenizers library raises
    other errors for numbers and merges that do not fit together.
    """
    path = folder / VOCABULARY_NAME
    vocabulary = read_object(path, _MAX_FILE_BYTES)
    for token, number in vocabulary.items():
        if type(number) is not int or not 0 <= number < _MAX_TOKENS:
            raise CheckpointError(
                f"{path}: token {shown(token)} has {shown(number)}, which is not a number from 0 "
                f"to {_MAX_TOKENS - 1}; {FETCH_AGAIN}."
            )
    words = _RULES[config["tokenizer_class"]]
    backend = words.byte_level(vocabulary, _read_merges(folder / MERGES_NAME))
    _add_tokens(backend, config.get("added_tokens_decoder") or {}, folder)
    return backend


def _read_merges(path: Path) -> list[tuple[str, str]]:
    try:
        text = read_own(path, _MAX_FILE_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not text in UTF-8: {error}; {FETCH_AGAIN}.") from error
    pairs = []
    for number, line in enumerate(text.split("\n"), 1):
        merge = line.removesuffix("\r")
        if not merge or (number == 1 and merge.startswith("#version")):
            continue
        pair = merged_pair(merge)
        if pair is None:
            problem = f"line {number}, {shown(merge)}, is not two tokens"
            raise CheckpointError(f"{path}: {problem}; {FETCH_AGAIN}.")
        pairs.append(pair)
    return pairs


def _add_tokens(backend: tokenizers.Tokenizer, listed: object, folder: Path) -> None:
    """Add the tokens of `tokenizer_config.json`, whose ids follow the vocabulary's."""
    where = f"{folder}: added_tokens_decoder of tokenizer_config.json"
    if not isinstance(listed, dict) or len(listed) > _MAX_TOKENS:
        raise CheckpointError(f"{where} must map numbers to tokens; {FETCH_AGAIN}.")
    tokens: dict[int, tokenizers.AddedToken] = {}
    for number, entry in listed.items():
        flags = {flag: entry.get(flag, False) for flag in _FLAGS} if isinstance(entry, dict) else {}
        is_token = flags and isinstance(entry.get("content"), str) and entry["content"]
        if not is_token or not all(isinstance(flag, bool) for flag in flags.values()):
            raise CheckpointError(f"{where}: {shown(entry)} is not a token; {FETCH_AGAIN}.")
        if not number.isascii() or not number.isdecimal() or len(number) > len(str(_MAX_TOKENS)):
            raise CheckpointError(
                f"{where}: {shown(number)} is not a token's number; {FETCH_AGAIN}."
            )
        tokens[int(number)] = tokenizers.AddedToken(entry["content"], **flags)
    backend.add_tokens([tokens[number] for number in sorted(tokens)])
    for number, token in tokens.items():
        if backend.token_to_id(token.content) != number:
            raise CheckpointError(
                f"{where} gives {shown(token.content)} the number {number}, and it follows as "
                f"{backend.token_to_id(token.content)}; {FETCH_AGAIN}."
            )
