"""`lowtide verify`: it proves sameness, and it notices when a promise is broken."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from torch import Tensor
from typer.testing import CliRunner

from lowtide.cli.main import app
from lowtide.experts import runtime
from lowtide.kernels import reference
from lowtide.lab import verify as verify_module
from lowtide.lab.verify import LOSSLESS_PRESETS, NUM_BUDGETS, verify

MODEL = Path(__file__).parent / "goldens" / "llada2-a"


def test_every_preset_gives_the_same_bits_at_every_budget() -> None:
    verdicts = verify(MODEL, max_tokens=16, context=128)
    assert len(verdicts) == NUM_BUDGETS * len(LOSSLESS_PRESETS)
    assert all(verdict.is_same for verdict in verdicts)
    assert verdicts[0].num_residents == 0


def test_a_broken_promise_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    num_calls = 0

    def disturbed(parts: Tensor, part_of: Tensor, weights: Tensor, *rest: Tensor) -> None:
        nonlocal num_calls
        reference.combine(parts, part_of, weights, *rest)
        num_calls += 1
        if num_calls == 2:  # in the reference's pass over the prompt
            rest[-1].add_(1.0)

    monkeypatch.setattr(runtime, "combine", disturbed)
    verdicts = verify(MODEL, prompt=[1, 2, 3], max_tokens=1, context=128)
    assert {verdict.first_layer for verdict in verdicts} == {1}


def test_the_command_prints_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "verify", partial(verify, max_tokens=8))
    result = CliRunner().invoke(app, ["verify", str(MODEL), "--context", "128", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["is_same"] is True


def test_budget_and_policy_are_its_own_choice() -> None:
    result = CliRunner().invoke(app, ["verify", str(MODEL), "--policy", "lru"])
    assert result.exit_code == 2
    assert "policy" in result.stderr
