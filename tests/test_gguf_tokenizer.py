"""Tokenizers out of GGUF metadata beside those of the tokenizers library they were made of."""

from __future__ import annotations

import itertools
import json
import random
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
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

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


@examples(60)
@given(text=st.text() | st.text("aA\u00e9 '\u2019s1234\r\n\t.,/", max_size=60))
def test_words_of_qwen_are_transformers(text: str) -> None:
    ours = WORD_RULES["qwen2"].pre_tokenizer()
    theirs = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


DEEPSEEK = ["It", "'", "s", " ", "1", "2", "3", "4", " caf\u00e9", "\n", "\n", " x"]


@pytest.mark.parametrize(
    "name,words",
    [
        ("gpt-2", ["It", "'s", " 1234", " caf\u00e9", "\n\n", " x"]),
        ("olmo", ["It", "'s", " 1234", " caf\u00e9", "\n\n", " x"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", " caf\u00e9", "\n\n", " x"]),
        ("llama-bpe", ["It", "'s", " ", "123", "4", " caf\u00e9", "\n\n", " x"]),
        ("llama3", ["It", "'s", " ", "123", "4", " caf\u00e9", "\n\n", " x"]),
        ("llama-v3", ["It", "'s", " ", "123", "4", " caf\u00e9", "\n\n", " x"]),
        ("glm4", ["It", "'s", " ", "123", "4", " caf\u00e9", "\n\n", " x"]),
        ("dbrx", ["It", "'s", " ", "123", "4", " caf\u00e9", "\n\n", " x"]),
        ("gpt-4o", ["It's", " ", "123", "4", " caf\u00e9", "\n\n", " x"]),
        ("bailingmoe2", ["It", "'s", " ", "1", "2", "3", "4", " caf\u00e9", "\n\n", " x"]),
        ("bailingmoe", ["It", "'s", " ", "1", "2", "3", "4", " caf\u00e9", "\n\n", " x"]),
        # Its punctuation has a range with letters in it, which cuts words once more.
        ("deepseek-llm", [*DEEPSEEK[:8], " caf", "\u00e9", *DEEPSEEK[9:]]),
        ("deepseek-coder", DEEPSEEK),
    ],
)
def test_words_by_name(name: str, words: list[str]) -> None:
    text = "It's 1234 caf\u00e9\n\n x"
    cuts = [span for _, span in WORD_RULES[name].pre_tokenizer().pre_tokenize_str(text)]
    assert [text[start:stop] for start, stop in cuts] == words
    assert set(WORD_RULES) == {case[0] for case in test_words_by_name.pytestmark[0].args[1]}


def test_what_makes_no_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    assert gguf_tokenizer({}, path) is None
    assert gguf_tokenizer({"tokenizer.ggml.model": "none"}, path) is None
    good: dict[str, Any] = {"tokenizer_pre": "qwen2", "token_merges": ["a b"]}
    cases: list[tuple[str, list[str], dict[str, Any], type[Exception], str]] = [
        ("t5", ["a"], {}, UnsupportedError, "of the kind 't5'.*supported: gpt2, llama"),
        ("gpt2", ["a"], {**good, "tokenizer_pre": "new"}, UnsupportedError, "rule 'new'.*gpt-2"),
        ("gpt2", ["a"], good, CheckpointError, "does not make a tokenizer"),
        ("gpt2", ["a"], {**good, "token_merges": ["ab"]}, CheckpointError, "merge 'ab'"),
        ("gpt2", ["a"], {"tokenizer_pre": "qwen2"}, CheckpointError, "merges is None"),
        ("llama", ["a"], {}, CheckpointError, "its 1 tokens have no scores"),
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
