"""Time of planning, beside a search through all chunk counts that may find a better plan."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from typing import Any

from common.planned_model import StepModel
from lowtide.memory.chunking import OPERATOR_TILES, Counts, bucket, num_tiles
from lowtide.memory.pass_planner import PassPlanner
from lowtide.memory.template import bounds

GRANULE_TOKENS = 16
NUM_GRANULES = 4
"""Granules beyond the longest sequence that a search through all chunk counts covers."""


def plan_request(
    model: StepModel, num_tokens: int, max_masked: int, free_bytes: int
) -> dict[str, Any]:
    """Plan every step of one request, whose masks become fewer one by one.

    Returns the number of distinct plans, the longest and mean time of making one, and the mean time
    of planning over all steps. Seconds are processor time: nothing in it waits.
    """
    planner = _forgetful(model.planner, model.counts(num_tokens, max_masked))
    plans, seconds, total_s = {}, [], 0.0
    for masked in range(max_masked, 0, -1):
        start_s = time.thread_time()
        plan = planner.plan(model.counts(num_tokens, bucket(masked, max_masked)), free_bytes)
        elapsed_s = time.thread_time() - start_s
        total_s += elapsed_s
        if plan.counts not in plans:
            seconds.append(elapsed_s)
        plans[plan.counts] = plan
    return {
        "num_plans": len(plans),
        "most_s": max(seconds),
        "mean_s": sum(seconds) / len(seconds),
        "per_step_s": total_s / max_masked,
        "first_chunks": dict(plans[model.counts(num_tokens, max_masked)].chunks),
    }


def compare_search(model: StepModel, num_tokens: int) -> dict[str, Any]:
    """Compare the longest sequence by the planner with that of a search through all chunk counts.

    The memory is the least that a sequence of `num_tokens` takes; the search tries somewhat longer
    ones.
    """
    planner = model.planner
    free_bytes = planner.least_bytes(model.counts(num_tokens, num_tokens // 2))

    def counts_of(num_tokens: int) -> Counts:
        return model.counts(num_tokens, num_tokens // 2)

    limit = 2 * num_tokens
    longest = model.longest(free_bytes, lambda num_tokens: num_tokens // 2, limit)
    fresh = _forgetful(planner, counts_of(longest))
    start_s = time.perf_counter()
    fresh.plan(counts_of(longest), free_bytes)
    search_s = time.perf_counter() - start_s
    start_s = time.perf_counter()
    further = [longest + step * GRANULE_TOKENS for step in range(1, NUM_GRANULES + 1)]
    fitting = [tokens for tokens in further if any_fits(model, counts_of(tokens), free_bytes)]
    brute_force_s = time.perf_counter() - start_s
    return {
        "free_bytes": free_bytes,
        "longest": longest,
        "brute_force_longest": max(fitting, default=longest),
        "search_s": search_s,
        "brute_force_s": brute_force_s,
    }


def any_fits(model: StepModel, counts: Counts, free_bytes: int) -> bool:
    """Return True if some choice of chunk counts needs no more than `free_bytes`.

    Counts only the bytes that are alive together, which is less than any placement takes.
    """
    choices = [
        range(1, 1 + num_tiles(counts.rows_of(operator), tile_rows))
        for operator, tile_rows in OPERATOR_TILES.items()
    ]

    def needed_bytes(numbers: tuple[int, ...]) -> int:
        values = bounds(counts, _chunks(numbers))
        return model.template.peak(values)[0] + model.template.library_bytes(values)

    return any(needed_bytes(numbers) <= free_bytes for numbers in itertools.product(*choices))


def _forgetful(planner: PassPlanner, counts: Counts) -> PassPlanner:
    """The same, which has made no plan yet. What a model has once, templates, it has."""
    fresh = PassPlanner(planner.short, planner.forward, planner.head_of, planner.by_tile)
    fresh.least_bytes(counts)
    return fresh


def _chunks(numbers: tuple[int, ...]) -> Mapping[str, int]:
    return dict(zip(OPERATOR_TILES, numbers, strict=True))
