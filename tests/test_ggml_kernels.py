"""Compiled operators over ggml's packed types, in every variant that this processor runs."""

from __future__ import annotations

import pytest
import torch
from computing import summed_at_once
from gguf.constants import GGMLQuantizationType as Type
from gguf_files import random_blocks
from torch import Tensor

from lowtide.core import MoEShape
from lowtide.errors import UnsupportedError
from lowtide.experts.at_once import ExpertsAtOnce
from lowtide.experts.layout import SlotLayout
from lowtide.experts.rows import Routing
from lowtide.experts.slots import ExpertSlots
from lowtide.formats import formats
from lowtide.formats.ggml import FORMATS, GgmlFormat, PackedMatrix
from lowtide.kernels.choice import choose_kernels
from lowtide.kernels.compiled import CompiledKernels
from lowtide.kernels.cpu.few_rows import VARIANTS, FewRows
from lowtide.kernels.cpu.library import load_kernels
from lowtide.kernels.cpu.packed import PackedOperators
from lowtide.kernels.operands import ExpertWeights
from lowtide.kernels.reference import REFERENCE
from lowtide.memory.arena import Arena

ROWS = (0, 1, 2, 3, 4, 7, 8, 13, 16, 29)


@pytest.fixture(scope="module")
def best() -> PackedOperators:
    try:
        return PackedOperators.load()
    except UnsupportedError as error:
        pytest.skip(f"nothing can be compiled here: {error}")


@pytest.fixture(params=range(len(VARIANTS)), ids=VARIANTS)
def operators(request: pytest.FixtureRequest, best: PackedOperators) -> PackedOperators:
    if request.param >= best.num_variants:
        pytest.skip("this processor has no such instructions")
    return PackedOperators.load(request.param)


def few_rows_beside(operators: PackedOperators) -> FewRows:
    return FewRows(load_kernels(), operators.variant)


def matrix_of(stored: GgmlFormat, shape: tuple[int, int], seed: int = 0) -> PackedMatrix:
    blocks = random_blocks(shape, Type[stored.ggml_name], seed)
    return stored.matrix([torch.from_numpy(blocks).reshape(-1)], shape)


def unpacked(matrix: PackedMatrix) -> Tensor:
    whole = torch.empty(matrix.shape, dtype=torch.bfloat16)
    matrix.unpack(whole)
    return whole


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16()


@pytest.mark.parametrize("stored", FORMATS, ids=lambda each: each.ggml_name)
def test_products_are_those_of_rounded_weights(
    operators: PackedOperators, stored: GgmlFormat
) -> None:
    few_rows = few_rows_beside(operators)
    size = stored.block_size
    for num_outs, num_k in (
        (1, size),
        (5, 3 * size),
        (21, 9 * size),
        (40, 2 * size),
        (35, 17 * size),
    ):
        matrix = matrix_of(stored, (num_outs, num_k), seed=num_outs)
        weights, bias = unpacked(matrix), random(num_outs, seed=2)
        for num_rows in ROWS:
            if num_rows > operators.calls.max_rows:
                continue
            x = random(num_rows, num_k + 3, seed=1)[:, :num_k]
            for added in (None, bias):
                out = torch.full((num_rows, num_outs + 1), 7.0, dtype=torch.bfloat16)
                operators.matrix_call(matrix).multiply(x, added, out[:, :-1])
                wanted = x.double() @ weights.double().t()
                wanted += 0 if added is None else added.double()
                torch.testing.assert_close(out[:, :-1].double(), wanted, atol=2e-4, rtol=2**-7)
                assert (out[:, -1] == 7).all()
                again = torch.empty(num_rows, num_outs, dtype=torch.bfloat16)
                few_rows.multiply(x, weights.t(), added, again)
                assert torch.equal(out[:, :-1], again), "the bits of weights unpacked"


@pytest.mark.parametrize("name", ["Q4_0", "Q6_K"])
def test_bits_depend_on_no_other_row_thread_or_piece(operators: PackedOperators, name: str) -> None:
    stored = formats()[name]
    assert isinstance(stored, GgmlFormat)
    matrix, max_rows = matrix_of(stored, (1100, 768)), operators.calls.max_rows
    x = random(max_rows, 768, seed=1)
    whole = torch.empty(max_rows, 1100, dtype=torch.bfloat16)
    operators.matrix_call(matrix).multiply(x, None, whole, 1)
    for num_threads in (2, 5):
        again = torch.empty_like(whole)
        operators.matrix_call(matrix).multiply(x, None, again, num_threads)
        assert torch.equal(again, whole)
    for rows in (slice(3, 4), slice(1, 6), slice(0, max_rows - 1)):
        some = torch.empty_like(whole[rows])
        operators.matrix_call(matrix).multiply(x[rows], None, some)
        assert torch.equal(some, whole[rows])
    part = torch.empty(max_rows, 77, dtype=torch.bfloat16)
    operators.matrix_call(matrix.rows(slice(13, 90))).multiply(x, None, part)
    assert torch.equal(part, whole[:, 13:90])


LAYERS = (
    ("Q4_K", "Q4_K", "Q6_K"),
    ("Q8_0", "Q5_0", "BF16"),
    ("MXFP4", "IQ4_NL", "Q4_0"),
    ("Q5_K", "Q5_K", "Q5_1"),
    ("IQ2_XXS", "IQ2_XS", "IQ3_S"),
    ("IQ3_XXS", "Q2_K", "IQ2_S"),
)
"""Types of gate, up and down, as mixed as files may have them."""


def slots_of(shape: MoEShape) -> ExpertSlots:
    by_name = {each.ggml_name: each for each in FORMATS}
    kept = [tuple(by_name.get(name) for name in names) for names in LAYERS]
    layout = SlotLayout.of(shape, torch.bfloat16, kept=kept)
    slots = ExpertSlots(Arena(layout.num_bytes * shape.num_experts), layout)
    return slots


def fill(slots: ExpertSlots, layer: int, num_experts: int) -> None:
    for expert in range(num_experts):
        for part, place in enumerate(slots.layout.layers[layer].parts):
            assert len(place.shape) == 2
            if isinstance(place.format, GgmlFormat):
                kind = Type[place.format.ggml_name]
                content = random_blocks(place.shape, kind, seed=10 * expert + part)
            else:
                content = random(*place.shape, seed=expert).mul_(0.05).view(torch.uint8).numpy()
            slots.part(layer, expert, part)[:] = content.reshape(-1)


@pytest.mark.parametrize("layer", range(len(LAYERS)))
@pytest.mark.parametrize(("num_tokens", "num_experts", "k"), [(1, 6, 3), (3, 1, 1), (8, 4, 4)])
def test_experts_at_once_are_experts_one_by_one(
    operators: PackedOperators, layer: int, num_tokens: int, num_experts: int, k: int
) -> None:
    hidden, width = 256, 512
    slots = slots_of(MoEShape(len(LAYERS), num_experts, k, hidden, width))
    fill(slots, layer, num_experts)
    kernels = CompiledKernels(few_rows_beside(operators), operators)
    x = random(num_tokens, hidden, seed=3)
    generator = torch.Generator().manual_seed(num_tokens)
    chosen = [torch.randperm(num_experts, generator=generator)[:k] for _ in range(num_tokens)]
    experts = torch.stack([each.sort().values for each in chosen])
    routing = Routing(experts, torch.rand(num_tokens, k, generator=generator))
    wanted = torch.zeros(num_tokens, hidden)
    for token in range(num_tokens):
        for expert, weight in zip(experts[token].tolist(), routing.weights[token], strict=True):
            one, gate = x[token : token + 1].clone(), torch.empty(1, width, dtype=torch.bfloat16)
            weights_of = slots.weights(layer, expert)
            assert isinstance(weights_of, ExpertWeights)
            plain = gate.clone(), gate.clone(), one.clone()
            REFERENCE.gated_mlp(one, weights_of, *plain)
            kernels.gated_mlp(one, weights_of, gate, torch.empty_like(gate), one)
            torch.testing.assert_close(one, plain[2], atol=5e-3, rtol=2**-5)
            wanted[token] += weight * one[0].float()
    for num_threads in (1, 3):
        at_once = ExpertsAtOnce.of(slots, kernels, num_threads)
        assert at_once is not None
        out = summed_at_once(at_once, x, routing, width, layer, num_threads)
        assert torch.equal(out, wanted)


def test_kernels_are_compiled_where_weights_are_packed(best: PackedOperators) -> None:
    assert isinstance(choose_kernels("auto", torch.bfloat16), CompiledKernels)
    assert choose_kernels("reference", torch.bfloat16) is REFERENCE
    assert choose_kernels("auto", torch.float32) is REFERENCE
