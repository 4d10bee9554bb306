"""`TextStream`: however ids are divided, the text of all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from unittest.mock import patch

import pytest
import tokenizers
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import FORMATS, make_tokenizer
from tokenizers import AddedToken, decoders, models

from lowtide.model_folder.demos import DEMO_FOLDER
from lowtide.model_folder.text_stream import is_local, steps_of
from lowtide.model_folder.tokenizer import Tokenizer

SPACE = "\u2581"
BYTES = [f"<0x{value:02X}>" for value in range(256)]
WORDS = [
    SPACE,
    f"{SPACE}a",
    f"{SPACE}{SPACE}",
    "b",
    "\u732b",
    " ",
    ".",
    "'s",
    "c</w>",
    "##d",
    "\ufffd",
]
SPECIAL, ADDED = "<s>", "<call>"


def vocabulary_with(decoder: decoders.Decoder | None) -> Tokenizer:
    """Tokens of bytes, words, a special and an added one, decoded so."""
    tokens = [*BYTES, *WORDS]
    backend = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, []))
    backend.add_special_tokens([SPECIAL])
    backend.add_tokens([AddedToken(ADDED, normalized=False)])
    if decoder is not None:
        backend.decoder = decoder
    return Tokenizer(backend, {}, None)


PIECES = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
DECODERS: dict[str, decoders.Decoder | None] = {
    "none": None,
    "byte level": decoders.ByteLevel(),
    "sentence pieces": decoders.Sequence([*PIECES, decoders.Strip(" ", 1, 0)]),
    "bytes alone": decoders.ByteFallback(),
    "bytes, not joined": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "metaspace": decoders.Metaspace(),
    "word pieces": decoders.WordPiece(),
    "suffixes": decoders.BPEDecoder(),
    "ctc": decoders.CTC(),
    "two spaces": decoders.Sequence([*PIECES, decoders.Strip(" ", 2, 0)]),
    "joined, then words": decoders.Sequence([*PIECES, decoders.Replace(" 's", "'s")]),
    "an expression": decoders.Sequence(
        [*PIECES, decoders.Replace(tokenizers.Regex(r" +([.])"), ".")]
    ),
    "bytes of a joined text": decoders.Sequence([decoders.Fuse(), decoders.ByteFallback()]),
    "digits away": decoders.Sequence(
        [decoders.Replace("0", ""), decoders.ByteFallback(), decoders.Fuse()]
    ),
}
OF_DECODERS = {name: vocabulary_with(decoder) for name, decoder in DECODERS.items()}
WHOLE_AT_THE_END = {
    "joined, then words",
    "an expression",
    "bytes of a joined text",
    "digits away",
}
ALL = {
    **OF_DECODERS,
    **{form.name: form.tokenizer for form in FORMATS},
    **{kind: Tokenizer.load(DEMO_FOLDER / kind) for kind in ("autoregressive", "diffusion")},
}

Division = tuple[list[int], list[int]]
"""Ids, and where they are cut."""


def streamed(tokenizer: Tokenizer, ids: Sequence[int], cuts: Sequence[int]) -> list[str]:
    stream = tokenizer.stream()
    places = [0, *sorted(cuts), len(ids)]
    return [*(stream.push(ids[a:b]) for a, b in pairwise(places)), stream.finish()]


@st.composite
def divisions(draw: st.DrawFn, tokenizer: Tokenizer) -> Division:
    """Draw ids of texts, cut anywhere.

    Words, long runs of bytes that are characters or half ones, special tokens, ids without a token.
    """
    byte_ids = [tokenizer.token_id(name) for name in BYTES]
    run = st.text("\u732b\u00e9a\U0001f44d", min_size=1, max_size=60).map(str.encode)
    run |= st.binary(min_size=1, max_size=60)
    of_bytes = run.map(lambda data: [i for b in data if (i := byte_ids[b]) is not None])
    of_texts = st.text(max_size=30).map(lambda text: tokenizer.encode(text, add_special=False))
    anything = st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40)
    ids = sum(draw(st.lists(of_bytes | of_texts | anything, max_size=6)), [])
    cuts = draw(st.lists(st.integers(0, len(ids)), max_size=12))
    return ids, list(range(len(ids))) if draw(st.booleans()) else cuts


@pytest.mark.parametrize("name", ALL)
@examples(30)
@given(data=st.data())
def test_all_parts_are_the_text_of_all_ids(name: str, data: st.DataObject) -> None:
    tokenizer = ALL[name]
    ids, cuts = data.draw(divisions(tokenizer))
    assert "".join(streamed(tokenizer, ids, cuts)) == tokenizer.decode(ids)


@pytest.mark.parametrize("name", OF_DECODERS)
def test_text_comes_as_soon_as_it_is_certain(name: str) -> None:
    """Or at the end, where a decoder may change what came before."""
    tokenizer = OF_DECODERS[name]
    ids = [tokenizer.token_id("b"), tokenizer.token_id(f"{SPACE}a")] * 40
    *parts, last = streamed(tokenizer, [i for i in ids if i is not None], range(1, 80))
    assert (last == tokenizer.decode(ids)) == (name in WHOLE_AT_THE_END)
    assert name in WHOLE_AT_THE_END or len(last) <= 3
    decoder = DECODERS[name]
    steps = [] if decoder is None else steps_of(decoder)
    assert is_local(steps) == (name not in WHOLE_AT_THE_END)


@pytest.mark.parametrize("text", ["\u732b" * 40, "\U0001f44d\u00e9" * 100])
def test_a_long_run_of_bytes_comes_character_by_character(text: str) -> None:
    tokenizer = OF_DECODERS["sentence pieces"]
    ids = [tokenizer.token_id(BYTES[byte]) or 0 for byte in text.encode()]
    stream = tokenizer.stream()
    assert [part for i in ids if (part := stream.push([i]))] == list(text)
    assert tokenizer.stream().push(ids) == text
    for width in range(1, 70):
        assert "".join(streamed(tokenizer, ids, range(width, len(ids), width))) == text


def test_bytes_of_no_character_spoil_no_other() -> None:
    tokenizer = OF_DECODERS["sentence pieces"]

    def text_of(data: bytes) -> str:
        return tokenizer.decode([tokenizer.token_id(BYTES[byte]) or 0 for byte in data])

    assert text_of("\u732b".encode() + b"\xff" + "\u00e9".encode()) == "\u732b\ufffd\u00e9"
    assert text_of("\u732b".encode()[:2]) == "\ufffd\ufffd"
    assert text_of(b"\xed\xa0\x80\xc0\xaf\xf4\x90\x80\x80") == "\ufffd" * 9


@given(st.binary(max_size=40))
def test_a_byte_of_no_character_is_one_mark(data: bytes) -> None:
    tokenizer = OF_DECODERS["bytes alone"]
    found = tokenizer.decode([tokenizer.token_id(BYTES[byte]) or 0 for byte in data])
    expected = data.decode("utf-8", "surrogateescape")
    assert found == "".join("\ufffd" if "\udc80" <= c <= "\udcff" else c for c in expected)


WINDOW_TOKENS = 64
"""Most earlier ids that are decoded again with new ones, but for those that came just before."""


@contextmanager
def decoded(tokenizer: Tokenizer) -> Iterator[list[int]]:
    """The numbers of ids that the tokenizer decodes at once."""
    sizes: list[int] = []
    decode = tokenizer.decode

    def noted(ids: Sequence[int]) -> str:
        sizes.append(len(ids))
        return decode(ids)

    with patch.object(tokenizer, "decode", noted):
        yield sizes


@pytest.mark.parametrize("name", ["byte level", "sentence pieces"])
@pytest.mark.parametrize("token", [SPECIAL, BYTES[0xFF], "b"])
def test_a_window_never_grows(name: str, token: str) -> None:
    """Whatever a model repeats."""
    tokenizer = OF_DECODERS[name]
    stream, token_id = tokenizer.stream(), tokenizer.token_id(token)
    with decoded(tokenizer) as sizes:
        for _ in range(500):
            stream.push([token_id or 0])
    assert len(sizes) >= 500 and max(sizes) <= WINDOW_TOKENS + 2


@pytest.mark.parametrize("name", ["qwen", "sentence pieces"])
@pytest.mark.parametrize(
    "text", ["\u00e9", "a\u00e9", "\u732b", "\U0001f44d", "\U0001f44d\u00e9\u732b"]
)
def test_a_window_never_grows_however_ids_are_divided(name: str, text: str) -> None:
    tokenizer, data = ALL[name], text.encode() * 200
    ids = [tokenizer.token_id(BYTES[byte]) or 0 for byte in data]
    if name == "qwen":
        ids = tokenizer.encode(data.decode())
    for width in (1, 2, 3, 4, 8, 32, 48):
        for first in range(1, 5):
            stream = tokenizer.stream()
            with decoded(tokenizer) as sizes:
                for start in (0, *range(first, len(ids), width)):
                    stream.push(ids[start : start + width] if start else ids[:first])
            assert max(sizes) <= WINDOW_TOKENS + 2 * width


def test_steps_of_a_decoder_in_order() -> None:
    inner = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    made = decoders.Sequence([decoders.ByteFallback(), inner, decoders.Metaspace()])
    assert [step["type"] for step in steps_of(made)] == [
        *("ByteFallback", "Fuse", "Strip", "Metaspace")
    ]
    assert steps_of(None) == []


@pytest.mark.parametrize("name", ALL)
@examples(20)
@given(data=st.data())
def test_a_text_goes_on_behind_another(name: str, data: st.DataObject) -> None:
    """One that ends with a whole character."""
    tokenizer = ALL[name]
    before, (ids, cuts) = (
        data.draw(st.text("ab c\u732b", max_size=60)),
        data.draw(divisions(tokenizer)),
    )
    behind = tokenizer.encode(before, add_special=False)
    stream = tokenizer.stream()
    stream.begin_after(behind)
    places = [0, *sorted(cuts), len(ids)]
    parts = [stream.push(ids[a:b]) for a, b in pairwise(places)] + [stream.finish()]
    first, whole = tokenizer.decode(behind), tokenizer.decode([*behind, *ids])
    assert "".join(parts) == whole[len(first) :] or name in WHOLE_AT_THE_END


def test_a_first_word_keeps_its_space_behind_others() -> None:
    tokenizer = OF_DECODERS["sentence pieces"]
    word, *others = (tokenizer.token_id(name) or 0 for name in (f"{SPACE}a", "b", SPECIAL))
    for before, expected in (([], "a"), (others[:1], " a"), (others[1:], "a")):
        stream = tokenizer.stream()
        stream.begin_after(before)
        assert stream.push([word]) == expected


def test_ids_without_a_token_are_no_text() -> None:
    tokenizer = make_tokenizer()
    assert tokenizer.stream().push([10**6, 0, 97]) == tokenizer.decode([0, 97])
