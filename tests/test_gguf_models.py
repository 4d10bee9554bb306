"""GGUF files as models, beside transformers with the weights that their bytes stand for."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import FAMILIES, common, randomise
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type
from gguf_files import write_gguf

from lowtide import SamplingParams
from lowtide.llm import LLM

TOLERANCE = 2e-4
WIDTH = 256  # a block of the K types
MIXED = (Type.Q4_K, Type.Q6_K, Type.Q5_K, Type.Q3_K, Type.Q2_K, Type.IQ4_XS, Type.Q8_0)
SMALL = (Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q8_0, Type.IQ4_NL, Type.MXFP4, Type.BF16, Type.F16)

_ALL_SPARSE = {"mlp_only_layers": [], "decoder_sparse_step": 1}

SIZES: Mapping[str, Mapping[str, Any]] = {
    "qwen3_moe": {
        "moe_intermediate_size": WIDTH,
        "num_experts": 6,
        "norm_topk_prob": True,
        **_ALL_SPARSE,
    },
    "olmoe": {"num_experts": 6, "norm_topk_prob": False},
}


def write(path: Path, family: str, seed: int, types: tuple[Type, ...]) -> torch.nn.Module:
    """A random model whose tensors' types take turns, and transformers' model of the same."""
    rng = random.Random(f"{family} {seed}")
    torch.manual_seed(seed)
    config_class, model_class, values = FAMILIES[family](rng)
    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "eos_token_id": None}
    config = config_class(**{**common(rng), **values, **sizes, **SIZES[family]})
    model = model_class(config)
    randomise(model)
    model = model.float().eval()
    kinds = iter(types * 99)

    def choose(name: str, shape: tuple[int, ...]) -> Type:
        if "norm" in name or "gate_inp" in name:
            return Type.F32
        kind = next(kinds)
        fits = [k for k in (kind, Type.Q8_0, Type.F16) if shape[-1] % GGML_QUANT_SIZES[k][0] == 0]
        return fits[0]

    write_gguf(path, family, model, choose)
    return model


def check(path: Path, model: torch.nn.Module, **options: Any) -> None:
    """Logits of a prompt, and greedy words as far as no tie is near."""
    prompt = [random.Random(5).randrange(97) for _ in range(40)]
    with LLM(path, context=256, dtype="float32", **options) as llm:
        ours = llm.logits(prompt)
        params = SamplingParams(max_tokens=64, ignore_eos=True)
        words = llm.generate(prompt, params)[0].token_ids
    with torch.inference_mode():
        theirs = model(torch.tensor([prompt])).logits[0]
        read = model(torch.tensor([prompt + words])).logits[0, len(prompt) - 1 : -1]
    assert (ours - theirs).abs().max() <= TOLERANCE * theirs.abs().max()
    chosen = read[torch.arange(len(words)), torch.tensor(words)]
    assert (chosen >= read.max(-1).values - TOLERANCE * read.abs().max()).all()


@pytest.mark.parametrize("family", SIZES)
@pytest.mark.parametrize("seed,types", [(0, MIXED), (1, SMALL)])
def test_logits_and_words_are_those_of_the_weights_unpacked(
    family: str, seed: int, types: tuple[Type, ...], tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    model = write(path, family, seed, types)
    check(path, model)
