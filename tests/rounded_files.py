"""Matrices in the formats of other tools' checkpoints, and the weights that they stand for.

Plain loops over the published layouts compute them, one number at a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ's: number i of an int32 is of this column


class Rounded(NamedTuple):
    tensors: dict[str, Tensor]  # by what follows the matrix's name
    weights: Tensor  # float32 [out, in]


def packed(numbers: Tensor, num_bits: int, order: tuple[int, ...] = ()) -> Tensor:
    """[n, m] to int32 [n, m * bits / 32], the first of the order in the lowest bits."""
    count = 32 // num_bits
    order = order or tuple(range(count))
    words = torch.zeros(numbers.shape[0], numbers.shape[1] // count, dtype=torch.int64)
    for place, column in enumerate(order):
        words |= numbers[:, column::count].long() << num_bits * place
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def integers(shape: tuple[int, int], group: int, num_bits: int, seed: int, is_symmetric: bool):
    """Codes [out, in], zeros and scales [out, groups], and weights."""
    generator = torch.Generator().manual_seed(seed)
    out, width = shape
    codes = torch.randint(0, 2**num_bits, shape, generator=generator)
    zeros = torch.randint(0, 2**num_bits, (out, width // group), generator=generator)
    if is_symmetric:
        zeros.fill_(2 ** (num_bits - 1))
    scales = torch.rand(out, width // group, generator=generator) / 2**num_bits / 4 + 0.001
    return codes, zeros, scales


def dequantised(codes: Tensor, zeros: Tensor, scales: Tensor, group: int) -> Tensor:
    spread = [each.repeat_interleave(group, dim=1) for each in (zeros, scales.float())]
    return (codes - spread[0]).float() * spread[1]


def gptq(
    shape: tuple[int, int], group: int, seed: int, version: int = 1, dtype=torch.float16
) -> Rounded:
    codes, zeros, scales = integers(shape, group, 4, seed, is_symmetric=False)
    scales = scales.to(dtype)
    # One less in every number of the whole int32: less than no zero borrows from the next, as
    # GPTQModel writes it and takes it back.
    one_less = 0x11111111 * int(version == 1)
    words = packed(zeros.t(), 4).long() - one_less
    tensors = {
        ".qweight": packed(codes, 4).t().contiguous(),
        ".qzeros": torch.where(words < -(2**31), words + 2**32, words).to(torch.int32),
        ".scales": scales.t().contiguous(),
        ".g_idx": (torch.arange(shape[1]) // group).to(torch.int32),
    }
    return Rounded(tensors, dequantised(codes, zeros, scales, group))


def awq(shape: tuple[int, int], group: int, seed: int, dtype=torch.float16) -> Rounded:
    codes, zeros, scales = integers(shape, group, 4, seed, is_symmetric=False)
    scales = scales.to(dtype)
    tensors = {
        ".qweight": packed(codes.t(), 4, AWQ_ORDER),
        ".qzeros": packed(zeros.t(), 4, AWQ_ORDER),
        ".scales": scales.t().contiguous(),
    }
    return Rounded(tensors, dequantised(codes, zeros, scales, group))


def pack_quantized(
    shape: tuple[int, int],
    group: int,
    seed: int,
    num_bits: int = 4,
    is_symmetric: bool = True,
    dtype=torch.bfloat16,
) -> Rounded:
    codes, zeros, scales = integers(shape, group, num_bits, seed, is_symmetric)
    scales = scales.to(dtype)
    tensors = {
        ".weight_packed": packed(codes, num_bits),
        ".weight_scale": scales,
        ".weight_shape": torch.tensor(shape),
    }
    if not is_symmetric:
        tensors[".weight_zero_point"] = packed(zeros.t(), num_bits).t().contiguous()
    return Rounded(tensors, dequantised(codes, zeros, scales, group))


def fp8(shape: tuple[int, int], seed: int, dtype=torch.float32) -> Rounded:
    generator = torch.Generator().manual_seed(seed)
    numbers = (torch.randn(shape, generator=generator) * 40).to(torch.float8_e4m3fn)
    blocks = [-(-length // 128) for length in shape]
    scales = (torch.rand(blocks, generator=generator) / 400 + 0.0001).to(dtype)
    spread = scales.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
    weights = numbers.float() * spread[: shape[0], : shape[1]]
    return Rounded({".weight": numbers, ".weight_scale_inv": scales}, weights)


def packed_config(strategy: str, group_size: int | None) -> dict[str, Any]:
    """`quantization_config` of compressed-tensors' integers of 4 bits with zeros."""
    weights = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": strategy}
    weights |= {"group_size": group_size, "actorder": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


QUANTISATIONS: dict[str, tuple[dict[str, Any], Callable[[tuple[int, int], int], Rounded]]] = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False},
        lambda shape, seed: gptq(shape, 32, seed),
    ),
    "gptq_v2": (
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "checkpoint_format": "gptq_v2"},
        lambda shape, seed: gptq(shape, 64, seed, version=2),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
        lambda shape, seed: awq(shape, 32, seed),
    ),
    "compressed-tensors": (
        packed_config("group", 32),
        lambda shape, seed: pack_quantized(shape, 32, seed, is_symmetric=False),
    ),
    "gptq of rows": (
        {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": True},
        lambda shape, seed: gptq(shape, shape[1], seed),
    ),
    "awq of rows": (
        {"quant_method": "awq", "bits": 4, "group_size": -1, "version": "gemm"},
        lambda shape, seed: awq(shape, shape[1], seed),
    ),
    "compressed-tensors of rows": (
        packed_config("channel", None),
        lambda shape, seed: pack_quantized(shape, shape[1], seed, is_symmetric=False),
    ),
    "fp8": (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
        lambda shape, seed: fp8(shape, seed),
    ),
}
"""By name: what config.json says, and what writes a matrix."""


def write_rounded(
    source: Path, folder: Path, name: str, endings: tuple[str, ...] = ("_proj.weight",)
) -> tuple[Path, Path]:
    """Write a model with rounded projections, and its twin with the weights that those stand for.

    The model is one file; projections whose names have one of `endings` are rounded.
    """
    said, rounded = QUANTISATIONS[name]
    weights: dict[str, Tensor] = {}
    for path in sorted(source.glob("*.safetensors")):
        weights |= load_file(path)
    stored, plain = {}, {}
    for seed, (tensor, value) in enumerate(sorted(weights.items())):
        if not tensor.endswith(endings):
            stored[tensor] = plain[tensor] = value.float()
            continue
        made = rounded(tuple(value.shape), seed)
        stored |= {tensor.removesuffix(".weight") + end: x for end, x in made.tensors.items()}
        plain[tensor] = made.weights
    config = json.loads((source / "config.json").read_text())
    config.pop("dtype", None)
    config["torch_dtype"] = "float32"
    made_in = []
    for own, content, extra in (
        ("rounded", stored, {"quantization_config": said}),
        ("plain", plain, {}),
    ):
        made_in.append(folder / own)
        made_in[-1].mkdir(parents=True)
        save_file(content, made_in[-1] / "model.safetensors")
        (made_in[-1] / "config.json").write_text(json.dumps({**config, **extra}))
        for path in source.glob("tokenizer*"):
            shutil.copy(path, made_in[-1])
    return made_in[0], made_in[1]
