"""Opening a model: its facts, then the plan of every byte, then the weights.

The one place where lowtide's objects are wired together. Each stage refuses what it can before
the next one costs anything: `open_model` reads `config.json` and headers, `make_plan` runs the
model's own forward pass in register mode, `load` reads weights. Knows nothing of prompts.
"""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from time import perf_counter
from types import UnionType
from typing import Any

import torch

from lowtide.calibration import Calibration, default_path
from lowtide.checkpoint import Checkpoint
from lowtide.config import ModelConfig, format_size, parse_size
from lowtide.core import Costs, Curve, MemoryPlan, Step, StepKind, align_up
from lowtide.decode.block_diffusion import LOGIT_ROWS
from lowtide.device_engine import (
    DeviceOptions,
    ExpertSource,
    check_device,
    load_runtime,
    resolve_device,
)
from lowtide.dtypes import ITEM_BYTES, SAFETENSORS_NAME
from lowtide.errors import CheckpointError, PlanError, UnsupportedError, UsageError
from lowtide.experts.cuda import free_memory_bytes, pinned_bytes, plan_errors
from lowtide.experts.early_gate import EarlyGate, Route
from lowtide.experts.emulated import measure_device_s
from lowtide.experts.executor import HostExecutor, InlineExecutor
from lowtide.experts.hybrid import HybridRuntime
from lowtide.experts.loading import DenseWeights, Progress, check_finite
from lowtide.experts.runtime import ExpertRegistrar, ExpertRuntime
from lowtide.experts.slots import ExpertSlots, SlotLayout, SlotLedger
from lowtide.experts.store import FileReader, ring_bytes
from lowtide.experts.transfer import DiskTransfer, Transfer, largest_read_bytes, ticket_result
from lowtide.hardware import available_memory_bytes, resident_bytes, total_memory_bytes
from lowtide.hardware.measure import layer_dense_bytes
from lowtide.hub import has_weights, resolve_model
from lowtide.kernels.library_cache import library_cache_bytes, limit_library_cache
from lowtide.kernels.products import Products, choose_products
from lowtide.layers.batch import Batch, KVRange, Segment
from lowtide.layers.router import Router, SigmoidRouter
from lowtide.memory.arena import Arena
from lowtide.memory.budget import DeviceNeeds, Needs, spend
from lowtide.memory.kv_cache import KVCache, storage_shape
from lowtide.memory.workspace import Registrar, Workspace
from lowtide.models import model_class
from lowtide.models.decoder import Decoder
from lowtide.policies.catalogue import Setting, recipe
from lowtide.policies.placement import Placement
from lowtide.policies.prefetch import Gate
from lowtide.policies.presets import (
    CANDIDATES,
    FETCHING,
    TAU_PAPER,
    TAU_SOLVED,
    OnDemand,
    check_policy,
    choose_preset,
    make_policies,
    parse_options,
)
from lowtide.policies.tau import MAX_ONLINE_TAU, TauChange, calibrated_tau
from lowtide.schemas import WeightMap, assume, bind
from lowtide.simulate import compare, fastest_tau, measured_accuracy
from lowtide.tokenizer import Tokenizer
from lowtide.trace import Trace, TraceShape

_log = logging.getLogger(__name__)

MAX_ROWS = 512
"""Rows of the largest forward pass. Never a function of the budget: how rows are divided into
passes must not depend on it."""

MAX_BLOCK_LENGTH = MAX_ROWS // 2
"""A block's first step also carries the block before it."""

DEFAULT_CONTEXT = 4096

OVERHEAD_ALLOWANCE_BYTES = 128 << 20
"""What the process may come to hold beyond what it holds after its imports and a warm-up: library
code paged in on first use, Python objects of running requests, the allocator's slack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of an engine. Sizes are bytes, `10GiB`, `80%` (of this machine) or `auto`.

    device: `auto` (a GPU if there is one), `cpu`, `cuda` or `emulated`, with `device_options` for
    the last. host_memory: the budget for weights, KV cache, workspace, read ring and expert slots,
    or with a device for the experts at home; gpu_memory: the device's budget for all but those.
    policy, policy_options: what stays resident (`policies/presets.py`).
    context: tokens that the KV cache holds over all running sequences; by default the model's
    maximum, 4,096 at most. dtype: the compute type, by default the checkpoint's. block_length:
    the block of `logits`. calibration: what `lowtide calibrate` wrote; by default what it wrote
    to its default place for this model, if anything. config_overrides: values that replace
    `config.json`'s. kv_cache: False recomputes everything at every step (a reference).
    check_weights: read all weights once and refuse infinities and NaN. progress: called with
    (what, bytes done, bytes in all).
    """

    device: str = "auto"
    device_options: Mapping[str, str] = field(default_factory=dict)
    gpu_memory: str | int = "auto"
    host_memory: str | int = "auto"
    policy: str = "auto"
    policy_options: Mapping[str, str] = field(default_factory=dict)
    context: int | None = None
    expert_dtype: str | None = None
    kernels: str = "auto"
    dtype: str | None = None
    block_length: int | None = None
    calibration: str | None = None
    config_overrides: Mapping[str, object] = field(default_factory=dict)
    offline: bool = False
    seed: int | None = None
    kv_cache: bool = True
    check_weights: bool = False
    progress: Progress | None = None

    def __post_init__(self) -> None:
        self._check_kinds()
        check_device(self.device, self.device_options)
        if resolve_device(self.device) == "cpu" and self.gpu_memory not in ("auto", 0, "0"):
            raise UsageError(
                f"gpu_memory {self.gpu_memory!r}: there is no GPU in use; leave it out."
            )
        if self.kernels not in ("auto", "reference"):
            raise UnsupportedError(f"Kernels {self.kernels!r} unknown; choose auto or reference.")
        if self.dtype is not None and self.dtype not in SAFETENSORS_NAME:
            raise UnsupportedError(
                f"dtype {self.dtype!r} is not supported; choose {', '.join(SAFETENSORS_NAME)}."
            )
        self._check_integer("context", 1, 2**28)
        self._check_integer("block_length", 1, MAX_BLOCK_LENGTH)
        self._check_integer("seed", 0, 2**63 - 1)
        check_policy(self.policy, self.policy_options)

    def _check_kinds(self) -> None:
        kinds: list[tuple[str, type | UnionType, str]] = [
            ("device", str, "a name such as 'auto'"),
            ("calibration", str | os.PathLike | None, "the path of a file"),
        ]
        for name in ("device_options", "policy_options", "config_overrides"):
            kinds.append((name, Mapping, "a mapping of names to values"))
        for name, kind, noun in kinds:
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise UsageError(f"{name} must be {noun}, not {value!r}.")

    def _check_integer(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if value is not None and not (is_integer and low <= value <= high):
            raise UsageError(f"{name} must be an integer from {low} to {high}, not {value!r}.")


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A model's facts: nothing of its weights has been read.

    `checkpoint` is None for a folder that has a `config.json` and no weights: it can be planned
    (`weight_map` says where they would lie), not loaded.
    """

    folder: Path
    options: EngineConfig
    config: ModelConfig
    checkpoint: Checkpoint | None
    weight_map: WeightMap
    tokenizer: Tokenizer | None
    dtype: torch.dtype  # compute type
    context: int

    @property
    def dense(self) -> DenseWeights:
        is_float32 = model_class(self.config.family).is_float32
        dtypes = {
            name: torch.float32 if is_float32(name) else self.dtype
            for name in self.weight_map.dense
        }
        return DenseWeights(self.weight_map.dense, dtypes)

    @property
    def slot_layout(self) -> SlotLayout:
        return SlotLayout.of(
            self.config.moe_shape, self.dtype, is_clamped=self.config.has_clamped_experts
        )

    @property
    def products(self) -> Products:
        """The host's products; the first use of compiled ones in a process loads them."""
        return choose_products(self.options.kernels, self.dtype)

    @property
    def kv_shape(self) -> tuple[int, int, int, int, int]:
        num_arrays, num_heads, width = self.config.cache_shape
        num_tokens = align_up(self.context, self.config.block_length)
        return storage_shape(self.config.num_layers, num_heads, width, num_tokens, num_arrays)


def find_calibration(opened: OpenModel) -> Calibration | None:
    """The calibration that was asked for, or the one in the default place, if there is one.

    Raises UsageError for one that is damaged or of another model.
    """
    config, given = opened.config, opened.options.calibration
    shape = TraceShape(*config.moe_shape)
    path = default_path(opened.folder, config.architecture, shape)
    if given is not None:
        path = Path(given)
    elif not path.exists():
        return None
    calibration = Calibration.load(path)
    calibration.check(config.architecture, shape)
    return calibration


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded model and everything it runs on."""

    plan: MemoryPlan
    opened: OpenModel
    model: Decoder
    experts: ExpertRuntime | HybridRuntime
    kv_cache: KVCache
    reader: FileReader
    executor: HostExecutor

    def close(self) -> None:
        """Ends all threads and closes the checkpoint's files."""
        self.executor.close()
        self.experts.close()
        self.reader.close()


def open_model(reference: str | Path, options: EngineConfig) -> OpenModel:
    """Finds a model and checks all that can be checked without reading a weight."""
    folder = resolve_model(str(reference), offline=options.offline)
    config = ModelConfig.load(folder, options.config_overrides)
    checkpoint = Checkpoint.open(folder) if has_weights(folder) else None
    weight_map = assume(config) if checkpoint is None else bind(config, checkpoint)
    _check_loadable(weight_map)
    tokenizer = Tokenizer.load(folder)
    if tokenizer is not None:
        tokenizer.check_vocabulary(config.vocab_size)
    if options.expert_dtype not in (None, config.dtype):
        raise UnsupportedError(
            f"expert_dtype {options.expert_dtype!r} is not supported; this checkpoint's own is "
            f"{config.dtype!r}."
        )
    return OpenModel(
        folder=folder,
        options=options,
        config=config,
        checkpoint=checkpoint,
        weight_map=weight_map,
        tokenizer=tokenizer,
        dtype=getattr(torch, options.dtype or config.dtype),
        context=_context(config, options),
    )


def make_plan(opened: OpenModel) -> MemoryPlan:
    """Every byte the model will use. Raises PlanError when a budget is too small."""
    options, shape = opened.options, opened.config.moe_shape
    device = resolve_device(options.device)
    needs = _needs(opened) if device == "cpu" else _device_needs(opened)
    overhead_bytes = _overhead_bytes() + library_cache_bytes(opened.dtype)
    budget_bytes = _budget_bytes(opened, needs) if device == "cpu" else _gpu_bytes(opened, needs)
    tier, residents = spend(needs, budget_bytes, opened.context)
    fits = budget_bytes >= needs.full_bytes
    preset, reason = choose_preset(
        options.policy,
        everything_fits=fits,
        has_device=device != "cpu",
        is_diffusion=opened.config.is_diffusion,
    )
    plan = MemoryPlan(
        host=tier,
        context=opened.context,
        max_rows=MAX_ROWS,
        minimum_bytes=needs.minimum_bytes,
        full_bytes=needs.full_bytes,
        overhead_bytes=overhead_bytes,
        num_experts=shape.num_layers * shape.num_experts,
        residents_per_layer=residents,
        policy=preset,
        reason=reason,
        device=device,
    )
    if device == "cpu":
        return plan
    home_needs = _home_needs(opened)
    home, at_home = spend(home_needs, _budget_bytes(opened, home_needs), opened.context)
    return replace(plan, host=home, gpu=tier, host_residents_per_layer=at_home)


def load(opened: OpenModel, plan: MemoryPlan) -> Engine:
    """Reads the weights that the plan has room for.

    Raises CheckpointError for a folder without weights.
    """
    options, config, checkpoint = opened.options, opened.config, opened.checkpoint
    if checkpoint is None:
        raise CheckpointError(
            f"{opened.folder} holds a config.json but no *.safetensors: the model can be planned, "
            "not loaded. Fetch its weights into this folder."
        )
    shortage = shortage_of(plan, options)
    if shortage:
        raise PlanError(shortage)
    progress = options.progress or _no_progress
    if options.check_weights:
        check_finite(checkpoint, progress)
    with ExitStack() as undo:
        reader = FileReader(checkpoint.files, largest_read_bytes(opened.weight_map.experts))
        undo.callback(reader.close)
        # An emulated device is one core, and so is the host beside it.
        num_cores = 1 if plan.device == "emulated" else None
        executor = HostExecutor(config.num_experts_per_token, num_cores)
        undo.callback(executor.close)
        arena_bytes = _register(opened).arena_bytes
        if plan.device == "cuda":
            gpu = torch.device("cuda")
            with plan_errors(opened.dense.num_bytes, "GPU memory for dense weights"):
                weights = opened.dense.load_onto(gpu, reader, progress)
            with plan_errors(arena_bytes, "GPU memory for workspace, beside keys and values,"):
                kv_cache = KVCache(torch.zeros(opened.kv_shape, dtype=opened.dtype, device=gpu))
                workspace = Workspace(torch.empty(arena_bytes, dtype=torch.uint8, device=gpu))
        else:
            weights = opened.dense.load(reader, progress)
            kv_cache = KVCache(_kv_storage(opened))
            workspace = Workspace(Arena(arena_bytes).bytes)
        calibration = find_calibration(opened)
        experts = _load_experts(opened, plan, calibration, reader, executor, progress)
        undo.callback(experts.close)
        dense_executor = executor if plan.gpu is None else InlineExecutor()
        model = model_class(config.family)(
            config, weights, experts, kv_cache, workspace, dense_executor, opened.products
        )
        if isinstance(experts, HybridRuntime):
            experts.early_gate = _early_gate(opened, experts, model.routers, calibration)
        engine = Engine(plan, opened, model, experts, kv_cache, reader, executor)
        if options.policy == "auto" and isinstance(experts, HybridRuntime):
            engine = _choose_by_simulation(engine, experts, calibration)
        undo.pop_all()
    return engine


def _choose_by_simulation(
    engine: Engine, experts: HybridRuntime, calibration: Calibration | None
) -> Engine:
    """The preset of most simulated tokens per second, on the calibration's routing and the costs
    measured here; as it is where everything fits or nothing was calibrated."""
    plan, opened = engine.plan, engine.opened
    if calibration is None or plan.fast_tier.num_slots == plan.num_experts:
        return engine
    trace = _beginning(calibration, plan)
    setting = _setting(opened, plan, calibration, experts.costs)
    names = CANDIDATES if experts.costs.num_staging else ("tide", "fiddler", "layer-split")
    reports = compare(trace, names, setting, gate_accuracy=measured_accuracy(calibration))
    best, second = sorted(reports, key=lambda report: -report.tokens_per_s)[:2]
    reason = (
        f"simulated on the calibration's routing and this machine's costs: "
        f"{best.tokens_per_s:.3g} tokens/s in the expert layers, {second.preset} "
        f"{second.tokens_per_s:.3g}; the {best.binds} binds"
    )
    if best.preset != plan.policy:
        engine = adopt_policy(engine, best.preset, {})
    return replace(engine, plan=replace(plan, policy=best.preset, reason=reason))


def _beginning(calibration: Calibration, plan: MemoryPlan) -> Trace:
    """As much of the routing as replays in a second or so, under some ten policies: a layer takes
    about 0.1 ms under each."""
    return calibration.trace.beginning(max(32, 2000 // len(plan.residents_per_layer)))


def adopt_policy(engine: Engine, policy: str, policy_options: Mapping[str, str]) -> Engine:
    """The same engine under another policy, which starts from its own first residents.

    Between passes only; `engine` itself is to be forgotten. Raises UsageError for a policy or an
    option that there is not, PlanError for a policy that needs more than the plan has: `engine`
    then goes on as before.
    """
    options = replace(engine.opened.options, policy=policy, policy_options=policy_options)
    opened, plan, experts = replace(engine.opened, options=options), engine.plan, engine.experts
    fits = plan.fast_tier.num_slots == plan.num_experts
    preset, reason = choose_preset(
        policy,
        everything_fits=fits,
        has_device=plan.gpu is not None,
        is_diffusion=opened.config.is_diffusion,
    )
    plan = replace(plan, policy=preset, reason=reason)
    calibration, progress = find_calibration(opened), options.progress or _no_progress
    if isinstance(experts, HybridRuntime):
        setting = _setting(opened, plan, calibration, experts.costs)
        experts.adopt(make_policies(preset, setting, everything_fits=fits), progress)
        experts.early_gate = _early_gate(opened, experts, engine.model.routers, calibration)
    else:
        experts.evict_all()
        placement = _placement(opened, plan, calibration, experts.transfer)
        experts.adopt(placement)
        _preload(experts, placement, plan, progress)
    return replace(engine, opened=opened, plan=plan)


def _early_gate(
    opened: OpenModel,
    experts: HybridRuntime,
    routers: Sequence[Router],
    calibration: Calibration | None,
) -> EarlyGate:
    """Without a calibration the features are taken as they are."""
    residual, gate, device = None, experts.gate, experts.device.torch_device
    if gate is Gate.RESIDUAL and calibration is not None:
        residual = torch.tensor(calibration.residual, dtype=opened.dtype, device=device)
    routes = [_route(router) for router in routers]
    return EarlyGate(gate, routes, residual, opened.config.num_experts)


def _route(router: Router) -> Route:
    """A router by itself, for a guess: without the windows that tokens of a block share."""
    if isinstance(router, SigmoidRouter) and router.capacity:
        router = replace(router, capacity=0)
    return lambda x, workspace: router.route(x, (), workspace).experts


def _load_experts(
    opened: OpenModel,
    plan: MemoryPlan,
    calibration: Calibration | None,
    reader: FileReader,
    executor: HostExecutor,
    progress: Progress,
) -> ExpertRuntime | HybridRuntime:
    """The expert runtime with the policy's initial residents in their slots."""
    products = opened.products
    if plan.gpu is not None:
        return load_runtime(
            _expert_source(opened),
            plan,
            plan.gpu,
            functools.partial(_setting, opened, plan, calibration),
            DeviceOptions(opened.options.device_options, opened.options.kernels, products),
            reader,
            executor,
            progress,
        )
    config, num_slots = opened.config, plan.host.num_slots
    table, dtype_name = opened.weight_map.experts, _storage_name(opened.dtype)
    slots = ExpertSlots(Arena(plan.host.slot_bytes * num_slots), opened.slot_layout)
    transfer = DiskTransfer(reader, table, slots, dtype_name)
    placement = _placement(opened, plan, calibration, transfer)
    experts = ExpertRuntime(
        shape=config.moe_shape,
        slots=slots,
        ledger=SlotLedger(config.num_moe_layers, config.num_experts, num_slots),
        transfer=transfer,
        placement=placement,
        executor=executor,
        products=products,
    )
    _preload(experts, placement, plan, progress)
    return experts


def _placement(
    opened: OpenModel, plan: MemoryPlan, calibration: Calibration | None, transfer: Transfer
) -> Placement:
    """The policy's, where there is no device; its slots are free, to be read into."""
    made = recipe(plan.policy)
    asks_costs = made.weighs_moves or opened.options.policy_options.get("tau") in TAU_SOLVED
    num_probes = min(8, opened.config.num_experts, plan.host.num_slots) if asks_costs else 0
    costs = _disk_costs(opened, transfer, num_probes)
    return OnDemand(made.placement(_setting(opened, plan, calibration, costs)))


def _setting(
    opened: OpenModel, plan: MemoryPlan, calibration: Calibration | None, costs: Costs
) -> Setting:
    """What the preset's policies are made from. Raises UsageError for `tau=paper` without a
    calibration."""
    given = opened.options.policy_options
    options: dict[str, Any] = dict(parse_options(given))
    options["on_tau_change"] = _log_tau
    if given.get("tau") == TAU_PAPER:
        options["tau"] = _paper_tau(plan, calibration, costs)
    if calibration is not None:
        options |= {"frequency": calibration.frequency, "following": calibration.following}
        options["hits"] = calibration.trace.hits()
    seed = opened.options.seed or 0
    capacity = plan.residents_per_layer
    setting = Setting(capacity, opened.config.num_experts, costs, seed=seed, **options)
    if setting.online_tau and calibration is not None:
        trace = _beginning(calibration, plan)
        return replace(setting, tau=fastest_tau(trace, plan.policy, setting, MAX_ONLINE_TAU))
    return setting


def _log_tau(change: TauChange) -> None:
    _log.info(
        "tau %d -> %d after %d steps: %.0f%% of the best residents change per step.",
        change.old,
        change.new,
        change.num_steps,
        100 * change.drift,
    )


def check_calibration(opened: OpenModel) -> None:
    """Raises UsageError where loading would, for what the options say of a calibration."""
    calibration = find_calibration(opened)
    if calibration is None and opened.options.policy_options.get("tau") == TAU_PAPER:
        raise _no_calibration()


def _no_calibration() -> UsageError:
    return UsageError(
        "tau=paper is solved from a calibration and there is none for this model: run "
        "`lowtide calibrate` first, or choose a number or tau=auto."
    )


def _paper_tau(plan: MemoryPlan, calibration: Calibration | None, costs: Costs) -> int:
    if calibration is None:
        raise _no_calibration()
    residents = plan.residents_per_layer
    budget = max(1, round(sum(residents) / len(residents)))
    blocks = calibration.trace.blocks()
    return calibrated_tau(blocks, budget, costs.fetch_s, costs.host_s.at(1))


def _disk_costs(opened: OpenModel, transfer: Transfer, num_probes: int) -> Costs:
    """What an absent expert costs where it is always read: measured on the first experts.

    Without probes nothing is measured and every time is 0, for policies that do not ask.
    """
    slot_bytes = opened.slot_layout.num_bytes
    if not num_probes:
        nothing = Curve([(1, 0.0)])
        return Costs(slot_bytes, 0.0, nothing, nothing, nothing, 0.0)
    start = perf_counter()
    for ticket in [transfer.start(0, expert, expert) for expert in range(num_probes)]:
        ticket_result(ticket)
    read_s = (perf_counter() - start) / num_probes
    compute_s = measure_device_s(opened.slot_layout, opened.config.moe_shape, opened.products)
    absent_s = Curve([(n, max(read_s, compute_s.at(n))) for n in (1, MAX_ROWS)])
    return Costs(slot_bytes, read_s, absent_s, compute_s, compute_s, 0.0)


def _preload(
    experts: ExpertRuntime, placement: Placement, plan: MemoryPlan, progress: Progress
) -> None:
    """Makes the policy's initial residents resident, layer by layer."""
    initial = [placement.initial(layer) for layer in range(len(plan.residents_per_layer))]
    total_bytes = sum(map(len, initial)) * plan.host.slot_bytes
    done_bytes = 0
    for layer, residents in enumerate(initial):
        experts.preload(layer, residents)
        done_bytes += len(residents) * plan.host.slot_bytes
        progress("loading experts", done_bytes, total_bytes)


def _check_loadable(weight_map: WeightMap) -> None:
    dtypes = {name: entry.dtype for name, entry in weight_map.dense.items()}
    for name, dtype in (*dtypes.items(), ("the experts", weight_map.experts.dtype)):
        if dtype not in ITEM_BYTES:
            raise CheckpointError(
                f"{name} is stored as {dtype}; lowtide reads {', '.join(ITEM_BYTES)}."
            )


def _context(config: ModelConfig, options: EngineConfig) -> int:
    """May be more than the model's positions: it is shared by all running sequences."""
    return options.context or min(config.max_positions, DEFAULT_CONTEXT)


def _needs(opened: OpenModel) -> Needs:
    shape = opened.config.moe_shape
    return Needs(
        dense_bytes=opened.dense.num_bytes,
        kv_cache_bytes=math.prod(opened.kv_shape) * opened.dtype.itemsize,
        workspace_bytes=_register(opened).peak_bytes,
        ring_bytes=ring_bytes(largest_read_bytes(opened.weight_map.experts)),
        slot_bytes=opened.slot_layout.num_bytes,
        num_layers=shape.num_layers,
        num_experts=shape.num_experts,
    )


def _device_needs(opened: OpenModel) -> DeviceNeeds:
    """The model but for what its experts need at home."""
    needs = _needs(opened)
    parts = {field.name: getattr(needs, field.name) for field in fields(needs)}
    fetches_all = opened.options.policy in FETCHING
    return DeviceNeeds(**{**parts, "ring_bytes": 0, "fetches_all": fetches_all})


def _home_needs(opened: OpenModel) -> Needs:
    """The host's experts, the scratch they compute in, and the ring they are read through."""
    scratch_bytes = _expert_source(opened).scratch_bytes
    if resolve_device(opened.options.device) == "cuda":
        scratch_bytes += pinned_bytes(opened.config.moe_shape, opened.dtype, MAX_ROWS)
    return replace(_needs(opened), dense_bytes=0, kv_cache_bytes=0, workspace_bytes=scratch_bytes)


def _expert_source(opened: OpenModel) -> ExpertSource:
    config = opened.config
    return ExpertSource(
        shape=config.moe_shape,
        table=opened.weight_map.experts,
        layout=opened.slot_layout,
        dtype_name=_storage_name(opened.dtype),
        layer_bytes=layer_dense_bytes(
            opened.weight_map.dense, config.moe_layers[-1], opened.dtype.itemsize
        ),
        max_rows=MAX_ROWS,
    )


def _gpu_bytes(opened: OpenModel, needs: Needs) -> int:
    """The device's budget. An emulated device has as much as is asked for."""
    gpu_memory, free_bytes = opened.options.gpu_memory, total_memory_bytes()
    if resolve_device(opened.options.device) == "cuda":
        free_bytes = free_memory_bytes()
        needed = needs.full_bytes
        if gpu_memory == "auto":  # a tenth is left to the driver, libraries and others
            return max(needs.minimum_bytes, min(free_bytes * 9 // 10, needed))
    elif gpu_memory == "auto":
        return needs.full_bytes
    return parse_size(gpu_memory, free_bytes)


def _budget_bytes(opened: OpenModel, needs: Needs) -> int:
    host_memory = opened.options.host_memory
    if host_memory != "auto":
        return parse_size(host_memory, total_memory_bytes())
    # A tenth is left to others and to the page cache.
    usable = available_memory_bytes() * 9 // 10 - OVERHEAD_ALLOWANCE_BYTES
    usable -= library_cache_bytes(opened.dtype)
    return max(needs.minimum_bytes, min(usable, needs.full_bytes))


def shortage_of(plan: MemoryPlan, options: EngineConfig) -> str:
    """Why this machine cannot hold the plan now, or nothing; a budget that was given is the
    user's own word."""
    needed_bytes, available_bytes = plan.host.budget_bytes, available_memory_bytes()
    if options.host_memory != "auto" or needed_bytes <= available_bytes:
        return ""
    return (
        f"At least {format_size(needed_bytes)} of memory are needed, and "
        f"{format_size(available_bytes)} are available. Lower --context or free memory; a "
        "--host-memory that is given is taken at its word."
    )


@functools.cache
def _overhead_bytes() -> int:
    """What this process holds outside the budget, after one product of each compute type."""
    limit_library_cache()
    for name in SAFETENSORS_NAME:
        matrix = torch.ones(64, 64, dtype=getattr(torch, name))
        torch.mm(matrix, matrix)
    return resident_bytes() + OVERHEAD_ALLOWANCE_BYTES


def _register(opened: OpenModel) -> Registrar:
    """Runs the largest forward pass on the meta device: the same code, nothing computed.

    Layers give back what they take, so those up to the first with experts stand for all.
    """
    registrar = Registrar()
    config = replace(opened.config, num_layers=opened.config.num_leading_layers)
    kv_shape = list(opened.kv_shape)
    kv_shape[3] = max(kv_shape[3], MAX_ROWS)
    kv_cache = KVCache(torch.empty(kv_shape, dtype=opened.dtype, device="meta"))
    experts = ExpertRegistrar(config.moe_shape)
    model = model_class(config.family)(
        config, opened.dense.meta(), experts, kv_cache, registrar, InlineExecutor()
    )
    rows = torch.empty(MAX_ROWS, dtype=torch.int64, device="meta")
    # Causal, or one block of all rows, at the end of the cache: no other attention needs more.
    first_position = kv_shape[3] - MAX_ROWS
    for block_length in (1, kv_shape[3]) if config.is_diffusion else (1,):
        segment = Segment(0, MAX_ROWS, first_position, block_length, KVRange(0, kv_shape[3]))
        hidden = model.forward(Batch(rows, rows, (segment,), Step(StepKind.DENOISE, 0)))
        model.logits(hidden[: LOGIT_ROWS + 15])
    return registrar


def _kv_storage(opened: OpenModel) -> torch.Tensor:
    num_bytes = math.prod(opened.kv_shape) * opened.dtype.itemsize
    return Arena(num_bytes, grows_slowly=True).tensor(0, opened.kv_shape, opened.dtype)


def _storage_name(dtype: torch.dtype) -> str:
    return SAFETENSORS_NAME[str(dtype).removeprefix("torch.")]


def _no_progress(what: str, done_bytes: int, total_bytes: int) -> None:
    pass
