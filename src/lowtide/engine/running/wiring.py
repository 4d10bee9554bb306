"""Loads a model: makes the parts of the plan and wires them together.

`experts.py` does so for its experts. Knows nothing of prompts.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lowtide.compute import Compute
from lowtide.core import MoEShape, align_up
from lowtide.devices.cuda import CudaDevice
from lowtide.devices.kind import KINDS, OWN_DEVICES
from lowtide.engine.opening.facts import ContextFacts
from lowtide.engine.opening.model import OpenModel
from lowtide.engine.opening.model_calibration import check_buddies, find_calibration
from lowtide.engine.planning.budget_division import SMALL_GROUP_BYTES, Division, group_bytes
from lowtide.engine.planning.plan import excess_of, shortage_of
from lowtide.engine.planning.planner import Planner
from lowtide.engine.running.device import device_opener
from lowtide.engine.running.engine import Engine
from lowtide.engine.running.experts import ExpertParts, load_experts
from lowtide.engine.running.key_store import digest_of, open_files, stored_sequences
from lowtide.engine.running.moving_memory import (
    MovingMemory,
    SharedMemory,
    kv_pages_of,
    paged_states,
)
from lowtide.engine.running.not_finite import FaultSearch
from lowtide.engine.running.pass_room import open_workspace
from lowtide.engine.running.policy_setting import (
    PolicyChoice,
    make_engine_policies,
    measure_compute,
    set_early_gate,
    with_sizes,
    with_trial,
)
from lowtide.errors import CheckpointError, PlanError
from lowtide.experts.no_experts import NoExperts
from lowtide.experts.runtime import ExpertRuntime
from lowtide.families import families
from lowtide.formats.convert import pack
from lowtide.kernels.choice import HOST, choose_pack
from lowtide.kernels.reference import REFERENCE, Kernels
from lowtide.memory.cuda_graphs import Recorder
from lowtide.memory.cuda_streams import plan_errors
from lowtide.memory.kv_cache import KVCache, cache_over
from lowtide.memory.kv_pages import KVLayout
from lowtide.memory.pages import PageBudget
from lowtide.memory.states import StateStore
from lowtide.memory.transient_kv import TransientKV
from lowtide.model_folder.checkpoint import Checkpoint
from lowtide.models.decoder import Decoder, Weights
from lowtide.plan import MemoryPlan
from lowtide.progress import Progress
from lowtide.reading.dense_weights import DenseWeights
from lowtide.reading.file_reader import FileReader
from lowtide.reading.finite_weights import check_finite
from lowtide.reading.tied_head import refuse_other_head
from lowtide.schemas import model_schema
from lowtide.threads.executor import MAX_THREADS, HostExecutor, InlineExecutor, spare_forked_threads

_log = logging.getLogger(__name__)


def load(opened: OpenModel, plan: MemoryPlan, planner: Planner | None = None) -> Engine:
    """Read the weights for which the plan has room.

    planner: the one that made the plan, so that passes are counted once. Raises CheckpointError for
    a folder without weights.
    """
    facts, memory, options = opened
    asked, context, config = options.asked, memory.context, facts.config
    planner = (planner or Planner.of(config, memory, asked)).joining(plan.prompt_chunks)
    device, shape = _dense_device(plan), config.moe_shape
    spare_forked_threads()
    calibration = find_calibration(facts, asked.calibration)
    if memory.experts is not None:
        check_buddies(calibration, asked.policy, asked.policy_options)
    checkpoint = _found(facts.checkpoint, facts.folder)
    _check_machine(plan, asked.host_memory)
    if config.tie_word_embeddings:
        refuse_other_head(checkpoint, model_schema(config).names)
    if asked.check_weights:
        check_finite(checkpoint, asked.report)
    with ExitStack() as undo:
        files = None
        if options.keys_folder is not None:
            files = open_files(options.keys_folder, asked.cache_disk, undo)
        kernels = opened.kernels()  # first, with what rounds weights: one compilation at most
        # What makes weights into formats that they are not stored in.
        rounds = choose_pack(asked.kernels) if memory.is_rounded_as_read else pack
        reader = FileReader(checkpoint.files, memory.largest_read_bytes, rounds)
        undo.callback(reader.close)
        executor = make_executor(shape, memory.device)
        undo.callback(executor.close)
        shared = None
        if plan.max_cache_tokens:
            shared = SharedMemory(Division.of(planner, plan), plan.fast_tier, context, memory.dtype)
        workspace = open_workspace(
            planner,
            plan.fast_tier.workspace_bytes,
            device,
            None if shared is None else shared.room,
        )
        weights = _load_dense(memory.dense, device, reader, asked.report)
        model_class = families()[config.family].model()
        if not config.is_adjusted:
            _adjust(model_class, weights)
        kv_cache = _kv_cache(context, memory.dtype, device, shared)
        # Beside a device the host's threads are its experts'.
        threads = executor if plan.gpu is None else InlineExecutor()
        experts: ExpertRuntime | NoExperts = NoExperts()
        moving = home = None
        if memory.experts is not None:
            lent = None if shared is None else shared.open_slots(shape)
            parts = ExpertParts(memory.experts, plan, kernels, reader, executor, lent)
            choice = PolicyChoice.of(options, plan.gpu is not None)
            cores = executor.cores_per_expert
            compute_s = measure_compute(memory.experts.layout, shape, kernels, cores)
            experts, home = load_experts(
                parts,
                device_opener(parts, asked.kernels, asked.device_options),
                partial(make_engine_policies, choice, plan, calibration, compute_s),
                asked.report,
            )
            plan = with_sizes(plan, choice, experts)
            moving = None if shared is None else MovingMemory(shared, experts, plan)
        undo.callback(experts.close)
        kernels_there = opened.kernels(device)
        recorder = _recorder(device, kernels_there, experts)
        compute = Compute(threads, kernels_there, workspace, device, recorder)
        model = model_class(config, weights, experts, kv_cache, compute)
        stored = None
        if files is not None:
            inputs = None if memory.experts is None else memory.experts.inputs
            digest = digest_of(
                *(checkpoint, config, memory.dtype, options.reuse, memory.formats, asked.formats),
                *(None if inputs is None else inputs.digest, memory.device, kernels.name),
                sorted(memory.rounded),
                [(each.window, each.storage[:3]) for each in context.kv_shape.windows],
            )
            stored = stored_sequences(files, digest, facts.folder, kv_cache, context.kv_shape)
        set_early_gate(experts, model.routers, calibration, memory.dtype)
        engine = Engine(
            plan=plan,
            facts=facts,
            options=options,
            planner=planner,
            faults=FaultSearch(
                checkpoint, facts.weight_map, memory.dense, memory.dtype, asked.report
            ),
            kernels=kernels,
            model=model,
            experts=experts,
            kv_cache=kv_cache,
            reader=reader,
            executor=executor,
            pass_plans=workspace.plans,
            moving=moving,
            home=home,
            stored=stored,
        )
        undo.pop_all()
    return with_trial(engine)


def _found(checkpoint: Checkpoint | None, folder: Path) -> Checkpoint:
    if checkpoint is None:
        raise CheckpointError(
            f"{folder} holds a config.json but no *.safetensors: the model can be planned, "
            "not loaded. Fetch its weights into this folder."
        )
    return checkpoint


def _check_machine(plan: MemoryPlan, host_memory: str | int) -> None:
    """Raise PlanError if this machine cannot hold the plan now."""
    if shortage := shortage_of(plan, host_memory):
        raise PlanError(shortage)
    if excess := excess_of(plan, host_memory):
        _log.warning("%s", excess)


def make_executor(shape: MoEShape, device: str) -> HostExecutor:
    """Make the threads on which a model's host computes."""
    experts_per_token = shape.num_experts_per_token or MAX_THREADS
    num_threads = None if device in OWN_DEVICES else KINDS[device].num_host_threads
    if num_threads is None:
        return HostExecutor(experts_per_token)
    return HostExecutor.of_threads(num_threads, experts_per_token)


def _load_dense(
    dense: DenseWeights, device: torch.device, reader: FileReader, report: Progress
) -> Weights:
    """Load all weights but the experts."""
    if device == HOST:
        return dense.load(reader, report)
    with plan_errors(dense.num_bytes, "GPU memory for dense weights"):
        return dense.load_onto(device, reader, report)


def _adjust(model_class: type[Decoder], weights: Weights) -> None:
    for name, weight in weights.items():
        if isinstance(weight, Tensor):
            model_class.adjust(name, weight)


def _dense_device(plan: MemoryPlan) -> torch.device:
    """Return the device of all weights but the experts."""
    return torch.device("cuda") if plan.device == "cuda" else HOST


def _recorder(
    device: torch.device, kernels: Kernels, experts: ExpertRuntime | NoExperts
) -> Recorder | None:
    """Return what captures passes of a GPU, if experts run without a look at their counts."""
    if device.type != "cuda" or kernels is REFERENCE:
        return None
    tier = experts.device
    if tier is not None and not (
        isinstance(tier.device, CudaDevice) and tier.device.needs_no_counts
    ):
        return None
    return Recorder(device)


def _kv_cache(
    context: ContextFacts,
    dtype: torch.dtype,
    device: torch.device,
    shared: SharedMemory | None,
) -> KVCache:
    shape, max_range_tokens = context.kv_shape, context.max_sequence_tokens
    if not context.keeps_keys:
        return TransientKV(shape, dtype)
    if shared is not None and shared.kv is not None:
        return shared.make_cache(shared.kv)
    layout = context.state_layout(dtype)
    state_bytes = 0 if layout is None else layout.num_bytes
    if device == HOST:  # what sequences do not need is the system's
        layouts = (KVLayout(each, dtype) for each in shape.storage)
        num_bytes = sum(each.address_bytes(SMALL_GROUP_BYTES) for each in layouts)
        budget = PageBudget(num_bytes + align_up(state_bytes, group_bytes(state_bytes)))
        pages = kv_pages_of(budget, shape, dtype, layout)
        states = paged_states(pages, layout)
        return cache_over(shape, pages.all_storage, pages, max_range_tokens, states=states)
    num_bytes = shape.num_elements * dtype.itemsize + state_bytes
    with plan_errors(num_bytes, "GPU memory for keys and values"):
        storage = [torch.zeros(each, dtype=dtype, device=device) for each in shape.storage]
        of_states = torch.zeros(state_bytes, dtype=torch.uint8, device=device)
    states = None if layout is None else StateStore(layout, of_states)
    return cache_over(shape, storage, max_range_tokens=max_range_tokens, states=states)
