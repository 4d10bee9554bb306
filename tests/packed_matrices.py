"""Random matrices in every packed format, and slots with experts of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from computing import summed_at_once
from gguf.constants import GGMLQuantizationType as Type
from gguf_files import random_blocks
from torch import Tensor

from lowtide.core import MoEShape
from lowtide.experts.batched_experts import BatchedExperts
from lowtide.experts.layout import SlotLayout
from lowtide.experts.rows import Routing
from lowtide.experts.slots import ExpertSlots
from lowtide.formats import MatrixFormat, StoredMatrix, formats, fp8, ggml, grouped_ints
from lowtide.formats.arranged import Sectioned
from lowtide.formats.ggml import GgmlFormat
from lowtide.formats.grouped_ints import GroupedInts
from lowtide.formats.matrix import Bytes
from lowtide.formats.plain import convert_plain
from lowtide.formats.quantised import QuantisedRows
from lowtide.kernels.compiled import CompiledKernels
from lowtide.kernels.operands import ExpertWeights
from lowtide.kernels.reference import Kernels
from lowtide.memory.arena import Arena

OWN = (formats()["q8"], formats()["q4"])
BLOCKS = (*OWN, *ggml.FORMATS)
"""Formats that rows in int8 are multiplied with, too."""
INTS = tuple(grouped_ints.FORMATS.values())
FP8 = tuple(each.in_memory for each in fp8.FORMATS.values())
SECTIONED: tuple[Sectioned, ...] = (*INTS, *FP8)

Kept = tuple[MatrixFormat | None, MatrixFormat | None, MatrixFormat | None]
"""The formats of gate, up and down; None: bfloat16."""


def kept(gate: str, up: str, down: str) -> Kept:
    """By their names."""
    chosen = [None if name == "BF16" else formats()[name] for name in (gate, up, down)]
    return chosen[0], chosen[1], chosen[2]


def name_of(stored: object) -> str:
    """A test's id."""
    if isinstance(stored, tuple):
        return ", ".join("BF16" if each is None else name_of(each) for each in stored)
    return stored.name if isinstance(stored, MatrixFormat) else str(stored)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def content_of(stored: MatrixFormat, shape: tuple[int, int], seed: int = 0) -> Bytes:
    """Any codes and zeros, with scales that give weights of a usual size."""
    if isinstance(stored, GgmlFormat):
        return random_blocks(shape, Type[stored.ggml_name], seed).reshape(-1)
    if isinstance(stored, Sectioned):
        return sections_of(stored, shape, seed)
    rows, rng = stored.for_rows(shape[1]), np.random.default_rng(seed)
    assert isinstance(rows, QuantisedRows)
    content = rng.integers(0, 256, (shape[0], rows.block_bytes[0]), np.uint8)
    scales = rng.uniform(0.3, 1, (shape[0], rows.num_groups)) * 0.2 / 2**rows.num_bits
    ends = np.concatenate((scales, -scales * 2 ** (rows.num_bits - 1)), axis=1).astype(np.float16)
    content[:, -4 * rows.num_groups :] = ends.view(np.uint8)
    return content.reshape(-1)


def sections_of(
    stored: Sectioned, shape: tuple[int, int], seed: int = 0, scales: Sequence[float] = ()
) -> Bytes:
    """As `content_of`, or with some of `scales`."""
    rng = np.random.default_rng(seed)
    content = rng.integers(0, 256, stored.matrix_bytes(shape), np.uint8)
    codes, of_scales, *zeros = stored.views(content, shape)
    if isinstance(stored, GroupedInts):
        most = 2**stored.num_bits
        for each in zeros:
            each %= min(most + 1, 255)  # GPTQ's are 1 to 16
    else:
        most = 100
        codes[codes & 127 == 127] = 3  # NaN
    num_scales = of_scales.size // (4 if stored.scale_dtype == "F32" else 2)
    chosen = rng.uniform(0.3, 1, num_scales) * 0.1 / most
    if scales:
        chosen = rng.choice(np.array(scales), num_scales)
    flat = np.empty(of_scales.size, np.uint8)
    with np.errstate(over="ignore"):
        convert_plain(chosen.astype(np.float32).view(np.uint8), "F32", flat, stored.scale_dtype)
    of_scales[:] = flat.reshape(of_scales.shape)
    return content


def matrix_over(stored: MatrixFormat, content: Bytes, shape: tuple[int, int]) -> StoredMatrix:
    return stored.for_rows(shape[1]).matrix([torch.from_numpy(content)], shape)


def matrix_of(stored: MatrixFormat, shape: tuple[int, int], seed: int = 0) -> StoredMatrix:
    return matrix_over(stored, content_of(stored, shape, seed), shape)


def unpacked(matrix: StoredMatrix) -> Tensor:
    whole = torch.empty(matrix.shape, dtype=torch.bfloat16)
    matrix.unpack(whole)
    return whole


def unit_of(stored: MatrixFormat) -> int:
    """Return the number that a row's length is a multiple of."""
    if isinstance(stored, GroupedInts):
        return stored.group
    return stored.block_size if isinstance(stored, GgmlFormat) else 1


def sizes_of(kinds: Kept) -> tuple[int, int]:
    """Hidden size and width of an expert: odd ones where all formats have them."""
    return (96, 40) if {*kinds} <= {*OWN} else (256, 512)


def filled_slots(kinds: Kept, num_experts: int, k: int) -> ExpertSlots:
    """Experts of one layer, expert e in slot e."""
    hidden, width = sizes_of(kinds)
    shape = MoEShape(1, num_experts, k, hidden, width)
    layout = SlotLayout.of(shape, torch.bfloat16, kept=[kinds])
    slots = ExpertSlots(Arena(layout.num_bytes * num_experts), layout)
    for expert in range(num_experts):
        places = zip(kinds, layout.layers[0].parts, strict=True)
        for part, (stored, place) in enumerate(places):
            seed, (rows, columns) = 10 * expert + part, place.shape
            if stored is None:
                content = randn(rows, columns, seed=seed).mul_(0.05).view(torch.uint8).numpy()
            else:
                content = content_of(stored, (rows, columns), seed)
            slots.part(0, expert, part)[:] = content.reshape(-1)
    return slots


def routed(num_tokens: int, num_experts: int, k: int) -> Routing:
    """K experts of each token, ascending."""
    generator = torch.Generator().manual_seed(num_tokens)
    chosen = [torch.randperm(num_experts, generator=generator)[:k] for _ in range(num_tokens)]
    experts = torch.stack([each.sort().values for each in chosen])
    return Routing(experts, torch.rand(num_tokens, k, generator=generator))


def check_experts(
    kernels: CompiledKernels,
    twin: Kernels,
    kinds: Kept,
    shape: tuple[int, int, int],
    share: float = 5e-3,
) -> Tensor:
    """Assert that experts in one call have the bits of one by one and are near those of `twin`.

    Returns their sum. shape: tokens, experts, experts of a token. share: of the largest number, the
    difference that still is near.
    """
    num_tokens, num_experts, k = shape
    slots, routing = filled_slots(kinds, num_experts, k), routed(num_tokens, num_experts, k)
    hidden, width = sizes_of(kinds)
    x, wanted = randn(num_tokens, hidden, seed=3), torch.zeros(num_tokens, hidden)
    for token in range(num_tokens):
        chosen = zip(routing.experts[token].tolist(), routing.weights[token], strict=True)
        for expert, weight in chosen:
            one, gate = x[token : token + 1].clone(), torch.empty(1, width).bfloat16()
            weights_of = slots.weights(0, expert)
            assert isinstance(weights_of, ExpertWeights)
            plain = gate.clone(), gate.clone(), one.clone()
            if token < 2:
                twin.gated_mlp(one, weights_of, *plain)
            kernels.gated_mlp(one, weights_of, gate, torch.empty_like(gate), one)
            if token < 2:  # SiLU is not rounded alike
                limit = share * plain[2].abs().max().item()
                torch.testing.assert_close(one, plain[2], atol=limit, rtol=2**-6)
            wanted[token] += weight * one[0].float()
    for num_threads in (1, 3):
        batched = BatchedExperts.of(slots, kernels, num_threads)
        assert batched is not None
        out = summed_at_once(batched, x, routing, width, 0, num_threads)
        assert torch.equal(out, wanted)
    return wanted
