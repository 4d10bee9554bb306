"""How long a pass of a plan will take on this machine, by what `lowtide doctor` has kept.

A prediction rests on the times of the model's own experts where they were measured, else on the
rates of the machine's parts: each pass reads the weights from memory once and computes its
products, and absent experts are read beside the computation. A layer takes, on top, the time of one
with hardly any weights. Attention's scores are not counted. Reads ahead of a layer are, where
passes of so many rows begin them and they save enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lowtide.core import CacheMode, Costs, MoEShape
from lowtide.decode.masked_options import resolve
from lowtide.engine.opening import OpenModel
from lowtide.errors import StorageError
from lowtide.hardware.machine import (
    DISK_READ,
    LAYERS,
    MEMORY_READ,
    Machine,
    product_name,
    this_machine,
)
from lowtide.hardware.measure import layer_dense_bytes
from lowtide.hardware.store import CostKey, kept_rates, load
from lowtide.kernels.choice import possible_names
from lowtide.kernels.cpu.quantised import MAX_FEW_ROWS
from lowtide.params import DEFAULT_MAX_TOKENS, DiffusionParams
from lowtide.plan import Basis, MemoryPlan, Prediction
from lowtide.policies.prefetch import Gate
from lowtide.policies.presets import fetches_all
from lowtide.policies.reads_ahead import NEARLY_ALL, WORTH, read_ahead
from lowtide.reading.dense_weights import DenseWeights
from lowtide.replay.foresight import GATE_ACCURACY
from lowtide.schemas import model_schema


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


@dataclass(frozen=True)
class Predictor:
    """What is known of a loaded model's speed. `pass_s`: of so many rows; None: nothing."""

    opened: OpenModel
    plan: MemoryPlan
    rests_on: Basis
    pass_s: Callable[[int, ExpertCounts], float | None]

    def prediction(self) -> Prediction:
        """The speed of the passes that the family's published decoding takes."""
        num_rows, tokens_per_pass = published_pass(self.opened)
        demand = even_demand(self.opened.config.moe_shape, self.plan, num_rows)
        expert_bytes, read_bytes = _expert_bytes(self.opened)
        return Prediction(
            num_rows=num_rows,
            tokens_per_pass=tokens_per_pass,
            read_bytes=demand.num_on_disk * read_bytes,
            memory_bytes=_dense_bytes(self.opened) + demand.num_run * expert_bytes,
            pass_s=self.pass_s(num_rows, demand),
            rests_on=self.rests_on,
            asked_share=demand.num_run / max(1, self.plan.num_experts),
        )

    def tokens_per_s(self, num_tokens: int, num_passes: int, num_rows: int) -> float | None:
        """Speed of a run that committed `num_tokens`, its passes having `num_rows` together."""
        if not num_passes:
            return self.prediction().tokens_per_s
        mean_rows = max(1, round(num_rows / num_passes))
        demand = even_demand(self.opened.config.moe_shape, self.plan, mean_rows)
        pass_s = self.pass_s(mean_rows, demand)
        return None if pass_s is None else num_tokens / (num_passes * pass_s)


def predictor_of(opened: OpenModel, plan: MemoryPlan) -> Predictor | None:
    """None beside an emulated device: its speeds are what they are told to be."""
    if plan.device == "emulated":
        return None
    machine = this_machine()
    rates = {_kind(rate.name): rate.per_s for rate in kept_rates(machine)}
    costs = None if opened.config.experts is None else _kept_costs(opened, plan, machine)
    if costs is not None:
        return Predictor(opened, plan, Basis.EXPERTS, _by_costs(opened, plan, costs, rates))
    return machine_predictor(opened, plan)


def machine_predictor(opened: OpenModel, plan: MemoryPlan) -> Predictor:
    """What follows from this machine's rates alone, as if nothing were known of the experts."""
    rates = {_kind(rate.name): rate.per_s for rate in kept_rates(this_machine())}
    if plan.gpu is None and MEMORY_READ in rates:
        return Predictor(opened, plan, Basis.MACHINE, _by_rates(opened, plan, rates))
    return Predictor(opened, plan, Basis.NOTHING, lambda num_rows, demand: None)


def published_pass(opened: OpenModel) -> tuple[int, float]:
    """Rows of a pass, and the tokens that it commits at least, of the longest answer there is."""
    config, defaults = opened.config, opened.config.decoding
    if defaults is None:
        return 1, 1.0
    if not config.is_bidirectional:
        return config.block_length, max(1.0, config.block_length / defaults.steps)
    num_tokens = min(DEFAULT_MAX_TOKENS, opened.context)
    params = resolve(DiffusionParams(), defaults, num_tokens, config.architecture)
    tokens_per_pass = 1.0 if params.steps is None else max(1.0, num_tokens / params.steps)
    is_whole = opened.cache_mode is CacheMode.EXACT
    block_length = params.block_length or num_tokens
    return (opened.context if is_whole else block_length), tokens_per_pass


def _kind(name: str) -> str:
    """A rate's name without what differs from file to file."""
    return DISK_READ if name.startswith(DISK_READ) else name


def _kept_costs(opened: OpenModel, plan: MemoryPlan, machine: Machine) -> Costs | None:
    """The stored costs of this model's experts, measured with its files or without."""
    device = "" if plan.gpu is None else f"{plan.device}, {opened.options.kernels} kernels"
    folders: list[Path | None] = [None]
    if not device and opened.checkpoint is not None:
        folders = [opened.checkpoint.files[0].path.parent, None]
    shape, layout = opened.config.moe_shape, opened.slot_layout
    for folder, name in product(folders, possible_names(opened.options.kernels, opened.dtype)):
        layer_bytes = _layer_bytes(opened)
        key = CostKey.of(machine, shape, layout, layer_bytes, device, folder, name)
        try:
            stored = load(key)
        except StorageError:  # measuring says so, and replaces it
            continue
        if stored is not None:
            return stored.costs
    return None


def _by_costs(
    opened: OpenModel, plan: MemoryPlan, costs: Costs, rates: Mapping[str, float]
) -> Callable[[int, ExpertCounts], float | None]:
    dense_share = _dense_bytes(opened) / _layer_bytes(opened)
    read_s = costs.disk_read_s or _read_s(opened, rates)
    num_moe_layers = opened.config.num_moe_layers
    layers_s = _layers_s(opened, rates)

    def pass_s(num_rows: int, demand: ExpertCounts) -> float | None:
        if demand.num_on_disk and read_s is None:
            return None
        num_tokens = max(1, round(demand.num_tokens))
        dense_s = costs.dense_s.at(num_rows) * dense_share + costs.sync_s * num_moe_layers
        compute_s = demand.num_run * costs.device_s.at(num_tokens)
        brought_s = demand.num_on_disk * (read_s or 0.0)
        if plan.gpu is not None:
            absent_s = costs.link_s
            if not fetches_all(plan.policy):  # the host and the link share them
                host_s = costs.host_s.at(num_tokens)
                absent_s = 1 / (1 / max(costs.link_s, 1e-9) + 1 / max(host_s, 1e-9))
            brought_s = max(brought_s, demand.num_absent * absent_s)
        return _taken_s(opened, plan, num_rows, layers_s + dense_s, compute_s, brought_s, demand)

    return pass_s


def _by_rates(
    opened: OpenModel, plan: MemoryPlan, rates: Mapping[str, float]
) -> Callable[[int, ExpertCounts], float | None]:
    dense_bytes, dense_elements = _dense_bytes(opened), _dense_elements(opened)
    per_s = rates.get(product_name(opened.dtype)) or rates.get("products in float32", math.inf)
    read_s = _read_s(opened, rates)
    layers_s = _layers_s(opened, rates)
    expert_bytes, _ = _expert_bytes(opened)
    spec = opened.config.experts
    elements = 0 if spec is None else spec.elements(opened.config.hidden_size)

    def taken_s(num_bytes: float, num_elements: float, num_rows: float) -> float:
        return max(num_bytes / rates[MEMORY_READ], 2 * num_elements * num_rows / per_s)

    def pass_s(num_rows: int, demand: ExpertCounts) -> float | None:
        if demand.num_on_disk and read_s is None:
            return None
        dense_s = taken_s(dense_bytes, dense_elements, num_rows)
        compute_s = demand.num_run * taken_s(expert_bytes, elements, demand.num_tokens)
        read_all_s = demand.num_on_disk * (read_s or 0.0)
        besides_s = layers_s + dense_s
        return _taken_s(opened, plan, num_rows, besides_s, compute_s, read_all_s, demand)

    return pass_s


def _taken_s(
    opened: OpenModel,
    plan: MemoryPlan,
    num_rows: int,
    besides_s: float,
    compute_s: float,
    brought_s: float,
    demand: ExpertCounts,
) -> float:
    """Seconds of a pass whose experts are computed beside reads, some of them ahead of their layer
    where the host alone runs them."""
    without_s = besides_s + max(compute_s, brought_s)
    num_layers = opened.config.num_moe_layers
    if plan.gpu is not None or not demand.num_on_disk or not num_layers:
        return without_s
    absent, num_slots = demand.num_on_disk / num_layers, float(plan.num_staging)
    accuracy = 1.0 if demand.num_run >= NEARLY_ALL * plan.num_experts else 0.0
    if num_rows <= MAX_FEW_ROWS:  # compiled code runs such passes by itself
        is_decoding = opened.config.block_length == 1 and not opened.config.is_bidirectional
        accuracy = float(np.mean(GATE_ACCURACY[Gate.RAW])) if is_decoding else 0.0
        num_slots = max(0.0, num_slots - absent)
    num_read = min(absent, num_slots) * num_layers
    right, wrong = accuracy * num_read, (1 - accuracy) * num_read
    ahead = read_ahead(right, wrong, besides_s, brought_s / demand.num_on_disk)
    ahead_s = besides_s + max(compute_s, brought_s - ahead.saved_s)
    return ahead_s if accuracy and ahead_s < WORTH * without_s else without_s


def _layers_s(opened: OpenModel, rates: Mapping[str, float]) -> float:
    """Seconds that all layers take beside their weights."""
    return opened.config.num_layers / rates[LAYERS] if LAYERS in rates else 0.0


def _read_s(opened: OpenModel, rates: Mapping[str, float]) -> float | None:
    """Seconds to read an expert at the disk's best rate."""
    return None if DISK_READ not in rates else _expert_bytes(opened)[1] / rates[DISK_READ]


def _expert_bytes(opened: OpenModel) -> tuple[int, int]:
    """Bytes of an expert in a slot, and as it is read."""
    if opened.config.experts is None:
        return 0, 0
    return opened.slot_layout.num_bytes, opened.weight_map.experts.largest_expert_bytes


def _layer_bytes(opened: OpenModel) -> int:
    """Bytes of a layer's dense weights, as costs are measured."""
    last = opened.config.moe_layers[-1]
    return layer_dense_bytes(opened.weight_map.dense, last, opened.dtype.itemsize)


def _dense_bytes(opened: OpenModel) -> int:
    """Bytes of the dense weights that every pass multiplies with, in their formats: an embedding
    counts only where it is the head too, as its rows are otherwise looked up."""
    return opened.dense.num_bytes - (0 if _is_tied(opened) else _embedding(opened).num_bytes)


def _dense_elements(opened: OpenModel) -> int:
    """Elements of the same weights."""
    elements = {name: math.prod(entry.shape) for name, entry in opened.weight_map.dense.items()}
    looked_up = () if _is_tied(opened) else _embedding(opened).names
    return sum(elements.values()) - sum(elements[name] for name in looked_up)


def _is_tied(opened: OpenModel) -> bool:
    return opened.config.tie_word_embeddings


def _embedding(opened: OpenModel) -> DenseWeights:
    return opened.dense.only([f"{model_schema(opened.config).names.embedding}.weight"])
