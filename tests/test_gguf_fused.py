"""GGUF files whose gate and up, or queries, keys and values, are one tensor.

Their logits are those of files that have them apart, which test_gguf_models.py compares with
transformers.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type
from gguf_files import copy_metadata, finish, write_gguf
from gguf_oracle import random_model

from lowtide.errors import CheckpointError
from lowtide.llm import LLM, plan_model

EXPERTS = ("ffn_gate_exps.weight", "ffn_up_exps.weight"), "ffn_gate_up_exps.weight"
QKV = tuple(f"attn_{x}.weight" for x in "qkv"), "attn_qkv.weight"
QKV_BIASES = tuple(f"attn_{x}.bias" for x in "qkv"), "attn_qkv.bias"


def write(path: Path, family: str, kind: Type = Type.Q4_K) -> None:
    def choose(name: str, shape: tuple[int, ...]) -> Type:
        is_packed = "attn" in name and shape[-1] % 32 == 0
        return kind if "_exps" in name else Type.Q8_0 if is_packed else Type.F32

    write_gguf(path, family, random_model(family, 0), choose)


def fused(source: Path, target: Path, *groups: tuple[tuple[str, ...], str]) -> Path:
    """The same model, each group's tensors of a layer one after the other, by rows."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    copy_metadata(reader, writer)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    new_name = {part: name for parts, name in groups for part in parts}
    parts_of = {name: parts for parts, name in groups}
    written = set()
    for own, tensor in tensors.items():
        layer, _, rest = own.partition(".attn_") if ".attn_" in own else own.partition(".ffn_")
        ending = own[len(layer) + 1 :]
        name, data = own, tensor.data
        if ending in new_name:
            name = f"{layer}.{new_name[ending]}"
            together = [tensors[f"{layer}.{part}"] for part in parts_of[new_name[ending]]]
            assert len({each.tensor_type for each in together}) == 1
            axis = 1 if "_exps" in own else 0
            data = np.concatenate([each.data for each in together], axis=axis)
        if name not in written:
            written.add(name)
            writer.add_tensor(name, data, raw_dtype=tensor.tensor_type)
    finish(writer)
    return target


def logits(path: Path, **options: object) -> torch.Tensor:
    with LLM(path, context=64, **options) as llm:
        return llm.logits(list(range(3, 40)))


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2", "gpt_oss"])
def test_gate_and_up_may_be_one(family: str, tmp_path: Path) -> None:
    apart = tmp_path / "apart.gguf"
    write(apart, family, Type.MXFP4 if family == "gpt_oss" else Type.Q4_K)
    one = fused(apart, tmp_path / "one.gguf", EXPERTS)
    assert torch.equal(logits(one), logits(apart))
    plan, other = plan_model(one, context=64), plan_model(apart, context=64)
    assert plan.host.slot_bytes == other.host.slot_bytes
    assert torch.equal(logits(one, host_memory=plan.minimum_bytes), logits(apart))


@pytest.mark.parametrize(
    ("family", "groups"),
    [
        ("qwen3_moe", [QKV]),
        ("qwen2_moe", [QKV, QKV_BIASES]),
        ("mixtral", [QKV]),  # whose rows take turns
        ("olmoe", [QKV]),
        ("gpt_oss", [QKV, QKV_BIASES]),
    ],
)
def test_queries_keys_and_values_may_be_one(
    family: str, groups: list[tuple[tuple[str, ...], str]], tmp_path: Path
) -> None:
    apart = tmp_path / "apart.gguf"
    write(apart, family)
    one = fused(apart, tmp_path / "one.gguf", *groups)
    assert torch.equal(logits(one), logits(apart))


def test_rows_that_are_missing_are_refused(tmp_path: Path) -> None:
    apart, one = tmp_path / "apart.gguf", tmp_path / "one.gguf"
    write(apart, "olmoe")
    reader = gguf.GGUFReader(fused(apart, one, QKV))
    writer = gguf.GGUFWriter(tmp_path / "less.gguf", "olmoe")
    copy_metadata(reader, writer)
    for tensor in reader.tensors:
        data = tensor.data[:-1] if tensor.name == "blk.0.attn_qkv.weight" else tensor.data
        writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    finish(writer)
    with pytest.raises(CheckpointError, match="'blk.0.attn_qkv.weight' has .* rows; the metadata"):
        plan_model(tmp_path / "less.gguf")
