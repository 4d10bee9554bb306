"""How many tiles run together: as many as there is room for, and the bits are the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from whole import planner_of

from lowtide.engine.opening.config import EngineConfig
from lowtide.engine.opening.model import open_model
from lowtide.engine.planning.planner import EVERY_KIND, Planner
from lowtide.engine.planning.uncomputed import Uncomputed
from lowtide.errors import InternalError, PlanError
from lowtide.families import families
from lowtide.kernels.row_statistics import Guidance, Wanted
from lowtide.layers.batch import KVRange, Segment
from lowtide.memory import chunking
from lowtide.memory.arena import HUGE_PAGE_BYTES
from lowtide.memory.chunking import (
    EACH_TILE,
    MAX_BUCKETS,
    OPERATOR_TILES,
    Counts,
    LogitNeeds,
    bucket,
    longest_chunk,
    longest_tile,
    num_tiles,
    one_more,
    rows_together,
    tiles,
)
from lowtide.memory.pass_planner import PassPlanner
from lowtide.memory.planner import ArenaPlaces, Graph
from lowtide.memory.template import Sample, Template, bounds, symbols
from lowtide.memory.workspace import Registrar, Workspace
from lowtide.model_writing.synth import synth


@given(st.integers(1, 2000), st.integers(0, 1600), st.sampled_from([16, 64, 512, 768]))
def test_no_shorter_pass_has_a_longer_tile_than_was_bounded(
    num_rows: int, num_fewer: int, tile_rows: int
) -> None:
    most = chunking.at_most(num_rows, tile_rows)
    for fewer in (max(1, num_rows - num_fewer), min(num_rows, tile_rows + 15), num_rows):
        assert max(tile.stop - tile.start for tile in tiles(fewer, tile_rows)) <= most
    assert most <= num_rows


@given(st.integers(1, 5000), st.sampled_from([16, 64, 512, 768]), st.integers(1, 100))
def test_chunks_are_whole_tiles(num_rows: int, tile_rows: int, num_chunks: int) -> None:
    single = list(tiles(num_rows, tile_rows))
    together = rows_together(num_rows, tile_rows, num_chunks)
    chunks = list(tiles(num_rows, together))
    assert len(single) == num_tiles(num_rows, tile_rows)
    assert len(chunks) <= num_chunks
    assert max(tile.stop - tile.start for tile in single) == longest_tile(num_rows, tile_rows)
    inner = [
        (chunk.start + tile.start, chunk.start + tile.stop)
        for chunk in chunks
        for tile in tiles(chunk.stop - chunk.start, tile_rows)
    ]
    assert inner == [(tile.start, tile.stop) for tile in single]


@given(st.integers(1, 9000), st.sampled_from(sorted(OPERATOR_TILES)))
def test_one_chunk_more_is_the_next_that_is_shorter(num_rows: int, operator: str) -> None:
    counts, num_chunks, seen = Counts(*[num_rows] * 4), 1, []
    while True:
        seen.append(longest_chunk(counts, operator, {operator: num_chunks}))
        following = one_more(counts, operator, {operator: num_chunks})
        if following is None:
            break
        assert following > num_chunks
        num_chunks = following
    every = {
        longest_chunk(counts, operator, {operator: n + 1})
        for n in range(num_tiles(num_rows, OPERATOR_TILES[operator]))
    }
    assert seen == sorted(every, reverse=True)
    assert seen[-1] == longest_chunk(counts, operator, EACH_TILE)


@given(st.integers(0, 3000))
def test_masks_come_in_few_buckets(max_masked: int) -> None:
    buckets = [bucket(num_masked, max_masked) for num_masked in range(max_masked + 1)]
    assert len(set(buckets) - {0}) <= MAX_BUCKETS
    assert buckets == sorted(buckets)
    assert all(0 <= found - n for n, found in enumerate(buckets)) and buckets[-1] == max_masked


# Templates of the models


@pytest.fixture(scope="module", params=["deepseek_v2", "llada2", "llada_moe", "dream"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Planner:
    """Of a model that nothing was counted of yet."""
    folder = tmp_path_factory.mktemp("model") / request.param
    synth(request.param, "tiny", folder, seed=1)
    return planner_of(open_model(folder, EngineConfig(context=256)))


@pytest.fixture(scope="module")
def planner(model: Planner) -> PassPlanner:
    return model.plan_long_passes()


def test_a_template_is_the_graph_of_any_counts(model: Planner, planner: PassPlanner) -> None:
    rng = np.random.default_rng(1)
    for _ in range(4):
        tokens, logit_rows = int(rng.integers(768, 6000)), int(rng.integers(1, 6000))
        asked = (EVERY_KIND[int(rng.integers(8))],)
        more = (
            int(rng.integers(0, 500)) if model.memory.context.keeps_keys else 0
        )  # keys from passes before
        counts = Counts(tokens, tokens, tokens + more, min(tokens, logit_rows), asked)
        chunks = {operator: int(rng.integers(1, 9)) for operator in OPERATOR_TILES}
        registered = registered_graph(model, counts, chunks)
        template = planner.template(counts)
        assert set(template.at(symbols(counts, chunks)).transients) == set(registered.transients)
        values = symbols(counts, chunks)
        assert template.peak(values)[0] == registered.least_bytes
        assert template.library_bytes(values) == registered.library_bytes
        assert registered.placement.arena_bytes == registered.least_bytes
        # A plan for up to so many has room for exactly so many.
        planned = template.at(bounds(counts, chunks))
        for exact, at_most in zip(registered.transients, planned.transients, strict=True):
            assert exact.path == at_most.path and exact.num_bytes <= at_most.num_bytes


def test_a_pass_of_two_sequences_takes_no_more_than_its_template_says(
    model: Planner, planner: PassPlanner
) -> None:
    rng = np.random.default_rng(2)
    for _ in range(4):
        longer, shorter = int(rng.integers(768, 4000)), int(rng.integers(1, 768))
        counts = Counts(longer + shorter, longer, longer, longer, EVERY_KIND[:1])
        chunks = {operator: int(rng.integers(1, 9)) for operator in OPERATOR_TILES}
        registered = registered_graph(model, counts, chunks)
        planned = planner.template(counts).at(bounds(counts, chunks))
        room = {one.path: one.num_bytes for one in planned.transients}
        assert all(one.num_bytes <= room[one.path] for one in registered.transients)
        assert registered.least_bytes <= planned.least_bytes


def test_queries_of_several_sequences_are_those_of_the_longest(
    model: Planner, planner: PassPlanner
) -> None:
    counts = Counts(4000, 1000, 1000, 1000, EVERY_KIND[:1])
    planned = planner.template(counts).at(bounds(counts, dict.fromkeys(OPERATOR_TILES, 1)))
    spec = model.config.layers[0].mixer
    row_bytes = spec.num_heads * spec.head_dim * model.memory.dtype.itemsize
    for one in planned.transients:
        if one.path[-2:] == ("queries", "query"):
            assert one.num_bytes == 1000 * row_bytes


def registered_graph(planner: Planner, counts: Counts, chunks: Mapping[str, int]) -> Graph:
    num_keys, num_others = counts.keys, counts.tokens - counts.block
    segments = [Segment(0, counts.block, num_keys - counts.block, num_keys, KVRange(0, num_keys))]
    if num_others:
        others = KVRange(num_keys, num_others)
        segments.append(Segment(counts.block, counts.tokens, 0, num_others, others))
    registrar = Registrar(chunks)
    model, hidden = planner.run_forward(registrar, segments)
    rows = torch.empty(counts.logit_rows, dtype=torch.int64, device="meta")
    guidance = Guidance(rows, torch.empty(counts.logit_rows, device="meta"))
    with Uncomputed():
        for asked in counts.asked:
            wanted = Wanted(asked.second, asked.entropy)
            model.row_statistics(hidden, rows, wanted, guidance if asked.is_guided else None)
    return registrar.graph


def counted(num_tokens: int, num_logits: int) -> Counts:
    return Counts(num_tokens, num_tokens, num_tokens, num_logits, (LogitNeeds(entropy=True),))


counts_of_any = st.tuples(st.integers(1024, 40_000), st.integers(0, 100)).map(
    lambda drawn: counted(drawn[0], max(1, drawn[0] * drawn[1] // 100))
)


@examples(30)
@given(counts=counts_of_any, share=st.floats(0, 1.2))
def test_the_fewest_chunks_that_fit(planner: PassPlanner, counts: Counts, share: float) -> None:
    least, most = planner.least_bytes(counts), needed(planner, counts, dict.fromkeys(CHUNKED, 1))
    free_bytes = least + int(share * (most - least))
    plan = planner.plan(counts, free_bytes)
    assert plan.placement.arena_bytes <= plan.needed_bytes <= free_bytes
    assert plan.needed_bytes == needed(planner, counts, plan.chunks)
    for operator, num_chunks in plan.chunks.items():
        if num_chunks > 1:  # with fewer of one operator, whatever the others have, none fits
            others = {op: num_tiles(counts.rows_of(op), OPERATOR_TILES[op]) for op in CHUNKED}
            assert needed(planner, counts, {**others, operator: num_chunks - 1}) > free_bytes
    if least:
        with pytest.raises(PlanError, match=rf"needs {least} bytes .* {least - 1} are free"):
            planner.plan(counts, least - 1)


CHUNKED = tuple(OPERATOR_TILES)


def needed(planner: PassPlanner, counts: Counts, chunks: Mapping[str, int]) -> int:
    return planner.template(counts).at(bounds(counts, chunks)).needed_bytes


@examples(20)
@given(counts=counts_of_any, share=st.floats(0, 1))
def test_fewer_masks_need_no_more_chunks(
    planner: PassPlanner, counts: Counts, share: float
) -> None:
    free_bytes = planner.least_bytes(counts) * 5 // 4
    fewer = counts._replace(logit_rows=max(1, int(share * counts.logit_rows)))
    planned = fewer._replace(logit_rows=bucket(fewer.logit_rows, counts.logit_rows))
    plans = [planner.plan(each, free_bytes) for each in (counts, planned)]
    for operator in CHUNKED:
        chunks = [longest_chunk(plan.counts, operator, plan.chunks) for plan in plans]
        is_whole = plans[1].chunks[operator] == 1
        assert is_whole or chunks[1] >= chunks[0] or operator == "logits"
    assert plans[1].chunks["logits"] <= plans[0].chunks["logits"]


def half_masked(num_tokens: int) -> Counts:
    return counted(num_tokens, max(1, num_tokens // 2))


def test_longer_passes_never_need_less(planner: PassPlanner) -> None:
    """So that the longest that fits is found by halving."""
    needed = [planner.least_bytes(half_masked(num_tokens)) for num_tokens in range(850)]
    assert needed == sorted(needed)


def sample(graph: Any, counts: Counts) -> Sample:
    return Sample(counts, {}, graph)


def test_passes_that_are_not_alike_are_refused(model: Planner) -> None:
    samples = [model.forward_sample(*each) for each in model.samples()]
    graph = samples[4].graph
    with pytest.raises(InternalError, match="do not tell what sizes depend on"):
        Template.fit(samples[:4])
    crooked = graph.transients[0]._replace(num_bytes=graph.transients[0].num_bytes + 7)
    changed = type(graph)((crooked, *graph.transients[1:]), graph.moments)
    with pytest.raises(InternalError, match="The size of hidden does not grow"):
        Template.fit([*samples[:4], sample(changed, samples[4].counts), *samples[5:]])
    shorter = type(graph)(graph.transients[:-1], graph.moments)
    with pytest.raises(InternalError, match="take different buffers"):
        Template.fit([*samples, sample(shorter, samples[4].counts)])


# Bits


def test_a_workspace_adopts_only_what_fits() -> None:
    workspace = Workspace(torch.empty(64, dtype=torch.uint8))
    with pytest.raises(InternalError, match="A plan of 65 bytes is adopted in a workspace of 64"):
        workspace.adopt(ArenaPlaces({}, 65), EACH_TILE)


# What compiled kernels have no use for


SCRATCH = "norm fp32", "norm squares", "rotary first", "rotary second"
"""Scratch of the reference kernels' norms and rotations; compiled ones use registers."""


@pytest.mark.parametrize("family", ["llada", "llada_moe", "dream"])
def test_kernels_without_scratch_touch_a_plan_but_for_half_a_huge_page(
    family: str, tmp_path: Path
) -> None:
    """Published shapes, divided as far as it takes: a plan is for whatever kernels there are."""
    config = families()[family].sizes()["full"].config
    (tmp_path / "config.json").write_text(json.dumps(config))
    planner = planner_of(
        open_model(tmp_path, EngineConfig(context=64, device="cpu"))
    ).plan_long_passes()
    for num_tokens in (600, 1024, 4096, 16384):
        counts = Counts(num_tokens, num_tokens, num_tokens, num_tokens // 2, EVERY_KIND[:1])
        placement = planner.plan(counts, planner.least_bytes(counts)).placement
        touched_bytes = end = 0
        for path, place in sorted(placement.places.items(), key=lambda each: each[1].start):
            if not path[-1].startswith(SCRATCH):
                touched_bytes += max(0, place.stop - max(place.start, end))
                end = max(end, place.stop)
        assert placement.arena_bytes - touched_bytes <= HUGE_PAGE_BYTES // 2
