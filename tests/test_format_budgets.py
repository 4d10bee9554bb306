"""Weights in every format: budgets, devices and policies change no bit, as `verify` sees it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rounded_files import write_rounded
from test_gguf_by_expert import as_published, write_by_expert
from test_gguf_models import MIXED, SMALL, write

from lowtide.lab import verify as verify_module
from lowtide.lab.verify import verify
from lowtide.llm import plan_model
from lowtide.model_writing.synth import synth
from lowtide.plan import WeightFormats

GGUF_FILES: dict[str, Callable[[Path], object]] = {
    "K types": lambda path: write(path, "qwen3_moe", 0, MIXED),
    "small types": lambda path: write(path, "olmoe", 0, SMALL),
    "experts of one layer differ": lambda path: write_by_expert(path, as_published),
}
PRESETS = ("dali", "lowtide")
"""Presets that move between steps, and beside them; both divide a layer's work."""

SHARES = (0.0, 0.5)
"""Of the experts that are resident, from the least budget."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("formats")


def check(
    model: Path, formats: WeightFormats | None, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> None:
    """On the host alone and beside a device, with nobody resident and with half."""
    monkeypatch.setattr(verify_module, "lossless_presets", lambda: PRESETS)
    monkeypatch.setattr(verify_module, "SHARES", SHARES)
    plan = plan_model(model, context=64, dtype="bfloat16", **options)
    verdicts = verify(
        model, max_tokens=6, context=64, dtype="bfloat16", device="emulated", **options
    )
    assert len(verdicts) == 2 * len(SHARES) * len(PRESETS)
    for verdict in verdicts:
        assert verdict.is_same and verdict.tolerance == 0 and not verdict.reason, verdict
        assert verdict.formats == plan.formats
        assert formats is None or plan.formats == formats
    residents = {verdict.num_residents for verdict in verdicts}
    assert min(residents) == 0 < max(residents)


@pytest.mark.parametrize("activations", ["own", "int8"])
@pytest.mark.parametrize("name", ["q4", "q8"])
def test_formats_of_ours(
    name: str, activations: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = folder / "plain"
    if not model.exists():
        synth("qwen2_moe", "tiny", model, seed=6)
    formats = WeightFormats(name, name, "q8", activations)
    check(model, formats, monkeypatch, format=name, activations=activations)


@pytest.mark.parametrize("activations", ["own", "int8", "auto"])
@pytest.mark.parametrize("name", GGUF_FILES)
def test_types_of_gguf_files(
    name: str, activations: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / f"{name}.gguf"
    if not path.exists():
        GGUF_FILES[name](path)
    check(path, None, monkeypatch, activations=activations)


@pytest.mark.parametrize("name", ["awq", "compressed-tensors of rows", "fp8"])
def test_checkpoints_of_other_tools(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are kept in the same ways; `test_rounded_checkpoints.py` has a budget of each."""
    source = folder / "qwen3"
    if not source.exists():
        synth("qwen3_moe", "tiny", source, seed=3)
    model, _ = write_rounded(source, folder / name, name)
    check(model, None, monkeypatch)


def test_mxfp4_of_safetensors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = synth("gpt_oss", "tiny", folder / "gpt_oss", seed=3)
    whole = plan_model(model, context=64, expert_dtype="bfloat16")
    assert plan_model(model, context=64).host.slot_bytes < 0.4 * whole.host.slot_bytes
    check(model, None, monkeypatch)
