"""Tokenizers that are published as `vocab.json` and `merges.txt`, beside transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

from lowtide.errors import CheckpointError
from lowtide.model_folder.hub_model import is_small
from lowtide.model_folder.tokenizer import Tokenizer, has_chat_template
from lowtide.model_writing.synth_tokenizer import tokenizer_config_json

MARKS = ("<|endoftext|>", "<|im_start|>", "<|mask|>")
TEXT = ["It's 12345 jumps\n\n over  the lazy dog. DON'T! caf\u00e9 \u65e5\u672c"] * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As Dream is published: its added tokens follow the vocabulary."""
    made = tmp_path_factory.mktemp("published")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    backend.model.save(str(made))
    first, config = backend.get_vocab_size(), json.loads(tokenizer_config_json())
    config |= {"tokenizer_class": "DreamTokenizer", "add_bos_token": False, "bos_token": MARKS[1]}
    config["added_tokens_decoder"] = {
        str(first + i): {"content": mark, "special": True, "normalized": False}
        for i, mark in enumerate(MARKS)
    }
    (made / "tokenizer_config.json").write_text(json.dumps(config))
    return made


def changed(folder: Path, target: Path, **changes: object) -> Path:
    """A copy whose `tokenizer_config.json` says otherwise."""
    for name in ("vocab.json", "merges.txt"):
        (target / name).write_bytes((folder / name).read_bytes())
    config = json.loads((folder / "tokenizer_config.json").read_text()) | changes
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    return target


@examples(60)
@given(text=st.text() | st.text("aA\u00e9e\u0301 '\u2019s12\r\n\t.,/", max_size=60))
def test_ids_are_those_of_the_class_in_transformers(folder: Path, text: str) -> None:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None
    theirs = Qwen2Tokenizer.from_pretrained(folder)
    text = f"{MARKS[1]}{text}{MARKS[2]}"
    assert tokenizer.encode(text) == theirs.encode(text)
    assert tokenizer.token_id(MARKS[2]) == theirs.convert_tokens_to_ids(MARKS[2])
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == theirs.decode(
        theirs.encode(text)
    )


def test_marks_of_utf_8_are_no_part_of_files(folder: Path, tmp_path: Path) -> None:
    target = changed(folder, tmp_path)
    for path in target.iterdir():
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    ours, theirs = Tokenizer.load(target), Tokenizer.load(folder)
    assert ours is not None and theirs is not None and ours.as_json() == theirs.as_json()


def test_it_has_its_template_and_ends_and_comes_from_the_hub(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None and tokenizer.has_chat_template and has_chat_template(folder)
    assert tokenizer.eos_token_ids == (tokenizer.token_id("<|endoftext|>"),)
    assert all(is_small(path.name) for path in folder.iterdir())


def test_a_class_whose_rule_is_not_known_is_no_tokenizer(folder: Path, tmp_path: Path) -> None:
    other = changed(folder, tmp_path, tokenizer_class="OtherTokenizer")
    assert Tokenizer.load(other) is None and not has_chat_template(other)


@pytest.mark.parametrize("begins", [True, False, None])
def test_a_text_begins_as_the_configuration_says(
    folder: Path, tmp_path: Path, begins: bool | None
) -> None:
    tokenizer = Tokenizer.load(changed(folder, tmp_path, add_bos_token=begins))
    assert tokenizer is not None
    ids = tokenizer.encode("the")
    assert (ids[0] == tokenizer.token_id(MARKS[1])) == bool(begins)
    assert tokenizer.encode("the", add_special=False) == ids[bool(begins) :]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("vocab.json", '{"a": "b"}', "which is not a number"),
        ("vocab.json", '{"a": true}', "which is not a number"),
        ("vocab.json", '{"a": -1}', "which is not a number"),
        ("vocab.json", "[]", "JSON"),
        ("merges.txt", "#version: 0.2\nab", "line 2, 'ab', is not two tokens"),
        ("merges.txt", "no merge\n", "do not make a tokenizer"),
        ("merges.txt", b"\xff a", "not text in UTF-8"),
    ],
)
def test_damaged_files_are_refused(
    folder: Path, tmp_path: Path, name: str, content: str | bytes, said: str
) -> None:
    made = changed(folder, tmp_path)
    (made / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError, match=said):
        Tokenizer.load(made)


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        (["x"], "must map numbers"),
        ({"7": 3}, "is not a token"),
        ({"7": {"content": ""}}, "is not a token"),
        ({"7": {"content": "x", "special": "yes"}}, "is not a token"),
        ({"seven": {"content": "x"}}, "not a token's number"),
        ({"9" * 99: {"content": "x"}}, "not a token's number"),
        ({"7": {"content": "<new>"}}, "gives '<new>' the number 7, and it follows as"),
    ],
)
def test_added_tokens_that_cannot_be_are_refused(
    folder: Path, tmp_path: Path, listed: Any, said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        Tokenizer.load(changed(folder, tmp_path, added_tokens_decoder=listed))
