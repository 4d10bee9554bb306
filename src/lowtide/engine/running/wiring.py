"""Loading: makes what a model runs on as the plan says, and wires it together; `experts.py` does so
for its experts. Knows nothing of prompts.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack

import torch

from lowtide.compute import Compute
from lowtide.devices.kind import KINDS, OWN_DEVICES
from lowtide.engine.opening.model import OpenModel
from lowtide.engine.opening.model_calibration import find_calibration
from lowtide.engine.planning.elastic_plan import SMALL_GROUP_BYTES
from lowtide.engine.planning.plan import excess_of, shortage_of
from lowtide.engine.running.elastic import ElasticMemory, SharedMemory, kv_pages
from lowtide.engine.running.engine import Engine
from lowtide.engine.running.experts import load_experts
from lowtide.engine.running.key_store import open_files, stored_sequences
from lowtide.engine.running.pass_room import open_workspace
from lowtide.engine.running.policy_setting import set_early_gate, with_trial
from lowtide.errors import CheckpointError, PlanError
from lowtide.experts.none import NoExperts
from lowtide.experts.runtime import ExpertRuntime
from lowtide.families import families
from lowtide.formats.convert import Pack, pack
from lowtide.kernels.choice import HOST, choose_pack
from lowtide.memory.arena import Arena
from lowtide.memory.cuda_streams import plan_errors
from lowtide.memory.kv_cache import KVCache
from lowtide.memory.kv_pages import KVLayout
from lowtide.memory.pages import PageBudget
from lowtide.memory.transient_kv import TransientKV
from lowtide.model_folder.checkpoint import Checkpoint
from lowtide.models.decoder import Weights
from lowtide.plan import MemoryPlan
from lowtide.reading.file_reader import FileReader
from lowtide.reading.finite_weights import check_finite
from lowtide.threads.executor import MAX_THREADS, HostExecutor, InlineExecutor, spare_forked_threads

_log = logging.getLogger(__name__)


def load(opened: OpenModel, plan: MemoryPlan) -> Engine:
    """Reads the weights that the plan has room for.

    Raises CheckpointError for a folder without weights.
    """
    spare_forked_threads()
    config, device = opened.config, _dense_device(plan)
    checkpoint = _checked(opened, plan)
    with ExitStack() as undo:
        files = open_files(opened, undo)
        reader = FileReader(checkpoint.files, opened.largest_read_bytes, _pack(opened))
        undo.callback(reader.close)
        executor = make_executor(opened)
        undo.callback(executor.close)
        shared = SharedMemory(opened, plan) if plan.elastic_tokens else None
        room = None if shared is None else shared.room
        workspace = open_workspace(opened, plan, device, room)
        weights, kv_cache = _load_dense(opened, device, reader), _kv_cache(opened, shared, device)
        # Beside a device the host's threads are its experts'.
        threads = executor if plan.gpu is None else InlineExecutor()
        compute = Compute(threads, opened.kernels_on(device), workspace, device)
        calibration = find_calibration(opened)
        experts: ExpertRuntime | NoExperts = NoExperts()
        elastic = None
        if config.experts is not None:
            experts = load_experts(opened, plan, calibration, reader, executor, shared)
            elastic = None if shared is None else ElasticMemory(shared, experts, plan)
        undo.callback(experts.close)
        model_class = families()[config.family].model()
        model = model_class(config, weights, experts, kv_cache, compute)
        stored = None if files is None else stored_sequences(opened, checkpoint, files, kv_cache)
        set_early_gate(opened, experts, model.routers, calibration)
        plans = workspace.plans
        engine = Engine(
            plan, opened, model, experts, kv_cache, reader, executor, plans, elastic, stored
        )
        undo.pop_all()
    return with_trial(engine)


def _checked(opened: OpenModel, plan: MemoryPlan) -> Checkpoint:
    """What is to be loaded, where this machine can hold it."""
    options, checkpoint = opened.options, opened.checkpoint
    if checkpoint is None:
        raise CheckpointError(
            f"{opened.folder} holds a config.json but no *.safetensors: the model can be planned, "
            "not loaded. Fetch its weights into this folder."
        )
    if shortage := shortage_of(plan, options):
        raise PlanError(shortage)
    if excess := excess_of(plan, options):
        _log.warning("%s", excess)
    if options.check_weights:
        check_finite(checkpoint, options.report)
    return checkpoint


def _pack(opened: OpenModel) -> Pack:
    """What makes weights into formats that they are not stored in."""
    return choose_pack(opened.options.kernels) if opened.is_rounded_as_read else pack


def make_executor(opened: OpenModel) -> HostExecutor:
    """The threads that a model's host computes on."""
    experts = opened.config.experts
    if experts is None:
        return HostExecutor(MAX_THREADS)
    num_threads = None
    if opened.device not in OWN_DEVICES:
        num_threads = KINDS[opened.device].num_host_threads
    if num_threads is None:
        return HostExecutor(experts.num_experts_per_token)
    return HostExecutor.of_threads(num_threads, experts.num_experts_per_token)


def _load_dense(opened: OpenModel, device: torch.device, reader: FileReader) -> Weights:
    """What the model has beside its experts."""
    if device == HOST:
        return opened.dense.load(reader, opened.options.report)
    with plan_errors(opened.dense.num_bytes, "GPU memory for dense weights"):
        return opened.dense.load_onto(device, reader, opened.options.report)


def _dense_device(plan: MemoryPlan) -> torch.device:
    """Where all but the experts is."""
    return torch.device("cuda") if plan.device == "cuda" else HOST


def _kv_cache(opened: OpenModel, shared: SharedMemory | None, device: torch.device) -> KVCache:
    if not opened.keeps_keys:
        return TransientKV(opened.kv_shape, opened.dtype)
    if shared is not None and shared.kv is not None:
        return shared.make_cache(shared.kv)
    if device == HOST and opened.options.elastic:  # what sequences do not need is the system's
        layout = KVLayout(opened.kv_shape, opened.dtype)
        pages = kv_pages(PageBudget(layout.address_bytes(SMALL_GROUP_BYTES)), layout)
        return KVCache(pages.storage, pages, opened.max_sequence_tokens)
    if device == HOST:
        arena = Arena(opened.kv_cache_bytes, grows_slowly=True)
        storage = arena.tensor(0, opened.kv_shape, opened.dtype)
    else:
        with plan_errors(opened.kv_cache_bytes, "GPU memory for keys and values"):
            storage = torch.zeros(opened.kv_shape, dtype=opened.dtype, device=device)
    return KVCache(storage, max_range_tokens=opened.max_sequence_tokens)
