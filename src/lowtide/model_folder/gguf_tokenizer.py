"""The tokenizer and chat template in a GGUF file's metadata.

Converted to a `tokenizer.json` of the tokenizers library: byte-level BPE ("gpt2"), the pieces of a
sentence-piece model ("llama"), whose merges follow from their scores, or such pieces with merges of
their own ("gemma4").
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers

from lowtide.errors import CheckpointError, UnsupportedError
from lowtide.families.unsupported import SOME_THAT_RUN
from lowtide.files.json_file import shown
from lowtide.model_folder.chat_template import checked_templates
from lowtide.model_folder.gguf_eos import CONTROL, USER_DEFINED
from lowtide.model_folder.gguf_header import GgufArray, Metadata
from lowtide.model_folder.gguf_pretokenizers import WORD_RULES, merged_pair
from lowtide.model_folder.tokenizer import Tokenizer, begin_texts, blamed

MAX_TOKENS = 1 << 21
MAX_MERGES_PER_TOKEN = 16
"""Llama 3 and gpt-oss have two per token, since every way to make a token is listed."""

MOST_TEXT_BYTES = 1 << 20
BYTES_PER_TEXT = 64
"""Limit of average bytes per text of an array, beyond the first MiB.

The tokenizers library takes a hundred times a long token's bytes. Published arrays have 10 to 20,
lengths included.
"""

MAX_PIECE_CHARS = 128
"""Longest piece whose merges are searched. Published pieces have 16, runs of spaces more."""

_TEMPLATE_KEY = "tokenizer.chat_template"
_FETCH = "Fetch the file again"
_SPACE = "\u2581"
_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token", "mask": "mask_token"}


def gguf_tokenizer(metadata: Metadata, path: Path) -> Tokenizer | None:
    """Build the tokenizer, or return None for a file without one.

    Raises CheckpointError for one that is damaged, UnsupportedError for an unsupported kind.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None or kind == "none":  # llama.cpp's name for no tokenizer
        return None
    kinds = {"gpt2": _byte_level, "llama": _sentence_pieces, "gemma4": _merged_pieces}
    if not isinstance(kind, str) or kind not in kinds:
        raise UnsupportedError(
            f"{path}: its tokenizer is of the kind {shown(kind)}, which is not read; supported: "
            f"{', '.join(kinds)}. {SOME_THAT_RUN}"
        )
    tokens = _strings(metadata, "tokenizer.ggml.tokens", path, MAX_TOKENS)
    special = _special_tokens(metadata, tokens, path)
    keys = _TEMPLATE_KEY, f"{_TEMPLATE_KEY}.tool_use"
    templates = checked_templates(metadata.get(keys[0]), metadata.get(keys[1]), path)
    with blamed(f"{path}: its metadata does not make a tokenizer", _FETCH):
        backend = kinds[kind](metadata, tokens, path)
        _add_tokens(backend, _numbers(metadata, "tokenizer.ggml.token_type", tokens, path), tokens)
        if _adds_bos(metadata, kind) and "bos_token" in special:
            begin_texts(backend, special["bos_token"])
        return Tokenizer(backend, special, templates, f"{path.name} has no {_TEMPLATE_KEY}")


def _adds_bos(metadata: Metadata, kind: str) -> bool:
    """Return True if a text begins with a BOS token."""
    if kind == "gemma4":
        return True  # early files deny it
    words = WORD_RULES.get(str(metadata.get("tokenizer.ggml.pre")))
    usual = kind == "llama" or (words is not None and words.adds_bos)
    return bool(metadata.get("tokenizer.ggml.add_bos_token", usual))


def _byte_level(metadata: Metadata, tokens: Sequence[str], path: Path) -> tokenizers.Tokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    words = WORD_RULES.get(name) if isinstance(name, str) else None
    if words is None:
        raise UnsupportedError(
            f"{path}: its tokenizer cuts words by the rule {shown(name)}, which is not known; "
            f"known: {', '.join(WORD_RULES)}. Choose another file of the model, converted again: "
            "old ones do not say their rule."
        )
    return words.byte_level(_vocabulary(tokens), _listed_merges(metadata, tokens, path))


def _listed_merges(metadata: Metadata, tokens: Sequence[str], path: Path) -> list[tuple[str, str]]:
    """Read the file's merges. Raises CheckpointError for one that is malformed."""
    pairs, most = [], MAX_MERGES_PER_TOKEN * len(tokens)
    for merge in _strings(metadata, "tokenizer.ggml.merges", path, most):
        pair = merged_pair(merge)
        if pair is None:
            problem = f"the merge {shown(merge)} is not one of two tokens"
            raise CheckpointError(f"{path}: {problem}. {_FETCH}.")
        pairs.append(pair)
    return pairs


def _sentence_pieces(metadata: Metadata, tokens: Sequence[str], path: Path) -> tokenizers.Tokenizer:
    scores = _numbers(metadata, "tokenizer.ggml.scores", tokens, path)
    if not scores:
        raise CheckpointError(f"{path}: its {len(tokens)} tokens have no scores. {_FETCH}.")
    if any(map(math.isnan, scores)):  # pieces would be in no order
        raise CheckpointError(f"{path}: the score of a token is not a number. {_FETCH}.")
    has_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    merges = _merges(_vocabulary(tokens), scores)
    return _pieces(metadata, tokens, path, merges, has_prefix)


def _merged_pieces(metadata: Metadata, tokens: Sequence[str], path: Path) -> tokenizers.Tokenizer:
    return _pieces(metadata, tokens, path, _listed_merges(metadata, tokens, path), has_prefix=False)


def _pieces(
    metadata: Metadata,
    tokens: Sequence[str],
    path: Path,
    merges: Sequence[tuple[str, str]],
    has_prefix: bool,
) -> tokenizers.Tokenizer:
    """Build BPE over a text whose spaces are written as `_SPACE`, with a byte as the last resort.

    has_prefix: a space is put before a text.
    """
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if not isinstance(unknown, int) or not 0 <= unknown < len(tokens):
        problem = f"there is no token {shown(unknown)} for unknown text"
        raise CheckpointError(f"{path}: {problem}. {_FETCH}.")
    backend = tokenizers.Tokenizer(
        models.BPE(
            _vocabulary(tokens),
            list(merges),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    first = [normalizers.Prepend(_SPACE)] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", _SPACE)])
    parts: list[decoders.Decoder] = [
        decoders.Replace(_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if has_prefix:
        parts.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(parts)
    return backend


def _merges(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return all pairs of pieces that form a piece, best score first."""
    found = []
    for piece, number in vocabulary.items():
        if len(piece) > MAX_PIECE_CHARS:
            continue
        for cut in range(1, len(piece)):
            left, right = vocabulary.get(piece[:cut]), vocabulary.get(piece[cut:])
            if left is not None and right is not None:
                found.append((-scores[number], left, right, piece[:cut], piece[cut:]))
    return [(left, right) for *_, left, right in sorted(found)]


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    """Map tokens to ids, the first id of a duplicate."""
    vocabulary: dict[str, int] = {}
    for number, token in enumerate(tokens):
        vocabulary.setdefault(token, number)
    return vocabulary


def _add_tokens(
    backend: tokenizers.Tokenizer, kinds: Sequence[float], tokens: Sequence[str]
) -> None:
    """Add the tokens that are found before a text is split into words; they keep their ids."""
    added = [
        tokenizers.AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=False)
        if kind in (CONTROL, USER_DEFINED) and token
    ]
    backend.add_tokens(added)  # all at once: every call rebuilds the search for all of them


def _special_tokens(metadata: Metadata, tokens: Sequence[str], path: Path) -> dict[str, Any]:
    special = {}
    for name, called in _SPECIAL.items():
        number = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if number is None:
            continue
        if not isinstance(number, int) or not 0 <= number < len(tokens):
            raise CheckpointError(
                f"{path}: tokenizer.ggml.{name}_token_id {shown(number)} is none of {len(tokens)} "
                f"tokens. {_FETCH}."
            )
        special[called] = tokens[number]
    return special


def _strings(metadata: Metadata, key: str, path: Path, most: int) -> list[str]:
    """Return at most `most` texts, within `BYTES_PER_TEXT`, to bound the tokenizer's memory.

    Raises CheckpointError.
    """
    value = metadata.get(key)
    if not isinstance(value, GgufArray) or not value.is_text:
        raise CheckpointError(f"{path}: {key} is {shown(value)}, not an array of texts. {_FETCH}.")
    if value.num_elements > most:
        raise CheckpointError(
            f"{path}: {key} has {value.num_elements} texts; at most {most} are read. {_FETCH}."
        )
    most_bytes = MOST_TEXT_BYTES + BYTES_PER_TEXT * value.num_elements
    if len(value.data) > most_bytes:
        raise CheckpointError(
            f"{path}: the {value.num_elements} texts of {key} have {len(value.data)} bytes; at "
            f"most {most_bytes} are read. {_FETCH}."
        )
    return list(value.strings())


def _numbers(metadata: Metadata, key: str, tokens: Sequence[str], path: Path) -> list[int | float]:
    """Return one number per token, or none without the key. Raises CheckpointError."""
    value = metadata.get(key)
    if value is None:
        return []
    if not isinstance(value, GgufArray) or value.is_text or value.num_elements != len(tokens):
        raise CheckpointError(
            f"{path}: {key} is {shown(value)}, not an array of {len(tokens)} numbers. {_FETCH}."
        )
    return value.numbers()
