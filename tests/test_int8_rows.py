"""`activations="int8"`: what rows are rounded to, products with them, a model that asks for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowtide import SamplingParams
from lowtide.errors import UnsupportedError, UsageError
from lowtide.formats import formats
from lowtide.formats.quantised_matrix import GROUP, QuantisedMatrix
from lowtide.kernels.int8_rows import product_bytes, round_rows
from lowtide.kernels.reference import Kernels
from lowtide.lab.synth import synth
from lowtide.llm import LLM, plan_model
from lowtide.plan import WeightFormats

PROMPT = list(range(1, 40))
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
KERNELS = Kernels(rounds_rows=True)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def matrix_of(num_bits: int, shape: tuple[int, int]) -> QuantisedMatrix:
    rows = formats()[f"q{num_bits}"].for_rows(shape[1])
    content = np.zeros(shape[0] * rows.block_bytes[0], np.uint8)
    rows.pack(0.1 * randn(*shape, seed=1).numpy().reshape(-1) + 0.01, content)
    matrix = rows.matrix([torch.from_numpy(content)], shape)
    assert isinstance(matrix, QuantisedMatrix)
    return matrix


def multiplied(x: Tensor, matrix: QuantisedMatrix, bias: Tensor | None = None) -> Tensor:
    out = torch.empty(len(x), matrix.shape[0], dtype=x.dtype)
    KERNELS.multiply_by(x, matrix, out, bias)
    return out


@pytest.mark.parametrize("num_columns", [1, 64, 65, 200])
def test_rows_are_rounded_by_the_largest_of_a_group(num_columns: int) -> None:
    x = randn(5, num_columns)
    x[0] *= 1e-30
    codes, steps, sums = round_rows(x, GROUP)
    assert codes.shape == (5, -(-num_columns // GROUP), GROUP)
    assert codes.abs().max() == 127 and torch.equal(codes, codes.round())
    back = (codes * steps[:, :, None]).view(5, -1)
    error = (back[:, :num_columns] - x).abs()
    assert (error <= 0.5001 * steps.repeat_interleave(GROUP, 1)[:, :num_columns]).all()
    assert (back[:, num_columns:] == 0).all() and torch.equal(sums, codes.sum(2))


def test_groups_of_nothing_and_of_what_is_not_finite() -> None:
    x = torch.zeros(4, GROUP)
    x[1, 3], x[2, 3], x[3, 3] = 1e-38, torch.inf, torch.nan
    codes, steps, _ = round_rows(x, GROUP)
    assert (codes == 0).all() and steps[:2].tolist() == [[0.0], [0.0]]
    assert steps[2:].isnan().all()
    out = multiplied(x, matrix_of(4, (3, GROUP)))
    assert (out[:2] == 0).all() and out[2:].isnan().all()


@examples(20)
@given(
    num_bits=st.sampled_from([8, 4]),
    shape=st.tuples(st.integers(1, 300), st.integers(1, 150)),
    num_rows=st.integers(0, 80),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    has_bias=st.booleans(),
)
def test_products_are_those_of_rounded_rows(
    num_bits: int, shape: tuple[int, int], num_rows: int, dtype: torch.dtype, has_bias: bool
) -> None:
    matrix = matrix_of(num_bits, shape)
    x = randn(num_rows, shape[1], seed=2).to(dtype)
    bias = randn(shape[0], seed=3).to(dtype) if has_bias else None
    weights = torch.empty(shape, dtype=torch.float32)
    matrix.unpack(weights)
    codes, steps, _ = round_rows(x, GROUP)
    rounded = (codes.double() * steps[:, :, None]).flatten(1)[:, : shape[1]]
    wanted = rounded @ weights.double().t() + (0 if bias is None else bias.double())
    unit = 2**-8 if dtype is torch.bfloat16 else 1e-5
    found = multiplied(x, matrix, bias)
    torch.testing.assert_close(found.double(), wanted, atol=1e-4, rtol=unit)
    if num_rows > 1:
        assert torch.equal(multiplied(x[1:], matrix, bias), found[1:])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth("qwen2_moe", "tiny", tmp_path_factory.mktemp("int8") / "model", seed=5)


def run(folder: Path, **options: Any) -> tuple[list[int], Tensor]:
    with LLM(folder, context=64, activations="int8", **options) as llm:
        return llm.generate(PROMPT, PARAMS)[0].token_ids, llm.logits(PROMPT)


@pytest.fixture(scope="module")
def resident(model: Path) -> dict[str, tuple[list[int], Tensor]]:
    return {name: run(model, format=name) for name in ("q8", "q4")}


def test_a_plan_has_what_the_plain_product_takes_which_is_more_than_the_compiled_one_does() -> None:
    """A chunk of 64 rows; compiled: 256 rows of two bytes, for two types, and side by side."""
    for width in (64, 1025):
        assert product_bytes((40, width)) == 64 * width * 29 > 256 * width * 2 * 3


@examples(4)
@given(
    name=st.sampled_from(["q8", "q4"]),
    policy=st.sampled_from(["lowtide", "lru", "tide"]),
    share=st.floats(0, 1),
    device=st.sampled_from(["cpu", "emulated"]),
)
def test_budgets_change_nothing(
    model: Path,
    resident: dict[str, tuple[list[int], Tensor]],
    name: str,
    policy: str,
    share: float,
    device: str,
) -> None:
    options: dict[str, Any] = {"format": name, "device": device, "policy": policy}
    plan = plan_model(model, context=64, activations="int8", **options)
    budget = plan.minimum_bytes + int(share * (plan.full_bytes - plan.minimum_bytes))
    options["host_memory" if device == "cpu" else "gpu_memory"] = budget
    answer, logits = run(model, **options)
    assert answer == resident[name][0] and torch.equal(logits, resident[name][1])


def test_answers_are_near_those_of_rows_as_they_are(
    model: Path, resident: dict[str, tuple[list[int], Tensor]]
) -> None:
    with LLM(model, context=64, format="q8") as llm:
        wanted = llm.logits(PROMPT)
    found = resident["q8"][1]
    assert not torch.equal(found, wanted)
    # Not all: a rounded row may choose another expert.
    assert (found - wanted).abs().mean() <= 0.2 * wanted.abs().mean()


def test_plan_and_usage_name_it(model: Path) -> None:
    wanted = WeightFormats("q8", "q8", "q8", "int8")
    assert str(wanted) == "experts q8 · dense q8 · head q8 · activations int8"
    with LLM(model, context=64, format="q8", activations="int8") as llm:
        assert llm.plan.formats == wanted
        assert llm.generate(PROMPT, PARAMS)[0].usage.formats == wanted


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"activations": "int4"}, UsageError, "activations 'int4' is not known; choose own, int8"),
        ({"activations": "int8"}, UnsupportedError, "here are experts own · dense own · head own"),
    ],
)
def test_others_are_refused_by_name(
    model: Path, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        plan_model(model, context=64, **options)
