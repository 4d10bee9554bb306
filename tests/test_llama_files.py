"""Files quantised by llama.cpp (`tools/llama_files.py`), beside transformers with their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type
from gguf_files import take_weights
from gguf_oracle import check, named_model

from lowtide import SamplingParams
from lowtide.llm import LLM, plan_model

FILES = sorted((Path(__file__).parent / "llama_files").glob("*.gguf"))


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_logits_and_words_are_those_of_the_weights_unpacked(path: Path) -> None:
    model = named_model(path.stem)
    take_weights(path, path.stem.partition("-")[0], model)
    check(path, model)


def test_every_type_with_many_levels_is_llama_cpps_own_somewhere() -> None:
    kinds = {tensor.tensor_type for path in FILES for tensor in gguf.GGUFReader(path).tensors}
    k_types = {Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K}
    assert kinds >= k_types | {Type.IQ4_NL, Type.IQ4_XS, Type.MXFP4, Type.Q8_0}


NARROW = FILES[0].parent / "qwen2_moe-1-Q5_K_M-96.gguf"
"""As Qwen1.5-MoE and DeepSeek-V2-Lite in Q5_K_M: rows of experts' down are no whole blocks of 256,
so llama.cpp takes Q5_1 where Q5_K was asked for, and Q8_0 where Q6_K was."""


def test_rows_that_do_not_divide_into_k_blocks_are_of_other_types() -> None:
    down = [each for each in gguf.GGUFReader(NARROW).tensors if "ffn_down_exps" in each.name]
    assert {each.tensor_type for each in down} == {Type.Q5_1, Type.Q8_0}
    assert all(each.shape[0] == 96 for each in down)


@pytest.mark.parametrize("activations", ["own", "int8", "auto"])
def test_such_rows_have_the_same_words_at_the_least_budget(activations: str) -> None:
    options: dict[str, Any] = {"context": 64, "dtype": "bfloat16", "activations": activations}
    prompt, params = list(range(1, 40)), SamplingParams(max_tokens=12, ignore_eos=True)
    found = []
    for budget in ({}, {"host_memory": plan_model(NARROW, **options).minimum_bytes}):
        with LLM(NARROW, **options, **budget) as llm:
            found.append((llm.generate(prompt, params)[0].token_ids, llm.logits(prompt)))
    exact = {**options, "activations": "own", "kernels": "reference"}
    with LLM(NARROW, **exact) as llm:
        wanted = llm.logits(prompt)
    (words, logits), (least_words, least_logits) = found
    assert words == least_words and torch.equal(logits, least_logits)
    # Not all: a rounded row may choose another expert.
    assert (logits - wanted).abs().mean() <= 0.2 * wanted.abs().mean()
