"""A copy of a GGUF model's experts, each in one piece.

It has the same bits, and is refused where it is of another model.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type
from gguf_files import split, write_gguf
from gguf_oracle import random_model
from test_gguf_by_expert import at_random, write_by_expert
from typer.testing import CliRunner

from lowtide import SamplingParams
from lowtide.cli.app import app
from lowtide.engine.opening.config import EngineConfig
from lowtide.engine.opening.model import open_model
from lowtide.errors import CheckpointError, LowtideError, StorageError, UsageError
from lowtide.llm import LLM, plan_model
from lowtide.model_writing import safetensors_writer
from lowtide.model_writing.pack_experts import pack_experts
from lowtide.model_writing.synth import synth
from lowtide.reading.by_expert import BORDER_BYTES, copy_path

KINDS = {"qwen3_moe": Type.Q4_0, "gpt_oss": Type.MXFP4, "deepseek_v2": Type.Q4_K}


def stacked(family: str, path: Path, seed: int = 0) -> Path:
    def choose(name: str, shape: tuple[int, ...]) -> Type:
        return KINDS[family] if "_exps" in name else Type.F16

    write_gguf(path, family, random_model(family, seed), choose)
    return path


def divided(path: Path) -> Path:
    split(stacked("qwen3_moe", path), path.with_suffix(""), 3)
    path.unlink()
    return path.with_name(f"{path.stem}-00001-of-00003.gguf")


def of_many_types(path: Path) -> Path:
    write_by_expert(path, at_random)
    return path


MODELS = {
    **{family: (lambda path, family=family: stacked(family, path)) for family in KINDS},
    "split": divided,
    "of many types": of_many_types,
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(MODELS[request.param](tmp_path / "model.gguf"))


@pytest.fixture
def one(tmp_path: Path) -> Path:
    return stacked("qwen3_moe", tmp_path / "model.gguf")


def answers(model: Path, **options: Any) -> tuple[list[int], torch.Tensor, float]:
    """Words and logits with as few experts in memory as can be, and bytes read for them."""
    options = {"context": 64, "dtype": "bfloat16", **options}
    least = plan_model(model, **options).minimum_bytes
    prompt, params = list(range(1, 30)), SamplingParams(max_tokens=12, ignore_eos=True)
    with LLM(model, host_memory=least, **options) as llm:
        words = llm.generate(prompt, params)[0].token_ids
        return words, llm.logits(prompt), llm.stats()["read_bytes"]


def test_the_copy_is_read_and_has_the_same_bits(model: Path) -> None:
    words, logits, _ = answers(model)
    copy = pack_experts(model)
    assert copy == copy_path(model) and copy.is_file()
    found = answers(model)
    assert found[0] == words and torch.equal(found[1], logits) and found[2] > 0
    table = open_model(model, EngineConfig(device="cpu")).facts.weight_map.experts
    for layer, expert in torch.cartesian_prod(*map(torch.arange, table.files.shape[:2])).tolist():
        [read] = table.ranges(layer, expert)
        assert read.start % BORDER_BYTES == 0 and read.num_bytes == sum(
            table.stored(layer, expert).part_bytes
        )


def test_a_copy_of_another_model_is_refused(one: Path, tmp_path: Path) -> None:
    pack_experts(one)
    stacked("qwen3_moe", one, seed=1)
    with pytest.raises(CheckpointError, match=r"another model than .*model\.gguf: remove it"):
        LLM(one, context=64)
    copy_path(one).unlink()
    LLM(one, context=64).close()


@pytest.mark.parametrize("num_bytes", [0, 5, 4000, -4096])
def test_a_copy_that_was_cut_is_refused(one: Path, num_bytes: int) -> None:
    copy = pack_experts(one)
    os.truncate(copy, num_bytes % copy.stat().st_size)
    with pytest.raises(CheckpointError, match=r"model\.gguf\.experts"):
        LLM(one, context=64)


def test_a_copy_with_other_tensors_is_refused(one: Path) -> None:
    copy = pack_experts(one)
    data = copy.read_bytes()
    copy.write_bytes(data.replace(b'"experts.1"', b'"experts.7"', 1))
    with pytest.raises(CheckpointError, match=r"has no tensor experts\.1 of 6 experts"):
        LLM(one, context=64)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_run_leaves_nothing(one: Path, error: type[BaseException]) -> None:
    def interrupted(*_: object) -> None:
        raise error

    with pytest.raises((error, StorageError)):
        pack_experts(one, interrupted)
    assert [path.name for path in one.parent.iterdir()] == [one.name]
    pack_experts(one)


def test_a_full_disk_leaves_nothing(one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(one)._replace(free=1000)
    monkeypatch.setattr(safetensors_writer.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(StorageError, match="1000 are free"):
        pack_experts(one)
    assert [path.name for path in one.parent.iterdir()] == [one.name]


def test_what_cannot_be_copied_is_refused(one: Path, tmp_path: Path) -> None:
    pack_experts(one)
    with pytest.raises(UsageError, match="is there already"):
        pack_experts(one)
    folder = synth("qwen3_moe", "tiny", tmp_path / "folder")
    with pytest.raises(UsageError, match="is not a GGUF file"):
        pack_experts(folder)


def test_a_source_that_is_written_to_makes_no_copy(one: Path) -> None:
    def touch(*_: object) -> None:
        os.utime(one)

    with pytest.raises(LowtideError, match="written to after it was opened"):
        pack_experts(one, touch)
    assert not copy_path(one).exists()


def test_the_verb(one: Path) -> None:
    shown = CliRunner().invoke(app, ["pack", str(one), "--by-expert", "--format", "q4"])
    assert shown.exit_code == 2 and "leave --format out" in shown.output
    shown = CliRunner().invoke(app, ["pack", str(one), "--by-expert"])
    assert shown.exit_code == 0, shown.output
    assert copy_path(one).exists()
