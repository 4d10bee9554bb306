"""A message about a file says what is wrong with it and what to do next.

Kinds of files: those of a model's folder, GGUF files, traces and calibrations, and files that an
option names.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from typer.testing import CliRunner

from lowtide.cli.app import app
from lowtide.cli.turns import Turns
from lowtide.errors import CheckpointError, ConfigError, LowtideError, StorageError, UsageError
from lowtide.lab.profiles import load_profile
from lowtide.lab.quality_questions import read_questions
from lowtide.llm import plan_model
from lowtide.model_folder.gguf_header import GgufHeader
from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.replay.calibration import Calibration
from lowtide.replay.trace import Trace

GOLDEN = Path(__file__).parent / "goldens" / "llada2-a"
FETCH = "fetch the model again"
CORRECT = f"correct it, or {FETCH}"
MEND = f"Correct the value, give another as a config override, or {FETCH}"
INDEX = "model.safetensors.index.json"


def folder_with(tmp_path: Path, name: str, data: bytes | None) -> Path:
    """Copy a model's folder with one file replaced, or without it."""
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN, folder)
    (folder / name).unlink(missing_ok=True)
    if data is not None:
        (folder / name).write_bytes(data)
    return folder


def config_with(**values: object) -> bytes:
    config = json.loads((GOLDEN / "config.json").read_bytes())
    return json.dumps({**config, **values}).encode()


FILES: dict[str, tuple[str, bytes | None, str, str]] = {
    "no JSON": ("config.json", b"{", "config.json is not valid JSON: ", CORRECT),
    "empty": ("config.json", b"", "config.json is empty", CORRECT),
    "blank": ("config.json", b" \n", "config.json is empty", CORRECT),
    "a list": ("config.json", b"[]", "config.json must hold a JSON object, not a list", CORRECT),
    "a text": ("config.json", b'"a"', "config.json must hold a JSON object, not a str", CORRECT),
    "too deep": ("config.json", b"[" * 200_000, "nested too deeply to be read", CORRECT),
    "a value": (
        "config.json",
        config_with(num_hidden_layers=-1),
        "must be an integer from 1",
        MEND,
    ),
    "no value": ("config.json", config_with(vocab_size=None), "has no vocab_size", MEND),
    "together": ("config.json", config_with(num_experts_per_tok=99), "99", MEND),
    "other": (
        "config.json",
        config_with(hidden_act="relu"),
        "hidden_act 'relu' is not supported, only 'silu'",
        "choose another model",
    ),
    "generation": ("generation_config.json", b"{]", "is not valid JSON: ", CORRECT),
    "weights cut": ("model.safetensors", b"\x00\x01", "has 2 bytes, too few", "fetch it again"),
    "weights of zeros": ("model.safetensors", bytes(64), "The header of .* is empty", FETCH),
    "header cut": (
        "model.safetensors",
        (1 << 20).to_bytes(8, "little") + b'{"a',
        "announces a header of 1048576 bytes but has 11 bytes in all",
        "Fetch it again",
    ),
    "merges": ("tokenizer.json", b"{}", "is not a tokenizer that can be read", "Fetch it again"),
    "no JSON of a tokenizer": (
        "tokenizer_config.json",
        b"",
        "tokenizer_config.json is empty",
        FETCH,
    ),
}


@pytest.mark.parametrize("kind", FILES)
def test_files_of_a_model_s_folder(kind: str, tmp_path: Path) -> None:
    name, data, reason, way_out = FILES[kind]
    folder = folder_with(tmp_path, name, data)
    with pytest.raises(LowtideError, match=f"{reason}.*{way_out}"):
        if name.startswith("tokenizer"):
            Tokenizer.load(folder)
        else:
            plan_model(folder)


@pytest.mark.parametrize("num_missing", [1, 2, 5])
def test_shards_that_the_index_names_and_the_folder_lacks(num_missing: int, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "tokenizer.json", None)
    names = [
        f"model-{i:05d}-of-{num_missing + 1:05d}.safetensors" for i in range(1, num_missing + 2)
    ]
    (folder / "model.safetensors").rename(folder / names[0])
    weight_map = {f"tensor.{i}": name for i, name in enumerate(names)}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError) as error:
        plan_model(folder)
    more = f" and {num_missing - 3} more" if num_missing > 3 else ""
    assert str(error.value) == (
        f"{folder} is not whole: of the {num_missing + 1} files that {INDEX} names {num_missing} "
        f"{'is' if num_missing == 1 else 'are'} missing ({', '.join(names[1:4])}{more}); {FETCH}."
    )


def test_shards_without_an_index(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "tokenizer.json", None)
    (folder / "model.safetensors").rename(folder / "model-00002-of-00003.safetensors")
    with pytest.raises(
        CheckpointError, match="1 of 3 shards; number 1 is missing. Fetch the model"
    ):
        plan_model(folder)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"{}", b'{"weight_map": {}}'])
def test_an_index_that_names_no_shards(text: bytes, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "model.safetensors", None)
    (folder / INDEX).write_bytes(text)
    with pytest.raises(CheckpointError, match=f"{INDEX} (is|must|has).*{FETCH}"):
        plan_model(folder)


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="config.json is missing"):
        plan_model(folder_with(tmp_path, "config.json", None))


def a_gguf_file(path: Path) -> bytes:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@pytest.mark.parametrize("num_bytes", [0, 3, 10, 30, 60])
def test_gguf_files_that_were_cut(num_bytes: int, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(a_gguf_file(path)[:num_bytes])
    with pytest.raises(CheckpointError, match=r"model\.gguf: .*fetch it again"):
        GgufHeader.read(path)


def test_the_metadata_of_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    a_gguf_file(path)
    with pytest.raises(LowtideError, match="metadata has no .*Fetch it again, or choose another"):
        plan_model(path)


@pytest.mark.parametrize("load", [Trace.load, Calibration.load], ids=["trace", "calibration"])
@pytest.mark.parametrize(
    "data", [None, b"", b"PK\x03\x04", b"{}"], ids=["none", "empty", "cut", "text"]
)
def test_traces_and_calibrations(
    load: Callable[[Path], object], data: bytes | None, tmp_path: Path
) -> None:
    path, maker = tmp_path / "file.lowtide", "lowtide (generate --trace|calibrate)"
    if data is None:
        with pytest.raises(StorageError, match=f"is missing; give the path of a .*, which {maker}"):
            load(path)
        return
    path.write_bytes(data)
    with pytest.raises(UsageError, match=f"is not a lowtide .*;.* remove it.*again with {maker}"):
        load(path)


@pytest.mark.parametrize("load", [Trace.load, Calibration.load])
def test_a_file_of_another_kind_is_not_to_be_removed(
    load: Callable[[Path], object], tmp_path: Path
) -> None:
    np.savez(tmp_path / "other.npz", something=np.zeros(1))
    with pytest.raises(UsageError, match="; name another file or, if it is a damaged"):
        load(tmp_path / "other.npz")


@pytest.mark.parametrize(
    ("arguments", "way_out"),
    [
        (["simulate", "{none}"], "give the path of a trace, which lowtide generate --trace makes"),
        (["simulate", "{none}", "--policy-file", "{none}"], "give the path of a Python file"),
        (["quality", "demo:autoregressive", "--text", "{none}"], "give --text the path of a text"),
        (["quality", "demo:autoregressive", "--text", "{bytes}"], "is not in UTF-8; save it so"),
        (
            ["calibrate", "demo:autoregressive", "--text", "{none}"],
            "give --text the path of a text",
        ),
        (["plan", "demo:autoregressive", "--config", "{none}"], "give --config the path of a TOML"),
        (["plan", "demo:autoregressive", "--config", "{bytes}"], "its lines are as context = 4096"),
        (["batch", "demo:autoregressive", "-i", "{none}", "-o", "x"], "give a file of requests"),
    ],
)
def test_files_that_an_option_names(arguments: list[str], way_out: str, tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe = \x00")
    names = {name: str(tmp_path / name) for name in ("none", "bytes")}
    result = CliRunner().invoke(app, [each.format(**names) for each in arguments])
    assert (
        result.exit_code == 1
        and " ".join(result.stderr.split()).endswith(f"{way_out}.")
        or (way_out in " ".join(result.stderr.split()))
    )


@pytest.mark.parametrize("data", [None, b"x" * (1 << 17), b"\xff", b"= 1", b"a = 1"])
def test_profiles(data: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(UsageError, match=r"machine\.toml .*(bench MODEL --profile|needs a name)"):
        load_profile(str(path))


@pytest.mark.parametrize("data", [None, b"", b"\xff", b"x", b"{}"])
def test_questions(data: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(LowtideError, match=r'"choices": |save them so'):
        read_questions(path)


@pytest.mark.parametrize("data", [None, b"", b"[]", b'{"messages": 1}'])
def test_saved_conversations(data: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "saved.json"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(UsageError, match=r"saved\.json is (missing|not a saved).*/save"):
        Turns(has_template=True).load(path)
