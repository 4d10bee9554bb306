"""A checkpoint with more layers than its configuration: a shortened model, and that is said."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_files import write_arrays, write_index
from typer.testing import CliRunner

from lowtide.cli.app import app
from lowtide.families import families
from lowtide.llm import LLM, plan_model
from lowtide.model_folder.extra_layers import warn_of_extra_layers
from lowtide.model_writing.synth import synth, write_checkpoint

SAID = "The weights also have"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a number of layers that no other test's model has: what was said is not said again."""
    size = families()["qwen3_moe"].sizes()["tiny"]
    size = replace(size, config={**size.config, "num_hidden_layers": 13})
    return write_checkpoint(size, tmp_path_factory.mktemp("further") / "model", seed=1)


def plan(model: Path, *more: str) -> str:
    result = CliRunner().invoke(app, ["plan", str(model), "--context", "64", *more])
    assert result.exit_code == 0, result.stderr
    return result.stderr


def test_a_configuration_with_fewer_layers_is_told(model: Path) -> None:
    assert SAID not in plan(model)
    config = json.loads((model / "config.json").read_text())
    config["num_hidden_layers"] -= 2
    first = config["num_hidden_layers"]
    (model / "config.json").write_text(json.dumps(config))
    said = f"{SAID} layers {first} to {first + 1}, and the configuration {first} layers"
    assert plan(model).count(said) == 1 and SAID not in plan(model)
    fewer = plan(model, "--config-override", "num_hidden_layers=1")
    assert f"{SAID} layers 1 to {first + 1}, and the configuration 1 layers" in fewer


def test_layers_that_predict_further_tokens_change_nothing(tmp_path: Path) -> None:
    folder = synth("deepseek_v3", "tiny", tmp_path / "model")
    with LLM(folder, context=64) as llm:
        expected = llm.logits([1, 2, 3])
    without = shutil.copytree(folder, tmp_path / "without")
    names = ("eh_proj", "enorm", "embed_tokens", "shared_head.head", "self_attn.q_a_proj")
    more = {f"model.layers.4.{name}.weight": np.zeros((300, 256), np.float32) for name in names}
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    write_arrays(folder / "further.safetensors", more)
    write_index(folder, {**index, **dict.fromkeys(more, "further.safetensors")})
    assert SAID not in plan(folder)
    said = "of the files are not loaded: layers that predict"
    reasons = [plan_model(f, context=64).reason for f in (folder, without)]
    assert f"1.5 MiB {said}" in reasons[0] and said not in reasons[1]
    with LLM(folder, context=64) as llm:
        assert torch.equal(llm.logits([1, 2, 3]), expected)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["a.0.x", "a.901.x", "a.norm", "b.907.x", "a.x.907", f"a.{'9' * 5000}.x"], None),
        (["a.0.x", "a.902.x", "a.902.y"], "layer 902, and the configuration 902"),
        (["a.905.x", "a.903.x"], "layers 903 to 905"),
        # Of DeepSeek, GLM and Ling: for the prediction of further tokens, and known.
        (["a.902.x", "a.902.eh_proj.weight", "a.902.y"], None),
        (["a.902.nextn.eh_proj.weight", "a.903.x", "a.902.y"], "layer 903, and"),
    ],
)
def test_layers_for_prediction_are_known(
    names: list[str],
    said: str | None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("lowtide"), "propagate", True)  # a command ends that
    warn_of_extra_layers(names, "a.", 902)
    assert (said in caplog.text) if said else not caplog.text
