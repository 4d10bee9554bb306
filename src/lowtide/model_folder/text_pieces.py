"""Cuts a long text so that its pieces' token ids are the ids of the whole.

A tokenizer takes `WORK_BYTES` per byte of a text while it works. `TextPieces` cuts where the word
rule always does, in any surroundings: between a letter or digit and the following space or
punctuation, in scripts for which that holds, and after an added token that no other can overlap.
Texts with unknown rules are not cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import tokenizers
from tokenizers import models

from lowtide.model_folder.byte_level_files import byte_alphabet

WORK_BYTES = 350
"""Measured memory of a tokenizer per byte of a text."""

PIECE_CHARS = 16 << 10
"""Most characters of a piece, if the text can be cut: at most 64 KiB in UTF-8."""

_ASCII = ("AZ", "az", "09")
_SCRIPTS = (
    *("\u00c0\u00d6", "\u00d8\u00f6", "\u00f8\u01ba", "\u1ea0\u1ef9"),  # Latin
    *("\u0391\u03a1", "\u03a3\u03ce", "\u0410\u044f", "\u0561\u0586", "\u10d0\u10f0"),
    *("\u05d0\u05ea", "\u0621\u063a", "\u0641\u064a"),  # Hebrew, Arabic
    *("\u0915\u0939", "\u0995\u09a8", "\u0bae\u0bb9", "\u0e01\u0e30", "\u1208\u1246"),
    *("\u3041\u3096", "\u30a1\u30fa", "\u4e00\u9fa5", "\uac00\ud7a3"),
)
"""Ranges of letters that have long been letters and that no normal form changes.

The tokenizer is asked in which of them words end.
"""

_AFTER = '\t\n\r !"#$%&()*+,-./:;<=>?@[\\]^_`{|}~\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f'
"""Characters after which a word ends. No apostrophe: a contraction continues after it."""

_LONE_SPACE = re.compile(
    "(?<=[{0}]) (?=[{0}])".format("".join(map("-".join, (*_ASCII, *_SCRIPTS))))
)
_SPACE = "\u2581"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CASED = (
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_CASED_WORDS = [
    _BEFORE + cased.replace("]", f"{but}]") + contractions
    for cased in _CASED
    for but in ("", r"&&[^\p{Han}]")
    for contractions in ("", f"{_CONTRACTIONS}?")
]
_ALTERNATIVES = {
    *_CASED_WORDS,
    *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", _CONTRACTIONS, r"'(?i:[sdmt]|ll|ve|re)"),
    *(r" ?\p{L}+", r"\s?\p{L}+", rf"{_BEFORE}\p{{L}}+", rf"{_BEFORE}+\p{{L}}+"),
    *(r"[\p{Han}]+", rf"{_BEFORE}[\p{{L}}\p{{M}}]+", r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"),
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+",
    *(r" ?\p{N}+", r"\p{N}+", r"\p{N}{1,3}", r"\p{N}", r"\s?\p{P}+", r"\p{P}+"),
    *(rf" ?[^\s\p{{L}}\p{{N}}]+{end}" for end in ("", r"[\r\n]*", r"[\r\n/]*")),
    *(r" ?[^\s\p{L}\p{N}]++[\r\n]*", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),
    *(r" ?[\p{P}\p{S}]+[\r\n]*", r"[\p{P}\$\+<=>\^~\|`]+", "[0-9][0-9][0-9]"),
    *(r"\s*[\r\n]+", r"\s*[\r\n]", r"[\r\n]", r"\s+(?!\S)", r"\s+", r"\s+$"),
}
"""Known alternatives of word rules.

None of them matches a letter or digit together with the following space or punctuation, and none
looks further than that for its end.
"""


_Places = Callable[[str, int, int], list[tuple[int, int]]]
"""Finds cuts in a part of a text: the end of a piece, and the start of the next."""


class TextPieces:
    """Cutter of texts for one tokenizer.

    is_known: its word rule is known, so there are places to cut at.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        added = [t for t in backend.get_added_tokens_decoder().values() if t.content]
        normalizer, words = _state(backend.normalizer), _state(backend.pre_tokenizer)
        self._added = [token.content for token in added]
        self._reach = max(map(len, self._added), default=0) + 1
        self._find: _Places | None = None
        self._sure: re.Pattern[str] | None = None  # added tokens that are taken wherever they are
        changed = [token.content for token in added if token.normalized] if normalizer else []
        if _is_bytes(words):
            is_same = normalizer.get("type", "NFC") == "NFC" and all(map(str.isascii, changed))
            if is_same and _cuts_word_ends(words):
                self._find = _word_ends(backend)
                self._sure = _taken_first(added)
        elif all(map(_is_found_as_it_is, changed)) and _is_sentence_pieces(backend):
            before, has_prefix = _never_before_space(backend), _has_prefix(normalizer, words)
            self._find = lambda text, start, end: [
                (first, last if has_prefix else first)
                for first, last in _lone_spaces(text, start, end)
                if text[first - 1] in before
            ]
        self._bytes_of_token = _most_of_token(backend, added, normalizer, _is_bytes(words))

    def least_tokens(self, text: str) -> int:
        """Return a lower bound of a text's number of tokens; 0 if none is known."""
        most = self._bytes_of_token
        return 0 if most is None else len(text) // most

    def most_chars(self, num_tokens: int) -> int | None:
        """Return characters that certainly need more than `num_tokens` tokens; None if unknown."""
        most = self._bytes_of_token
        return None if most is None else (num_tokens + 1) * most

    @property
    def is_known(self) -> bool:
        return self._find is not None

    def __call__(self, text: str) -> Iterator[tuple[int, str]]:
        """Yield the pieces in order, each with its place in the text.

        A piece is longer if there is no place to cut within `PIECE_CHARS`.
        """
        start = 0
        while self._find is not None and len(text) - start > PIECE_CHARS:
            place = self._place(text, start)
            if place is None:
                break
            yield start, text[start : place[0]]
            start = place[1]
        yield start, text[start:]

    def _place(self, text: str, start: int) -> tuple[int, int] | None:
        """Return the end of a piece and the start of the next.

        This is the last place within `PIECE_CHARS`, or else the first after it.
        """
        end, step = start + PIECE_CHARS, max(1, PIECE_CHARS // _STEPS)
        for low in range(end - step, start, -step):
            if found := self._free(text, max(low, start + 1), low + step):
                return found[-1]
        while end < len(text):
            if found := self._free(text, end, end + PIECE_CHARS):
                return found[0]
            end += PIECE_CHARS
        return None

    def _free(self, text: str, start: int, end: int) -> list[tuple[int, int]]:
        """Return places in a range that are not near an added token, or directly after one."""
        if self._find is None:
            return []
        found = self._find(text, start, end)
        around = text[max(0, start - self._reach) : end + self._reach]
        if not any(token in around for token in self._added):
            return found
        found = [each for each in found if self._is_free(text, *each)]
        if self._sure is not None:
            ends = (m.end() for m in self._sure.finditer(text, max(0, start - self._reach), end))
            found += [(place, place) for place in ends if place >= start]
        return sorted(found)

    def _is_free(self, text: str, left: int, right: int) -> bool:
        around = text[max(0, left - self._reach) : right + self._reach]
        return not any(token in around for token in self._added)


_STEPS = 16  # in which a piece is searched, from its end, for a place to cut


def _word_ends(backend: tokenizers.Tokenizer) -> _Places | None:
    """Make a finder of word ends that also hold in short texts.

    `_is_known` checks each rule alone.
    """
    scripts = [each for each in (*_ASCII, *_SCRIPTS) if _ends_words(backend, each)]
    if not set(_ASCII) <= set(scripts):
        return None
    letters = "".join(map("-".join, scripts))
    end_of_word = re.compile(f"(?<=[{letters}])(?=[{re.escape(_AFTER)}])")
    return lambda text, start, end: [
        (each.start(), each.start()) for each in end_of_word.finditer(text, start, end)
    ]


def _ends_words(backend: tokenizers.Tokenizer, script: str) -> bool:
    """Return True if words end after letters of a script."""
    if backend.pre_tokenizer is None:
        return False
    for letter in script:
        for after in _AFTER:
            for more in ("a", " ", "1", ",", "\n", "\u4e2d", letter, ""):
                words = backend.pre_tokenizer.pre_tokenize_str(letter + after + more)
                if words[0][1] != (0, 1):
                    return False
    return True


def _lone_spaces(text: str, start: int, end: int) -> list[tuple[int, int]]:
    return [each.span() for each in _LONE_SPACE.finditer(text, start, end)]


def _taken_first(added: list[tokenizers.AddedToken]) -> re.Pattern[str] | None:
    """Make a pattern of added tokens that are extracted first and cannot overlap another."""
    first = [token for token in added if not token.normalized]
    texts = {token.content for token in first}
    begins = {text[:n] for text in texts for n in range(1, len(text))}
    ends = {text[n:] for text in texts for n in range(1, len(text))}
    together = "\0".join(texts)
    sure = [
        token.content
        for token in first
        if not (token.lstrip or token.rstrip or token.single_word)
        and together.count(token.content) == 1
        and not any(part in texts for part in _inner(token.content))
        and not any(token.content[n:] in begins for n in range(1, len(token.content)))
        and not any(token.content[:n] in ends for n in range(1, len(token.content)))
    ]
    return re.compile("|".join(map(re.escape, sure))) if sure else None


def _inner(text: str) -> Iterator[str]:
    """Yield all substrings that are shorter than the text."""
    for start in range(len(text)):
        for end in range(start + 1, len(text) + (start > 0)):
            yield text[start:end]


def _is_bytes(words: dict[str, Any]) -> bool:
    """Return True if words end as bytes, and nothing is put before a text."""
    last = _steps(words)[-1]
    return last.get("type") == "ByteLevel" and not last.get("add_prefix_space")


def _steps(words: dict[str, Any]) -> list[dict[str, Any]]:
    return words.get("pretokenizers") or [words]


def _cuts_word_ends(words: dict[str, Any]) -> bool:
    """Return True if words always end at `_word_ends`."""
    *cuts, last = _steps(words)
    patterns = []
    for cut in cuts:
        if cut.get("type") == "Digits":
            continue
        pattern = cut.get("pattern", {}).get("Regex")
        is_plain = cut.get("behavior") == "Isolated" and not cut.get("invert")
        if cut.get("type") != "Split" or not is_plain or pattern is None:
            return False
        patterns.append(pattern)
    return bool(patterns or last.get("use_regex")) and all(map(_is_known, patterns))


def _is_known(pattern: str) -> bool:
    """Return True if a rule has only known parts."""
    members = re.fullmatch(r"(?:\\s\?)?(\[[^\[\]\\^]+\])\+", pattern)
    if members is None:
        return all(each in _ALTERNATIVES for each in _alternatives(pattern))
    # Characters named one by one, as DeepSeek's letters and punctuation.
    known = re.compile(members[1])
    return not any(known.fullmatch(each) for each in "0123456789\t\n\r ")


def _alternatives(pattern: str) -> list[str]:
    """Return a pattern's top-level alternatives."""
    found, depth, start, in_class, place = [], 0, 0, False, 0
    while place < len(pattern):
        mark = pattern[place]
        if mark == "\\":
            place += 1
        elif in_class:
            in_class = mark != "]"
        elif mark == "[":
            in_class = True
        elif mark in "()":
            depth += 1 if mark == "(" else -1
        elif mark == "|" and not depth:
            found.append(pattern[start:place])
            start = place + 1
        place += 1
    return [*found, pattern[start:]]


def _is_sentence_pieces(backend: tokenizers.Tokenizer) -> bool:
    """Return True if texts are merged from characters, with spaces as `_SPACE`."""
    normalizer, words, model = (
        _state(backend.normalizer),
        _state(backend.pre_tokenizer),
        backend.model,
    )
    if not isinstance(model, models.BPE) or model.dropout or getattr(model, "ignore_merges", False):
        return False
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    if words:
        return (
            words.get("type") == "Metaspace" and words["replacement"] == _SPACE and not normalizer
        )
    steps = normalizer.get("normalizers") or [normalizer]
    prefix = {"type": "Prepend", "prepend": _SPACE}
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    return steps in ([prefix, replaced], [replaced])


def _has_prefix(normalizer: dict[str, Any], words: dict[str, Any]) -> bool:
    """Return True if a space is put before a text.

    It then replaces the one that is left out between two pieces.
    """
    if words:
        return words.get("prepend_scheme") != "never"
    return len(normalizer.get("normalizers") or ()) == 2


def _never_before_space(backend: tokenizers.Tokenizer) -> set[str]:
    """Return letters and digits that no token has before a space: none is merged across it."""
    tokens = backend.get_vocab(with_added_tokens=False)
    before = {token[i - 1] for token in tokens for i in range(1, len(token)) if token[i] == _SPACE}
    ranges = (range(ord(each[0]), ord(each[1]) + 1) for each in (*_ASCII, *_SCRIPTS))
    known = {letter for each in ranges for letter in map(chr, each) if letter in tokens}
    return known - before if _SPACE in tokens else set()


def _is_found_as_it_is(content: str) -> bool:
    """Return True if an added token is found unchanged when spaces are replaced.

    It then never lies at `_LONE_SPACE`.
    """
    return content.isascii() and not content[:1].isalnum() and " " not in content


def _most_of_token(
    backend: tokenizers.Tokenizer,
    added: list[tokenizers.AddedToken],
    normalizer: dict[str, Any],
    is_bytes: bool,
) -> int | None:
    """Return the most characters that one token can stand for; None if unbounded."""
    if any(token.lstrip or token.rstrip for token in added):
        return None  # it absorbs all blanks beside it
    tokens = backend.get_vocab(with_added_tokens=False)
    longest = max(map(len, tokens), default=0)
    longest = max([longest, *(len(token.content) for token in added)])
    if is_bytes and normalizer.get("type", "NFC") == "NFC":
        composed = 4 if normalizer else 1  # most characters that NFC composes into one
        return longest * composed if all(each in tokens for each in byte_alphabet()) else None
    has_bytes = all(f"<0x{byte:02X}>" in tokens for byte in range(256))
    return longest if has_bytes and _is_sentence_pieces(backend) else None


def _state(part: Any) -> dict[str, Any]:
    """Return a part's entry in tokenizer.json; empty for None."""
    if part is None:
        return {}
    state = json.loads(part.__getstate__())
    return state if isinstance(state, dict) else {}
