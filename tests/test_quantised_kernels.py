"""Compiled operators over weights of 8 and 4 bits, in every variant that this processor runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from computing import summed_at_once
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import quantize
from numpy.typing import NDArray
from torch import Tensor

from lowtide.core import MoEShape
from lowtide.errors import UnsupportedError
from lowtide.experts.at_once import ExpertsAtOnce
from lowtide.experts.layout import SlotLayout
from lowtide.experts.rows import Routing
from lowtide.experts.slots import ExpertSlots
from lowtide.formats import formats
from lowtide.formats.convert import pack
from lowtide.formats.plain import convert_plain
from lowtide.formats.quantised import Floats, QuantisedRows
from lowtide.formats.quantised_matrix import QuantisedMatrix
from lowtide.kernels.choice import choose_kernels
from lowtide.kernels.compiled import CompiledKernels
from lowtide.kernels.cpu.few_rows import VARIANTS, WITHOUT_DOTS, FewRows
from lowtide.kernels.cpu.library import load_kernels
from lowtide.kernels.cpu.packed import MAX_FEW_ROWS, PackedOperators
from lowtide.kernels.cpu.packing import CompiledPacking
from lowtide.kernels.operands import ExpertWeights
from lowtide.kernels.reference import REFERENCE
from lowtide.lab.synth import synth
from lowtide.llm import LLM
from lowtide.memory.arena import Arena

ROWS = (0, 1, 2, 3, 5, 8, 13, 16, 17, 25, MAX_FEW_ROWS)
SHAPES = ((1, 1), (5, 64), (7, 130), (300, 200), (64, 1024), (9, 63), (33, 192), (17, 1100))


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


def random(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).normal(0.01, 0.1, shape).astype(np.float32)


def packed(
    weights: Floats,
    num_bits: int,
    pack: Callable[..., None] | None = None,
    importance: Floats | None = None,
) -> tuple[QuantisedRows, NDArray[np.uint8]]:
    rows = formats()[f"q{num_bits}"].for_rows(weights.shape[1])
    assert isinstance(rows, QuantisedRows)
    content = np.zeros(rows.num_bytes(weights.size), np.uint8)
    if pack is None:
        rows.pack(weights.reshape(-1), content, importance)
    else:
        pack(rows, weights.reshape(-1).view(np.uint8), "F32", content, importance)
    return rows, content


def packing_of(operators: PackedOperators) -> CompiledPacking:
    return CompiledPacking(load_kernels(), min(operators.variant, WITHOUT_DOTS))


def matrix_of(num_bits: int, shape: tuple[int, int], seed: int = 0) -> QuantisedMatrix:
    rows, content = packed(random(*shape, seed=seed), num_bits)
    matrix = rows.matrix([torch.from_numpy(content)], shape)
    assert isinstance(matrix, QuantisedMatrix)
    return matrix


def unpacked(matrix: QuantisedMatrix) -> Tensor:
    whole = torch.empty(matrix.shape, dtype=torch.bfloat16)
    matrix.unpack(whole)
    return whole


@pytest.mark.parametrize("num_bits", [8, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_are_packed_and_unpacked_as_in_plain_python(
    operators: PackedOperators, num_bits: int, shape: tuple[int, int]
) -> None:
    weights = random(*shape)
    weights[0] *= 40
    weights[-1] = 0.25
    for broken in (None, np.nan, np.inf):
        if broken is not None:
            weights[0, -1] = broken
        with np.errstate(invalid="ignore"):
            rows, wanted = packed(weights, num_bits)
        _, found = packed(weights, num_bits, packing_of(operators))
        assert (found == wanted).all()
        assert rows.is_finite(found) == (broken is None)
        worth = abs(random(shape[1], seed=7))
        worth[::3] = 0
        _, wanted = packed(weights, num_bits, importance=worth)
        _, found = packed(weights, num_bits, packing_of(operators), worth)
        assert (found == wanted).all()
    matrix = matrix_of(num_bits, shape)
    out = torch.empty(shape, dtype=torch.bfloat16)
    operators.unpack(matrix, out)
    assert torch.equal(out, unpacked(matrix))


@pytest.mark.parametrize("name", ["BF16", "F16"])
def test_weights_are_packed_from_other_plain_types(best: PackedOperators, name: str) -> None:
    content = np.empty(2 * 9 * 130, np.uint8)
    convert_plain(random(9 * 130).view(np.uint8), "F32", content, name)
    rows = formats()["q4"].for_rows(130)
    at_odd_address = np.concatenate((content[:1], content))[1:]
    wanted, found = (np.zeros(rows.num_bytes(9 * 130), np.uint8) for _ in range(2))
    pack(rows, content, name, wanted)
    CompiledPacking(load_kernels())(rows, at_odd_address, name, found)
    assert (found == wanted).all()


@pytest.mark.parametrize("num_bits", [8, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_rounded_weights(
    operators: PackedOperators, num_bits: int, shape: tuple[int, int]
) -> None:
    matrix = matrix_of(num_bits, shape)
    exact = unpacked(matrix).double()
    bias = torch.from_numpy(random(shape[0], seed=2)).bfloat16()
    for num_rows in ROWS:
        x = torch.from_numpy(random(num_rows, shape[1] + 3, seed=1)).bfloat16()[:, : shape[1]]
        for added in (None, bias):
            out = torch.full((num_rows, shape[0] + 1), 7.0, dtype=torch.bfloat16)
            operators.matrix_call(matrix).multiply(x, added, out[:, :-1])
            wanted = x.double() @ exact.t() + (0 if added is None else added.double())
            torch.testing.assert_close(out[:, :-1].double(), wanted, atol=1e-4, rtol=2**-8)
            assert (out[:, -1] == 7).all()


@pytest.mark.parametrize("num_bits", [8, 4])
def test_bits_depend_on_no_other_row_thread_or_piece(
    operators: PackedOperators, num_bits: int
) -> None:
    matrix = matrix_of(num_bits, (1100, 520))
    x = torch.from_numpy(random(MAX_FEW_ROWS, 520, seed=1)).bfloat16()
    whole = torch.empty(MAX_FEW_ROWS, 1100, dtype=torch.bfloat16)
    operators.matrix_call(matrix).multiply(x, None, whole, 1)
    for num_threads in (2, 5):
        again = torch.empty_like(whole)
        operators.matrix_call(matrix).multiply(x, None, again, num_threads)
        assert torch.equal(again, whole)
    for rows in (slice(3, 4), slice(1, 6), slice(2, 15), slice(17, 21), slice(9, 26)):
        some = torch.empty_like(whole[rows])
        operators.matrix_call(matrix).multiply(x[rows], None, some)
        assert torch.equal(some, whole[rows])
    part = torch.empty(MAX_FEW_ROWS, 77, dtype=torch.bfloat16)
    operators.matrix_call(matrix.rows(slice(13, 90))).multiply(x, None, part)
    assert torch.equal(part, whole[:, 13:90])


@pytest.mark.parametrize("num_bits", [8, 4])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "k"),
    [(1, 6, 3), (2, 6, 3), (7, 4, 4), (16, 1, 1), (MAX_FEW_ROWS, 6, 3)],
    ids=["1", "2", "all of 4", "the only one", "most"],
)
def test_experts_at_once_are_experts_one_by_one(
    operators: PackedOperators, num_bits: int, num_tokens: int, num_experts: int, k: int
) -> None:
    shape = MoEShape(1, num_experts, k, 96, 40)
    chosen = (formats()[f"q{num_bits}"],) * 3
    layout = SlotLayout.of(shape, torch.bfloat16, kept=[chosen])
    slots = ExpertSlots(Arena(layout.num_bytes * num_experts), layout)
    for expert in range(num_experts):
        for part, place in enumerate(layout.layers[0].parts):
            weights = random(*place.shape, seed=10 * expert + part)
            slots.part(0, expert, part)[:] = packed(weights, num_bits)[1]
    kernels = CompiledKernels(FewRows.load(), operators)
    x = torch.from_numpy(random(num_tokens, 96, seed=3)).bfloat16()
    generator = torch.Generator().manual_seed(num_tokens)
    chosen_ids = [torch.randperm(num_experts, generator=generator)[:k] for _ in range(num_tokens)]
    experts = torch.stack([each.sort().values for each in chosen_ids])
    routing = Routing(experts, torch.rand(num_tokens, k, generator=generator))
    wanted = torch.zeros(num_tokens, 96)
    for token in range(num_tokens):
        for expert, weight in zip(experts[token].tolist(), routing.weights[token], strict=True):
            one, gate = x[token : token + 1].clone(), torch.empty(1, 40, dtype=torch.bfloat16)
            weights_of = slots.weights(0, expert)
            assert isinstance(weights_of, ExpertWeights)
            kernels.gated_mlp(one, weights_of, gate, torch.empty_like(gate), one)
            wanted[token] += weight * one[0].float()
    for num_threads in (1, 3):
        at_once = ExpertsAtOnce.of(slots, kernels, num_threads)
        assert at_once is not None
        out = summed_at_once(at_once, x, routing, 40, 0, num_threads)
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("rounds_rows", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 5, 20])
def test_experts_of_several_kinds_are_computed_at_once(
    best: PackedOperators, num_tokens: int, rounds_rows: bool
) -> None:
    """Gate and up in formats of our own, down in one of GGUF files."""
    hidden, width, num_experts = 96, 64, 3
    down = formats()["Q8_0"]
    layout = SlotLayout.of(
        MoEShape(1, num_experts, 1, hidden, width),
        torch.bfloat16,
        kept=[(formats()["q8"], formats()["q4"], down)],
    )
    slots = ExpertSlots(Arena(layout.num_bytes * num_experts), layout)
    for expert in range(num_experts):
        for part, place in enumerate(layout.layers[0].parts):
            weights = random(*place.shape, seed=10 * expert + part)
            if part == 2:
                content = quantize(weights, Type.Q8_0).reshape(-1)
            else:
                content = packed(weights, 8 if part == 0 else 4)[1]
            slots.part(0, expert, part)[:] = content
    rounding = PackedOperators.load(rounds_rows=True) if rounds_rows else None
    kernels = CompiledKernels(FewRows.load(), best, rounding)
    x = torch.from_numpy(random(num_tokens, hidden, seed=3)).bfloat16()
    experts = torch.arange(num_tokens)[:, None] % num_experts
    routing = Routing(experts, torch.ones(num_tokens, 1))
    wanted = torch.zeros(num_tokens, hidden)
    for token, expert in enumerate(experts[:, 0].tolist()):
        one, gate = x[token : token + 1].clone(), torch.empty(1, width, dtype=torch.bfloat16)
        weights_of = slots.weights(0, expert)
        assert isinstance(weights_of, ExpertWeights)
        up = torch.empty_like(gate)
        kernels.multiply_by(one, weights_of.gate, gate)
        kernels.multiply_by(one, weights_of.up, up)
        kernels.silu_times(gate, up)
        kernels.multiply_by(gate, weights_of.down, one)
        wanted[token] = one[0].float()
    at_once = ExpertsAtOnce.of(slots, kernels, 1)
    assert at_once is not None
    out = summed_at_once(at_once, x, routing, width, 0, 1)
    assert torch.equal(out, wanted)


def test_kernels_are_compiled_where_weights_are_quantised(best: PackedOperators) -> None:
    assert isinstance(choose_kernels("auto", torch.bfloat16), CompiledKernels)
    assert choose_kernels("reference", torch.bfloat16) is REFERENCE
    assert choose_kernels("auto", torch.float32) is REFERENCE


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
