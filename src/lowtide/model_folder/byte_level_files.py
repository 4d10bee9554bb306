"""The tokenizer of a folder that has `vocab.json` and `merges.txt` in place of `tokenizer.json`.

So Dream and its kin are published, with a class in Python that is not run: what it does is
byte-level BPE by a rule for words that is known, here by the name of the class.
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
from lowtide.files.regular_file import read_own
from lowtide.model_folder.gguf_words import WORDS, merged_pair

VOCABULARY_NAME, MERGES_NAME = "vocab.json", "merges.txt"

_MAX_FILE_BYTES = 16 << 20
_MAX_TOKENS = 1 << 21
_WORDS = dict.fromkeys(("DreamTokenizer", "Qwen2Tokenizer", "Qwen2TokenizerFast"), WORDS["qwen2"])
_FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")


@cache
def byte_alphabet() -> Mapping[str, int]:
    """The byte that each character of a byte-level vocabulary stands for: GPT-2's table, in which
    those that can be seen stand for themselves, and the others follow from 256 on.
    """
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in seen]
    return {chr(b): b for b in seen} | {chr(0x100 + i): b for i, b in enumerate(others)}


def has_byte_level_files(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether a folder has both files, and its `tokenizer_config.json` a class that is known."""
    are_there = all(os.path.lexists(folder / name) for name in (VOCABULARY_NAME, MERGES_NAME))
    return are_there and str(config.get("tokenizer_class")) in _WORDS


def read_byte_level_files(folder: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """What its `tokenizer.json` would be, where `has_byte_level_files`.

    Raises CheckpointError for files that are too large or not what they should be; the tokenizers
    library raises what it likes for numbers and merges that do not fit together.
    """
    path = folder / VOCABULARY_NAME
    vocabulary = read_object(path, _MAX_FILE_BYTES)
    for token, number in vocabulary.items():
        if type(number) is not int or not 0 <= number < _MAX_TOKENS:
            raise CheckpointError(
                f"{path}: token {shown(token)} has {shown(number)}, which is no number from 0 to "
                f"{_MAX_TOKENS - 1}."
            )
    words = _WORDS[config["tokenizer_class"]]
    backend = words.byte_level(vocabulary, _read_merges(folder / MERGES_NAME))
    _add_tokens(backend, config.get("added_tokens_decoder") or {}, folder)
    return backend


def _read_merges(path: Path) -> list[tuple[str, str]]:
    try:
        text = read_own(path, _MAX_FILE_BYTES, CheckpointError).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not text in UTF-8: {error}.") from error
    pairs = []
    for number, line in enumerate(text.split("\n"), 1):
        merge = line.removesuffix("\r")
        if not merge or (number == 1 and merge.startswith("#version")):
            continue
        pair = merged_pair(merge)
        if pair is None:
            raise CheckpointError(f"{path}: line {number}, {shown(merge)}, is not two tokens.")
        pairs.append(pair)
    return pairs


def _add_tokens(backend: tokenizers.Tokenizer, listed: object, folder: Path) -> None:
    """Those of `tokenizer_config.json`, whose numbers follow those of the vocabulary."""
    where = f"{folder}: added_tokens_decoder of tokenizer_config.json"
    if not isinstance(listed, dict) or len(listed) > _MAX_TOKENS:
        raise CheckpointError(f"{where} must map numbers to tokens.")
    tokens: dict[int, tokenizers.AddedToken] = {}
    for number, entry in listed.items():
        flags = {flag: entry.get(flag, False) for flag in _FLAGS} if isinstance(entry, dict) else {}
        is_token = flags and isinstance(entry.get("content"), str) and entry["content"]
        if not is_token or not all(isinstance(flag, bool) for flag in flags.values()):
            raise CheckpointError(f"{where}: {shown(entry)} is not a token.")
        if not number.isascii() or not number.isdecimal() or len(number) > len(str(_MAX_TOKENS)):
            raise CheckpointError(f"{where}: {shown(number)} is no token's number.")
        tokens[int(number)] = tokenizers.AddedToken(entry["content"], **flags)
    backend.add_tokens([tokens[number] for number in sorted(tokens)])
    for number, token in tokens.items():
        if backend.token_to_id(token.content) != number:
            raise CheckpointError(
                f"{where} gives {shown(token.content)} the number {number}, and it follows as "
                f"{backend.token_to_id(token.content)}."
            )
