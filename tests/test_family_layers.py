"""Pieces that the autoregressive families brought: causal tiles, latents, routers, rotations."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from computing import Threads, attention, on_this_thread, plain_attention, randn
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowtide.layers import causal_attention
from lowtide.layers.batch import Segment
from lowtide.layers.causal_attention import CAUSAL_ROWS
from lowtide.layers.router import SoftmaxRouter
from lowtide.memory.kv_cache import KVCache, storage_shape
from lowtide.memory.workspace import Registrar
from lowtide.threads.executor import Executor, InlineExecutor

# Causal attention


def causal(query: Tensor, keys: Tensor, values: Tensor, first: int, scale: float) -> Tensor:
    """In float64; keys [tokens, kv_heads, head_dim], of which row i sees `first + i + 1`."""
    sees = torch.arange(len(keys)) <= first + torch.arange(len(query))[:, None]
    return plain_attention(query, keys, values, sees, scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 15, CAUSAL_ROWS, CAUSAL_ROWS + 15, 3 * CAUSAL_ROWS + 40])
@pytest.mark.parametrize("first", [0, 1, 300])
def test_causal_tiles_see_exactly_what_came_before(
    dtype: torch.dtype, rows: int, first: int
) -> None:
    heads, kv_heads, head_dim = 4, 2, 16
    query = randn(rows, heads, head_dim, dtype=dtype)
    keys, values = (randn(first + rows, kv_heads, head_dim, seed=s, dtype=dtype) for s in (1, 2))
    cache = KVCache(torch.full(storage_shape(1, kv_heads, head_dim, 800), torch.nan, dtype=dtype))
    kv, out = cache.allocate(first + rows), torch.empty_like(query)
    cache.write(0, kv, 0, keys[:first], values[:first])
    segment = Segment(0, rows, first, 1, kv)
    attention(0, query, keys[first:], values[first:], [segment], cache, on_this_thread(), out)
    expected = causal(query, keys, values, first, head_dim**-0.5)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


@contextmanager
def one_torch_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.invariant
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 4), (20, 1), (4, 4)])
@pytest.mark.parametrize("rows", [1, 40])
def test_heads_on_threads_give_the_same_bits(
    heads: int, kv_heads: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(causal_attention, "SPLIT_OPERATIONS", 1)
    query = randn(rows, heads, 16)
    keys, values = (randn(100 + rows, kv_heads, 16, seed=s) for s in (1, 2))
    outs = []
    # As in the engine: one torch thread each. SDPA divides a single row's keys among more.
    with one_torch_thread(), ThreadPoolExecutor(3, "", torch.set_num_threads, (1,)) as pool:
        threads = Threads(3, pool)
        executors: list[Executor] = [InlineExecutor(), threads]
        for executor in executors:
            cache = KVCache(torch.zeros(storage_shape(1, kv_heads, 16, 160)))
            kv = cache.allocate(100 + rows)
            cache.write(0, kv, 0, keys[:100], values[:100])
            out = torch.empty_like(query)
            segment = Segment(0, rows, 100, 1, kv)
            compute = on_this_thread(executor=executor)
            attention(0, query, keys[100:], values[100:], [segment], cache, compute, out)
            outs.append(out)
        assert threads.num_works > 1
    assert torch.equal(*outs)
    expected = causal(query, keys, values, 100, 0.25)
    torch.testing.assert_close(outs[0].double(), expected, atol=1e-5, rtol=1e-5)


def test_registered_bytes_hold_for_any_number_of_causal_rows() -> None:
    """The largest pass is registered; every smaller one takes no more of the workspace."""
    cache = KVCache(torch.zeros(storage_shape(1, 2, 8, 512), device="meta"))
    sizes = []
    for rows in (1, 7, 128, 143, 144, 300, 512):
        registrar, kv = Registrar(), cache.allocate(512)
        query, key = (torch.empty(rows, heads, 8, device="meta") for heads in (4, 2))
        segment = Segment(0, rows, 512 - rows, 1, kv)
        attention(
            0, query, key, key, [segment], cache, on_this_thread(registrar), torch.empty_like(query)
        )
        sizes.append(registrar.arena_bytes)
        cache.free(kv)
    assert sizes[-1] <= max(sizes) == sizes[3]  # a tile with the remainder that joins it
    assert sizes[3] == 143 * 4 * 8 * 4


# Routers


@given(
    seed=st.integers(0, 10**6),
    groups=st.sampled_from([(1, 1), (4, 2), (4, 1)]),
    normalise=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    rounds=st.booleans(),
)
def test_softmax_routing_is_the_rule_token_by_token(
    seed: int, groups: tuple[int, int], normalise: bool, dtype: torch.dtype, rounds: bool
) -> None:
    x, weight = randn(7, 8, seed=seed, dtype=dtype), randn(12, 8, seed=seed + 1, dtype=dtype)
    router = SoftmaxRouter(
        on_this_thread(), weight, 3, normalise, rounds, *groups, scaling_factor=2.0
    )
    experts, weights = router.route(x, [])
    for row in range(7):
        probabilities = (x[row : row + 1] @ weight.T)[0].float().softmax(-1)
        best_of_group = probabilities.view(groups[0], -1).amax(1)
        kept = best_of_group.topk(groups[1]).indices.tolist()
        allowed = [e for e in range(12) if e // (12 // groups[0]) in kept]
        expected = sorted(sorted(allowed, key=lambda e: -float(probabilities[e]))[:3])
        chosen = probabilities[expected]
        chosen = chosen / chosen.sum() if normalise else chosen
        chosen = chosen.to(dtype).float() if rounds else chosen
        margin = probabilities[allowed].sort(descending=True).values.diff().abs().min()
        if margin > 1e-6:
            assert experts[row].tolist() == expected
            torch.testing.assert_close(weights[row], 2 * chosen, atol=1e-6, rtol=1e-2)


def test_a_float32_router_widens_its_input() -> None:
    x, weight = randn(5, 8, dtype=torch.bfloat16), randn(6, 8, seed=1)
    _, weights = SoftmaxRouter(on_this_thread(), weight, 2, normalise=False).route(x, [])
    expected = (x.float() @ weight.T).softmax(-1).topk(2).values.sum(-1)
    torch.testing.assert_close(weights.sum(-1), expected)
