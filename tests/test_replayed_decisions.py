"""The runtime without a device beside `lab/simulation/host_alone.py`, decision by decision.

A model runs under a preset and a share of its experts; what its routers asked for is replayed under
the same preset and costs. In every layer of every pass the same experts are absent, admitted and
evicted, and as many are read.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from common.run import loaded_engine
from torch import Tensor

from lowtide import LLM, DiffusionParams, SamplingParams
from lowtide.core import BoolArray, IntArray, Step
from lowtide.decode.request import Finished, Request
from lowtide.engine.opening.config import EngineConfig
from lowtide.engine.running.decoding import make_decoder
from lowtide.engine.running.engine import Engine
from lowtide.engine.running.policy_setting import PolicyChoice, adopt_policy, policy_inputs
from lowtide.experts.rows import Routing
from lowtide.lab.budgets import budget_of_share
from lowtide.lab.calibrate import calibrate
from lowtide.lab.simulation.host_alone import HostReplay
from lowtide.lab.simulation.simulator import Report
from lowtide.llm import plan_model
from lowtide.model_writing.synth import synth
from lowtide.policies.presets import lossless_presets
from lowtide.policies.reads_ahead import AheadTrial
from lowtide.policies.recipe import PolicyInputs
from lowtide.replay.calibration import Calibration
from lowtide.replay.trace import Trace, TraceShape, TraceWriter

SHARES = (0.25, 0.5, 0.75)
OPTIONS: dict[str, Any] = {"context": 1024, "device": "cpu"}

POLICIES: list[tuple[str, dict[str, str]]] = [
    *((name, {}) for name in lossless_presets()),
    ("tide", {"tau": "auto"}),
]
SUBSTITUTING: list[tuple[str, dict[str, str]]] = [
    ("buddymoe", {"miss": "buddy"}),
    ("buddymoe", {"miss": "late", "max_mass": "off"}),
    ("buddymoe", {"miss": "buddy", "placement": "lru", "max_mass": "off"}),
]


class Counts(NamedTuple):
    """Counts that a layer, or a pass, added to the counters."""

    num_misses: int  # of the experts that the router asked for
    num_moves_asked: int
    num_moves_done: int
    num_read: int


class Layer(NamedTuple):
    """Decisions about one layer of one pass, and its residents afterwards."""

    absent: list[int]  # of the experts that the router asked for
    admitted: list[int]
    evicted: list[int]
    counts: Counts

    @classmethod
    def of(cls, demand: IntArray, before: BoolArray, after: BoolArray, counts: Counts) -> Layer:
        """before, after: [experts], who was resident."""
        absent = demand[~before[demand]].tolist()
        admitted, evicted = np.flatnonzero(after & ~before), np.flatnonzero(before & ~after)
        return cls(absent, admitted.tolist(), evicted.tolist(), counts)


class Watcher:
    """Observes an engine: writes its trace, and down what it did with each layer."""

    def __init__(self, engine: Engine) -> None:
        self.layers: list[Layer] = []
        self.writer = TraceWriter("m", TraceShape(*engine.model.config.moe_shape))
        self._engine = engine
        self._state = State.of(engine)

    def saw_layer(self, layer: int, step: Step, x: Tensor, routing: Routing, out: Tensor) -> None:
        experts, weights = (part.numpy() for part in routing)
        if layer == 0:
            self.writer.begin(step, 0, len(experts))
        self.writer.record(layer, experts, weights)
        before, self._state = self._state, State.of(self._engine)
        spent = self._state.since(before)
        residents = (state.is_resident[layer] for state in (before, self._state))
        self.layers.append(Layer.of(np.unique(experts), *residents, spent))


class State(NamedTuple):
    """Experts that are resident in an engine or on the way to it, and its counters."""

    is_resident: BoolArray  # [layers, experts]
    counts: Counts

    @classmethod
    def of(cls, engine: Engine) -> State:
        host, told = engine.experts.host, engine.experts.as_dict()
        is_resident = np.stack(
            [host.ledger.is_resident(i).copy() for i in range(host.ledger.num_layers)]
        )
        num_bytes = engine.facts.weight_map.experts.largest_expert_bytes
        num_read = int(told["read_bytes"]) // num_bytes
        for layer, expert in host.late.experts:  # a replay has them at once
            is_resident[layer, expert] = True
            num_read += 1
        names = ("num_misses", "num_moves_asked", "num_moves_done")
        return cls(is_resident, Counts(*(int(told[name]) for name in names), num_read))

    def since(self, before: State) -> Counts:
        pairs = zip(self.counts, before.counts, strict=True)
        return Counts(*(now - then for now, then in pairs))


def replayed(trace: Trace, preset: str, setting: PolicyInputs) -> tuple[BoolArray, list[Layer]]:
    """Replay a trace; return the first residents and each pass's decisions, layer by layer."""
    run, layers = HostReplay(preset, setting), list[Layer]()
    first = run.is_resident.copy()
    for routed, hits in zip(trace.iter_routed(), trace.hits(), strict=True):
        run.begin_pass(routed.step)
        for layer in range(setting.num_layers):
            before, counted = run.is_resident[layer].copy(), counts_of(run.report)
            run.layer(layer, routed, len(routed.ids), hits[layer])
            spent = [now - then for now, then in zip(counts_of(run.report), counted, strict=True)]
            demand = np.flatnonzero(hits[layer])
            # A report's hits are of what is run, which a substitution has changed.
            counts = Counts(int(np.count_nonzero(~before[demand])), *spent)
            layers.append(Layer.of(demand, before, run.is_resident[layer], counts))
        run.end_pass(routed.step, hits, 0)
    return first, layers


def counts_of(report: Report) -> tuple[int, int, int]:
    return report.num_moves_asked, report.num_moves_done, report.num_fetched


class Model(NamedTuple):
    """A folder, and what it was calibrated to."""

    folder: Path
    calibration: Path
    requests: Sequence[Request]


def request(number: int, length: int, num_new: int, **diffusion: Any) -> Request:
    prompt = np.random.default_rng(number).integers(1, 300, length).tolist()
    params = SamplingParams(
        max_tokens=num_new, ignore_eos=True, diffusion=DiffusionParams(**diffusion)
    )
    return Request(id=number, prompt=prompt, params=params)


BLOCKS = {"block_length": 32, "steps": 10, "threshold": 0.6}
WHOLE = {"block_length": 32, "steps": 3, "remasking": "low_confidence", "cfg_scale": 0.0}
REQUESTS = {
    "qwen3_moe": [request(0, 40, 14), request(1, 3, 9), request(2, 600, 2)],
    "llada2": [request(0, 40, 64, **BLOCKS), request(1, 5, 32, **BLOCKS)],
    "llada_moe": [request(0, 600, 32, **WHOLE)],  # passes of more rows than a tile has
}


QUICK = (("qwen3_moe", 0.25), ("qwen3_moe", 0.75), ("llada2", 0.5))
CASES = [
    pytest.param(
        (family, share), id=f"{family}-{share}", marks=() if is_quick else pytest.mark.slow
    )
    for family in REQUESTS
    for share in SHARES
    for is_quick in [(family, share) in QUICK]
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """Of a family; made once, calibrated on other text than what is asked."""

    @functools.cache
    def made(family: str) -> Model:
        folder = synth(family, "tiny", tmp_path_factory.mktemp("models") / family)
        text = np.random.default_rng(7).integers(1, 300, 4000).tolist()
        with LLM(folder, **OPTIONS) as llm:
            calibration = calibrate(llm, text, "m", num_pieces=4, buddies=True)
        calibration.save(folder / "calibration")
        return Model(folder, folder / "calibration", REQUESTS[family])

    return made


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, models: Callable[[str], Model]) -> tuple[Model, float]:
    """A model, and the share of its experts that is resident."""
    family, share = request.param
    return models(family), share


@contextmanager
def opened(model: Model, share: float) -> Iterator[Engine]:
    budget = budget_of_share(plan_model(model.folder, **OPTIONS), share)
    options = EngineConfig(host_memory=budget, calibration=str(model.calibration), **OPTIONS)
    with loaded_engine(str(model.folder), options) as engine, engine.executor.in_charge():
        yield engine


def answered(
    engine: Engine, requests: Sequence[Request], states: list[State] | None = None
) -> list[tuple[int, ...]]:
    """The answers; adds the state after each pass."""
    decoder, found = make_decoder(engine), dict[int, tuple[int, ...]]()
    try:
        for one in requests:
            decoder.add(one)
        while decoder.has_work:
            for event in decoder.step():
                if isinstance(event, Finished):
                    found[event.request] = event.token_ids
            if states is not None:
                states.append(State.of(engine))
    finally:
        decoder.close()
    return [found[one.id] for one in requests]


def replay_setting(engine: Engine, model: Model) -> PolicyInputs:
    """Return the setting that the policies in force were made from."""
    calibration = Calibration.load(model.calibration, has_inputs=False)
    choice, num_experts = PolicyChoice.of(engine.options), engine.model.config.moe.num_experts
    costs = engine.experts.policies.costs
    return policy_inputs(choice, engine.plan, num_experts, calibration, costs)


def test_every_layer_is_decided_alike(case: tuple[Model, float]) -> None:
    """Watched, so that every layer is asked for by itself."""
    model, share = case
    with opened(model, share) as engine:
        for policy, options in [*POLICIES, *SUBSTITUTING]:
            engine = adopt_policy(engine, policy, options)
            setting, start = replay_setting(engine, model), State.of(engine)
            watcher = engine.experts.observer = Watcher(engine)
            answered(engine, model.requests)
            engine.experts.observer = None
            first, expected = replayed(watcher.writer.trace(), policy, setting)
            told = f"{policy} {options}"
            assert np.array_equal(first, start.is_resident), f"{told}: first residents"
            check_same(told, watcher.layers, expected, setting.num_layers)


def test_every_pass_is_decided_alike_unwatched(
    case: tuple[Model, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it decodes: what it may do in one call has to decide the same."""
    monkeypatch.setattr(AheadTrial, "note_seconds", lambda *_: None)  # reads ahead move no expert
    model, share = case
    with opened(model, share) as engine:
        watcher = engine.experts.observer = Watcher(engine)
        expected_ids = answered(engine, model.requests)
        engine.experts.observer = None
        for policy, options in POLICIES:
            engine = adopt_policy(engine, policy, options)
            setting, states = replay_setting(engine, model), [State.of(engine)]
            assert answered(engine, model.requests, states) == expected_ids
            first, layers = replayed(watcher.writer.trace(), policy, setting)
            check_passes(f"{policy} {options}", states, first, layers)


def check_same(
    told: str, found: Sequence[Layer], expected: Sequence[Layer], num_layers: int
) -> None:
    assert len(found) == len(expected)
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        where = f"{told}, pass {i // num_layers}, layer {i % num_layers}"
        assert one == other, f"{where}: the runtime {one}, the replay {other}"


def check_passes(
    told: str, states: Sequence[State], first: BoolArray, layers: Sequence[Layer]
) -> None:
    """States: before the first pass and after each."""
    is_resident, num_layers = first.copy(), len(first)
    assert len(layers) == num_layers * (len(states) - 1)
    for i, (before, after) in enumerate(itertools.pairwise(states)):
        decided = layers[i * num_layers : (i + 1) * num_layers]
        for layer, one in enumerate(decided):
            is_resident[layer, one.admitted] = True
            is_resident[layer, one.evicted] = False
        assert np.array_equal(after.is_resident, is_resident), f"{told}, pass {i}: residents"
        counts = Counts(*map(sum, zip(*(one.counts for one in decided), strict=True)))
        assert after.since(before) == counts, f"{told}, pass {i}"
