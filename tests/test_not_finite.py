"""Weights that are no numbers end in a CheckpointError, wherever a pass meets them first."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lowtide import SamplingParams
from lowtide.errors import CheckpointError
from lowtide.llm import LLM
from lowtide.model_folder.checkpoint import Checkpoint
from lowtide.model_writing.synth import synth

NAN, INFINITY = 0x7FC0, 0x7F80  # in bfloat16

PARTS = {
    "qwen3_moe": ("self_attn.q_proj", "self_attn.k_proj"),
    "mixtral": ("self_attn.q_proj", "self_attn.k_proj"),
    "gpt_oss": ("self_attn.q_proj", "self_attn.k_proj"),
    "deepseek_v2": ("self_attn.q_proj", "self_attn.kv_a_proj_with_mqa"),
    "deepseek_v3": ("self_attn.q_a_proj", "self_attn.q_b_proj"),
    "llada2": ("attention.query_key_value",),
    "llada": ("q_proj", "k_proj"),
}
"""Matrices that make queries and keys."""


@pytest.fixture(scope="module", params=PARTS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def whole_model(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth(family, "tiny", tmp_path_factory.mktemp("not_finite") / family, seed=3)


def broken(model: Path, part: str, bits: int) -> str:
    """Writes the first weight of the part's matrix in layer 1; the tensor's name."""
    checkpoint = Checkpoint.open(model)
    [name] = [name for name in checkpoint.tensors if name.endswith(f".1.{part}.weight")]
    entry = checkpoint.tensors[name]
    assert entry.dtype == "BF16"
    with checkpoint.files[entry.file].path.open("r+b") as file:
        file.seek(entry.offset)
        file.write(bits.to_bytes(2, "little"))
    return name


@pytest.mark.parametrize("bits", [NAN, INFINITY])
@pytest.mark.parametrize(
    ("dtype", "kernels"),
    [("bfloat16", "auto"), ("bfloat16", "reference"), ("float32", "auto")],
)
def test_queries_and_keys_that_are_no_numbers_are_found(
    whole_model: Path, family: str, dtype: str, kernels: str, bits: int, tmp_path: Path
) -> None:
    """Also among few tokens, of which torch's attention makes zeros."""
    for number, part in enumerate(PARTS[family]):
        model = shutil.copytree(whole_model, tmp_path / str(number))
        name = broken(model, part, bits)
        with LLM(model, dtype=dtype, kernels=kernels) as llm:
            prompts = [[5], list(range(5, 20)), list(range(40)), *[[5, 6, 7]] * 50]
            for asked in (prompts[:1], prompts[1:2], prompts[2:3], prompts[3:]):
                with pytest.raises(CheckpointError, match=f"{name} .* infinity or NaN"):
                    llm.generate(asked, SamplingParams(max_tokens=1))


def test_logits_that_are_no_numbers_are_refused(
    whole_model: Path, family: str, tmp_path: Path
) -> None:
    """As `generate` refuses them, and as often as it is asked."""
    model = shutil.copytree(whole_model, tmp_path / "model")
    name = broken(model, PARTS[family][0], NAN)
    with LLM(model) as llm:
        for _ in range(2):
            with pytest.raises(CheckpointError, match=f"{name} .* infinity or NaN"):
                llm.logits(list(range(40)))
