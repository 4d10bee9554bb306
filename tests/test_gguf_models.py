"""GGUF files as models, beside transformers with the weights that their bytes stand for."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoint_files import write_arrays
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type
from gguf_files import Choose, finish, split, write_gguf, write_ling
from gguf_oracle import TOLERANCE, WIDTH, check, random_model, small_ling
from typer.testing import CliRunner

from lowtide import SamplingParams
from lowtide.cli.app import app
from lowtide.errors import CheckpointError, ConfigError, UnsupportedError
from lowtide.llm import LLM, plan_model
from lowtide.model_folder.gguf_header import GgufHeader

MIXED = (Type.Q4_K, Type.Q6_K, Type.Q5_K, Type.Q3_K, Type.Q2_K, Type.IQ4_XS, Type.Q8_0)
MIXED += (Type.IQ2_XXS, Type.IQ3_S, Type.IQ2_S, Type.IQ3_XXS, Type.IQ2_XS)
SMALL = (Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.IQ4_NL, Type.MXFP4)
SMALL += (Type.BF16, Type.F16)


def write(
    path: Path,
    family: str,
    seed: int,
    types: tuple[Type, ...],
    add: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> torch.nn.Module:
    """A random model whose tensors' types take turns, and transformers' model of the same."""
    model = random_model(family, seed)
    write_gguf(path, family, model, choosing(types), add)
    return model


SEEDS = {
    "llama": (0, 4),  # divisors of frequencies; YaRN, biases and tied embeddings
    "qwen2": (0, 1),  # YaRN; a linear stretch
    "qwen3": (1, 4),  # biases; a linear stretch and tied embeddings
    "qwen3_moe": (0, 4),  # with YaRN and tied embeddings
    "olmoe": (0, 1),
    "qwen2_moe": (3, 1),  # YaRN
    "mixtral": (0, 1),  # tied
    "deepseek_v2": (0, 2),  # YaRN, keys and values in two matrices
    "glm4_moe": (0, 2),  # groups of experts, and norms of queries and keys
    "deepseek_v3": (6, 2),  # YaRN; groups of experts, keys and values in two matrices
    "glm4_moe_lite": (6, 4),  # YaRN; keys and values in two matrices
    "minimax_m2": (0, 2),  # half of a head rotates
    "lfm2": (0, 1),
    "lfm2_moe": (0, 1),
    "gpt_oss": (0, 1),  # YaRN
}


@pytest.mark.parametrize(
    "family,seed,types",
    [(f, s, t) for f, seeds in SEEDS.items() for s, t in zip(seeds, (MIXED, SMALL), strict=True)],
)
def test_logits_and_words_are_those_of_the_weights_unpacked(
    family: str, seed: int, types: tuple[Type, ...], tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    model = write(path, family, seed, types)
    check(path, model)


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe"])
def test_biases_of_attention_are_those_in_the_file(family: str, tmp_path: Path) -> None:
    path, model = tmp_path / "model.gguf", random_model(family, 0, attention_bias=True)
    write_gguf(path, family, model, choosing(MIXED))
    assert "blk.0.attn_output.bias" in GgufHeader.read(path).tensors
    check(path, model)


def choosing(types: tuple[Type, ...]) -> Choose:
    """Types that take turns, as far as rows divide into their blocks."""
    kinds = iter(types * 99)

    def choose(name: str, shape: tuple[int, ...]) -> Type:
        if any(part in name for part in ("norm", "gate_inp", "exp_probs", "shortconv.conv")):
            return Type.F32
        kind = next(kinds)
        fits = [k for k in (kind, Type.Q8_0, Type.F16) if shape[-1] % GGML_QUANT_SIZES[k][0] == 0]
        return fits[0]

    return choose


@pytest.mark.parametrize("num_predicting", [0, 1])
def test_ling_is_that_of_its_safetensors(num_predicting: int, tmp_path: Path) -> None:
    path, folder = tmp_path / "model.gguf", tmp_path / "folder"
    config, weights = small_ling()
    write_ling(path, config, weights, choosing(MIXED), num_predicting)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_arrays(folder / "model.safetensors", {n: w.numpy() for n, w in weights.items()})
    prompt = list(range(1, 30))
    with LLM(path, context=128, dtype="float32") as llm, LLM(folder, context=128) as other:
        assert llm.config.moe == other.config.moe
        ours, theirs = llm.logits(prompt), other.logits(prompt)
        params = SamplingParams(max_tokens=64, ignore_eos=True)
        words, expected = (each.generate(prompt, params)[0].token_ids for each in (llm, other))
    assert (ours - theirs).abs().max() <= TOLERANCE * theirs.abs().max()
    assert words == expected


def test_layers_that_predict_further_tokens_are_passed_over(tmp_path: Path) -> None:
    path, model = tmp_path / "model.gguf", random_model("glm4_moe_lite", 6)
    model.config.num_predicting = 1
    prefix = f"blk.{model.config.num_hidden_layers}."

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_nextn_predict_layers(1)
        for name in ("nextn.eh_proj", "nextn.shared_head_norm", "attn_norm", "ffn_gate_inp"):
            writer.add_tensor(f"{prefix}{name}.weight", np.zeros((400, 256), np.float32))

    write_gguf(path, "glm4_moe_lite", model, choosing(SMALL), add)
    check(path, model)
    assert "1.6 MiB of the files are not loaded" in plan_model(path, context=64).reason


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small") / "model.gguf"
    write(path, "qwen3_moe", 0, (Type.Q4_0,))
    return path


def test_a_folder_with_a_file_and_a_split_one_are_models(small: Path, tmp_path: Path) -> None:
    prompt = list(range(20))
    with LLM(small, context=64) as llm:
        expected = llm.logits(prompt)
    with LLM(small.parent, context=64) as llm:
        assert torch.equal(llm.logits(prompt), expected)
    split(small, tmp_path / "part", 3)
    first = tmp_path / "part-00001-of-00003.gguf"
    for path in (first, tmp_path):
        with LLM(path, context=64) as llm:
            assert torch.equal(llm.logits(prompt), expected)
    second = tmp_path / "part-00002-of-00003.gguf"
    with pytest.raises(CheckpointError, match="not the first of 3 files; give part-00001-of-00003"):
        plan_model(second)
    second.rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(CheckpointError, match="part-00002-of-00003.gguf is missing"):
        plan_model(first)
    shutil.copy(first, second)
    with pytest.raises(
        CheckpointError, match=r"says that it is file 0 of its set \(from 0\), not 1"
    ):
        plan_model(first)


def test_experts_stay_packed(small: Path) -> None:
    packed, whole = plan_model(small), plan_model(small, expert_dtype="bfloat16")
    assert whole.host.slot_bytes == 3 * WIDTH * WIDTH * 2
    assert packed.host.slot_bytes == 3 * WIDTH * WIDTH * 18 // 32  # as in the file
    with LLM(small, context=64, dtype="float32") as llm:
        expected = llm.logits(list(range(9)))
    options: list[dict[str, Any]] = [
        {"expert_dtype": "float32"},
        {"host_memory": plan_model(small, context=64, dtype="float32").minimum_bytes},
        {"device": "emulated", "gpu_memory": "8MiB"},
    ]
    for chosen in options:
        with LLM(small, context=64, dtype="float32", **chosen) as llm:
            logits = llm.logits(list(range(9)))
        assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_what_is_not_computed_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"

    def written(architecture: str, tensor: str, **keys: int) -> Path:
        writer = gguf.GGUFWriter(path, architecture)
        for name, value in keys.items():
            writer.add_uint32(f"{architecture}.{name}", value)
        writer.add_tensor(tensor, np.zeros((8, 32), np.float32))
        finish(writer)
        return path

    with pytest.raises(
        UnsupportedError, match="'gemma3' is not read from GGUF files. It is Gemma: a model"
    ):
        plan_model(written("gemma3", "token_embd.weight"))
    with pytest.raises(ConfigError, match="no llama.feed_forward_length"):
        plan_model(written("llama", "token_embd.weight"))
    with pytest.raises(UnsupportedError, match="qwen3.expert_count 8 is not supported, only 0"):
        plan_model(written("qwen3", "token_embd.weight", expert_count=8))
    with pytest.raises(ConfigError, match="no qwen3moe.embedding_length"):
        plan_model(written("qwen3moe", "token_embd.weight"))


@pytest.mark.parametrize("name", ["blk.1.attn_?.weight", "blk.#.attn_q.weight"])
def test_an_unknown_tensor_is_refused(name: str, small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    path = tmp_path / "other.gguf"
    path.write_bytes(data.replace(b"blk.1.attn_q.weight", name.encode()))
    with pytest.raises(UnsupportedError, match=re.escape(f"'{name}' is none that lowtide")):
        plan_model(path)


def test_a_weight_that_is_no_number_is_named(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    data = bytearray(small.read_bytes())
    start = GgufHeader.read(small).tensors["blk.1.ffn_up_exps.weight"].offset
    data[start + 18 * 40 : start + 18 * 40 + 2] = b"\x00\x7c"  # a scale
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="layers.1.mlp.experts.up_proj in .*infinity or NaN"):
        LLM(path, context=64, check_weights=True)


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """Of printable ASCII, and a template."""
    tokens = [chr(code) for code in range(33, 127)] + ["\u0120", "ab", "<|end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["a b"])
    writer.add_token_types([1] * 96 + [3])
    writer.add_eos_token_id(96)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}")


def test_more_tokens_than_the_model_has_rows_are_refused(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list([f"t{number}" for number in range(5000)])

    write(tmp_path / "model.gguf", "olmoe", 0, (Type.Q4_K,), add)
    with pytest.raises(CheckpointError, match=r"5000 tokens, and token_embd.weight \d+ rows: they"):
        LLM(tmp_path / "model.gguf", context=64)


@pytest.mark.parametrize("verb", ["generate", "chat"])
def test_a_file_without_a_tokenizer_is_not_told_of_a_folder_s_alone(
    verb: str, tmp_path: Path
) -> None:
    write(tmp_path / "model.gguf", "olmoe", 0, (Type.Q4_K,))
    words = ["text"] if verb == "generate" else []
    result = CliRunner().invoke(app, [verb, str(tmp_path / "model.gguf"), *words])
    assert result.exit_code == 2 and "its GGUF file no tokenizer" in result.stderr
    assert "--prompt-ids" in result.stderr


def test_the_command_line_takes_a_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, "olmoe", 0, (Type.Q4_K,), add_tokenizer)
    with LLM(path, context=64) as llm:
        assert llm.config.eos_token_ids == (96,)
        assert llm.token_ids("ab c", raw=True) == [95, 94, 66]
        assert llm.token_ids([{"role": "user", "content": "ab"}]) == [95, 96]
    small = ["--context", "64"]
    commands = [
        ["plan", str(path), *small],
        ["generate", str(tmp_path), "-p", "abc", "--max-tokens", "4", *small],
    ]
    for command in commands:
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
    with pytest.raises(UnsupportedError, match="Q4_K, which is rounded already"):
        plan_model(path, format="q4")
