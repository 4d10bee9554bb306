"""Predicts a plan's speed from this model's own layers and last runs.

A model loaded here before has stored the time of its passes with all experts in memory, the time of
its experts' reads, and its last runs (`hardware/model_speeds.py`). With a GPU, the model's experts
are timed as it is loaded. Before the first load there is only a bound: bytes per token at the rates
of memory and disk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import NamedTuple

from lowtide.config import Decoding, ModelConfig
from lowtide.core import CacheMode, Curve, MoEShape
from lowtide.decode.kinds import make_kind
from lowtide.devices.kind import is_paced
from lowtide.engine.opening.facts import ExpertFacts, MemoryFacts, SpeedFacts
from lowtide.errors import StorageError
from lowtide.hardware.machine import (
    Machine,
    disk_rate,
    memory_rate,
    quick_memory_rate,
    this_machine,
)
from lowtide.hardware.measure import Measurements
from lowtide.hardware.model_speeds import ModelSpeeds, OwnRun, SpeedKey, kept_speeds
from lowtide.hardware.store import kept_rates, load
from lowtide.kernels.choice import possible_names
from lowtide.params import DEFAULT_CANVAS_TOKENS
from lowtide.plan import MemoryPlan, PassTime, Prediction, SpeedRange
from lowtide.policies.presets import fetches_all
from lowtide.reading.dense_weights import DenseWeights
from lowtide.schemas import model_schema

DOUBT = 1.4
"""Factor by which a run may be slower or faster than the likely speed."""

MISS_POWER = 2.0
"""Default exponent of misses: a pass misses the absent share of experts, to this power.

It is above 1, because texts use some experts again and again, and these stay in memory. A run
replaces it by its own.
"""

MISS_POWERS = (0.5, 6.0)
"""Bounds of the power that a run may show."""

MOST_CORRECTION = 4.0
"""Largest factor by which a run at another budget corrects the waiting time."""

LEAST_READ_SHARE = 0.5
"""For a bound: the least share of absent experts that is read, at even demand."""

COMPUTED_MEANWHILE = 0.5
"""Share of a layer's time during which its absent experts are read: that of resident experts."""

MOST_SURE = 4.0
"""Most tokens of a pass that commits all confident ones, as a multiple of the schedule's."""

PROMPT_TOKENS = 64
"""Length of a typical prompt, which a bidirectional model's passes contain."""

USUAL_TOKENS = PROMPT_TOKENS + DEFAULT_CANVAS_TOKENS
"""Length of a typical prompt with its answer."""


class ExpertCounts(NamedTuple):
    """Number of experts that one pass runs, over all layers, and of those that are absent."""

    num_run: float
    num_tokens: float  # of each
    num_absent: float  # of those that run, not where the pass computes
    num_on_disk: float  # of the absent, not in host memory either


def slots_lent(plan: MemoryPlan, num_tokens: int) -> int:
    """Return the number of expert slots that the KV cache lends beside `num_tokens` of text.

    The plan's cache is for a whole context; memory that no text uses holds experts meanwhile.
    """
    tier = plan.fast_tier
    if not plan.max_cache_tokens or not tier.slot_bytes:
        return 0
    free_share = max(0.0, 1 - num_tokens / plan.context)
    return int(free_share * tier.kv_cache_bytes) // tier.slot_bytes


def even_demand(
    shape: MoEShape, plan: MemoryPlan, num_rows: float, num_lent: int = 0
) -> ExpertCounts:
    """Return the counts of a pass in which every expert is equally likely for each token.

    num_lent: slots beyond the plan's.
    """
    if not shape.num_experts:
        return ExpertCounts(0.0, 0.0, 0.0, 0.0)
    share = shape.num_experts_per_token / shape.num_experts
    num_run = shape.num_experts * (1 - (1 - share) ** num_rows) * shape.num_layers
    absent_share = 1 - min(1.0, (sum(plan.residents_per_layer) + num_lent) / plan.num_experts)
    disk_share = absent_share
    if plan.gpu is not None:
        disk_share *= 1 - sum(plan.host_residents_per_layer) / plan.num_experts
    num_tokens = num_rows * shape.num_experts_per_token * shape.num_layers / num_run
    return ExpertCounts(num_run, num_tokens, num_run * absent_share, num_run * disk_share)


@dataclass(frozen=True)
class Predictor:
    """Predicts the speed of a loaded or planned model.

    kernels: the option. speeds: stored measurements of the model.
    """

    config: ModelConfig
    memory: MemoryFacts
    plan: MemoryPlan
    published: tuple[int, float, float]  # of `published_pass`
    kernels: str
    speeds: ModelSpeeds

    def prediction(self) -> Prediction:
        """Predict the speed of the family's published decoding."""
        num_rows, least_tokens, most_tokens = self.published
        demand = self._demand(num_rows)
        run = self._run
        likely_tokens = math.sqrt(least_tokens * most_tokens) if run is None else run.num_tokens
        expert_bytes, read_bytes = _expert_bytes(self.memory.experts)
        prediction = Prediction(
            num_rows=num_rows,
            tokens_per_pass=likely_tokens,
            read_bytes=demand.num_on_disk * read_bytes,
            memory_bytes=self._multiplied.num_bytes + demand.num_run * expert_bytes,
            pass_time=self.pass_time(num_rows),
            asked_share=demand.num_run / max(1, self.plan.num_experts),
        )
        empty = even_demand(self.config.moe_shape, self.plan, num_rows, slots_lent(self.plan, 0))
        least_s = self._least_pass_s(prediction, empty)
        at_most = None if least_s is None else max(likely_tokens, most_tokens) / least_s
        return replace(prediction, at_most=at_most)

    def pass_time(self, num_rows: int) -> PassTime | None:
        """Return the time of a pass of `num_rows` rows; None if nothing was measured."""
        if self.plan.gpu is None:
            likely_s = self._host_pass_s(num_rows)
        else:
            likely_s = self._gpu_pass_s(num_rows)
        return None if likely_s is None else PassTime(likely_s / DOUBT, likely_s, likely_s * DOUBT)

    def speed(self, num_tokens: int, num_passes: int, num_rows: int) -> SpeedRange | None:
        """Predict the speed of a run of `num_tokens`, whose passes have `num_rows` together."""
        if not num_passes:
            return self.prediction().speed
        found = self.pass_time(max(1, round(num_rows / num_passes)))
        if found is None:
            return None
        least_s, likely_s, most_s = (num_passes * each_s for each_s in found)
        return SpeedRange(num_tokens / most_s, num_tokens / likely_s, num_tokens / least_s)

    @property
    def _run(self) -> OwnRun | None:
        return self.speeds.run_like(self._num_residents)

    @property
    def _num_residents(self) -> int:
        return sum(self.plan.residents_per_layer)

    def _demand(self, num_rows: float) -> ExpertCounts:
        return even_demand(self.config.moe_shape, self.plan, num_rows)

    def _host_pass_s(self, num_rows: float) -> float | None:
        """Return the measured time of a pass, corrected by the last run's parts."""
        parts, run = self._parts(num_rows, self._missed(num_rows)), self._run
        if parts is None and run is not None and run.is_of(self._num_residents, num_rows):
            return run.pass_s  # nothing else was measured: the machine was busy at every load
        if parts is None or run is None:
            return None if parts is None else sum(parts)
        compute_s, wait_s = parts
        then = self._parts(run.num_rows, run.num_missed)
        if then is None or not then[0]:
            return compute_s + wait_s
        if run.num_residents == self._num_residents:
            wait_s = run.wait_s
        elif then[1] and run.wait_s:
            factor = run.wait_s / then[1]
            wait_s *= min(MOST_CORRECTION, max(1 / MOST_CORRECTION, factor))
        return compute_s * run.compute_s / then[0] + wait_s

    def _parts(self, num_rows: float, num_missed: float) -> tuple[float, float] | None:
        """Return the seconds of a pass' computation, and of waiting for missed experts.

        None if the measurements are missing.
        """
        curve, reads_s = self.speeds.pass_s, self.speeds.reads_s
        if curve is None:
            return None
        compute_s = _at(curve, num_rows)
        if not num_missed:
            return compute_s, 0.0
        if reads_s is None:
            return None
        num_layers = max(1, self.config.num_moe_layers)
        of_layer = num_missed / num_layers
        meanwhile_s = COMPUTED_MEANWHILE * compute_s / num_layers * min(1.0, of_layer)
        read_s = of_layer * reads_s.at(1) if of_layer < 1 else _at(reads_s, of_layer)
        return compute_s, num_layers * max(0.0, read_s - meanwhile_s)

    def _missed(self, num_rows: float) -> float:
        """Return the number of experts that a pass reads."""
        num_run, run = self._demand(num_rows).num_run, self._run
        power = MISS_POWER
        if run is not None and run.num_missed:
            then, absent = self._demand(run.num_rows).num_run, self._absent(run.num_residents)
            if 0 < absent < 1 and run.num_missed < then:
                power = math.log(run.num_missed / then) / math.log(absent)
        low, high = MISS_POWERS
        share = self._absent(self._num_residents)
        return num_run * math.pow(share, min(high, max(low, power)))

    def _absent(self, num_residents: int) -> float:
        """Return the share of all experts that is not in memory beside a typical text."""
        num_here = num_residents + slots_lent(self.plan, USUAL_TOKENS)
        return 1 - min(1.0, num_here / max(1, self.plan.num_experts))

    def _least_pass_s(self, prediction: Prediction, demand: ExpertCounts) -> float | None:
        """Return the least seconds of a pass, by the rates of memory and disk."""
        rates = kept_rates(this_machine())
        memory_bytes_per_s = memory_rate(rates) or quick_memory_rate()
        if self.plan.gpu is not None or memory_bytes_per_s is None:
            return None
        disk_bytes_per_s, reads_s = disk_rate(rates), self.speeds.reads_s
        known_s = []
        if reads_s is not None:
            count = self.speeds.reads[-1][0]
            known_s.append(reads_s.at(count) / count)
        if disk_bytes_per_s is not None:  # neighbours are read together, faster than some experts
            known_s.append(_expert_bytes(self.memory.experts)[1] / disk_bytes_per_s)
        read_s = min(known_s, default=0.0)
        rounded_s = (self.speeds.rounding_s or 0.0) / this_machine().num_cores
        return max(
            prediction.memory_bytes / memory_bytes_per_s
            + LEAST_READ_SHARE * demand.num_on_disk * rounded_s,
            LEAST_READ_SHARE * demand.num_on_disk * read_s,
        )

    def _gpu_pass_s(self, num_rows: int) -> float | None:
        experts, machine = self.memory.experts, this_machine()
        demand, disk_bytes_per_s = self._demand(num_rows), disk_rate(kept_rates(machine))
        measured = None if experts is None else self._kept_costs(experts, machine)
        if experts is None or measured is None or (demand.num_on_disk and disk_bytes_per_s is None):
            return None
        costs = measured.costs()
        num_tokens = max(1, round(demand.num_tokens))
        absent_s = costs.link_s
        if not fetches_all(self.plan.policy):  # the host and the link share them
            host_s = costs.host_s.at(num_tokens)
            absent_s = 1 / (1 / max(costs.link_s, 1e-9) + 1 / max(host_s, 1e-9))
        dense_s = costs.dense_s.at(num_rows) * self._multiplied.num_bytes / experts.layer_bytes
        dense_s += costs.sync_s * self.config.num_moe_layers
        read_s = _expert_bytes(experts)[1] / (disk_bytes_per_s or math.inf)
        moved_s = max(demand.num_on_disk * read_s, demand.num_absent * absent_s)
        return dense_s + max(demand.num_run * costs.device_s.at(num_tokens), moved_s)

    def _kept_costs(self, experts: ExpertFacts, machine: Machine) -> Measurements | None:
        """Return the experts' stored costs with the GPU, from loading or `lowtide doctor`."""
        for name in possible_names(self.kernels, self.memory.dtype, self.memory.rounded):
            try:
                stored = load(experts.cost_key(machine, name, self.memory.device, self.kernels))
            except StorageError:  # measuring says so, and replaces it
                continue
            if stored is not None:
                return stored.measurements
        return None

    @property
    def _multiplied(self) -> DenseWeights:
        """The dense weights that every pass multiplies with.

        An embedding counts only if it is also the head; otherwise only its rows are looked up.
        """
        dense = self.memory.dense
        if self.config.tie_word_embeddings:
            return dense
        looked_up = f"{model_schema(self.config).names.embedding}.weight"
        return dense.only([name for name in dense.names if name != looked_up])


def predictor_of(
    facts: SpeedFacts, plan: MemoryPlan, speeds: ModelSpeeds | None = None
) -> Predictor | None:
    """Return a predictor, or None beside an emulated device, whose speeds are given.

    speeds: of the model, by default the stored ones.
    """
    if is_paced(plan.device):
        return None
    config, memory = facts.config, facts.memory
    published = published_pass(config.decoding, facts.cache_mode, memory.context.num_tokens)
    speeds = speeds or known_speeds(facts)
    return Predictor(config, memory, plan, published, facts.kernels, speeds)


def known_speeds(facts: SpeedFacts) -> ModelSpeeds:
    """Return this model's stored speeds, from its last load."""
    names = possible_names(facts.kernels, facts.memory.dtype, facts.memory.rounded)
    found = [kept_speeds(speed_key(facts, name)) for name in names]
    return ModelSpeeds(
        passes=next((each.passes for each in found if each.passes), ()),
        reads=next((each.reads for each in found if each.reads), ()),
        rounding_s=next((each.rounding_s for each in found if each.rounding_s), None),
        runs=next((each.runs for each in found if each.runs), ()),
    )


def speed_key(facts: SpeedFacts, kernels: str) -> SpeedKey:
    """Return the key under which this model's speeds are stored. kernels: name of the host's."""
    return SpeedKey(
        machine=this_machine(),
        model=str(facts.folder.resolve()),
        config=sha256(repr(facts.config).encode()).hexdigest()[:16],
        dtype=str(facts.memory.dtype),
        formats=str(facts.memory.formats),
        kernels=kernels,
        kv_cache=str(facts.kv_cache),
    )


def _at(curve: Curve, number: float) -> float:
    """Evaluate a curve, interpolating between whole numbers."""
    low = math.floor(number)
    low_s = curve.at(low)
    return low_s + (number - low) * (curve.at(low + 1) - low_s)


def published_pass(
    decoding: Decoding, cache_mode: CacheMode, context: int
) -> tuple[int, float, float]:
    """Return a typical pass' rows, and the least and most tokens that it commits."""
    kind = make_kind(decoding, cache_mode=cache_mode)
    usual = kind.usual_pass(min(context, USUAL_TOKENS))
    most = MOST_SURE if usual.may_write_more else 1.0
    return usual.num_rows, usual.num_tokens, most * usual.num_tokens


def _expert_bytes(experts: ExpertFacts | None) -> tuple[int, int]:
    """Return an expert's bytes in a slot and its bytes on disk."""
    if experts is None:
        return 0, 0
    return experts.layout.num_bytes, experts.table.largest_expert_bytes
