"""The trace that memory moves under, and what is measured of it; no speed is judged here."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import moving_memory
import pytest
from common import cut_models, moving_trace

from lowtide.errors import UsageError
from lowtide.families import families
from lowtide.llm import plan_model
from lowtide.model_writing.synth import synth


@pytest.mark.parametrize("make_trace", [moving_trace.mixed_trace, moving_trace.bidirectional_trace])
def test_every_request_of_a_trace_can_come(make_trace: Any) -> None:
    trace = make_trace(4096, 32)
    for index, each in enumerate(trace):
        assert each.after <= index
        assert each.num_prompt + each.max_tokens <= 4096 and 0 < each.num_new <= each.max_tokens
    assert max(each.num_prompt + each.max_tokens for each in trace) == 4096
    assert 4096 < moving_trace.most_at_once(trace) <= sum(each[1] + each[2] for each in trace)


def test_moving_or_not_a_trace_runs_to_its_end_within_the_plan(tmp_path: Path) -> None:
    model = synth("llada2", "tiny", tmp_path / "tiny")
    longest = 512
    plan = plan_model(model, context=longest)
    trace = moving_trace.mixed_trace(longest, 8)
    common = {
        "model": str(model),
        "budget_bytes": plan.minimum_bytes + 40 * plan.host.slot_bytes,
        "context": longest,
        "policy": "lru",
        "trace": trace,
        "read_GBps": 1e6,  # reads take no time: what is left is the processor's
    }
    lent, kept = (moving_trace.run_trace({**common, "moves": each}) for each in (True, False))
    assert lent["num_tokens"] == kept["num_tokens"] >= sum(each.num_new for each in trace)
    assert lent["max_running"] > kept["max_running"] >= 4 and lent["num_passes"] > 0
    assert lent["num_slots_lent"] > 0 and lent["max_cache_tokens"] > longest
    assert all(each["ideal_tokens_per_s"] >= each["tokens_per_s"] > 0 for each in (lent, kept))
    assert "num_slots_lent" not in kept and kept["max_cache_tokens"] == 0


def test_constant_caches_go_from_the_longest_to_all_that_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = synth("llada2", "tiny", tmp_path / "tiny")
    plan = plan_model(model, context=512)
    budget_bytes = plan.minimum_bytes + 40 * plan.host.slot_bytes
    contexts: list[int] = []

    def in_process(name: str, side: dict[str, Any], *_: object) -> dict[str, Any]:
        if not side["moves"]:
            contexts.append(side["context"])
        counts = dict.fromkeys(("tokens_per_s", "ideal_tokens_per_s", "max_running"), 1)
        return {**counts, "is_within_plan": True}

    disk = SimpleNamespace(measure=lambda: {"random_read_GBps": 1.0})
    monkeypatch.setattr(moving_memory, "in_process", in_process)
    monkeypatch.setattr(moving_memory, "Disk", lambda *_: disk)
    monkeypatch.setattr(moving_memory, "cut_model", lambda *_: model)
    monkeypatch.setattr(moving_memory, "weight_bytes", lambda folder: budget_bytes)
    monkeypatch.setattr(moving_memory, "most_at_once", lambda trace: 1024)
    told = ["--families", "llada2", "--traces", "chats", "--longest", "512", "--share", "1"]
    monkeypatch.setattr(sys, "argv", ["moving_memory.py", *told])
    moving_memory.main()
    assert contexts[0] == 512 and 1024 in contexts and len(contexts) == 5
    assert plan_model(model, context=contexts[-1], host_memory=budget_bytes).host.num_slots < 40


def test_layers_are_cut_until_the_model_is_small_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made: list[Any] = []
    monkeypatch.setattr(cut_models, "write_checkpoint", lambda size, folder: made.append(size))
    for family in moving_memory.LONGEST:
        full = families()[family].sizes()["full"].config
        folder = cut_models.cut_model(family, 16 * 10**9)
        assert made[-1].config["num_hidden_layers"] > 3
        assert {**made[-1].config, **_layers(full)} == full
        assert str(made[-1].config["num_hidden_layers"]) in folder.name
    with pytest.raises(UsageError, match="Two layers of llada2"):
        cut_models.cut_model("llada2", 10**9)


def _layers(config: Any) -> dict[str, Any]:
    """Return the entries of a config that say how many layers there are."""
    return {
        name: config[name] for name in ("num_hidden_layers", "moe_layer_freq") if name in config
    }
