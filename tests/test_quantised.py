"""q8 and q4: what they round to, what they lie like, and a model whose weights are in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from lowtide import SamplingParams
from lowtide.errors import UnsupportedError, UsageError
from lowtide.formats import formats
from lowtide.formats.convert import convert
from lowtide.formats.plain import convert_plain
from lowtide.formats.quantised import Floats, QuantisedRows, fitted
from lowtide.formats.quantised_matrix import GROUP
from lowtide.kernels import stored
from lowtide.kernels.reference import REFERENCE
from lowtide.llm import LLM, plan_model
from lowtide.model_writing.synth import synth
from lowtide.plan import WeightFormats

PROMPT = list(range(1, 40))
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


def weights_of(num_rows: int, num_columns: int, seed: int = 0) -> Floats:
    generator = np.random.default_rng(seed)
    return generator.normal(0.01, 0.1, (num_rows, num_columns)).astype(np.float32)


def packed(weights: Floats, num_bits: int) -> tuple[QuantisedRows, np.ndarray]:
    rows = formats()[f"q{num_bits}"].for_rows(weights.shape[1])
    assert isinstance(rows, QuantisedRows)
    target = np.zeros(rows.num_bytes(weights.size), np.uint8)
    rows.pack(weights.reshape(-1), target)
    return rows, target


def unpacked(rows: QuantisedRows, content: np.ndarray) -> Floats:
    return rows.unpack(content).view(np.float32).reshape(-1, rows.num_columns)


@pytest.mark.parametrize("num_bits", [8, 4])
@pytest.mark.parametrize("num_columns", [1, 63, 64, 65, 128, 200])
def test_weights_are_rounded_to_codes_of_their_group(num_bits: int, num_columns: int) -> None:
    weights = weights_of(5, num_columns)
    rows, content = packed(weights, num_bits)
    assert len(content) == 5 * -(-num_columns // GROUP) * (GROUP * num_bits // 8 + 4)
    found = unpacked(rows, content)
    for first in range(0, num_columns, GROUP):
        group = slice(first, first + GROUP)
        span = weights[:, group].max(1) - weights[:, group].min(1)
        step = span[:, None] / (2**num_bits - 1)
        assert (abs(found[:, group] - weights[:, group]) <= 1.3 * step + 1e-3).all()
    again, content_again = packed(found, num_bits)
    assert again is rows  # formats are compared by identity


@pytest.mark.parametrize("num_bits", [8, 4])
def test_the_search_is_better_than_the_range_and_never_worse(num_bits: int) -> None:
    groups = weights_of(400, GROUP)
    groups[:100, 0] *= 20  # one far from the others
    codes, scale, zero = fitted(groups, num_bits)
    found = codes * scale.astype(np.float64)[:, None] + zero.astype(np.float64)[:, None]
    low, step = groups.min(1, keepdims=True), np.ptp(groups, 1)[:, None] / (2**num_bits - 1)
    step16, low16 = step.astype(np.float16).astype(float), low.astype(np.float16).astype(float)
    plain = np.clip(np.rint((groups - low16) / step16), 0, 2**num_bits - 1) * step16 + low16
    error, plain_error = (((each - groups) ** 2).sum(1) for each in (found, plain))
    assert (error <= plain_error * 1.0001).all()
    assert error.sum() < 0.95 * plain_error.sum()


@pytest.mark.parametrize("num_bits", [8, 4])
def test_error_is_less_where_it_counts(num_bits: int) -> None:
    groups = weights_of(200, GROUP)
    worth = np.random.default_rng(1).lognormal(0, 2, groups.shape).astype(np.float32)

    def weighted_error(*found: np.ndarray) -> float:
        codes, scale, zero = (each.astype(np.float64) for each in found)
        return float((worth * (codes * scale[:, None] + zero[:, None] - groups) ** 2).sum())

    plain, weighted = fitted(groups, num_bits), fitted(groups, num_bits, worth)
    assert weighted_error(*weighted) < (0.9 if num_bits == 4 else 1) * weighted_error(*plain)
    alike = fitted(groups, num_bits, np.ones_like(groups))
    assert all((a == b).all() for a, b in zip(plain, alike, strict=True))


@pytest.mark.parametrize("num_bits", [8, 4])
def test_rows_that_are_alike_or_nothing_are_exact(num_bits: int) -> None:
    weights = np.zeros((3, 2 * GROUP), np.float32)
    weights[1], weights[2, GROUP:] = 0.25, -3
    rows, content = packed(weights, num_bits)
    assert (unpacked(rows, content) == weights).all()


def test_what_is_not_finite_stays_so() -> None:
    weights = weights_of(2, 2 * GROUP)
    weights[1, 70] = np.nan
    rows, content = packed(weights, 4)
    assert not rows.is_finite(content) and rows.is_finite(content[: rows.block_bytes[0]])
    assert np.isnan(unpacked(rows, content)[1, GROUP:]).all()


def test_a_byte_of_four_bits_has_elements_k_and_k_plus_32() -> None:
    weights = np.tile(np.arange(16, dtype=np.float32), 4)[None]
    weights[0, 32:] = weights[0, 63:31:-1]
    rows, content = packed(weights, 4)
    low, high = content[:32] & 15, content[:32] >> 4
    assert low.tolist() == weights[0, :32].tolist() and high.tolist() == weights[0, 32:].tolist()


@examples(20)
@given(
    num_bits=st.sampled_from([8, 4]),
    shape=st.tuples(st.integers(1, 300), st.integers(1, 150)),
    num_rows=st.integers(1, 40),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    has_bias=st.booleans(),
)
def test_products_are_those_of_the_unpacked_weights(
    num_bits: int, shape: tuple[int, int], num_rows: int, dtype: torch.dtype, has_bias: bool
) -> None:
    weights = weights_of(*shape)
    rows, content = packed(weights, num_bits)
    matrix = rows.matrix([torch.from_numpy(content)], shape)
    whole = torch.empty(shape, dtype=dtype)
    matrix.unpack(whole)
    exact = torch.from_numpy(unpacked(rows, content))
    assert torch.equal(whole, exact.to(dtype))  # rounded once
    x = torch.from_numpy(weights_of(num_rows, shape[1], seed=1)).to(dtype)
    bias = whole[:, 0].clone() if has_bias else None
    out = torch.empty(num_rows, shape[0], dtype=dtype)
    REFERENCE.multiply_by(x, matrix, out, bias)
    wanted = x.double() @ whole.double().t() + (0 if bias is None else bias.double())
    unit = {torch.bfloat16: 2**-7, torch.float16: 2**-9, torch.float32: 1e-5}[dtype]
    torch.testing.assert_close(out.double(), wanted, atol=unit / 4, rtol=unit)
    chosen = torch.tensor([0, shape[0] - 1, 0])
    few = torch.empty(3, shape[1], dtype=dtype)
    REFERENCE.select_rows(matrix, chosen, few)
    assert torch.equal(few, whole[chosen])


def test_a_tile_is_all_that_is_unpacked() -> None:
    taken = []

    class Watched(type(REFERENCE)):  # type: ignore[misc]
        def unpack(self, matrix: Any, out: torch.Tensor) -> None:
            taken.append(tuple(out.shape))
            super().unpack(matrix, out)

    rows, content = packed(weights_of(1000, 512), 8)
    matrix = rows.matrix([torch.from_numpy(content)], (1000, 512))
    Watched().multiply_by(torch.ones(3, 512), matrix, torch.empty(3, 1000))
    assert taken == [(256, 512), (256, 512), (256, 512), (232, 512)]
    assert stored.unpacking_bytes((1000, 512)) == (256 + 15) * 512 * 16


@pytest.mark.parametrize("source", ["BF16", "F16", "F32"])
def test_weights_are_made_into_it_from_any_plain_type(source: str) -> None:
    weights = weights_of(7, 130)
    content = np.empty(weights.size * (4 if source == "F32" else 2), np.uint8)
    convert_plain(weights.reshape(-1).view(np.uint8), "F32", content, source)
    rounded = np.empty(weights.size, np.float32)
    convert_plain(content, source, rounded.view(np.uint8), "F32")
    rows, wanted = packed(rounded.reshape(weights.shape), 4)
    found = np.empty_like(wanted)
    convert([content], formats()[source], found, rows)
    assert (found == wanted).all()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth("qwen2_moe", "tiny", tmp_path_factory.mktemp("quantised") / "model", seed=5)


def test_the_plan_has_packed_bytes_and_names_them(model: Path) -> None:
    own, q8, q4 = (plan_model(model, context=64, format=name) for name in ("own", "q8", "q4"))
    assert own.formats.is_own
    assert q4.formats == WeightFormats("q4", "q4", "q8")
    assert q8.formats == WeightFormats("q8", "q8", "q8")
    assert q4.host.slot_bytes < q8.host.slot_bytes < own.host.slot_bytes
    assert q4.host.dense_bytes < q8.host.dense_bytes < own.host.dense_bytes
    experts = plan_model(model, context=64, expert_dtype="int4")
    assert experts.formats == WeightFormats("q4", "own", "own")
    assert experts.host.dense_bytes == own.host.dense_bytes
    both = plan_model(model, context=64, format="q4", dense_dtype="int8", expert_dtype="own")
    assert both.formats == WeightFormats("own", "q8", "q8")


def test_the_answer_names_its_formats(model: Path) -> None:
    with LLM(model, context=64, format="q8") as llm:
        usage = llm.generate(PROMPT, PARAMS)[0].usage
    assert usage.formats == WeightFormats("q8", "q8", "q8")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"format": "q3"}, UsageError, "`format` 'q3' is not known; choose own, q8, q4"),
        ({"expert_dtype": "q5_k"}, UsageError, "`expert_dtype` 'q5_k' is not known"),
        ({"dense_dtype": "float16"}, UnsupportedError, "`dense_dtype` 'float16'"),
    ],
)
def test_others_are_refused_by_name(
    model: Path, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        plan_model(model, context=64, **options)


def test_experts_that_are_not_rows_of_their_own_are_refused(tmp_path: Path) -> None:
    folder = synth("gpt_oss", "tiny", tmp_path / "oss", seed=5)
    with pytest.raises(UnsupportedError, match="Experts in q4|experts cannot be made into q4"):
        plan_model(folder, context=64, format="q4")
    assert plan_model(folder, context=64, dense_dtype="q4").formats.dense == "q4"
