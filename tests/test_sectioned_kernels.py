"""Compiled operators over integers in groups and FP8 by blocks, in every variant that this
processor runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from computing import summed_at_once
from torch import Tensor

from lowtide.core import ALIGNMENT, MoEShape
from lowtide.errors import UnsupportedError
from lowtide.experts.at_once import ExpertsAtOnce
from lowtide.experts.layout import SlotLayout
from lowtide.experts.rows import Routing
from lowtide.experts.slots import ExpertSlots
from lowtide.formats import MatrixFormat, fp8, grouped_ints
from lowtide.formats.arranged import Sectioned, SectionedMatrix
from lowtide.formats.grouped_ints import GroupedInts
from lowtide.formats.matrix import Bytes
from lowtide.formats.plain import convert_plain
from lowtide.kernels.choice import choose_kernels
from lowtide.kernels.compiled import CompiledKernels
from lowtide.kernels.cpu.few_rows import VARIANTS, FewRows
from lowtide.kernels.cpu.library import load_kernels
from lowtide.kernels.cpu.packed import PackedOperators
from lowtide.kernels.operands import ExpertWeights
from lowtide.kernels.reference import REFERENCE
from lowtide.memory.arena import Arena

FP8 = tuple(each.in_memory for each in fp8.FORMATS.values())
INTS = tuple(grouped_ints.FORMATS.values())
FORMATS: tuple[Sectioned, ...] = (*INTS, *FP8)

ROWS = (0, 1, 2, 3, 7, 8, 13, 16, 29)

ODD_SCALES = (0.0, -0.0, 1e-40, -3e-39, 1.2e-38, 1e-36, 1e30, 3e38, -3e38, np.inf, np.nan, -0.01)


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


def fill(
    stored: Sectioned,
    content: Bytes,
    shape: tuple[int, int],
    seed: int,
    scales: Sequence[float] = (),
) -> None:
    """Any codes and zeros, with scales that give weights of a usual size, or some of `scales`."""
    rng = np.random.default_rng(seed)
    content[:] = rng.integers(0, 256, len(content), np.uint8)
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


def matrix_of(
    stored: Sectioned, shape: tuple[int, int], seed: int = 0, scales: Sequence[float] = ()
) -> SectionedMatrix:
    content = np.empty(stored.matrix_bytes(shape), np.uint8)
    fill(stored, content, shape, seed, scales)
    return stored.matrix([torch.from_numpy(content)], shape)


def unpacked(matrix: SectionedMatrix) -> Tensor:
    whole = torch.empty(matrix.shape, dtype=torch.bfloat16)
    matrix.unpack(whole)
    return whole


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16()


def shapes_of(stored: Sectioned) -> list[tuple[int, int]]:
    """Odd sizes, as far as the format has them."""
    if isinstance(stored, GroupedInts):
        group = stored.group
        return [(1, group), (5, 3 * group), (21, 9 * group), (40, 20 * group)]
    return [(1, 1), (5, 31), (131, 200), (40, 640), (300, 257)]


def same_numbers(found: Tensor, expected: Tensor) -> bool:
    """The same bits, NaNs being all alike."""
    bits = [each.masked_fill(each.isnan(), 7).view(torch.int16) for each in (found, expected)]
    return torch.equal(found.isnan(), expected.isnan()) and torch.equal(*bits)


def test_sections_begin_where_python_has_them(best: PackedOperators) -> None:
    assert load_kernels().lowtide_section_alignment() == ALIGNMENT


@pytest.mark.parametrize("stored", FORMATS, ids=lambda each: each.name)
def test_unpacked_bits_are_those_of_the_plain_twin(
    operators: PackedOperators, stored: Sectioned
) -> None:
    for scales in ((), ODD_SCALES):
        for shape in shapes_of(stored):
            matrix = matrix_of(stored, shape, seed=shape[0], scales=scales)
            out = torch.empty(shape, dtype=torch.bfloat16)
            operators.unpack(matrix, out)
            assert same_numbers(out, unpacked(matrix))


@pytest.mark.parametrize("stored", FP8, ids=lambda each: each.name)
def test_every_byte_of_float8_has_the_same_bits(
    operators: PackedOperators, stored: Sectioned
) -> None:
    matrix = matrix_of(stored, (130, 256))
    stored.views(matrix.content.numpy(), (130, 256))[0][:] = np.arange(256)
    out = torch.empty(130, 256, dtype=torch.bfloat16)
    operators.unpack(matrix, out)
    assert same_numbers(out, unpacked(matrix))
    assert out[0].isnan().nonzero().flatten().tolist() == [127, 255]


@pytest.mark.parametrize("stored", [INTS[1], INTS[-1], FP8[0]], ids=lambda each: each.name)
def test_rows_are_those_of_the_whole(operators: PackedOperators, stored: Sectioned) -> None:
    kernels = CompiledKernels(few_rows_beside(operators), operators)
    matrix = matrix_of(stored, (300, 256))
    whole = unpacked(matrix)
    numbers = torch.tensor([299, 3, 3, 140])
    for features, again in ((slice(120, 290), slice(3, 60)), (numbers, slice(1, 3))):
        part = matrix.rows(features)
        out = torch.empty(part.shape, dtype=torch.bfloat16)
        kernels.unpack(part, out)
        assert torch.equal(out, whole[features]) and torch.equal(unpacked(part), out)
        some = part.rows(again)
        out = torch.empty(some.shape, dtype=torch.bfloat16)
        kernels.unpack(some, out)
        assert torch.equal(out, whole[features][again])
    chosen = torch.empty(4, 256, dtype=torch.bfloat16)
    kernels.select_rows(matrix.rows(slice(0, 300)), numbers, chosen)
    assert torch.equal(chosen, whole[numbers])


def few_rows_beside(operators: PackedOperators) -> FewRows:
    return FewRows(load_kernels(), operators.variant)


@pytest.mark.parametrize("stored", FORMATS, ids=lambda each: each.name)
def test_products_are_those_of_rounded_weights(
    operators: PackedOperators, stored: Sectioned
) -> None:
    few_rows = few_rows_beside(operators)
    for shape in shapes_of(stored):
        num_outs, num_k = shape
        matrix = matrix_of(stored, shape, seed=num_outs)
        call = operators.matrix_call(matrix)
        assert call is not None
        weights, bias = unpacked(matrix), random(num_outs, seed=2)
        for num_rows in ROWS if shape[0] == 21 or isinstance(stored, fp8.Fp8Blocks) else (1, 8):
            if num_rows > operators.calls.max_rows:
                continue
            x = random(num_rows, num_k + 3, seed=1)[:, :num_k]
            for added in (None, bias):
                out = torch.full((num_rows, num_outs + 1), 7.0, dtype=torch.bfloat16)
                call.multiply(x, added, out[:, :-1])
                wanted = x.double() @ weights.double().t()
                wanted += 0 if added is None else added.double()
                torch.testing.assert_close(out[:, :-1].double(), wanted, atol=2e-4, rtol=2**-7)
                assert (out[:, -1] == 7).all()
                again = torch.empty(num_rows, num_outs, dtype=torch.bfloat16)
                few_rows.multiply(x, weights.t(), added, again)
                assert torch.equal(out[:, :-1], again), "the bits of weights unpacked"


@pytest.mark.parametrize("stored", [INTS[3], INTS[-1], FP8[0]], ids=lambda each: each.name)
def test_bits_depend_on_no_other_row_thread_or_piece(
    operators: PackedOperators, stored: Sectioned
) -> None:
    matrix, max_rows = matrix_of(stored, (1100, 768)), operators.calls.max_rows
    x, call = random(max_rows, 768, seed=1), operators.matrix_call(matrix)
    assert call is not None
    whole = torch.empty(max_rows, 1100, dtype=torch.bfloat16)
    call.multiply(x, None, whole, 1)
    for num_threads in (2, 5):
        again = torch.empty_like(whole)
        call.multiply(x, None, again, num_threads)
        assert torch.equal(again, whole)
    for rows in (slice(3, 4), slice(1, 6), slice(0, max_rows - 1), slice(2, 2)):
        some = torch.empty_like(whole[rows])
        call.multiply(x[rows], None, some)
        assert torch.equal(some, whole[rows])
    kernels = CompiledKernels(few_rows_beside(operators), operators)
    for features in (slice(13, 90), slice(120, 1100)):
        part = torch.empty(max_rows, features.stop - features.start, dtype=torch.bfloat16)
        kernels.multiply_by(x, matrix.rows(features), part)
        assert torch.equal(part, whole[:, features])


LAYERS: tuple[tuple[MatrixFormat | None, ...], ...] = (
    (grouped_ints.FORMATS[4, 128, "F16", True],) * 3,
    (grouped_ints.FORMATS[4, 32, "BF16", False], grouped_ints.FORMATS[8, 64, "F32", True], None),
    (FP8[0], FP8[1], FP8[0]),
)
"""Of gate, up and down."""


def slots_of(shape: MoEShape) -> ExpertSlots:
    layout = SlotLayout.of(shape, torch.bfloat16, kept=LAYERS)
    return ExpertSlots(Arena(layout.num_bytes * shape.num_experts), layout)


def fill_slots(slots: ExpertSlots, layer: int, num_experts: int) -> None:
    for expert in range(num_experts):
        for part, place in enumerate(slots.layout.layers[layer].parts):
            target = slots.part(layer, expert, part)
            if isinstance(place.format, Sectioned):
                rows, width = place.shape
                fill(place.format, target, (rows, width), seed=10 * expert + part)
            else:
                plain = random(*place.shape, seed=expert).mul_(0.05)
                target[:] = plain.view(torch.uint8).numpy().reshape(-1)


@pytest.mark.parametrize("layer", range(len(LAYERS)))
@pytest.mark.parametrize(("num_tokens", "num_experts", "k"), [(1, 6, 3), (3, 1, 1), (8, 4, 4)])
def test_experts_at_once_are_experts_one_by_one(
    operators: PackedOperators, layer: int, num_tokens: int, num_experts: int, k: int
) -> None:
    hidden, width = 256, 384
    slots = slots_of(MoEShape(len(LAYERS), num_experts, k, hidden, width))
    fill_slots(slots, layer, num_experts)
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


def test_many_rows_meet_the_same_weights(best: PackedOperators) -> None:
    kernels = CompiledKernels(few_rows_beside(best), best)
    matrix = matrix_of(INTS[0], (700, 512))
    x, found = random(70, 512, seed=1), torch.empty(70, 700, dtype=torch.bfloat16)
    plain = torch.empty_like(found)
    kernels.multiply_by(x, matrix, found)
    REFERENCE.multiply_by(x, matrix, plain)
    assert torch.equal(found, plain)


def test_kernels_are_compiled_where_weights_are_kept(best: PackedOperators) -> None:
    chosen = choose_kernels("auto", torch.bfloat16)
    assert isinstance(chosen, CompiledKernels)
    assert choose_kernels("reference", torch.bfloat16) is REFERENCE
    assert choose_kernels("auto", torch.float32) is REFERENCE
