"""What a model's files say in two places, or leave to a default of their family's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import logits, random_ids, write_model
from safetensors.torch import load_file, save_file

from lowtide.config import ModelConfig
from lowtide.errors import CheckpointError, ConfigError
from lowtide.families import families, read_config
from lowtide.llm import plan_model

YARN = {"rope_type": "yarn", "factor": 4.0}


def config_of(family: str, **changes: Any) -> ModelConfig:
    config = {**families()[family].sizes()["tiny"].config, **changes}
    return read_config({name: value for name, value in config.items() if value != "none"})


def add(folder: Path, name: str, tensor: torch.Tensor) -> None:
    [path] = folder.glob("*.safetensors")
    save_file({**load_file(path), name: tensor}, path)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_tied_head_must_be_a_copy_of_the_embedding(family: str, tmp_path: Path) -> None:
    """In transformers both would be loaded."""
    folder, oracle = write_model(family, 1, tmp_path, tie_word_embeddings=True)
    ids = random_ids(1, 20)
    [path] = folder.glob("*.safetensors")
    embedding = load_file(path)["model.embed_tokens.weight"]
    add(folder, "lm_head.weight", embedding)
    torch.testing.assert_close(logits(folder, ids), oracle(ids), atol=2e-4, rtol=0)
    other = embedding.clone()
    other[-1, -1] += 1
    add(folder, "lm_head.weight", other)
    with pytest.raises(CheckpointError, match="tie_word_embeddings.*lm_head.weight is not its"):
        logits(folder, ids)
    untied = logits(folder, ids, config_overrides={"tie_word_embeddings": False})
    assert not torch.equal(untied[:, -1], oracle(ids)[:, -1])


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe"])
def test_shared_experts_are_not_left_out(family: str, tmp_path: Path) -> None:
    folder, _ = write_model(family, 1, tmp_path)
    with pytest.raises(CheckpointError, match="shared_experts.gate_proj.* has switched off"):
        plan_model(folder, context=64, config_overrides={"n_shared_experts": 0})


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_the_context_before_stretching_may_stand_outside(family: str) -> None:
    """In transformers it counts before the one inside."""
    outside = {"original_max_position_embeddings": 32}
    rope = config_of(family, rope_scaling=YARN, **outside).layers[0].mixer.rope
    assert rope.yarn.original_positions == 32
    assert rope == config_of(family, rope_scaling={**YARN, **outside}).layers[0].mixer.rope
    with pytest.raises(ConfigError, match="original_max_position_embeddings twice: 16 and 32"):
        inside = {**YARN, "original_max_position_embeddings": 16}
        config_of(family, rope_scaling=inside, **outside)


def test_one_rotary_embedding_does_not_add_to_another() -> None:
    """In transformers rope_scaling would count alone."""
    plain = {"rope_type": "default", "rope_theta": 777.0}
    for one, other in ((plain, YARN), (YARN, plain)):
        with pytest.raises(ConfigError, match="rope_parameters and rope_scaling disagree"):
            config_of("llama", rope_theta=777.0, rope_parameters=one, rope_scaling=other)
    inside = {**YARN, "rope_theta": 777.0}
    with pytest.raises(ConfigError, match="rope_parameters and rope_scaling disagree"):
        config_of("llama", rope_theta=None, rope_parameters=inside, rope_scaling=YARN)
    both = config_of("llama", rope_theta=777.0, rope_parameters=YARN, rope_scaling={})
    assert both.attention.rope.yarn is not None


def test_deepseek_v3_has_groups_by_default() -> None:
    none = {"n_group": "none", "topk_group": "none"}
    config = config_of("deepseek_v3", n_routed_experts=16, **none)
    assert (config.moe.num_groups, config.moe.num_groups_per_token) == (8, 4)
    assert config_of("glm4_moe", **none).moe.num_groups == 1


def test_null_switches_interleaving_off() -> None:
    absent, null = (config_of("deepseek_v3", rope_interleave=x) for x in ("none", None))
    assert absent.layers[0].mixer.rope.is_interleaved
    assert not null.layers[0].mixer.rope.is_interleaved


def test_gpt_oss_must_say_how_it_is_stretched() -> None:
    for empty in ("none", {}):
        with pytest.raises(ConfigError, match="no rope_parameters or rope_scaling"):
            config_of("gpt_oss", rope_scaling=empty, rope_parameters="none")
