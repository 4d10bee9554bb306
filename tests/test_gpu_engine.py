"""The whole engine on a real GPU against the CPU."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

# The GPU tests also run on machines where little but torch is installed.
for name in ("tokenizers", "jinja2", "huggingface_hub", "psutil"):
    pytest.importorskip(name)

from lowtide.lab import verify as verify_module  # noqa: E402
from lowtide.lab.verify import verify  # noqa: E402
from lowtide.llm import LLM, plan_model  # noqa: E402
from lowtide.model_writing.pack import pack  # noqa: E402
from lowtide.model_writing.synth import synth  # noqa: E402
from lowtide.models import captured_passes  # noqa: E402
from lowtide.params import DiffusionParams, SamplingParams  # noqa: E402

pytestmark = pytest.mark.gpu

PROMPT = [7, 3, 120, 9, 44, 3, 3, 80] * 5  # longer than a window
TOLERANCE = 2e-3
"""Of float32 logits: the GPU sums in another order. Tokens are compared for equality."""


POLICIES = ("lowtide", "tide", "dali", "lru", "all-host")
FAMILIES = ("llada2", "qwen3_moe", "deepseek_v2")
CASES = [*itertools.product(FAMILIES, POLICIES, ("own",))]
CASES.append(("gpt_oss", "lowtide", "own"))  # windows and sinks, and packed experts with biases
CASES += [("mixtral", "lowtide", "q8"), ("llada2", "lowtide", "q4"), ("mixtral", "lru", "packed")]


@pytest.mark.parametrize(("family", "policy", "expert_dtype"), CASES)
def test_the_gpu_says_what_the_cpu_says(
    family: str, policy: str, expert_dtype: str, tmp_path: Path
) -> None:
    folder = synth(family, "tiny", tmp_path / "model", seed=5)
    params = SamplingParams(max_tokens=16)
    if family == "llada2":
        diffusion = DiffusionParams(block_length=8, steps=4, threshold=0.5)
        params = SamplingParams(max_tokens=16, diffusion=diffusion)
    options = {"dtype": "float32", "context": 256}
    if expert_dtype == "packed":  # dense weights are unpacked as they are loaded
        folder = pack(folder, tmp_path / "packed", format="q4")
    else:
        options["expert_dtype"] = expert_dtype
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", ["llada2", "qwen3_moe", "deepseek_v2", "gpt_oss", "qwen3_next"])
def test_passes_that_graphs_repeat_have_the_same_bits(
    family: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = synth(family, "tiny", tmp_path / "model", seed=5)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    if family == "llada2":
        diffusion = DiffusionParams(block_length=8, steps=4)
        params = SamplingParams(max_tokens=16, ignore_eos=True, diffusion=diffusion)
    repeated = captured_passes.queue_again
    num_repeated, found = 0, []

    def counted(*given: Any) -> None:
        nonlocal num_repeated
        num_repeated += 1
        repeated(*given)

    monkeypatch.setattr(captured_passes, "queue_again", counted)
    for most_rows in (0, 64):
        monkeypatch.setattr(captured_passes, "MAX_ROWS", most_rows)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # CUDA captures all of it
            with LLM(folder, device="cuda", dtype=dtype, context=256) as llm:
                answers = [llm.generate([PROMPT[:7]], params) for _ in range(2)]
                llm.adopt_policy("lru")  # experts come back into other slots
                llm.adopt_policy("lowtide")
                answers += [llm.generate([PROMPT, PROMPT[:7]], params) for _ in range(2)]
                ids = [each.token_ids for several in answers for each in several]
                found.append((ids, [llm.logits(PROMPT[:20]) for _ in range(3)]))
        assert (num_repeated > 0) == (most_rows > 0)
    assert found[0][0] == found[1][0]
    for wanted, logits in zip(*(each[1] for each in found), strict=True):
        assert torch.equal(logits, wanted)


@pytest.mark.parametrize("family", ["llada", "llada_moe", "dream"])
def test_long_passes_of_bidirectional_models(family: str, tmp_path: Path) -> None:
    """Passes of two tiles, guided and not, in the least memory that there is a plan for."""
    folder = synth(family, "tiny", tmp_path / "model", seed=5)
    prompt = PROMPT * 20
    options = {"dtype": "float32", "context": 1024}

    def answered(llm: LLM) -> list[list[int]]:
        found = []
        for length, scale in ((800, 0.0), (400, 0.5)):
            diffusion = DiffusionParams(steps=4, remasking="low_confidence", cfg_scale=scale)
            params = SamplingParams(temperature=0.0, max_tokens=64, diffusion=diffusion)
            [completion] = llm.generate([prompt[:length]], params)
            found.append(completion.token_ids)
        return found

    with LLM(folder, device="cpu", **options) as llm:
        expected, logits = answered(llm), llm.logits(prompt)
    least_bytes = plan_model(folder, device="cuda", **options).minimum_bytes
    with LLM(folder, device="cuda", gpu_memory=least_bytes, **options) as llm:
        torch.testing.assert_close(llm.logits(prompt), logits, atol=TOLERANCE, rtol=TOLERANCE)
        assert answered(llm) == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_verify_on_the_gpu(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From no slot to all experts; every layer of a run is given what the resident run's was."""
    monkeypatch.setattr(verify_module, "lossless_presets", lambda: ("lowtide", "lru", "all-host"))
    folder = synth("llada2", "tiny", tmp_path / "model", seed=5)
    verdicts = verify(folder, max_tokens=8, device="cuda", dtype=dtype, context=256)
    on_gpu = [verdict for verdict in verdicts if verdict.device == "cuda" and not verdict.reason]
    assert len(on_gpu) > 6 and all(verdict.is_same for verdict in verdicts)
