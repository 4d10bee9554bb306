"""Replays a routing trace with the real policies, for any budget and machine.

A discrete-event model of three resources that work in parallel: the device, the host's CPU, and the
link between them (with a disk behind it if that is the experts' home).

A layer begins when the one before has ended. Its dense part runs first. Then residents run on the
device, fetched experts follow as they arrive through the staging slots, and the host computes its
share. On the link, demand comes first; moves and prefetches use the rest, one transfer at a time,
without interruption. The policies' own time is not counted.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import repeat
from typing import NamedTuple

import numpy as np

from lowtide.core import NOTHING, Assignment, Demand, Facts, FloatArray, IntArray, RoutedTokens
from lowtide.errors import UsageError
from lowtide.lab.simulation.foresight import Foresight, GateAccuracies, guesses
from lowtide.lab.simulation.oracle import oracle
from lowtide.lab.simulation.simulated_link import Fetched, SimulatedLink
from lowtide.policies.decision import Policies
from lowtide.policies.prefetch import Ahead, Gate, PrefetchOutcome, count_following
from lowtide.policies.presets import ORACLE, recipe
from lowtide.policies.reads_ahead import GATE_ACCURACY
from lowtide.policies.receipt import Receipt
from lowtide.policies.recipe import PolicyInputs, Recipe
from lowtide.policies.tau import TAUS
from lowtide.replay.trace import RoutedPass, Trace, demand_of

_RESOURCES: tuple[str, ...] = ("device", "host", "link")


@dataclass(slots=True)
class Report:
    """Simulated results of one preset; seconds are simulated."""

    preset: str
    num_passes: int = 0
    num_tokens: int = 0  # committed
    total_s: float = 0.0
    num_hits: int = 0  # activated experts that were resident
    num_activated: int = 0
    num_fetched: int = 0  # on demand
    num_moved: int = 0  # by the placement, beyond those
    num_moves_asked: int = 0  # experts that the placement asked to become resident
    num_moves_done: int = 0  # those that became so: by a move, or fetched and kept
    num_prefetched: int = 0
    num_substituted: int = 0  # (token, expert) pairs, by a policy that changes words
    moved_share: float = 0.0  # of all requests' router weight
    expert_bytes: int = 0
    device_s: float = 0.0  # time each was busy
    host_s: float = 0.0
    link_s: float = 0.0
    bound_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_RESOURCES, 0.0))
    prefetch: PrefetchOutcome = field(default_factory=PrefetchOutcome)
    foresight: str = "none"  # what an early gate's predictions are: see `Foresight`
    layer_hits: list[tuple[int, int]] = field(default_factory=list)
    """Of each layer of each pass, in their order: activated experts, and of these the residents."""

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.total_s if self.total_s else 0.0

    @property
    def hit_rate(self) -> float:
        return self.num_hits / max(1, self.num_activated)

    def count_hits(self, demand: Demand) -> None:
        """Count a layer's activated experts."""
        num_activated, num_hits = len(demand.experts), int(demand.is_resident.sum())
        self.num_activated += num_activated
        self.num_hits += num_hits
        self.layer_hits.append((num_activated, num_hits))

    def hit_rates(self, num_passes: int = 1) -> FloatArray:
        """Return each layer's hit rate over groups of `num_passes` passes (DALI's Figure 18d).

        [groups, layers]; the last group may be smaller. NaN where a layer activated none.
        """
        starts = np.arange(0, self.num_passes, num_passes)
        counts = np.add.reduceat(self._counts(), starts, axis=0) if len(starts) else self._counts()
        return _rates(counts)

    @property
    def moved_bytes(self) -> int:
        """All bytes over the link: fetched on demand, moved, and prefetched."""
        return self.expert_bytes * (self.num_fetched + self.num_moved + self.num_prefetched)

    @property
    def binds(self) -> str:
        """The resource that limits most: device, host or link."""
        return max(_RESOURCES, key=lambda name: self.bound_s[name])

    def as_dict(self) -> dict[str, object]:
        derived = ("tokens_per_s", "hit_rate", "moved_bytes", "binds")
        fields = asdict(self)
        del fields["layer_hits"]
        rates = _rates(self._counts().sum(axis=1)).tolist()
        return {**fields, **{name: getattr(self, name) for name in derived}, "hit_rates": rates}

    def _counts(self) -> IntArray:
        """Return `layer_hits` as [passes, layers, 2]."""
        num_layers = len(self.layer_hits) // max(1, self.num_passes)
        return np.array(self.layer_hits, np.int64).reshape(self.num_passes, num_layers, 2)


def _rates(counts: IntArray) -> FloatArray:
    """Return shares of residents; counts [..., 2]: activated experts, and of these residents."""
    activated, hits = np.moveaxis(counts, -1, 0)
    rates: FloatArray = np.full(hits.shape, np.nan)
    np.divide(hits, activated, out=rates, where=activated > 0)
    return rates


def simulate(
    trace: Trace,
    preset: str | Recipe,
    inputs: PolicyInputs,
    *,
    pass_s: float = 0.0,
    gate_accuracy: GateAccuracies | None = None,
    predictions: Mapping[Gate, Sequence[IntArray]] = NOTHING,
    hits: IntArray | None = None,
) -> Report:
    """Replay `trace` under one preset or `oracle`, which knows the future.

    pass_s: seconds of each pass outside the MoE layers (embedding, head, sampling).
    predictions: recorded predictions of early gates, tokens per expert of each pass [layers,
    experts].
        Other gates guess with their `gate_accuracy`, as measured by a calibration, or else with the
        published one; the report says which (`foresight`).
    hits: `trace.hits()`, if already computed.

    Raises UsageError if inputs and trace disagree, or the accuracies lack the preset's gate.
    """
    _check(trace, inputs)
    all_hits = trace.hits() if hits is None else hits
    name = preset if isinstance(preset, str) else "custom"
    if isinstance(preset, str):
        preset = oracle(all_hits) if preset == ORACLE else recipe(preset)
    run = _Replay(name, preset, inputs)
    gate = run.policies.prefetch.gate
    foresight = Foresight.of(gate, gate_accuracy, predictions)
    run.report.foresight = foresight.value
    foreseen: Iterable[IntArray | None] = repeat(None, len(trace.passes))
    if foresight is Foresight.RECORDED:
        foreseen = predictions[gate]
    elif foresight is not Foresight.NONE:
        foreseen = guesses(trace, (gate_accuracy or GATE_ACCURACY)[gate], inputs.seed)
    passes = zip(trace.passes, trace.iter_routed(), all_hits, foreseen, strict=True)
    for one, routed, pass_hits, predicted in passes:
        for layer in range(trace.shape.num_layers):
            run.layer(layer, routed, one.num_rows, pass_hits[layer], predicted)
        run.end_pass(pass_s, one.num_committed)
    count_substitutions(run.report, run.policies)
    return run.report


def compare(
    trace: Trace,
    presets: Sequence[str],
    inputs: PolicyInputs,
    *,
    pass_s: float = 0.0,
    gate_accuracy: GateAccuracies | None = None,
) -> list[Report]:
    """Replay `trace` under each preset; return the reports in that order."""
    hits = trace.hits()
    return [
        simulate(trace, preset, inputs, pass_s=pass_s, gate_accuracy=gate_accuracy, hits=hits)
        for preset in presets
    ]


def fastest_tau(trace: Trace, preset: str, inputs: PolicyInputs) -> int:
    """Return the tau of `TAUS` with the least simulated time.

    Tries the values below a block's mean length, and the first above it, which refreshes once per
    block. Each try has a fixed interval, even if `inputs` ask for one that follows the drift.
    """
    hits = trace.hits()
    num_steps = [len(block) for block in trace.blocks(hits)]
    length = max(1, round(float(np.mean(num_steps or [1]))))
    tried = TAUS[: sum(tau < length for tau in TAUS) + 1]

    def simulated_s(tau: int) -> float:
        return simulate(trace, preset, inputs.having(tau=tau), hits=hits).total_s

    return min(tried, key=simulated_s)


class Activations(NamedTuple):
    """Inputs of static presets: fields of `PolicyInputs` with these names."""

    frequency: FloatArray  # [layers, experts]
    following: FloatArray  # [layers - 1, experts, experts]


def calibrate(trace: Trace) -> Activations:
    """Count activations per expert and their succession; use another run than the one replayed."""
    hits = trace.hits()
    following = count_following([ids.astype(np.int64) for ids in trace.iter_ids()], trace.shape[1])
    return Activations((hits > 0).sum(axis=0).astype(np.float64), following)


class _Replay:
    """The state of a simulated machine, moved on layer by layer."""

    def __init__(self, name: str, made: Recipe, inputs: PolicyInputs) -> None:
        self.report = Report(name, expert_bytes=inputs.costs.expert_bytes)
        self.policies = replayable(made.policies(inputs))
        self._costs = inputs.costs
        self._num_layers = inputs.num_layers
        self._now_s = 0.0
        placement = self.policies.placement
        initial = [placement.initial(layer) for layer in range(inputs.num_layers)]
        # What a preset starts with it may keep: `resident` has all, `layer-split` whole layers.
        capacity = [max(c, len(i)) for c, i in zip(inputs.capacity, initial, strict=True)]
        self._link = SimulatedLink(capacity, inputs.num_experts, inputs.costs.fetch_s)
        for layer, experts in enumerate(initial):
            self._link.ready_s[layer, experts] = 0.0

    def layer(
        self,
        layer: int,
        routed: RoutedPass,
        num_rows: int,
        hits: IntArray,
        predicted: IntArray | None,
    ) -> None:
        """Replay one layer of one pass. hits [experts]; predicted [layers, experts]."""
        report, link = self.report, self._link
        dense_s = self._costs.dense_s.at(num_rows)
        routed_s = self._now_s + dense_s
        report.device_s += dense_s
        link.run_until(routed_s)
        demand = demand_of(hits, link.ready_s[layer] <= routed_s)
        if not demand.is_resident.all():
            routed_s += self._costs.sync_s
            link.run_until(routed_s)
        report.bound_s["device"] += routed_s - self._now_s
        report.count_hits(demand)
        facts = self._facts(routed, layer, demand, routed_s)
        run = substituted_facts(facts, self.policies.substitute(facts))
        decision = self.policies.decide(facts, run)
        assignment = decision.assignment
        run_demand = demand if run is None else run.demand
        self._now_s = self._run(layer, run_demand, assignment, routed_s)
        moves = self.policies.moves(facts, decision)
        report.num_moves_asked += moves.num_asked
        self._look_ahead(facts, assignment, routed_s, predicted)
        link.carry_out(layer, moves, set(assignment.fetch.tolist()), routed_s)

    def end_pass(self, pass_s: float, num_committed: int) -> None:
        """Replay the end of a pass: owed moves, then the rest, while the link continues."""
        report, arrived_s = self.report, self._link.bring_owed(self._now_s)
        report.bound_s["link"] += arrived_s - self._now_s
        self._now_s = arrived_s + pass_s
        report.bound_s["device"] += pass_s
        report.device_s += pass_s
        report.total_s = self._now_s
        report.num_passes += 1
        report.num_tokens += num_committed
        report.link_s = self._link.busy_s
        report.num_moved, report.num_prefetched = self._link.num_moved, self._link.num_prefetched
        report.num_moves_done = self._link.num_moves_done

    def _facts(self, routed: RoutedPass, layer: int, demand: Demand, now_s: float) -> Facts:
        link = self._link
        arriving_s = link.arriving_s(layer, now_s)
        return Facts(
            routed.step,
            layer,
            demand,
            link.is_kept(layer),
            self.policies.capacity,
            self._costs,
            arriving_s[demand.experts],
            link.busy_from(now_s),
            can_fetch=self._costs.num_staging > 0,
            routing=routed.routing(layer) if self.policies.asks_routing else None,
            is_here=link.ready_s[layer] <= now_s,
        )

    def _run(self, layer: int, demand: Demand, assignment: Assignment, start_s: float) -> float:
        """Run a layer's experts from `start_s`; return when the slower side has ended."""
        num_tokens = np.zeros(int(demand.experts.max(initial=-1)) + 1, np.int64)
        num_tokens[demand.experts] = demand.num_tokens
        host_s = self._host_s(num_tokens[assignment.host])
        resident_s = float(self._costs.device_s(num_tokens[assignment.resident]).sum())
        fetched = self._link.fetched(layer, assignment.fetch, start_s)
        fetched_s = self._costs.device_s(num_tokens[assignment.fetch])
        device_end_s, waited_s = self._fetch(fetched, fetched_s, start_s, resident_s)
        end_s = max(start_s + host_s, device_end_s)
        report = self.report
        report.device_s += resident_s + float(fetched_s.sum())
        report.host_s += host_s
        if start_s + host_s > device_end_s:
            report.bound_s["host"] += end_s - start_s
        else:
            report.bound_s["link"] += waited_s
            report.bound_s["device"] += end_s - start_s - waited_s
        return end_s

    def _host_s(self, num_tokens: IntArray) -> float:
        host_s = self._costs.host_s(num_tokens)
        return float(np.maximum(host_s, self._costs.disk_read_s).sum())

    def _fetch(
        self, fetched: Fetched, compute_s: FloatArray, start_s: float, resident_s: float
    ) -> tuple[float, float]:
        """Run fetched experts after the residents; return the device's end and waiting time.

        Experts already in transfer come first, then the others through staging slots, each of which
        is free again once its expert is computed.
        """
        device_s, waited_s = start_s + resident_s, 0.0
        num_free = max(0, self._costs.num_ahead - int(fetched.is_staged.sum()))
        staging = [start_s] * (self._costs.num_staging + num_free)
        for index in np.argsort(fetched.arriving_s, kind="stable").tolist():
            is_asked_now = bool(np.isinf(fetched.arriving_s[index]))
            if is_asked_now:
                arrival_s = self._link.fetch(heapq.heappop(staging))
                self.report.num_fetched += 1
            else:
                arrival_s = start_s + float(fetched.arriving_s[index])
            waited_s += max(0.0, arrival_s - device_s)
            device_s = max(device_s, arrival_s) + float(compute_s[index])
            if is_asked_now or fetched.is_staged[index]:
                heapq.heappush(staging, device_s)
        return device_s, waited_s

    def _look_ahead(
        self, facts: Facts, assignment: Assignment, routed_s: float, predicted: IntArray | None
    ) -> None:
        """Settle the prefetches for this layer, and choose those for the next one."""
        link, prefetch, layer = self._link, self.policies.prefetch, facts.layer
        due_s = link.staged_s[layer].copy()
        staged = link.end_layer(layer, self._now_s)
        if len(staged):
            is_used = np.isin(staged, assignment.fetch)
            is_late = due_s[staged] > routed_s
            outcome = PrefetchOutcome(
                int((is_used & ~is_late).sum()),
                int((is_used & is_late).sum()),
                int((~is_used).sum()),
            )
            self.report.prefetch.add(outcome)
            prefetch.record(outcome)
        prefetch.observe(facts)
        following = layer + 1
        if following < self._num_layers:
            its_hits = None if predicted is None else predicted[following]
            chosen = prefetch.choose(Ahead(following, link.is_kept(following), its_hits))
            link.look_ahead(following, chosen, routed_s)


def replayable(policies: Policies) -> Policies:
    """Return the policies. Raise UsageError if a trace lacks the facts they need."""
    if policies.asks_scores:
        raise UsageError(
            "This policy asks for the router's logits, which traces do not hold: run the model."
        )
    return policies


def substituted_facts(facts: Facts, answer: RoutedTokens | None) -> Facts | None:
    """Return the facts of the substituted routing; None if nothing is substituted."""
    if answer is None:
        return None
    is_here = facts.is_kept if facts.is_here is None else facts.is_here
    hits = np.bincount(answer.experts.ravel(), minlength=len(is_here))
    demand = demand_of(hits, is_here)
    arriving_s = None
    if facts.arriving_s is not None:
        of_all = np.full(len(is_here), np.inf)
        of_all[facts.demand.experts] = facts.arriving_s
        of_all[is_here] = 0.0
        arriving_s = of_all[demand.experts]
    return facts._replace(demand=demand, arriving_s=arriving_s, routing=answer)


def count_substitutions(report: Report, policies: Policies) -> None:
    """Add up the substitutions of all requests."""
    total = Receipt.total([] if policies.receipts is None else policies.receipts.all())
    report.num_substituted, report.moved_share = total.num_substituted, total.moved_share


def _check(trace: Trace, inputs: PolicyInputs) -> None:
    layers, experts, _ = trace.shape[:3]
    if (inputs.num_layers, inputs.num_experts) != (layers, experts):
        raise UsageError(
            f"The trace has {layers} MoE layers of {experts} experts, the setting "
            f"{inputs.num_layers} of {inputs.num_experts}; they must agree."
        )
    if any(not 0 <= slots <= experts for slots in inputs.capacity):
        raise UsageError(f"Residents per layer must be from 0 to {experts} experts.")
