"""A family is one place: this file alone makes one up, and all of lowtide knows it.

Attention with wide query norms, softmax routing and a shared expert behind no gate; its
`config.json` calls the experts toys.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lowtide.config import ExpertSpec, ModelConfig, Published, keys
from lowtide.config.fields import MAX_EXPERTS, Fields
from lowtide.config.keys import Origin
from lowtide.errors import ConfigError
from lowtide.families import Family, SynthSize, families, read_config, register, unregister
from lowtide.kernels.operands import HeadNorms
from lowtide.layers.linear import GatedMLP
from lowtide.layers.router import SoftmaxRouter
from lowtide.layers.self_attention import GroupedAttention
from lowtide.llm import LLM, plan_model
from lowtide.model_writing.synth import synth
from lowtide.models.decoder import Decoder
from lowtide.params import SamplingParams
from lowtide.schemas import ModelSchema, TensorSpec
from lowtide.schemas.parts import decoder, mlp, router, separate_qkv, vector

CONFIG = {
    "architectures": ["ToyForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "num_toys": 12,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "vocab_size": 320,
    "eos_token_id": 304,
}


def read(fields: Fields, origin: Origin) -> ModelConfig:
    size = keys.width(fields, "intermediate_size")
    num_toys = fields.integer("num_toys", low=0, high=MAX_EXPERTS)
    experts = None
    if num_toys:
        experts = ExpertSpec(
            num_experts=num_toys,
            num_experts_per_token=fields.integer("num_experts_per_tok", low=1, high=MAX_EXPERTS),
            expert_size=size,
            norm_topk_prob=True,
            first_layer=1,
            shared_size=size,
        )
    attention = keys.grouped_attention(fields, has_qk_norm=True)
    return keys.decoder(fields, origin, attention, experts, size)


def schema(config: ModelConfig) -> ModelSchema:
    return decoder(config, _attention, _moe)


def _attention(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    norms = {"q": config.attention.query_size, "k": config.attention.kv_size}
    vectors = [vector(f"{prefix}self_attn.{x}_norm.weight", size) for x, size in norms.items()]
    return [*separate_qkv(config, prefix), *vectors]


def _moe(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    shared = mlp(prefix + "mlp.shared_toy.", config.moe.shared_size, config.hidden_size)
    return [*router(config, prefix), *shared]


class Toy(Decoder):
    def attention(self, layer: int) -> GroupedAttention:
        prefix = f"model.layers.{layer}.self_attn."
        return GroupedAttention(
            layer,
            self.config,
            self.separate_qkv(layer),
            self.linear(prefix + "o_proj"),
            HeadNorms(*(self.weights[f"{prefix}{part}_norm.weight"] for part in "qk")),
            self.kv_cache,
            self.compute,
        )

    def router(self, layer: int) -> SoftmaxRouter:
        return SoftmaxRouter(
            self.compute,
            weight=self.weights[f"model.layers.{layer}.mlp.gate.weight"],
            num_experts_per_token=self.config.moe.num_experts_per_token,
            normalise=True,
        )

    def shared_expert(self, layer: int) -> tuple[GatedMLP | None, Tensor | None]:
        return self.mlp(f"model.layers.{layer}.mlp.shared_toy."), None


FAMILY = Family(
    name="toy",
    architectures=("ToyForCausalLM",),
    published=Published(eos_token_ids=(304,)),
    read=read,
    schema=schema,
    decoder=f"{__name__}:Toy",
    own_sizes={"tiny": SynthSize(CONFIG, 304, 1 << 20)},
)


@pytest.fixture(autouse=True)
def toy() -> Iterator[None]:
    register(FAMILY)
    yield
    unregister("toy")


def write_config(folder: Path, **changes: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return folder


def test_a_toy_family_is_planned_made_loaded_and_run(tmp_path: Path) -> None:
    folder = synth("toy", "tiny", tmp_path / "toy")
    plan = plan_model(folder, context=128)
    assert plan_model(write_config(tmp_path / "bare"), context=128) == plan
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    prompt = list(range(1, 30))
    answers, logits, num_misses = [], [], []
    for budget, policy in ((plan.minimum_bytes, "lru"), (plan.full_bytes, "resident")):
        with LLM(folder, context=128, host_memory=budget, policy=policy) as llm:
            answers.append(llm.generate(prompt, params)[0].token_ids)
            logits.append(llm.logits(prompt))
            num_misses.append(llm.stats()["num_misses"])
    assert len(answers[0]) == 24 and answers[0] == answers[1]
    assert torch.equal(*logits) and logits[0].std() > 0.1
    assert num_misses[0] > num_misses[1]


def test_a_toy_family_comes_and_goes() -> None:
    assert read_config(CONFIG).family == "toy" and "toy" in families()
    with pytest.raises(ValueError, match="toy: toy is taken"):
        register(replace(FAMILY, architectures=("ToyLM",)))
    with pytest.raises(ValueError, match="other: ToyForCausalLM is taken"):
        register(replace(FAMILY, name="other"))
    unregister("toy")
    with pytest.raises(ConfigError, match="'ToyForCausalLM' is not supported"):
        read_config(CONFIG)
    register(FAMILY)
