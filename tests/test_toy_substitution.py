"""A substitution is one place: here some are added, used, and taken out.

What runs is what they answered, to the bit; who stays and who comes goes on by what the router
asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from whole import answer, residents

from lowtide import LLM, SamplingParams
from lowtide.core import Facts, IntArray, Moves, RoutedTokens, Step
from lowtide.errors import InternalError
from lowtide.experts.rows import Routing
from lowtide.llm import plan_model
from lowtide.policies.catalogue import CATALOGUE
from lowtide.policies.placement import Placement
from lowtide.policies.presets import lossless_presets, register, unregister
from lowtide.policies.ranks import Ranks
from lowtide.policies.recipe import PolicyInputs
from lowtide.policies.substitution import Substitution, check_substituted, in_order

MODEL = Path(__file__).parent / "goldens" / "llada2-a"
PROMPT = [7, 3, 20, 9, 4]
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
CPU: dict[str, Any] = {"device": "cpu"}
EMULATED: dict[str, Any] = {"device": "emulated"}


class Itself:
    """Maps expert i to i."""

    def __init__(self) -> None:
        self.asked: list[Facts] = []

    def __call__(self, facts: Facts) -> RoutedTokens | None:
        self.asked.append(facts)
        routing = facts.routing
        return RoutedTokens(routing.experts.copy(), routing.weights.copy())


class Resident:
    """Replaces so many absent experts of each token by residents, in ascending id."""

    def __init__(self, most_per_token: int) -> None:
        self._most_per_token = most_per_token
        self.last: RoutedTokens | None = None
        self.num_substituted = 0

    def __call__(self, facts: Facts) -> RoutedTokens | None:
        routing = facts.routing
        is_here = np.zeros(len(facts.is_kept), np.bool_)
        is_here[facts.demand.experts] = facts.demand.is_resident
        experts = routing.experts.copy()
        for row in experts:
            others = iter(np.setdiff1d(is_here.nonzero()[0], row))
            absent = (~is_here[row]).nonzero()[0][: self._most_per_token]
            for place, other in zip(absent, others, strict=False):
                row[place] = other
                self.num_substituted += 1
        # From the back, so that it is `in_order` that sorts them.
        self.last = in_order(experts[:, ::-1], routing.weights[:, ::-1])
        return self.last


class Watched:
    """A placement that notes what it was asked."""

    def __init__(self, inner: Placement) -> None:
        self._inner = inner
        self.demands: list[tuple[int, list[int]]] = []

    def initial(self, layer: int) -> IntArray:
        return self._inner.initial(layer)

    def begin_pass(self, step: Step, num_residents: IntArray, capacity: IntArray) -> Ranks:
        return self._inner.begin_pass(step, num_residents, capacity)

    def end_pass(self, step: Step, hits: IntArray) -> None:
        self.demands += [(i, one.nonzero()[0].tolist()) for i, one in enumerate(hits) if one.any()]
        self._inner.end_pass(step, hits)

    def update(self, facts: Facts) -> Moves:
        self.demands.append((facts.layer, facts.demand.experts.tolist()))
        return self._inner.update(facts)


class Compared:
    """An observer: keeps each layer's input, output, its router's choice and what was answered."""

    def __init__(self, substitution: Resident) -> None:
        self._substitution = substitution
        self.layers: list[tuple[int, Step, Tensor, Tensor]] = []
        self.routers: list[Routing] = []
        self.run: list[Routing] = []

    def saw_layer(self, layer: int, step: Step, x: Tensor, routing: Routing, out: Tensor) -> None:
        answer, self._substitution.last = self._substitution.last, None
        self.layers.append((layer, step, x.clone(), out.clone()))
        self.routers.append(Routing(*(part.clone() for part in routing)))
        run = self.routers[-1]
        if answer is not None:
            run = Routing(*(torch.from_numpy(part.copy()) for part in answer[:2]))
        self.run.append(run)


@contextmanager
def preset(base: str, **changes: Any) -> Iterator[str]:
    register("toy", replace(CATALOGUE[base], is_lossless=False, **changes))
    try:
        yield "toy"
    finally:
        unregister("toy")


def with_one(substitution: Substitution) -> Callable[[PolicyInputs], Substitution]:
    return lambda setting: substitution


def open_half(policy: str, **options: Any) -> LLM:
    """With half of what there is between the least budget and everything."""
    options = {"context": 128, **options}
    plan = plan_model(MODEL, policy=policy, **options)
    half = (plan.minimum_bytes + plan.full_bytes) // 2
    memory = "host_memory" if options["device"] == "cpu" else "gpu_memory"
    return LLM(MODEL, policy=policy, **{memory: half}, **options)


@pytest.mark.parametrize(
    ("base", "options"),
    [("lru", CPU), ("lowtide", CPU), ("tide", EMULATED), ("lowtide", EMULATED), ("dali", EMULATED)],
)
def test_one_that_maps_each_expert_to_itself_changes_no_bit(
    base: str, options: dict[str, Any]
) -> None:
    with LLM(MODEL, device="cpu", context=128) as llm:
        ids, logits = answer(llm, PROMPT, PARAMS)
    itself = Itself()
    with (
        preset(base, substitution=with_one(itself), asks_scores=True) as name,
        open_half(name, **options) as llm,
    ):
        assert name not in lossless_presets()
        found = answer(llm, PROMPT, PARAMS)
        assert found[0] == ids and torch.equal(found[1], logits)
        config = llm.config
        stats = llm.stats()
    assert itself.asked and stats["num_misses"] > 0
    for facts in itself.asked:
        check_routing(facts, config.moe.num_experts)


def check_routing(facts: Facts, num_experts: int) -> None:
    """A policy is told each token's experts and weights, and the logits that they came of."""
    routing = facts.routing
    assert routing is not None and routing.scores is not None
    assert np.array_equal(np.unique(routing.experts), facts.demand.experts)
    assert not facts.demand.is_resident.all()
    assert routing.scores.shape == (len(routing.experts), num_experts)
    chosen = 1 / (1 + np.exp(-np.take_along_axis(routing.scores, routing.experts, axis=1)))
    share = routing.weights / routing.weights.sum(axis=1, keepdims=True)
    assert np.allclose(chosen / chosen.sum(axis=1, keepdims=True), share, atol=1e-5)


@pytest.mark.parametrize(
    ("base", "options", "most_per_token", "waits"),
    [
        ("lru", CPU, 1, False),
        ("lowtide", CPU, 1, False),
        ("lowtide", CPU, 99, False),
        ("lowtide", EMULATED, 99, False),
        ("tide", EMULATED, 99, True),
        ("tide", EMULATED, 1, False),
    ],
)
def test_what_runs_is_the_other_routing_and_residents_go_by_the_routers(
    base: str, options: dict[str, Any], most_per_token: int, waits: bool
) -> None:
    resident, watched = Resident(most_per_token), []
    changes = {"waits": lambda setting: True} if waits else {}

    def placement(setting: PolicyInputs) -> Placement:
        watched.append(Watched(CATALOGUE[base].placement(setting)))
        return watched[-1]

    seen = Compared(resident)
    with (
        preset(base, substitution=with_one(resident), placement=placement, **changes) as name,
        open_half(name, **options) as llm,
        llm.observed(seen),
    ):
        before = residents(llm)
        answer(llm, PROMPT, PARAMS)
        stats, after = llm.stats(), residents(llm)
    assert resident.num_substituted > 0
    pairs = zip(seen.routers, seen.run, strict=True)
    assert any(not torch.equal(asked.experts, run.experts) for asked, run in pairs)
    with LLM(MODEL, device="cpu", context=128) as whole:
        for (layer, step, x, out), routing in zip(seen.layers, seen.run, strict=True):
            assert torch.equal(whole.run_experts(layer, x, routing, step), out)
    asked = [
        (layer, routing.experts.unique().tolist())
        for (layer, *_), routing in zip(seen.layers, seen.routers, strict=True)
    ]
    [placed] = watched
    assert placed.demands == asked
    assert stats["num_hits"] + stats["num_misses"] == sum(len(experts) for _, experts in asked)
    # Also where a host by itself reads what runs and all were replaced: some are read all the same.
    assert after != before


def test_a_substitution_is_not_asked_where_all_experts_are_resident() -> None:
    itself = Itself()
    with preset("static", substitution=with_one(itself)) as name:
        for device in ("cpu", "emulated"):
            with LLM(MODEL, device=device, context=128, policy=name) as llm:
                answer(llm, PROMPT, PARAMS)
    assert not itself.asked


def twice(facts: Facts) -> RoutedTokens | None:
    experts = facts.routing.experts.copy()
    experts[-1, 0] = experts[-1, 1]
    return RoutedTokens(experts, facts.routing.weights)


def test_a_run_on_the_host_names_the_substitution_that_counts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with preset("lru", substitution=with_one(twice)) as name, open_half(name, device="cpu"):
        assert "toy is its placement and its substitution alone: its assignment" in caplog.text


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_an_expert_twice_in_a_row_is_a_fault_and_the_engine_goes_on(device: str) -> None:
    with preset("lru", substitution=with_one(twice)) as name, open_half(name, device=device) as llm:
        with pytest.raises(InternalError, match="no expert may come twice"):
            llm.generate([PROMPT], PARAMS)
        llm.adopt_policy("lru")
        answer(llm, PROMPT, PARAMS)


ASKED = RoutedTokens(np.array([[0, 2], [1, 3]]), np.full((2, 2), 0.5, np.float32))


@pytest.mark.parametrize(
    ("experts", "weights", "said"),
    [
        ([[0, 2], [3, 1]], None, r"token 1 the experts \[3, 1\]"),
        ([[0, 2], [3, 3]], None, "no expert may come twice"),
        ([[0, 2], [1, 4]], None, "expert 4; there are 4"),
        ([[-1, 2], [1, 3]], None, "expert -1"),
        ([[0, 2]], None, r"int64 \[1, 2\]"),
        ([[0.0, 2.0], [1.0, 3.0]], None, "float64"),
        ([[0, 2], [1, 3]], [[0.5, np.nan], [0.5, 0.5]], "not finite"),
    ],
)
def test_answers_that_no_layer_could_run(experts: Any, weights: Any, said: str) -> None:
    weights = ASKED.weights if weights is None else np.array(weights, np.float32)
    with pytest.raises(InternalError, match=said):
        check_substituted(RoutedTokens(np.array(experts), weights), ASKED, 4)
    check_substituted(ASKED, ASKED, 4)


def test_what_a_policy_wants_to_be_told_is_planned_for() -> None:
    options: dict[str, Any] = {"context": 128, "device": "cpu"}
    plain = plan_model(MODEL, policy="lru", **options)
    with preset("lru", substitution=with_one(Itself()), asks_scores=True) as name:
        plan = plan_model(MODEL, policy=name, **options)
        assert plan.host.workspace_bytes >= plain.host.workspace_bytes
        with LLM(MODEL, policy=name, **options) as llm:
            for policy in ("lru", name):
                llm.adopt_policy(policy)
