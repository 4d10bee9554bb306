"""Passes in register mode compute nothing, and count what they would with all shapes by torch."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from programs import python
from whole import planner_of

from lowtide.engine.opening.config import EngineConfig
from lowtide.engine.opening.model import open_model
from lowtide.engine.planning import planner as counting
from lowtide.engine.planning.uncomputed import Uncomputed
from lowtide.families import families
from lowtide.model_writing.synth import synth


def counted(folder: Path) -> object:
    planner = planner_of(open_model(folder, EngineConfig(context=64)))
    graph = planner.registrar().graph
    if planner.config.decoding.keeps_keys:
        return graph
    return graph, planner_of(open_model(folder, EngineConfig(context=2048))).workspace_bytes()


@pytest.mark.parametrize("family", sorted(families()))
def test_what_is_counted_is_the_same(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = synth(family, "tiny", tmp_path / "model", seed=0)
    found = counted(folder)
    monkeypatch.setattr(counting, "Uncomputed", contextlib.nullcontext)
    assert found == counted(folder)


def test_operators_have_the_shapes_and_types_of_torchs() -> None:
    x, y = (torch.ones(shape, device="meta") for shape in ((3, 4), (4,)))
    narrow = x.to(torch.bfloat16)
    for make in (
        lambda: x + y,
        lambda: narrow * x,
        lambda: narrow * 2.0,
        lambda: 1.0 / (10000.0**y),
        lambda: narrow.softmax(-1, dtype=torch.float32),
        lambda: x.mean(-1, keepdim=True),
        lambda: x.sum(0),
        lambda: x.amax(-1),
        lambda: x.topk(2, dim=0).indices,
        lambda: x.sort().values,
        lambda: torch.cat((x, x)),
        lambda: torch.mm(x, x.t()),
        lambda: x.masked_fill(x.bool(), 0.0),
        lambda: torch.arange(0, 7, 2, dtype=torch.float32, device="meta"),
    ):
        wanted = make()
        with Uncomputed():
            found = make()
        assert (found.shape, found.dtype, found.is_meta) == (wanted.shape, wanted.dtype, True)


def test_a_plan_never_waits_for_torchs_compiler(tmp_path: Path) -> None:
    folder = synth("llada_moe", "tiny", tmp_path / "model", seed=0)
    program = (
        "import sys\n"
        "from lowtide.llm import plan_model\n"
        f"plan_model({str(folder)!r}, context=2048)\n"
        "print(sorted({'torch._dynamo', 'sympy'} & set(sys.modules)))"
    )
    result = python("-c", program)
    assert result.stdout == "[]\n", result.stderr
