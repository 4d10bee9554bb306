"""Random tiny models of the bidirectional families, in transformers' classes of the same function.

LLaDA is a Llama and Dream a Qwen2 whose logits move on by one, LLaDA-MoE a Qwen3-MoE whose weights
are not renormalised; none of them with a causal mask.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from checkpoint_files import LAYOUTS
from family_models import VOCAB, Written, common, randomise, store_experts_as
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

NAMES = ("llada", "llada_moe", "dream")

CLASSES: Mapping[str, tuple[type[PretrainedConfig], type[PreTrainedModel]]] = {
    "llada": (LlamaConfig, LlamaForCausalLM),
    "llada_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "dream": (Qwen2Config, Qwen2ForCausalLM),
}

LLADA_NAMES = {
    "model.layers.": "model.transformer.blocks.",
    "model.embed_tokens": "model.transformer.wte",
    "model.norm": "model.transformer.ln_f",
    "lm_head": "model.transformer.ff_out",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ff_norm",
    "self_attn.o_proj": "attn_out",
    "self_attn.": "",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}
"""LLaDA's texts for those of Llama's names."""


def write_model(
    family: str, seed: int, folder: Path, dtype: torch.dtype = torch.float32
) -> Written:
    """A random model of a random config in the family's own form."""
    rng = random.Random(f"{family} {seed}")
    torch.manual_seed(seed)
    config_class, model_class = CLASSES[family]
    values = common(rng)
    values |= _experts(family, rng, values["num_hidden_layers"])
    model = model_class(config_class(**values))
    randomise(model)
    model = model.to(dtype).eval()
    model.save_pretrained(folder, save_original_format=True)
    if family == "llada":
        _rename(folder)
    if family == "llada_moe":
        store_experts_as(folder, LAYOUTS[seed % len(LAYOUTS)])
    config = CONFIGS[family](values, rng) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config))
    return Written(folder, lambda ids: _logits(family, model, ids))


def write_first_layer(model: Path, folder: Path) -> Path:
    """A model of nothing but the first layer of another."""
    config = json.loads((model / "config.json").read_text())
    for name in ("n_layers", "num_hidden_layers"):
        if name in config:
            config[name] = 1
    if isinstance(config.get("moe_layer_freq"), list):
        config["moe_layer_freq"] = config["moe_layer_freq"][:1]
    weights = load_file(model / "model.safetensors")
    is_kept = re.compile(r"(?!.*\.(blocks|layers)\.[1-9])").match
    save_file(
        {name: tensor for name, tensor in weights.items() if is_kept(name)},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _experts(family: str, rng: random.Random, num_layers: int) -> dict[str, Any]:
    if family != "llada_moe":
        return {}
    dense = rng.sample(range(num_layers), rng.randrange(num_layers))
    return {
        "mlp_only_layers": rng.choice([[], sorted(dense)]),
        "num_experts": rng.choice([4, 9, 16]),
        "moe_intermediate_size": rng.choice([16, 24]),
        "norm_topk_prob": False,
        "head_dim": rng.choice([8, 16]),
    }


def _llada_config(values: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    """Where the file may leave a number out, it does so sometimes."""
    heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
    return {
        "architectures": ["LLaDAModelLM"],
        "activation_type": "silu",
        "block_type": "llama",
        "d_model": values["hidden_size"],
        "embedding_size": rng.choice([None, VOCAB]),
        "eos_token_id": values["eos_token_id"],
        "layer_norm_type": "rms",
        "mask_token_id": 95,
        "max_sequence_length": values["max_position_embeddings"],
        "mlp_hidden_size": values["intermediate_size"],
        "model_type": "llada",
        "n_heads": heads,
        "n_kv_heads": None if heads == kv_heads else kv_heads,
        "n_layers": values["num_hidden_layers"],
        "rms_norm_eps": values["rms_norm_eps"],
        "rope": True,
        "rope_full_precision": True,
        "rope_theta": values["rope_parameters"]["rope_theta"],
        "vocab_size": VOCAB,
        "weight_tying": values["tie_word_embeddings"],
    }


def _usual_config(values: Mapping[str, Any]) -> dict[str, Any]:
    same = {name: value for name, value in values.items() if name != "rope_parameters"}
    return {**same, "mask_token_id": 95, "rope_theta": values["rope_parameters"]["rope_theta"]}


def _llada_moe_config(values: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    config = _usual_config(values)
    config["expert_intermediate_size"] = config.pop("moe_intermediate_size")
    config["dense_intermediate_size"] = config.pop("intermediate_size")
    num_layers, dense = config["num_hidden_layers"], config.pop("mlp_only_layers")
    layers = [int(layer not in dense) for layer in range(num_layers)]
    return {
        **config,
        "architectures": [rng.choice(["LLaDAMoEModelLM", "FusedLLaDAMoEModelLM"])],
        "model_type": "llada",
        "moe_layer_freq": layers if dense else rng.choice([1, layers]),
        "norm_topk_prob": None,
        "qk_layernorm": True,
        "routed_scaling_factor": rng.choice([1, 1.0, None]),
    }


def _dream_config(values: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    return {**_usual_config(values), "architectures": ["DreamModel"], "model_type": "Dream"}


CONFIGS = {"llada": _llada_config, "llada_moe": _llada_moe_config, "dream": _dream_config}


def _rename(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights: dict[str, Tensor] = {}
    for name, tensor in load_file(path).items():
        for theirs, ours in LLADA_NAMES.items():
            name = name.replace(theirs, ours)
        weights[name] = tensor
    save_file(weights, path)


def _logits(family: str, model: torch.nn.Module, token_ids: list[int]) -> Tensor:
    """Float32 logits [tokens, vocab] of each position's own token."""
    num_tokens = len(token_ids)
    nothing_hidden = torch.zeros(1, 1, num_tokens, num_tokens, dtype=next(model.parameters()).dtype)
    with torch.inference_mode():
        output = model(torch.tensor([token_ids]), attention_mask=nothing_hidden, use_cache=False)
    logits: Tensor = output.logits[0].float()
    return torch.cat([logits[:1], logits[:-1]]) if family == "dream" else logits
