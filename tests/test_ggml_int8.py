"""`activations="int8"` with packed types of GGUF files: the twin, every variant, a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from computing import summed_at_once
from examples import examples
from gguf.constants import GGMLQuantizationType as Type
from gguf_files import random_blocks
from hypothesis import given
from hypothesis import strategies as st
from test_gguf_models import MIXED, SMALL, write
from torch import Tensor

from lowtide import SamplingParams
from lowtide.core import MoEShape
from lowtide.errors import UnsupportedError
from lowtide.experts.at_once import ExpertsAtOnce
from lowtide.experts.layout import SlotLayout
from lowtide.experts.rows import Routing
from lowtide.experts.slots import ExpertSlots
from lowtide.formats.ggml import FORMATS, ROW_GROUP, GgmlFormat, PackedMatrix
from lowtide.kernels.choice import choose_kernels
from lowtide.kernels.compiled import CompiledKernels
from lowtide.kernels.cpu.few_rows import FewRows
from lowtide.kernels.cpu.packed import INT8_VARIANTS, MAX_FEW_ROWS, PLAIN, PackedOperators
from lowtide.kernels.int8_rows import round_rows
from lowtide.kernels.operands import ExpertWeights
from lowtide.kernels.reference import Kernels
from lowtide.llm import LLM, plan_model
from lowtide.memory.arena import Arena

TWIN = Kernels(rounds_rows=True)
BY_NAME = {each.ggml_name: each for each in FORMATS}
PROMPT = list(range(1, 40))
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)

stored_types = pytest.mark.parametrize("stored", FORMATS, ids=lambda each: each.ggml_name)


@pytest.fixture(scope="module")
def variants() -> list[PackedOperators]:
    """All that this CPU can run, from the plain one to the best."""
    try:
        best = PackedOperators.load(rounds_rows=True)
    except UnsupportedError as error:
        pytest.skip(f"nothing can be compiled here: {error}")
    return [PackedOperators.load(number, rounds_rows=True) for number in range(best.num_variants)]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def matrix_of(stored: GgmlFormat, shape: tuple[int, int], seed: int = 1) -> PackedMatrix:
    blocks = random_blocks(shape, Type[stored.ggml_name], seed)
    return stored.matrix([torch.from_numpy(blocks).reshape(-1)], shape)


def by_twin(x: Tensor, matrix: PackedMatrix, bias: Tensor | None = None) -> Tensor:
    out = torch.empty(len(x), matrix.shape[0], dtype=x.dtype)
    TWIN.multiply_by(x, matrix, out, bias)
    return out


@stored_types
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_twin_multiplies_with_rounded_rows(stored: GgmlFormat, dtype: torch.dtype) -> None:
    matrix = matrix_of(stored, (300, 3 * stored.block_size))
    x, bias = randn(70, matrix.shape[1]).to(dtype), randn(300, seed=2).to(dtype)
    weights = torch.empty(matrix.shape, dtype=torch.float32)
    matrix.unpack(weights)
    codes, steps, _ = round_rows(x, ROW_GROUP)
    rounded = (codes.double() * steps[:, :, None]).flatten(1)
    wanted = rounded @ weights.double().t() + bias.double()
    unit = 2**-8 if dtype is torch.bfloat16 else 1e-5
    found = by_twin(x, matrix, bias)
    torch.testing.assert_close(found.double(), wanted, atol=1e-4, rtol=unit)
    assert torch.equal(by_twin(x[1:], matrix, bias), found[1:])


def test_the_variants_of_this_processor(variants: list[PackedOperators]) -> None:
    assert [each.name for each in variants] == list(INT8_VARIANTS[: len(variants)])
    chosen = choose_kernels("auto", torch.bfloat16, rounds_rows=True)
    assert isinstance(chosen, CompiledKernels) and chosen.rounds_rows
    for option, dtype in (("reference", torch.bfloat16), ("auto", torch.float32)):
        plain = choose_kernels(option, dtype, rounds_rows=True)
        assert type(plain) is Kernels and plain.rounds_rows


@examples(60)
@given(
    stored=st.sampled_from(FORMATS),
    num_rows=st.one_of(st.integers(0, 17), st.sampled_from([33, 70])),
    num_outs=st.one_of(st.integers(1, 40), st.just(130)),
    num_blocks=st.one_of(st.integers(1, 9), st.sampled_from([16, 17])),
    has_bias=st.booleans(),
)
def test_bits_are_those_of_the_twin(
    variants: list[PackedOperators],
    stored: GgmlFormat,
    num_rows: int,
    num_outs: int,
    num_blocks: int,
    has_bias: bool,
) -> None:
    matrix = matrix_of(stored, (num_outs, num_blocks * stored.block_size))
    num_k = matrix.shape[1]
    x = randn(num_rows, num_k + 3)[:, 1 : num_k + 1]
    bias = randn(num_outs, seed=2) if has_bias else None
    wanted = by_twin(x, matrix, bias)
    for operators in variants:
        out = torch.full((num_rows, num_outs + 2), 7.0, dtype=torch.bfloat16)
        operators.matrix_call(matrix).multiply(x, bias, out[:, :-2])
        assert torch.equal(out[:, :-2], wanted), operators.name
        assert (out[:, -2:] == 7).all()


@stored_types
def test_any_bytes_give_the_bits_of_the_twin(
    variants: list[PackedOperators], stored: GgmlFormat
) -> None:
    """Scales that are nothing, tiny, or no numbers, too."""
    shape, generator = (40, 18 * stored.block_size), np.random.default_rng(3)
    content = generator.integers(0, 256, 40 * 18 * stored.block_bytes[0], np.uint8)
    matrix = stored.matrix([torch.from_numpy(content)], shape)
    x = randn(3, shape[1])
    wanted = by_twin(x, matrix)
    for operators in variants:
        out = torch.empty_like(wanted)
        operators.matrix_call(matrix).multiply(x, None, out)
        torch.testing.assert_close(out, wanted, atol=0, rtol=0, equal_nan=True)


@stored_types
def test_bits_depend_on_no_other_row_thread_or_piece(
    variants: list[PackedOperators], stored: GgmlFormat
) -> None:
    matrix, x = matrix_of(stored, (1100, 768)), randn(18, 768)
    whole = by_twin(x, matrix)
    for operators in variants:
        for num_threads in (1, 5):
            again = torch.empty_like(whole)
            operators.matrix_call(matrix).multiply(x, None, again, num_threads)
            assert torch.equal(again, whole)
        for rows in (slice(3, 4), slice(1, 6), slice(2, 18)):
            some = torch.empty_like(whole[rows])
            operators.matrix_call(matrix).multiply(x[rows], None, some)
            assert torch.equal(some, whole[rows])
        part = torch.empty(18, 77, dtype=torch.bfloat16)
        operators.matrix_call(matrix.rows(slice(13, 90))).multiply(x, None, part)
        assert torch.equal(part, whole[:, 13:90])


@stored_types
def test_what_is_nothing_or_not_finite(variants: list[PackedOperators], stored: GgmlFormat) -> None:
    matrix = matrix_of(stored, (3, 256))
    x = torch.zeros(5, 256, dtype=torch.bfloat16)
    x[1, 3], x[2, 70], x[3, 3], x[4] = 1e-38, torch.inf, torch.nan, 3.3e38
    wanted = by_twin(x, matrix)
    assert (wanted[:2] == 0).all() and wanted[2:4].isnan().all()
    for operators in variants:
        out = torch.empty_like(wanted)
        operators.matrix_call(matrix).multiply(x, None, out)
        torch.testing.assert_close(out, wanted, atol=0, rtol=0, equal_nan=True)


LAYERS = (
    ("Q4_K", "Q4_K", "Q6_K"),
    ("Q8_0", "Q5_0", "Q4_1"),
    ("MXFP4", "IQ4_NL", "Q4_0"),
    ("Q5_K", "Q5_K", "Q5_1"),
    ("IQ2_XXS", "IQ3_XXS", "IQ2_S"),
    ("IQ2_XS", "Q3_K", "IQ3_S"),
)
"""Types of gate, up and down, as mixed as files may have them."""

HIDDEN, WIDTH, NUM_EXPERTS = 256, 512, 4


def filled_slots(k: int) -> ExpertSlots:
    kept = [tuple(BY_NAME[name] for name in names) for names in LAYERS]
    shape = MoEShape(len(LAYERS), NUM_EXPERTS, k, HIDDEN, WIDTH)
    layout = SlotLayout.of(shape, torch.bfloat16, kept=kept)
    return ExpertSlots(Arena(layout.num_bytes * NUM_EXPERTS), layout)


def fill(slots: ExpertSlots, layer: int) -> None:
    for expert in range(NUM_EXPERTS):
        for part, place in enumerate(slots.layout.layers[layer].parts):
            assert isinstance(place.format, GgmlFormat)
            kind = Type[place.format.ggml_name]
            content = random_blocks(place.shape, kind, seed=10 * expert + part)
            slots.part(layer, expert, part)[:] = content.reshape(-1)


@pytest.mark.parametrize("layer", range(len(LAYERS)))
@pytest.mark.parametrize("num_tokens,k", [(1, NUM_EXPERTS), (5, 1), (MAX_FEW_ROWS, 3)])
def test_experts_at_once_are_experts_one_by_one(
    variants: list[PackedOperators], layer: int, num_tokens: int, k: int
) -> None:
    slots = filled_slots(k)
    fill(slots, layer)
    x = randn(num_tokens, HIDDEN, seed=3)
    generator = torch.Generator().manual_seed(num_tokens)
    chosen = [torch.randperm(NUM_EXPERTS, generator=generator)[:k] for _ in range(num_tokens)]
    experts = torch.stack([each.sort().values for each in chosen])
    routing = Routing(experts, torch.rand(num_tokens, k, generator=generator))
    of_plain = None
    for operators in variants:
        kernels = CompiledKernels(FewRows.load(), PackedOperators.load(), operators)
        wanted = torch.zeros(num_tokens, HIDDEN)
        for token in range(num_tokens):
            for expert, weight in zip(experts[token].tolist(), routing.weights[token], strict=True):
                one, gate = x[token : token + 1].clone(), torch.empty(1, WIDTH).bfloat16()
                weights_of = slots.weights(layer, expert)
                assert isinstance(weights_of, ExpertWeights)
                plain = gate.clone(), gate.clone(), one.clone()
                if token == 0:
                    TWIN.gated_mlp(one, weights_of, *plain)
                kernels.gated_mlp(one, weights_of, gate, torch.empty_like(gate), one)
                if token == 0:  # SiLU is not rounded alike, and codes go by the largest number
                    limit = 2e-2 * plain[2].abs().max().item()
                    torch.testing.assert_close(one, plain[2], atol=limit, rtol=2**-6)
                wanted[token] += weight * one[0].float()
        of_plain = wanted if of_plain is None else of_plain
        assert torch.equal(wanted, of_plain), operators.name
        for num_threads in (1, 3):
            at_once = ExpertsAtOnce.of(slots, kernels, num_threads)
            assert at_once is not None
            out = summed_at_once(at_once, x, routing, WIDTH, layer, num_threads)
            assert torch.equal(out, wanted)


@pytest.mark.parametrize("layer", range(len(LAYERS)))
def test_an_expert_of_many_rows_gives_each_what_it_has_alone(
    variants: list[PackedOperators], layer: int
) -> None:
    """So many that they are not rounded all at once."""
    slots = filled_slots(1)
    fill(slots, layer)
    weights_of = slots.weights(layer, 0)
    assert isinstance(weights_of, ExpertWeights)
    x = randn(530, HIDDEN, seed=4)
    for operators in variants:
        kernels = CompiledKernels(FewRows.load(), PackedOperators.load(), operators)

        def outputs(rows: Tensor, kernels: CompiledKernels = kernels) -> Tensor:
            gate, out = torch.empty(len(rows), WIDTH).bfloat16(), rows.clone()
            kernels.gated_mlp(out, weights_of, gate, torch.empty_like(gate), out)
            return out

        of_all = outputs(x)
        for row in (0, 255, 256, 300, 511, 512, 529):
            assert torch.equal(of_all[row : row + 1], outputs(x[row : row + 1])), operators.name


def test_rows_are_not_rounded_for_what_is_bfloat16(variants: list[PackedOperators]) -> None:
    assert variants[0].experts((0, PLAIN, 1)) is None
    matrix, x = randn(40, 256, seed=1), randn(3, 256)
    out = torch.empty(3, 40, dtype=torch.bfloat16)
    CompiledKernels(FewRows.load(), PackedOperators.load(), variants[0]).multiply_by(x, matrix, out)
    wanted = torch.empty_like(out)
    FewRows.load().multiply(x, matrix.t(), None, wanted)
    assert torch.equal(out, wanted)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("int8")
    paths = {name: folder / f"{name}.gguf" for name in ("mixed", "small")}
    write(paths["mixed"], "qwen3_moe", 0, MIXED)
    write(paths["small"], "olmoe", 1, SMALL)
    return paths


def run(path: Path, **options: Any) -> tuple[list[int], Tensor]:
    with LLM(path, context=64, dtype="bfloat16", activations="int8", **options) as llm:
        return llm.generate(PROMPT, PARAMS)[0].token_ids, llm.logits(PROMPT)


@pytest.fixture(scope="module")
def resident(files: dict[str, Path]) -> dict[str, tuple[list[int], Tensor]]:
    return {name: run(path) for name, path in files.items()}


@examples(4)
@given(
    name=st.sampled_from(["mixed", "small"]),
    policy=st.sampled_from(["lowtide", "lru", "tide"]),
    share=st.floats(0, 1),
    device=st.sampled_from(["cpu", "emulated"]),
)
def test_budgets_change_nothing(
    files: dict[str, Path],
    resident: dict[str, tuple[list[int], Tensor]],
    name: str,
    policy: str,
    share: float,
    device: str,
) -> None:
    options: dict[str, Any] = {"device": device, "policy": policy}
    plan = plan_model(files[name], context=64, dtype="bfloat16", activations="int8", **options)
    budget = plan.minimum_bytes + int(share * (plan.full_bytes - plan.minimum_bytes))
    options["host_memory" if device == "cpu" else "gpu_memory"] = budget
    answer, logits = run(files[name], **options)
    assert answer == resident[name][0] and torch.equal(logits, resident[name][1])


def test_answers_are_near_those_of_rows_as_they_are(
    files: dict[str, Path], resident: dict[str, tuple[list[int], Tensor]]
) -> None:
    with LLM(files["mixed"], context=64, dtype="bfloat16") as llm:
        wanted = llm.logits(PROMPT)
    found = resident["mixed"][1]
    assert not torch.equal(found, wanted)
    # Not all: a rounded row may choose another expert.
    assert (found - wanted).abs().mean() <= 0.2 * wanted.abs().mean()


def test_plan_and_usage_name_it(files: dict[str, Path]) -> None:
    options: dict[str, Any] = {"context": 64, "dtype": "bfloat16", "activations": "int8"}
    plan = plan_model(files["mixed"], **options)
    assert plan.formats.activations == "int8" and "Q4_K" in plan.formats.experts
    assert str(plan.formats).endswith(" · activations int8")
    with LLM(files["mixed"], **options) as llm:
        assert llm.generate(PROMPT, PARAMS)[0].usage.formats == plan.formats


def test_files_without_packed_weights_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, "olmoe", 1, (Type.BF16,))
    with pytest.raises(UnsupportedError, match="a packed type of GGUF files, and here are experts"):
        plan_model(path, context=64, dtype="bfloat16", activations="int8")
