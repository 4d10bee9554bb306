"""How long a pass of a plan takes: by this model's own layers and its own last runs.

A model that was loaded here has kept how long its passes take with every expert in memory, how
long its experts' reads take, and how its last runs went (`hardware/model_speeds.py`). With a GPU
the times are those of the model's own experts, measured as it is loaded. Before the first load
there is a bound alone: bytes a token, at the rates of memory and disk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import NamedTuple

from lowtide.config import Decoding, ModelConfig
from lowtide.core import CacheMode, Curve, MoEShape
from lowtide.decode.kinds import make_kind
from lowtide.devices.kind import is_paced
from lowtide.engine.opening.facts import ExpertFacts, MemoryFacts
from lowtide.engine.opening.model import OpenModel
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
"""The factor by which a run may be slower or faster than what is likely."""

MISS_POWER = 2.0
"""How fast misses fall with residents before a run of the model has shown it: of the experts that a
pass asks for, the share that is not in memory, to this power, is missed. Texts ask for some experts
again and again, and these stay."""

MISS_POWERS = (0.5, 6.0)
"""Ends of what a run may say of that."""

MOST_CORRECTION = 4.0
"""By which factor a run of another budget corrects waiting at the most."""

LEAST_READ_SHARE = 0.5
"""Absent experts that are read at the least, for a bound, as a share of an even demand."""

COMPUTED_MEANWHILE = 0.5
"""Share of a layer's time in which its absent experts are read: that of the experts at hand."""

MOST_SURE = 4.0
"""Times as many tokens of a block in one pass, where all above a threshold are committed."""

PROMPT_TOKENS = 64
"""Of a likely prompt: a bidirectional model's passes have it, too."""


class ExpertCounts(NamedTuple):
    """How many experts one pass runs, over all layers, and how many of these are absent."""

    num_run: float
    num_tokens: float  # of each
    num_absent: float  # of those that run, not where the pass computes
    num_on_disk: float  # of the absent, not in host memory either


def even_demand(shape: MoEShape, plan: MemoryPlan, num_rows: float) -> ExpertCounts:
    """The counts of a pass in which every expert is as likely as any other, token by token."""
    if not shape.num_experts:
        return ExpertCounts(0.0, 0.0, 0.0, 0.0)
    share = shape.num_experts_per_token / shape.num_experts
    num_run = shape.num_experts * (1 - (1 - share) ** num_rows) * shape.num_layers
    absent_share = 1 - sum(plan.residents_per_layer) / plan.num_experts
    disk_share = absent_share
    if plan.gpu is not None:
        disk_share *= 1 - sum(plan.host_residents_per_layer) / plan.num_experts
    num_tokens = num_rows * shape.num_experts_per_token * shape.num_layers / num_run
    return ExpertCounts(num_run, num_tokens, num_run * absent_share, num_run * disk_share)


@dataclass(frozen=True)
class Predictor:
    """The speed of a loaded model, or of one that is planned.

    kernels: as they were asked for; speeds: what is known of the model here.
    """

    config: ModelConfig
    memory: MemoryFacts
    plan: MemoryPlan
    published: tuple[int, float, float]  # of `published_pass`
    kernels: str
    speeds: ModelSpeeds

    def prediction(self) -> Prediction:
        """The speed of the passes that the family's published decoding takes."""
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
        least_s = self._least_pass_s(prediction, demand)
        at_most = None if least_s is None else max(likely_tokens, most_tokens) / least_s
        return replace(prediction, at_most=at_most)

    def pass_time(self, num_rows: int) -> PassTime | None:
        """What a pass of so many rows takes; None where nothing was measured."""
        if self.plan.gpu is None:
            likely_s = self._host_pass_s(num_rows)
        else:
            likely_s = self._gpu_pass_s(num_rows)
        return None if likely_s is None else PassTime(likely_s / DOUBT, likely_s, likely_s * DOUBT)

    def speed(self, num_tokens: int, num_passes: int, num_rows: int) -> SpeedRange | None:
        """Speed of a run that committed `num_tokens`, its passes having `num_rows` together."""
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
        """By what was measured, corrected by what the last run took of each part."""
        parts, run = self._parts(num_rows, self._missed(num_rows)), self._run
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
        """Seconds of a pass's computation, and of waiting for the experts that it misses.

        None without what they follow from.
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
        """Experts that a pass has to read."""
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
        """The share of all experts that is not in memory."""
        return 1 - num_residents / max(1, self.plan.num_experts)

    def _least_pass_s(self, prediction: Prediction, demand: ExpertCounts) -> float | None:
        """Seconds that a pass takes at least, by the rates of memory and disk."""
        rates = kept_rates(this_machine())
        memory_bytes_per_s = memory_rate(rates) or quick_memory_rate()
        if self.plan.gpu is not None or memory_bytes_per_s is None:
            return None
        disk_bytes_per_s, reads_s = disk_rate(rates), self.speeds.reads_s
        read_s = 0.0
        if reads_s is not None:
            count = self.speeds.reads[-1][0]
            read_s = reads_s.at(count) / count
        elif disk_bytes_per_s is not None:
            read_s = _expert_bytes(self.memory.experts)[1] / disk_bytes_per_s
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
        """What these experts cost with the GPU, as loading them or `lowtide doctor` stores it."""
        for name in possible_names(self.kernels, self.memory.dtype):
            try:
                stored = load(experts.cost_key(machine, name, self.memory.device, self.kernels))
            except StorageError:  # measuring says so, and replaces it
                continue
            if stored is not None:
                return stored.measurements
        return None

    @property
    def _multiplied(self) -> DenseWeights:
        """Return the dense weights that every pass multiplies with.

        An embedding is among them only where it is the head, too: else its rows are looked up.
        """
        dense = self.memory.dense
        if self.config.tie_word_embeddings:
            return dense
        looked_up = f"{model_schema(self.config).names.embedding}.weight"
        return dense.only([name for name in dense.names if name != looked_up])


def predictor_of(
    opened: OpenModel, plan: MemoryPlan, speeds: ModelSpeeds | None = None
) -> Predictor | None:
    """None beside a paced device: its speeds are what they are told to be.

    speeds: of the model, by default those that are kept.
    """
    if is_paced(plan.device):
        return None
    facts, memory, options = opened
    context, asked = memory.context.num_tokens, options.asked
    published = published_pass(facts.config.decoding, asked.cache_mode, context)
    speeds = speeds or known_speeds(opened)
    return Predictor(facts.config, memory, plan, published, asked.kernels, speeds)


def known_speeds(opened: OpenModel) -> ModelSpeeds:
    """Return what is kept of this model's speed, as it was loaded here last."""
    found = [kept_speeds(speed_key(opened, name)) for name in kernel_names(opened)]
    return ModelSpeeds(
        passes=next((each.passes for each in found if each.passes), ()),
        reads=next((each.reads for each in found if each.reads), ()),
        rounding_s=next((each.rounding_s for each in found if each.rounding_s), None),
        runs=next((each.runs for each in found if each.runs), ()),
    )


def speed_key(opened: OpenModel, kernels: str) -> SpeedKey:
    """Under which this model's speed is kept. kernels: the host's, by name."""
    facts, memory, options = opened
    return SpeedKey(
        machine=this_machine(),
        model=str(facts.folder.resolve()),
        config=sha256(repr(facts.config).encode()).hexdigest()[:16],
        dtype=str(memory.dtype),
        formats=str(memory.formats),
        kernels=kernels,
        kv_cache=str(options.asked.kv_cache),
    )


def kernel_names(opened: OpenModel) -> Sequence[str]:
    """Names of the host's kernels that the model may run on, best first; compiles nothing."""
    return possible_names(opened.options.asked.kernels, opened.memory.dtype)


def _at(curve: Curve, number: float) -> float:
    """Between whole numbers, too."""
    low = math.floor(number)
    low_s = curve.at(low)
    return low_s + (number - low) * (curve.at(low + 1) - low_s)


def published_pass(
    decoding: Decoding, cache_mode: CacheMode, context: int
) -> tuple[int, float, float]:
    """Rows of a pass of a likely answer, and the tokens that it commits at least and at most."""
    kind = make_kind(decoding, cache_mode=cache_mode)
    usual = kind.usual_pass(min(context, PROMPT_TOKENS + DEFAULT_CANVAS_TOKENS))
    most = MOST_SURE if usual.may_write_more else 1.0
    return usual.num_rows, usual.num_tokens, most * usual.num_tokens


def _expert_bytes(experts: ExpertFacts | None) -> tuple[int, int]:
    """Bytes of an expert in a slot, and as it is read."""
    if experts is None:
        return 0, 0
    return experts.layout.num_bytes, experts.table.largest_expert_bytes
