"""Promises of every family in the table of `family_models.py`, against its oracle there.

Two minutes: each in several random models that two libraries load and run.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_files import LAYOUTS, read_array
from examples import scaled
from family_models import (
    CAUSAL,
    DENSE,
    NAMES,
    RECURRENT,
    logits,
    random_ids,
    store_experts_as,
    write_model,
)
from schema_sizes import kv_elements_of, num_parameters_of, num_tensors_of
from transformers import AutoModelForCausalLM

from lowtide.errors import CheckpointError, ConfigError, PlanError, UnsupportedError
from lowtide.families import families, read_config
from lowtide.llm import LLM, plan_model
from lowtide.memory.kv_cache import KVCache, KVRange
from lowtide.model_folder.checkpoint import Checkpoint
from lowtide.model_writing.synth import synth
from lowtide.model_writing.synth_weights import CHARACTER
from lowtide.params import SamplingParams
from lowtide.schemas import model_schema, weight_bytes

LENGTHS = (1, 700, 17, 40, 3, 60, 16, 200, 130, 90)
"""Tokens: one row, more than one pass or tile of rows (512), one tile of attention, several."""


@pytest.mark.parametrize("family", NAMES)
def test_logits_are_those_of_the_oracle(family: str, tmp_path: Path) -> None:
    for seed in range(scaled(20)):
        written = write_model(family, seed, tmp_path / str(seed))
        token_ids = random_ids(seed, LENGTHS[seed % len(LENGTHS)])
        plan = plan_model(written.folder, context=700)
        least_bytes, full_bytes = plan.minimum_bytes, plan.full_bytes
        ours = logits(written.folder, token_ids, context=700, host_memory=least_bytes)
        atol = 1e-3 if family in RECURRENT else 2e-4
        torch.testing.assert_close(ours, written.oracle(token_ids), atol=atol, rtol=0)
        if seed % 5 == 1:
            full = logits(written.folder, token_ids, context=700, host_memory=full_bytes)
            assert torch.equal(ours, full)


def yarn(**changes: Any) -> dict[str, Any]:
    return {
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, **changes},
    }


ORIGINAL = {"original_max_position_embeddings": 64}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}
WINDOWS = {"use_sliding_window": True, "sliding_window": 7}
KINDS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
GROUPS = {"topk_method": "group_limited_greedy", "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3_moe", {"hidden_size": 40, "num_attention_heads": 4, "head_dim": 24}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 4}),
        ("qwen3_moe", {"num_experts": 1, "num_experts_per_tok": 1}),
        ("qwen3_moe", {"num_hidden_layers": 6, "mlp_only_layers": [1], "decoder_sparse_step": 2}),
        ("qwen3_moe", {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 0}),
        ("qwen3_moe", {"rms_norm_eps": 1e-3}),
        ("qwen3_moe", yarn()),
        ("qwen3_moe", yarn(**ORIGINAL, attention_factor=1.5)),
        ("qwen3_moe", yarn(**ORIGINAL, beta_fast=2, beta_slow=2)),
        ("qwen2_moe", {"head_dim": 12, "shared_expert_intermediate_size": 13}),
        ("qwen2_moe", {"num_hidden_layers": 3, "mlp_only_layers": [0]}),
        ("mixtral", {"head_dim": 12, "num_experts_per_tok": 1}),
        ("mixtral", {"sliding_window": 5}),
        ("mixtral", DYNAMIC),
        ("llama", DYNAMIC),
        ("qwen2", {**WINDOWS, "max_window_layers": 1}),
        ("qwen2", {**WINDOWS, "max_window_layers": 28}),
        ("qwen2", {**WINDOWS, "sliding_window": None, "max_window_layers": 0}),
        ("qwen3", {**WINDOWS, "max_window_layers": 0}),
        ("qwen3", {**WINDOWS, "layer_types": KINDS, "num_hidden_layers": 4}),
        ("qwen3_moe", {"attention_bias": True}),
        ("olmoe", {"attention_bias": True}),
        ("deepseek_v3", {"norm_topk_prob": None, "routed_scaling_factor": 2.5}),
        ("olmoe", {"num_key_value_heads": 1, "norm_topk_prob": True}),
        ("deepseek_v2", {**GROUPS, "n_group": 12, "topk_group": 3}),
        ("deepseek_v2", {**GROUPS, "n_group": 3, "topk_group": 2, "routed_scaling_factor": 16.0}),
        ("deepseek_v2", {"topk_method": "greedy", "n_group": 4, "topk_group": 2}),
        ("deepseek_v2", {"v_head_dim": 16, "qk_nope_head_dim": 4, "qk_rope_head_dim": 6}),
        ("deepseek_v2", {"n_shared_experts": 3, "q_lora_rank": 7, "rms_norm_eps": 1e-3}),
        ("deepseek_v2", yarn(**ORIGINAL, mscale=0.7)),
        ("deepseek_v2", yarn(**ORIGINAL, mscale_all_dim=0.7)),
        ("deepseek_v2", yarn(**ORIGINAL, mscale=0.7, mscale_all_dim=1.0)),
        ("gpt_oss", {"num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2}),
        ("gpt_oss", {"head_dim": 24, "tie_word_embeddings": True, "sliding_window": 3}),
    ],
    ids=str,
)
def test_logits_of_odd_configs(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    written = write_model(family, 0, tmp_path, **changes)
    token_ids = random_ids(0, 70)
    ours = logits(written.folder, token_ids, context=128)
    torch.testing.assert_close(ours, written.oracle(token_ids), atol=2e-4, rtol=0)


@pytest.mark.parametrize("is_published", [True, False], ids=["published", "fused"])
@pytest.mark.parametrize("family", sorted(set(CAUSAL) - {"bailing_moe_v2"}))
def test_what_transformers_reads_and_writes_again_gives_the_same_bits(
    family: str, is_published: bool, tmp_path: Path
) -> None:
    """In many shards, with the experts by their published names or fused as in memory."""
    seed = 9 if family == "gpt_oss" else 0  # a layout that transformers can read
    written = write_model(family, seed, tmp_path / "first")
    token_ids = random_ids(seed, 30)
    model = AutoModelForCausalLM.from_pretrained(written.folder)
    again = tmp_path / "again"
    model.save_pretrained(again, max_shard_size="30KB", save_original_format=is_published)
    assert len(list(again.glob("*.safetensors"))) > 4
    assert torch.equal(logits(again, token_ids), logits(written.folder, token_ids))


@pytest.mark.parametrize("family", NAMES)
def test_bfloat16_is_as_close_to_float32_as_the_oracle_s(family: str, tmp_path: Path) -> None:
    """Tolerance: at most twice the root-mean-square error of the oracle's own bfloat16."""
    our_error = their_error = 0.0
    for seed in range(max(10, scaled(6))):  # fewer say little of a mean: an expert more or less
        written = write_model(family, seed, tmp_path / str(seed), torch.bfloat16)
        token_ids = random_ids(seed, 64)
        ours = logits(written.folder, token_ids)
        exact = logits(written.folder, token_ids, dtype="float32")
        our_error += float((ours - exact).square().mean())
        their_error += float((written.oracle(token_ids) - exact).square().mean())
    assert 0 < our_error < 4 * their_error


@pytest.mark.parametrize("family", CAUSAL)
def test_greedy_answers_are_those_of_the_oracle(family: str, tmp_path: Path) -> None:
    """Each of 64 tokens is the oracle's arg-max after those before it, or within 1e-4 of it."""
    for seed in range(scaled(3)):
        written = write_model(family, seed, tmp_path / str(seed))
        prompt = random_ids(seed, 12)
        with LLM(written.folder, context=128) as llm:
            [answer] = llm.generate(prompt, SamplingParams(max_tokens=64, ignore_eos=True))
        assert len(answer.token_ids) == 64
        expected = written.oracle(prompt + answer.token_ids[:-1])[len(prompt) - 1 :]
        chosen = expected.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        assert (chosen >= expected.amax(1) - 1e-4).all()


@pytest.mark.parametrize("family", CAUSAL)
def test_a_batch_in_a_small_cache_is_its_requests_alone(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where experts stay, requests wait, and one that runs is moved to make room for the last."""
    of_pass, starts = KVCache.of_pass, defaultdict[KVRange, set[int]](set)

    def noting(cache: KVCache, kv_range: KVRange, *rest: Any) -> KVRange:
        starts[kv_range].add(kv_range.start)
        return of_pass(cache, kv_range, *rest)

    monkeypatch.setattr(KVCache, "of_pass", noting)
    written = write_model(family, 1, tmp_path)
    wishes = [(3, 4), (40, 20), (17, 9), (50, 16)]  # tokens of prompts and answers
    prompts = [random_ids(length, length) for length, _ in wishes]
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for _, length in wishes]
    with LLM(written.folder, context=144, cache="off") as llm:
        alone = [llm.generate([p], [each])[0] for p, each in zip(prompts, params, strict=True)]
    plan = plan_model(written.folder, context=144)
    for budget in (plan.minimum_bytes, plan.full_bytes):
        starts.clear()
        with LLM(written.folder, context=144, host_memory=budget) as llm:
            together = llm.generate(prompts, params)
        assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert sum(len(each) - 1 for each in starts.values()) == 1


@pytest.mark.parametrize("family", sorted(set(NAMES) - {"gpt_oss", *DENSE}))
def test_every_expert_layout_gives_the_same_bits(family: str, tmp_path: Path) -> None:
    token_ids = random_ids(0, 30)
    plain = write_model(family, 0, tmp_path / "plain")  # seed 0: a tensor per expert
    expected = logits(plain.folder, token_ids)
    for layout in LAYOUTS:
        other = write_model(family, 0, tmp_path / layout)
        store_experts_as(other.folder, layout)
        assert torch.equal(logits(other.folder, token_ids), expected), layout


@pytest.mark.parametrize("family", NAMES)
def test_synthetic_checkpoints_run(family: str, tmp_path: Path) -> None:
    folder = synth(family, "tiny", tmp_path / "model")
    plan = plan_model(folder, context=256)
    token_ids = random_ids(0, 50)
    budgets = (plan.minimum_bytes, plan.full_bytes)
    least, full = (logits(folder, token_ids, context=256, host_memory=b) for b in budgets)
    assert torch.equal(least, full)
    assert least.isfinite().all()
    assert least.std(1).min() > 0.1  # no row says that all tokens are alike


@pytest.mark.parametrize("family", sorted(set(NAMES) - {"bailing_moe_v2"}))
def test_small_is_about_a_gigabyte(family: str) -> None:
    config = read_config(families()[family].sizes()["small"].config)
    assert 0.9e9 < sum(weight_bytes(config, "bfloat16")) < 1.1e9


def test_routers_without_a_bias_are_skewed(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(synth("mixtral", "tiny", tmp_path / "model"))
    names = [f"model.layers.{i}.block_sparse_moe.gate.weight" for i in (0, 1)]
    bits = [read_array(checkpoint, name).astype(np.int32) << 16 for name in names]
    spreads = [x.view(np.float32).std(axis=1) * 64**0.5 for x in bits]
    mean, skew = CHARACTER.router_std, CHARACTER.router_skew
    for spread in spreads:
        assert spread.max() == pytest.approx(mean * (1 + skew), rel=0.3)
        assert spread.min() == pytest.approx(mean * (1 - skew), rel=0.3)
    assert not np.array_equal(spreads[0].argsort(), spreads[1].argsort())


# Sizes that are published


PUBLISHED = {
    "llama": (291, 8.030, 131_072),
    "qwen2": (339, 7.616, 57_344),
    "qwen3": (399, 8.191, 147_456),
    "qwen3_moe": (18_867, 30.532, 98_304),
    "mixtral": (995, 46.703, 131_072),
    "qwen2_moe": (4_659, 14.316, 196_608),
    "olmoe": (3_219, 6.919, 131_072),
    "deepseek_v2": (5_291, 15.706, 31_104),
    "bailing_moe_v2": (14_813, 16.256, 40_960),
    "glm4_moe": (17_925, 106.852, 188_416),
    "deepseek_v3": (5_317, 15.960, 31_104),
    "glm4_moe_lite": (9_491, 29.943, 54_144),
    "minimax_m2": (48_239, 228.690, 253_952),
    "lfm2": (148, 1.170, 12_288),
    "lfm2_moe": (2_302, 8.340, 12_288),
    "gpt_oss": (459, 20.915, 49_152),
    "qwen3_5_moe": (31_333, 34.661, 20_480),
    "qwen3_next": (74_391, 79.674, 24_576),
    "qwen3_5": (427, 8.954, 32_768),
}
"""Tensors, parameters in units of 10**9, bytes of KV cache per token in bfloat16."""

DEEPSEEK_V2 = {
    **families()["deepseek_v2"].sizes()["full"].config,
    "hidden_size": 5120,
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "n_group": 8,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
    "routed_scaling_factor": 16.0,
}


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}

DEEPSEEK_V3 = {
    **families()["deepseek_v3"].sizes()["full"].config,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "vocab_size": 129280,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "quantization_config": FP8,
}

KIMI_K2 = {
    **DEEPSEEK_V3,
    "model_type": "kimi_k2",
    "first_k_dense_replace": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 131072,
    "rope_theta": 50000,
    "vocab_size": 163840,
    "bos_token_id": 163584,
    "eos_token_id": 163586,
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_sizes(family: str) -> None:
    config = read_config(families()[family].sizes()["full"].config)
    num_tensors, billions, token_bytes = PUBLISHED[family]
    schema = model_schema(config)
    assert num_tensors_of(schema) == num_tensors
    assert round(num_parameters_of(schema) / 1e9, 3) == billions
    assert 2 * kv_elements_of(config) == token_bytes
    assert weight_bytes(config, "bfloat16")[1] == 2 * schema.expert_elements


def test_numbers_that_are_easily_missed() -> None:
    lite = read_config(families()["deepseek_v2"].sizes()["full"].config)
    latent = lite.layers[0].mixer
    assert latent.softmax_scale == pytest.approx(0.114721, abs=1e-6)
    assert latent.rope.yarn is not None and latent.rope.yarn.amplitude == 1.0
    assert latent.cache_shape == (1, 1, 576)
    v3 = read_config(DEEPSEEK_V3)
    assert round(num_parameters_of(model_schema(v3)) / 1e9, 2) == 671.03
    assert (v3.moe.num_groups, v3.moe.num_groups_per_token) == (8, 4)
    assert v3.layers[0].mixer.softmax_scale == pytest.approx(192**-0.5 * 1.3688879454**2)
    kimi = read_config(KIMI_K2)
    assert round(num_parameters_of(model_schema(kimi)) / 1e9) == 1026
    assert list(kimi.moe_layers) == list(range(1, 61)) and kimi.eos_token_ids == (163586,)
    large = read_config(DEEPSEEK_V2)
    assert round(num_parameters_of(model_schema(large)) / 1e9) == 236
    assert (large.moe.num_groups, large.moe.num_groups_per_token) == (8, 3)
    qwen3 = read_config(families()["qwen3_moe"].sizes()["full"].config)
    assert qwen3.attention.head_dim == 128
    assert qwen3.attention.softmax_scale == pytest.approx(128**-0.5)
    qwen3_long = {
        **families()["qwen3_moe"].sizes()["full"].config,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
        },
    }
    yarn = read_config(qwen3_long).attention.rope.yarn
    assert yarn is not None and yarn.amplitude == pytest.approx(1.138629)


def test_layers_without_experts() -> None:
    config = families()["qwen3_moe"].sizes()["full"].config
    leading = read_config({**config, "mlp_only_layers": [0, 1]})
    assert leading.moe_layers == tuple(range(2, 48)) and leading.dense_size == 6144
    every_third = read_config({**config, "decoder_sparse_step": 3})
    assert list(every_third.moe_layers) == list(range(2, 48, 3))
    some = read_config({**config, "mlp_only_layers": [0, 7, 47]})
    assert some.moe_layers == (*range(1, 7), *range(8, 47)) and some.num_leading_layers == 2
    with pytest.raises(ConfigError, match="leave no layer with experts"):
        read_config({**config, "mlp_only_layers": list(range(48))})


# Plans from config.json alone


def write_config(folder: Path, config: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("family", NAMES)
def test_a_plan_needs_no_shards(family: str, tmp_path: Path) -> None:
    whole = synth(family, "tiny", tmp_path / "whole")
    bare = write_config(tmp_path / "bare", json.loads((whole / "config.json").read_text()))
    assert plan_model(bare, host_memory="1GiB") == plan_model(whole, host_memory="1GiB")
    with pytest.raises(CheckpointError, match=r"holds a config.json but no \*.safetensors"):
        LLM(bare)


@pytest.mark.parametrize("family", PUBLISHED)
def test_models_larger_than_the_machine_are_planned(family: str, tmp_path: Path) -> None:
    config = families()[family].sizes()["full"].config
    config = {**config, "quantization_config": None}  # FP8's is told by headers alone
    plan = plan_model(write_config(tmp_path / "model", config), context=4096)
    dense, experts = weight_bytes(read := read_config(config), "bfloat16")
    if read.experts is not None and read.experts.is_mxfp4:  # kept so: 17 bytes for 32 weights
        assert plan.full_bytes < dense + experts // 3
        experts = experts * 17 // 64
    assert plan.full_bytes > dense + experts
    assert dense < plan.minimum_bytes <= plan.full_bytes
    assert (plan.minimum_bytes == plan.full_bytes) is (read.experts is None)
    # Half of gpt-oss' layers have windows, which have room for 2,048 tokens in all.
    num_tokens = 3072 if family == "gpt_oss" else 4096
    assert plan.host.kv_cache_bytes == num_tokens * PUBLISHED[family][2]
    with pytest.raises(PlanError, match="too small"):
        plan_model(tmp_path / "model", context=4096, host_memory="1GiB")


# What is refused by name


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"mlp_bias": True}, "mlp_bias True"),
        ("llama", {"sliding_window": 4096}, "sliding_window 4096"),
        ("llama", {"is_causal": False}, "is_causal False"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 28}, "layer_types has 'chunked_att"),
        ("qwen3", {"rope_scaling": {"type": "longrope", "factor": 2.0}}, "embedding 'longrope'"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window True"),
        ("qwen3_moe", {"layer_types": ["sliding_attention"] * 48}, "layer_types"),
        (
            "qwen3_moe",
            {"rope_scaling": {"type": "longrope", "factor": 2.0}},
            "rope_scaling: the rotary embedding 'longrope' is not supported, only 'default', ",
        ),
        (
            "mixtral",
            {"rope_parameters": {"rope_type": "longrope", "factor": 8.0}},
            "rope_parameters: the rotary embedding 'longrope' is not supported, only 'default', ",
        ),
        ("gpt_oss", {"partial_rotary_factor": 0.5}, "32 of 64 dimensions rotate"),
        ("qwen3_moe", {"partial_rotary_factor": 0.25}, "32 of 128 dimensions rotate"),
        ("deepseek_v2", {"rotary_dim": 32}, "32 of 64 dimensions rotate"),
        ("gpt_oss", {"attention_bias": False}, "attention_bias False"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit 5.0"),
        ("qwen2_moe", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("mixtral", {"rope_scaling": {"type": "proportional"}}, "embedding 'proportional'"),
        ("mixtral", {"quantization_config": {}}, "quantization_config"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv 8.0"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob True"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'"),
        ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        ("lfm2_moe", {"layer_types": ["sliding_attention"] * 24}, "only conv and full_attention"),
    ],
)
def test_unsupported_features_are_named(family: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        read_config({**families()[family].sizes()["full"].config, **changes})


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 129}, "129 experts per token, but there are 128"),
        ("qwen3_moe", {"mlp_only_layers": 3}, "mlp_only_layers 3 must be a list"),
        ("mixtral", {"sliding_window": 0}, "sliding_window 0 must be an integer from 1"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 36}, "no sliding_window is in use"),
        ("qwen2", {"rope_scaling": {"type": "dynamic"}}, "no rope_scaling.factor"),
        ("qwen2_moe", {"shared_expert_intermediate_size": None}, "no shared_expert_interm"),
        ("mixtral", {"num_key_value_heads": 5}, "32 attention heads do not divide among 5"),
        ("deepseek_v2", {"kv_lora_rank": None}, "no kv_lora_rank"),
        ("deepseek_v2", {"qk_rope_head_dim": 63}, "63 rotating dimensions must be even"),
        ("deepseek_v2", {"rope_scaling": {"type": "yarn"}}, "no rope_scaling.factor"),
        (
            "qwen3_moe",
            {**yarn(rope_theta=1.0), "rope_theta": None},
            "a rope_theta of 1 has no frequencies",
        ),
        ("qwen3_moe", yarn(beta_fast=1e-320), "beta_fast .* must be 0 or at least 1e-06"),
        ("deepseek_v2", yarn(beta_slow=1e-9), "beta_slow 1e-09 must be 0 or at least 1e-06"),
        (
            "deepseek_v2",
            {"topk_method": "group_limited_greedy", "n_group": 7},
            "64 experts do not divide into 7 groups",
        ),
        ("lfm2_moe", {"layer_types": None}, "no layer_types or full_attn_idxs"),
        ("lfm2_moe", {"layer_types": ["conv"] * 23}, "must be a list of 24 kinds of layers"),
        ("lfm2_moe", {"num_dense_layers": 24}, "24 dense layers of 24 leave no layer with exp"),
        ("lfm2", {"full_attn_idxs": [2, 16]}, "must be a list of layers from 0 to 15"),
        ("lfm2", {"conv_L_cache": 1}, "conv_L_cache 1 must be an integer from 2 to 64"),
    ],
)
def test_what_cannot_be_right_is_refused(
    family: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config({**families()[family].sizes()["full"].config, **changes})


def test_a_bias_that_the_config_denies_is_refused(tmp_path: Path) -> None:
    written = write_model("qwen2_moe", 2, tmp_path / "model", qkv_bias=True)
    path = written.folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "qkv_bias": False}))
    with pytest.raises(CheckpointError, match="q_proj.bias, which its config.json has switched"):
        LLM(written.folder)


@pytest.mark.parametrize("family", CAUSAL)
def test_routers_keep_the_precision_of_their_family(family: str) -> None:
    is_float32 = families()[family].model().is_float32
    layer = "block_sparse_moe" if family == "minimax_m2" else "mlp"
    of_float32 = ("deepseek_v2", "bailing_moe_v2", "glm4_moe", "deepseek_v3", "glm4_moe_lite")
    has_fp32_router = family in (*of_float32, "minimax_m2")
    assert is_float32(f"model.layers.1.{layer}.gate.weight") == has_fp32_router
    assert not is_float32("model.layers.1.mlp.gate_proj.weight")


def test_without_an_end_that_can_come_answers_end_by_length(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = synth("mixtral", "tiny", tmp_path / "model")
    with LLM(folder, context=64, config_overrides={"eos_token_id": 151644}) as llm:
        [answer] = llm.generate([1, 2, 3], SamplingParams(max_tokens=8))
    assert (len(answer.token_ids), answer.finish_reason) == (8, "length")
    assert [r.message for r in caplog.records if "151644 is outside" in r.message]
