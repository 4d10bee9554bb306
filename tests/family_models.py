"""One table: random tiny models of every family, with another implementation as the oracle.

Usually it is transformers' own. Bidirectional families are its classes of the same function without
a causal mask: LLaDA a Llama, Dream a Qwen2 whose logits move on by one, LLaDA-MoE a Qwen3-MoE whose
weights are not renormalised. A family that is added is a row of `FAMILIES`, and
`tests/test_contract_family.py` holds it to what all of them promise.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

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
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
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
    """A random model of a random config; `changes` are values of the oracle's config."""
    rng = random.Random(f"{family} {seed}")
    torch.manual_seed(seed)
    return Written(folder, FAMILIES[family].write(rng, seed, folder, dtype, changes))


class Row(Protocol):
    """A family in the table."""

    def write(
        self,
        rng: random.Random,
        seed: int,
        folder: Path,
        dtype: torch.dtype,
        changes: Mapping[str, Any],
    ) -> Callable[[list[int]], Tensor]:
        """Store a random model as the family publishes them; return its float32 logits."""
        ...


class Stored(NamedTuple):
    """A model as transformers has saved it, for a family that publishes another form."""

    folder: Path
    rng: random.Random
    seed: int
    values: Mapping[str, Any]  # of its config
    dtype: torch.dtype
    packed: Mapping[str, Tensor]


class Transformers(NamedTuple):
    """A family whose oracle is a class of transformers."""

    config_class: type[PretrainedConfig]
    model_class: type[PreTrainedModel]
    values: Callable[[random.Random], dict[str, Any]]  # of a random config
    store: Callable[[Stored], None]
    logits: Callable[[torch.nn.Module, list[int]], Tensor]
    pack: Callable[[torch.nn.Module, int], dict[str, Tensor]] = lambda model, seed: {}
    """Tensors to store in place of a model's own, which become what they stand for."""

    def write(
        self,
        rng: random.Random,
        seed: int,
        folder: Path,
        dtype: torch.dtype,
        changes: Mapping[str, Any],
    ) -> Callable[[list[int]], Tensor]:
        values = {**self.values(rng), **changes}
        model = self.model_class(self.config_class(**values))
        randomise(model)
        packed = self.pack(model, seed)
        model = model.to(dtype).eval()
        model.save_pretrained(folder, save_original_format=True)
        self.store(Stored(folder, rng, seed, values, dtype, packed))
        return lambda ids: self.logits(model, ids)


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


def _llama(rng: random.Random) -> dict[str, Any]:
    return {
        "head_dim": rng.choice([None, 16]),
        "attention_bias": rng.random() < 0.4,
        "rope_parameters": _stretched(rng),
    }


def _qwen2(rng: random.Random) -> dict[str, Any]:
    values = rng.choice([{}, {"head_dim": 16}])
    return {**values, "rope_parameters": _stretched(rng)}


def _qwen3(rng: random.Random) -> dict[str, Any]:
    return {
        "head_dim": rng.choice([8, 32]),
        "attention_bias": rng.random() < 0.4,
        "rope_parameters": _stretched(rng),
    }


def _qwen3_moe(rng: random.Random) -> dict[str, Any]:
    values: dict[str, Any] = {
        "head_dim": rng.choice([8, 16]),
        "moe_intermediate_size": rng.choice([16, 24]),
        "num_experts": rng.choice([4, 9, 16]),
        "norm_topk_prob": rng.random() < 0.7,
        **rng.choice([{}, {"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}]),
    }
    if rng.random() < 0.3:
        values["rope_parameters"] = _yarn(rng)
    return values


def _qwen2_moe(rng: random.Random) -> dict[str, Any]:
    values: dict[str, Any] = {
        "moe_intermediate_size": rng.choice([16, 24]),
        "shared_expert_intermediate_size": rng.choice([20, 32]),
        "num_experts": rng.choice([4, 9]),
        "norm_topk_prob": rng.random() < 0.3,
        "qkv_bias": rng.random() < 0.7,
    }
    if rng.random() < 0.3:
        values["rope_parameters"] = _yarn(rng)
    return values


def _mixtral(rng: random.Random) -> dict[str, Any]:
    head_dim = rng.choice([None, 16])
    return {"num_local_experts": rng.choice([3, 8]), "head_dim": head_dim}


def _olmoe(rng: random.Random) -> dict[str, Any]:
    return {"num_experts": rng.choice([4, 16]), "norm_topk_prob": rng.random() < 0.3}


def _deepseek_v2(rng: random.Random) -> dict[str, Any]:
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
    return values


def _glm4_moe(rng: random.Random) -> dict[str, Any]:
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
    return values


def _deepseek_v3(rng: random.Random) -> dict[str, Any]:
    latent = _deepseek_v2(rng)
    num_layers, num_dense = rng.choice([(2, 0), (3, 1), (4, 2)])
    return {
        **{name: value for name, value in latent.items() if name != "topk_method"},
        "num_hidden_layers": num_layers,
        "first_k_dense_replace": num_dense,
        "norm_topk_prob": rng.random() < 0.8,
        "rope_interleave": rng.random() < 0.8,
    }


def _glm4_moe_lite(rng: random.Random) -> dict[str, Any]:
    values = _deepseek_v3(rng)
    num_dense = values.pop("first_k_dense_replace")
    kinds = ["dense"] * num_dense + ["sparse"] * (values["num_hidden_layers"] - num_dense)
    kinds = rng.choice([kinds, kinds, kinds[::-1], [*kinds[1:], kinds[0]]])
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), rng.choice([2, 3]))
    return {**values, **heads, "mlp_layer_types": kinds}


def _minimax_m2(rng: random.Random) -> dict[str, Any]:
    return {
        "head_dim": rng.choice([8, 16]),
        "num_local_experts": rng.choice([4, 9, 16]),
        "rope_parameters": {
            **(_yarn(rng) if rng.random() < 0.3 else common(rng)["rope_parameters"]),
            "partial_rotary_factor": rng.choice([0.5, 0.5, 1.0]),
        },
    }


def _lfm2(rng: random.Random) -> dict[str, Any]:
    """Each kind of layer at least twice, in one of two orders."""
    kinds = ["conv", "full_attention"] * 2
    return {
        **_lfm2_mixers(rng, rng.choice([kinds, [kinds[1], *kinds, kinds[0]]])),
        "block_auto_adjust_ff_dim": rng.random() < 0.5,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": rng.choice([1.0, 1.5]),
    }


def _lfm2_moe(rng: random.Random) -> dict[str, Any]:
    """Each kind of layer twice, in one of two orders, or some of them."""
    kinds = ["conv", "full_attention"] * 2
    num_dense, kinds = rng.choice(
        [(4, kinds * 2), (4, [*kinds, *reversed(kinds)]), (2, kinds), (0, kinds[:3])]
    )
    return {
        **_lfm2_mixers(rng, kinds),
        "num_dense_layers": num_dense,
        "moe_intermediate_size": rng.choice([16, 24]),
        "num_experts": rng.choice([4, 9, 16]),
        "norm_topk_prob": rng.random() < 0.8,
        "routed_scaling_factor": rng.choice([1.0, 2.5]),
        "use_expert_bias": rng.random() < 0.8,
    }


def _lfm2_mixers(rng: random.Random, kinds: list[str]) -> dict[str, Any]:
    return {
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "conv_L_cache": rng.choice([3, 3, 2, 5]),
        "conv_bias": rng.random() < 0.3,
        "norm_eps": rng.choice([1e-5, 1e-6]),
        "rms_norm_eps": None,
    }


def _hybrid(rng: random.Random) -> dict[str, Any]:
    """Both kinds of layers twice, in any order."""
    kinds = ["linear_attention", "full_attention"] * 2
    rng.shuffle(kinds)
    key_heads = rng.choice([1, 2, 3])
    return {
        "num_hidden_layers": 4,
        "layer_types": kinds,
        "head_dim": rng.choice([8, 16]),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * rng.choice([1, 2, 3]),
        "linear_key_head_dim": rng.choice([8, 16]),
        "linear_value_head_dim": rng.choice([8, 12]),
        "linear_conv_kernel_dim": rng.choice([2, 4]),
        "rope_parameters": {
            **(_yarn(rng) if rng.random() < 0.3 else common(rng)["rope_parameters"]),
            "partial_rotary_factor": rng.choice([0.25, 0.5, 1.0]),
        },
    }


def _hybrid_moe(rng: random.Random) -> dict[str, Any]:
    return {
        **_hybrid(rng),
        "moe_intermediate_size": rng.choice([16, 24]),
        "shared_expert_intermediate_size": rng.choice([20, 32]),
        "num_experts": rng.choice([4, 9]),
    }


def _qwen3_next(rng: random.Random) -> dict[str, Any]:
    return {
        **_hybrid_moe(rng),
        "norm_topk_prob": rng.random() < 0.8,
        **rng.choice([{}, {"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}]),
    }


def _gpt_oss(rng: random.Random) -> dict[str, Any]:
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
    return values


def _pack_experts(model: torch.nn.Module, seed: int) -> dict[str, Tensor]:
    """Random MXFP4 experts by their checkpoint names, of every other seed."""
    packed: dict[str, Tensor] = {}
    if seed % 2:
        return packed
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


def _store_usually(stored: Stored) -> None:
    """Some as transformers before version 5 wrote them, in one of four layouts of experts."""
    if stored.rng.random() < 0.5:
        _flatten_config(stored.folder)
    store_experts_as(stored.folder, LAYOUTS[stored.seed % len(LAYOUTS)])


def _store_dense(stored: Stored) -> None:
    if stored.rng.random() < 0.5:
        _flatten_config(stored.folder)


def _store_gpt_oss(stored: Stored) -> None:
    if stored.rng.random() < 0.5:
        _flatten_config(stored.folder)
    if stored.packed:
        _store_packed(stored.folder, stored.packed)


def _store_packed(folder: Path, packed: Mapping[str, Tensor]) -> None:
    path = folder / "model.safetensors"
    unpacked = {name.removesuffix("_blocks") for name in packed}
    weights = {name: x for name, x in load_file(path).items() if name not in unpacked}
    save_file({**weights, **packed}, path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))


class Ling:
    """Ling 2.0, whose names are not transformers'; the weights are made by the schema."""

    @staticmethod
    def write(
        rng: random.Random,
        seed: int,
        folder: Path,
        dtype: torch.dtype,
        changes: Mapping[str, Any],
    ) -> Callable[[list[int]], Tensor]:
        config = _ling_config(rng, dtype) | changes
        schema = model_schema(read_config(config))
        specs = [*schema.dense]
        for layer in schema.moe_layers:
            specs += schema.expert_specs(layer)
        weights = {spec.name: random_weight(spec.name, spec.shape).to(dtype) for spec in specs}
        folder.mkdir(parents=True, exist_ok=True)
        save_file(weights, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        model = make_oracle(config, weights, dtype)
        return lambda ids: causal_logits(model, ids)


def _ling_config(rng: random.Random, dtype: torch.dtype) -> dict[str, Any]:
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
    return config


def randomise(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *router_biases(model)]:
            parameter.copy_(random_weight(name, tuple(parameter.shape)))
        for module in model.modules():
            if re.fullmatch(r"Qwen3(_5|_5Moe|Next)RMSNorm", type(module).__name__):
                module.weight.sub_(1)  # 1 + w multiplies


def router_biases(model: torch.nn.Module) -> list[tuple[str, Tensor]]:
    """Of choices alone; transformers has them as buffers."""
    endings = ("correction_bias", "expert_bias")
    return [each for each in model.named_buffers() if each[0].endswith(endings)]


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


def causal_logits(model: torch.nn.Module, token_ids: list[int]) -> Tensor:
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
    is_hybrid = config["model_type"].startswith(("qwen3_5", "qwen3_next"))
    usual_factor = 0.25 if is_hybrid else 0.5  # where a config names none
    factor = rope.pop("partial_rotary_factor", usual_factor)
    if config["model_type"] == "minimax_m2":
        config["rotary_dim"] = int(factor * config["head_dim"])
    elif factor != usual_factor:
        config["partial_rotary_factor"] = factor
    # Without a word, transformers would stretch gpt-oss'.
    is_told = kind != "default" or config["model_type"] == "gpt_oss"
    config["rope_scaling"] = {"type": kind, **rope} if is_told else None
    if config["model_type"].startswith("lfm2"):
        config["tie_embedding"] = config.pop("tie_word_embeddings")
    if config["model_type"] == "lfm2":
        kinds = enumerate(config.pop("layer_types"))
        config["full_attn_idxs"] = [layer for layer, kind in kinds if kind != "conv"]
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config))


def store_experts_as(folder: Path, layout: str) -> None:
    """Rewrites `model.safetensors` with the experts in another layout."""
    if layout != "per expert":
        path = folder / "model.safetensors"
        save_file(in_layout(load_file(path), layout, torch.stack, torch.cat), path)


# Bidirectional families


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


def _llada_moe(rng: random.Random) -> dict[str, Any]:
    values = common(rng)
    num_layers = values["num_hidden_layers"]
    dense = rng.sample(range(num_layers), rng.randrange(num_layers))
    return {
        **values,
        "mlp_only_layers": rng.choice([[], sorted(dense)]),
        "num_experts": rng.choice([4, 9, 16]),
        "moe_intermediate_size": rng.choice([16, 24]),
        "norm_topk_prob": False,
        "head_dim": rng.choice([8, 16]),
    }


def _store_llada(stored: Stored) -> None:
    _rename(stored.folder)
    _store_config(stored, _llada_config(stored.values, stored.rng))


def _store_llada_moe(stored: Stored) -> None:
    store_experts_as(stored.folder, LAYOUTS[stored.seed % len(LAYOUTS)])
    _store_config(stored, _llada_moe_config(stored.values, stored.rng))


def _store_dream(stored: Stored) -> None:
    names = {"architectures": ["DreamModel"], "model_type": "Dream"}
    _store_config(stored, {**_usual_config(stored.values), **names})


def _store_config(stored: Stored, config: Mapping[str, Any]) -> None:
    dtype = str(stored.dtype).removeprefix("torch.")
    (stored.folder / "config.json").write_text(json.dumps({**config, "torch_dtype": dtype}))


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


def _rename(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights: dict[str, Tensor] = {}
    for name, tensor in load_file(path).items():
        for theirs, ours in LLADA_NAMES.items():
            name = name.replace(theirs, ours)
        weights[name] = tensor
    save_file(weights, path)


def bidirectional_logits(model: torch.nn.Module, token_ids: list[int]) -> Tensor:
    num_tokens = len(token_ids)
    nothing_hidden = torch.zeros(1, 1, num_tokens, num_tokens, dtype=next(model.parameters()).dtype)
    with torch.inference_mode():
        output = model(torch.tensor([token_ids]), attention_mask=nothing_hidden, use_cache=False)
    logits: Tensor = output.logits[0].float()
    return logits


def _dream_logits(model: torch.nn.Module, token_ids: list[int]) -> Tensor:
    """Of each position's own token, which its class gives one position before."""
    logits = bidirectional_logits(model, token_ids)
    return torch.cat([logits[:1], logits[:-1]])


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


# The table


def _with_common(
    own: Callable[[random.Random], dict[str, Any]],
) -> Callable[[random.Random], dict[str, Any]]:
    def values(rng: random.Random) -> dict[str, Any]:
        drawn = own(rng)
        return {**common(rng), **drawn}

    return values


def _dense(
    config_class: type[PretrainedConfig],
    model_class: type[PreTrainedModel],
    own: Callable[[random.Random], dict[str, Any]],
) -> Transformers:
    """A causal family without experts."""

    def values(rng: random.Random) -> dict[str, Any]:
        drawn = _with_common(own)(rng)
        del drawn["num_experts_per_tok"]
        return drawn

    return Transformers(config_class, model_class, values, _store_dense, causal_logits)


def _usual(
    config_class: type[PretrainedConfig],
    model_class: type[PreTrainedModel],
    own: Callable[[random.Random], dict[str, Any]],
) -> Transformers:
    """A causal family that is published as transformers saves it."""
    return Transformers(config_class, model_class, _with_common(own), _store_usually, causal_logits)


FAMILIES: Mapping[str, Row] = {
    "llama": _dense(LlamaConfig, LlamaForCausalLM, _llama),
    "qwen2": _dense(Qwen2Config, Qwen2ForCausalLM, _qwen2),
    "qwen3": _dense(Qwen3Config, Qwen3ForCausalLM, _qwen3),
    "qwen3_moe": _usual(Qwen3MoeConfig, Qwen3MoeForCausalLM, _qwen3_moe),
    "qwen2_moe": _usual(Qwen2MoeConfig, Qwen2MoeForCausalLM, _qwen2_moe),
    "mixtral": _usual(MixtralConfig, MixtralForCausalLM, _mixtral),
    "olmoe": _usual(OlmoeConfig, OlmoeForCausalLM, _olmoe),
    "deepseek_v2": _usual(DeepseekV2Config, DeepseekV2ForCausalLM, _deepseek_v2),
    "glm4_moe": _usual(Glm4MoeConfig, Glm4MoeForCausalLM, _glm4_moe),
    "deepseek_v3": _usual(DeepseekV3Config, DeepseekV3ForCausalLM, _deepseek_v3),
    "glm4_moe_lite": _usual(Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM, _glm4_moe_lite),
    "minimax_m2": _usual(MiniMaxM2Config, MiniMaxM2ForCausalLM, _minimax_m2),
    "lfm2": _dense(Lfm2Config, Lfm2ForCausalLM, _lfm2),
    "lfm2_moe": _usual(Lfm2MoeConfig, Lfm2MoeForCausalLM, _lfm2_moe),
    "qwen3_5_moe": _usual(Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, _hybrid_moe),
    "qwen3_5": _dense(Qwen3_5TextConfig, Qwen3_5ForCausalLM, _hybrid),
    "qwen3_next": _usual(Qwen3NextConfig, Qwen3NextForCausalLM, _qwen3_next),
    "gpt_oss": Transformers(
        GptOssConfig,
        GptOssForCausalLM,
        _with_common(_gpt_oss),
        _store_gpt_oss,
        causal_logits,
        _pack_experts,
    ),
    "bailing_moe_v2": Ling(),
    "llada": Transformers(
        LlamaConfig, LlamaForCausalLM, common, _store_llada, bidirectional_logits
    ),
    "llada_moe": Transformers(
        Qwen3MoeConfig, Qwen3MoeForCausalLM, _llada_moe, _store_llada_moe, bidirectional_logits
    ),
    "dream": Transformers(Qwen2Config, Qwen2ForCausalLM, common, _store_dream, _dream_logits),
}

NAMES = tuple(FAMILIES)
MASKED = ("llada", "llada_moe", "dream")
DENSE = ("llama", "qwen2", "qwen3", "qwen3_5", "lfm2", "llada", "dream")
"""Families without experts."""

CAUSAL = tuple(name for name in NAMES if name not in MASKED)

RECURRENT = ("qwen3_5_moe", "qwen3_5", "qwen3_next")
"""Families whose sequences have states: transformers' own logits differ by up to 4e-4 here between
a text at once and row by row."""
