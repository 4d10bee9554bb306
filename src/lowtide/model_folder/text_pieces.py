"""Where a long text can be cut so that the ids of its pieces are the ids of the whole.

A tokenizer takes `WORK_BYTES` for each byte of a text while it works. `TextPieces` cuts where its
own rule for words always does, whatever stands around: between a letter or digit and the space or
punctuation behind it, in the scripts for which that holds, and behind an added token that no other
can be in the place of. Rules that it does not know are cut nowhere.
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
"""What a tokenizer takes for each byte of a text while it works, as measured."""

PIECE_CHARS = 16 << 10
"""Of a piece, where a text can be cut: at most 64 KiB in UTF-8."""

_ASCII = ("AZ", "az", "09")
_SCRIPTS = (
    *("\u00c0\u00d6", "\u00d8\u00f6", "\u00f8\u01ba", "\u1ea0\u1ef9"),  # Latin
    *("\u0391\u03a1", "\u03a3\u03ce", "\u0410\u044f", "\u0561\u0586", "\u10d0\u10f0"),
    *("\u05d0\u05ea", "\u0621\u063a", "\u0641\u064a"),  # Hebrew, Arabic
    *("\u0915\u0939", "\u0995\u09a8", "\u0bae\u0bb9", "\u0e01\u0e30", "\u1208\u1246"),
    *("\u3041\u3096", "\u30a1\u30fa", "\u4e00\u9fa5", "\uac00\ud7a3"),
)
"""Letters from the first to the last that have been letters for long, and that no normal form
changes: of which of them words end, a tokenizer is asked."""

_BEHIND = '\t\n\r !"#$%&()*+,-./:;<=>?@[\\]^_`{|}~\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f'
"""No apostrophe: a contraction goes on behind it."""

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
_ALTERNATIVES = {
    *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", _CONTRACTIONS, r"'(?i:[sdmt]|ll|ve|re)"),
    *(r" ?\p{L}+", r"\s?\p{L}+", rf"{_BEFORE}\p{{L}}+", rf"{_BEFORE}+\p{{L}}+"),
    *(_BEFORE + cased + f"{_CONTRACTIONS}?" for cased in _CASED),
    *(_BEFORE + cased for cased in _CASED),
    *(r" ?\p{N}+", r"\p{N}+", r"\p{N}{1,3}", r"\p{N}", r"\s?\p{P}+", r"\p{P}+"),
    *(rf" ?[^\s\p{{L}}\p{{N}}]+{end}" for end in ("", r"[\r\n]*", r"[\r\n/]*")),
    r" ?[^\s\p{L}\p{N}]++[\r\n]*",
    *(r"\s*[\r\n]+", r"\s*[\r\n]", r"[\r\n]", r"\s+(?!\S)", r"\s+", r"\s+$"),
}
"""What rules for words are made of. None of these matches a letter or a digit together with the
space or punctuation behind it, and none looks further than that for where it ends."""


_Places = Callable[[str, int, int], list[tuple[int, int]]]
"""Finds places to cut at in a part of a text: where a piece ends, and where the next begins."""


class TextPieces:
    """Cuts texts for one tokenizer.

    is_known: whether its rule for words is, so that there are such places at all.
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
        """Return a number of tokens that the text has at least; 0 where none is known."""
        most = self._bytes_of_token
        return 0 if most is None else len(text) // most

    def most_chars(self, num_tokens: int) -> int | None:
        """Return a number of characters that more than `num_tokens` tokens certainly are for; None
        where none is known.
        """
        most = self._bytes_of_token
        return None if most is None else (num_tokens + 1) * most

    @property
    def is_known(self) -> bool:
        return self._find is not None

    def __call__(self, text: str) -> Iterator[tuple[int, str]]:
        """The pieces, in order, each behind its place in the text. One is longer where there is no
        place to cut at for `PIECE_CHARS`.
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
        """Where a piece ends, and where the next begins: the last place within `PIECE_CHARS`, or
        else the first behind.
        """
        end = start + PIECE_CHARS
        for low in range(end - _STEP, start, -_STEP):
            if found := self._free(text, max(low, start + 1), low + _STEP):
                return found[-1]
        while end < len(text):
            if found := self._free(text, end, end + PIECE_CHARS):
                return found[0]
            end += PIECE_CHARS
        return None

    def _free(self, text: str, start: int, end: int) -> list[tuple[int, int]]:
        """The places from `start` to before `end` that no added token is near, or right behind
        one.
        """
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


_STEP = 1 << 10


def _word_ends(backend: tokenizers.Tokenizer) -> _Places | None:
    """What finds the ends of words, as far as they are ends in short texts, too: `_is_known` looks
    at each rule on its own.
    """
    scripts = [each for each in (*_ASCII, *_SCRIPTS) if _ends_words(backend, each)]
    if not set(_ASCII) <= set(scripts):
        return None
    letters = "".join(map("-".join, scripts))
    end_of_word = re.compile(f"(?<=[{letters}])(?=[{re.escape(_BEHIND)}])")
    return lambda text, start, end: [
        (each.start(), each.start()) for each in end_of_word.finditer(text, start, end)
    ]


def _ends_words(backend: tokenizers.Tokenizer, script: str) -> bool:
    """Whether words end behind letters of a script."""
    if backend.pre_tokenizer is None:
        return False
    for letter in script:
        for behind in _BEHIND:
            for more in ("a", " ", "1", ",", "\n", "\u4e2d", letter, ""):
                words = backend.pre_tokenizer.pre_tokenize_str(letter + behind + more)
                if words[0][1] != (0, 1):
                    return False
    return True


def _lone_spaces(text: str, start: int, end: int) -> list[tuple[int, int]]:
    return [each.span() for each in _LONE_SPACE.finditer(text, start, end)]


def _taken_first(added: list[tokenizers.AddedToken]) -> re.Pattern[str] | None:
    """What finds added tokens that are taken out of a text before all else, and that no other can
    be in the place of: none is in another one or overlaps with its ends.
    """
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
    """The shorter texts in a text."""
    for start in range(len(text)):
        for end in range(start + 1, len(text) + (start > 0)):
            yield text[start:end]


def _is_bytes(words: dict[str, Any]) -> bool:
    """Whether words are written in bytes, in the end, and nothing is put before a text."""
    last = _steps(words)[-1]
    return last.get("type") == "ByteLevel" and not last.get("add_prefix_space")


def _steps(words: dict[str, Any]) -> list[dict[str, Any]]:
    return words.get("pretokenizers") or [words]


def _cuts_word_ends(words: dict[str, Any]) -> bool:
    """Whether words always end where `_WORD_END` is."""
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
    """Whether a rule is made of what is known alone."""
    members = re.fullmatch(r"(?:\\s\?)?(\[[^\[\]\\^]+\])\+", pattern)
    if members is None:
        return all(each in _ALTERNATIVES for each in _alternatives(pattern))
    # Characters named one by one, as DeepSeek's letters and punctuation.
    known = re.compile(members[1])
    return not any(known.fullmatch(each) for each in "0123456789\t\n\r ")


def _alternatives(pattern: str) -> list[str]:
    """A pattern's own alternatives, not those inside of its groups."""
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
    """Whether texts are merged from characters, and spaces written as `_SPACE`."""
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
    """Whether a space is put before a text: then it stands for the one that is left out between
    two pieces.
    """
    if words:
        return words.get("prepend_scheme") != "never"
    return len(normalizer.get("normalizers") or ()) == 2


def _never_before_space(backend: tokenizers.Tokenizer) -> set[str]:
    """Letters and digits that no token has before a space: none is merged across."""
    tokens = backend.get_vocab(with_added_tokens=False)
    before = {token[i - 1] for token in tokens for i in range(1, len(token)) if token[i] == _SPACE}
    ranges = (range(ord(each[0]), ord(each[1]) + 1) for each in (*_ASCII, *_SCRIPTS))
    known = {letter for each in ranges for letter in map(chr, each) if letter in tokens}
    return known - before if _SPACE in tokens else set()


def _is_found_as_it_is(content: str) -> bool:
    """Whether an added token is found in a text with its spaces replaced as in any other, and never
    at `_LONE_SPACE`.
    """
    return content.isascii() and not content[:1].isalnum() and " " not in content


def _most_of_token(
    backend: tokenizers.Tokenizer,
    added: list[tokenizers.AddedToken],
    normalizer: dict[str, Any],
    is_bytes: bool,
) -> int | None:
    """Return how many characters of a text one token can stand for; None: any number."""
    if any(token.lstrip or token.rstrip for token in added):
        return None  # it takes all blanks beside it
    tokens = backend.get_vocab(with_added_tokens=False)
    longest = max(map(len, tokens), default=0)
    longest = max([longest, *(len(token.content) for token in added)])
    if is_bytes and normalizer.get("type", "NFC") == "NFC":
        composed = 4 if normalizer else 1  # characters at most that NFC makes one of
        return longest * composed if all(each in tokens for each in byte_alphabet()) else None
    has_bytes = all(f"<0x{byte:02X}>" in tokens for byte in range(256))
    return longest if has_bytes and _is_sentence_pieces(backend) else None


def _state(part: Any) -> dict[str, Any]:
    """A part's entry in tokenizer.json; empty for none."""
    if part is None:
        return {}
    state = json.loads(part.__getstate__())
    return state if isinstance(state, dict) else {}
