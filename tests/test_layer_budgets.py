"""Residents divided unevenly over layers, and moved between them while a model runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from common.synth_trace import synth_decode_trace, synth_trace
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from policy_facts import make_facts
from whole import answer, budget_bytes

from lowtide import SamplingParams
from lowtide.core import Costs, Curve, Demand, FloatArray, MoEShape, Moves, Step, StepKind
from lowtide.lab.profiles import load_profile
from lowtide.lab.simulation.simulator import calibrate, simulate
from lowtide.llm import LLM, plan_model
from lowtide.model_writing.synth import synth
from lowtide.policies import budgets
from lowtide.policies.budgets import Budgets
from lowtide.policies.catalogue import CATALOGUE
from lowtide.policies.lowtide import Lowtide
from lowtide.policies.presets import recipe
from lowtide.policies.recipe import PolicyInputs
from lowtide.replay.trace import Trace, TraceShape

COSTS = Costs(10, 6.0, Curve([(1, 8.0)]), Curve([(1, 1.0)]), Curve([(1, 2.0)]), 0.0)
WORTH = np.array([[9.0, 8.0, 7.0, 6.0], [1.0, 1.0, 0.0, 0.0]])


def look(held: Budgets, worth_s: FloatArray = WORTH) -> None:
    """As many steps as it takes to look at the layers once."""
    for _ in range(2):
        held.begin_step(lambda: worth_s)


def test_a_slot_goes_where_it_is_worth_more_once_it_is_free() -> None:
    held = Budgets([2, 2], 4)
    look(held)
    assert held.capacity.tolist() == [2, 1]
    held.settle(np.array([2, 2]))
    assert held.capacity.tolist() == [2, 1]  # nobody has been evicted yet
    held.settle(np.array([2, 1]))
    assert held.capacity.tolist() == [3, 1]


def test_what_comes_free_goes_to_layers_in_their_order() -> None:
    held = Budgets([2, 2, 2, 2], 4)
    look(held, np.array([[9.0] * 4, [8.0] * 4, [0.0] * 4, [0.0] * 4]))
    assert held.capacity.tolist() == [2, 2, 1, 1]
    held.settle(np.array([2, 2, 2, 1]))
    assert held.capacity.tolist() == [3, 2, 1, 1]
    held.settle(np.array([3, 2, 1, 1]))
    assert held.capacity.tolist() == [3, 3, 1, 1]


def test_layers_that_are_not_full_wait() -> None:
    held = Budgets([2, 2], 4)
    for num_held in ([1, 2], [2, 1]):
        held.settle(np.array(num_held))
        look(held)
        assert held.capacity.tolist() == [2, 2]


@pytest.mark.parametrize(
    "worth",
    [
        [[5.0, 5.0, 5.0, 5.0], [4.0, 4.0, 4.0, 4.0]],  # too little to gain
        [[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]],
        [[9.0, 9.0, 1.0, 1.0], [2.0, 2.0, 0.0, 0.0]],  # rich, but the next one is worth little
    ],
)
def test_slots_stay_where_little_is_to_be_gained(worth: list[list[float]]) -> None:
    held = Budgets([2, 2], 4)
    look(held, np.array(worth))
    assert held.capacity.tolist() == [2, 2]


@pytest.mark.parametrize(("num_experts", "ends"), [(5, [4, 0]), (4, [3, 1])])
def test_a_layer_may_have_nothing_and_none_becomes_whole(num_experts: int, ends: list[int]) -> None:
    held = Budgets([2, 2], num_experts)
    worth = np.array([[9.0] * num_experts, [1.0] * num_experts])
    for _ in range(8):
        look(held, worth)
        held.settle(held.capacity)  # evicts and fills up at once
    assert held.capacity.tolist() == ends


def test_a_whole_layer_gives_nothing_since_it_is_not_asked() -> None:
    held = Budgets([4, 2], 4)
    worth = np.array([[0.0] * 4, [9.0] * 4])
    for _ in range(8):
        look(held, worth)
        held.settle(held.capacity)
    assert held.capacity.tolist() == [4, 2]
    held = Budgets([4, 2, 2], 4)  # the others go on
    worth = np.array([[0.0] * 4, [9.0] * 4, [1.0] * 4])
    for _ in range(8):
        look(held, worth)
        held.settle(held.capacity)
    assert held.capacity.tolist() == [4, 3, 1]


def make_restless(patch: pytest.MonkeyPatch) -> None:
    """Slots go to and fro at every step."""
    for name, value in {"_PERIOD": 1, "_LEAST_RATIO": 1e-9, "_SHARE": 4, "_FORGET": 0}.items():
        patch.setattr(budgets, name, value)


class Machine:
    """Residents of several layers behind a link that carries moves out late, or never."""

    def __init__(self, draw: np.random.Generator, capacity: list[int], num_experts: int) -> None:
        self.draw = draw
        self.capacity = np.array(capacity)
        self.placement = Lowtide(capacity, num_experts, COSTS)
        self.is_kept = np.zeros((len(capacity), num_experts), np.bool_)
        for layer in range(len(capacity)):
            self.is_kept[layer, self.placement.initial(layer)] = True
        self.waiting: dict[int, list[tuple[int, int | None]]] = {}

    def run_layer(self, step: Step, layer: int, num_tokens: np.ndarray) -> None:
        experts = np.flatnonzero(num_tokens)
        kept = self.is_kept[layer]
        demand = Demand(experts, num_tokens[experts], kept[experts])
        absent = experts[~demand.is_resident]
        fetched = absent[self.draw.random(len(absent)) < 0.3]
        facts = make_facts(
            demand,
            COSTS,
            step=step,
            layer=layer,
            is_kept=kept.copy(),
            capacity=self.capacity,
            fetched=fetched,
        )
        moves = self.placement.update(facts)
        if self.draw.random() < 0.9:  # else the pass was broken off
            self._obey(layer, moves, fetched.tolist())
        self._pump()
        assert self.is_kept.sum() <= self.capacity.sum()

    def _obey(self, layer: int, moves: Moves, fetched: list[int]) -> None:
        """As `Link.obey`: those fetched at once, the others when there is time."""
        if not len(moves.admit) and not len(moves.evict):
            return
        admit = sorted(moves.admit.tolist(), key=lambda expert: expert not in fetched)
        victims: list[int | None] = list(moves.evict.tolist())
        num_unpaired = max(0, len(victims) - len(admit))
        leaving, victims = victims[:num_unpaired], victims[num_unpaired:]
        pairs = list(zip(admit, [None] * (len(admit) - len(victims)) + victims, strict=True))
        self.waiting[layer] = [pair for pair in pairs if pair[0] not in fetched]
        leaving += [victim for expert, victim in pairs if expert in fetched]
        self.is_kept[layer, [expert for expert, _ in pairs if expert in fetched]] = True
        self.is_kept[layer, [victim for victim in leaving if victim is not None]] = False

    def _pump(self) -> None:
        """Begins some moves; as the link, it asks only whether there is a free slot."""
        for layer, waiting in self.waiting.items():
            while waiting and self.draw.random() < 0.5:
                expert, victim = waiting.pop(0)
                is_freed = victim is not None and self.is_kept[layer, victim]
                if self.is_kept[layer, expert]:
                    continue
                if is_freed:
                    self.is_kept[layer, victim] = False
                self.is_kept[layer, expert] = True


@examples(25)
@given(seed=st.integers(0, 10**6), num_layers=st.integers(1, 4), num_experts=st.integers(1, 12))
def test_all_layers_together_never_have_more_than_their_slots(
    seed: int, num_layers: int, num_experts: int
) -> None:
    draw = np.random.default_rng(seed)
    capacity = draw.integers(0, num_experts + 1, num_layers).tolist()
    machine = Machine(draw, capacity, num_experts)
    spread = draw.uniform(0.1, 4, num_layers)  # how unlike the layers' demands are
    popularity = [draw.exponential(1 / scale, num_experts) for scale in spread]
    for index in range(30):
        for layer in range(num_layers):
            machine.run_layer(Step(StepKind.DENOISE, index), layer, draw.poisson(popularity[layer]))


# In the catalogue and in the simulator

ONE_LAYER = TraceShape(1, 64, 4)
SKEWS = (0.0, 0.5, 1.0, 3.0)


def glued(parts: list[Trace]) -> Trace:
    """Runs of one layer each, as one run of all these layers."""
    shape = parts[0].shape._replace(num_layers=len(parts))
    ids = np.concatenate([part.ids for part in parts], axis=1)
    return replace(parts[0], shape=shape, ids=ids)


def decoding(skews: tuple[float, ...], text: int) -> Trace:
    return glued(
        [
            synth_decode_trace(
                ONE_LAYER, num_sequences=4, num_new=96, skew=skew, taste=0.2, seed=seed, text=text
            )
            for seed, skew in enumerate(skews)
        ]
    )


def calibrated(trace: Trace, known: Trace, share: float = 0.5) -> PolicyInputs:
    layers, experts, k = trace.shape[:3]
    costs = load_profile("rtx3090").costs(MoEShape(layers, experts, k, 2048, 512))
    frequency, following = calibrate(known)
    capacity = [round(share * experts)] * layers
    return PolicyInputs(capacity, experts, costs, frequency, following, known.hits())


def first_residents(setting: PolicyInputs) -> list[int]:
    policies = recipe("lowtide").policies(setting)
    initial = [len(policies.placement.initial(layer)) for layer in range(setting.num_layers)]
    assert initial == policies.capacity.tolist()
    return initial


def test_a_calibration_divides_slots_by_what_they_are_worth() -> None:
    trace, known = decoding(SKEWS, 0), decoding(SKEWS, 1)
    setting = calibrated(trace, known)
    divided = first_residents(setting)
    assert sum(divided) == sum(setting.capacity) and divided[-1] < 32 < max(divided[:2])
    # An alike model's layers keep what they were given, and so do those of an unknown one.
    alike = calibrated(decoding((1.0,) * 4, 0), decoding((1.0,) * 4, 1))
    assert first_residents(alike) == alike.capacity
    assert first_residents(replace(setting, hits=None)) == setting.capacity


def test_layers_are_made_whole_where_waiting_for_the_device_is_what_takes_time() -> None:
    trace, known = decoding((1.0,) * 4, 0), decoding((1.0,) * 4, 1)
    setting = calibrated(trace, known, share=0.6)
    slow = replace(setting.costs, sync_s=100 * setting.costs.host_s.at(1))
    waiting = replace(setting, costs=slow)
    *others, last = first_residents(waiting)
    assert last == 64 and sum(others) + last == sum(setting.capacity)
    assert simulate(trace, "lowtide", waiting).tokens_per_s > 1.15 * max(
        simulate(trace, preset, waiting).tokens_per_s for preset in ("dali", "tide")
    )
    assert first_residents(setting) == setting.capacity


@examples(25)
@given(
    seed=st.integers(0, 10**6),
    num_layers=st.integers(1, 5),
    num_experts=st.integers(1, 9),
    sync_s=st.sampled_from([0.0, 1e-3, 1.0]),
)
def test_dividing_keeps_the_total(
    seed: int, num_layers: int, num_experts: int, sync_s: float
) -> None:
    draw = np.random.default_rng(seed)
    hits = draw.poisson(0.5, (6, num_layers, num_experts))
    costs = load_profile("rtx3090").costs(MoEShape(num_layers, num_experts, 1, 256, 128))
    capacity = draw.integers(0, num_experts + 1, num_layers).tolist()
    frequency = (hits > 0).sum(axis=0).astype(np.float64)
    made = PolicyInputs(capacity, num_experts, replace(costs, sync_s=sync_s), frequency, hits=hits)
    divided = first_residents(made)
    assert sum(divided) == sum(capacity) and max(divided) <= num_experts


def test_divided_slots_are_faster_and_found_while_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace, known = decoding(SKEWS, 0), decoding(SKEWS, 1)
    setting = calibrated(trace, known)
    unknown = replace(setting, frequency=None, following=None, hits=None)
    divided, found = (simulate(trace, "lowtide", one).tokens_per_s for one in (setting, unknown))
    monkeypatch.setattr(Budgets, "begin_step", lambda self, worth_s: None)
    even = simulate(trace, "lowtide", replace(setting, hits=None)).tokens_per_s
    unknown_even = simulate(trace, "lowtide", unknown).tokens_per_s
    assert divided > 1.1 * even and found > 1.03 * unknown_even


def test_alike_layers_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = synth_trace(TraceShape(12, 64, 4), num_blocks=6, steps_per_block=12)
    setting = replace(calibrated(trace, trace), frequency=None, following=None, hits=None)
    moving = simulate(trace, "lowtide", setting).tokens_per_s
    monkeypatch.setattr(Budgets, "begin_step", lambda self, worth_s: None)
    assert moving > 0.99 * simulate(trace, "lowtide", setting).tokens_per_s


# Lossless

EMULATED = {"link_GBps": "1000", "link_latency_us": "0", "host_slowdown": "1"}
PARAMS = SamplingParams(max_tokens=24)
PROMPT = [7, 3, 120, 9, 44, 3, 3, 80]


class Case(NamedTuple):
    folder: Path
    expected: tuple[list[int], torch.Tensor]

    def check(self, **options: Any) -> None:
        with LLM(self.folder, policy="lowtide", context=256, **options) as llm:
            for _ in range(2):  # also with what has moved by then
                ids, logits = answer(llm, PROMPT, PARAMS)
                assert ids == self.expected[0] and torch.equal(logits, self.expected[1])
            num_residents = sum(llm.plan.residents_per_layer)
            assert 0 < num_residents < llm.plan.num_experts


@pytest.fixture(scope="module", params=["llada2", "qwen3_moe"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = synth(request.param, "tiny", tmp_path_factory.mktemp("budgets") / "model", seed=5)
    with LLM(folder, device="cpu", context=256) as llm:
        return Case(folder, answer(llm, PROMPT, PARAMS))


def lopsided(setting: PolicyInputs) -> list[int]:
    """All experts of some layers, none of others, and what is left over in one."""
    left, capacity = sum(setting.capacity), [0] * setting.num_layers
    for layer in reversed(range(setting.num_layers)):
        capacity[layer] = min(left, setting.num_experts)
        left -= capacity[layer]
    return capacity


@pytest.fixture(params=["lopsided", "restless"])
def division(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Whole layers and empty ones; or slots that go to and fro at every step."""
    if request.param == "lopsided":
        made = replace(CATALOGUE["lowtide"], capacity=lopsided)
        monkeypatch.setitem(CATALOGUE, "lowtide", made)
    else:
        make_restless(monkeypatch)
    yield request.param


@pytest.mark.parametrize("share", [0.2, 0.7])
def test_no_division_changes_a_bit(case: Case, division: str, share: float) -> None:
    host = budget_bytes(case.folder, share, context=256)
    case.check(device="cpu", host_memory=host)


def test_no_division_changes_a_bit_on_a_device(case: Case, division: str) -> None:
    options: dict[str, Any] = {"device": "emulated", "device_options": EMULATED}
    plan = plan_model(case.folder, context=256, **options)
    gpu = (plan.minimum_bytes + plan.full_bytes) // 2
    case.check(gpu_memory=gpu, **options)
