"""Tokenizers out of GGUF metadata beside those of the tokenizers library they were made of."""

from __future__ import annotations

import itertools
import json
import random
import re
import unicodedata
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from examples import examples
from gguf_files import finish
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    convert_gguf_tokenizer,
    get_gguf_tokenizer,
)

from lowtide.errors import CheckpointError, UnsupportedError, UsageError
from lowtide.model_folder.gguf_header import GgufHeader
from lowtide.model_folder.gguf_pretokenizers import WORD_RULES
from lowtide.model_folder.gguf_tokenizer import gguf_tokenizer
from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.model_writing.synth_tokenizer import tokenizer_json

EOS = 1000
TEXT = "The quick brown fox's 12345 jumps\n\n over  the lazy dog. DON'T! caf\u00e9 \u65e5\u672c "
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"


def written(path: Path, kind: str, tokens: list[str], **more: Any) -> Path:
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    for name, value in more.items():
        getattr(writer, f"add_{name}")(value)
    finish(writer)
    return path


def tokenizer_of(path: Path) -> Tokenizer:
    found = gguf_tokenizer(GgufHeader.read(path).metadata, path)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The synthetic models' tokenizer in GGUF."""
    synthetic = json.loads(tokenizer_json(EOS))
    vocabulary = synthetic["model"]["vocab"]
    special = {added["content"]: added["id"] for added in synthetic["added_tokens"]}
    by_id = {number: token for token, number in {**vocabulary, **special}.items()}
    tokens = [by_id[number] for number in range(len(by_id))]
    return written(
        tmp_path_factory.mktemp("tokens") / "bpe.gguf",
        "gpt2",
        tokens,
        tokenizer_pre="gpt-2",
        token_merges=[" ".join(pair) for pair in synthetic["model"]["merges"]],
        token_types=[3 if token in special else 1 for token in tokens],
        eos_token_id=EOS,
        bos_token_id=EOS,
        chat_template=TEMPLATE,
    )


@examples(60)
@given(text=st.text() | st.text("ab '\n\t1.<|>\u00e9", max_size=40))
def test_byte_level_ids_are_those_of_the_original(byte_level: Path, text: str) -> None:
    original = tokenizers.Tokenizer.from_str(tokenizer_json(EOS))
    ours = tokenizer_of(byte_level)
    for each in (text, TEXT + text + "<|mask|>"):
        ids = ours.encode(each)
        assert ids == original.encode(each).ids
        assert ours.decode(ids, skip_special=False) == original.decode(
            ids, skip_special_tokens=False
        )


def test_special_tokens_and_template(byte_level: Path, tmp_path: Path) -> None:
    ours = tokenizer_of(byte_level)
    assert (ours.eos_token_ids, ours.bos_token_id) == ((EOS,), EOS)
    assert ours.vocab_size == EOS + 9
    hello = ours.render_chat([{"role": "user", "content": "hello"}])
    assert hello == "<|endoftext|>[user] hello"
    assert ours.decode([EOS, *ours.encode("hi")]) == "hi"
    path = written(
        tmp_path / "bos.gguf",
        "gpt2",
        ["a", "b", "ab", "<s>"],
        tokenizer_pre="qwen2",
        token_merges=["a b"],
        token_types=[1, 1, 1, 3],
        bos_token_id=3,
        add_bos_token=True,
    )
    assert tokenizer_of(path).encode("ab<s>") == [3, 2, 3]
    assert tokenizer_of(path).encode("ab", add_special=False) == [2]
    with pytest.raises(UsageError, match=r"\(bos.gguf has no tokenizer.chat_template\)"):
        tokenizer_of(path).render_chat([{"role": "user", "content": "hello"}])


def test_a_template_for_tools_is_taken_with_tools(tmp_path: Path) -> None:
    templates = [
        {"name": "default", "template": "\ufeffd"},
        {"name": "tool_use", "template": "{{ tools[0].function.name }}"},
    ]
    path = written(
        tmp_path / "named.gguf",
        "gpt2",
        ["a", "b", "ab"],
        tokenizer_pre="qwen2",
        token_merges=["a b"],
        chat_template=templates,
    )
    hello = [{"role": "user", "content": "hello"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert tokenizer_of(path).render_chat(hello) == "d"
    assert tokenizer_of(path).render_chat(hello, {"tools": tools}) == "f"


@pytest.mark.parametrize("said", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
@pytest.mark.parametrize(("rule", "is_usual"), [("llama-bpe", True), ("qwen2", False)])
def test_a_file_that_does_not_say_begins_a_text_as_its_kind_does(
    said: dict[str, bool], rule: str, is_usual: bool, tmp_path: Path
) -> None:
    path = written(
        tmp_path / "bos.gguf",
        "gpt2",
        ["a", "b", "ab", "<s>"],
        tokenizer_pre=rule,
        token_merges=["a b"],
        token_types=[1, 1, 1, 3],
        bos_token_id=3,
        **said,
    )
    begins = [3] if said.get("add_bos_token", is_usual) else []
    assert tokenizer_of(path).encode("ab") == [*begins, 2]


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tokenizers.Tokenizer]:
    """A sentence-piece like vocabulary, in GGUF and as a tokenizer whose merges are known."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    trained.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    trained.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<unk>", "<s>", "</s>", *bytes_], show_progress=False
    )
    trained.train_from_iterator([TEXT.replace("\u65e5", ""), "the lazy dog jumps over"], trainer)
    vocabulary = trained.get_vocab()
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    path = written(
        tmp_path_factory.mktemp("pieces") / "spm.gguf",
        "llama",
        tokens,
        token_scores=[float(-number) for number in range(len(tokens))],
        token_types=[2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
        bos_token_id=1,
        eos_token_id=2,
        unk_token_id=0,
    )
    return path, trained


@examples(60)
@given(text=st.text("the lazydog.\u65e5\u672c\u00e9\n", max_size=40))
def test_pieces_are_those_of_their_scores(
    pieces: tuple[Path, tokenizers.Tokenizer], text: str
) -> None:
    path, trained = pieces
    ours = tokenizer_of(path)
    ids = ours.encode(text)
    assert ids == [1, *trained.encode(text).ids]
    assert ours.decode(ids) == text.removeprefix("") or "\ufffd" in ours.decode(ids)


def merged(text: str, scores: dict[str, float]) -> list[str]:
    """Merge pieces as sentence-piece does.

    Of all neighbours the pair whose text has the best score merges first, the first of equal ones,
    until there is none; the rest that is no piece becomes bytes.
    """
    found = list(text)
    while True:
        pairs = [(scores.get(a + b), -n) for n, (a, b) in enumerate(itertools.pairwise(found))]
        best = max(((s, n) for s, n in pairs if s is not None), default=None)
        if best is None:
            break
        found[-best[1] : 2 - best[1]] = ["".join(found[-best[1] : 2 - best[1]])]
    parts = [[x] if x in scores else [f"<0x{n:02X}>" for n in x.encode()] for x in found]
    return [each for part in parts for each in part]


@pytest.mark.parametrize("has_prefix", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_pieces_are_merged_as_sentence_piece_does(
    seed: int, has_prefix: bool, tmp_path: Path
) -> None:
    """Runs of one letter and pieces that are made in several ways, too."""
    rng = random.Random(seed)
    letters = ["a", "=", "\u2581"]
    pieces = {letter * rng.randrange(2, 17) for letter in letters * 6}
    for _ in range(40):
        pieces.add("".join(rng.choice([*letters, *sorted(pieces)]) for _ in range(2))[:16])
    more = rng.sample(sorted(pieces - set(letters)), len(pieces - set(letters))) + letters
    tokens = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *more]
    scores = [0.0] * 258 + [-float(number) for number in range(len(more))]
    path = written(
        tmp_path / "spm.gguf",
        "llama",
        tokens,
        token_scores=scores,
        token_types=[2, 3] + [6] * 256 + [1] * len(more),
        bos_token_id=1,
        add_space_prefix=has_prefix,
    )
    ours, known = tokenizer_of(path), dict(zip(more, scores[258:], strict=True))
    for _ in range(60):
        text = "".join(rng.choice("aa== \u65e5") * rng.choice((1, 1, 2, 7)) for _ in range(12))
        expected = merged((" " * has_prefix + text).replace(" ", "\u2581"), known)
        ids = ours.encode(text)
        assert [tokens[number] for number in ids[1:]] == expected and ids[0] == 1
        assert ours.decode(ids) == text


SYNONYMS = {
    "gpt-2": "phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum modern-bert "
    "exaone4 jais trillion granite-docling",
    "olmo": "mpt",
    "starcoder": "refact command-r smollm codeshell exaone minerva-7b mellum2",
    "falcon": "",
    "llama-bpe": "llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    "glm4": "glm5",
    "chatglm-bpe": "dbrx smaug-bpe",
    "qwen2": "deepseek-r1-qwen kormo f2llmv2 megrez",
    "hunyuan": "grok-2 solar-open",
    "qwen35": "",
    "tekken": "",
    "gpt-4o": "llama4 kanana2 talkie minimax-m2",
    "kimi-k2": "",
    "bailingmoe": "bailingmoe2 llada-moe",
    "deepseek-llm": "",
    "deepseek-coder": "",
    "deepseek-v3": "hunyuan-dense hy_v4 joyai-llm",
}
"""Names of rules in files, as llama.cpp groups them."""


def test_names_that_mean_one_rule() -> None:
    for name, others in SYNONYMS.items():
        assert all(WORD_RULES[other] is WORD_RULES[name] for other in others.split())
    assert set(WORD_RULES) == {*SYNONYMS, *" ".join(SYNONYMS.values()).split()}


@examples(30)
@given(text=st.text() | st.text("aA\u00e9\u4e2d '\u2019s1234\r\n\t.,/\u0301", max_size=60))
@pytest.mark.parametrize("name", GGUF_PRE_TOKENIZER_SPLITS)
def test_words_are_those_of_transformers(name: str, text: str) -> None:
    theirs = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[name]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    assert WORD_RULES[name].pre_tokenizer().pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


ALPHABET = (
    "aZs tldmrevTS \r\n\t\u3000\xa0 0129\u0663\xb2\u2167 '\"!#$%&()*+,-./:;<=>?@[\\]^_`{|}~ \u2019"
    "\u3002\uff0c\u20ac\xb5\xe9\xc9\u01c5\u02b0\u0301\u093f \u0915\u0436\u0416\u05d0\u4e2d\u56fd"
    "\u9fff\u304b\u30ab\u30fc\u30fb\ud55c \U0001f642\U0001d400"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?[\p{L}]+| ?[\p{N}]+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LAST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UP, _LOW = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"


def _cased(end: str, up: str = _UP, low: str = _LOW) -> str:
    return f"{_BEFORE}[{up}]*[{low}]+{end}|{_BEFORE}[{up}]+[{low}]*{end}"


PUBLISHED = {
    "gpt-2": [_GPT2],
    "starcoder": [r"[\p{N}]", _GPT2],
    "falcon": [r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9]{3}"],
    "llama-bpe": [
        rf"{_SHORT}|{_BEFORE}[\p{{L}}]+|[\p{{N}}]{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LAST}"
    ],
    "hunyuan": [rf"{_SHORT}|{_BEFORE}[\p{{L}}]+|[\p{{N}}]| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LAST}"],
    "qwen35": [
        rf"{_SHORT}|{_BEFORE}[\p{{L}}\p{{M}}]+|[\p{{N}}]"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LAST}"
    ],
    "tekken": [rf"{_cased('')}|[\p{{N}}]| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LAST}"],
    "gpt-4o": [rf"{_cased(_SHORT + '?')}|[\p{{N}}]{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LAST}"],
    "kimi-k2": [
        r"[\p{Han}]+|"
        + _cased(_SHORT + "?", _UP.replace("Lo", "Lo-Han"), _LOW.replace("Lo", "Lo-Han"))
        + rf"|[\p{{N}}]{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LAST}"
    ],
    "bailingmoe": [
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+[\p{L}]+|[\p{N}]"
        r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
    ],
    "deepseek-coder": [
        r"[\r\n]",
        r"\s?[\p{L}]+",
        r"\s?[\p{P}]+",
        "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        r"[\p{N}]",
    ],
    "deepseek-v3": [
        r"[\p{N}]{1,3}",
        _KANA,
        r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
        + _LAST,
    ],
}
"""Rules as the models' own tokenizers have them, each by one of its names."""


def _members(kind: str) -> str:
    """List the letters of the tests' alphabet that have a Unicode property."""
    if kind == "Han":
        return "".join(char for char in ALPHABET if "\u4e00" <= char <= "\u9fff")
    if kind == "Lo-Han":
        return "".join(sorted(set(_members("Lo")) - set(_members("Han"))))
    found = {char for char in ALPHABET if unicodedata.category(char).startswith(kind)}
    return re.escape("".join(sorted(found)))


def _cut(patterns: list[str], text: str) -> list[str]:
    """Cut by one pattern after the other; what none of them matches stays whole."""
    words = [text]
    for pattern in patterns:
        matcher = re.compile(re.sub(r"\\p{([\w-]+)}", lambda m: _members(m[1]), pattern))
        pieces = []
        for word in words:
            end = 0
            for found in matcher.finditer(word):
                pieces += [word[end : found.start()], found[0]]
                end = found.end()
            pieces.append(word[end:])
        words = [piece for piece in pieces if piece]
    return words


def test_every_rule_is_compared_with_a_published_one() -> None:
    compared = {WORD_RULES[name].patterns for name in (*PUBLISHED, *GGUF_PRE_TOKENIZER_SPLITS)}
    left = {name for name in SYNONYMS if WORD_RULES[name].patterns not in compared}
    assert left == {"deepseek-llm"}  # its letters are listed one by one


@examples(60)
@given(text=st.text(ALPHABET, max_size=40))
@pytest.mark.parametrize("name", PUBLISHED)
def test_words_are_those_of_the_published_rule(name: str, text: str) -> None:
    """Python's expressions over an alphabet whose properties `unicodedata` says."""
    cuts = [span for _, span in WORD_RULES[name].pre_tokenizer().pre_tokenize_str(text)]
    assert [text[start:stop] for start, stop in cuts] == _cut(PUBLISHED[name], text)


DEEPSEEK = ["It", "'", "s", " ", "1", "2", "3", "4", " caf\u00e9", "\n", "\n", " x"]
LLAMA3 = ["It", "'s", " ", "123", "4", " caf\u00e9", "\n\n", " x"]
QWEN2 = ["It", "'s", " ", "1", "2", "3", "4", " caf\u00e9", "\n\n", " x"]
GPT2 = ["It", "'s", " 1234", " caf\u00e9", "\n\n", " x"]


@pytest.mark.parametrize(
    "name,words",
    [
        ("gpt-2", GPT2),
        ("olmo", GPT2),
        ("starcoder", QWEN2),
        ("falcon", ["It", "'", "s", " ", "123", "4", " caf\u00e9", "\n\n", " x"]),
        ("qwen2", QWEN2),
        ("hunyuan", QWEN2),
        ("qwen35", QWEN2),
        ("llama-bpe", LLAMA3),
        ("glm4", LLAMA3),
        ("chatglm-bpe", LLAMA3),
        ("tekken", ["It", "'s", " ", "1", "2", "3", "4", " caf\u00e9", "\n\n", " x"]),
        ("gpt-4o", ["It's", " ", "123", "4", " caf\u00e9", "\n\n", " x"]),
        ("kimi-k2", ["It's", " ", "123", "4", " caf\u00e9", "\n\n", " x"]),
        ("bailingmoe", QWEN2),
        ("deepseek-v3", LLAMA3),
        # Its punctuation has a range with letters in it, which cuts words once more.
        ("deepseek-llm", [*DEEPSEEK[:8], " caf", "\u00e9", *DEEPSEEK[9:]]),
        ("deepseek-coder", DEEPSEEK),
    ],
)
def test_words_by_name(name: str, words: list[str]) -> None:
    text = "It's 1234 caf\u00e9\n\n x"
    cuts = [span for _, span in WORD_RULES[name].pre_tokenizer().pre_tokenize_str(text)]
    assert [text[start:stop] for start, stop in cuts] == words
    assert set(SYNONYMS) == {case[0] for case in test_words_by_name.pytestmark[0].args[1]}


@pytest.mark.parametrize("denies", [None, False])
def test_pieces_with_merges_of_their_own(denies: bool | None, tmp_path: Path) -> None:
    """Gemma 4's kind, beside transformers' reading of the file."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    lines = ["\n" * n for n in range(1, 5)]
    words = ["a", "b", "ab", "\u2581", "\u2581\u2581", "\u2581a", "\u2581ab", "b\u2581a", "\xe9"]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", '<|"|>', *bytes_, *words, *lines]
    pairs = ["\n\n\n \n", "\n\n \n\n", "\n\n \n", "\n \n", "\u2581 \u2581", "b \u2581a", "\u2581 a"]
    path = written(
        tmp_path / "gemma.gguf",
        "gemma4",
        tokens,
        token_merges=[*pairs, "a b", "\u2581a b"],
        token_types=[3, 3, 3, 3, 3, 4, *[6] * 256, *[1] * (len(words) + len(lines))],
        bos_token_id=2,
        eos_token_id=1,
        unk_token_id=3,
        **({} if denies is None else {"add_bos_token": denies}),
    )
    ours = tokenizer_of(path)
    theirs, _ = convert_gguf_tokenizer(*get_gguf_tokenizer(str(path))[:2])
    rng = random.Random(7)
    for _ in range(300):
        parts = ["a", "b", " ", "  ", "\n", "\n\n\n", "\xe9", "\u4e2d", '<|"|>', "<|turn>", "ab"]
        text = "".join(rng.choice(parts) for _ in range(rng.randrange(12)))
        ids = ours.encode(text)
        assert ids == [2, *theirs.encode(text, add_special_tokens=False).ids]
        assert ours.decode(ids, skip_special=False) == f"<bos>{text}"
    assert ours.encode("\n\n\n\n ab") == [2, tokens.index("\n\n\n\n"), tokens.index("\u2581ab")]
    assert ours.special_texts.keys() == {0, 1, 2, 3, 4}


def test_what_makes_no_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    assert gguf_tokenizer({}, path) is None
    assert gguf_tokenizer({"tokenizer.ggml.model": "none"}, path) is None
    good: dict[str, Any] = {"tokenizer_pre": "qwen2", "token_merges": ["a b"]}
    cases: list[tuple[str, list[str], dict[str, Any], type[Exception], str]] = [
        ("t5", ["a"], {}, UnsupportedError, "of the kind 't5'.*supported: gpt2, llama, gemma4"),
        ("gpt2", ["a"], {**good, "tokenizer_pre": "new"}, UnsupportedError, "rule 'new'.*gpt-2"),
        ("gpt2", ["a"], good, CheckpointError, "does not make a tokenizer"),
        ("gpt2", ["a"], {**good, "token_merges": ["ab"]}, CheckpointError, "merge 'ab'"),
        ("gpt2", ["a"], {"tokenizer_pre": "qwen2"}, CheckpointError, "merges is None"),
        ("llama", ["a"], {}, CheckpointError, "its 1 tokens have no scores"),
        ("llama", ["a"], {"token_scores": [float("nan")]}, CheckpointError, "is not a number"),
        ("llama", ["a"], {"token_scores": [1.0, 2.0]}, CheckpointError, "2 values, not .*of 1 num"),
        ("gpt2", ["a", "b", "ab"], {**good, "token_types": [1]}, CheckpointError, "of 3 numbers"),
        ("gpt2", ["a" * (2 << 20)], good, CheckpointError, "have 2097160 bytes; at most 1048640"),
        ("gpt2", ["a"], {**good, "token_merges": 17 * ["a b"]}, CheckpointError, "at most 16 are"),
        (
            "gpt2",
            ["a"],
            {**good, "eos_token_id": 9},
            CheckpointError,
            "eos_token_id 9 is none of 1",
        ),
        ("gpt2", ["a"], {**good, "chat_template": "x" * 300_000}, CheckpointError, "300000 char"),
    ]
    for kind, tokens, more, error, match in cases:
        with pytest.raises(error, match=match):
            tokenizer_of(written(path, kind, tokens, **more))
