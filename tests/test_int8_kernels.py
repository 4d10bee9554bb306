"""Compiled products of rows rounded to int8: the bits of their twin, in every variant."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from computing import summed_at_once
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowtide.core import MoEShape
from lowtide.errors import UnsupportedError
from lowtide.experts.at_once import ExpertsAtOnce
from lowtide.experts.layout import SlotLayout
from lowtide.experts.rows import Routing
from lowtide.experts.slots import ExpertSlots
from lowtide.formats import formats
from lowtide.formats.quantised_matrix import QuantisedMatrix
from lowtide.kernels.choice import choose_kernels
from lowtide.kernels.compiled import CompiledKernels
from lowtide.kernels.cpu.few_rows import FewRows
from lowtide.kernels.cpu.packed import INT8_VARIANTS, MAX_FEW_ROWS, PackedOperators
from lowtide.kernels.operands import ExpertWeights
from lowtide.kernels.reference import Kernels
from lowtide.memory.arena import Arena

TWIN = Kernels(rounds_rows=True)


@pytest.fixture(scope="module")
def variants() -> list[PackedOperators]:
    """All that this CPU can run, from the plain one to the best."""
    try:
        best = PackedOperators.load(rounds_rows=True)
    except UnsupportedError as error:
        pytest.skip(f"nothing can be compiled here: {error}")
    numbers = range(best.num_variants)
    return [PackedOperators.load(number, rounds_rows=True) for number in numbers]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def matrix_of(num_bits: int, shape: tuple[int, int], seed: int = 1) -> QuantisedMatrix:
    """Of any codes, scales and zeros."""
    rows = formats()[f"q{num_bits}"].for_rows(shape[1])
    generator = np.random.default_rng(seed)
    content = generator.integers(0, 256, (shape[0], rows.block_bytes[0]), np.uint8)
    num_groups = -(-shape[1] // 64)
    ends = generator.normal(0, 0.1, (shape[0], 2 * num_groups)).astype(np.float16)
    content[:, -4 * num_groups :] = ends.view(np.uint8)
    matrix = rows.matrix([torch.from_numpy(content.reshape(-1))], shape)
    assert isinstance(matrix, QuantisedMatrix)
    return matrix


def test_the_variants_of_this_processor(variants: list[PackedOperators]) -> None:
    assert [each.name for each in variants] == list(INT8_VARIANTS[: len(variants)])
    chosen = choose_kernels("auto", torch.bfloat16, rounds_rows=True)
    assert isinstance(chosen, CompiledKernels) and chosen.rounds_rows
    for option, dtype in (("reference", torch.bfloat16), ("auto", torch.float32)):
        plain = choose_kernels(option, dtype, rounds_rows=True)
        assert type(plain) is Kernels and plain.rounds_rows


sizes = st.one_of(st.integers(1, 70), st.sampled_from([127, 200, 512, 1024, 1025, 2112]))


@examples(60)
@given(
    num_bits=st.sampled_from([8, 4]),
    num_rows=st.one_of(st.integers(0, 33), st.sampled_from([70, 130])),
    num_outs=st.one_of(st.integers(1, 40), st.just(300)),
    num_k=sizes,
    has_bias=st.booleans(),
)
def test_bits_are_those_of_the_twin(
    variants: list[PackedOperators],
    num_bits: int,
    num_rows: int,
    num_outs: int,
    num_k: int,
    has_bias: bool,
) -> None:
    matrix = matrix_of(num_bits, (num_outs, num_k))
    x = randn(num_rows, num_k + 3)[:, 1 : num_k + 1]
    bias = randn(num_outs, seed=2) if has_bias else None
    wanted = torch.empty(num_rows, num_outs, dtype=torch.bfloat16)
    TWIN.multiply_by(x, matrix, wanted, bias)
    for operators in variants:
        out = torch.full((num_rows, num_outs + 2), 7.0, dtype=torch.bfloat16)
        operators.matrix_call(matrix).multiply(x, bias, out[:, :-2])
        assert torch.equal(out[:, :-2], wanted), operators.name
        assert (out[:, -2:] == 7).all()


@pytest.mark.parametrize("num_bits", [8, 4])
def test_bits_depend_on_no_other_row_thread_or_piece(
    variants: list[PackedOperators], num_bits: int
) -> None:
    matrix, x = matrix_of(num_bits, (1100, 520)), randn(70, 520)
    whole = torch.empty(70, 1100, dtype=torch.bfloat16)
    TWIN.multiply_by(x, matrix, whole)
    for operators in variants:
        for num_threads in (1, 2, 5):
            again = torch.empty_like(whole)
            operators.matrix_call(matrix).multiply(x, None, again, num_threads)
            assert torch.equal(again, whole)
        for rows in (slice(3, 4), slice(1, 6), slice(5, 18), slice(7, 31), slice(2, 40)):
            some = torch.empty_like(whole[rows])
            operators.matrix_call(matrix).multiply(x[rows], None, some)
            assert torch.equal(some, whole[rows])
        part = torch.empty(70, 77, dtype=torch.bfloat16)
        operators.matrix_call(matrix.rows(slice(13, 90))).multiply(x, None, part)
        assert torch.equal(part, whole[:, 13:90])


@pytest.mark.parametrize("num_bits", [8, 4])
def test_what_is_nothing_or_not_finite(variants: list[PackedOperators], num_bits: int) -> None:
    matrix, x = matrix_of(num_bits, (3, 100)), torch.zeros(5, 100, dtype=torch.bfloat16)
    x[1, 3], x[2, 70], x[3, 3], x[4] = 1e-38, torch.inf, torch.nan, 3.3e38
    wanted = torch.empty(5, 3, dtype=torch.bfloat16)
    TWIN.multiply_by(x, matrix, wanted)
    assert (wanted[:2] == 0).all() and wanted[2:4].isnan().all()
    for operators in variants:
        out = torch.empty_like(wanted)
        operators.matrix_call(matrix).multiply(x, None, out)
        torch.testing.assert_close(out, wanted, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("num_bits", [8, 4])
@pytest.mark.parametrize("num_tokens", [1, 2, 7, MAX_FEW_ROWS])
def test_experts_at_once_are_experts_one_by_one(
    variants: list[PackedOperators], num_bits: int, num_tokens: int
) -> None:
    hidden, width, num_experts = 96, 40, 40
    chosen = (formats()[f"q{num_bits}"],) * 3
    layout = SlotLayout.of(MoEShape(1, 40, 20, hidden, width), torch.bfloat16, kept=[chosen])
    slots = ExpertSlots(Arena(layout.num_bytes * num_experts), layout)
    for expert in range(num_experts):
        for part, place in enumerate(layout.layers[0].parts):
            matrix = matrix_of(num_bits, (place.shape[0], place.shape[1]), 10 * expert + part)
            slots.part(0, expert, part)[:] = matrix.data.numpy().reshape(-1)
    x = randn(num_tokens, hidden, seed=3)
    generator = torch.Generator().manual_seed(num_tokens)
    experts = torch.stack(
        [torch.randperm(40, generator=generator)[:20].sort().values for _ in range(num_tokens)]
    )
    routing = Routing(experts, torch.rand(num_tokens, 20, generator=generator))
    for operators in variants:
        kernels = CompiledKernels(FewRows.load(), PackedOperators.load(), operators)
        wanted = torch.zeros(num_tokens, hidden)
        for token in range(num_tokens):
            for expert, weight in zip(experts[token].tolist(), routing.weights[token], strict=True):
                one, gate = x[token : token + 1].clone(), torch.empty(1, width).bfloat16()
                weights_of = slots.weights(0, expert)
                assert isinstance(weights_of, ExpertWeights)
                up = torch.empty_like(gate)
                kernels.multiply_by(one, weights_of.gate, gate)
                kernels.multiply_by(one, weights_of.up, up)
                torch.nn.functional.silu(gate, inplace=True).mul_(up)
                kernels.multiply_by(gate, weights_of.down, one)
                wanted[token] += weight * one[0].float()
        for num_threads in (1, 3):
            at_once = ExpertsAtOnce.of(slots, kernels, num_threads)
            assert at_once is not None
            out = summed_at_once(at_once, x, routing, width, 0, num_threads)
            torch.testing.assert_close(out, wanted, atol=2e-2 * wanted.abs().max(), rtol=2**-6)
