"""The whole engine on a real GPU against the CPU."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

# The GPU tests also run on machines where little but torch is installed.
for name in ("tokenizers", "jinja2", "huggingface_hub"):
    pytest.importorskip(name)

from lowtide.lab.synth import synth  # noqa: E402
from lowtide.llm import LLM, plan_model  # noqa: E402
from lowtide.params import DiffusionParams, SamplingParams  # noqa: E402

pytestmark = pytest.mark.gpu

PROMPT = [7, 3, 120, 9, 44, 3, 3, 80] * 5  # longer than a window
TOLERANCE = 2e-3
"""Of float32 logits: the GPU sums in another order. Tokens are compared for equality."""


POLICIES = ("lowtide", "tide", "dali", "lru", "all-host")
CASES = [*itertools.product(("llada2", "qwen3_moe", "deepseek_v2"), POLICIES)]
CASES.append(("gpt_oss", "lowtide"))  # windows and sinks, and experts without a Triton kernel


@pytest.mark.filterwarnings("ignore:Experts on the GPU run one by one.*biases")
@pytest.mark.parametrize(("family", "policy"), CASES)
def test_the_gpu_says_what_the_cpu_says(family: str, policy: str, tmp_path: Path) -> None:
    folder = synth(family, "tiny", tmp_path / "model", seed=5)
    params = SamplingParams(max_tokens=16)
    if family == "llada2":
        diffusion = DiffusionParams(block_length=8, steps=4, threshold=0.5)
        params = SamplingParams(max_tokens=16, diffusion=diffusion)
    options = {"dtype": "float32", "context": 256}
    with LLM(folder, device="cpu", **options) as llm:
        [expected] = llm.generate([PROMPT], params)
        logits = llm.logits([*PROMPT, *expected.token_ids])
    plan = plan_model(folder, device="cuda", **options)
    half = plan.minimum_bytes + (plan.full_bytes - plan.minimum_bytes) // 2
    with LLM(folder, device="cuda", gpu_memory=half, policy=policy, **options) as llm:
        [completion] = llm.generate([PROMPT], params)
        again = llm.logits([*PROMPT, *expected.token_ids])
        assert 0 < sum(llm.plan.residents_per_layer) < llm.plan.num_experts
    torch.testing.assert_close(again, logits, atol=TOLERANCE, rtol=TOLERANCE)
    assert completion.token_ids == expected.token_ids
