"""`lowtide verify`: it proves sameness, and it notices when a promise is broken."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_models import write_first_layer
from torch import Tensor
from typer.testing import CliRunner

from lowtide.cli.app import app
from lowtide.core import Facts, RoutedTokens
from lowtide.experts.device_tier import DeviceTier
from lowtide.kernels.reference import Kernels
from lowtide.lab import verify as verify_module
from lowtide.lab.agreement import agreement
from lowtide.lab.verify import SHARES, Verdict, verify
from lowtide.layers.rows import in_chunks
from lowtide.memory.chunking import MAX_REMAINDER, OPERATOR_TILES, TILE_ROWS
from lowtide.memory.workspace import Buffers
from lowtide.policies.catalogue import CATALOGUE
from lowtide.policies.presets import lossless_presets, register, unregister

GOLDENS = Path(__file__).parent / "goldens"
MODEL = GOLDENS / "llada2-a"
NUM_CASES = len(SHARES) * len(lossless_presets())
NEED_A_SLOT = {"on-demand", "static", "lru", "edgemoe"}


def test_every_preset_gives_the_same_bits_at_every_budget_on_every_device() -> None:
    verdicts = verify(MODEL, max_tokens=8, context=128, device="emulated")
    assert [verdict.device for verdict in verdicts] == ["cpu"] * NUM_CASES + [
        "emulated"
    ] * NUM_CASES
    assert all(verdict.is_same and verdict.tolerance == 0 for verdict in verdicts)
    refused = {verdict.policy for verdict in verdicts if verdict.reason}
    assert refused <= NEED_A_SLOT
    least = verdicts[NUM_CASES]
    assert verdicts[0].num_residents == least.num_residents == 0
    assert least.host_budget_bytes < verdicts[-1].host_budget_bytes  # half of them on disk


@pytest.fixture
def two_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them are tried above."""
    monkeypatch.setattr(verify_module, "lossless_presets", lambda: ("lru", "tide"))


def disturb(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """One combination of a layer's experts goes wrong."""
    num_calls, combine = 0, Kernels.combine

    def disturbed(self: Kernels, *arguments: Tensor) -> None:
        nonlocal num_calls
        combine(self, *arguments)
        num_calls += 1
        if num_calls == call:
            arguments[-1].add_(1.0)

    monkeypatch.setattr(Kernels, "combine", disturbed)


@pytest.mark.usefixtures("two_presets")
def test_a_broken_promise_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    disturb(monkeypatch, call=2)  # in the reference's pass over the prompt
    verdicts = verify(MODEL, prompt=[1, 2, 3], max_tokens=1, context=128, device="cpu")
    assert {verdict.first_layer for verdict in verdicts} == {1}
    assert not any(verdict.is_same for verdict in verdicts)


@pytest.mark.usefixtures("two_presets")
def test_a_broken_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum after the third layer that the device ran a share of."""
    num_layers, finish, combine = 0, DeviceTier.finish, Kernels.combine
    is_due = False

    def counted(tier: DeviceTier, *arguments: Any) -> None:
        nonlocal num_layers, is_due
        finish(tier, *arguments)
        num_layers += 1
        is_due = num_layers == 3

    def disturbed(self: Kernels, *arguments: Tensor) -> None:
        nonlocal is_due
        combine(self, *arguments)
        if is_due:
            arguments[-1].add_(1.0)
            is_due = False

    monkeypatch.setattr(DeviceTier, "finish", counted)
    monkeypatch.setattr(Kernels, "combine", disturbed)
    verdicts = verify(MODEL, prompt=[1, 2, 3], max_tokens=1, context=128, device="emulated")
    broken = [verdict for verdict in verdicts if not verdict.is_same]
    assert [(verdict.device, verdict.first_layer) for verdict in broken] == [("emulated", 2)]
    assert broken[0].largest_layer_difference > 0


LONGER = {
    "dream-a": {"max_position_embeddings": 1024},
    "llada-a": {"max_sequence_length": 1024},
}


@pytest.mark.parametrize("name", LONGER)
def test_a_bidirectional_models_passes_are_whole_and_divided(name: str) -> None:
    [verdict] = verify(GOLDENS / name, max_tokens=2, device="cpu", config_overrides=LONGER[name])
    assert verdict.is_same
    assert verdict.num_long_tokens > max(OPERATOR_TILES.values()) + MAX_REMAINDER
    assert verdict.divided["mlp"] == 2
    assert verdict.num_tokens == 2 + verify_module.LONG_ANSWER_TOKENS


@pytest.mark.usefixtures("two_presets")
def test_a_gpu_s_experts_are_given_a_long_text_a_pass_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where there is a tolerance every layer is asked for once more, by itself."""
    monkeypatch.setattr(verify_module, "INEXACT_DEVICES", ("cpu",))
    overrides = {"max_position_embeddings": 1024}
    verdicts = verify(
        GOLDENS / "llada-moe-a", max_tokens=2, device="cpu", config_overrides=overrides
    )
    assert len(verdicts) > 1
    assert all(verdict.is_same and verdict.num_long_tokens > 512 for verdict in verdicts)


def test_a_wrong_chunk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of operators that are divided, one row is wrong; the reference divides fewer."""

    def disturbed(operator: str, workspace: Buffers, run: Any, *rows: Tensor) -> None:
        in_chunks(operator, workspace, run, *rows)
        num_rows = len(rows[0])
        if TILE_ROWS < num_rows and workspace.together(operator, num_rows) < num_rows:
            rows[-1][-1].add_(1)

    monkeypatch.setattr("lowtide.models.decoder.in_chunks", disturbed)
    overrides = LONGER["dream-a"]
    [verdict] = verify(GOLDENS / "dream-a", max_tokens=2, device="cpu", config_overrides=overrides)
    assert not verdict.is_same


def test_a_text_is_no_longer_than_the_context() -> None:
    [verdict] = verify(GOLDENS / "dream-a", max_tokens=2, context=64, device="cpu")
    assert verdict.is_same and verdict.num_long_tokens == 0 and not verdict.divided


def test_a_tolerance_is_for_values_and_their_consequences() -> None:
    within = Verdict(
        "cuda",
        "tide",
        budget_bytes=1,
        host_budget_bytes=1,
        num_residents=0,
        tolerance=0.05,
        largest_layer_difference=0.04,
        largest_logit_difference=0.04,
        first_token=3,
    )
    assert within.is_same
    assert verify_module.replace(within, largest_logit_difference=0.9).is_same  # a consequence
    assert not verify_module.replace(within, first_layer=2).is_same
    assert not verify_module.replace(within, tolerance=0.0).is_same


def test_differences_are_shares_of_the_largest_value() -> None:
    wanted = torch.tensor([1.0, -4.0])
    assert verify_module.relative_difference(wanted, wanted) == 0
    assert verify_module.relative_difference(wanted + 1, wanted) == 0.25
    assert verify_module.relative_difference(wanted * torch.nan, wanted) == float("inf")


@pytest.mark.usefixtures("two_presets")
def test_the_command_prints_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "verify", partial(verify, max_tokens=4))
    result = CliRunner().invoke(app, ["verify", str(MODEL), "--context", "128", "--json"])
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["is_same"] is True
    assert all(one["is_same"] for one in found["runs"])


def test_a_broken_promise_is_an_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Verdict("cpu", "lru", 9000, 9000, 1, 0.0, first_layer=2, largest_layer_difference=0.5)
    refused = Verdict("cpu", "tide", 9000, 9000, 1, 0.0, reason="no slot")
    monkeypatch.setattr(verify_module, "verify", lambda *_, **__: [broken, refused])
    result = CliRunner().invoke(app, ["verify", str(MODEL)])
    assert result.exit_code == 1
    assert "from 2" in result.stdout and "cannot run" in result.stdout


@pytest.mark.parametrize("option", ["--policy", "--host-memory", "--gpu-memory"])
def test_budget_and_policy_are_its_own_choice(option: str) -> None:
    value = "lru" if option == "--policy" else "1GiB"
    result = CliRunner().invoke(app, ["verify", str(MODEL), option, value])
    assert result.exit_code == 2
    assert option.removeprefix("--").replace("-", "_") in result.stderr


def test_a_policy_that_changes_words_is_shown_and_not_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verify_module, "lossless_presets", lambda: ("lru",))

    def first_residents(facts: Facts) -> RoutedTokens:
        """Experts that are here run in place of all that a token asks for."""
        assert facts.routing is not None
        weights, here = facts.routing.weights, facts.is_kept.nonzero()[0]
        num_chosen = weights.shape[1]
        if len(here) < num_chosen:
            return facts.routing
        return RoutedTokens(np.tile(here[:num_chosen], (len(weights), 1)), weights)

    made = replace(
        CATALOGUE["static"], is_lossless=False, substitution=lambda setting: first_residents
    )
    register("toy", made)
    command = ["verify", str(MODEL), "--context", "128", "--policy", "toy"]
    try:
        result = CliRunner().invoke(app, [*command, "--json"])
    finally:
        unregister("toy")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["is_same"] is True
    lossy = [run for run in found["runs"] if not run["is_lossless"]]
    assert [run["policy"] for run in lossy] == ["toy"] * len(SHARES)
    assert any(run["largest_logit_difference"] > 0 for run in lossy)
    assert all(run["num_tokens"] == 24 for run in lossy)


def test_agreement_is_counted_where_tokens_were_written() -> None:
    prompt = [5, 6, 7, 8]
    exact = agreement(GOLDENS / "llada-a", "dual", prompt, max_tokens=1)
    assert (exact.num_equal, exact.first_different, exact.num_likeliest) == (1, None, 1)
    found = agreement(GOLDENS / "llada-a", "dual", prompt, max_tokens=24)
    assert found.num_tokens == 24 and 0 < found.num_equal < 24
    assert found.first_different is not None
    assert 8 <= found.num_likeliest < 24


def test_a_model_of_one_layer_agrees_in_everything(tmp_path: Path) -> None:
    folder = write_first_layer(GOLDENS / "dream-a", tmp_path)
    found = agreement(folder, "prefix", [5, 6, 7, 8], context=64)
    assert found.equal_share == found.likeliest_share == 1
    assert found.first_different is None


def test_an_approximate_cache_is_reported_and_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    same = Verdict("cpu", "lru", 9000, 9000, 1, 0.0)
    monkeypatch.setattr(verify_module, "verify", lambda *_, **__: [same])
    command = ["verify", str(GOLDENS / "llada-moe-a"), "--context", "128", "--kv-cache", "prefix"]
    result = CliRunner().invoke(app, [*command, "--json"])
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["is_same"] is True and found["agreement"]["kv_cache"] == "prefix"
    assert 0 <= found["agreement"]["equal_share"] <= 1
    assert "prefix cache beside exact mode" in CliRunner().invoke(app, command).stdout
