"""`LLM.logits` against transformers' implementation on random configurations."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import LAYOUTS, in_layout, ling_config, write_arrays
from common.glm4 import block_causal_mask
from examples import scaled
from oracle import make_oracle
from torch import Tensor
from transformers import Glm4MoeForCausalLM
from whole import Setting, check_idle

from lowtide import DiffusionParams, SamplingParams
from lowtide.errors import UsageError
from lowtide.families import read_config
from lowtide.schemas import model_schema

TOLERANCE = 2e-4
SETTINGS = [Setting("tide", 0.0), Setting("lru", 0.4), Setting("resident", 1.0)]
Weights = dict[str, Tensor]


def random_config(seed: int) -> dict[str, Any]:
    """A small body of any proportions that the family allows."""
    pick = random.Random(seed)
    kv_heads, head_dim = pick.choice([1, 2, 3]), pick.choice([8, 12, 16])
    num_groups = pick.choice([1, 1, 2, 4])
    per_group = pick.choice([2, 3, 5, 8])
    kept = pick.randint(1, num_groups)
    num_layers = pick.choice([2, 3, 4])
    rotary_dim = pick.choice([head_dim // 4 * 2, head_dim])
    return ling_config(
        num_hidden_layers=num_layers,
        first_k_dense_replace=pick.randint(0, num_layers - 1),
        hidden_size=pick.choice([24, 40, 64]),
        num_attention_heads=kv_heads * pick.choice([1, 2, 3]),
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        partial_rotary_factor=rotary_dim / head_dim,
        rope_theta=pick.choice([1e4, 6e5]),
        intermediate_size=pick.choice([20, 72]),
        moe_intermediate_size=pick.choice([8, 20, 36]),
        num_experts=num_groups * per_group,
        num_experts_per_tok=pick.randint(1, min(6, kept * per_group)),
        num_shared_experts=pick.choice([0, 1, 1, 2, 3]),
        n_group=num_groups,
        topk_group=kept,
        norm_topk_prob=pick.random() < 0.7,
        routed_scaling_factor=pick.choice([1.0, 2.5]),
        moe_router_enable_expert_bias=pick.random() < 0.8,
        use_qk_norm=pick.random() < 0.8,
        tie_word_embeddings=pick.random() < 0.3,
        vocab_size=pick.choice([50, 96]),
        mask_token_id=49,
        eos_token_id=48,
        pad_token_id=None,
        max_position_embeddings=96,
        torch_dtype="float32",
    )


def random_weights(config: Mapping[str, Any], seed: int) -> Weights:
    """Every tensor by its published name, float32, of sizes that keep activations near one."""
    schema = model_schema(read_config(config))
    generator = torch.Generator().manual_seed(seed)
    specs = [*schema.dense, *(s for layer in schema.moe_layers for s in schema.expert_specs(layer))]
    weights = {}
    for spec in specs:
        tensor = torch.randn(spec.shape, generator=generator)
        if spec.name.endswith("expert_bias"):
            # Not below zero: transformers leaves excluded experts a rank of 0, not of -infinity.
            tensor = tensor.abs().mul_(0.1)
        elif len(spec.shape) == 1:
            tensor = tensor.mul_(0.2).add_(1)
        elif "embeddings" not in spec.name:
            tensor = tensor.div_(spec.shape[1] ** 0.5)
        weights[spec.name] = tensor
    return weights


def moe_layers(config: Mapping[str, Any]) -> range:
    return range(config["first_k_dense_replace"], config["num_hidden_layers"])


def write_model(folder: Path, config: Mapping[str, Any], weights: Weights, layout: str) -> None:
    """Two shards of interleaved tensors and no index."""
    (folder / "config.json").write_text(json.dumps(config))
    arrays = {name: tensor.numpy() for name, tensor in weights.items()}
    stored = list(in_layout(arrays, layout).items())
    for i in range(2):
        write_arrays(folder / f"model-{i + 1:05}-of-00002.safetensors", dict(stored[i::2]))


def open_oracle(config: dict[str, Any], weights: Weights) -> Glm4MoeForCausalLM:
    """With what a checkpoint may leave out: a bias and shared experts of zeros, a tied head."""
    given = dict(weights)
    hidden, width = config["hidden_size"], config["moe_intermediate_size"]
    for layer in moe_layers(config):
        prefix = f"model.layers.{layer}.mlp."
        given.setdefault(prefix + "gate.expert_bias", torch.zeros(config["num_experts"]))
        if not config["num_shared_experts"]:
            for part, shape in (("gate", (width, hidden)), ("up", (width, hidden))):
                given[f"{prefix}shared_experts.{part}_proj.weight"] = torch.zeros(shape)
            given[prefix + "shared_experts.down_proj.weight"] = torch.zeros(hidden, width)
    given.setdefault("lm_head.weight", weights["model.word_embeddings.weight"])
    return make_oracle(config | {"num_shared_experts": max(1, config["num_shared_experts"])}, given)


def oracle_logits(oracle: Glm4MoeForCausalLM, token_ids: list[int], block_length: int) -> Tensor:
    mask = block_causal_mask(0, len(token_ids), block_length, torch.float32)
    with torch.inference_mode():
        return oracle(input_ids=torch.tensor([token_ids]), attention_mask=mask).logits[0]


@pytest.mark.parametrize("seed", range(scaled(30)))
def test_random_bodies(tmp_path: Path, seed: int) -> None:
    pick = random.Random(seed)
    config = random_config(seed)
    weights = random_weights(config, seed)
    layout = [*LAYOUTS, "Mixtral"][seed % 5]
    write_model(tmp_path, config, weights, layout)
    block_length = pick.choice([1, 3, 8, 32])
    token_ids = [pick.randrange(config["vocab_size"]) for _ in range(pick.randint(1, 70))]
    expected = oracle_logits(open_oracle(config, weights), token_ids, block_length)
    with SETTINGS[seed % 3].open(tmp_path, block_length=block_length) as llm:
        for _ in range(2):  # cold, then with what the policy has kept
            torch.testing.assert_close(llm.logits(token_ids), expected, atol=TOLERANCE, rtol=0)
        check_idle(llm)


@pytest.mark.parametrize("architecture", ["LLaDA2MoeModelLM", "BailingMoeV2ForCausalLM"])
def test_more_rows_than_one_pass_holds(tmp_path: Path, architecture: str) -> None:
    """1,100 tokens in passes of at most 512; causal where the family is."""
    config = random_config(3)
    config |= {"architectures": [architecture], "max_position_embeddings": 1200}
    weights = random_weights(config, 3)
    write_model(tmp_path, config, weights, "per expert")
    token_ids = [random.Random(i).randrange(config["vocab_size"]) for i in range(1100)]
    is_causal = architecture.startswith("Bailing")
    expected = oracle_logits(open_oracle(config, weights), token_ids, 1 if is_causal else 24)
    with Setting("tide", 0.2).open(tmp_path, block_length=None if is_causal else 24) as llm:
        torch.testing.assert_close(llm.logits(token_ids), expected, atol=TOLERANCE, rtol=0)


class BlockRouting(torch.nn.Module):
    """LLaDA2.2's router, in the place of the oracle's: one sequence from position 0 on.

    rank[window, e] is the greatest of sigmoid + bias over the window's tokens; its `capacity`
    best experts may be chosen in it, weighted by the sigmoid alone, normalised and scaled.
    """

    def __init__(self, gate: torch.nn.Module, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.gate = gate
        self.config = config

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        router_logits = hidden.reshape(-1, hidden.shape[-1]).float() @ self.gate.weight.T
        scores = router_logits.sigmoid()
        rank = scores + self.gate.e_score_correction_bias
        chosen = []
        for window in rank.split(config["block_size"]):
            order = window.max(0).values.argsort(descending=True)
            barred = order[config["expert_capacity"] :]
            limited = window.clone()
            limited[:, barred] = -torch.inf
            chosen.append(limited.argsort(descending=True)[:, : config["num_experts_per_tok"]])
        ids = torch.cat(chosen)
        weights = scores.gather(1, ids)
        weights = weights / weights.sum(-1, keepdim=True) * config["routed_scaling_factor"]
        return router_logits, weights, ids


@pytest.mark.parametrize("seed", range(scaled(8)))
def test_block_routing(tmp_path: Path, seed: int) -> None:
    pick = random.Random(1000 + seed)
    num_experts, k = pick.choice([6, 12, 20]), pick.randint(1, 3)
    window = pick.choice([4, 8])
    config = random_config(100 + seed) | {
        "num_experts": num_experts,
        "num_experts_per_tok": k,
        "expert_capacity": pick.randint(k, num_experts),
        "block_size": window,
        "n_group": 8,  # still written there, and without a meaning
        "topk_group": 4,
        "norm_topk_prob": True,
        "moe_router_enable_expert_bias": True,
    }
    weights = random_weights(config, seed)
    write_model(tmp_path, config, weights, "per expert")
    oracle = open_oracle(config | {"n_group": 1, "topk_group": 1}, weights)
    for layer in moe_layers(config):
        mlp = oracle.model.layers[layer].mlp
        mlp.gate = BlockRouting(mlp.gate, config)
    block_length = window * pick.choice([1, 2])
    token_ids = [pick.randrange(config["vocab_size"]) for _ in range(pick.randint(1, 90))]
    expected = oracle_logits(oracle, token_ids, block_length)
    with SETTINGS[seed % 3].open(tmp_path, block_length=block_length) as llm:
        torch.testing.assert_close(llm.logits(token_ids), expected, atol=TOLERANCE, rtol=0)


def test_blocks_that_would_cut_a_routing_window_are_refused(tmp_path: Path) -> None:
    config = random_config(5) | {"num_experts": 6, "num_experts_per_tok": 2}
    config |= {"expert_capacity": 4, "block_size": 8}
    write_model(tmp_path, config, random_weights(config, 5), "per expert")
    with SETTINGS[0].open(tmp_path, block_length=12) as llm:
        with pytest.raises(UsageError, match="windows of 8 tokens.*not 12"):
            llm.logits([1, 2, 3])
        params = SamplingParams(max_tokens=4, diffusion=DiffusionParams(block_length=12))
        with pytest.raises(UsageError, match="windows of 8 tokens.*not 12"):
            llm.generate([1, 2, 3], params)
