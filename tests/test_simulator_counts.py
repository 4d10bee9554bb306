"""The runtime and the simulator make the same decisions for the same routing.

They are compared step by step and layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from inside import engine_of

from lowtide import LLM, SamplingParams
from lowtide.core import Facts, Moves
from lowtide.lab.budgets import budget_of_share
from lowtide.lab.simulation.simulator import Report, simulate
from lowtide.llm import plan_model
from lowtide.model_writing.synth import synth
from lowtide.policies.decision import Decision, Policies
from lowtide.policies.recipe import PolicyInputs
from lowtide.record import recorded
from lowtide.replay.trace import Trace

PROMPT = list(range(1, 40))
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
SHARE = 0.5
# Moves that nobody waits for arrive by the clock; with these presets nothing depends on when.
TIMELESS = {
    "all-host": {},
    "on-demand": {},
    "static": {},
    "layer-split": {},
    "lru": {},
    "fiddler": {"by_threshold": True},
    "moe-lightning": {},
    "tide": {"tau": 2, "waits": True},
}


class Decided(NamedTuple):
    """Decisions about one layer of one pass, in order."""

    layer: int
    demanded: list[int]
    are_resident: list[bool]
    resident: list[int]
    fetch: list[int]
    host: list[int]


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Decided, list[int]]]]:
    """Every decision, with the experts that moves then admit, whoever asks for it."""
    found: list[tuple[Decided, list[int]]] = []
    decide, moves = Policies.decide, Policies.moves

    def deciding(self: Policies, facts: Facts, run: Facts | None = None) -> Decision:
        decision = decide(self, facts, run)
        demand, assignment = facts.demand, decision.assignment
        parts = [demand.experts, demand.is_resident, *assignment[:3]]
        found.append((Decided(facts.layer, *(np.array(part).tolist() for part in parts)), []))
        return decision

    def moving(self: Policies, facts: Facts, decision: Decision) -> Moves:
        moved = moves(self, facts, decision)
        found[-1][1].extend(moved.admit.tolist())
        return moved

    monkeypatch.setattr(Policies, "decide", deciding)
    monkeypatch.setattr(Policies, "moves", moving)
    yield found


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """On an emulated device, with room for half of the experts."""
    model = synth("llada2", "tiny", tmp_path_factory.mktemp("models") / "tiny")
    options: dict[str, object] = {"context": 128, "device": "emulated"}
    options["gpu_memory"] = budget_of_share(plan_model(model, **options), SHARE)
    with LLM(model, **options) as llm:
        yield llm


@pytest.mark.parametrize("preset", TIMELESS)
def test_the_same_decisions_and_the_same_counts(
    preset: str, llm: LLM, tmp_path: Path, decided: list[tuple[Decided, list[int]]]
) -> None:
    options, path = TIMELESS[preset], tmp_path / "trace"
    llm.adopt_policy(preset, {name: str(value).lower() for name, value in options.items()})
    before = llm.stats()
    with recorded(llm, path, "tiny"):
        llm.generate([PROMPT], PARAMS)
    after, ran = llm.stats(), decided.copy()
    decided.clear()
    trace = Trace.load(path)
    policies = engine_of(llm).experts.policies
    setting = PolicyInputs(policies.capacity.tolist(), trace.shape.num_experts, policies.costs)
    report = simulate(trace, preset, setting.having(**options))
    # About a layer that has every expert the runtime asks nobody.
    asked = {one.layer for one, _ in ran}
    foretold = [one for one in decided if one[0].layer in asked]
    for place, (one, other) in enumerate(zip(ran, foretold, strict=True)):
        assert one == other, f"decision {place} of {preset}"
    assert counts_of(report) == {name: after[name] - before[name] for name in counts_of(report)}


def counts_of(report: Report) -> dict[str, int]:
    names = ("num_hits", "num_fetched", "num_moved", "num_moves_asked", "num_moves_done")
    return {name: getattr(report, name) for name in names}
