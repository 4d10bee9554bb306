"""`activations="int8"`: what rows are rounded to, products with them, models that ask for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from computing import randn
from examples import examples
from gguf.constants import GGMLQuantizationType as Type
from hypothesis import given
from hypothesis import strategies as st
from packed_matrices import BLOCKS, OWN, matrix_of, name_of, unit_of
from test_gguf_models import MIXED, write
from torch import Tensor

from lowtide import SamplingParams
from lowtide.engine.opening.weight_formats import ROUNDABLE
from lowtide.errors import UnsupportedError, UsageError
from lowtide.formats import MatrixFormat, StoredMatrix
from lowtide.formats.ggml import ROW_GROUP
from lowtide.formats.quantised_matrix import GROUP
from lowtide.kernels.int8_rows import product_bytes, round_rows
from lowtide.kernels.reference import Kernels
from lowtide.llm import LLM, plan_model
from lowtide.model_writing.synth import synth
from lowtide.plan import WeightFormats

PROMPT = list(range(1, 40))
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
KERNELS = Kernels(ROUNDABLE)


def multiplied(x: Tensor, matrix: StoredMatrix, bias: Tensor | None = None) -> Tensor:
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
    out = multiplied(x, matrix_of(OWN[1], (3, GROUP)))
    assert (out[:2] == 0).all() and out[2:].isnan().all()


@pytest.mark.parametrize("stored", BLOCKS, ids=name_of)
@examples(10)
@given(
    num_outs=st.integers(1, 300),
    num_units=st.integers(1, 150),
    num_rows=st.integers(0, 80),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    has_bias=st.booleans(),
)
def test_products_are_those_of_rounded_rows(
    stored: MatrixFormat,
    num_outs: int,
    num_units: int,
    num_rows: int,
    dtype: torch.dtype,
    has_bias: bool,
) -> None:
    num_k = num_units if stored in OWN else (1 + num_units % 3) * unit_of(stored)
    matrix = matrix_of(stored, (num_outs, num_k), seed=1)
    x = randn(num_rows, num_k, seed=2).to(dtype)
    bias = randn(num_outs, seed=3).to(dtype) if has_bias else None
    weights = torch.empty(matrix.shape, dtype=torch.float32)
    matrix.unpack(weights)
    codes, steps, _ = round_rows(x, GROUP if stored in OWN else ROW_GROUP)
    rounded = (codes.double() * steps[:, :, None]).flatten(1)[:, :num_k]
    wanted = rounded @ weights.double().t() + (0 if bias is None else bias.double())
    unit = 2**-8 if dtype is torch.bfloat16 else 1e-5
    found = multiplied(x, matrix, bias)
    torch.testing.assert_close(found.double(), wanted, atol=1e-4, rtol=unit)
    if num_rows > 1:
        assert torch.equal(multiplied(x[1:], matrix, bias), found[1:])


def test_a_plan_has_what_the_plain_product_takes_which_is_more_than_the_compiled_one_does() -> None:
    """A chunk of 64 rows; compiled: 256 rows of two bytes, for two types, and side by side."""
    for width in (64, 1025):
        assert product_bytes((40, width)) == 64 * width * 29 > 256 * width * 2 * 3


# Models


class Model(NamedTuple):
    path: Path
    options: dict[str, Any]

    def logits(self, **more: Any) -> Tensor:
        with LLM(self.path, context=64, **self.options, **more) as llm:
            return llm.logits(PROMPT)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    """Rounded as they are read, and from a GGUF file."""
    base = tmp_path_factory.mktemp("int8")
    folder = synth("qwen2_moe", "tiny", base / "model", seed=5)
    path = base / "model.gguf"
    write(path, "qwen3_moe", 0, MIXED)
    return {"q8": Model(folder, {"format": "q8"}), "mixed": Model(path, {"dtype": "bfloat16"})}


@pytest.mark.parametrize("name", ["q8", "mixed"])
def test_answers_are_near_those_of_rows_as_they_are(models: dict[str, Model], name: str) -> None:
    wanted, found = (models[name].logits(activations=each) for each in ("own", "int8"))
    assert not torch.equal(found, wanted)
    # Not all: a rounded row may choose another expert.
    assert (found - wanted).abs().mean() <= 0.2 * wanted.abs().mean()


@pytest.mark.parametrize("name", ["q8", "mixed"])
def test_plan_and_usage_name_it(models: dict[str, Model], name: str) -> None:
    model = models[name]
    with LLM(model.path, context=64, activations="int8", **model.options) as llm:
        formats = llm.plan.formats
        assert llm.generate(PROMPT, PARAMS)[0].usage.formats == formats
    if name == "q8":
        assert formats == WeightFormats("q8", "q8", "q8", "int8")
        assert str(formats) == "experts q8 · dense q8 · head q8 · activations int8"
    else:
        assert formats.activations == "int8" and "Q4_K" in formats.experts


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (
            {"activations": "int4"},
            UsageError,
            "activations 'int4' is not known; choose auto, own, int8",
        ),
        ({"activations": "int8"}, UnsupportedError, "here are experts own · dense own · head own"),
    ],
)
def test_others_are_refused_by_name(
    models: dict[str, Model], options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        plan_model(models["q8"].path, context=64, **options)


def test_files_without_packed_weights_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, "olmoe", 1, (Type.BF16,))
    with pytest.raises(UnsupportedError, match="a packed type of GGUF files, and here are experts"):
        plan_model(path, context=64, dtype="bfloat16", activations="int8")
