"""A family whose layers are of several kinds, made up in this file, beside the same in plain torch.

Windows and full attention with heads of two widths and rotations of their own, layers of one part,
dense MLPs, experts, both; norms of four kinds; and a layer that is the family's own.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from whole import check_second_turn

from lowtide.config import (
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    ModelConfig,
    Multipliers,
    Published,
    Rope,
    SideBySide,
    keys,
)
from lowtide.config.fields import Fields
from lowtide.config.keys import Origin
from lowtide.families import Family, SynthSize, read_config, register, unregister
from lowtide.kernels.operands import HeadNorms
from lowtide.layers.batch import Batch
from lowtide.layers.few_rows import ShortPass
from lowtide.layers.rotary import Rotations
from lowtide.layers.rows import in_chunks
from lowtide.layers.self_attention import GroupedAttention
from lowtide.llm import LLM, plan_model
from lowtide.model_writing.synth import synth
from lowtide.models.decoder import Block, Decoder
from lowtide.params import SamplingParams
from lowtide.schemas import ModelSchema, TensorSpec
from lowtide.schemas.parts import decoder, normed_qkv, router, vector

HIDDEN, EPS = 64, 1e-6
MULTIPLIERS = Multipliers(embedding=8.0, residual=0.5, logits=0.25, logit_cap=3.0)
KINDS = ("window", "full", "both", "own", "mixer", "mlp")
CONFIG = {
    "architectures": ["MixedForCausalLM"],
    "hidden_size": HIDDEN,
    "kinds": ["window", "full", "both", "own", "mixer", "mlp", "own", "window", "mlp", "full"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "rms_norm_eps": EPS,
    "max_position_embeddings": 2048,
    "vocab_size": 320,
    "eos_token_id": 304,
    "dtype": "float32",
}
NORMS = ("post_attention", "pre_dense", "post_dense", "post_experts", "post_mlp")


ACTS = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


def read(fields: Fields, origin: Origin) -> ModelConfig:
    activation = fields.text("activation", default="silu")
    experts = keys.experts(fields, 24, norm_topk_prob=True, activation=activation)
    dense = DenseSpec(40, activation)
    slow, fast = Rope(1e4, 16), Rope(1e6, 8)
    narrow = AttentionSpec(4, 2, 16, slow, has_qk_norm=True, window=7)
    wide = AttentionSpec(3, 1, 32, fast, scale=1.0, has_value_norm=True, has_gate=True)
    placeless = AttentionSpec(2, 2, 24, None, has_qk_norm=True)
    layers = {
        "window": LayerSpec(narrow, dense),
        "full": LayerSpec(wide, experts),
        "both": LayerSpec(narrow, SideBySide(dense, experts)),
        "own": LayerSpec(wide, SideBySide(DenseSpec(56, activation), experts)),
        "mixer": LayerSpec(placeless, None),
        "mlp": LayerSpec(None, experts),
    }
    kinds: Any = fields.raw("kinds")
    chosen = [layers[kind] for kind in kinds]
    return keys.layered(fields, origin, chosen, multipliers=MULTIPLIERS)


def schema(config: ModelConfig) -> ModelSchema:
    return decoder(config, _attention, router)


def _attention(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    spec, [layer] = config.attention, config.layers
    specs = normed_qkv(config, prefix)
    if spec.has_gate:
        specs.append(TensorSpec(f"{prefix}self_attn.gate.weight", (spec.query_size, HIDDEN)))
    if is_own(layer):
        specs += [vector(f"{prefix}{name}.weight", HIDDEN) for name in NORMS]
        specs.append(vector(f"{prefix}scale", 1))
    return specs


def is_own(layer: LayerSpec) -> bool:
    return layer.dense is not None and layer.dense.size == 56


class Mixed(Decoder):
    @staticmethod
    def is_float32(name: str) -> bool:
        return name.endswith(("norm.weight", "layernorm.weight"))

    @staticmethod
    def adjust(name: str, weight: Tensor) -> None:
        if name.endswith("input_layernorm.weight"):
            weight.add_(1.0)

    def block(self, layer: int) -> Block:
        return Own(self, layer) if is_own(self.config.layers[layer]) else super().block(layer)

    def attention(self, layer: int) -> GroupedAttention:
        spec, prefix = self.config.mixer(AttentionSpec, layer), f"model.layers.{layer}."
        norms, gate, post_norm = None, None, None
        if spec.has_qk_norm:
            names = (f"{prefix}self_attn.{x}_norm.weight" for x in "qk")
            norms = HeadNorms(*map(self.tensor, names))
        if spec.has_gate:
            gate = self.linear(f"{prefix}self_attn.gate")
        if is_own(self.config.layers[layer]):
            post_norm = self.norm(f"{prefix}post_attention.weight")
        return GroupedAttention(
            layer,
            self.config,
            self.separate_qkv(layer),
            self.linear(f"{prefix}self_attn.o_proj"),
            norms,
            self.kv_cache,
            self.compute,
            gate=gate,
            post_norm=post_norm,
        )


class Own(Block):
    """Post-norms, and two MLPs on differently normed inputs; routed by what is not normed."""

    def __init__(self, model: Mixed, layer: int) -> None:
        prefix = f"model.layers.{layer}."
        self.attention, self.moe = model.attention(layer), model.moe(layer)
        self.mlp = model.dense_mlp(layer)
        self.input_norm = model.norm(f"{prefix}input_layernorm.weight")
        self.experts_norm = model.norm(f"{prefix}post_attention_layernorm.weight")
        names = (f"{prefix}{name}.weight" for name in NORMS[1:])
        self.dense_norm, self.after_dense, self.after_experts, self.after = map(model.norm, names)
        self.scale = model.tensor(f"{prefix}scale")
        self.workspace = model.compute.workspace

    def forward(
        self, x: Tensor, batch: Batch, rotations: Rotations, short: ShortPass | None
    ) -> None:
        with self.workspace.scope():
            self.attention.forward(x, self.input_norm, batch, rotations)
        with self.workspace.scope():
            dense = self.dense_norm.of(x)
            in_chunks("mlp", self.workspace, self.mlp.forward, dense, dense)
            self.after_dense.apply(dense)
            routed = self.experts_norm.of(x)
            self.moe.forward(routed, batch, routed, router_input=x)
            self.after_experts.apply(routed)
            self.after.apply(dense.add_(routed))
            x.add_(dense).mul_(self.scale)


FAMILY = Family(
    name="mixed",
    architectures=("MixedForCausalLM",),
    published=Published(eos_token_ids=(304,)),
    read=read,
    schema=schema,
    decoder=f"{__name__}:Mixed",
    own_sizes={"tiny": SynthSize(CONFIG, 304, 1 << 20)},
)


@pytest.fixture(autouse=True)
def mixed() -> Iterator[None]:
    register(FAMILY)
    yield
    unregister("mixed")


class Oracle:
    """The whole sequence at once, in plain torch and float32."""

    def __init__(self, folder: Path, kinds: list[str], activation: str = "silu") -> None:
        self.kinds, self.activation = kinds, activation
        self.weights: dict[str, Tensor] = {}
        for path in folder.glob("*.safetensors"):
            self.weights |= {name: x.float() for name, x in load_file(path).items()}

    def logits(self, token_ids: list[int]) -> Tensor:
        w = self.weights
        x = 8.0 * w["model.embed_tokens.weight"][token_ids]
        for layer, kind in enumerate(self.kinds):
            x = self.layer(x, kind, f"model.layers.{layer}.")
        logits = 0.25 * (rms(x, w["model.norm.weight"]) @ w["lm_head.weight"].T)
        return 3.0 * torch.tanh(logits / 3.0)

    def layer(self, x: Tensor, kind: str, prefix: str) -> Tensor:
        w = {name.removeprefix(prefix): v for name, v in self.weights.items() if prefix in name}
        if kind != "mlp":
            normed = rms(x, 1 + w["input_layernorm.weight"])
            update = attention(normed, w, kind)
            if kind == "own":
                update = rms(update, w["post_attention.weight"])
            x = x + 0.5 * update
        if kind == "mixer":
            return x
        normed = rms(x, w["post_attention_layernorm.weight"])
        if kind == "own":
            dense = self.mlp(rms(x, w["pre_dense.weight"]), w, "mlp.")
            dense = rms(dense, w["post_dense.weight"])
            routed = rms(self.experts(normed, x, w), w["post_experts.weight"])
            return (x + rms(dense + routed, w["post_mlp.weight"])) * w["scale"]
        update = torch.zeros_like(x)
        if kind in ("window", "both"):
            update += self.mlp(normed, w, "mlp.")
        if kind != "window":
            update += self.experts(normed, normed, w)
        return x + 0.5 * update

    def mlp(self, x: Tensor, w: dict[str, Tensor], prefix: str) -> Tensor:
        up, down = (w[f"{prefix}{name}_proj.weight"] for name in ("up", "down"))
        if self.activation == "relu2":
            return F.relu(x @ up.T).square() @ down.T
        gate = ACTS[self.activation](x @ w[f"{prefix}gate_proj.weight"].T)
        return (gate * (x @ up.T)) @ down.T

    def experts(self, x: Tensor, router_input: Tensor, w: dict[str, Tensor]) -> Tensor:
        chances = (router_input @ w["mlp.gate.weight"].T).softmax(-1)
        weights, chosen = chances.topk(2)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for row, (own, ids) in enumerate(zip(weights, chosen.tolist(), strict=True)):
            for weight, expert in zip(own, ids, strict=True):
                out[row] += weight * self.mlp(x[row], w, f"mlp.experts.{expert}.")
        return out


def rms(x: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))


def attention(x: Tensor, w: dict[str, Tensor], kind: str) -> Tensor:
    heads, kv_heads, dim = {"window": (4, 2, 16), "both": (4, 2, 16), "mixer": (2, 2, 24)}.get(
        kind, (3, 1, 32)
    )
    num_rows = len(x)
    query, key, value = (
        (x @ w[f"self_attn.{name}_proj.weight"].T).view(num_rows, -1, dim) for name in "qkv"
    )
    if dim != 32:
        query, key = (
            rms(y, w[f"self_attn.{name}_norm.weight"]) for name, y in (("q", query), ("k", key))
        )
    else:
        value = rms(value)
    if dim != 24:
        theta, rotary_dim = (1e4, 16) if dim == 16 else (1e6, 8)
        query, key = (rotated(y, theta, rotary_dim) for y in (query, key))
    key, value = (y.repeat_interleave(heads // kv_heads, 1) for y in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * (1.0 if dim == 32 else dim**-0.5)
    distance = torch.arange(num_rows)[:, None] - torch.arange(num_rows)
    is_seen = (distance >= 0) & (distance < (7 if dim == 16 else num_rows))
    chances = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
    attended = torch.einsum("hqk,khd->qhd", chances, value).reshape(num_rows, -1)
    if dim == 32:
        attended = attended * (x @ w["self_attn.gate.weight"].T).sigmoid()
    return attended @ w["self_attn.o_proj.weight"].T


def rotated(x: Tensor, theta: float, rotary_dim: int) -> Tensor:
    half = rotary_dim // 2
    angles = torch.arange(len(x))[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second, rest = x.split([half, half, x.shape[-1] - rotary_dim], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def config_of(seed: int, activation: str) -> dict[str, Any]:
    """Every kind twice, in an order of its own; the second may be a long way behind the first."""
    kinds, names = [*KINDS, *KINDS], {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}
    random.Random(seed).shuffle(kinds)
    hidden_act = names.get(activation, activation)
    return {**CONFIG, "kinds": kinds, "activation": activation, "hidden_act": hidden_act}


@pytest.mark.parametrize(("seed", "activation"), [(0, "silu"), (1, "gelu_tanh"), (2, "relu2")])
def test_layers_of_several_kinds_are_those_of_plain_torch(
    tmp_path: Path, seed: int, activation: str
) -> None:
    config, rng = config_of(seed, activation), random.Random(seed)
    unregister("mixed")
    sizes = {"tiny": SynthSize(config, 304, 1 << 20)}
    register(Family(**{**{f: getattr(FAMILY, f) for f in FAMILY.__slots__}, "own_sizes": sizes}))
    folder = synth("mixed", "tiny", tmp_path / "mixed")
    oracle, plan = Oracle(folder, config["kinds"], activation), plan_model(folder, context=2048)
    prompts = [[rng.randrange(300) for _ in range(length)] for length in (5, 29, 90)]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    budgets = {plan.minimum_bytes, rng.randint(plan.minimum_bytes, plan.full_bytes)}
    alone: list[list[int]] = []
    for budget in sorted(budgets):
        with LLM(folder, context=2048, host_memory=budget) as llm:
            for prompt in prompts:
                found, wanted = llm.logits(prompt), oracle.logits(prompt)
                assert found.std() > 0.1
                torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)
            together = [answer.token_ids for answer in llm.generate(prompts, params)]
            single = [llm.generate([prompt], params)[0].token_ids for prompt in prompts]
        assert together == single == (alone or single)
        alone = single
    for prompt, answer in zip(prompts, alone, strict=True):
        logits = oracle.logits([*prompt, *answer])[len(prompt) - 1 : -1]
        best = logits.topk(2).values
        is_clear = best[:, 0] - best[:, 1] > 1e-4
        assert torch.equal(logits.argmax(-1)[is_clear], torch.tensor(answer)[is_clear])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_second_turn_in_little_memory_keeps_every_shape(tmp_path: Path, dtype: str) -> None:
    folder = synth("mixed", "tiny", tmp_path / "mixed")
    budget = plan_model(folder, context=1024, dtype=dtype).minimum_bytes
    check_second_turn(folder, tmp_path / "kept", dtype, budget)


def test_a_plan_counts_the_keys_of_each_layer(tmp_path: Path) -> None:
    config = read_config(CONFIG)
    mixers = [layer.mixer for layer in config.layers if layer.mixer is not None]
    elements = [2 * mixer.num_kv_heads * mixer.head_dim for mixer in mixers]
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text(json.dumps(CONFIG))
    # No context is as long as a window and a pass, so that all layers keep all tokens.
    plans = [plan_model(tmp_path / "bare", context=context) for context in (256, 512)]
    grown = plans[1].host.kv_cache_bytes - plans[0].host.kv_cache_bytes
    assert grown == 256 * 4 * sum(elements)
    assert config.num_leading_layers == 6 and len(config.ropes) == 2
