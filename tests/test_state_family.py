"""A family whose layers keep states, made up in this file, as whole models beside plain torch.

Its mixer has the states of a gated delta-net and a simpler rule: values behind a short
convolution are gathered in matrices that decay. A wrong cut, or a pass that counts twice, shows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_layer_kinds import attention, rms
from torch import Tensor

from lowtide.cli.outlook import conversation_note
from lowtide.config import (
    AttentionSpec,
    Causal,
    DeltaNetSpec,
    DenseSpec,
    ExpertSpec,
    LayerSpec,
    ModelConfig,
    Published,
    Rope,
    ShortConvSpec,
    format_size,
    keys,
)
from lowtide.config.decoding import Blocks
from lowtide.config.fields import Fields
from lowtide.config.keys import Origin
from lowtide.errors import PlanError, UnsupportedError
from lowtide.families import Family, SynthSize, read_config, register, unregister
from lowtide.layers.batch import Batch
from lowtide.layers.linear import Linear
from lowtide.layers.norm import Norm
from lowtide.layers.rotary import Rotations
from lowtide.llm import LLM, plan_model
from lowtide.model_writing.synth import synth
from lowtide.models.decoder import Attention, Decoder
from lowtide.params import SamplingParams
from lowtide.schemas import ModelSchema, TensorSpec
from lowtide.schemas.parts import decoder, normed_qkv, router

HIDDEN, DECAY = 64, 0.9
SPEC = DeltaNetSpec(key_heads=2, value_heads=4, key_width=8, value_width=16, kernel=4)
ATTENTION = AttentionSpec(4, 2, 16, Rope(1e4, 16), has_qk_norm=True, window=7)
EXPERTS = ExpertSpec(6, 2, 24, norm_topk_prob=True)
CONFIG = {
    "architectures": ["GatheringForCausalLM"],
    "hidden_size": HIDDEN,
    "mixers": ["states", "attention", "states", "states", "attention"],
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "vocab_size": 320,
    "eos_token_id": 304,
    "dtype": "float32",
}


def read(fields: Fields, origin: Origin) -> ModelConfig:
    mixers: Any = fields.raw("mixers")
    layers = [
        LayerSpec(ATTENTION if mixer == "attention" else SPEC, EXPERTS if n else DenseSpec(40))
        for n, mixer in enumerate(mixers)
    ]
    return keys.layered(fields, origin, layers)


def schema(config: ModelConfig) -> ModelSchema:
    return decoder(config, _mixer, router)


def _mixer(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    if isinstance(config.layers[0].mixer, AttentionSpec):
        return normed_qkv(config, prefix)
    sizes = {"in": (SPEC.channels, HIDDEN), "out": (HIDDEN, SPEC.value_size)}
    return [TensorSpec(f"{prefix}mixer.{name}.weight", size) for name, size in sizes.items()]


class Gathering(Decoder):
    def attention(self, layer: int) -> Attention:
        if isinstance(self.config.layers[layer].mixer, AttentionSpec):
            return super().attention(layer)
        prefix = f"model.layers.{layer}.mixer."
        return Mixer(self, layer, self.linear(f"{prefix}in"), self.linear(f"{prefix}out"))


class Mixer:
    def __init__(self, model: Decoder, layer: int, inner: Linear, outer: Linear) -> None:
        self._layer, self._inner, self._outer = layer, inner, outer
        self._cache, self._workspace = model.kv_cache, model.compute.workspace

    def parts(self, norm: Norm) -> None:
        return None

    def forward(self, x: Tensor, norm: Norm, batch: Batch, rotations: Rotations) -> None:
        workspace = self._workspace
        mixed = workspace.take("mixed", (len(x), SPEC.channels), x.dtype)
        gathered = workspace.take("gathered", (len(x), SPEC.value_size), x.dtype)
        with workspace.scope():
            self._inner.forward(norm.of(x), mixed)
        for segment in batch.segments:
            before, after = self._cache.states(self._layer, segment.kv)
            if not x.is_meta:
                rows = slice(segment.start, segment.stop)
                gathered[rows] = gather(mixed[rows], before, after)
        update = workspace.take("update", tuple(x.shape), x.dtype)
        self._outer.forward(gathered, update)
        x.add_(update)


def gather(mixed: Tensor, before: tuple[Tensor, ...], after: tuple[Tensor, ...]) -> Tensor:
    """Row by row: [rows, channels] to [rows, values]."""
    tail, matrices = before[0].clone(), before[1].clone()
    out = []
    for row in mixed:
        tail = torch.cat([tail, row[None]])
        convolved = (tail * torch.tensor([0.1, 0.2, 0.3, 0.4])[:, None].to(tail)).sum(0).float()
        tail = tail[1:]
        query, key, value = convolved.split([SPEC.key_size, SPEC.key_size, SPEC.value_size])
        query, key = (y.view(SPEC.key_heads, -1).repeat_interleave(2, 0) for y in (query, key))
        outer = key[:, :, None] * value.view(SPEC.value_heads, 1, -1)
        matrices = DECAY * matrices + outer
        out.append((query[:, :, None] * matrices).sum(1).flatten())
    after[0].copy_(tail)
    after[1].copy_(matrices)
    return torch.stack(out).to(mixed.dtype)


FAMILY = Family(
    name="gathering",
    architectures=("GatheringForCausalLM",),
    published=Published(eos_token_ids=(304,)),
    read=read,
    schema=schema,
    decoder=f"{__name__}:Gathering",
    own_sizes={"tiny": SynthSize(CONFIG, 304, 1 << 20)},
)


@pytest.fixture(autouse=True)
def gathering() -> Iterator[None]:
    register(FAMILY)
    yield
    unregister("gathering")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return synth("gathering", "tiny", tmp_path / "gathering")


class Oracle:
    """The whole sequence at once, in plain torch and float32."""

    def __init__(self, folder: Path) -> None:
        self.weights: dict[str, Tensor] = {}
        for path in folder.glob("*.safetensors"):
            self.weights |= {name: x.float() for name, x in load_file(path).items()}

    def logits(self, token_ids: list[int]) -> Tensor:
        w = self.weights
        x = w["model.embed_tokens.weight"][token_ids]
        for layer, kind in enumerate(CONFIG["mixers"]):
            prefix = f"model.layers.{layer}."
            own = {name.removeprefix(prefix): v for name, v in w.items() if prefix in name}
            normed = rms(x, own["input_layernorm.weight"])
            if kind == "attention":
                x = x + attention(normed, own, "window")
            else:
                zeros = tuple(torch.zeros(array.shape) for array in SPEC.states)
                gathered = gather(normed @ own["mixer.in.weight"].T, zeros, zeros)
                x = x + gathered @ own["mixer.out.weight"].T
            normed = rms(x, own["post_attention_layernorm.weight"])
            x = x + (self.experts(normed, own) if layer else mlp(normed, own, "mlp."))
        return rms(x, w["model.norm.weight"]) @ w["lm_head.weight"].T

    def experts(self, x: Tensor, w: dict[str, Tensor]) -> Tensor:
        weights, chosen = (x @ w["mlp.gate.weight"].T).softmax(-1).topk(2)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for row, (own, ids) in enumerate(zip(weights, chosen.tolist(), strict=True)):
            for weight, expert in zip(own, ids, strict=True):
                out[row] += weight * mlp(x[row], w, f"mlp.experts.{expert}.")
        return out


def mlp(x: Tensor, w: dict[str, Tensor], prefix: str) -> Tensor:
    gate, up, down = (w[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


PARAMS = SamplingParams(max_tokens=10, ignore_eos=True)


def is_choice(oracle: Oracle, prompt: list[int], answer: tuple[int, ...]) -> bool:
    """Return True if an answer is what plain torch chooses, where its choice is clear."""
    logits = oracle.logits([*prompt, *answer])[len(prompt) - 1 : -1]
    best = logits.topk(2).values
    is_clear = best[:, 0] - best[:, 1] > 1e-4
    return torch.equal(logits.argmax(-1)[is_clear], torch.tensor(answer)[is_clear])


def test_logits_and_answers_are_those_of_plain_torch(folder: Path) -> None:
    rng, oracle = Random(1), Oracle(folder)
    prompts = [[rng.randrange(300) for _ in range(length)] for length in (3, 29, 90, 600)]
    plan = plan_model(folder, context=2048)
    alone: list[tuple[int, ...]] = []
    for budget in (plan.minimum_bytes, plan.full_bytes):
        with LLM(folder, context=2048, host_memory=budget, cache="off") as llm:
            for prompt in prompts:
                found, wanted = llm.logits(prompt), oracle.logits(prompt)
                assert found.std() > 0.1
                torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
            together = [answer.token_ids for answer in llm.generate(prompts, PARAMS)]
            single = [llm.generate([prompt], PARAMS)[0].token_ids for prompt in prompts]
        assert together == single == (alone or single)
        alone = single
    with LLM(folder, context=2048, kv_cache=False) as llm:
        assert llm.generate(prompts[1], PARAMS)[0].token_ids == alone[1]
    for prompt, answer in zip(prompts, alone, strict=True):
        assert is_choice(oracle, prompt, answer)


@pytest.mark.parametrize("options", [{}, {"cache": "exact"}], ids=str)
def test_turns_go_on_in_memory_and_from_disk(
    folder: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    rng, oracle = Random(2), Oracle(folder)
    text = [rng.randrange(300) for _ in range(530)]
    plan = plan_model(folder, context=2048)
    options = {**options, "host_memory": plan.minimum_bytes, "cache_dir": tmp_path / "kept"}
    for turn in range(4):
        # Two turns in one model, then one each after it was opened again.
        with LLM(folder, context=2048, **options) as llm:
            for _ in range(2 if not turn else 1):
                [answer] = llm.generate([text], PARAMS)
                assert is_choice(oracle, text, answer.token_ids)
                resumed = answer.usage.cached_tokens
                text = [*text, *answer.token_ids, *(rng.randrange(300) for _ in range(9))]
        if turn:
            assert resumed == (512 if "cache" in options else len(text) - 29)


def test_a_plan_names_the_states(folder: Path) -> None:
    plans = [plan_model(folder, context=context) for context in (512, 1 << 15)]
    # Two arrays of three layers, in whole pages: the tail of three rows, and the matrices.
    slot_bytes = 4096 * -(-3 * 4 * (3 * 96 + 4 * 8 * 16) // 4096)
    num_slots = [plan.host.state_bytes // slot_bytes for plan in plans]
    assert num_slots == [max(8, plans[0].host.kv_cache_bytes // 2 // slot_bytes), 64]
    assert "\nstates " in repr(plans[0])
    told = [re.search(r"states of .*: (\d+) sequences run at once", plan.reason) for plan in plans]
    assert [int(found[1]) for found in told] == [count // 2 for count in num_slots]
    assert [plan.snapshot_bytes for plan in plans] == [slot_bytes] * 2
    size, both = format_size(slot_bytes), format_size(2 * slot_bytes)
    note = conversation_note(plans[1])
    assert f"{both} while it runs, and {size} for each snapshot" in note
    assert "32 run at once, or 64 snapshots are kept" in note and "context 32,768: " in note
    grown = plans[1].minimum_bytes - plans[0].minimum_bytes
    of_sequences = [plan.host.kv_cache_bytes + plan.host.state_bytes for plan in plans]
    assert grown >= of_sequences[1] - of_sequences[0]
    with pytest.raises(PlanError, match="KV cache of 512 tokens.*states.*workspace"):
        plan_model(folder, context=512, host_memory=plans[0].minimum_bytes - 1)


def test_states_are_of_models_that_write_in_order() -> None:
    config = read_config(CONFIG)
    assert config.has_states and isinstance(config.decoding, Causal)
    with pytest.raises(UnsupportedError, match="states of a sequence"):
        type(config)(
            **{
                **{name: getattr(config, name) for name in config.__slots__},
                "decoding": Blocks(mask_token_id=1),
            }
        )
    conv = ShortConvSpec(width=8, kernel=3)
    assert [array.shape for array in conv.states] == [(2, 8)]
    assert [array.dtype for array in SPEC.states] == [None, "float32"]
