"""Where `/v1/completions` says that tokens begin, what it calls them, and what begins a text."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tokenizers
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from lowtide.decode.request import TokenLogprobs
from lowtide.model_folder.tokenizer import Tokenizer, begin_texts
from lowtide.parsing.answer_pieces import AnswerPieces, PlainText
from lowtide.parsing.pieces import Done, Logprobs, Piece
from lowtide.serve.openai_completions import CompletionBody, CompletionReply
from lowtide.serve.service import Service

BOS = "<s>"
SPACE = "\u2581"


def with_bos(backend: tokenizers.Tokenizer) -> Tokenizer:
    backend.add_special_tokens([AddedToken(BOS, normalized=False)])
    begin_texts(backend, BOS)
    return Tokenizer(backend, {"bos_token": BOS}, None)


def byte_level(trims: bool = False) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    merges = [("\u0120", "a"), ("a", "b")]
    names = [*sorted(alphabet), *("".join(pair) for pair in merges)]
    backend = tokenizers.Tokenizer(models.BPE({n: i for i, n in enumerate(names)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    made = with_bos(backend)
    if trims:
        trimming = processors.ByteLevel(trim_offsets=True)
        backend.post_processor = processors.Sequence([trimming, backend.post_processor])
    return made


def sentence_pieces() -> Tokenizer:
    names = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        SPACE,
        *"abc \u00e9",
        f"{SPACE}a",
    ]
    vocabulary = {name: number for number, name in enumerate(names)}
    model = models.BPE(
        vocabulary, [(SPACE, "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    return with_bos(backend)


TOKENIZERS = {
    "byte level": byte_level(),
    "byte level, trimmed": byte_level(trims=True),
    "sentence pieces": sentence_pieces(),
}
TEXTS = st.text("ab \u00e9\u732b\U0001f44d", max_size=20)


def row(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -1.0, ((token_id, -1.0), (token_id + 1, -2.0)))


class Scored:
    """A service that says of each token that it was likely."""

    model_name = "m"

    def __init__(self, tokenizer: Tokenizer) -> None:
        async def prompt_logprobs(ids: Sequence[int], _: int) -> list[TokenLogprobs | None]:
            return [None, *map(row, ids[1:])]

        self.llm = SimpleNamespace(tokenizer=tokenizer, prompt_logprobs=prompt_logprobs)

    async def prompt_ids(self, ask: Any) -> list[int]:
        if isinstance(ask.prompt, str):
            ids = self.llm.tokenizer.encode(ask.prompt, add_special=ask.adds_special)
            return cast(list[int], ids)
        return list(ask.prompt)

    async def in_time(self, _: float, work: Any) -> Any:
        return await work


def pieces_of(
    tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], width: int
) -> Iterator[Piece]:
    """As a service has them."""
    reader = AnswerPieces(PlainText(tokenizer, prompt))
    for start in range(0, len(ids), width):
        some = ids[start : start + width]
        yield Logprobs(tuple(map(row, some)))
        yield from reader.push(some)
    yield from reader.finish()
    yield Done("length", 1, len(ids), 0)


def choices(tokenizer: Tokenizer, answer: list[int], width: int, **body: Any) -> list[Any]:
    """The same answer whole and streamed."""

    async def ask() -> list[Any]:
        read = CompletionBody(model="m", logprobs=1, **body)
        replies = [
            CompletionReply(cast(Service, Scored(tokenizer)), read, read.asks()) for _ in range(2)
        ]
        for reply in replies:
            await reply.prepare()
        asked = read.asks()[0]
        prompt_ids = await Scored(tokenizer).prompt_ids(asked)
        pieces = list(pieces_of(tokenizer, prompt_ids, answer, width))
        frames = [*replies[1].opening()]
        for piece in pieces:
            replies[0].keep(piece)
            frames += replies[1].frames(piece)
        [whole] = replies[0].whole()["choices"]
        chunks = [chunk for frame in frames for chunk in frame["choices"]]
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        told = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
        streamed = {name: [each for part in told for each in part[name]] for name in names}
        text = "".join(chunk["text"] for chunk in chunks)
        return [whole, {"text": text, "logprobs": streamed}]

    return asyncio.run(ask())


def bytes_of(name: str) -> bytes:
    if name.startswith("bytes:"):
        return cast(bytes, ast.literal_eval(f"b'{name.removeprefix('bytes:')}'"))
    return b"" if name == BOS else name.encode()


@pytest.mark.parametrize("kind", TOKENIZERS)
@examples(40)
@given(prompt=TEXTS, said=TEXTS, width=st.integers(1, 5), is_ids=st.booleans())
def test_tokens_lie_where_they_are_said_to(
    kind: str, prompt: str, said: str, width: int, is_ids: bool
) -> None:
    tokenizer = TOKENIZERS[kind]
    answer = tokenizer.encode(said, add_special=False)
    ids = tokenizer.encode(prompt)
    for body in ({"prompt": ids if is_ids else prompt, "echo": True}, {"prompt": "x"}):
        for choice in choices(tokenizer, answer, width, **body):
            text, found = choice["text"], choice["logprobs"] or {"tokens": [], "text_offset": []}
            names, places = found["tokens"], found["text_offset"]
            assert len(names) == len(answer) + (len(ids) if "echo" in body else 0)
            assert places == sorted(places) and all(place <= len(text) for place in places)
            if "echo" in body:
                assert (
                    text
                    == (tokenizer.decode(ids) if is_ids else prompt)
                    + (tokenizer.decode([*ids, *answer])[len(tokenizer.decode(ids)) :])
                )
                assert names[0] == BOS and places[:2] == [0, 0][: len(names)]
            for i, (name, place) in enumerate(zip(names, places, strict=True)):
                if not name.startswith("bytes:") and name != BOS:
                    is_space = not name.strip() or name == SPACE  # of which a first one is dropped
                    assert text[place : place + len(name)] == name or is_space, (i, names, places)
            if kind != "sentence pieces":
                assert b"".join(map(bytes_of, names)) == text.encode()


def test_parts_of_a_character_are_told_by_their_bytes() -> None:
    tokenizer = TOKENIZERS["byte level"]
    [whole, _] = choices(tokenizer, [], 1, prompt="a\u732bb", echo=True)
    found = whole["logprobs"]
    expected = [BOS, "a", r"bytes:\xe7", r"bytes:\x8c", r"bytes:\xab", "b"]
    assert found["tokens"] == expected
    assert found["text_offset"] == [0, 0, 1, 1, 1, 2]
    for name, top in zip(found["tokens"][1:], found["top_logprobs"][1:], strict=True):
        assert name in top  # as harnesses look for it


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_text_begins_once(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    bos = tokenizer.token_id(BOS)
    plain = tokenizer.encode("ab", add_special=False)
    assert tokenizer.encode("ab") == [bos, *plain]
    behind = tokenizer.encode(f"{BOS}ab", add_special=False)
    assert behind[0] == bos and tokenizer.encode(f"{BOS}ab") == behind
    twice = tokenizer.encode(f"{BOS}{BOS}ab", add_special=False)
    assert twice[:2] == [bos, bos] and tokenizer.encode(f"{BOS}{BOS}ab") == twice
    assert len(tokenizer.places(f"{BOS}ab")) == len(behind)


def test_a_request_may_leave_the_beginning_out() -> None:
    tokenizer = TOKENIZERS["byte level"]
    for adds, expected in ((True, [BOS, "ab"]), (False, ["ab"])):
        [whole, _] = choices(tokenizer, [], 1, prompt="ab", echo=True, add_special_tokens=adds)
        assert whole["logprobs"]["tokens"] == expected
