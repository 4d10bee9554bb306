"""The plan of every byte of an open model, and the refusal of a budget that is too small.

No weight is read.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from lowtide.config import format_size, parse_size
from lowtide.devices.cuda import pinned_bytes
from lowtide.engine.opening.config import MAX_PASS_ROWS, EngineConfig
from lowtide.engine.opening.model import OpenModel
from lowtide.engine.planning.elastic_plan import elastic_tokens
from lowtide.engine.planning.prediction import predictor_of
from lowtide.engine.planning.registering import largest_counts, num_threads, planner_of, register
from lowtide.formats.plain import SAFETENSORS_NAME
from lowtide.hardware.memory import available_memory_bytes, resident_bytes, total_memory_bytes
from lowtide.kernels.int8_rows import product_bytes
from lowtide.kernels.library_cache import library_cache_bytes, limit_library_cache
from lowtide.kernels.stored import unpacking_bytes
from lowtide.memory.budget import Needs, spend
from lowtide.memory.cuda_streams import free_memory_bytes
from lowtide.plan import OWN_FORMAT, MemoryPlan
from lowtide.policies.presets import choose_preset, fetches_all
from lowtide.reading.file_reader import ring_bytes

OVERHEAD_ALLOWANCE_BYTES = 128 << 20
"""What the process may come to hold beyond what it holds after its imports and a warm-up: library
code paged in on first use, Python objects of running requests, the allocator's slack."""


def make_plan(opened: OpenModel) -> MemoryPlan:
    """Every byte the model will use. Raises PlanError when a budget is too small."""
    shape, device = opened.config.moe_shape, opened.device
    needs = _needs(opened)
    budget_bytes = _budget_bytes(opened, needs) if device == "cpu" else _gpu_bytes(opened, needs)
    tier, residents = spend(needs, budget_bytes, opened.context)
    fits = budget_bytes >= needs.full_bytes
    preset, reason = _preset(opened, fits, has_device=device != "cpu")
    plan = MemoryPlan(
        host=tier,
        context=opened.context,
        max_rows=opened.max_pass_rows,
        minimum_bytes=needs.minimum_bytes,
        full_bytes=needs.full_bytes,
        overhead_bytes=_outside_bytes(opened),
        num_experts=shape.num_layers * shape.num_experts,
        residents_per_layer=residents,
        policy=preset,
        reason="\n".join([reason, *_remarks(opened, fits)]),
        device=device,
        kv_cache=opened.cache_mode.value,
        cache=opened.reuse.value,
        advised_bytes=_advised_bytes(opened, needs),
        formats=opened.formats,
    )
    if device != "cpu":
        home_needs = _home_needs(opened)
        home, at_home = spend(home_needs, _budget_bytes(opened, home_needs), opened.context)
        plan = replace(
            plan,
            host=home,
            gpu=tier,
            host_residents_per_layer=at_home,
            advised_bytes=_advised_bytes(opened, home_needs),
        )
    predictor = predictor_of(opened, plan)
    prediction = None if predictor is None else predictor.prediction()
    return replace(plan, elastic_tokens=elastic_tokens(opened, plan), prediction=prediction)


def least_bytes(opened: OpenModel) -> int:
    """The least budget of the fast tier that runs one sequence as long as the context."""
    return _needs(opened).minimum_bytes


def offered_bytes(opened: OpenModel, plan: MemoryPlan) -> int:
    """Bytes of the fast tier that are on offer: the budget that was given, or all there are."""
    is_given = opened.options.host_memory != "auto" or plan.gpu is not None
    return plan.budget_bytes if is_given else max(plan.budget_bytes, _usable_bytes(opened))


def _remarks(opened: OpenModel, everything_fits: bool) -> list[str]:
    """Lines that follow the reason."""
    lines = [*_what_packing_saves(opened), *_where_keys_lie(opened)]
    if opened.options.elastic and everything_fits:
        owner = "sequence" if planner_of(opened) is None else "pass or a sequence"
        lines.append(f"Memory that a {owner} does not need goes back to the system.")
    return lines


def _what_packing_saves(opened: OpenModel) -> list[str]:
    """A line, where experts are read in more bytes than they are kept in."""
    if opened.config.experts is None or not opened.is_rounded_as_read:
        return []
    stored, kept = opened.weight_map.experts.largest_expert_bytes, opened.slot_layout.num_bytes
    if stored <= kept:
        return []
    is_packable = (opened.folder / "config.json").is_file()
    source = "" if is_packable else " of the model's safetensors"
    return [
        f"Weights are rounded as they are read, {format_size(stored)} for an expert; from a folder "
        f"that lowtide pack wrote{source} it would be {format_size(kept)}."
    ]


def _where_keys_lie(opened: OpenModel) -> list[str]:
    """A line, where `cache_dir` is given."""
    options = opened.options
    if options.cache_dir is None:
        return []
    if opened.stores_keys:
        return [f"Kept keys are also written to {options.cache_dir}, {options.cache_disk} at most."]
    why = "its policy may change words" if opened.changes_words else "no keys are kept"
    return [f"Nothing is written to {options.cache_dir}: {why}."]


def _preset(opened: OpenModel, everything_fits: bool, has_device: bool) -> tuple[str, str]:
    """The policy's name and why it is that."""
    if opened.config.experts is None:
        return "none", "the model has no experts: there is nothing to place"
    return choose_preset(
        opened.options.policy, everything_fits=everything_fits, has_device=has_device
    )


def shortage_of(plan: MemoryPlan, options: EngineConfig) -> str:
    """Why this machine cannot hold the plan now, or nothing; a budget that was given is the
    user's own word.
    """
    needed_bytes, available_bytes = plan.host.budget_bytes, available_memory_bytes()
    if options.host_memory != "auto" or needed_bytes <= available_bytes:
        return ""
    return (
        f"At least {format_size(needed_bytes)} of memory are needed, and "
        f"{format_size(available_bytes)} are available. Lower --context or free memory; a "
        "--host-memory that is given is taken at its word."
    )


def excess_of(plan: MemoryPlan, options: EngineConfig) -> str:
    """What is to be said of a host budget above the memory that there is, or nothing."""
    if options.host_memory == "auto":
        return ""
    total_bytes, available_bytes = total_memory_bytes(), available_memory_bytes()
    budget_bytes = parse_size(options.host_memory, total_bytes)
    if budget_bytes > total_bytes:
        return (
            f"host_memory {format_size(budget_bytes)} is more than there is: this machine has "
            f"{format_size(total_bytes)}. Anything beyond that will be swapped, or the process "
            "will be killed. Choose auto, or a share such as 80%."
        )
    if plan.host.used_bytes > available_bytes:
        return (
            f"The plan takes {format_size(plan.host.used_bytes)} of memory, and "
            f"{format_size(available_bytes)} are free now. Anything beyond that will be "
            "swapped, or the process will be killed. Choose auto, or free memory."
        )
    return ""


def _needs(opened: OpenModel) -> Needs:
    """Those of the tier that computes: of a device all but what its experts need at home."""
    shape, is_device = opened.config.moe_shape, opened.device != "cpu"
    least_bytes, whole_bytes = workspace_bytes(opened)
    needs = Needs(
        dense_bytes=opened.dense.num_bytes,
        kv_cache_bytes=opened.kv_cache_bytes,
        workspace_bytes=least_bytes,
        whole_workspace_bytes=whole_bytes,
        ring_bytes=0 if is_device else ring_bytes(opened.largest_read_bytes),
        slot_bytes=0,
        num_layers=shape.num_layers,
        num_experts=shape.num_experts,
        is_device=is_device,
        fetches_all=is_device and fetches_all(opened.options.policy),
    )
    if opened.config.experts is None:
        return needs
    layout = opened.slot_layout
    return replace(needs, slot_bytes=layout.num_bytes, unused_slot_bytes=layout.num_unused_bytes)


def _home_needs(opened: OpenModel) -> Needs:
    """The host's experts, the scratch they compute in, and the ring they are read through."""
    scratch_bytes = 0
    if opened.config.experts is not None:
        scratch_bytes = opened.host_scratch_bytes
        if opened.device == "cuda":
            shape, layout = opened.config.moe_shape, opened.slot_layout
            scratch_bytes += pinned_bytes(shape, layout, MAX_PASS_ROWS)
    return replace(
        _needs(opened),
        dense_bytes=0,
        kv_cache_bytes=0,
        workspace_bytes=scratch_bytes,
        whole_workspace_bytes=scratch_bytes,
        ring_bytes=ring_bytes(opened.largest_read_bytes),
        is_device=False,
    )


def _outside_bytes(opened: OpenModel) -> int:
    """What the process holds outside the budget."""
    num_bytes = _overhead_bytes() + library_cache_bytes(opened.dtype) + _unpacking_bytes(opened)
    return num_bytes + (0 if opened.inputs is None else opened.inputs.nbytes)


def _unpacking_bytes(opened: OpenModel) -> int:
    """That threads multiply by weights of other formats in, a tile at a time."""
    shapes = [opened.weight_map.dense[name].shape for name in opened.dense_formats]
    if opened.config.experts is not None and not opened.slot_layout.is_plain:
        shapes += [part.shape for part in opened.slot_layout.largest.parts[:3]]
    names, rounded = opened.formats.names - {OWN_FORMAT}, opened.rounded
    takes = [product_bytes] * bool(names & rounded) + [unpacking_bytes] * bool(names - rounded)
    return num_threads(opened) * max((take(s) for take in takes for s in shapes), default=0)


def workspace_bytes(opened: OpenModel) -> tuple[int, int]:
    """Workspace of the largest pass with its operators divided as far as possible, and whole."""
    planner = planner_of(opened)
    if planner is None:
        return (needed_bytes := register(opened).graph.needed_bytes), needed_bytes
    counts = largest_counts(opened)
    return planner.least_bytes(counts), planner.whole_bytes(counts)


def _gpu_bytes(opened: OpenModel, needs: Needs) -> int:
    """The device's budget. Any but a GPU has as much as is asked for."""
    gpu_memory, free_bytes = opened.options.gpu_memory, total_memory_bytes()
    if opened.device == "cuda":
        free_bytes = free_memory_bytes()
        needed = needs.whole_bytes
        if gpu_memory == "auto":  # a tenth is left to the driver, libraries and others
            return max(needs.minimum_bytes, min(free_bytes * 9 // 10, needed))
    elif gpu_memory == "auto":
        return needs.whole_bytes
    return parse_size(gpu_memory, free_bytes)


def _budget_bytes(opened: OpenModel, needs: Needs) -> int:
    host_memory = opened.options.host_memory
    if host_memory != "auto":
        return parse_size(host_memory, total_memory_bytes())
    return max(needs.minimum_bytes, min(_usable_bytes(opened), needs.whole_bytes))


def _advised_bytes(opened: OpenModel, needs: Needs) -> int:
    """Host memory for everything, or all that is usable; 0 where even that is too little."""
    usable_bytes = min(_usable_bytes(opened), needs.whole_bytes)
    return usable_bytes if usable_bytes >= needs.minimum_bytes else 0


def _usable_bytes(opened: OpenModel) -> int:
    """Bytes of memory usable now: a tenth is left to other processes and to the page cache."""
    usable = available_memory_bytes() * 9 // 10 - OVERHEAD_ALLOWANCE_BYTES
    return usable - library_cache_bytes(opened.dtype)


@functools.cache
def _overhead_bytes() -> int:
    """What this process holds outside the budget, after one product of each compute type."""
    limit_library_cache()
    for name in SAFETENSORS_NAME:
        matrix = torch.ones(64, 64, dtype=getattr(torch, name))
        torch.mm(matrix, matrix)
    return resident_bytes() + OVERHEAD_ALLOWANCE_BYTES
