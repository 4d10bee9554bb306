"""Text that cannot fit is refused early and in little memory, through every road to the tokenizer.

Other clients' answers do not change.
"""

from __future__ import annotations

import asyncio
import json
import time
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from httpx import Client
from hypothesis import given
from hypothesis import strategies as st
from serving import Running, serving, serving_process, talking_folder
from small_tokenizers import FORMATS, QWEN
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from whole import LIMIT_S

from lowtide import AsyncLLM
from lowtide.errors import LowtideError
from lowtide.model_folder import text_pieces, tokenizer
from lowtide.model_folder.demos import DEMO_FOLDER
from lowtide.model_folder.gguf_pretokenizers import WORD_RULES
from lowtide.model_folder.text_pieces import TextPieces
from lowtide.model_folder.tokenizer import Tokenizer, TooManyTokens, begin_texts
from lowtide.parsing.literal_text import gemma_call, python_calls
from lowtide.parsing.loose_json import loose_json
from lowtide.parsing.schema_types import SchemaTypes
from lowtide.parsing.tools import Tool
from lowtide.parsing.xml_syntax import CODER, GLM, MINIMAX, XmlSyntax
from lowtide.parsing.xml_text import xml_call
from lowtide.serve.custom_tools import CustomInput
from lowtide.serve.errors import QueueFull
from lowtide.serve.grammar_chains import check_lark
from lowtide.serve.grammar_reasons import reason_of
from lowtide.serve.quoted_lark import quoted_lark

pytestmark = pytest.mark.hostile

CONTEXT = 2048
MIB = 1 << 20
TEXTS = ("word ", "a", "\U0001f642", " ", "\n", '{"a":1},', "\u4e2d\u56fd", "x.y\t", "0")


def _said(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


ROADS: dict[str, Any] = {
    "completions": ("/v1/completions", lambda text: {"prompt": text}),
    "completions, several": ("/v1/completions", lambda text: {"prompt": ["a", text]}),
    "completions, echo": ("/v1/completions", lambda text: {"prompt": text, "echo": True}),
    "chat": ("/v1/chat/completions", lambda text: {"messages": _said(text)}),
    "chat, parts": (
        "/v1/chat/completions",
        lambda text: {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]},
    ),
    "chat, stream": (
        "/v1/chat/completions",
        lambda text: {"messages": _said(text), "stream": True},
    ),
    "chat, n": ("/v1/chat/completions", lambda text: {"messages": _said(text), "n": 4}),
    "chat, tool": (
        "/v1/chat/completions",
        lambda text: {
            "messages": _said("a"),
            "tools": [{"type": "function", "function": {"name": "f", "description": text}}],
        },
    ),
    "responses": ("/v1/responses", lambda text: {"input": text}),
    "responses, instructions": ("/v1/responses", lambda text: {"input": "a", "instructions": text}),
    "responses, output": (
        "/v1/responses",
        lambda text: {
            "input": [
                {"role": "user", "content": "a"},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": text},
            ]
        },
    ),
    "messages": ("/v1/messages", lambda text: {"messages": _said(text), "max_tokens": 4}),
    "messages, system": (
        "/v1/messages",
        lambda text: {"messages": _said("a"), "system": text, "max_tokens": 4},
    ),
    "count_tokens": ("/v1/messages/count_tokens", lambda text: {"messages": _said(text)}),
    "ollama chat": ("/api/chat", lambda text: {"model": "model", "messages": _said(text)}),
    "ollama generate": ("/api/generate", lambda text: {"model": "model", "prompt": text}),
    "ollama raw": ("/api/generate", lambda text: {"model": "model", "prompt": text, "raw": True}),
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = talking_folder(tmp_path_factory.mktemp("texts") / "model")
    llm = AsyncLLM(folder, context=CONTEXT, dtype="float32", cache="off")
    with serving(llm) as found:
        yield found
    asyncio.run(llm.close())


def canary(running: Running) -> list[int]:
    """Ids of a short answer that is always the same."""
    body = {"prompt": "def", "max_tokens": 6, "ignore_eos": True, "temperature": 0}
    with running.client() as client:
        said = client.post("/v1/completions", json={**body, "return_token_ids": True}).json()
    ids: list[int] = said["choices"][0]["token_ids"]
    return ids


@pytest.fixture(scope="module")
def alone(running: Running) -> list[int]:
    return canary(running)


@pytest.mark.parametrize("road", ROADS)
def test_text_that_cannot_fit_is_refused_on_every_road(
    running: Running, alone: list[int], road: str
) -> None:
    path, body_of = ROADS[road]
    with running.client() as client:
        client.post(path, json=body_of("a"))
        for unit in TEXTS[:3]:
            body = body_of(unit * (MIB // len(unit.encode())))
            start_s = time.process_time()
            said = client.post(path, json=body)
            # 0.3 s is meant; three times as much is let pass to a machine that does much else.
            assert time.process_time() - start_s < 0.9
            assert said.status_code == 400, said.text[:200]
            assert str(CONTEXT) in said.text
    assert canary(running) == alone
    assert not running.service.admission.num_running


def test_eight_mebibytes_take_little_memory(tmp_path: Path) -> None:
    """64 MiB beyond what a server in a process of its own has at its first short text.

    A character of four bytes makes all of a text's as wide in Python: then 64 MiB beyond the plan.
    """
    path, body_of = ROADS["completions"]
    flags = ("--context", str(CONTEXT), "--dtype", "float32", "--cache", "off")
    with (
        serving_process(talking_folder(tmp_path / "model"), *flags) as server,
        Client(base_url=server.url, timeout=LIMIT_S) as client,
    ):
        assert client.post(path, json={**body_of("def"), "max_tokens": 6}).status_code == 200
        plan = client.get("/v1/lowtide/plan").json()
        first_bytes = peak_bytes(server.process.pid)
        for unit in TEXTS:
            sent_bytes = len(json.dumps(unit, ensure_ascii=False).encode()) - 2
            text = unit * ((8 * MIB - 100) // sent_bytes)
            assert client.post(path, json=body_of(text)).status_code == 400
        assert peak_bytes(server.process.pid) - first_bytes < 64 * MIB
        wide = "a" * (8 * MIB - 100) + "\U0001f642"
        assert client.post(path, json=body_of(wide)).status_code == 400
        planned_bytes = plan["host"]["budget_bytes"] + plan["overhead_bytes"] + plan["texts_bytes"]
        assert peak_bytes(server.process.pid) < planned_bytes + 64 * MIB


def peak_bytes(process: int) -> int:
    """The most memory that a process had at a time."""
    status = Path(f"/proc/{process}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) << 10


def test_counting_has_a_place_in_the_queue(running: Running) -> None:
    with running.client() as client, ExitStack() as places:
        with suppress(QueueFull):
            while True:
                places.enter_context(running.service.admission.enter())
        said = client.post("/v1/messages/count_tokens", json={"messages": _said("a")})
    assert said.status_code == 429


@cache
def backend_of(vocabulary: Tokenizer) -> tokenizers.Tokenizer:
    """The tokenizers library's own form, which takes a text whole."""
    return tokenizers.Tokenizer.from_str(vocabulary.as_json())


@cache
def pieces_of(vocabulary: Tokenizer) -> TextPieces:
    return TextPieces(backend_of(vocabulary))


def _trained(backend: tokenizers.Tokenizer, **options: Any) -> Tokenizer:
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False, **options)
    text = "The quick brown fox's 12 foxes, they'll run: f(x) = {'a': 1};\n\n  "
    text += "\u00e9t\u00e9 \u4e2d\u56fd\u3002"
    backend.train_from_iterator([text] * 4, trainer)
    backend.add_special_tokens(["<s>", "<|im_start|>"])
    backend.add_tokens([tokenizers.AddedToken("    ", normalized=True)])
    begin_texts(backend, "<s>")
    return Tokenizer(backend, {}, None)


RULES = {rule: name for name, rule in reversed(WORD_RULES.items())}.values()
"""The first name of each."""


def _by_words(name: str) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=WORD_RULES[name].ignores_merges))
    normalizer = WORD_RULES[name].normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = WORD_RULES[name].pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return _trained(backend, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def _by_pieces(kind: str) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    space = normalizers.Replace(" ", "\u2581")
    if kind == "prefix":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), space])
    elif kind == "no prefix":
        backend.normalizer = normalizers.Sequence([space])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    alphabet = [chr(code) for code in range(0x20, 0x7F)]
    trainer = trainers.BpeTrainer(
        vocab_size=900, show_progress=False, special_tokens=special, initial_alphabet=alphabet
    )
    # Words alone, as sentence-piece trains: no token has a space inside.
    words = "\u2581the \u2581quick \u2581brown fox \u2581foxes \u2581they're \u2581run ning"
    backend.train_from_iterator([*words.split(" "), "a b", "\u2581f(x)"], trainer)
    backend.add_special_tokens(["<s>"])
    begin_texts(backend, "<s>")
    return Tokenizer(backend, {}, None)


def _demo(kind: str) -> Tokenizer:
    found = Tokenizer.load(DEMO_FOLDER / kind)
    assert found is not None
    return found


VOCABULARIES = {
    **{f"demo {kind}": _demo(kind) for kind in ("autoregressive", "diffusion")},
    **{form.name: form.tokenizer for form in FORMATS},
    **{name: _by_words(name) for name in RULES},
    **{kind: _by_pieces(kind) for kind in ("prefix", "no prefix", "first", "always", "never")},
}

_PARTS = ["a", "Z", "the", "ing", " ", "  ", "    ", "\n", "\n\n", "\r\n", "\t", "1", "23", "4567"]
_PARTS += [
    ".",
    ",",
    "!",
    "'",
    "'s",
    "'LL",
    "-",
    "_",
    "(",
    "}",
    '"',
    "/",
    "\u00e9",
    "e\u0301",
    "\u0301",
]
_PARTS += [
    "\u4e2d\u56fd",
    "\uff0c",
    "\u3002",
    "\u304b",
    "\u30ab",
    "\ud55c",
    "\u1100",
    "\u0436",
    "\U0001f642",
    "\u3000",
]
_PARTS += [
    "\xa0",
    "\u0627",
    "\u0915\u094d",
    "<s>",
    "<|im_start|>",
    "</think>",
    "\u0131",
    "\uff10",
    "\xb2",
    "\u200b",
    *("\u03c9", "\u0634", "\u0939", "\u093f", "\u0e01", "\u0e31", "\u05d0", "\u01a1"),
]


@pytest.mark.parametrize("name", VOCABULARIES)
@given(
    parts=st.lists(st.sampled_from(_PARTS) | st.text(max_size=3), max_size=60),
    size=st.integers(3, 40),
    add_special=st.booleans(),
)
def test_ids_of_pieces_are_those_of_the_whole(
    name: str, parts: list[str], size: int, add_special: bool
) -> None:
    vocabulary, text = VOCABULARIES[name], "".join(parts)
    backend = backend_of(vocabulary)
    whole = backend.encode(text, add_special_tokens=add_special).ids
    begins_texts = backend.encode("").ids[:1] == [vocabulary.bos_token_id]
    if add_special and begins_texts and whole[1:2] == whole[:1]:
        del whole[0]
    most = pieces_of(vocabulary).most_chars(len(whole))
    assert most is None or len(text) < most
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "PIECE_CHARS", len(text))
        places = vocabulary.places(text, add_special=add_special)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_pieces, "PIECE_CHARS", size)
        patch.setattr(tokenizer, "PIECE_CHARS", size)
        assert vocabulary.encode(text, add_special=add_special) == whole
        assert vocabulary.places(text, add_special=add_special) == places
        if len(text) > size and whole:
            with pytest.raises(TooManyTokens) as caught:
                vocabulary.encode(text, add_special=add_special, most=len(whole) - 1)
            assert caught.value.num_tokens <= len(whole)


@pytest.mark.parametrize("name", VOCABULARIES)
def test_long_texts_are_cut_wherever_words_end(name: str) -> None:
    pieces = pieces_of(VOCABULARIES[name])
    assert pieces.is_known
    for text in ("word and word " * 9000, "a1 " * 30000):
        assert max(len(piece) for _, piece in pieces(text)) <= text_pieces.PIECE_CHARS


@pytest.mark.parametrize("name", ["demo autoregressive", "gpt-2", "qwen2", QWEN.name])
def test_texts_full_of_added_tokens_are_cut_behind_them(name: str) -> None:
    vocabulary = VOCABULARIES[name]
    for mark in vocabulary.special_texts.values():
        text = f"{mark}'a" * 9000
        pieces = [piece for _, piece in pieces_of(vocabulary)(text)]
        assert max(map(len, pieces)) <= text_pieces.PIECE_CHARS
        ids = backend_of(vocabulary).encode(text, add_special_tokens=False).ids
        assert vocabulary.encode(text, add_special=False) == ids


@pytest.mark.parametrize("name", ["demo autoregressive", "gpt-2", "qwen2"])
def test_words_of_many_scripts_end(name: str) -> None:
    pieces_of_text = pieces_of(VOCABULARIES[name])
    words = (
        *("\u00e9\u01a1", "\u1ea0\u1ef9", "\u0391\u03ce", "\u0416\u044f"),  # Latin, Greek, Cyrillic
        *(
            "\u0561\u0586",
            "\u10d0\u10f0",
            "\u05d0\u05ea",
            "\u0628\u064a",
        ),  # from Armenian to Arabic
        *("\u0915\u0939", "\u0995\u09a8", "\u0bae\u0bb9", "\u0e01\u0e19", "\u1208\u1246"),
        *("\u3041\u30f6", "\u4e00\u9fa5", "\uac00\ud7a3"),
    )
    for word in words:
        pieces = pieces_of_text(f"{word} " * 9000)
        assert max(len(piece) for _, piece in pieces) <= text_pieces.PIECE_CHARS, word


@pytest.mark.parametrize("name", ["demo autoregressive", "gpt-2", "qwen2"])
def test_texts_are_cut_behind_letters_alone_that_no_normal_form_changes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces_of_text = pieces_of(VOCABULARIES[name])
    monkeypatch.setattr(text_pieces, "PIECE_CHARS", 2)
    behind = {
        letter
        for letter in map(chr, range(0x10000))
        if len(list(pieces_of_text(f"{letter} {letter}"))) > 1
    }
    assert len(behind) > 30_000
    for letter in behind - set("0123456789"):
        assert unicodedata.category(letter).startswith("L"), letter
        assert unicodedata.normalize("NFC", letter) == letter


@pytest.mark.parametrize(
    "words",
    [
        pre_tokenizers.Split(tokenizers.Regex(r"\w+\s?"), "isolated"),
        pre_tokenizers.Split(tokenizers.Regex(r"\p{L}+(?=,)|\p{L}+"), "isolated"),
        pre_tokenizers.Split(tokenizers.Regex(r"\p{L}+"), "removed"),
        pre_tokenizers.Split(tokenizers.Regex(r"[A-Za-z0-9 ]+"), "isolated"),
    ],
)
def test_rules_that_are_not_known_are_cut_nowhere(words: pre_tokenizers.PreTokenizer) -> None:
    backend = tokenizers.Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])
    assert not TextPieces(backend).is_known
    assert list(TextPieces(backend)("word " * 9000)) == [(0, "word " * 9000)]


# texts that nothing closes: no further mark searches the rest again

UNITS = (
    *('\\"', "\\'", "\\/", "\\", '"', "'", '" ', " ", "\n", "/", "<", "a", ",", "\\ud83d"),
    *("<parameter=", "<function=write>\n", "</function> ", "</parameter>\n", "<arg_key>"),
    *('<invoke name="', '<parameter name="', "[TOOL_CALLS]", 'content="', "fuel "),
    *("regex parse error:", 'invalid regex "', "Unimplemented keys: ["),
)
NUM_CHARS = 50_000
WRITE = Tool("write", "", {"properties": {"content": {"type": "string"}}, "type": "object"})


def _read_input(text: str) -> None:
    custom = CustomInput()
    custom.push(text)
    custom.finish()


def _read_xml(syntax: XmlSyntax) -> Callable[[str], None]:
    def read(text: str) -> None:
        xml_call(syntax, text, {"write": WRITE})
        for end in syntax.loose_ends:
            end.search(text)

    return read


READERS: dict[str, tuple[Callable[[str], object], tuple[str, ...]]] = {
    "arguments": (loose_json, ("", '{"a": "', "{'a': '", "{'a': ")),
    "custom input": (_read_input, ('{"input": "', '{"input": "a" ')),
    "quoted grammar": (quoted_lark, ('start: "', "start: /", "start: ")),
    "chains": (lambda text: check_lark(text, "it"), ('start: "', "start: /", "start: %json ")),
    "reasons": (reason_of, ("", 'invalid regex "', "failed to compile JSON schema: ", "1(2): ")),
    "coder": (_read_xml(CODER), ("<tool_call>\n<function=write>\n<parameter=content>\n",)),
    "glm": (_read_xml(GLM), ("<tool_call>write<arg_key>content</arg_key><arg_value>",)),
    "minimax": (_read_xml(MINIMAX), ('<invoke name="write"><parameter name="content">',)),
    "python": (lambda text: python_calls(text, {"write": WRITE}), ('[write(content="',)),
    "gemma": (lambda text: gemma_call(text, {"write": WRITE}), ('call:write{content:<|"|>',)),
}


@pytest.mark.parametrize("name", READERS)
def test_a_text_that_nothing_closes_is_read_once(name: str) -> None:
    """0.01 s is usual; what grows with the square of the length takes many seconds."""
    read, begins = READERS[name]
    for begin in begins:
        for unit in UNITS:
            start_s = time.process_time()
            with suppress(LowtideError, ValueError, RecursionError):
                read(begin + unit * (NUM_CHARS // len(unit)))
            assert time.process_time() - start_s < 0.5, (begin, unit)


def test_a_schema_is_read_once_for_all_calls_of_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    num_read = 0
    inner_names = SchemaTypes.inner_names

    def counted(types: SchemaTypes) -> set[str]:
        nonlocal num_read
        num_read += 1
        return inner_names(types)

    monkeypatch.setattr(SchemaTypes, "inner_names", counted)
    tool = Tool("f", "", {"properties": {f"p {number}": {} for number in range(1000)}})
    text = f"[{', '.join(['f()'] * 500)}]"
    assert len(python_calls(text, {"f": tool})) == 500
    assert num_read <= 2
