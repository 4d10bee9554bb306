"""LLaDA, LLaDA-MoE and Dream, where every position sees every other: what is theirs alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_models import MASKED, random_ids, write_model
from inside import engine_of
from poison import PoisonedWorkspace
from safetensors.torch import load_file, save_file
from schema_sizes import num_parameters_of, num_tensors_of

from lowtide.config import Canvas
from lowtide.decode.logits import rows_that_predict
from lowtide.engine.opening.config import EngineConfig
from lowtide.engine.opening.model import open_model
from lowtide.engine.running import pass_room
from lowtide.errors import CheckpointError, ConfigError, PlanError, UnsupportedError
from lowtide.families import families, read_config
from lowtide.lab import verify as verify_module
from lowtide.lab.verify import verify
from lowtide.llm import LLM, plan_model
from lowtide.model_writing.synth import synth
from lowtide.schemas import model_schema

GOLDENS = Path(__file__).parent / "goldens"
TOLERANCE = 2e-4


def golden(family: str) -> Path:
    return GOLDENS / f"{family.replace('_', '-')}-a"


@pytest.mark.parametrize("family", MASKED)
def test_logits_are_the_original_implementations(family: str) -> None:
    """Dream's were recorded before they are shifted, as its own code does it afterwards."""
    recorded = load_file(golden(family) / "forward.safetensors")
    least_bytes = plan_model(golden(family), context=64).minimum_bytes
    with LLM(golden(family), context=64, host_memory=least_bytes) as llm:
        for token_ids, logits in zip(
            recorded["input_ids"].tolist(), recorded["logits"], strict=True
        ):
            if family == "dream":
                logits = torch.cat([logits[:1], logits[:-1]])
            torch.testing.assert_close(llm.logits(token_ids), logits, atol=TOLERANCE, rtol=0)


# Passes and what is planned for them


@pytest.fixture(scope="module", params=MASKED)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synthetic checkpoint of the family."""
    return synth(request.param, "tiny", tmp_path_factory.mktemp("made") / request.param)


def test_the_plan_counts_the_longest_pass(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short, long = (plan_model(made, context=context) for context in (256, 1008))
    assert (short.max_rows, long.max_rows) == (256, 1008)
    assert short.host.workspace_bytes < long.host.workspace_bytes
    monkeypatch.setattr(pass_room, "Workspace", PoisonedWorkspace)
    with LLM(made, context=1008, host_memory=long.minimum_bytes) as llm:
        workspace = engine_of(llm).model.compute.workspace
        assert isinstance(workspace, PoisonedWorkspace)
        for num_rows in (512 + 15, 768 + 15, 1008):  # at first those whose last tiles are longest
            found = llm.logits(random_ids(0, num_rows))
            assert found.isfinite().all() and found.std(1).min() > 0.1
            assert workspace.touched_bytes <= workspace.plan.arena_bytes


def test_keys_and_values_are_those_of_one_layer(made: Path) -> None:
    opened = open_model(made, EngineConfig(context=100))
    arrays, heads, width = opened.facts.config.layers[0].mixer.cache_shape
    assert opened.memory.context.kv_shape.groups == ((1, arrays, heads, 112, width),)
    assert opened.facts.config.num_layers > 1


def test_budgets_of_llada_moe_change_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_module, "lossless_presets", lambda: ("lowtide",))
    folder = synth("llada_moe", "tiny", tmp_path / "made")
    verdicts = verify(folder, max_tokens=8, context=256, device="emulated")
    assert {verdict.device for verdict in verdicts} == {"cpu", "emulated"}
    assert all(verdict.is_same and verdict.tolerance == 0 for verdict in verdicts)


def test_what_there_is_no_room_for_is_refused(made: Path) -> None:
    with LLM(made, context=64) as llm:
        with pytest.raises(PlanError, match="the context is 64"):
            llm.logits(random_ids(0, 65))
        assert llm.logits(random_ids(0, 64)).shape[0] == 64
    with pytest.raises(UnsupportedError, match="is bidirectional, its logits are of whole"):
        LLM(made, block_length=8)


def test_a_shift_moves_logits_to_the_next_position() -> None:
    positions = np.arange(2, 6)
    assert rows_that_predict(positions, 0).tolist() == [2, 3, 4, 5]
    assert rows_that_predict(positions, 1).tolist() == [1, 2, 3, 4]
    assert rows_that_predict(np.arange(3), 1).tolist() == [0, 0, 1]


# What is published


PUBLISHED = {
    "llada": (291, 8.016, 126336, (126081,)),
    "llada_moe": (3_219, 7.357, 156895, (156892,)),
    "dream": (339, 7.616, 151666, (151643,)),
}
"""Tensors, parameters in units of 10**9, the mask's id, those that end a text."""


def full_config(family: str) -> dict[str, Any]:
    return dict(families()[family].sizes()["full"].config)


@pytest.mark.parametrize("family", MASKED)
def test_published_sizes_and_ids(family: str) -> None:
    published = full_config(family)
    num_tensors, billions, mask, eos = PUBLISHED[family]
    config = read_config(published)
    schema = model_schema(config)
    assert num_tensors_of(schema) == num_tensors
    assert round(num_parameters_of(schema) / 1e9, 3) == billions
    assert (config.decoding.mask_token_id, config.eos_token_ids) == (mask, eos)
    for name in ("mask_token_id", "eos_token_id"):
        published.pop(name, None)
    bare = read_config(published)
    assert (bare.decoding.mask_token_id, bare.eos_token_ids) == (mask, eos)
    assert (
        config.dtype == "bfloat16"
        and not config.decoding.keeps_keys
        and config.decoding.block_length == 1
    )


def test_published_decoding() -> None:
    kinds = [read_config(full_config(name)).decoding for name in MASKED]
    llada, moe, dream = (kind.defaults for kind in kinds if isinstance(kind, Canvas))
    assert (llada.block_length, llada.steps, llada.remasking) == (128, 128, "low_confidence")
    assert (moe.block_length, moe.steps, moe.remasking) == (32, 128, "low_confidence")
    assert (dream.block_length, dream.steps, dream.remasking) == (None, 512, "origin")
    assert dream.eps == 1e-3


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llada", {"rope": False}, "rope False is not supported"),
        ("llada", {"alibi": True}, "alibi True is not supported"),
        ("llada", {"rope_full_precision": False}, "rope_full_precision False"),
        ("llada", {"activation_type": "swiglu"}, "activation_type 'swiglu' is not supported"),
        ("llada", {"block_type": "sequential"}, "block_type 'sequential'"),
        ("llada", {"layer_norm_type": "default"}, "layer_norm_type 'default'"),
        ("llada", {"include_qkv_bias": True}, "include_qkv_bias True"),
        ("llada", {"clip_qkv": 8.0}, "clip_qkv 8.0 is not supported"),
        ("llada", {"embedding_size": 126592}, "embedding_size 126592 is not supported"),
        ("llada", {"n_heads": None}, "config.json has no n_heads"),
        ("llada", {"d_model": "wide"}, "d_model 'wide' must be an integer"),
        ("llada", {"d_model": 4095}, "hidden_size 4095 does not divide"),
        ("llada_moe", {"norm_topk_prob": True}, "norm_topk_prob True"),
        ("llada_moe", {"routed_scaling_factor": 2.5}, "routed_scaling_factor 2.5"),
        ("llada_moe", {"moe_layer_freq": [0, 1]}, "moe_layer_freq a list of 2 values"),
        ("llada_moe", {"moe_layer_freq": [2] * 16}, "moe_layer_freq a list of 16 values"),
        ("llada_moe", {"moe_layer_freq": [0] * 16}, "leave no layer with experts"),
        ("llada_moe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size"),
        ("llada_moe", {"moe_router_enable_expert_bias": True}, "moe_router_enable_expert_bias"),
        ("dream", {"block_size": 32}, "block_size 32 is not supported"),
        ("dream", {"use_sliding_window": True}, "use_sliding_window True"),
        ("dream", {"use_mrope": True}, "use_mrope True"),
        ("dream", {"mask_token_id": 152064}, "mask_token_id 152064 must be"),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused_by_name(
    family: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises((ConfigError, UnsupportedError), match=words):
        read_config({**full_config(family), **changes})


def test_a_llada_may_leave_numbers_out() -> None:
    left_out = ("n_kv_heads", "mlp_hidden_size", "embedding_size", "weight_tying")
    bare = {name: x for name, x in full_config("llada").items() if name not in left_out}
    config = read_config(bare)
    assert config.attention.num_kv_heads == 32 and config.dense_size == 4 * 4096
    overridden = read_config(full_config("llada"), overrides={"n_layers": 2})
    assert overridden.num_layers == 2


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llada", "model.transformer.blocks.1.q_norm.weight"),
        ("llada", "model.transformer.blocks.0.attn_out.bias"),
        ("llada_moe", "model.layers.1.mlp.gate.expert_bias"),
        ("llada_moe", "model.layers.0.shared_expert.gate_proj.weight"),
        ("dream", "model.layers.0.self_attn.o_proj.bias"),
    ],
)
def test_tensors_that_contradict_the_config_are_refused(
    family: str, name: str, tmp_path: Path
) -> None:
    path = write_model(family, 0, tmp_path).folder / "model.safetensors"
    save_file({**load_file(path), name: torch.zeros(4)}, path)
    with pytest.raises(CheckpointError, match=f"has the tensor {name}"):
        plan_model(tmp_path)
