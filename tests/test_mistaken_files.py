"""Files and folders in the place of a model's file, and missing paths: each is named as it is."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_files import finish
from typer.testing import CliRunner

from lowtide.cli.app import app
from lowtide.errors import CheckpointError, ConfigError, HubError, LowtideError, UsageError
from lowtide.files.json_file import parse_object
from lowtide.files.mistaken import mistaken, mistaken_weights
from lowtide.files.regular_file import read_from
from lowtide.llm import plan_model
from lowtide.model_folder import hub
from lowtide.model_folder.checkpoint import Checkpoint, read_header
from lowtide.model_folder.gguf_header import GgufHeader
from lowtide.model_folder.gguf_model import GgufModel
from lowtide.model_folder.tokenizer import Tokenizer

GOLDEN = Path(__file__).parent / "goldens" / "llada2-a"

LFS = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d" * 32 + b"\nsize 4976698672\n"
)
MISTAKEN: dict[str, tuple[bytes, str]] = {
    "pointer": (LFS, "a Git LFS pointer, not the file of 4976698672 bytes.*git lfs pull"),
    "pointer of long ago": (LFS.replace(b"git-lfs", b"hawser"), "a Git LFS pointer"),
    "pointer with a BOM": (b"\xef\xbb\xbf" + LFS, "a Git LFS pointer"),
    "page": (b"<!DOCTYPE html>\n<html><body>Sign in</body></html>", "a web page.*fetch it again"),
    "page after blanks": (b"\n\n  <HTML lang='en'><head>" + b" " * 90, "a web page"),
    "answer of a store": (
        b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>',
        "an answer in XML",
    ),
    "annex": (b"/annex/objects/SHA256E-s4976698672--4d4d.safetensors\n", "a git-annex pointer"),
    "pickle": (b"PK\x03\x04" + bytes(60), "a zip archive, as PyTorch's"),
    "gzip": (b"\x1f\x8b\x08" + bytes(60), "packed with gzip"),
}
WEIGHTS_ALONE: dict[str, tuple[bytes, str]] = {
    "refusal": (b"Access to model org/name is restricted and you are not", "a text that begins"),
    "JSON": (b'{"error":"Invalid username or password."}      ', "a text that begins"),
}
CASES = [
    *((name, *case) for name, case in MISTAKEN.items()),
    *((name, *case) for name, case in WEIGHTS_ALONE.items()),
]


def folder_of(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN, folder)
    return folder


@pytest.mark.parametrize(("name", "data", "said"), CASES, ids=[case[0] for case in CASES])
@pytest.mark.parametrize("file", ["model.safetensors", "model.gguf", "config.json", "tokenizer"])
def test_what_lies_in_place_of_a_file_is_named(
    file: str, name: str, data: bytes, said: str, tmp_path: Path
) -> None:
    if name in WEIGHTS_ALONE and file not in ("model.safetensors", "model.gguf"):
        return  # in place of JSON it is some text, or some JSON
    folder = folder_of(tmp_path)
    if file == "model.gguf":
        path = tmp_path / file
    elif file == "tokenizer":
        path = folder / "tokenizer.json"
    else:
        path = folder / file
    path.write_bytes(data)
    model = path if file == "model.gguf" else folder
    with pytest.raises(CheckpointError, match=f"{path.name}.* is {said}") as error:
        if file == "tokenizer":
            Tokenizer.load(folder)
        else:
            plan_model(model)
    assert len(str(error.value)) < 400 and "Traceback" not in str(error.value)


@pytest.mark.parametrize("data", [case[0] for case in MISTAKEN.values()])
@pytest.mark.parametrize("name", ["model.safetensors.index.json", "generation_config.json"])
def test_other_json_files_are_read_alike(name: str, data: bytes, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{name} is (a|an|packed)"):
        parse_object(data, name)


def test_files_of_weights_are_not_mistaken() -> None:
    for path in GOLDEN.glob("*.safetensors"):
        assert mistaken(path.read_bytes()[:512]) is None
    for number in range(2000):
        data = np.random.default_rng(number).bytes(512)
        assert mistaken(data) is None or data[:2] in (b"\x80\x02", b"\x1f\x8b")
    header = struct.pack("<Q", 1000) + b'{"__metadata__":{}'
    assert "another name; end its name in .safetensors" in str(mistaken_weights(header))
    assert "end its name in .gguf" in str(mistaken_weights(b"GGUF" + bytes(99)))
    assert "empty" in str(mistaken_weights(b""))


def written(path: Path, count: int, number: int, tensors: int = 1) -> Path:
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_uint16("split.count", count)
    writer.add_uint16("split.no", number)
    for tensor in range(tensors):
        name = f"blk.{number}.attn_norm.{tensor}"
        writer.add_tensor(name, np.full((33,), number, np.float32))
    finish(writer)
    return path


@pytest.mark.parametrize("first_tensors", [0, 1, 3])
@pytest.mark.parametrize("name", ["whole.gguf", "whole-00001-of-00003.gguf"])
def test_gguf_parts_that_were_joined_are_named(
    name: str, first_tensors: int, tmp_path: Path
) -> None:
    parts = [
        written(tmp_path / f"part-{i}.gguf", 3, i, 1 if i else first_tensors).read_bytes()
        for i in range(3)
    ]
    parts = [part + bytes(-len(part) % 32) for part in parts]
    path = tmp_path / name
    path.write_bytes(b"".join(parts))
    with pytest.raises(CheckpointError, match=f"another GGUF file begins at byte {len(parts[0])}"):
        GgufModel.open(path)


@pytest.mark.parametrize("said", [0, 1, 2, 4, 77])
def test_files_of_a_set_agree_on_their_number(said: int, tmp_path: Path) -> None:
    for number in range(3):
        count = said if number == 2 else 3
        written(tmp_path / f"a-{number + 1:05d}-of-00003.gguf", count, number)
    with pytest.raises(CheckpointError, match=f"one of {said} files, and the first .* are 3"):
        GgufModel.open(tmp_path / "a-00001-of-00003.gguf")


@pytest.mark.parametrize("name", ["a.gguf.part1of2", "a.gguf-split-a", "a.gguf.001", "a.gguf.aa"])
def test_a_piece_of_a_gguf_file_is_named(name: str, tmp_path: Path) -> None:
    data = written(tmp_path / "whole.gguf", 1, 0, 3).read_bytes()
    first, second = tmp_path / name, tmp_path / f"other-{name}"
    first.write_bytes(data[: len(data) - 40])
    second.write_bytes(data[-40:])
    for piece in (first, second):
        with pytest.raises(CheckpointError, match="one piece of a file: join the pieces"):
            GgufHeader.read(piece)


def test_safetensors_parts_that_were_joined_are_named(tmp_path: Path) -> None:
    whole = (GOLDEN / "model.safetensors").read_bytes()
    path = tmp_path / "model.safetensors"
    path.write_bytes(whole + whole)
    with pytest.raises(
        CheckpointError, match=f"another safetensors file begins at byte {len(whole)}"
    ):
        Checkpoint.open(tmp_path)
    path.write_bytes(whole + bytes(100))
    with pytest.raises(CheckpointError, match="100 bytes after the last tensor belong to no"):
        Checkpoint.open(tmp_path)


class Empty:
    """A stream whose file system answers EAGAIN."""

    def read(self, num_bytes: int) -> None:
        return None


def test_a_read_that_has_nothing_yet_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream: Any = Empty()
    with pytest.raises(LowtideError, match="here cannot be read.*Resource temporarily unavailable"):
        read_from(stream, 10, "here")
    folder, path = folder_of(tmp_path), written(tmp_path / "a.gguf", 1, 0)
    for reader, target in (
        (read_header, folder / "model.safetensors"),
        (GgufHeader.read, path),
        (plan_model, folder),
        (plan_model, path),
    ):
        act: Callable[[Path], object] = reader
        with monkeypatch.context() as patched:
            patched.setattr("lowtide.files.regular_file.open", _Nothing, raising=False)
            with pytest.raises(CheckpointError, match="Resource temporarily unavailable"):
                act(target)


class _Nothing:
    """File of `open` whose every read answers EAGAIN."""

    def __init__(self, descriptor: int, mode: str) -> None:
        self._descriptor = descriptor

    def __enter__(self) -> Empty:
        return Empty()

    def __exit__(self, *error: object) -> None:
        os.close(self._descriptor)


def told(reference: str, offline: bool = True) -> str:
    with pytest.raises(LowtideError) as error:
        hub.resolve_model(reference, offline=offline)
    return str(error.value)


@pytest.mark.parametrize("ending", [".gguf", ".safetensors", ".json", ".bin"])
def test_a_missing_path_is_a_missing_file(ending: str, tmp_path: Path) -> None:
    (tmp_path / f"Qwen3-30B-A3B{ending}").touch()
    (tmp_path / "models").mkdir()
    for name in (f"qwen3-30b-a3b{ending}", f"Qwen3-30B-A3{ending}"):
        said = told(str(tmp_path / name))
        assert said.startswith(f"There is no file or folder {tmp_path / name}. Near: ")
        assert f"Qwen3-30B-A3B{ending}" in said
    said = told(str(tmp_path / "model" / f"a{ending}"))
    assert f"the folder {tmp_path / 'model'} does not exist. Near: {tmp_path / 'models'}." in said
    assert told(f"nope{ending}").startswith(f"There is no file or folder nope{ending}.")


def test_a_link_that_leads_nowhere_says_so(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").symlink_to("gone.gguf")
    for inner in ("", "config.json"):
        said = told(str(tmp_path / "model.gguf" / inner))
        assert (
            said
            == f"{tmp_path}/model.gguf is missing: its link leads to gone.gguf, where nothing is."
        )


def test_a_path_that_may_be_an_id_is_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "models" / "llada2").mkdir(parents=True)
    said = told("models/llada")
    assert (
        "Offline" in said
        and "There is no file or folder models/llada. Near: models/llada2." in said
    )
    assert told("models/llada.gguf").startswith("There is no file or folder models/llada.gguf.")
    assert "There is no file" not in told("org/name")


def test_a_folder_without_a_model_says_what_one_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no model: neither config.json.*nor a GGUF file"):
        plan_model(tmp_path)
    shutil.copytree(GOLDEN, tmp_path / "inner")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match="pytorch_model.bin its config.json is missing.*/inner"):
        plan_model(tmp_path)
    result = CliRunner().invoke(app, ["plan", str(tmp_path)])
    assert result.exit_code == 2 and "holds no model" in result.stderr


OLLAMA = [
    ("qwen3:30b", "on the hub it is Qwen/Qwen3-30B-A3B"),
    ("qwen3:30b-a3b-q4_K_M", "on the hub it is Qwen/Qwen3-30B-A3B"),
    ("qwen3", "on the hub it is Qwen/Qwen3-8B"),
    ("qwen3:0.6b", "on the hub it is Qwen/Qwen3-0.6B"),
    ("smollm2:135m-instruct-q4_1", "on the hub it is HuggingFaceTB/SmolLM2-135M-Instruct"),
    ("gpt-oss", "on the hub it is openai/gpt-oss-20b"),
    ("gpt-oss:latest", "on the hub it is openai/gpt-oss-20b"),
    ("gpt-oss:120b", "on the hub it is openai/gpt-oss-120b"),
    ("mixtral:8x22b", "on the hub it is mistralai/Mixtral-8x22B-Instruct-v0.1"),
    ("llama3", "on the hub it is meta-llama/Meta-Llama-3-8B-Instruct"),
    ("llama3.2:1b", "on the hub it is meta-llama/Llama-3.2-1B-Instruct"),
    ("gemma2", "google/gemma-2-9b-it, and it does not run here. It is Gemma: .*Qwen/Qwen3-30B-A3B"),
    ("mistral:7b", "Mistral-7B-Instruct-v0.3, and it does not run .*: a dense .*Mixtral-8x7B"),
    ("my-own:tag", "is a name of Ollama's library, or built like one.*org/name:Q4_K_M"),
]


@pytest.mark.parametrize(("name", "said"), OLLAMA)
def test_ollama_s_names_get_the_hub_s(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(HubError, match=said) as error:
        hub.resolve_model(name)
    assert "Ollama's own file" not in str(error.value)
    stem, _, tag = name.partition(":")
    manifest = tmp_path / "manifests" / "registry.example" / "library" / stem / (tag or "latest")
    manifest.parent.mkdir(parents=True)
    kinds = {"application/vnd.ollama.image.model": "ab" * 32, "application/other": "cd" * 32}
    layers = [{"mediaType": kind, "digest": f"sha256:{digest}"} for kind, digest in kinds.items()]
    manifest.write_text(json.dumps({"layers": layers}))
    (tmp_path / "blobs").mkdir()
    blob = tmp_path / "blobs" / f"sha256-{'ab' * 32}"
    blob.write_bytes(b"GGUF")
    if "does not run" not in str(error.value):
        with pytest.raises(HubError, match=f"Ollama's own file of it is {blob}: give that path"):
            hub.resolve_model(name)
    manifest.write_text("[")
    with pytest.raises(HubError, match=said):
        hub.resolve_model(name)


@pytest.mark.parametrize("name", ["gone", "a b", "autoregressive"])
def test_other_names_are_none_of_ollama_s(name: str) -> None:
    with pytest.raises((HubError, UsageError), match="Tried: the folder"):
        hub.resolve_model(name)
