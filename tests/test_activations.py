"""`--activations auto`: which products round rows, and that plans say so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type
from hypothesis import given
from hypothesis import strategies as st
from packed_matrices import matrix_of
from test_gguf_models import MIXED, SMALL, write

from lowtide import LLM, SamplingParams
from lowtide.engine.opening.config import EngineConfig
from lowtide.engine.opening.model import open_model
from lowtide.engine.opening.weight_formats import (
    ROUNDABLE,
    ROUNDED_BY_DEFAULT,
    describe_activations,
    rounded_formats,
)
from lowtide.formats import formats, ggml
from lowtide.kernels.choice import choose_kernels
from lowtide.kernels.operands import ExpertWeights
from lowtide.kernels.reference import Kernels
from lowtide.lab.quality import QualityWork, quality
from lowtide.lab.quality_settings import QualitySetting
from lowtide.lab.quality_text import Scope
from lowtide.llm import plan_model
from lowtide.model_writing.synth import synth
from lowtide.plan import WeightFormats

GGML = tuple(each.name for each in ggml.FORMATS)
KEPT = sorted({*GGML} - ROUNDED_BY_DEFAULT)
PROMPT = list(range(1, 40))


@given(
    st.sampled_from(["auto", "own", "int8"]),
    st.sets(st.sampled_from([*GGML, "BF16", "F32", "q8", "q4", "MXFP4 blocks"])),
    st.sampled_from(["bfloat16", "float16", "float32"]),
    st.sampled_from(["cpu", "emulated", "cuda"]),
)
def test_what_is_rounded(activations, stored, dtype, device) -> None:
    found = rounded_formats(activations, [formats()[name] for name in stored], dtype, device)
    if activations == "int8":
        assert found == ROUNDABLE
    elif activations == "own" or dtype != "bfloat16" or device == "cuda":
        assert not found
    else:
        assert found == stored & ROUNDED_BY_DEFAULT and found.isdisjoint({"q8", "q4"})


@pytest.mark.parametrize(
    ("asked", "parts", "expected"),
    [
        ("auto", WeightFormats(), "own"),
        ("auto", WeightFormats("q8", "q8", "q8"), "own"),
        ("auto", WeightFormats("Q4_K", "Q4_K", "Q4_K"), "auto (int8)"),
        ("auto", WeightFormats("Q4_K", "Q8_0"), "auto (int8 with Q4_K)"),
        ("auto", WeightFormats("Q3_K, Q4_K", "Q8_0"), "auto (int8 with Q3_K, Q4_K)"),
        ("auto", WeightFormats("Q8_0", "Q8_0", "Q8_0"), "auto (own)"),
        ("own", WeightFormats("Q4_K", "Q4_K", "Q4_K"), "own"),
        ("int8", WeightFormats("Q4_K", "Q8_0"), "int8"),
    ],
)
def test_what_is_said_of_it(asked: str, parts: WeightFormats, expected: str) -> None:
    rounded = frozenset() if asked == "own" else ROUNDED_BY_DEFAULT
    assert describe_activations(asked, parts, rounded) == expected


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("activations")
    types = {
        "K types": MIXED,
        "small types": SMALL,
        "rounded": (Type.Q4_0, Type.IQ4_NL, Type.MXFP4),
        "kept": (Type.Q8_0,),
    }
    paths = {name: base / f"{name}.gguf" for name in types}
    for name, path in paths.items():
        write(path, "qwen3_moe", 0, types[name])
    return paths


def logits(path: Path, **options: Any) -> torch.Tensor:
    with LLM(path, context=64, **{"dtype": "bfloat16", **options}) as llm:
        return llm.logits(PROMPT)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_a_file_whose_types_are_rounded_is_computed_as_with_int8(files, kernels) -> None:
    path = files["rounded"]
    found = logits(path, kernels=kernels)
    assert torch.equal(found, logits(path, kernels=kernels, activations="int8"))
    assert not torch.equal(found, logits(path, kernels=kernels, activations="own"))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("kept", {}),
        ("rounded", {"dtype": "float32"}),
        ("rounded", {"expert_dtype": "bfloat16", "dense_dtype": "bfloat16"}),
    ],
)
def test_others_are_computed_as_they_are(files, name, options) -> None:
    assert torch.equal(
        logits(files[name], **options), logits(files[name], activations="own", **options)
    )


@pytest.mark.parametrize("format", [None, "q8", "q4"])
def test_safetensors_are_computed_as_they_are(tmp_path: Path, format: str | None) -> None:
    folder = synth("qwen3_moe", "tiny", tmp_path / "model", seed=2)
    found = logits(folder, format=format)
    assert torch.equal(found, logits(folder, format=format, activations="own"))
    assert plan_model(folder, context=64, format=format).formats.activations == "own"


def test_mxfp4_of_safetensors_is_computed_as_it_is(tmp_path: Path) -> None:
    folder = synth("gpt_oss", "tiny", tmp_path / "model", seed=3)
    opened = open_model(folder, EngineConfig(context=64))
    assert "MXFP4" in opened.memory.formats.experts and not opened.memory.rounded


@pytest.mark.invariant
@pytest.mark.parametrize("name", ["K types", "small types"])
def test_budgets_and_policies_change_no_bit(files, name) -> None:
    path = files[name]
    plan = plan_model(path, context=64, dtype="bfloat16")
    assert plan.formats.activations.startswith("auto (int8 with ")
    wanted = logits(path)
    for policy in ("lru", "tide", "lowtide"):
        found = logits(path, host_memory=plan.minimum_bytes, policy=policy)
        assert torch.equal(found, wanted), policy
    assert torch.equal(logits(path, device="emulated"), wanted)


@pytest.mark.parametrize("num_tokens", [1, 5, 40])
def test_an_expert_is_rounded_whole_or_not_at_all(num_tokens: int) -> None:
    """If one of its matrices has a type whose products round no rows, none of them rounds.

    The layer still runs its experts in one call.
    """
    kinds = ("Q4_K", "Q4_K", KEPT[0])
    of_expert = [formats()[name] for name in kinds]
    weights = ExpertWeights(*(matrix_of(each, (256, 256), seed=3) for each in of_expert))
    x = torch.randn(num_tokens, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    for option in ("auto", "reference"):
        found = []
        for rounded in (frozenset(), ROUNDED_BY_DEFAULT):
            kernels = choose_kernels(option, torch.bfloat16, rounded=rounded)
            out = torch.empty_like(x)
            kernels.gated_mlp(x, weights, torch.empty_like(x), torch.empty_like(x), out)
            found.append(out)
            if type(kernels) is not Kernels:
                assert kernels.several_experts(of_expert) is not None
        assert torch.equal(*found)


def test_quality_compares_with_rows_as_they_are(files) -> None:
    work = QualityWork(token_ids=[i % 90 for i in range(400)], scope=Scope(64, 80), repeats=0)
    options = {"context": 128, "dtype": "bfloat16", "device": "cpu"}
    exact, found = quality(files["rounded"], [QualitySetting()], work, **options).rows
    assert exact.setting.options == {"activations": "own"} and not found.setting.options
    assert exact.comparison.kl.mean == 0 < found.comparison.kl.mean
    [alone] = quality(files["kept"], [QualitySetting()], work, **options).rows
    assert alone.comparison.kl.mean == 0


def test_keys_of_other_activations_are_not_taken_over(files, tmp_path: Path) -> None:
    options = {"context": 64, "dtype": "bfloat16", "cache_dir": tmp_path / "kept"}
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)

    def cached_tokens(activations: str) -> int:
        with LLM(files["rounded"], activations=activations, **options) as llm:
            [answer] = llm.generate([PROMPT], params)
        return answer.usage.cached_tokens

    assert [cached_tokens(each) for each in ("own", "auto", "int8", "own")] == [0, 0, 0, 38]
    assert cached_tokens("auto") == 38
