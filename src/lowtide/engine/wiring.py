"""Loading: the one place where lowtide's objects are wired together, as the plan says.

Knows nothing of prompts.
"""

from __future__ import annotations

import functools
import math
from contextlib import ExitStack

import torch

from lowtide.core import MemoryPlan
from lowtide.engine.device import (
    DeviceOptions,
    load_runtime,
)
from lowtide.engine.engine import Engine
from lowtide.engine.opening import OpenModel, find_calibration
from lowtide.engine.planning import expert_source, register, shortage_of
from lowtide.engine.policy_setting import (
    choose_by_simulation,
    make_early_gate,
    make_setting,
    policies_without_device,
    preload,
)
from lowtide.errors import CheckpointError, PlanError
from lowtide.experts.hybrid import HybridRuntime
from lowtide.experts.runtime import ExpertRuntime
from lowtide.experts.slots import ExpertSlots, SlotLedger
from lowtide.experts.transfer import DiskTransfer, largest_read_bytes
from lowtide.memory.arena import Arena
from lowtide.memory.cuda_streams import plan_errors
from lowtide.memory.kv_cache import KVCache
from lowtide.memory.workspace import Workspace
from lowtide.models import model_class
from lowtide.reading.dense_weights import Progress, check_finite, no_progress
from lowtide.reading.file_reader import FileReader
from lowtide.replay.calibration import Calibration
from lowtide.threads.executor import HostExecutor, InlineExecutor


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
    progress = options.progress or no_progress
    if options.check_weights:
        check_finite(checkpoint, progress)
    with ExitStack() as undo:
        reader = FileReader(checkpoint.files, largest_read_bytes(opened.weight_map.experts))
        undo.callback(reader.close)
        # An emulated device is one thread, and so is the host beside it.
        is_emulated = plan.device == "emulated"
        make_executor = HostExecutor.beside_emulated if is_emulated else HostExecutor
        executor = make_executor(config.num_experts_per_token)
        undo.callback(executor.close)
        arena_bytes = register(opened).arena_bytes
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
            experts.early_gate = make_early_gate(opened, experts, model.routers, calibration)
        engine = Engine(plan, opened, model, experts, kv_cache, reader, executor)
        if options.policy == "auto" and isinstance(experts, HybridRuntime):
            engine = choose_by_simulation(engine, experts, calibration)
        undo.pop_all()
    return engine


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
            expert_source(opened),
            plan,
            plan.gpu,
            functools.partial(make_setting, opened, plan, calibration),
            DeviceOptions(opened.options.device_options, opened.options.kernels, products),
            reader,
            executor,
            progress,
        )
    config, num_slots = opened.config, plan.host.num_slots
    table, dtype_name = opened.weight_map.experts, opened.storage_name
    slots = ExpertSlots(Arena(plan.host.slot_bytes * num_slots), opened.slot_layout)
    transfer = DiskTransfer(reader, table, slots, dtype_name)
    cores_per_expert = executor.cores_per_expert
    policies = policies_without_device(opened, plan, calibration, transfer, cores_per_expert)
    experts = ExpertRuntime(
        shape=config.moe_shape,
        slots=slots,
        ledger=SlotLedger(config.num_moe_layers, config.num_experts, num_slots),
        transfer=transfer,
        policies=policies,
        executor=executor,
        products=products,
    )
    preload(experts, policies, plan, progress)
    return experts


def _kv_storage(opened: OpenModel) -> torch.Tensor:
    num_bytes = math.prod(opened.kv_shape) * opened.dtype.itemsize
    return Arena(num_bytes, grows_slowly=True).tensor(0, opened.kv_shape, opened.dtype)
