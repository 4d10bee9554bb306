"""Bidirectional passes as long as their sequence, in operators that work through tiles of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from computing import Watched, attention, on_this_thread, peak_bytes, randn
from hypothesis import given
from hypothesis import strategies as st
from inside import engine_of
from oracle import GOLDENS, OracleModel, load_oracle
from poison import PoisonedWorkspace
from torch import Tensor
from whole import planner_of

from lowtide.compute import Compute
from lowtide.core import Step, StepKind, align_up
from lowtide.decode.logits import LOGIT_ROWS
from lowtide.engine.opening.config import MAX_PASS_ROWS, EngineConfig
from lowtide.engine.opening.model import open_model
from lowtide.engine.planning.planner import Planner
from lowtide.families import families
from lowtide.kernels.reference import REFERENCE, Kernels
from lowtide.layers.batch import Batch, KVRange, Segment
from lowtide.layers.linear import GatedMLP, Linear
from lowtide.layers.query_chunks import chunks_of
from lowtide.layers.router import SoftmaxRouter, TopSoftmaxRouter
from lowtide.llm import LLM
from lowtide.memory.arena import Arena
from lowtide.memory.chunking import EACH_TILE, MAX_REMAINDER, Counts, window_rows
from lowtide.memory.kv_cache import GRANULE_TOKENS, KVCache, storage_shape
from lowtide.memory.workspace import TILE_ROWS, Workspace, tiles
from lowtide.model_writing.synth import synth
from lowtide.threads.executor import HostExecutor

NUM_ROWS = 1100
STEP = Step(StepKind.DENOISE, 0)


class Divided(Kernels):
    """Tells rows and features of every product."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []

    def multiply(
        self, x: Tensor, weight_t: Tensor, bias: Tensor | None, out: Tensor, num_threads: int = 1
    ) -> None:
        self.seen.append((len(x), weight_t.shape[1]))
        super().multiply(x, weight_t, bias, out, num_threads)


@pytest.mark.parametrize("num_rows", [1024, 1024 + 20, 1024 + 260])
@pytest.mark.parametrize("width", [64, 128, 160, 192, 1024])
def test_how_a_product_is_divided_goes_by_its_tile_alone(num_rows: int, width: int) -> None:
    """The same products, whether rows come together or tile by tile."""
    executor = HostExecutor(3)
    kernels = Divided()
    try:
        compute = Compute(executor, kernels, Workspace(Arena(1 << 20).bytes))
        linear = Linear(randn(width, 128), compute)
        x, out, again = randn(num_rows, 128), *(torch.empty(num_rows, width) for _ in range(2))
        with executor.in_charge():
            linear.forward(x, out)
            together = sorted(kernels.seen)
            kernels.seen.clear()
            for tile in tiles(num_rows, TILE_ROWS):
                linear.forward(x[tile], again[tile])
    finally:
        executor.close()
    assert sorted(kernels.seen) == together
    assert torch.equal(out, again)


def whole(num_rows: int, kv: KVRange) -> Batch:
    """One sequence whose rows all see each other."""
    ids = torch.randint(100, (num_rows,), generator=torch.Generator().manual_seed(3))
    segment = Segment(0, num_rows, 0, num_rows, kv)
    return Batch(ids, torch.arange(num_rows), (segment,), STEP)


def test_a_long_pass_is_the_models() -> None:
    """Every hidden state, in the workspace that was registered for this length."""
    folder = GOLDENS / "llada2-a"
    with LLM(folder, context=64, dtype="float32") as llm:
        engine = engine_of(llm)
        config, registrar = engine.model.config, engine.planner.registrar(NUM_ROWS)
        num_tokens = align_up(NUM_ROWS, GRANULE_TOKENS)
        [shape] = engine.planner.memory.context.kv_shape.at(num_tokens).groups
        cache, workspace = KVCache(torch.zeros(shape)), Watched(Arena(registrar.arena_bytes).bytes)
        compute = Compute(engine.executor, REFERENCE, workspace)
        weights = engine.model.weights
        model = families()[config.family].model()(config, weights, engine.experts, cache, compute)
        batch = whole(NUM_ROWS, cache.allocate(NUM_ROWS))
        with engine.executor.in_charge(), torch.inference_mode():
            hidden = model.forward(batch)
            parts = [model.logits(hidden[tile]).clone() for tile in tiles(NUM_ROWS, LOGIT_ROWS)]
            oracle = OracleModel(load_oracle(folder))
            expected = oracle.logits(oracle.forward(batch))
    assert workspace.highest == registrar.arena_bytes
    torch.testing.assert_close(torch.cat(parts), expected, atol=2e-4, rtol=2e-4)


@pytest.fixture(scope="module", params=["llada2", "qwen2_moe", "deepseek_v2"])
def planner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Planner:
    folder = tmp_path_factory.mktemp("model") / request.param
    return planner_for(synth(request.param, "tiny", folder, seed=1))


def planner_for(folder: Path) -> Planner:
    return planner_of(open_model(folder, EngineConfig(context=256)))


def test_bytes_grow_with_the_rows_by_what_a_layer_must_hold(planner: Planner) -> None:
    """Hidden states of a layer, its queries, keys and values, what was routed and its order."""
    peaks = [peak_bytes(planner.registrar(n).graph) for n in (2048, 4096, 6144, 8192)]
    growth = [later - sooner for sooner, later in pairwise(peaks)]
    # Up to 4,096 rows the peak may still be where a tile of experts computes.
    assert growth[0] <= growth[1] == pytest.approx(growth[2], rel=0.05)
    config, item_bytes = planner.config, planner.memory.dtype.itemsize
    mixer = config.layers[0].mixer
    _, num_heads, head_dim = mixer.cache_shape
    row_elements = (
        4 * config.hidden_size + 2 * mixer.num_heads * head_dim + 2 * num_heads * head_dim
    )
    row_bytes = row_elements * item_bytes + 4 * config.hidden_size + 64 * mixer.rope.rotary_dim
    row_bytes += 64 * config.moe_shape.num_experts_per_token
    assert growth[2] <= 2048 * row_bytes


@pytest.mark.parametrize(
    ("family", "whole_buffers"),
    [
        ("llada", {"hidden", "all keys and values"}),
        ("dream", {"hidden", "all keys and values"}),
        ("llada_moe", {"hidden", "all keys and values", "normed", "routed"}),
    ],
)
def test_little_is_whole(family: str, whole_buffers: set[str], tmp_path: Path) -> None:
    """In attention nothing but hidden states, keys and values grows with the rows.

    In a dense MLP only the first of these does; experts need all rows' inputs and sums.
    """
    planner = planner_for(synth(family, "tiny", tmp_path / "m", seed=1))
    sizes = []
    for num_rows in (4608, 9216):  # no remainders
        graph = planner.forward_sample(Counts(num_rows, num_rows, num_rows), EACH_TILE).graph
        sizes.append({transient.path: transient.num_bytes for transient in graph.transients})
    assert sizes[0].keys() == sizes[1].keys()
    assert {path[-1] for path in sizes[0] if sizes[0][path] != sizes[1][path]} == whole_buffers
    assert {"queries", "keys and values"} < {path[-1] for path in sizes[0]}
    assert not {"qkv", "attended"} & {path[-1] for path in sizes[0]}


lengths_of_any = st.lists(
    st.sampled_from([1, 15, 16, 97, 512, 700, 768, 783, 1100, 2309]), min_size=1
)


@given(lengths=lengths_of_any, num_tiles=st.integers(1, 9))
def test_queries_wait_for_their_tiles(lengths: list[int], num_tiles: int) -> None:
    """Every tile of a product is run once, before the queries in it are attended, and after."""
    stops = list(accumulate(lengths))
    segments = [
        Segment(stop - length, stop, 0, max(2, length), KVRange(0, length))
        for stop, length in zip(stops, lengths, strict=True)
    ]
    num_rows, together = stops[-1], 768 * num_tiles
    products = list(tiles(num_rows, TILE_ROWS))
    projected, attended, finished, start = [], 0, [], 0
    for chunk in chunks_of(segments, num_rows, together + MAX_REMAINDER):
        assert chunk.start == start
        projected += chunk.projected
        for run in chunk.runs:
            assert run.rows.start == attended and run.block.start <= attended
            assert (run.rows.start - run.block.start) % 768 == 0
            attended = run.rows.stop
            assert attended == run.block.stop or (attended - run.block.start) % 768 == 0
        assert attended <= projected[-1].stop
        assert projected[-1].stop - start <= window_rows(num_rows, together)
        finished += chunk.finished
        stop = finished[-1].stop if finished else 0
        assert stop <= attended and chunk.waiting == slice(stop, projected[-1].stop)
        start = stop
    assert projected == finished == products


@pytest.mark.parametrize("family", ["llada", "llada_moe", "dream"])
def test_several_sequences_in_chunks(family: str, tmp_path: Path) -> None:
    """Where tiles of queries and of products end elsewhere; one sequence sees cached keys, too."""
    model = synth(family, "tiny", tmp_path / "m")
    with LLM(model, context=64, dtype="float32", kv_cache="prefix") as llm:
        engine = engine_of(llm)
        planner = engine.planner.plan_long_passes()
        [shape] = engine.planner.memory.context.kv_shape.at(2048).groups
        lengths, answers = (700, 130, 900), []

        def forward(batch: Batch, workspace: Workspace, cache: KVCache) -> Tensor:
            compute = Compute(engine.executor, REFERENCE, workspace)
            model_class, weights = type(engine.model), engine.model.weights
            model = model_class(engine.model.config, weights, engine.experts, cache, compute)
            with engine.executor.in_charge(), torch.inference_mode():
                return model.forward(batch).clone()

        for free_bytes in (1 << 40, 0):
            cache = KVCache(randn(*shape).clone())
            batches = [whole(length, cache.allocate(length + 64)) for length in lengths]
            # The last comes after 32 positions that are known, and sees 32 behind it.
            last = replace(batches[-1].segments[0], first_position=32, block_length=964)
            last = replace(last, sees_to=964)
            batches[-1] = replace(
                batches[-1], segments=(last,), positions=batches[-1].positions + 32
            )
            batch = joined(batches)
            plan = planner.plan(batch.counts, free_bytes or planner.least_bytes(batch.counts))
            workspace = PoisonedWorkspace(Arena(plan.placement.arena_bytes).bytes)
            workspace.adopt(plan.placement, plan.chunks)
            answers.append(forward(batch, workspace, cache))
        assert torch.equal(*answers)
        alone = []
        for one in batches:
            plan = planner.plan(one.counts, 1 << 40)
            workspace = Workspace(Arena(plan.placement.arena_bytes).bytes)
            workspace.adopt(plan.placement, plan.chunks)
            alone.append(forward(one, workspace, cache))
    torch.testing.assert_close(torch.cat(alone), answers[0], atol=1e-4, rtol=1e-4)


def joined(batches: Sequence[Batch]) -> Batch:
    """One after the other in a batch."""
    starts = [0, *accumulate(len(batch.token_ids) for batch in batches)]
    segments = [
        replace(batch.segments[0], start=start, stop=start + len(batch.token_ids))
        for start, batch in zip(starts, batches, strict=False)
    ]
    return Batch(
        torch.cat([batch.token_ids for batch in batches]),
        torch.cat([batch.positions for batch in batches]),
        tuple(segments),
        STEP,
    )


def test_a_length_is_counted_once(planner: Planner) -> None:
    assert planner.registrar(NUM_ROWS) is planner.registrar(NUM_ROWS)
    assert planner.registrar() is planner.registrar(MAX_PASS_ROWS)
    assert peak_bytes(planner.registrar().graph) < peak_bytes(planner.registrar(NUM_ROWS).graph)


# Single operators


@pytest.fixture
def threads() -> Iterator[HostExecutor]:
    executor = HostExecutor(2, 2)
    with executor.in_charge():
        yield executor
    executor.close()


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1)])
@pytest.mark.parametrize("block_length", [NUM_ROWS, 700])
def test_attention_of_long_blocks(
    heads: int, kv_heads: int, block_length: int, threads: HostExecutor
) -> None:
    query = randn(NUM_ROWS, heads, 16)
    key, value = (randn(NUM_ROWS, kv_heads, 16, seed=seed) for seed in (1, 2))
    outs = []
    for compute in (on_this_thread(), on_this_thread(executor=threads)):
        cache = KVCache(torch.zeros(storage_shape(1, kv_heads, 16, NUM_ROWS)))
        segment = Segment(0, NUM_ROWS, 0, block_length, cache.allocate(NUM_ROWS))
        outs.append(torch.full_like(query, torch.nan))
        attention(0, query, key, value, [segment], cache, compute, outs[-1])
    assert torch.equal(*outs)
    keys, values = (x.repeat_interleave(heads // kv_heads, 1).double() for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) / 4
    block = torch.arange(NUM_ROWS) // block_length
    weights = scores.masked_fill(block[None, :] > block[:, None], -torch.inf).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", weights, values)
    torch.testing.assert_close(outs[0].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tiles_rows_have_the_bits_of_the_tile_alone(dtype: torch.dtype) -> None:
    compute, x = on_this_thread(), randn(NUM_ROWS, 48).to(dtype)
    weight, bias = randn(160, 48, seed=1).to(dtype), randn(160, seed=2).to(dtype)
    mlp = GatedMLP(weight, weight.flip(0), weight.t().contiguous(), compute)
    operators: dict[int, Any] = {160: Linear(weight, compute, bias), 48: mlp}
    for width, operator in operators.items():
        out = torch.empty(NUM_ROWS, width, dtype=dtype)
        operator.forward(x, out)
        for tile in tiles(NUM_ROWS, TILE_ROWS):
            alone = torch.empty_like(out[tile])
            operator.forward(x[tile].clone(), alone)
            assert torch.equal(alone, out[tile])
    for router in (
        SoftmaxRouter(compute, weight, 4, normalise=True),
        TopSoftmaxRouter(compute, weight, bias, 4),
    ):
        experts, weights = router.route(x, [])
        assert experts.is_contiguous() and weights.is_contiguous()
        for tile in tiles(NUM_ROWS, TILE_ROWS):
            part = router.route(x[tile].clone(), [])
            assert torch.equal(part.experts, experts[tile])
            assert torch.equal(part.weights, weights[tile])
