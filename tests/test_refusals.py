"""What lowtide does not run is named, with models that do run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import ling_config
from typer.testing import CliRunner

from lowtide.cli.app import app
from lowtide.errors import CheckpointError, ConfigError, UnsupportedError, UsageError
from lowtide.families import families, read_config, read_config_in, supported_architectures
from lowtide.families.registry import own_names
from lowtide.families.unsupported import _BY_BEGINNING, why_unsupported
from lowtide.lab.safetensors_writer import header_bytes
from lowtide.llm import plan_model
from lowtide.model_folder import hub
from lowtide.model_folder.checkpoint import Checkpoint
from lowtide.policies.presets import preset_names
from lowtide.schemas import bind

GOLDEN = Path(__file__).parent / "goldens" / "llada2-a"


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("LlamaForCausalLM", "Llama, or a model built like it: a dense .* Qwen/Qwen3-30B-A3B"),
        ("Qwen3ForCausalLM", "Qwen3 without experts: a dense .* Qwen/Qwen3-30B-A3B"),
        ("Qwen3_5MoeForConditionalGeneration", "Qwen3.6: .*linear attention.*Qwen/Qwen3-30B-A3B"),
        ("Gemma4ForConditionalGeneration", "It is Gemma: .*Models that do run: "),
        ("MistralForCausalLM", "It is Mistral: a dense .*Mixtral-8x7B"),
        ("Llama4ForConditionalGeneration", "It is Llama 4: a mixture of experts"),
        ("DeepseekV32ForCausalLM", "It is DeepSeek-V3, V3.2 or R1: .*DeepSeek-V2-Lite"),
        ("SDARMoeForCausalLM", "It is SDAR: .*LLaDA2.0-mini"),
    ],
)
def test_models_are_named(architecture: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{architecture}' is not supported.*{message}"):
        read_config({"architectures": [architecture]})
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    result = run("plan", str(tmp_path))
    assert result.exit_code == 2 and architecture in result.stderr


def test_what_runs_is_not_said_not_to() -> None:
    for architecture in supported_architectures():
        assert why_unsupported(architecture) is None, architecture
    assert why_unsupported("FooForCausalLM") is None
    for beginning in _BY_BEGINNING:
        found = why_unsupported(beginning + "X")
        assert found is not None and found.reason and found.instead


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("fp8", "FP8 with one scale"),
        ("gptq", "GPTQ in groups of None"),
        ("awq", "AWQ in groups of None"),
        ("compressed-tensors", "compressed-tensors in no format"),
        ("bitsandbytes", "bitsandbytes"),
        ("hqq", "'hqq'"),
        (None, "unknown"),
    ],
)
def test_formats_are_named(method: str | None, name: str) -> None:
    config = ling_config(quantization_config={"quant_method": method, "bits": 4})
    message = rf"the weights' format is {name}.* not read. Read are safetensors in .*bfloat16"
    with pytest.raises(UnsupportedError, match=message):
        read_config(config)


def test_formats_of_tensors_are_named() -> None:
    config = read_config_in(GOLDEN)
    checkpoint = Checkpoint.open(GOLDEN)
    name = "lm_head.weight"
    fp8 = {**checkpoint.tensors, name: checkpoint.tensors[name]._replace(dtype="F8_E4M3")}
    with pytest.raises(UnsupportedError, match=r"lm_head.weight is of type F8_E4M3 \(FP8\)"):
        bind(config, Checkpoint(checkpoint.files, fp8))
    packed = dict(checkpoint.tensors)
    packed["lm_head.qweight"] = packed.pop(name)
    with pytest.raises(UnsupportedError, match="lm_head.weight is stored as GPTQ or AWQ"):
        bind(config, Checkpoint(checkpoint.files, packed))


@pytest.mark.parametrize("reference", ["", " "])
def test_no_name_is_not_the_present_folder(
    reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="The model has no name; give a folder.*org/name"):
        hub.resolve_model(reference)


def test_a_gguf_file_is_found_and_others_are_not(tmp_path: Path) -> None:
    path = tmp_path / "q4_k_m.gguf"
    path.write_bytes(b"GGUF")
    assert hub.resolve_model(str(tmp_path)) == hub.resolve_model(str(path)) == path
    with pytest.raises(CheckpointError, match="q4_k_m.gguf: it has 4 bytes, too few"):
        plan_model(path)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(UsageError, match="is a file; a model is the folder.* or a GGUF file"):
        hub.resolve_model(str(tmp_path / "notes.txt"))
    (tmp_path / "model.safetensors").write_bytes(header_bytes([], {}))
    assert hub.resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    "arguments",
    [["generate", "-p", "hi"], ["chat"], ["generate", "--prompt-ids", "1", "--stop", "x"]],
)
def test_a_folder_without_a_tokenizer_says_what_to_give(arguments: list[str]) -> None:
    result = run(arguments[0], str(GOLDEN), *arguments[1:], "--context", "512")
    assert result.exit_code == 2, result.output
    assert "no tokenizer.json" in result.stderr and '--prompt-ids "5 17 3"' in result.stderr


def test_help_lists_names() -> None:
    def words(verb: str) -> str:
        text = CliRunner().invoke(app, [verb, "--help"], env={"COLUMNS": "200"}).output
        return " ".join(text.replace("│", " ").split())

    assert ", ".join(own_names()) in words("synth")
    refusal = run("plan", "demo:diffusion", "--policy", "nope").stderr
    assert all(name in refusal for name in preset_names())
    assert set(own_names()) <= set(families())
