"""`lowtide pack`: folders with weights in 8 or 4 bits that are models themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from lowtide import SamplingParams
from lowtide.cli.app import app
from lowtide.errors import CheckpointError, UnsupportedError, UsageError
from lowtide.llm import LLM, plan_model
from lowtide.model_folder.checkpoint import Checkpoint
from lowtide.model_writing.pack import pack
from lowtide.model_writing.synth import synth
from lowtide.plan import WeightFormats

PROMPT = list(range(1, 40))
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth("qwen2_moe", "tiny", tmp_path_factory.mktemp("pack") / "model", seed=6)


@pytest.fixture(scope="module")
def packed(model: Path) -> Path:
    return pack(model, model.parent / "q4", format="q4")


def run(folder: Path, **options: Any) -> tuple[list[int], torch.Tensor]:
    with LLM(folder, context=64, **options) as llm:
        return llm.generate(PROMPT, PARAMS)[0].token_ids, llm.logits(PROMPT)


def test_a_packed_demo_answers_as_it_did(tmp_path: Path) -> None:
    pack("demo:chat", tmp_path / "packed", format="q4")
    with LLM(tmp_path / "packed", context=64) as llm:
        [answer] = llm.generate("Sort 31 20 55")
    assert answer.text == "20 31 55"


def test_the_template_for_tools_is_copied_with_its_folder(tmp_path: Path) -> None:
    name = "additional_chat_templates/tool_use.jinja"
    source = synth("qwen2_moe", "tiny", tmp_path / "model", seed=6)
    (source / name).parent.mkdir()
    (source / name).write_text("t")
    packed = pack(source, tmp_path / "packed", format="q4")
    assert (packed / name).read_text() == "t"
    with pytest.raises(UsageError, match="is packed already"):
        pack(source, packed, format="q4")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_was_packed_is_a_model_with_the_same_bits(model: Path, packed: Path) -> None:
    wanted = run(model, format="q4")
    for options in ({}, {"format": "q4"}, {"host_memory": 1}):
        plan = plan_model(packed, context=64)
        if "host_memory" in options:
            options = {"host_memory": plan.minimum_bytes}
        found = run(packed, **options)
        assert found[0] == wanted[0] and torch.equal(found[1], wanted[1])
    assert plan.formats == WeightFormats("q4", "q4", "q8")
    assert "lowtide pack" not in plan.reason
    assert "lowtide pack" in plan_model(model, context=64, format="q4").reason


def test_it_is_a_plain_folder_of_fewer_bytes(model: Path, packed: Path) -> None:
    config = json.loads((packed / "config.json").read_text())
    own = config.pop("quantization_config")
    assert own["quant_method"] == "lowtide" and own["formats"]["experts"] == "q4"
    assert config == json.loads((model / "config.json").read_text())
    assert (packed / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    names = Checkpoint.open(packed).tensors
    assert "model.layers.0.mlp.experts.0.up_proj.weight.q4" in names
    assert "lm_head.weight.q8" in names and "model.norm.weight" in names
    assert not (packed / "packing.json").exists()
    sizes = [sum(p.stat().st_size for p in f.glob("*.safetensors")) for f in (model, packed)]
    assert sizes[1] < 0.6 * sizes[0]


def test_what_is_whole_sectors_long_lies_on_sectors(tmp_path: Path) -> None:
    """Experts among others that are not, which would shift them."""
    tensors = Checkpoint.open(pack("demo:chat", tmp_path / "q8", format="q8")).tensors
    whole = [each for each in tensors.values() if each.num_bytes % 4096 == 0]
    assert 0 < len(whole) < len(tensors)
    assert all(each.offset % 4096 == 0 for each in whole)


def test_what_cannot_be_packed_is_refused(model: Path, packed: Path, tmp_path: Path) -> None:
    for format, why in (
        (None, "nothing to pack: give `format` q8 or q4"),
        ("own", "nothing to pack: give `format` q8 or q4"),
        ("q5", "`format` 'q5' is not known; choose q8, q4\\."),
        ("auto", "name the format"),
    ):
        with pytest.raises(UsageError, match=why):
            pack("nobody/no-model", tmp_path / "own", format=format)  # nothing is fetched
    with pytest.raises(UnsupportedError, match="rounded already"):
        pack(packed, tmp_path / "again", format="q8")
    with pytest.raises(
        UsageError, match="nothing to pack: the weights of .* are stored so already"
    ):
        pack(packed, tmp_path / "same", format="q4")
    for name in ("q4", "q8"):
        with pytest.raises(UsageError, match="packed already, whole, with experts in q4 .*run it"):
            pack(model, packed, format=name)
    assert not (packed / "packing.json").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").touch()
    for config in (None, "", "[]", '{"quantization_config": "lowtide"}', "{}"):
        if config is not None:
            (tmp_path / "full" / "config.json").write_text(config)
        with pytest.raises(UsageError, match=r"holds (notes|config.json), which is not of this"):
            pack(model, tmp_path / "full", format="q4")


def test_a_lying_header_is_refused(packed: Path, tmp_path: Path) -> None:
    for path in packed.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["moe_intermediate_size"] *= 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"q4 is of type U8 and shape .* config.json makes"):
        plan_model(tmp_path, context=64)


def test_weights_that_are_not_finite_are_found(packed: Path, tmp_path: Path) -> None:
    for path in packed.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    name = "model.layers.1.mlp.experts.2.up_proj.weight.q4"
    checkpoint = Checkpoint.open(tmp_path)
    entry = checkpoint.tensors[name]
    with checkpoint.files[entry.file].path.open("r+b") as file:
        file.seek(entry.offset + entry.shape[1] - 2)  # the last zero of the first row
        file.write(np.float16(np.nan).tobytes())
    with pytest.raises(CheckpointError, match="up_proj.weight in .* holds an infinity or NaN"):
        LLM(tmp_path, context=64, check_weights=True)


def test_the_verb(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shown = CliRunner().invoke(app, ["pack", str(model), "--format", "q8", "--out", str(out)])
    assert shown.exit_code == 0, shown.output
    assert plan_model(out, context=64).formats == WeightFormats("q8", "q8", "q8")
    shown = CliRunner().invoke(app, ["pack", str(model), "--format", "q8"])
    assert shown.exit_code == 2 and "--out" in shown.output
