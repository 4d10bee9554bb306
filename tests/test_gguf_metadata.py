"""Metadata of a GGUF file beside sizes: rotary embeddings, tokens that end a text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import gguf
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type
from gguf_files import copy_metadata, finish, write_gguf
from gguf_oracle import random_model

from lowtide.config import ModelConfig
from lowtide.errors import ConfigError, InternalError, UnsupportedError
from lowtide.families import Family, families, gguf_architecture, register, unregister
from lowtide.families.deepseek_v2.gguf import GGUF
from lowtide.families.gguf import GgufArchitecture, GgufKeys
from lowtide.families.gpt_oss.gguf import GGUF as GPT_OSS
from lowtide.llm import LLM, plan_model
from lowtide.model_folder.gguf_model import GgufModel

Add = Callable[[gguf.GGUFWriter], None]


def written(path: Path, add: Add, family: str = "qwen3_moe", seed: int = 1) -> Path:
    write_gguf(path, family, random_model(family, seed), lambda name, shape: Type.F16, add)
    return path


def config_of(path: Path, add: Add, family: str = "qwen3_moe", seed: int = 1) -> ModelConfig:
    return GgufModel.open(written(path, add, family, seed)).config()


def scaling(**values: float | str) -> Add:
    """Adds `rope.scaling.` keys, and with `scale_linear` the oldest one."""

    def add(writer: gguf.GGUFWriter) -> None:
        for name, value in values.items():
            key = "rope.scale_linear" if name == "scale_linear" else f"rope.scaling.{name}"
            kind = gguf.GGUFValueType.STRING if name == "type" else gguf.GGUFValueType.FLOAT32
            writer.add_key_value(f"qwen3moe.{key}", value, kind)

    return add


@pytest.mark.parametrize(
    "add",
    [
        scaling(type="none"),
        scaling(type="none", factor=4.0),
        scaling(type="linear"),
        scaling(type="linear", factor=1.0),
        scaling(factor=0.0),
        scaling(scale_linear=1.0),
        scaling(attn_factor=1.0, yarn_ext_factor=1.0, yarn_attn_factor=1.0),
    ],
)
def test_a_rotary_embedding_that_is_not_stretched_is_taken(add: Add, tmp_path: Path) -> None:
    assert config_of(tmp_path / "model.gguf", add).attention.rope.yarn is None


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (scaling(type="longrope", factor=4.0), "the rotary embedding 'longrope'"),
        (scaling(attn_factor=1.2), "qwen3moe.rope.scaling.attn_factor 1.2 is not supported"),
        (scaling(yarn_attn_factor=2.0), "yarn_attn_factor 2.0 is not supported"),
        (scaling(yarn_ext_factor=0.5), "yarn_ext_factor 0.5 is not supported"),
        (lambda writer: writer.add_rope_dimension_count(4), "4 of .* dimensions rotate"),
    ],
)
def test_a_rotary_embedding_that_is_not_computed_is_refused(
    add: Add, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        config_of(tmp_path / "model.gguf", add)


@pytest.mark.parametrize(
    ("said", "amplitude"),
    [({}, 1.138629), ({"yarn_attn_factor": 1.0}, 1.138629)]
    + [({"yarn_attn_factor": each}, each) for each in (1.138629, 1.5)],
)
def test_yarn_is_read_with_its_factors(
    said: dict[str, float], amplitude: float, tmp_path: Path
) -> None:
    """`config.json`'s `attention_factor` is written there; 1 is as if it were not said."""
    add = scaling(type="yarn", factor=4.0, **said)
    yarn = config_of(tmp_path / "model.gguf", add).attention.rope.yarn
    assert yarn is not None and yarn.factor == 4.0
    assert yarn.amplitude == pytest.approx(amplitude, rel=1e-6)


def add_keys(**values: int | float | bool) -> Add:
    """Dots of keys as two underscores."""

    def add(writer: gguf.GGUFWriter) -> None:
        for name, value in values.items():
            writer.add_key_value(
                f"{writer.arch}.{name.replace('__', '.')}",
                value,
                gguf.GGUFValueType.get_type(value),
            )

    return add


UNSET: dict[str, int | float | bool] = {
    "rope__scaling__factor": 0.0,
    "rope__scaling__attn_factor": 1.0,
    "rope__scaling__yarn_attn_factor": 1.0,
    "rope__scaling__yarn_ext_factor": -1.0,
    "rope__scaling__yarn_beta_fast": 32.0,
    "rope__scaling__yarn_beta_slow": 1.0,
    "attention__scale": 0.0,
    "attention__clamp_kqv": 0.0,
    "attention__causal": True,
    "expert_group_count": 0,
    "expert_group_used_count": 0,
    "expert_weights_scale": 0.0,
}
"""What llama.cpp writes of keys that a model does not have, where it saves one again."""


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("qwen3_moe", UNSET),
        ("mixtral", {**UNSET, "attention__sliding_window": 0}),
        ("olmoe", UNSET),
        ("lfm2_moe", {**UNSET, "expert_weights_norm": False, "attention__sliding_window": 0}),
        ("minimax_m2", {**UNSET, "expert_weights_norm": False, "expert_gating_func": 0}),
        ("glm4_moe", {"expert_gating_func": 0}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_keys_that_llama_cpp_has_not_set_change_nothing(
    family: str, said: dict[str, int | float | bool], tmp_path: Path
) -> None:
    plain = config_of(tmp_path / "plain.gguf", lambda writer: None, family)
    assert config_of(tmp_path / "saved.gguf", add_keys(**said), family) == plain


@pytest.mark.parametrize(
    ("family", "add"),
    [
        ("qwen3_moe", add_keys(attention__causal=False)),
        ("qwen3_moe", add_keys(expert_group_count=4)),
        ("deepseek_v2", add_keys(attention__temperature_scale=0.1)),
        ("gpt_oss", add_keys(rope__freq_base_swa=5.0)),
    ],
    ids=["not causal", "groups", "temperature", "windows' own base"],
)
def test_what_would_be_computed_otherwise_is_refused(family: str, add: Add, tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedError, match="is not supported, only|is not computed for this model"
    ):
        config_of(tmp_path / "model.gguf", add, family)


@pytest.mark.parametrize(
    ("said", "groups"),
    [
        ({}, ("greedy", None)),
        ({"expert_count": 160}, ("group_limited_greedy", 3)),  # of files that are older
        ({"expert_count": 160, "expert_group_count": 1}, ("greedy", None)),
        (
            {"expert_group_count": 4, "expert_group_used_count": 2},
            ("group_limited_greedy", 2),
        ),
    ],
    ids=str,
)
def test_groups_of_deepseek_v2_are_those_that_it_has(
    said: dict[str, int], groups: tuple[str, int | None]
) -> None:
    needed = ("block_count", "embedding_length", "context_length", "feed_forward_length")
    needed += ("attention.head_count", "attention.layer_norm_rms_epsilon", "attention.kv_lora_rank")
    needed += ("expert_used_count", "attention.key_length", "attention.value_length", "vocab_size")
    values = {**dict.fromkeys(needed, 64), "rope.dimension_count": 16, "expert_count": 64, **said}
    metadata = {f"deepseek2.{key}": value for key, value in values.items()}
    config = GGUF.config(GgufKeys("deepseek2", metadata, {}))
    assert (config["topk_method"], config.get("topk_group")) == groups


def test_families_may_share_a_name_in_gguf_files() -> None:
    gguf_of = partial(GgufArchitecture, name="shared", config=lambda keys: {}, names={})
    sparse = gguf_of(suits=lambda keys: keys.get("expert_count") is not None)
    tensor = gguf_of(suits=lambda keys: "blk.0.attn_x.weight" in keys.shapes)
    rest = gguf_of()

    def chosen(shapes: dict[str, tuple[int, ...]], **said: int) -> GgufArchitecture:
        values = {f"shared.{key}": value for key, value in said.items()}
        metadata = {"general.architecture": "shared", **values}
        return gguf_architecture(metadata, GgufKeys("shared", metadata, shapes))

    def family(name: str, architecture: GgufArchitecture) -> Family:
        return replace(families()["mixtral"], name=name, architectures=(name,), gguf=architecture)

    made = {"t": tensor, "s": sparse}
    try:
        for name, architecture in made.items():
            register(family(name, architecture))
        with pytest.raises(UnsupportedError, match="'shared' is computed for other models, not "):
            chosen({})
        register(family("r", rest))
        made["r"] = rest
        assert chosen({}) is rest
        assert chosen({}, expert_count=8) is sparse
        assert chosen({"blk.0.attn_x.weight": (4, 4)}) is tensor
        with pytest.raises(InternalError, match="2 families take the same shared model"):
            chosen({"blk.0.attn_x.weight": (4, 4)}, expert_count=8)
        with pytest.raises(ValueError, match="The family q: GGUF's shared is taken"):
            register(family("q", rest))
    finally:
        for name in made:
            unregister(name)


@pytest.mark.parametrize(
    ("said", "shapes", "family"),
    [
        ({}, {}, "deepseek_v2"),
        ({"expert_gating_func": 1}, {}, "deepseek_v2"),
        ({"expert_gating_func": 1, "vocab_size": 154880}, {}, "deepseek_v2"),
        ({"expert_gating_func": 2}, {}, "deepseek_v3"),
        ({"expert_gating_func": 2, "vocab_size": 154880}, {}, "glm4_moe_lite"),
        # Of January 2026, which do not name the function.
        ({"vocab_size": 154880}, {}, "glm4_moe_lite"),
        ({}, {"token_embd.weight": (154880, 64)}, "glm4_moe_lite"),
        ({}, {"token_embd.weight": (64, 64), "blk.1.exp_probs_b.bias": (64,)}, "deepseek_v3"),
    ],
    ids=str,
)
def test_metadata_tell_the_models_of_deepseek2_apart(
    said: dict[str, int], shapes: dict[str, tuple[int, ...]], family: str
) -> None:
    metadata = {f"deepseek2.{key}": value for key, value in said.items()}
    keys = GgufKeys("deepseek2", metadata, shapes)
    chosen = gguf_architecture({"general.architecture": "deepseek2", **metadata}, keys)
    assert chosen is families()[family].gguf


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"expert_gating_func": 4}, "deepseek2.expert_gating_func 4 is not supported, only 0 and"),
        ({"expert_weights_norm": True}, "expert_weights_norm True is not supported, only False"),
    ],
)
def test_routing_that_no_deepseek_has_is_refused(said: dict[str, object], message: str) -> None:
    metadata = {f"deepseek2.{key}": value for key, value in said.items()}
    keys = GgufKeys("deepseek2", metadata, {})
    with pytest.raises(UnsupportedError, match=message):
        gguf_architecture({"general.architecture": "deepseek2"}, keys).config(keys)


def test_layers_with_a_window_are_those_that_the_file_says(tmp_path: Path) -> None:
    path, count = tmp_path / "model.gguf", random_model("gpt_oss", 1).config.num_hidden_layers

    def windows(pattern: object) -> list[bool]:
        add: Add = lambda writer: writer.add_key_value(  # noqa: E731
            "gpt-oss.attention.sliding_window_pattern",
            pattern,
            gguf.GGUFValueType.get_type(pattern),
        )
        layers = config_of(path, add, "gpt_oss").layers
        found = tuple(layer.mixer.window for layer in layers)
        return [bool(each) for each in found]

    assert windows(2) == [layer % 2 == 0 for layer in range(count)]
    assert windows(1) == [False] * count
    assert windows(0) == [True] * count
    assert windows([layer == 1 for layer in range(count)]) == [i == 1 for i in range(count)]
    with pytest.raises(ConfigError, match=f"must be a list of {count} kinds"):
        windows([True] * (count + 1))
    with pytest.raises(ConfigError, match="sliding_window_pattern -3 must be an integer from 0"):
        windows(-3)
    with pytest.raises(ConfigError, match="an array of 5000 values is of more than 1024 layers"):
        windows([True] * 5000)


@pytest.mark.parametrize("count", [-1, 1025, 2**32 - 1, 2**64 - 1])
def test_layers_are_not_counted_out_before_their_number_is_checked(count: int) -> None:
    """Lists of as many as a file says would fill memory."""
    sizes = ("embedding_length", "context_length", "attention.head_count", "expert_count")
    sizes += ("attention.layer_norm_rms_epsilon", "expert_used_count", "attention.sliding_window")
    values = {**dict.fromkeys(sizes, 64), "vocab_size": 64, "expert_feed_forward_length": 64}
    values |= {"block_count": count, "attention.sliding_window_pattern": 2}
    metadata = {f"gpt-oss.{key}": value for key, value in values.items()}
    with pytest.raises(ConfigError, match=f"block_count {count} must be an integer from 1 to 1024"):
        GPT_OSS.config(GgufKeys("gpt-oss", metadata, {}))


def test_frequencies_of_their_own_and_a_stretch_are_refused(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", torch.ones(4).numpy())
        writer.add_rope_scaling_factor(4.0)

    path = written(tmp_path / "model.gguf", add, "mixtral")
    with pytest.raises(UnsupportedError, match="stretched .'linear'. and has frequencies of its"):
        plan_model(path)


@pytest.mark.parametrize(
    ("tokens", "eos", "ends"),
    [
        (["<|im_end|>", "<|endoftext|>", "<|fim_pad|>"], 0, {0, 1}),  # Qwen's
        (["<|return|>", "<|end|>", "<|call|>", "<|endoftext|>"], 0, {0, 2, 3}),  # gpt-oss's
        (["<|endoftext|>", "<|role_end|>"], 0, {0, 1}),  # Ling's
        (["<|endoftext|>", "<|user|>", "<|observation|>", "<|system|>"], 0, {0, 1, 2}),  # GLM's
        (["<eos>", "<turn|>", "<|turn>"], 0, {0, 1}),  # Gemma's
        (["[EOS]", "[EOT]", "<|im_end|>"], 0, {0, 1, 2}),  # Kimi's
        (["[e~[", "]~b]"], 0, {0}),  # MiniMax's
        (["<s>", "</s>"], 1, {1}),
        (["a", "b"], 1, {1}),  # a name of its own
    ],
)
def test_what_ends_a_text_is_all_that_models_of_the_kind_end_with(
    tokens: list[str], eos: int, ends: set[int], tmp_path: Path
) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list([*tokens, "</s>"])
        writer.add_token_types([3] * len(tokens) + [1])  # a text like any other
        writer.add_eos_token_id(eos)

    found = config_of(tmp_path / "model.gguf", add).eos_token_ids
    assert found[0] == eos and set(found) == ends


def test_gemma_s_answer_ends_where_the_result_of_a_call_begins(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gemma4")
        writer.add_token_list(["<eos>", "<|tool_response>", "<|tool_call>"])
        writer.add_token_types([3, 4, 4])
        writer.add_eos_token_id(0)

    assert config_of(tmp_path / "model.gguf", add).eos_token_ids == (0, 1)


def test_the_first_file_of_a_split_may_hold_metadata_alone(tmp_path: Path) -> None:
    whole = written(tmp_path / "whole.gguf", lambda writer: None)
    reader = gguf.GGUFReader(whole)
    names = [tmp_path / f"part-{number:05d}-of-00003.gguf" for number in (1, 2, 3)]
    for number, name in enumerate(names):
        writer = gguf.GGUFWriter(name, "qwen3moe")
        if number == 0:
            copy_metadata(reader, writer)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 3)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number - 1 :: 2] if number else ():
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        finish(writer)
    with LLM(names[0], context=64) as llm, LLM(whole, context=64) as other:
        assert torch.equal(llm.logits(list(range(9))), other.logits(list(range(9))))
