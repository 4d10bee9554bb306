"""How long a pass of a plan will take on this machine, by what `lowtide doctor` has kept.

Each pass goes through its weights once, at the rate of their kind and of the rows they are
multiplied with, and absent experts are read beside the computation. A layer takes, on top, the time
of one with hardly any weights in a pass of as many rows, of single tokens or of a block. With a GPU
the times are those of the model's own experts, measured as it is loaded. Attention's scores are not
counted. Reads ahead of a layer are, where passes of so many rows begin them and they save enough.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np

from lowtide.config import Decoding, ModelConfig
from lowtide.core import CacheMode, MoEShape
from lowtide.decode.kinds import make_kind
from lowtide.devices.kind import is_paced
from lowtide.engine.opening.facts import ExpertFacts, MemoryFacts
from lowtide.engine.opening.model import OpenModel
from lowtide.errors import StorageError
from lowtide.formats import MatrixFormat
from lowtide.hardware.machine import (
    LAYERS_OF_BLOCKS,
    LAYERS_OF_TOKENS,
    Machine,
    Rate,
    disk_rate,
    seconds_per_layer,
    this_machine,
)
from lowtide.hardware.measure import Measurements
from lowtide.hardware.store import kept_rates, load
from lowtide.hardware.weight_rates import kind_of, rounding_rate, seconds_per_byte
from lowtide.kernels.choice import possible_names
from lowtide.kernels.cpu.packed import MAX_FEW_ROWS
from lowtide.plan import MemoryPlan, PassTime, Prediction, SpeedRange
from lowtide.policies.prefetch import Gate
from lowtide.policies.presets import fetches_all
from lowtide.policies.reads_ahead import GATE_ACCURACY, NEARLY_ALL, WORTH, read_ahead
from lowtide.reading.dense_weights import DenseWeights
from lowtide.schemas import model_schema

DISAGREEMENT = 1.4
"""How far a machine is from its own measurements, from one hour to the next."""

LEAST_READ_SHARE = 0.5
"""Experts that are read where some are asked for again and again, as a share of an even demand."""

MOST_SURE = 4.0
"""Times as many tokens of a block in one pass, where all above a threshold are committed."""


class ExpertCounts(NamedTuple):
    """How many experts one pass runs, over all layers, and how many of these are absent."""

    num_run: float
    num_tokens: float  # of each
    num_absent: float  # of those that run, not where the pass computes
    num_on_disk: float  # of the absent, not in host memory either


def even_demand(shape: MoEShape, plan: MemoryPlan, num_rows: int) -> ExpertCounts:
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


class PassCosts(NamedTuple):
    """Seconds of the parts of a pass of so many rows."""

    dense_s: float  # all but experts
    expert_s: float  # one expert where the pass computes
    absent_s: float  # one expert that is in host memory and not there
    read_s: float  # one expert from disk
    rounded_s: float = 0.0  # one expert by all cores, where it is rounded as it is read
    doubt: float = DISAGREEMENT  # the factor by which a pass may take longer, or shorter

    def pass_time(self, demand: ExpertCounts, saved_s: float = 0.0) -> PassTime:
        """saved_s: of reads, by those that began ahead of their layer.

        The least with few reads, all hidden; the most with reads beside which nothing is
        computed.
        """
        compute_s = demand.num_run * self.expert_s + demand.num_on_disk * self.rounded_s
        moved_s = max(demand.num_on_disk * self.read_s, demand.num_absent * self.absent_s)
        least_s = max(self.dense_s + compute_s, LEAST_READ_SHARE * moved_s)
        without_s, ahead_s = (
            self.dense_s + max(compute_s, moved_s - each) for each in (0.0, saved_s)
        )
        return PassTime(
            least_s=least_s / self.doubt,
            likely_s=ahead_s if ahead_s < WORTH * without_s else without_s,
            most_s=(self.dense_s + compute_s + moved_s) * self.doubt,
        )


@dataclass(frozen=True)
class Predictor:
    """The speed of a loaded model, or of one that is planned.

    kernels: as they were asked for; rounded_to: the format that experts are asked to be made into.
    """

    config: ModelConfig
    memory: MemoryFacts
    plan: MemoryPlan
    published: tuple[int, float, float]  # of `published_pass`
    kernels: str
    rounded_to: str

    def prediction(self) -> Prediction:
        """The speed of the passes that the family's published decoding takes."""
        num_rows, tokens_per_pass, most_tokens = self.published
        demand = self._demand(num_rows)
        expert_bytes, read_bytes = _expert_bytes(self.memory.experts)
        memory_bytes = self._multiplied.num_bytes + demand.num_run * expert_bytes
        return Prediction(
            num_rows=num_rows,
            tokens_per_pass=tokens_per_pass,
            most_tokens_per_pass=most_tokens,
            read_bytes=demand.num_on_disk * read_bytes,
            memory_bytes=memory_bytes,
            pass_time=self.pass_time(num_rows),
            asked_share=demand.num_run / max(1, self.plan.num_experts),
        )

    def pass_time(self, num_rows: int) -> PassTime | None:
        """What a pass of so many rows takes; None where nothing was measured."""
        demand, machine = self._demand(num_rows), this_machine()
        if self.plan.gpu is None:
            costs = self._host_costs(machine, num_rows, demand)
        else:
            costs = self._gpu_costs(machine, num_rows, demand)
        if costs is None:
            return None
        return costs.pass_time(demand, self._saved_by_reads_ahead(num_rows, costs, demand))

    def speed(self, num_tokens: int, num_passes: int, num_rows: int) -> SpeedRange | None:
        """Speed of a run that committed `num_tokens`, its passes having `num_rows` together."""
        if not num_passes:
            return self.prediction().speed
        found = self.pass_time(max(1, round(num_rows / num_passes)))
        if found is None:
            return None
        least_s, likely_s, most_s = (num_passes * each_s for each_s in found)
        return SpeedRange(num_tokens / most_s, num_tokens / likely_s, num_tokens / least_s)

    def _demand(self, num_rows: int) -> ExpertCounts:
        return even_demand(self.config.moe_shape, self.plan, num_rows)

    @property
    def _multiplied(self) -> DenseWeights:
        """The dense weights that every pass multiplies with: an embedding is one of them only where
        it is the head too, as its rows are otherwise looked up.
        """
        dense = self.memory.dense
        if self.config.tie_word_embeddings:
            return dense
        looked_up = f"{model_schema(self.config).names.embedding}.weight"
        return dense.only([name for name in dense.names if name != looked_up])

    def _host_costs(
        self, machine: Machine, num_rows: int, demand: ExpertCounts
    ) -> PassCosts | None:
        rates = kept_rates(machine)
        rows = LAYERS_OF_TOKENS if self.config.decoding.writes_in_order else LAYERS_OF_BLOCKS
        per_layer, per_byte = seconds_per_layer(rates, rows), seconds_per_byte(rates)
        disk_bytes_per_s = disk_rate(rates)
        if per_layer is None or not per_byte or (demand.num_on_disk and disk_bytes_per_s is None):
            return None

        def taken_s(part: _Weights, num_tokens: float) -> float:
            bits = 8 * part.num_bytes / part.num_elements
            is_rounded = part.format in self.memory.rounded
            kind = kind_of(part.format, bits, self.memory.dtype, is_rounded)
            return part.num_bytes * per_byte[kind.name].at(max(1, round(num_tokens)))

        experts, formats = self.memory.experts, self.memory.dense_formats
        dense_s = sum(taken_s(part, num_rows) for part in _by_format(self._multiplied, formats))
        _, read_bytes = _expert_bytes(experts)
        return PassCosts(
            dense_s=self.config.num_layers * per_layer.at(num_rows) + dense_s,
            expert_s=sum(taken_s(part, demand.num_tokens) for part in _expert_weights(experts)),
            absent_s=0.0,
            read_s=read_bytes / (disk_bytes_per_s or math.inf),
            rounded_s=read_bytes / self._rounded_bytes_per_s(machine, rates),
            doubt=_doubt(median(rate.spread for rate in rates)),
        )

    def _rounded_bytes_per_s(self, machine: Machine, rates: Sequence[Rate]) -> float:
        """All cores' rate of rounding experts as they are read; infinite where none are."""
        is_rounded = self.memory.is_rounded_as_read
        per_s = rounding_rate(rates, self.rounded_to) if is_rounded else None
        return math.inf if per_s is None else per_s * machine.num_cores

    def _gpu_costs(self, machine: Machine, num_rows: int, demand: ExpertCounts) -> PassCosts | None:
        experts = self.memory.experts
        measured = None if experts is None else self._kept_costs(experts, machine)
        disk_bytes_per_s = disk_rate(kept_rates(machine))
        if experts is None or measured is None or (demand.num_on_disk and disk_bytes_per_s is None):
            return None
        costs = measured.costs()
        num_tokens = max(1, round(demand.num_tokens))
        dense_share = self._multiplied.num_bytes / experts.layer_bytes
        absent_s = costs.link_s
        if not fetches_all(self.plan.policy):  # the host and the link share them
            host_s = costs.host_s.at(num_tokens)
            absent_s = 1 / (1 / max(costs.link_s, 1e-9) + 1 / max(host_s, 1e-9))
        synchronised_s = costs.sync_s * self.config.num_moe_layers
        return PassCosts(
            dense_s=costs.dense_s.at(num_rows) * dense_share + synchronised_s,
            expert_s=costs.device_s.at(num_tokens),
            absent_s=absent_s,
            read_s=_expert_bytes(experts)[1] / (disk_bytes_per_s or math.inf),
            doubt=_doubt(measured.spread),
        )

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

    def _saved_by_reads_ahead(self, num_rows: int, costs: PassCosts, demand: ExpertCounts) -> float:
        """Seconds of reads that the host's passes of so many rows begin ahead of their layer."""
        plan, config = self.plan, self.config
        num_layers = config.num_moe_layers
        if plan.gpu is not None or not demand.num_on_disk or not num_layers:
            return 0.0
        absent, num_slots = demand.num_on_disk / num_layers, float(plan.num_staging)
        accuracy = 1.0 if demand.num_run >= NEARLY_ALL * plan.num_experts else 0.0
        if num_rows <= MAX_FEW_ROWS:  # compiled code runs such passes by itself
            in_order = config.decoding.writes_in_order
            accuracy = float(np.mean(GATE_ACCURACY[Gate.RAW])) if in_order else 0.0
            num_slots = max(0.0, num_slots - absent)
        num_read = min(absent, num_slots) * num_layers
        right, wrong = accuracy * num_read, (1 - accuracy) * num_read
        return read_ahead(right, wrong, costs.dense_s, costs.read_s).saved_s if accuracy else 0.0


def predictor_of(opened: OpenModel, plan: MemoryPlan) -> Predictor | None:
    """None beside a paced device: its speeds are what they are told to be."""
    if is_paced(plan.device):
        return None
    facts, memory, options = opened
    asked = options.asked
    config, context = facts.config, memory.context.num_tokens
    published = published_pass(config.decoding, asked.cache_mode, context)
    return Predictor(config, memory, plan, published, asked.kernels, asked.formats.experts)


def published_pass(
    decoding: Decoding, cache_mode: CacheMode, context: int
) -> tuple[int, float, float]:
    """Rows of a pass, and the tokens that it commits at least and at most, of the longest answer
    there is.
    """
    usual = make_kind(decoding, cache_mode=cache_mode).usual_pass(context)
    most = MOST_SURE if usual.may_write_more else 1.0
    return usual.num_rows, usual.num_tokens, most * usual.num_tokens


def _expert_bytes(experts: ExpertFacts | None) -> tuple[int, int]:
    """Bytes of an expert in a slot, and as it is read."""
    if experts is None:
        return 0, 0
    return experts.layout.num_bytes, experts.table.largest_expert_bytes


class _Weights(NamedTuple):
    """Weights in one format. format: its name, or "" for the compute dtype."""

    format: str
    num_bytes: float
    num_elements: float


def _by_format(dense: DenseWeights, kept: Mapping[str, MatrixFormat]) -> Iterator[_Weights]:
    by_format: defaultdict[str, list[str]] = defaultdict(list)
    for name in dense.names:
        by_format[kept[name].name if name in kept else ""].append(name)
    for format_name, names in by_format.items():
        num_elements = sum(math.prod(dense.shape(name)) for name in names)
        yield _Weights(format_name, dense.only(names).num_bytes, num_elements)


def _expert_weights(experts: ExpertFacts | None) -> Iterator[_Weights]:
    """Those of an average expert, by format: layers and parts may differ; where experts of a layer
    do, as the largest is.
    """
    if experts is None:
        return
    layers = experts.layout.layers
    counts = Counter(
        _Weights(own.name, sum(part.num_bytes), math.prod(part.shape))
        for layer in layers
        for part, own in zip(layer.parts, layer.largest_formats, strict=True)
    )
    for part, count in counts.items():
        share = count / len(layers)
        yield _Weights(part.format, share * part.num_bytes, share * part.num_elements)


def _doubt(spread: float) -> float:
    """By what factor a time may be wrong that follows from measurements with such a spread."""
    return max(DISAGREEMENT, 1 + spread)
