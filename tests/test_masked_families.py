"""LLaDA, LLaDA-MoE and Dream: every position sees every other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lowtide.llm import LLM, plan_model

GOLDENS = Path(__file__).parent / "goldens"
NAMES = ("llada", "llada_moe", "dream")
TOLERANCE = 2e-4


def golden(family: str) -> Path:
    return GOLDENS / f"{family.replace('_', '-')}-a"


@pytest.mark.parametrize("family", NAMES)
def test_logits_are_the_original_implementations(family: str) -> None:
    """Dream's were recorded before they are shifted, as its own code does it afterwards."""
    recorded = load_file(golden(family) / "forward.safetensors")
    least_bytes = plan_model(golden(family), context=64).minimum_bytes
    with LLM(golden(family), context=64, host_memory=least_bytes) as llm:
        for token_ids, logits in zip(
            recorded["input_ids"].tolist(), recorded["logits"], strict=True
        ):
            if family == "dream":
                logits = torch.cat([logits[:1], logits[:-1]])
            torch.testing.assert_close(llm.logits(token_ids), logits, atol=TOLERANCE, rtol=0)
