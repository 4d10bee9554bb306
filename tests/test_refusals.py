"""Models that lowtide does not run are named, with models that do run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import pytest
from checkpoint_files import ling_config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from typer.testing import CliRunner

from lowtide.cli.app import app
from lowtide.errors import CheckpointError, ConfigError, UnsupportedError, UsageError
from lowtide.families import (
    families,
    gguf_architecture,
    gguf_architectures,
    read_config,
    read_config_in,
    supported_architectures,
)
from lowtide.families.gguf import GgufKeys
from lowtide.families.registry import own_names, why_unsupported
from lowtide.families.unsupported import (
    DENSE,
    ENCODER,
    EXPERTS,
    HYBRID,
    IMAGES,
    LAYERS,
    SAFETENSORS,
)
from lowtide.llm import plan_model
from lowtide.model_folder import hub
from lowtide.model_folder.checkpoint import Checkpoint
from lowtide.model_writing.safetensors_writer import header_bytes
from lowtide.policies.presets import preset_names
from lowtide.schemas import bind

GOLDEN = Path(__file__).parent / "goldens" / "llada2-a"


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        (
            "SmolLM3ForCausalLM",
            "SmolLM3: a dense .*Llama's, Qwen2's, Qwen3's, Qwen3.5's and .* Qwen/Qwen3-30B-A3B",
        ),
        ("Phi3ForCausalLM", "Phi-3 or Phi-4: a dense .* Qwen/Qwen3-30B-A3B"),
        ("FalconH1ForCausalLM", "Falcon-H1: .*linear attention.*Qwen/Qwen3-30B-A3B"),
        ("Gemma4ForConditionalGeneration", "It is Gemma 4: .*Models that do run: "),
        ("MistralForCausalLM", "It is Mistral: a dense .*Mixtral-8x7B"),
        ("Llama4ForConditionalGeneration", "It is Llama 4: a mixture of experts"),
        ("DeepseekV32ForCausalLM", "It is DeepSeek-V3.2: .*DeepSeek-V2-Lite"),
        ("SDARMoeForCausalLM", "It is SDAR: .*LLaDA2.0-mini"),
    ],
)
def test_models_are_named(architecture: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{architecture}' is not supported.*{message}"):
        read_config({"architectures": [architecture]})
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    result = run("plan", str(tmp_path))
    assert result.exit_code == 2 and architecture in result.stderr


def test_what_runs_is_of_no_series_that_does_not() -> None:
    for architecture in supported_architectures():
        assert "not heard of" in why_unsupported([architecture], {}).name, architecture


CLASSES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())


@pytest.mark.parametrize(("model_type", "architecture"), CLASSES)
def test_every_other_model_has_a_name_a_reason_and_a_way_out(
    model_type: str, architecture: str
) -> None:
    if architecture in supported_architectures():
        return
    config = {"architectures": [architecture], "model_type": model_type, "num_hidden_layers": 2}
    with pytest.raises(ConfigError) as refusal:
        read_config(config)
    named = re.search(r"It is ([^:]+): (.+?)\. Models that do run: [\w-]+/", str(refusal.value))
    assert named is not None, refusal.value
    assert named[2] in (DENSE, EXPERTS, HYBRID, IMAGES, LAYERS, ENCODER)


@pytest.mark.parametrize("name", sorted(gguf.MODEL_ARCH_NAMES.values()))
def test_every_other_gguf_architecture_too(name: str) -> None:
    metadata = {"general.architecture": name, f"{name}.block_count": 2}
    try:
        gguf_architectures(metadata)
    except UnsupportedError as refusal:
        named = re.search(r"It is ([^:]+): (.+?)\. Models that do run: [\w-]+/", str(refusal))
        assert named is not None, refusal
        assert named[2] in (DENSE, EXPERTS, HYBRID, IMAGES, LAYERS, ENCODER, SAFETENSORS)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"num_hidden_layers": 2}, DENSE),
        ({"n_layer": 2, "num_experts": 0, "vision_config": None}, DENSE),
        ({"num_hidden_layers": 2, "n_routed_experts": 64}, EXPERTS),
        ({"num_hidden_layers": 2, "moe_num_primary_experts": 64}, EXPERTS),
        ({"text_config": {"num_hidden_layers": 2, "num_local_experts": 8}}, EXPERTS),
        ({"num_experts": 8, "layer_types": ["full_attention", "linear_attention"]}, HYBRID),
        ({"num_experts": 8, "mamba_d_state": 16}, HYBRID),
        ({"num_experts": 8, "hybrid_override_pattern": "M-M*"}, HYBRID),
        ({"num_experts": 8, "vision_config": {"depth": 2}}, IMAGES),
        ({"num_hidden_layers": 2, "audio_token_id": 7}, IMAGES),
        ({"is_encoder_decoder": True, "num_hidden_layers": 2}, ENCODER),
        ({"general.architecture": "foo", "foo.block_count": 2, "foo.expert_count": 8}, EXPERTS),
        ({"general.architecture": "foo", "foo.block_count": 2, "foo.ssm.state_size": 8}, HYBRID),
        ({"general.architecture": "foo", "foo.attention.causal": False}, ENCODER),
        ({"general.architecture": "foo", "foo.block_count": 2}, DENSE),
        ({}, LAYERS),
    ],
)
def test_the_reason_is_in_the_keys_of_a_model_never_heard_of(
    keys: dict[str, object], reason: str
) -> None:
    assert why_unsupported(["foo"], keys).reason == reason


@pytest.mark.parametrize(
    ("model_type", "architecture", "name"),
    [
        ("kimi_k25", "KimiK25ForConditionalGeneration", "Kimi-K2.5"),
        ("internlm3", "InternLM3ForCausalLM", "InternLM"),
        ("glm_moe_dsa", "GlmMoeDsaForCausalLM", "GLM-5"),
        ("my_own", "MistralForCausalLM", "Mistral"),
    ],
)
def test_model_types_tell_more_than_architectures(
    model_type: str, architecture: str, name: str
) -> None:
    with pytest.raises(ConfigError, match=f"{architecture}' is not supported. It is {name}: "):
        read_config({"architectures": [architecture], "model_type": model_type})
    with pytest.raises(ConfigError, match="names no architecture. It is "):
        read_config({"model_type": model_type})


@pytest.mark.parametrize("said", [{}, {"expert_gating_func": 2}])
@pytest.mark.parametrize(
    ("names", "series"),
    [
        ({}, "Mistral Large 3"),
        ({"name": "Mistral Large 3 675B"}, "Mistral Large 3"),
        ({"basename": "Mistral-Small-4", "name": "mine"}, "Mistral Small 4"),
        ({"name": "my own"}, "Mistral Large 3"),
    ],
)
def test_models_that_share_a_gguf_architecture_are_told_apart(
    said: dict[str, object], names: dict[str, str], series: str
) -> None:
    said = {**said, "attention.temperature_scale": 0.1}
    metadata = {
        "general.architecture": "deepseek2",
        **{f"deepseek2.{key}": value for key, value in said.items()},
        **{f"general.{key}": value for key, value in names.items()},
    }
    keys = GgufKeys("deepseek2", metadata, {})
    with pytest.raises(UnsupportedError, match=f"It is {series}: a mixture of .*do run: "):
        gguf_architecture(metadata, keys).config(keys)


@pytest.mark.parametrize(("count", "family"), [(None, "llama"), (0, "llama"), (8, "mixtral")])
def test_llama_s_name_in_gguf_files_is_two_families(count: int | None, family: str) -> None:
    metadata: dict[str, object] = {"general.architecture": "llama"}
    if count is not None:
        metadata["llama.expert_count"] = count
    found = gguf_architecture(metadata, GgufKeys("llama", metadata, {}))
    assert found is families()[family].gguf


@pytest.mark.parametrize("algorithm", ["NVFP4", "FP8", "W4A8_AWQ"])
def test_modelopt_s_folders_are_named(algorithm: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ling_config()))
    assert read_config_in(tmp_path).num_layers
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    with pytest.raises(UnsupportedError, match=f"format is {algorithm} of ModelOpt, .*not read"):
        read_config_in(tmp_path)
    said = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    assert read_config_in(tmp_path).num_layers


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
    (tmp_path / "config.json").touch()
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


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["quality", "demo:autoregressive", "--setting", "fmt=q4"], "format"),
        (["quality", "demo:autoregressive", "--setting", "policy=tide tua=4"], "tau"),
        (["plan", "demo:autoregressive", "--policy", "lowtid"], "lowtide"),
        (["plan", "demo:autoregressive", "--policy", "tide", "--policy-option", "tua=4"], "tau"),
        (
            ["plan", "demo:autoregressive", "--device", "emulated", "--gpu-memory", "8MiB"]
            + ["--device-option", "link_gbps=4"],
            "link_GBps",
        ),
        (
            ["plan", "demo:autoregressive", "--config-override", "rope_thita=1"],
            "rope_theta",
        ),
        (["plan", "demo:autoregresive"], "autoregressive"),
        (["plam", "demo:autoregressive"], "plan"),
    ],
)
def test_a_misspelt_name_is_answered_with_the_nearest(arguments: list[str], meant: str) -> None:
    result = run(*arguments)
    assert result.exit_code in (1, 2)
    assert f"Did you mean {meant}?" in " ".join(result.stderr.split()), result.stderr
