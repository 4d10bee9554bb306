"""Bidirectional passes as long as their sequence, in operators that work through tiles of rows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from computing import on_this_thread
from oracle import GOLDENS, OracleModel, load_oracle
from torch import Tensor

from lowtide.compute import Compute
from lowtide.core import Step, StepKind, align_up
from lowtide.decode.block_diffusion import LOGIT_ROWS
from lowtide.engine.opening import MAX_PASS_ROWS, EngineConfig, OpenModel, open_model
from lowtide.engine.registering import register
from lowtide.families import families
from lowtide.kernels.reference import REFERENCE
from lowtide.lab.synth import synth
from lowtide.layers.attention import attention
from lowtide.layers.batch import Batch, KVRange, Segment
from lowtide.layers.linear import GatedMLP, Linear
from lowtide.layers.router import SoftmaxRouter, TopSoftmaxRouter
from lowtide.llm import LLM
from lowtide.memory.arena import Arena
from lowtide.memory.kv_cache import GRANULE_TOKENS, KVCache, storage_shape
from lowtide.memory.workspace import TILE_ROWS, Workspace, tiles
from lowtide.threads.executor import HostExecutor

NUM_ROWS = 1100
STEP = Step(StepKind.DENOISE, 0)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Watched(Workspace):
    """Remembers how far it was filled."""

    highest = 0

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = super().take(name, shape, dtype)
        tensor.view(torch.uint8).fill_(0xFF)  # NaN: nobody may rely on what a buffer held before
        self.highest = max(self.highest, self.top)
        return tensor


def whole(num_rows: int, kv: KVRange) -> Batch:
    """One sequence whose rows all see each other."""
    ids = torch.randint(100, (num_rows,), generator=torch.Generator().manual_seed(3))
    segment = Segment(0, num_rows, 0, num_rows, kv)
    return Batch(ids, torch.arange(num_rows), (segment,), STEP)


def test_a_long_pass_is_the_models() -> None:
    """Every hidden state, in the workspace that was registered for this length."""
    folder = GOLDENS / "llada2-a"
    with LLM(folder, context=64, dtype="float32") as llm:
        engine = llm._engine
        config, registrar = engine.opened.config, register(engine.opened, NUM_ROWS)
        shape = list(engine.opened.kv_shape)
        shape[3] = align_up(NUM_ROWS, GRANULE_TOKENS)
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
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OpenModel:
    folder = tmp_path_factory.mktemp("model") / request.param
    return open_model(synth(request.param, "tiny", folder, seed=1), EngineConfig(context=256))


def test_bytes_grow_with_the_rows_by_what_a_layer_must_hold(opened: OpenModel) -> None:
    """Hidden states of a layer, its queries, keys and values, what was routed and its order."""
    peaks = [register(opened, num_rows).peak_bytes for num_rows in (2048, 4096, 6144, 8192)]
    growth = [later - sooner for sooner, later in pairwise(peaks)]
    # Up to 4,096 rows the peak may still be where a tile of experts computes.
    assert growth[0] <= growth[1] == pytest.approx(growth[2], rel=0.05)
    config, item_bytes = opened.config, opened.dtype.itemsize
    _, num_heads, head_dim = opened.config.attention.cache_shape
    row_elements = (
        4 * config.hidden_size
        + 2 * config.attention.num_heads * head_dim
        + 2 * num_heads * head_dim
    )
    row_bytes = (
        row_elements * item_bytes + 4 * config.hidden_size + 64 * config.attention.rope.rotary_dim
    )
    row_bytes += 64 * config.moe_shape.num_experts_per_token
    assert growth[2] <= 2048 * row_bytes


def test_a_length_is_counted_once(opened: OpenModel) -> None:
    assert register(opened, NUM_ROWS) is register(opened, NUM_ROWS)
    assert register(opened) is register(opened, MAX_PASS_ROWS)
    assert register(opened).peak_bytes < register(opened, NUM_ROWS).peak_bytes


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
