"""Compiled operators over packed weights: every format, in every variant of this processor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from packed_matrices import (
    BLOCKS,
    FP8,
    INTS,
    OWN,
    SECTIONED,
    Kept,
    check_experts,
    kept,
    matrix_of,
    matrix_over,
    name_of,
    randn,
    sections_of,
    unit_of,
    unpacked,
)
from torch import Tensor

from lowtide.core import ALIGNMENT
from lowtide.errors import InternalError, UnsupportedError
from lowtide.formats import MatrixFormat, formats, ggml, grouped_ints
from lowtide.formats.arranged import Sectioned
from lowtide.formats.convert import pack
from lowtide.formats.matrix import Bytes
from lowtide.formats.plain import convert_plain
from lowtide.formats.quantised import Floats, QuantisedRows
from lowtide.kernels.compiled import CompiledKernels
from lowtide.kernels.cpu.few_rows import FewRows
from lowtide.kernels.cpu.library import load_kernels, load_part
from lowtide.kernels.cpu.packed import MAX_FEW_ROWS, PackedOperators, block_numbers
from lowtide.kernels.cpu.packing import CompiledPacking
from lowtide.kernels.cpu.sources import PACKED, block_types
from lowtide.kernels.cpu.variants import VARIANTS, WITHOUT_DOTS
from lowtide.kernels.reference import REFERENCE
from lowtide.llm import LLM
from lowtide.model_writing.synth import synth

ROWS = (0, 1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 25, 29, MAX_FEW_ROWS)
OWN_SHAPES = ((1, 1), (5, 64), (7, 130), (300, 200), (64, 1024), (9, 63), (33, 192), (17, 1100))
FP8_SHAPES = ((1, 1), (5, 31), (131, 200), (40, 640), (300, 257))
ODD_SCALES = (0.0, -0.0, 1e-40, -3e-39, 1.2e-38, 1e-36, 1e30, 3e38, -3e38, np.inf, np.nan, -0.01)

some_formats = pytest.mark.parametrize(
    "stored",
    [*OWN, formats()["Q4_0"], formats()["Q6_K"], INTS[1], INTS[3], INTS[-1], FP8[0]],
    ids=name_of,
)


@pytest.fixture(scope="module")
def best() -> PackedOperators:
    try:
        return PackedOperators(load_kernels())
    except UnsupportedError as error:
        pytest.skip(f"nothing can be compiled here: {error}")


@pytest.fixture(params=range(len(VARIANTS)), ids=VARIANTS)
def operators(request: pytest.FixtureRequest, best: PackedOperators) -> PackedOperators:
    if request.param >= best.num_variants:
        pytest.skip("this processor has no such instructions")
    return PackedOperators(load_kernels(), request.param)


def kernels_of(operators: PackedOperators) -> CompiledKernels:
    return CompiledKernels(FewRows(load_kernels(), operators.variant), operators)


def shapes_of(stored: MatrixFormat) -> tuple[tuple[int, int], ...]:
    """Odd sizes, as far as the format has them."""
    if stored in OWN:
        return OWN_SHAPES
    if stored in FP8:
        return FP8_SHAPES
    unit = unit_of(stored)
    return (1, unit), (5, 3 * unit), (21, 9 * unit), (40, 2 * unit), (35, 17 * unit)


def same_numbers(found: Tensor, expected: Tensor) -> bool:
    """The same bits, NaNs being all alike."""
    bits = [each.masked_fill(each.isnan(), 7).view(torch.int16) for each in (found, expected)]
    return torch.equal(found.isnan(), expected.isnan()) and torch.equal(*bits)


# Unpacking


def test_sections_begin_where_python_has_them(best: PackedOperators) -> None:
    assert load_part(PACKED).lowtide_section_alignment() == ALIGNMENT


def test_every_type_of_blocks_is_compiled(best: PackedOperators) -> None:
    names = {each.name for each in BLOCKS}
    assert {*block_numbers(load_kernels())} == {*block_types()} == names


def test_a_type_that_the_library_has_otherwise_is_refused(
    best: PackedOperators, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_numbers = block_numbers.__wrapped__
    with monkeypatch.context() as patch:
        patch.setattr(formats()["Q4_1"], "block_bytes", (24,))
        with pytest.raises(InternalError, match=r"\('Q4_1', 32, 24\) here and \('Q4_1', 32, 20\)"):
            find_numbers(load_kernels())
    monkeypatch.setattr(ggml, "FORMATS", ggml.FORMATS[1:])
    with pytest.raises(InternalError, match=r"\('Q4_1', 32, 20\) here and \('Q4_0', 32, 18\)"):
        find_numbers(load_kernels())


@pytest.mark.parametrize("stored", [*OWN, *SECTIONED], ids=name_of)
def test_unpacked_bits_are_those_of_the_plain_twin(
    operators: PackedOperators, stored: MatrixFormat
) -> None:
    for shape in shapes_of(stored):
        matrices = [matrix_of(stored, shape, seed=shape[0])]
        if isinstance(stored, Sectioned):
            content = sections_of(stored, shape, shape[0], ODD_SCALES)
            matrices.append(matrix_over(stored, content, shape))
        for matrix in matrices:
            out = torch.empty(shape, dtype=torch.bfloat16)
            operators.unpack(matrix, out)
            assert same_numbers(out, unpacked(matrix))


@pytest.mark.parametrize("stored", FP8, ids=name_of)
def test_every_byte_of_float8_has_the_same_bits(
    operators: PackedOperators, stored: Sectioned
) -> None:
    content = sections_of(stored, (130, 256))
    stored.views(content, (130, 256))[0][:] = np.arange(256)
    matrix, out = matrix_over(stored, content, (130, 256)), torch.empty(130, 256).bfloat16()
    operators.unpack(matrix, out)
    assert same_numbers(out, unpacked(matrix))
    assert out[0].isnan().nonzero().flatten().tolist() == [127, 255]


@some_formats
def test_rows_are_those_of_the_whole(operators: PackedOperators, stored: MatrixFormat) -> None:
    kernels, matrix = kernels_of(operators), matrix_of(stored, (300, 256))
    whole, numbers = unpacked(matrix), torch.tensor([299, 3, 3, 140])
    for features, again in ((slice(120, 290), slice(3, 60)), (numbers, slice(1, 3))):
        part = matrix.rows(features)
        for some, wanted in ((part, whole[features]), (part.rows(again), whole[features][again])):
            out = torch.empty(some.shape, dtype=torch.bfloat16)
            kernels.unpack(some, out)
            assert torch.equal(out, wanted) and torch.equal(unpacked(some), out)
    chosen = torch.empty(4, 256, dtype=torch.bfloat16)
    kernels.select_rows(matrix.rows(slice(0, 300)), numbers, chosen)
    assert torch.equal(chosen, whole[numbers])


# Products


@pytest.mark.parametrize("stored", [*BLOCKS, *SECTIONED], ids=name_of)
def test_products_are_those_of_rounded_weights(
    operators: PackedOperators, stored: MatrixFormat
) -> None:
    few_rows = FewRows(load_kernels(), operators.variant)
    for num_outs, num_k in shapes_of(stored):
        matrix = matrix_of(stored, (num_outs, num_k), seed=num_outs)
        call = operators.matrix_call(matrix)
        assert call is not None
        weights, bias = unpacked(matrix), randn(num_outs, seed=2)
        for num_rows in ROWS if stored not in INTS or num_outs == 21 else (1, 8):
            if num_rows > call.calls.max_rows:
                continue
            x = randn(num_rows, num_k + 3, seed=1)[:, :num_k]
            for added in (None, bias):
                out = torch.full((num_rows, num_outs + 1), 7.0, dtype=torch.bfloat16)
                call.multiply(x, added, out[:, :-1])
                wanted = x.double() @ weights.double().t()
                wanted += 0 if added is None else added.double()
                torch.testing.assert_close(out[:, :-1].double(), wanted, atol=2e-4, rtol=2**-8)
                assert (out[:, -1] == 7).all()
                if stored not in OWN:  # whose sums have an order of their own
                    again = torch.empty(num_rows, num_outs, dtype=torch.bfloat16)
                    few_rows.multiply(x, weights.t(), added, again)
                    assert torch.equal(out[:, :-1], again), "the bits of weights unpacked"


@some_formats
def test_bits_depend_on_no_other_row_thread_or_piece(
    operators: PackedOperators, stored: MatrixFormat
) -> None:
    width = 520 if stored in OWN else 768
    matrix = matrix_of(stored, (1100, width))
    call = operators.matrix_call(matrix)
    assert call is not None
    max_rows = min(MAX_FEW_ROWS, call.calls.max_rows)
    x, whole = randn(max_rows, width, seed=1), torch.empty(max_rows, 1100).bfloat16()
    call.multiply(x, None, whole, 1)
    for num_threads in (2, 5):
        again = torch.empty_like(whole)
        call.multiply(x, None, again, num_threads)
        assert torch.equal(again, whole)
    for rows in ((3, 4), (1, 6), (0, max_rows - 1), (2, 2), (2, 15), (17, 21), (9, 26)):
        some = torch.empty_like(whole[slice(*rows)])
        call.multiply(x[slice(*rows)], None, some)
        assert torch.equal(some, whole[slice(*rows)])
    kernels = kernels_of(operators)
    for features in (slice(13, 90), slice(120, 1100)):
        part = torch.empty(max_rows, features.stop - features.start).bfloat16()
        kernels.multiply_by(x, matrix.rows(features), part)
        assert torch.equal(part, whole[:, features])


def test_many_rows_meet_the_same_weights(best: PackedOperators) -> None:
    matrix = matrix_of(INTS[0], (700, 512))
    x, found = randn(70, 512, seed=1), torch.empty(70, 700).bfloat16()
    plain = torch.empty_like(found)
    kernels_of(best).multiply_by(x, matrix, found)
    REFERENCE.multiply_by(x, matrix, plain)
    assert torch.equal(found, plain)


# Experts

LAYERS: tuple[Kept, ...] = (
    kept("q8", "q8", "q8"),
    kept("q4", "q4", "q4"),
    kept("Q4_K", "Q4_K", "Q6_K"),
    kept("Q8_0", "Q5_0", "BF16"),
    kept("MXFP4", "IQ4_NL", "Q4_0"),
    kept("Q5_K", "Q5_K", "Q5_1"),
    kept("IQ2_XXS", "IQ2_XS", "IQ3_S"),
    kept("IQ3_XXS", "Q2_K", "IQ2_S"),
    3 * (grouped_ints.FORMATS[4, 128, "F16", True],),
    (grouped_ints.FORMATS[4, 32, "BF16", False], grouped_ints.FORMATS[8, 64, "F32", True], None),
    (FP8[0], FP8[1], FP8[0]),
    kept("q8", "q4", "Q8_0"),
)
"""Formats of gate, up and down, as mixed as files may have them."""


SHAPES = ((1, 6, 3), (3, 1, 1), (8, 4, 4))
"""Tokens, experts, experts of a token: so few that every variant takes them."""

CASES = [(kinds, shape) for kinds in LAYERS for shape in SHAPES]
CASES += [(kinds, (MAX_FEW_ROWS, 6, 3)) for kinds in LAYERS[:2]]


@pytest.mark.parametrize(("kinds", "shape"), CASES, ids=name_of)
def test_experts_at_once_are_experts_one_by_one(
    operators: PackedOperators, kinds: Kept, shape: tuple[int, int, int]
) -> None:
    check_experts(kernels_of(operators), REFERENCE, kinds, shape)


# Packing and choice


def weights_of(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).normal(0.01, 0.1, shape).astype(np.float32)


def packed(
    weights: Floats,
    num_bits: int,
    pack: Callable[..., None] | None = None,
    importance: Floats | None = None,
) -> tuple[QuantisedRows, Bytes]:
    rows = formats()[f"q{num_bits}"].for_rows(weights.shape[1])
    assert isinstance(rows, QuantisedRows)
    content = np.zeros(rows.num_bytes(weights.size), np.uint8)
    if pack is None:
        rows.pack(weights.reshape(-1), content, importance)
    else:
        pack(rows, weights.reshape(-1).view(np.uint8), "F32", content, importance)
    return rows, content


@pytest.mark.parametrize("num_bits", [8, 4])
@pytest.mark.parametrize("shape", OWN_SHAPES)
def test_weights_are_packed_as_in_plain_python(
    operators: PackedOperators, num_bits: int, shape: tuple[int, int]
) -> None:
    packing = CompiledPacking(load_kernels(), min(operators.variant, WITHOUT_DOTS))
    weights = weights_of(*shape)
    weights[0] *= 40
    weights[-1] = 0.25
    worth = abs(weights_of(shape[1], seed=7))
    worth[::3] = 0
    for broken in (None, np.nan, np.inf):
        if broken is not None:
            weights[0, -1] = broken
        for importance in (None, worth):
            with np.errstate(invalid="ignore"):
                rows, wanted = packed(weights, num_bits, importance=importance)
            _, found = packed(weights, num_bits, packing, importance)
            assert (found == wanted).all()
            assert rows.is_finite(found) == (broken is None)


@pytest.mark.parametrize("name", ["BF16", "F16"])
def test_weights_are_packed_from_other_plain_types(best: PackedOperators, name: str) -> None:
    content = np.empty(2 * 9 * 130, np.uint8)
    convert_plain(weights_of(9 * 130).view(np.uint8), "F32", content, name)
    rows = formats()["q4"].for_rows(130)
    at_odd_address = np.concatenate((content[:1], content))[1:]
    wanted, found = (np.zeros(rows.num_bytes(9 * 130), np.uint8) for _ in range(2))
    pack(rows, content, name, wanted)
    CompiledPacking(load_kernels())(rows, at_odd_address, name, found)
    assert (found == wanted).all()


@pytest.mark.parametrize("name", ["q8", "q4"])
def test_a_model_computes_what_its_reference_does(
    best: PackedOperators, tmp_path: Path, name: str
) -> None:
    prompt = list(range(1, 40))

    def logits(folder: Path, **options: str) -> Tensor:
        with LLM(folder, context=64, format=name, **options) as llm:
            return llm.logits(prompt)

    is_near = []
    for seed in (4, 5, 6):
        folder = synth("qwen3_moe", "tiny", tmp_path / f"{seed}", seed=seed)
        found, wanted = logits(folder), logits(folder, kernels="reference")
        is_near.append((found - wanted).abs().amax(1) <= 0.05 * wanted.abs().max())
    # A near-tied router chooses another expert for one token, which those behind it see.
    assert torch.cat(is_near).float().mean() > 0.7
