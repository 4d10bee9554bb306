"""Compiled products of rows rounded to int8: the bits of their twin, in every variant."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from packed_matrices import (
    BLOCKS,
    OWN,
    Kept,
    check_experts,
    filled_slots,
    kept,
    matrix_of,
    matrix_over,
    name_of,
    randn,
    sizes_of,
    unit_of,
)
from torch import Tensor

from lowtide.engine.opening.weight_formats import ROUNDABLE
from lowtide.errors import UnsupportedError
from lowtide.formats import MatrixFormat, StoredMatrix
from lowtide.kernels.choice import choose_kernels
from lowtide.kernels.compiled import CompiledKernels
from lowtide.kernels.cpu.few_rows import FewRows
from lowtide.kernels.cpu.library import load_kernels
from lowtide.kernels.cpu.packed import PLAIN, PackedOperators
from lowtide.kernels.cpu.variants import INT8_VARIANTS
from lowtide.kernels.operands import ExpertWeights
from lowtide.kernels.reference import Kernels

TWIN = Kernels(ROUNDABLE)

all_formats = pytest.mark.parametrize("stored", BLOCKS, ids=name_of)


@pytest.fixture(scope="module")
def variants() -> list[PackedOperators]:
    """All that this CPU can run, from the plain one to the best."""
    try:
        best = PackedOperators(load_kernels(), rounds_rows=True)
    except UnsupportedError as error:
        pytest.skip(f"nothing can be compiled here: {error}")
    numbers = range(best.num_variants)
    return [PackedOperators(load_kernels(), number, rounds_rows=True) for number in numbers]


def kernels_of(operators: PackedOperators) -> CompiledKernels:
    library = load_kernels()
    return CompiledKernels(FewRows(library), PackedOperators(library), operators, ROUNDABLE)


def by_twin(x: Tensor, matrix: StoredMatrix, bias: Tensor | None = None) -> Tensor:
    out = torch.empty(len(x), matrix.shape[0], dtype=x.dtype)
    TWIN.multiply_by(x, matrix, out, bias)
    return out


def check_bits(
    variants: list[PackedOperators], matrix: StoredMatrix, x: Tensor, bias: Tensor | None = None
) -> None:
    """Those of the twin, NaNs being all alike; nothing is written beside them."""
    wanted = by_twin(x, matrix, bias)
    for operators in variants:
        out = torch.full((len(x), matrix.shape[0] + 2), 7.0, dtype=torch.bfloat16)
        call = operators.matrix_call(matrix)
        assert call is not None
        call.multiply(x, bias, out[:, :-2])
        torch.testing.assert_close(out[:, :-2], wanted, atol=0, rtol=0, equal_nan=True)
        assert (out[:, -2:] == 7).all()


def test_the_variants_of_this_processor(variants: list[PackedOperators]) -> None:
    assert [each.name for each in variants] == list(INT8_VARIANTS[: len(variants)])
    chosen = choose_kernels("auto", torch.bfloat16, rounded=ROUNDABLE)
    assert isinstance(chosen, CompiledKernels) and chosen.rounded == ROUNDABLE
    for option, dtype in (("reference", torch.bfloat16), ("auto", torch.float32)):
        plain = choose_kernels(option, dtype, rounded=ROUNDABLE)
        assert type(plain) is Kernels and plain.rounded == ROUNDABLE


@st.composite
def matrices(draw: st.DrawFn) -> tuple[MatrixFormat, tuple[int, int]]:
    """Half of them in formats of our own, which have rows of any length."""
    stored = draw(st.one_of(st.sampled_from(OWN), st.sampled_from(BLOCKS)))
    unit = unit_of(stored)
    num_k = st.one_of(st.integers(1, 70), st.sampled_from([127, 200, 512, 1024, 1025, 2112]))
    if unit > 1:
        num_k = st.one_of(st.integers(1, 9), st.sampled_from([16, 17]))
    num_outs = draw(st.one_of(st.integers(1, 40), st.sampled_from([130, 300])))
    return stored, (num_outs, unit * draw(num_k))


@examples(120)
@given(
    case=matrices(),
    num_rows=st.one_of(st.integers(0, 33), st.sampled_from([70, 130])),
    has_bias=st.booleans(),
)
def test_bits_are_those_of_the_twin(
    variants: list[PackedOperators],
    case: tuple[MatrixFormat, tuple[int, int]],
    num_rows: int,
    has_bias: bool,
) -> None:
    stored, (num_outs, num_k) = case
    x = randn(num_rows, num_k + 3)[:, 1 : num_k + 1]
    bias = randn(num_outs, seed=2) if has_bias else None
    check_bits(variants, matrix_of(stored, (num_outs, num_k)), x, bias)


@all_formats
def test_any_bytes_give_the_bits_of_the_twin(
    variants: list[PackedOperators], stored: MatrixFormat
) -> None:
    """Scales that are nothing, tiny, or no numbers, too."""
    shape = (40, 18 * max(64, unit_of(stored)))
    num_bytes = stored.for_rows(shape[1]).matrix_bytes(shape)
    content = np.random.default_rng(3).integers(0, 256, num_bytes, np.uint8)
    check_bits(variants, matrix_over(stored, content, shape), randn(3, shape[1]))


@all_formats
def test_bits_depend_on_no_other_row_thread_or_piece(
    variants: list[PackedOperators], stored: MatrixFormat
) -> None:
    num_rows, width = (70, 520) if stored in OWN else (18, 768)
    matrix, x = matrix_of(stored, (1100, width)), randn(num_rows, width)
    whole = by_twin(x, matrix)
    for operators in variants:
        call = operators.matrix_call(matrix)
        assert call is not None
        for num_threads in (1, 2, 5):
            again = torch.empty_like(whole)
            call.multiply(x, None, again, num_threads)
            assert torch.equal(again, whole)
        for rows in ((3, 4), (1, 6), (2, 18), (5, 18), (7, 31), (2, 40)):
            some = torch.empty_like(whole[slice(*rows)])
            call.multiply(x[slice(*rows)], None, some)
            assert torch.equal(some, whole[slice(*rows)])
        part = torch.empty(num_rows, 77, dtype=torch.bfloat16)
        operators.matrix_call(matrix.rows(slice(13, 90))).multiply(x, None, part)
        assert torch.equal(part, whole[:, 13:90])


@all_formats
def test_what_is_nothing_or_not_finite(
    variants: list[PackedOperators], stored: MatrixFormat
) -> None:
    width = 100 if stored in OWN else 256
    matrix, x = matrix_of(stored, (3, width)), torch.zeros(5, width, dtype=torch.bfloat16)
    x[1, 3], x[2, 70], x[3, 3], x[4] = 1e-38, torch.inf, torch.nan, 3.3e38
    wanted = by_twin(x, matrix)
    assert (wanted[:2] == 0).all() and wanted[2:4].isnan().all()
    check_bits(variants, matrix, x)


LAYERS: tuple[Kept, ...] = (
    kept("q8", "q8", "q8"),
    kept("q4", "q4", "q4"),
    kept("q8", "q4", "Q8_0"),
    kept("Q4_K", "Q4_K", "Q6_K"),
    kept("Q8_0", "Q5_0", "Q4_1"),
    kept("MXFP4", "IQ4_NL", "Q4_0"),
    kept("Q5_K", "Q5_K", "Q5_1"),
    kept("IQ2_XXS", "IQ3_XXS", "IQ2_S"),
    kept("IQ2_XS", "Q3_K", "IQ3_S"),
)
"""Formats of gate, up and down, as mixed as files may have them."""


CASES = [(kinds, shape) for kinds in LAYERS for shape in ((1, 4, 4), (5, 4, 1), (32, 4, 3))]
CASES += [(kinds, (num_tokens, 40, 20)) for kinds in LAYERS[:2] for num_tokens in (2, 7)]
"""And tokens, experts, experts of a token."""


@pytest.mark.parametrize(("kinds", "shape"), CASES, ids=name_of)
def test_experts_at_once_are_experts_one_by_one(
    variants: list[PackedOperators], kinds: Kept, shape: tuple[int, int, int]
) -> None:
    """With the same bits in every variant."""
    sums = [check_experts(kernels_of(each), TWIN, kinds, shape, 2e-2) for each in variants]
    assert all(torch.equal(each, sums[0]) for each in sums)


@pytest.mark.parametrize("kinds", LAYERS, ids=name_of)
def test_an_expert_of_many_rows_gives_each_what_it_has_alone(
    variants: list[PackedOperators], kinds: Kept
) -> None:
    """The rows are too many to be rounded all at once."""
    slots = filled_slots(kinds, 1, 1)
    weights_of = slots.weights(0, 0)
    assert isinstance(weights_of, ExpertWeights)
    hidden, width = sizes_of(kinds)
    x = randn(530, hidden, seed=4)
    for operators in variants:
        kernels = kernels_of(operators)

        def outputs(rows: Tensor, kernels: CompiledKernels = kernels) -> Tensor:
            gate, out = torch.empty(len(rows), width).bfloat16(), rows.clone()
            kernels.gated_mlp(out, weights_of, gate, torch.empty_like(gate), out)
            return out

        of_all = outputs(x)
        for row in (0, 255, 256, 300, 511, 512, 529):
            assert torch.equal(of_all[row : row + 1], outputs(x[row : row + 1])), operators.name


def test_rows_are_not_rounded_for_what_is_bfloat16(variants: list[PackedOperators]) -> None:
    assert variants[0].experts((0, PLAIN, 1)) is None
    matrix, x = randn(40, 256, seed=1), randn(3, 256)
    out = torch.empty(3, 40, dtype=torch.bfloat16)
    kernels_of(variants[0]).multiply_by(x, matrix, out)
    wanted = torch.empty_like(out)
    FewRows(load_kernels()).multiply(x, matrix.t(), None, wanted)
    assert torch.equal(out, wanted)
