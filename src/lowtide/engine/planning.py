"""The plan of every byte of an open model, and the refusal of a budget that is too small.

Runs the model's own forward pass in register mode; no weight is read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

import torch

from lowtide.compute import Compute
from lowtide.config import format_size, parse_size
from lowtide.core import CacheMode, MemoryPlan, Step, StepKind
from lowtide.decode.block_diffusion import LOGIT_ROWS
from lowtide.decode.row_reading import HeadForm
from lowtide.devices.cuda import pinned_bytes
from lowtide.engine.device import (
    ExpertSource,
    resolve_device,
)
from lowtide.engine.elastic import elastic_tokens
from lowtide.engine.opening import MAX_PASS_ROWS, EngineConfig, OpenModel
from lowtide.experts.registrar import ExpertRegistrar
from lowtide.families import families
from lowtide.formats.plain import SAFETENSORS_NAME
from lowtide.hardware import available_memory_bytes, resident_bytes, total_memory_bytes
from lowtide.hardware.measure import layer_dense_bytes
from lowtide.kernels.library_cache import library_cache_bytes, limit_library_cache
from lowtide.kernels.reference import REFERENCE
from lowtide.kernels.row_statistics import Guidance, Wanted
from lowtide.layers.attention import CAUSAL_ROWS, QUERY_ROWS
from lowtide.layers.batch import Batch, KVRange, Segment
from lowtide.memory.budget import DeviceNeeds, Needs, spend
from lowtide.memory.chunking import MAX_REMAINDER, TILE_ROWS, Counts, longest_chunk
from lowtide.memory.cuda_streams import free_memory_bytes
from lowtide.memory.kv_cache import KVCache
from lowtide.memory.pass_planner import PassPlanner
from lowtide.memory.template import Sample, Template
from lowtide.memory.workspace import Registrar
from lowtide.policies.presets import asks_scores, choose_preset, fetches_all, substitutes
from lowtide.reading.file_reader import ring_bytes
from lowtide.threads.executor import InlineExecutor

OVERHEAD_ALLOWANCE_BYTES = 128 << 20
"""What the process may come to hold beyond what it holds after its imports and a warm-up: library
code paged in on first use, Python objects of running requests, the allocator's slack."""


def make_plan(opened: OpenModel) -> MemoryPlan:
    """Every byte the model will use. Raises PlanError when a budget is too small."""
    shape, device = opened.config.moe_shape, resolve_device(opened.options.device)
    needs = _needs(opened) if device == "cpu" else _device_needs(opened)
    overhead_bytes = _overhead_bytes() + library_cache_bytes(opened.dtype)
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
        overhead_bytes=overhead_bytes,
        num_experts=shape.num_layers * shape.num_experts,
        residents_per_layer=residents,
        policy=preset,
        reason=reason,
        device=device,
        kv_cache=opened.cache_mode.value,
    )
    if device == "cpu":
        return replace(plan, elastic_tokens=elastic_tokens(opened, plan))
    home_needs = _home_needs(opened)
    home, at_home = spend(home_needs, _budget_bytes(opened, home_needs), opened.context)
    plan = replace(plan, host=home, gpu=tier, host_residents_per_layer=at_home)
    return replace(plan, elastic_tokens=elastic_tokens(opened, plan))


def _preset(opened: OpenModel, everything_fits: bool, has_device: bool) -> tuple[str, str]:
    """The policy's name and why it is that."""
    if opened.config.experts is None:
        return "none", "the model has no experts: there is nothing to place"
    return choose_preset(
        opened.options.policy, everything_fits=everything_fits, has_device=has_device
    )


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


def excess_of(options: EngineConfig) -> str:
    """What is to be said of a host budget above all memory that there is, or nothing."""
    if options.host_memory == "auto":
        return ""
    total_bytes = total_memory_bytes()
    budget_bytes = parse_size(options.host_memory, total_bytes)
    if budget_bytes <= total_bytes:
        return ""
    return (
        f"host_memory {format_size(budget_bytes)} is more than there is: this machine has "
        f"{format_size(total_bytes)}, and what does not fit into that is swapped out or ends the "
        "process. Choose auto, or a share such as 80%."
    )


def _needs(opened: OpenModel) -> Needs:
    shape = opened.config.moe_shape
    needs = Needs(
        dense_bytes=opened.dense.num_bytes,
        kv_cache_bytes=math.prod(opened.kv_shape) * opened.dtype.itemsize,
        workspace_bytes=register(opened).graph.peak_bytes,
        ring_bytes=ring_bytes(opened.largest_read_bytes),
        slot_bytes=0,
        num_layers=shape.num_layers,
        num_experts=shape.num_experts,
    )
    if opened.config.experts is None:
        return needs
    layout = opened.slot_layout
    return replace(needs, slot_bytes=layout.num_bytes, unused_slot_bytes=layout.num_unused_bytes)


def _device_needs(opened: OpenModel) -> DeviceNeeds:
    """The model but for what its experts need at home."""
    needs = _needs(opened)
    parts = {field.name: getattr(needs, field.name) for field in fields(needs)}
    has_to_fetch = fetches_all(opened.options.policy)
    return DeviceNeeds(**{**parts, "ring_bytes": 0, "fetches_all": has_to_fetch})


def _home_needs(opened: OpenModel) -> Needs:
    """The host's experts, the scratch they compute in, and the ring they are read through."""
    scratch_bytes = 0
    if opened.config.experts is not None:
        source = expert_source(opened)
        scratch_bytes = source.scratch_bytes
        if resolve_device(opened.options.device) == "cuda":
            scratch_bytes += pinned_bytes(source.shape, source.layout, source.max_rows)
    return replace(_needs(opened), dense_bytes=0, kv_cache_bytes=0, workspace_bytes=scratch_bytes)


def expert_source(opened: OpenModel) -> ExpertSource:
    config = opened.config
    return ExpertSource(
        shape=config.moe_shape,
        table=opened.weight_map.experts,
        layout=opened.slot_layout,
        layer_bytes=layer_dense_bytes(
            opened.weight_map.dense, config.moe_layers[-1], opened.dtype.itemsize
        ),
        max_rows=MAX_PASS_ROWS,  # of a longer pass they run a tile at a time
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


@functools.cache
def _overhead_bytes() -> int:
    """What this process holds outside the budget, after one product of each compute type."""
    limit_library_cache()
    for name in SAFETENSORS_NAME:
        matrix = torch.ones(64, 64, dtype=getattr(torch, name))
        torch.mm(matrix, matrix)
    return resident_bytes() + OVERHEAD_ALLOWANCE_BYTES


def register(opened: OpenModel, num_rows: int | None = None) -> Registrar:
    """What forward passes of up to so many rows take: counted once and remembered.

    num_rows: by default those of the largest pass. Runs one on the meta device: the same code,
    nothing computed. Layers give back what they take, so those up to the first with experts stand
    for all. Of more than `MAX_PASS_ROWS` rows it is bidirectional, over one whole sequence.
    """
    policy, num_rows = opened.options.policy, num_rows or opened.max_pass_rows
    key = (num_rows, substitutes(policy), asks_scores(policy, opened.options.policy_options))
    if key not in opened.passes:
        opened.passes[key] = registrar = Registrar()
        _run_forward(opened, registrar, _largest_segments(opened, num_rows), LOGIT_ROWS + 15)
    return opened.passes[key]


def plan_long_passes(opened: OpenModel) -> PassPlanner:
    """Plans bidirectional passes of more than `MAX_PASS_ROWS` rows, by what is free for them."""
    template = Template.fit([_sample(opened, *sample) for sample in _SAMPLES])
    # Beside a device the host has room for one tile of its experts' rows.
    is_divided = resolve_device(opened.options.device) != "cpu"
    return PassPlanner(template, frozenset({"experts"} if is_divided else ()))


# Tokens, keys, rows of logits; chunks. Together they tell apart all that sizes depend on, tiles
# with remainders included; the last ones check.
_SAMPLES: tuple[tuple[Counts, Mapping[str, int]], ...] = (
    (Counts(3072, 3072, 256), {}),
    (Counts(4608, 4608, 256), {}),
    (Counts(3072, 3600, 256), {}),
    (Counts(3080, 3080, 256), {}),  # a remainder after tiles of 512 and of 768
    (Counts(2568, 2568, 256), {}),  # of 512 alone
    (Counts(3072, 3072, 256), {"mlp": 2}),
    (Counts(3072, 3072, 256), {"experts": 2}),
    (Counts(3072, 3072, 256), {"attention": 2}),
    (Counts(3072, 3072, 256), {"logits": 2}),
    (Counts(3850, 4000, 330), {"mlp": 1, "experts": 3, "attention": 1, "logits": 1}),
    (Counts(2600, 2600, 90), {"mlp": 3, "experts": 1, "attention": 2, "logits": 1}),
)


def _sample(opened: OpenModel, counts: Counts, chunks: Mapping[str, int]) -> Sample:
    num_rows, num_keys, num_logits = counts
    kv = KVRange(0, num_keys)
    segment = Segment(0, num_rows, num_keys - num_rows, num_keys, kv)
    registrar = Registrar(chunks)
    _run_forward(opened, registrar, [segment], longest_chunk(counts, "logits", chunks))
    return Sample(counts, chunks, registrar.graph)


def _run_forward(
    opened: OpenModel, registrar: Registrar, segments: Sequence[Segment], num_logits: int
) -> None:
    """Runs a pass for each segment, and some logits after it, on the meta device."""
    config = replace(opened.config, num_layers=opened.config.num_leading_layers)
    kv_shape = list(opened.kv_shape)
    kv_shape[3] = segments[0].kv.capacity
    kv_cache = KVCache(torch.empty(kv_shape, dtype=opened.dtype, device="meta"))
    policy = opened.options.policy
    has_scores = asks_scores(policy, opened.options.policy_options)
    experts = ExpertRegistrar(config.moe_shape, substitutes(policy), has_scores)
    compute = Compute(InlineExecutor(), REFERENCE, registrar, torch.device("meta"))
    model_class = families()[config.family].model()
    model = model_class(config, opened.dense.meta(), experts, kv_cache, compute)
    for segment in segments:
        rows = torch.empty(segment.stop, dtype=torch.int64, device="meta")
        hidden = model.forward(Batch(rows, rows, (segment,), Step(StepKind.DENOISE, 0)))
        model.logits(hidden[:num_logits])
        if config.is_bidirectional:
            everything = Wanted(second=True, entropy=True)
            guidance = Guidance(rows, torch.empty(segment.stop, device="meta"))
            form = HeadForm(opened.options.head_form).of_rows
            model.row_statistics(hidden, rows, everything, guidance, form)


def _largest_segments(opened: OpenModel, num_rows: int) -> list[Segment]:
    """Each a pass: none of no more rows has a transient that is larger than all of theirs."""
    if opened.config.is_bidirectional or num_rows > MAX_PASS_ROWS:
        # Where keys are kept, shorter passes see as many.
        is_whole = opened.cache_mode is CacheMode.EXACT
        return [
            Segment(
                start=0,
                stop=rows,
                first_position=0 if is_whole else num_rows - rows,
                block_length=rows if is_whole else num_rows,
                kv=KVRange(0, num_rows),
            )
            for rows in _longest_in_tiles(num_rows)
        ]
    # At the end of the longest sequence: causal, also with a remainder that joins its tile, which
    # is longer than any of all rows, or one block of all rows.
    num_tokens = max(opened.max_sequence_tokens, num_rows)
    longest_tile = min(num_rows, CAUSAL_ROWS + MAX_REMAINDER)
    passes = [(longest_tile, 1), (num_rows, 1)]
    if opened.config.is_diffusion:
        passes.append((num_rows, num_tokens))
    return [
        Segment(0, rows, num_tokens - rows, block_length, KVRange(0, num_tokens))
        for rows, block_length in passes
    ]


def _longest_in_tiles(num_rows: int) -> list[int]:
    """Passes of up to so many rows: the longest, and those with the longest tiles."""
    most = num_rows - MAX_REMAINDER
    in_tiles = {
        most // tile_rows * tile_rows + MAX_REMAINDER for tile_rows in (TILE_ROWS, QUERY_ROWS)
    }
    return sorted({num_rows, *(rows for rows in in_tiles if rows > MAX_PASS_ROWS)})
