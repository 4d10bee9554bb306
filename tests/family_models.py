"""Random tiny models of every autoregressive family, with transformers' own code as the oracle."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from checkpoint_files import LAYOUTS, in_layout
from oracle import make_oracle
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.utils import logging as transformers_logging

from lowtide.families import read_config
from lowtide.llm import LLM
from lowtide.schemas import model_schema

VOCAB = 97

transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()


class Written(NamedTuple):
    """A checkpoint folder and the model that is in it."""

    folder: Path
    oracle: Callable[[list[int]], Tensor]  # float32 logits [tokens, vocab]


def random_ids(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def logits(folder: Path, token_ids: list[int], **options: object) -> Tensor:
    with LLM(folder, **options) as llm:
        return llm.logits(token_ids)


def write_model(
    family: str, seed: int, folder: Path, dtype: torch.dtype = torch.float32, **changes: Any
) -> Written:
    """A random model of a random config; `changes` are values of transformers' config."""
    rng = random.Random(f"{family} {seed}")
    torch.manual_seed(seed)
    if family == "bailing_moe_v2":
        return _write_ling(rng, folder, dtype)
    config_class, model_class, values = FAMILIES[family](rng)
    values = {**common(rng), **values, **changes}
    if family in DENSE:
        del values["num_experts_per_tok"]
    model = model_class(config_class(**values))
    randomise(model)
    packed = _pack_experts(model) if family == "gpt_oss" and seed % 2 == 0 else {}
    model = model.to(dtype).eval()
    model.save_pretrained(folder, save_original_format=True)
    if rng.random() < 0.5:
        _flatten_config(folder)
    if packed:
        _store_packed(folder, packed)
    elif family not in ("gpt_oss", *DENSE):
        store_experts_as(folder, LAYOUTS[seed % len(LAYOUTS)])
    return Written(folder, lambda ids: _logits(model, ids))


def common(rng: random.Random) -> dict[str, Any]:
    num_heads = rng.choice([2, 4])
    return {
        "vocab_size": VOCAB,
        "hidden_size": rng.choice([32, 48, 64]),
        "intermediate_size": rng.choice([24, 40]),
        "num_hidden_layers": rng.choice([2, 3]),
        "num_attention_heads": num_heads,
        "num_key_value_heads": rng.choice([1, 2, num_heads]),
        "num_experts_per_tok": rng.choice([1, 2, 3]),
        "max_position_embeddings": 1024,
        "rms_norm_eps": rng.choice([1e-5, 1e-6]),
        "tie_word_embeddings": rng.random() < 0.25,
        "eos_token_id": 96,
        "bos_token_id": None,
        "pad_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": rng.choice([1e4, 1e6])},
    }


def _yarn(rng: random.Random, mscale: float | None = None) -> dict[str, Any]:
    yarn = {
        "rope_type": "yarn",
        "rope_theta": rng.choice([1e4, 1e6]),
        "factor": rng.choice([4.0, 40.0]),
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
    }
    return yarn if mscale is None else {**yarn, "mscale": mscale, "mscale_all_dim": mscale}


def _stretched(rng: random.Random) -> dict[str, Any]:
    """A rotary embedding that is as it is, or made for longer contexts in one of three ways."""
    theta = rng.choice([1e4, 1e6])
    bands = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return rng.choice(
        [
            {"rope_type": "default", "rope_theta": theta},
            {"rope_type": "linear", "rope_theta": theta, "factor": rng.choice([2.0, 4.0])},
            {
                "rope_type": "llama3",
                "rope_theta": theta,
                "original_max_position_embeddings": 64,
                **bands,
            },
            _yarn(rng),
        ]
    )


def _llama(rng: random.Random) -> tuple[type, type, dict[str, Any]]:
    values = {
        "head_dim": rng.choice([None, 16]),
        "attention_bias": rng.random() < 0.4,
        "rope_parameters": _stretched(rng),
    }
    return LlamaConfig, LlamaForCausalLM, values


def _qwen2(rng: random.Random) -> tuple[type, type, dict[str, Any]]:
    values = rng.choice([{}, {"head_dim": 16}])
    return Qwen2Config, Qwen2ForCausalLM, {**values, "rope_parameters": _stretched(rng)}


def _qwen3(rng: random.Random) -> tuple[type, type, dict[str, Any]]:
    values = {
        "head_dim": rng.choice([8, 32]),
        "attention_bias": rng.random() < 0.4,
        "rope_parameters": _stretched(rng),
    }
    return Qwen3Config, Qwen3ForCausalLM, values


def _qwen3_moe(rng: random.Random) -> tuple[type, type, dict[str, Any]]:
    values: dict[str, Any] = {
        "head_dim": rng.choice([8, 16]),
        "moe_intermediate_size": rng.choice([16, 24]),
        "num_experts": rng.choice([4, 9, 16]),
        "norm_topk_prob": rng.random() < 0.7,
        **rng.choice([{}, {"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}]),
    }
    if rng.random() < 0.3:
        values["rope_parameters"] = _yarn(rng)
    return Qwen3MoeConfig, Qwen3MoeForCausalLM, values


def _qwen2_moe(rng: random.Random) -> tuple[type, type, dict[str, Any]]:
    values: dict[str, Any] = {
        "moe_intermediate_size": rng.choice([16, 24]),
        "shared_expert_intermediate_size": rng.choice([20, 32]),
        "num_experts": rng.choice([4, 9]),
        "norm_topk_prob": rng.random() < 0.3,
        "qkv_bias": rng.random() < 0.7,
    }
    if rng.random() < 0.3:
        values["rope_parameters"] = _yarn(rng)
    return Qwen2MoeConfig, Qwen2MoeForCausalLM, values


def _mixtral(rng: random.Random) -> tuple[type, type, dict[str, Any]]:
    head_dim = rng.choice([None, 16])
    return (
        MixtralConfig,
        MixtralForCausalLM,
        {"num_local_experts": rng.choice([3, 8]), "head_dim": head_dim},
    )


def _olmoe(rng: random.Random) -> tuple[type, type, dict[str, Any]]:
    values = {"num_experts": rng.choice([4, 16]), "norm_topk_prob": rng.random() < 0.3}
    return OlmoeConfig, OlmoeForCausalLM, values


def _deepseek_v2(rng: random.Random) -> tuple[type, type, dict[str, Any]]:
    is_grouped = rng.random() < 0.5
    values: dict[str, Any] = {
        "num_key_value_heads": None,
        "kv_lora_rank": rng.choice([16, 24]),
        "q_lora_rank": rng.choice([None, 20]),
        "qk_nope_head_dim": rng.choice([8, 12]),
        "qk_rope_head_dim": rng.choice([4, 8]),
        "v_head_dim": rng.choice([8, 12]),
        "n_routed_experts": 12,
        "n_shared_experts": rng.choice([1, 2]),
        "moe_intermediate_size": rng.choice([16, 24]),
        "first_k_dense_replace": rng.choice([0, 1]),
        "routed_scaling_factor": rng.choice([1.0, 2.5]),
        "topk_method": "group_limited_greedy" if is_grouped else "greedy",
        "n_group": 4 if is_grouped else 1,
        "topk_group": 2 if is_grouped else 1,
    }
    if rng.random() < 0.6:
        values["rope_parameters"] = _yarn(rng, mscale=rng.choice([0.707, 1.0]))
    return DeepseekV2Config, DeepseekV2ForCausalLM, values


def _glm4_moe(rng: random.Random) -> tuple[type, type, dict[str, Any]]:
    is_grouped = rng.random() < 0.5
    values: dict[str, Any] = {
        "head_dim": rng.choice([8, 16]),
        "moe_intermediate_size": rng.choice([16, 24]),
        "n_routed_experts": 12,
        "n_shared_experts": rng.choice([1, 2]),
        "n_group": 4 if is_grouped else 1,
        "topk_group": 2 if is_grouped else 1,
        "first_k_dense_replace": rng.choice([0, 1]),
        "norm_topk_prob": rng.random() < 0.8,
        "routed_scaling_factor": rng.choice([1.0, 2.5]),
        "attention_bias": rng.random() < 0.7,
        "use_qk_norm": rng.random() < 0.5,
        "rope_parameters": {
            **(_yarn(rng) if rng.random() < 0.3 else common(rng)["rope_parameters"]),
            "partial_rotary_factor": rng.choice([0.5, 1.0]),
        },
    }
    return Glm4MoeConfig, Glm4MoeForCausalLM, values


def _deepseek_v3(rng: random.Random) -> tuple[type, type, dict[str, Any]]:
    _, _, latent = _deepseek_v2(rng)
    num_layers, num_dense = rng.choice([(2, 0), (3, 1), (4, 2)])
    values: dict[str, Any] = {
        **{name: value for name, value in latent.items() if name != "topk_method"},
        "num_hidden_layers": num_layers,
        "first_k_dense_replace": num_dense,
        "norm_topk_prob": rng.random() < 0.8,
        "rope_interleave": rng.random() < 0.8,
    }
    return DeepseekV3Config, DeepseekV3ForCausalLM, values


def _glm4_moe_lite(rng: random.Random) -> tuple[type, type, dict[str, Any]]:
    _, _, values = _deepseek_v3(rng)
    num_dense = values.pop("first_k_dense_replace")
    kinds = ["dense"] * num_dense + ["sparse"] * (values["num_hidden_layers"] - num_dense)
    kinds = rng.choice([kinds, kinds, kinds[::-1], [*kinds[1:], kinds[0]]])
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), rng.choice([2, 3]))
    values = {**values, **heads, "mlp_layer_types": kinds}
    return Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM, values


def _minimax_m2(rng: random.Random) -> tuple[type, type, dict[str, Any]]:
    values: dict[str, Any] = {
        "head_dim": rng.choice([8, 16]),
        "num_local_experts": rng.choice([4, 9, 16]),
        "rope_parameters": {
            **(_yarn(rng) if rng.random() < 0.3 else common(rng)["rope_parameters"]),
            "partial_rotary_factor": rng.choice([0.5, 0.5, 1.0]),
        },
    }
    return MiniMaxM2Config, MiniMaxM2ForCausalLM, values


def _gpt_oss(rng: random.Random) -> tuple[type, type, dict[str, Any]]:
    num_layers = rng.choice([2, 3])
    kinds = [rng.choice(["sliding_attention", "full_attention"]) for _ in range(num_layers)]
    values: dict[str, Any] = {
        "hidden_size": rng.choice([32, 64]),
        "intermediate_size": rng.choice([32, 64, 96]),
        "num_hidden_layers": num_layers,
        "head_dim": rng.choice([8, 16]),
        "num_local_experts": rng.choice([4, 9]),
        "sliding_window": rng.choice([1, 5, 40, 150, 600]),
        "layer_types": rng.choice([None, kinds]),
        "attn_implementation": "eager",
    }
    if rng.random() < 0.6:
        values["rope_parameters"] = {**_yarn(rng), "truncate": rng.random() < 0.5}
    return GptOssConfig, GptOssForCausalLM, values


FAMILIES: Mapping[str, Callable[[random.Random], tuple[type, type, dict[str, Any]]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "qwen2_moe": _qwen2_moe,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "deepseek_v2": _deepseek_v2,
    "glm4_moe": _glm4_moe,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe_lite": _glm4_moe_lite,
    "minimax_m2": _minimax_m2,
    "gpt_oss": _gpt_oss,
}

NAMES = (*FAMILIES, "bailing_moe_v2")

DENSE = ("llama", "qwen2", "qwen3")
"""Families without experts."""


def _pack_experts(model: torch.nn.Module) -> dict[str, Tensor]:
    """Random MXFP4 experts by their checkpoint names; the model's become what they stand for."""
    packed: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        num_experts, num_in, num_out = parameter.shape
        blocks = torch.randint(0, 256, (num_experts, num_out, num_in // 32, 16), dtype=torch.uint8)
        scales = torch.randint(121, 125, blocks.shape[:3], dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        with torch.no_grad():
            parameter.copy_(convert_moe_packed_tensors(blocks, scales))
    return packed


def _store_packed(folder: Path, packed: Mapping[str, Tensor]) -> None:
    path = folder / "model.safetensors"
    unpacked = {name.removesuffix("_blocks") for name in packed}
    weights = {name: x for name, x in load_file(path).items() if name not in unpacked}
    save_file({**weights, **packed}, path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))


def _write_ling(rng: random.Random, folder: Path, dtype: torch.dtype) -> Written:
    """Ling 2.0's names are not transformers'; the weights are made by the schema."""
    config = {
        **common(rng),
        "architectures": ["BailingMoeV2ForCausalLM"],
        "model_type": "bailing_moe_v2",
        "head_dim": 16,
        "moe_intermediate_size": 16,
        "num_experts": 16,
        "num_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rope_theta": 600000.0,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": rng.random() < 0.7,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    del config["rope_parameters"]
    config["tie_word_embeddings"] = False  # as published
    schema = model_schema(read_config(config))
    specs = [*schema.dense]
    for layer in schema.moe_layers:
        specs += schema.expert_specs(layer)
    weights = {spec.name: random_weight(spec.name, spec.shape).to(dtype) for spec in specs}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    model = make_oracle(config, weights, dtype)
    return Written(folder, lambda ids: _logits(model, ids))


def randomise(model: torch.nn.Module) -> None:
    with torch.no_grad():
        routers = [each for each in model.named_buffers() if "correction_bias" in each[0]]
        for name, parameter in [*model.named_parameters(), *routers]:
            parameter.copy_(random_weight(name, tuple(parameter.shape)))


def random_weight(name: str, shape: tuple[int, ...]) -> Tensor:
    """Sizes stay near one from layer to layer, and routing is decided."""
    if "norm" in name:
        return 1 + 0.2 * torch.randn(shape)
    if name.endswith("gate_up_proj_bias"):
        return 3 * torch.randn(shape)  # some of what they are added to is clamped
    if len(shape) == 1:
        return 0.3 * torch.randn(shape)
    if "embed" in name:
        return torch.randn(shape)
    return torch.randn(shape) * shape[-1] ** -0.5


def _logits(model: torch.nn.Module, token_ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].float()


def _flatten_config(folder: Path) -> None:
    """Rewrites config.json as transformers before version 5 did."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    rope.pop("type", None)
    factor = rope.pop("partial_rotary_factor", 0.5)
    if config["model_type"] == "minimax_m2":
        config["rotary_dim"] = int(factor * config["head_dim"])
    elif factor != 0.5:  # GLM's where its config names none
        config["partial_rotary_factor"] = factor
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config))


def store_experts_as(folder: Path, layout: str) -> None:
    """Rewrites `model.safetensors` with the experts in another layout."""
    if layout != "per expert":
        path = folder / "model.safetensors"
        save_file(in_layout(load_file(path), layout, torch.stack, torch.cat), path)
