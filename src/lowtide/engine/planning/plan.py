"""Plans every byte of an open model, and refuses a budget that is too small.

No weight is read.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import torch

from lowtide.config import format_size, parse_size
from lowtide.core import ALIGNMENT
from lowtide.devices.cuda import pinned_bytes
from lowtide.engine.opening.config import MAX_PASS_ROWS
from lowtide.engine.opening.facts import MemoryFacts, RunOptions
from lowtide.engine.opening.model import OpenModel
from lowtide.engine.planning.budget_division import max_cache_tokens
from lowtide.engine.planning.planner import Planner, num_threads
from lowtide.engine.planning.prediction import predictor_of
from lowtide.formats.plain import SAFETENSORS_NAME
from lowtide.hardware.memory import available_memory_bytes, resident_bytes, total_memory_bytes
from lowtide.kernels.int8_rows import product_bytes
from lowtide.kernels.library_cache import library_cache_bytes, limit_library_cache
from lowtide.kernels.stored import unpacking_bytes
from lowtide.memory.budget import Needs, spend
from lowtide.memory.cuda_streams import free_memory_bytes
from lowtide.memory.states import HALVES
from lowtide.plan import OWN_FORMAT, MemoryPlan
from lowtide.policies.presets import choose_preset, fetches_all, sizes_of
from lowtide.reading.file_reader import ring_bytes
from lowtide.schemas import WeightMap

OVERHEAD_ALLOWANCE_BYTES = 128 << 20
"""Memory that the process may use beyond its imports and a warm-up: library code paged in on first
use, Python objects of running requests, the allocator's slack."""

PROMPT_SHARE = 16
"""Rows of a long prompt take at most one part in this many of the memory of resident experts."""

_NOTABLE_BYTES = 1 << 20


def make_plan(opened: OpenModel, planner: Planner | None = None) -> MemoryPlan:
    """Plan every byte that the model will use. Raise PlanError if a budget is too small.

    planner: counts the passes; loading with the same planner does not count them again.
    """
    facts, memory, options = opened
    asked = options.asked
    planner = planner or Planner.of(facts.config, memory, asked)
    context, is_host = memory.context, memory.device == "cpu"
    needs = _needs(planner, asked.policy)
    if is_host:
        budget_bytes = _budget_bytes(needs, asked.host_memory, memory.dtype)
    else:
        budget_bytes = _device_bytes(needs, asked.gpu_memory, memory.device)
    joining = _joining(planner, needs, budget_bytes)
    of_passes = needs
    if joining.max_chunks > 1:
        of_passes = replace(needs, workspace_bytes=joining.workspace_bytes()[0])
    tier, residents = spend(of_passes, budget_bytes, context.num_tokens)
    states = context.state_layout(memory.dtype)
    fits, sizes = budget_bytes >= needs.full_bytes, ""
    if memory.experts is None:
        preset, reason = "none", "the model has no experts: there is nothing to place"
    else:
        missing_bytes = needs.full_bytes - budget_bytes
        preset, reason = choose_preset(asked.policy, missing_bytes, has_device=not is_host)
        if not fits:
            asked_for = asked.policy, asked.policy_options
            sizes = sizes_of(preset, *asked_for, needs.num_experts, has_device=not is_host)
    remarks = [
        *_what_is_not_loaded(facts.weight_map),
        *_what_packing_saves(facts.folder, memory),
        *_where_keys_lie(options),
        *_what_windows_keep(memory),
        *_what_states_take(memory),
        *_what_prompts_read(joining),
    ]
    plan = MemoryPlan(
        host=tier,
        context=context.num_tokens,
        max_rows=context.max_pass_rows,
        minimum_bytes=needs.minimum_bytes,
        full_bytes=needs.full_bytes,
        overhead_bytes=_outside_bytes(memory),
        num_experts=needs.num_layers * needs.num_experts,
        residents_per_layer=residents,
        policy=preset,
        reason="\n".join([reason, *remarks]),
        device=memory.device,
        kv_cache=asked.cache_mode.value,
        cache=options.reuse.value,
        advised_bytes=_advised_bytes(needs, memory.dtype),
        formats=memory.formats,
        snapshot_bytes=0 if states is None else states.slot_bytes,
        policy_sizes=sizes,
        prompt_chunks=joining.max_chunks,
    )
    if not is_host:
        home_needs = _home_needs(needs, memory)
        home_bytes = _budget_bytes(home_needs, asked.host_memory, memory.dtype)
        home, at_home = spend(home_needs, home_bytes, context.num_tokens)
        plan = replace(
            plan,
            host=home,
            gpu=tier,
            host_residents_per_layer=at_home,
            advised_bytes=_advised_bytes(home_needs, memory.dtype),
        )
    plan = replace(plan, max_cache_tokens=max_cache_tokens(planner, plan))
    predictor = predictor_of(opened.speed_facts, plan)
    return plan if predictor is None else replace(plan, prediction=predictor.prediction())


def _joining(planner: Planner, needs: Needs, budget_bytes: int) -> Planner:
    """Return the planner of passes with as many chunks of a prompt as the budget allows.

    Their rows take memory from residents, up to a share of them. There are at most as many chunks
    as layers: between two layers, where a pass can be ended, lies then no more than a chunk.
    """
    memory, config = planner.memory, planner.config
    reads = memory.device == "cpu" and needs.minimum_bytes < budget_bytes < needs.full_bytes
    row_bytes = config.hidden_size * memory.dtype.itemsize
    # Windows slide before a pass, for all layers at once; kernels want aligned rows.
    is_plain = not memory.context.kv_shape.windows and row_bytes % ALIGNMENT == 0
    if not (reads and is_plain and config.decoding.writes_in_order) or any(planner.wants):
        return planner
    spare_bytes = (budget_bytes - needs.minimum_bytes) // PROMPT_SHARE
    # Hidden states and experts' inputs, float32 sums, and what sorting takes.
    chunk_row_bytes = 2 * row_bytes + 4 * config.hidden_size
    chunk_row_bytes += 64 * config.moe_shape.num_experts_per_token
    most = min(config.num_layers, -(-memory.context.max_sequence_tokens // MAX_PASS_ROWS))
    most = min(most, 1 + spare_bytes // (MAX_PASS_ROWS * chunk_row_bytes))
    for num_chunks in range(most, 1, -1):
        joining = planner.joining(num_chunks)
        if joining.workspace_bytes()[0] - needs.workspace_bytes <= spare_bytes:
            return joining
    return planner


def _what_prompts_read(planner: Planner) -> list[str]:
    """Return a line about long prompts, if several of their chunks share reads."""
    if planner.max_chunks == 1:
        return []
    return [
        f"A long prompt reads absent experts once for {planner.max_chunks * MAX_PASS_ROWS} tokens."
    ]


def least_bytes(planner: Planner, policy: str) -> int:
    """Return the least budget of the fast tier for one sequence as long as the context."""
    return _needs(planner, policy).minimum_bytes


def offered_bytes(plan: MemoryPlan, host_memory: str | int, dtype: torch.dtype) -> int:
    """Return the fast tier's budget as given, or all available memory."""
    is_given = host_memory != "auto" or plan.gpu is not None
    return plan.budget_bytes if is_given else max(plan.budget_bytes, _usable_bytes(dtype))


def _what_is_not_loaded(weight_map: WeightMap) -> list[str]:
    """Return a line about tensors that are passed over, if they take notable room on disk."""
    if weight_map.unloaded_bytes < _NOTABLE_BYTES:
        return []
    return [
        f"{format_size(weight_map.unloaded_bytes)} of the files are not loaded: layers that "
        "predict further tokens, or other parts that lowtide does not compute."
    ]


def _what_packing_saves(folder: Path, memory: MemoryFacts) -> list[str]:
    """Return a line of advice if experts take more bytes to read than in memory."""
    if memory.experts is None or not memory.is_rounded_as_read:
        return []
    stored, kept = memory.experts.table.largest_expert_bytes, memory.experts.layout.num_bytes
    if stored <= kept:
        return []
    source = "" if (folder / "config.json").is_file() else " of the model's safetensors"
    return [
        f"Weights are rounded as they are read, {format_size(stored)} for an expert; from a folder "
        f"that lowtide pack wrote{source} it would be {format_size(kept)}."
    ]


def _where_keys_lie(options: RunOptions) -> list[str]:
    """Return a line naming `cache_dir`, if it is given."""
    asked = options.asked
    if asked.cache_dir is None:
        return []
    if options.keys_folder is not None:
        return [f"Kept keys are also written to {asked.cache_dir}, {asked.cache_disk} at most."]
    why = "its policy may change words" if options.changes_words else "no keys are kept"
    return [f"Nothing is written to {asked.cache_dir}: {why}."]


def _what_windows_keep(memory: MemoryFacts) -> list[str]:
    """Return a line for each kind of layers that keep the last tokens alone."""
    return [
        f"Layers with a window of {each.window} tokens keep a sequence's last {each.cap}, and have "
        f"room for {each.storage.num_tokens} in all. A turn that begins in front of them may "
        "be computed again."
        for each in memory.context.kv_shape.windows
    ]


def _what_states_take(memory: MemoryFacts) -> list[str]:
    """Return a line about the room that sequences' states have, if there are any."""
    layout = memory.context.state_layout(memory.dtype)
    if layout is None:
        return []
    slot_bytes, num_together = layout.slot_bytes, layout.num_slots // HALVES
    return [
        f"A running sequence has states of {format_size(HALVES * slot_bytes)}, a snapshot "
        f"{format_size(slot_bytes)}: {num_together} sequences run at once, with as much room for "
        "snapshots as they leave. A longer context has room for more."
    ]


def shortage_of(plan: MemoryPlan, host_memory: str | int) -> str:
    """Explain why this machine cannot hold the plan now; "" if it can.

    A budget given by the user is not questioned.
    """
    needed_bytes, available_bytes = plan.host.budget_bytes, available_memory_bytes()
    if host_memory != "auto" or needed_bytes <= available_bytes:
        return ""
    return (
        f"At least {format_size(needed_bytes)} of memory are needed, and "
        f"{format_size(available_bytes)} are available. Lower `context` or free memory; a "
        "`host_memory` that is given is taken at its word."
    )


def excess_of(plan: MemoryPlan, host_memory: str | int) -> str:
    """Return a warning about a host budget above this machine's memory, or ""."""
    if host_memory == "auto":
        return ""
    total_bytes, available_bytes = total_memory_bytes(), available_memory_bytes()
    budget_bytes = parse_size(host_memory, total_bytes)
    if budget_bytes > total_bytes:
        return (
            f"`host_memory` {format_size(budget_bytes)} is more than there is: this machine has "
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


def _needs(planner: Planner, policy: str) -> Needs:
    """Return the needs of the computing tier: for a device, everything but experts at home."""
    memory, is_device = planner.memory, planner.memory.device != "cpu"
    least_bytes, whole_bytes = planner.workspace_bytes()
    shape = planner.config.moe_shape
    needs = Needs(
        dense_bytes=memory.dense.num_bytes,
        kv_cache_bytes=memory.kv_cache_bytes,
        state_bytes=memory.state_bytes,
        workspace_bytes=least_bytes,
        whole_workspace_bytes=whole_bytes,
        ring_bytes=0 if is_device else ring_bytes(memory.largest_read_bytes),
        slot_bytes=0,
        num_layers=shape.num_layers,
        num_experts=shape.num_experts,
        is_device=is_device,
        fetches_all=is_device and fetches_all(policy),
    )
    if memory.experts is None:
        return needs
    layout = memory.experts.layout
    return replace(needs, slot_bytes=layout.num_bytes, unused_slot_bytes=layout.num_unused_bytes)


def _home_needs(needs: Needs, memory: MemoryFacts) -> Needs:
    """Return the host's needs beside a device: experts, their scratch and the read ring.

    needs: the device's.
    """
    scratch_bytes, experts = 0, memory.experts
    if experts is not None:
        scratch_bytes = experts.scratch_bytes
        if memory.device == "cuda":
            scratch_bytes += pinned_bytes(experts.shape, experts.layout, MAX_PASS_ROWS)
    return replace(
        needs,
        dense_bytes=0,
        kv_cache_bytes=0,
        state_bytes=0,
        workspace_bytes=scratch_bytes,
        whole_workspace_bytes=scratch_bytes,
        ring_bytes=ring_bytes(memory.largest_read_bytes),
        is_device=False,
    )


def _outside_bytes(memory: MemoryFacts) -> int:
    """Return the process' memory outside the budget."""
    inputs = None if memory.experts is None else memory.experts.inputs
    num_bytes = _overhead_bytes() + library_cache_bytes(memory.dtype) + _unpacking_bytes(memory)
    return num_bytes + (0 if inputs is None else inputs.nbytes)


def _unpacking_bytes(memory: MemoryFacts) -> int:
    """Return the bytes in which threads unpack a tile of weights before multiplying."""
    shapes, experts_per_token = [memory.dense.shape(name) for name in memory.dense_formats], 0
    if memory.experts is not None:
        experts_per_token = memory.experts.shape.num_experts_per_token
        if not memory.experts.layout.is_plain:
            shapes += [part.shape for part in memory.experts.layout.largest.parts[:3]]
    names, rounded = memory.formats.names - {OWN_FORMAT}, memory.rounded
    takes = [product_bytes] * bool(names & rounded) + [unpacking_bytes] * bool(names - rounded)
    most_bytes = max((take(s) for take in takes for s in shapes), default=0)
    return num_threads(memory.device, experts_per_token) * most_bytes


def _device_bytes(needs: Needs, gpu_memory: str | int, device: str) -> int:
    """Return the device's budget; a device that is not a GPU has as much as requested."""
    free_bytes = free_memory_bytes() if device == "cuda" else total_memory_bytes()
    if gpu_memory != "auto":
        return parse_size(gpu_memory, free_bytes)
    if device == "cuda":  # a tenth is left to the driver, libraries and others
        return max(needs.minimum_bytes, min(free_bytes * 9 // 10, needs.whole_bytes))
    return needs.whole_bytes


def _budget_bytes(needs: Needs, host_memory: str | int, dtype: torch.dtype) -> int:
    if host_memory != "auto":
        return parse_size(host_memory, total_memory_bytes())
    return max(needs.minimum_bytes, min(_usable_bytes(dtype), needs.whole_bytes))


def _advised_bytes(needs: Needs, dtype: torch.dtype) -> int:
    """Return host memory for everything, or all that is usable; 0 if that is too little."""
    usable_bytes = min(_usable_bytes(dtype), needs.whole_bytes)
    return usable_bytes if usable_bytes >= needs.minimum_bytes else 0


def _usable_bytes(dtype: torch.dtype) -> int:
    """Return the bytes usable now; a tenth is left for other processes and the page cache."""
    usable = available_memory_bytes() * 9 // 10 - OVERHEAD_ALLOWANCE_BYTES
    return usable - library_cache_bytes(dtype)


@functools.cache
def _overhead_bytes() -> int:
    """Return the process' memory after one product of each compute type."""
    limit_library_cache()
    for name in SAFETENSORS_NAME:
        matrix = torch.ones(64, 64, dtype=getattr(torch, name))
        torch.mm(matrix, matrix)
    return resident_bytes() + OVERHEAD_ALLOWANCE_BYTES
