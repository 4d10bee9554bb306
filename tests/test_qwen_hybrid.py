"""Qwen3-Next and Qwen3.5 beside transformers: answers, batches, budgets, wrappers and GGUF files.

A minute: random models of three families that two libraries load and run.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import VOCAB, random_ids, write_model
from gguf.constants import GGMLQuantizationType as Type
from inside import engine_of
from qwen_hybrid_files import random_model, write_hybrid
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
)
from whole import check_second_turn

from lowtide.config import AttentionSpec, DeltaNetSpec
from lowtide.errors import CheckpointError, ConfigError, UnsupportedError, UsageError
from lowtide.families import families, read_config
from lowtide.llm import LLM, plan_model
from lowtide.model_folder.gguf_model import GgufModel
from lowtide.model_writing.synth import synth
from lowtide.params import SamplingParams
from lowtide.schemas import model_schema

HYBRID = ("qwen3_5_moe", "qwen3_next", "qwen3_5")


def own_difference(model: torch.nn.Module, token_ids: list[int]) -> float:
    """Between logits of a whole text and those with a cache: half of it first, then row by row."""
    with torch.inference_mode():
        whole = model(torch.tensor([token_ids]), use_cache=False).logits[0]
        half = len(token_ids) // 2
        found = model(torch.tensor([token_ids[:half]]), use_cache=True)
        rows, cache = [found.logits[0]], found.past_key_values
        for token in token_ids[half:]:
            found = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            rows.append(found.logits[0])
    return float((torch.cat(rows) - whole).abs().max())


@pytest.mark.parametrize("family", HYBRID)
def test_logits_are_as_close_as_transformers_own_cached_ones(family: str, tmp_path: Path) -> None:
    """Within 3 times; on average over models, for a single difference may be small by chance."""
    ours = theirs = 0.0
    for seed in range(6):
        written = write_model(family, seed, tmp_path / str(seed), tie_word_embeddings=False)
        model = AutoModelForCausalLM.from_pretrained(written.folder).float().eval()
        token_ids = random_ids(seed, 90)
        theirs += own_difference(model, token_ids)
        with LLM(written.folder, context=256) as llm:
            ours += float((llm.logits(token_ids) - written.oracle(token_ids)).abs().max())
    assert ours < 3 * theirs


@pytest.mark.parametrize("family", HYBRID)
def test_answers_do_not_depend_on_company_or_budget(family: str, tmp_path: Path) -> None:
    """Prompts end inside of chunks and at their ends; a pass of 512 rows divides what is longer."""
    written = write_model(family, 3, tmp_path)
    prompts = [random_ids(length, length) for length in (1, 64, 65, 200, 577)]
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    plan = plan_model(written.folder, context=1024)
    alone: list[list[int]] = []
    for budget in sorted({plan.minimum_bytes, plan.full_bytes}):
        with LLM(written.folder, context=1024, host_memory=budget, cache="off") as llm:
            together = [answer.token_ids for answer in llm.generate(prompts, params)]
            single = [llm.generate([prompt], params)[0].token_ids for prompt in prompts]
        assert together == single == (alone or single)
        alone = single
    for prompt, answer in zip(prompts, alone, strict=True):
        logits = written.oracle([*prompt, *answer])[len(prompt) - 1 : -1]
        best = logits.topk(2).values
        is_clear = best[:, 0] - best[:, 1] > 3e-4
        assert torch.equal(logits.argmax(-1)[is_clear], torch.tensor(answer)[is_clear])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_second_turn_is_that_of_a_model_that_keeps_nothing(tmp_path: Path, dtype: str) -> None:
    """Resumed at a copy of the states, in memory and from disk."""
    folder = synth("qwen3_5_moe", "tiny", tmp_path / "model")
    budget = plan_model(folder, context=1024, dtype=dtype).full_bytes
    check_second_turn(folder, tmp_path / "kept", dtype, budget)


# Qwen3-Next as newer tools store it


def split(folder: Path, target: Path) -> Path:
    """As Qwen3.5's projections: all queries, keys and values, gates, strengths, decays."""
    shutil.copytree(folder, target)
    config = json.loads((folder / "config.json").read_text())
    heads, width = config["linear_num_key_heads"], config["linear_key_head_dim"]
    shared = config["linear_num_value_heads"] // heads
    values = shared * config["linear_value_head_dim"]
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        own = tensor.view(heads, -1, tensor.shape[-1]) if ".in_proj_" in name else tensor
        if ".in_proj_qkvz." in name:
            *mixed, gates = (x.flatten(0, 1) for x in own.split([width, width, values, values], 1))
            parts = {"qkv": torch.cat(mixed), "z": gates}
        elif ".in_proj_ba." in name:
            beta, time = (x.flatten(0, 1).contiguous() for x in own.split(shared, 1))
            parts = {"b": beta, "a": time}
        else:
            tensors[name] = tensor
            continue
        prefix = name.partition("in_proj_")[0]
        tensors |= {f"{prefix}in_proj_{part}.weight": x for part, x in parts.items()}
    save_file(tensors, target / "model.safetensors")
    return target


def test_split_projections_are_the_fused_ones(tmp_path: Path) -> None:
    """By the names in the files, wherever a model is opened."""
    for seed in range(6):
        fused = write_model("qwen3_next", seed, tmp_path / f"{seed}")
        folder, token_ids = split(fused.folder, tmp_path / f"split {seed}"), random_ids(seed, 90)
        expected = fused.oracle(token_ids)
        with LLM(folder, context=256) as llm:
            found = llm.logits(token_ids)
            assert {"z.weight", "a.weight"} <= {
                name.rpartition("in_proj_")[2] for name in engine_of(llm).model.weights
            }
        assert float((found - expected).norm()) <= 1e-5 * float(expected.norm())
        plans = [plan_model(each, context=256) for each in (folder, fused.folder)]
        assert plans[0].host.dense_bytes == plans[1].host.dense_bytes


def test_a_folder_with_half_of_the_split_projections_is_refused(tmp_path: Path) -> None:
    folder = split(write_model("qwen3_next", 0, tmp_path / "fused").folder, tmp_path / "split")
    tensors = load_file(folder / "model.safetensors")
    [lost, *_] = sorted(name for name in tensors if name.endswith("in_proj_z.weight"))
    del tensors[lost]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=lost):
        plan_model(folder, context=64)


# Models that also read images


def wrapped(folder: Path, target: Path, outer_name: str, is_stacked: bool) -> Path:
    """As published: a config around the text's; other tensors beside the text's."""
    config = json.loads((folder / "config.json").read_text())
    eos = config.pop("eos_token_id")
    outer = {
        "architectures": [outer_name],
        "model_type": config["model_type"].removesuffix("_text"),
        "image_token_id": 5,
        "text_config": {**config, "architectures": None},
        "vision_config": {"depth": 2},
        "tie_word_embeddings": config["tie_word_embeddings"],
        "eos_token_id": eos,
    }
    target.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).write_bytes((folder / name).read_bytes())
    (target / "config.json").write_text(json.dumps(outer))
    tensors: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            tensors[name.replace("model.", "model.language_model.", 1)] = tensor
    if is_stacked:
        tensors = _stacked(tensors)
    tensors["model.visual.patch_embed.weight"] = torch.ones(1024, 1024)
    tensors["mtp.layers.0.mlp.gate.weight"] = torch.ones(4, 4)
    save_file(tensors, target / "model.safetensors")
    return target


def _stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    layers = {name.split(".experts.")[0] for name in tensors if ".experts." in name}
    for layer in layers:
        own = [name for name in tensors if name.startswith(f"{layer}.experts.")]
        count = len(own) // 3
        parts = {
            part: torch.stack(
                [tensors[f"{layer}.experts.{e}.{part}_proj.weight"] for e in range(count)]
            )
            for part in ("gate", "up", "down")
        }
        found[f"{layer}.experts.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], dim=1)
        found[f"{layer}.experts.down_proj"] = parts["down"]
    return found


@pytest.mark.parametrize("is_stacked", [False, True])
def test_published_wrappers_are_their_text_models(is_stacked: bool, tmp_path: Path) -> None:
    plain = synth("qwen3_5_moe", "tiny", tmp_path / "plain")
    name = "Qwen3_5MoeForConditionalGeneration"
    folder = wrapped(plain, tmp_path / "wrapped", name, is_stacked)
    assert "4.0 MiB of the files are not loaded" in plan_model(folder, context=128).reason
    token_ids = random_ids(0, 100)
    with LLM(plain, context=128) as llm:
        expected = llm.logits(token_ids)
    with LLM(folder, context=128) as llm:
        assert torch.equal(llm.logits(token_ids), expected)
        content = [{"type": "image_url", "image_url": {"url": "data:,"}}]
        with pytest.raises(UsageError, match="image"):
            llm.chat([{"role": "user", "content": content}])


def test_published_configs_are_read() -> None:
    config = families()["qwen3_5_moe"].sizes()["full"].config
    read = read_config(config)
    kinds = [type(layer.mixer) for layer in read.layers]
    assert [n for n, kind in enumerate(kinds) if kind is AttentionSpec] == list(range(3, 40, 4))
    delta = read.mixer(DeltaNetSpec)
    assert (delta.key_heads, delta.value_heads, delta.channels) == (16, 32, 8192)
    state_bytes = [2 * 3 * 8192 + 4 * 32 * 128 * 128] * kinds.count(DeltaNetSpec)
    assert sum(state_bytes) == 64_389_120
    assert read.attention.rope is not None
    assert (read.attention.rope.rotary_dim, read.attention.rope.theta) == (64, 1e7)
    assert read.attention.has_gate and read.eos_token_ids == (248044,)
    with_kinds = {**config, "layer_types": ["full_attention", "linear_attention"] * 20}
    assert read_config(with_kinds).layers[0] == read.layers[3]
    text = {name: value for name, value in config.items() if name != "architectures"}
    outer = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "text_config": text,
        "eos_token_id": [7, 8],
    }
    assert read_config(outer, generation={"eos_token_id": [248046, 248044]}).eos_token_ids == (
        248046,
        248044,
    )
    assert read_config(outer).layers == read.layers


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3_5_moe", {"attn_output_gate": False}, "attn_output_gate False"),
        ("qwen3_5_moe", {"output_gate_type": "sigmoid"}, "output_gate_type 'sigmoid'"),
        ("qwen3_5_moe", {"attention_bias": True}, "attention_bias True"),
        ("qwen3_5_moe", {"norm_topk_prob": False}, "norm_topk_prob False"),
        ("qwen3_5", {"layer_types": ["sliding_attention"] * 32}, "layer_types has 'sliding_att"),
        ("qwen3_next", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ],
)
def test_what_is_not_computed_is_refused(
    family: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        read_config({**families()[family].sizes()["full"].config, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_value_heads": 33}, "33 value heads do not divide among 16 key heads"),
        ({"layer_types": ["full_attention"]}, "must be a list of 40 kinds"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim 1 must be an integer from 2"),
        ({"linear_key_head_dim": None}, "no linear_key_head_dim"),
        ({"full_attention_interval": 0}, "full_attention_interval 0 must be"),
    ],
)
def test_what_cannot_be_right_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config({**families()["qwen3_5_moe"].sizes()["full"].config, **changes})


# GGUF


def check(path: Path, model: torch.nn.Module, tolerance: float) -> None:
    token_ids = random_ids(5, 100)
    with torch.inference_mode():
        expected = model(torch.tensor([token_ids])).logits[0].float()
    with LLM(path, context=128, dtype="float32") as llm:
        found = llm.logits(token_ids)
    assert float((found - expected).norm()) <= tolerance * float(expected.norm())


@pytest.mark.parametrize("family", HYBRID)
@pytest.mark.parametrize("seed", range(4))
def test_a_gguf_file_is_its_model(family: str, seed: int, tmp_path: Path) -> None:
    """With gate and up apart or merged, flags or an interval, and layers that predict, or not."""
    model, path = random_model(family, seed), tmp_path / "model.gguf"
    write_hybrid(
        path,
        family,
        model,
        is_merged=seed % 2 == 1,
        is_old=seed > 1,
        num_predicting=seed % 3 % 2,
        has_flags=seed > 1,
    )
    check(path, model, 3e-6)


READERS = {"qwen3_5_moe": Qwen3_5MoeForCausalLM, "qwen3_5": Qwen3_5ForCausalLM}


@pytest.mark.parametrize("family", READERS)
@pytest.mark.parametrize("kind", [Type.F32, Type.Q8_0])
def test_transformers_reads_the_same_gguf_file(family: str, kind: Type, tmp_path: Path) -> None:
    widths = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32}
    widths |= {"shared_expert_intermediate_size": 32, "tie_word_embeddings": False}
    widths |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 8}
    widths |= {"head_dim": 16, "eos_token_id": 1, "linear_key_head_dim": 16}
    model, path = random_model(family, 0, **widths), tmp_path / "model.gguf"

    def choose(name: str, shape: tuple[int, ...]) -> Type:
        return kind if shape[-1] % 32 == 0 and "gate_inp" not in name else Type.F32

    write_hybrid(path, family, model, choose, tokens=VOCAB)
    oracle = READERS[family].from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    check(path, oracle.eval(), 1e-6)


def test_value_heads_stay_in_the_order_of_their_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_hybrid(path, "qwen3_5_moe", random_model("qwen3_5_moe", 0))
    config = GgufModel.open(path).config()
    assert config.mixer(DeltaNetSpec).is_tiled and config.is_adjusted
    names = {spec.name: spec.shape for spec in model_schema(config).dense}
    assert len(names["model.layers.0.linear_attn.conv1d.weight"]) == 2
