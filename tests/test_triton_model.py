"""A model whose norms, rotations and routers are Triton's, on a GPU that is late."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from late_cuda import late_cuda
from poison import PoisonedWorkspace

from lowtide.core import Costs, Curve
from lowtide.engine.running import device as device_engine
from lowtide.engine.running import pass_room
from lowtide.kernels import triton_head, triton_routing, triton_rows
from lowtide.llm import LLM, plan_model
from lowtide.model_writing.synth import synth
from lowtide.params import DiffusionParams, SamplingParams

KERNELS = {
    triton_rows: ("rms_norm", "rotate", "normalise_and_rotate"),
    triton_routing: ("choose_experts", "sort_pairs", "combine"),
    triton_head: ("reduce_tiles", "join_tiles"),
}
ROUTING = {"choose_experts", "sort_pairs", "combine"}
USED = {
    "llada2": {"rms_norm", "normalise_and_rotate", *ROUTING},
    "deepseek_v2": {"rms_norm", "rotate", *ROUTING},
    "gpt_oss": {"rms_norm", "rotate", *ROUTING},
}
HEAD = {"reduce_tiles", "join_tiles"}
USED_BY_DENOISING = {
    "llada": {"rms_norm", "rotate", *HEAD},
    "llada_moe": {"rms_norm", "normalise_and_rotate", *ROUTING, *HEAD},
    "dream": {"rms_norm", "rotate", *HEAD},
}


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of `KERNELS` that have run.

    Experts are torch's: they have tests of their own, and take long.
    """
    curve = Curve([(1, 1e-4), (512, 1e-3)])
    stored = SimpleNamespace(costs=Costs(1, 2e-4, curve, curve, curve, 1e-5))
    monkeypatch.setattr(device_engine, "stored_or_measured", lambda key, measure: stored)
    used: set[str] = set()

    def noted(name: str, kernel: Callable[..., object], *given: object, **named: object) -> object:
        used.add(name)
        return kernel(*given, **named)

    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(module, name, partial(noted, name, getattr(module, name)))
    return used


@pytest.mark.parametrize("family", USED)
def test_layers_in_triton_say_the_same(
    family: str, used: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, ids = synth(family, "tiny", tmp_path / "model", seed=5), [7, 3]
    options: dict[str, Any] = {"context": 16, "dtype": "float32", "kernels": "reference"}
    with LLM(folder, device="cpu", **options) as llm:
        wanted = llm.logits(ids)
    with late_cuda(monkeypatch, haste=0.2):
        with LLM(folder, device="cuda", gpu_memory="64MiB", **options) as llm:
            found = llm.logits(ids)
    assert used == USED[family]
    assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()


@pytest.mark.parametrize("family", USED_BY_DENOISING)
def test_bidirectional_models_answer_alike_within_their_plan(
    family: str, used: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the planned workspace of a context that is divided, NaN wherever nothing is alive."""
    folder = synth(family, "tiny", tmp_path / "model", seed=5)
    diffusion = DiffusionParams(steps=2, remasking="low_confidence", cfg_scale=0.5)
    params = SamplingParams(temperature=0.0, max_tokens=4, diffusion=diffusion)
    options: dict[str, Any] = {"context": 1024, "dtype": "float32", "kernels": "reference"}
    with LLM(folder, device="cpu", **options) as llm:
        [wanted] = llm.generate([[7, 3, 120]], params)
    monkeypatch.setattr(pass_room, "Workspace", PoisonedWorkspace)
    with late_cuda(monkeypatch, haste=0.2):
        least_bytes = plan_model(folder, device="cuda", **options).minimum_bytes
        with LLM(folder, device="cuda", gpu_memory=least_bytes, **options) as llm:
            [found] = llm.generate([[7, 3, 120]], params)
    assert used == USED_BY_DENOISING[family]
    assert found.token_ids == wanted.token_ids
