"""Tiny random models in the widths of packed blocks, and whether a file is such a model."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from checkpoint_files import ling_config
from family_models import FAMILIES, random_weight, randomise
from torch import Tensor

from lowtide import SamplingParams
from lowtide.families import read_config
from lowtide.llm import LLM
from lowtide.schemas import model_schema

TOLERANCE = 2e-4
WIDTH = 256  # a block of the K types

_ALL_SPARSE = {"mlp_only_layers": [], "decoder_sparse_step": 1}

SIZES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {
        "moe_intermediate_size": WIDTH,
        "num_experts": 6,
        "norm_topk_prob": True,
        **_ALL_SPARSE,
    },
    "olmoe": {"num_experts": 6, "norm_topk_prob": False},
    "qwen2_moe": {
        "moe_intermediate_size": WIDTH,
        "num_experts": 6,
        "norm_topk_prob": False,
        **_ALL_SPARSE,
    },
    "mixtral": {"num_local_experts": 6, "head_dim": None},
    "deepseek_v2": {"moe_intermediate_size": WIDTH, "n_shared_experts": 1},
    "glm4_moe": {"moe_intermediate_size": WIDTH, "n_shared_experts": 1},
    "deepseek_v3": {"moe_intermediate_size": WIDTH, "rope_interleave": True},
    "glm4_moe_lite": {"moe_intermediate_size": WIDTH, "rope_interleave": True},
    "minimax_m2": {"num_local_experts": 6},
    "lfm2": {"block_auto_adjust_ff_dim": False},
    "lfm2_moe": {
        "moe_intermediate_size": WIDTH,
        "num_experts": 6,
        "tie_word_embeddings": True,
        # What llama.cpp takes for granted.
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "use_expert_bias": True,
    },
    "gpt_oss": {"num_local_experts": 6, "layer_types": None},
}


def named_model(name: str) -> torch.nn.Module:
    """Of a file in llama_files: FAMILY-SEED-MIXTURE, or with -WIDTH, that of its experts."""
    family, seed, _, *width = name.split("-")
    sizes = {"moe_intermediate_size": int(width[0])} if width else {}
    return random_model(family, int(seed), **sizes)


def random_model(family: str, seed: int, **others: Any) -> torch.nn.Module:
    """In float32, with 256 inputs of most matrices. others: values of transformers' config."""
    rng = random.Random(f"{family} {seed}")
    torch.manual_seed(seed)
    row = FAMILIES[family]
    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "eos_token_id": None}
    values = {**row.values(rng), **sizes, **SIZES[family], **others}
    if "mlp_layer_types" in values:  # files tell only how many layers are dense, which come first
        values["mlp_layer_types"].sort()
    if family == "gpt_oss" and "truncate" in values["rope_parameters"]:
        values["rope_parameters"]["truncate"] = False
    model = row.model_class(row.config_class(**values))
    randomise(model)
    return model.float().eval()


def check(path: Path, model: torch.nn.Module, **options: Any) -> None:
    """Logits of a prompt, and greedy words as far as no tie is near."""
    prompt = [random.Random(5).randrange(97) for _ in range(40)]
    with LLM(path, context=256, dtype="float32", **options) as llm:
        ours = llm.logits(prompt)
        params = SamplingParams(max_tokens=64, ignore_eos=True)
        words = llm.generate(prompt, params)[0].token_ids
    with torch.inference_mode():
        theirs = model(torch.tensor([prompt])).logits[0]
        read = model(torch.tensor([prompt + words])).logits[0, len(prompt) - 1 : -1]
    assert (ours - theirs).abs().max() <= TOLERANCE * theirs.abs().max()
    chosen = read[torch.arange(len(words)), torch.tensor(words)]
    assert (chosen >= read.max(-1).values - TOLERANCE * read.abs().max()).all()


def small_ling() -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and random weights of a Ling 2.0, which transformers does not have."""
    config = ling_config(
        architectures=["BailingMoeV2ForCausalLM"],
        num_hidden_layers=3,
        hidden_size=WIDTH,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rotary_dim=8,
        intermediate_size=WIDTH,
        moe_intermediate_size=WIDTH,
        num_experts=8,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        vocab_size=97,
        pad_token_id=None,
        max_position_embeddings=256,
        torch_dtype="float32",
    )
    schema = model_schema(read_config(config))
    torch.manual_seed(3)
    specs = [*schema.dense, *(s for n in schema.moe_layers for s in schema.expert_specs(n))]
    return config, {spec.name: random_weight(spec.name, spec.shape) for spec in specs}
