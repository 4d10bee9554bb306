"""Layers against plain references, and the bytes they take against the bytes registered."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from computing import Threads, Watched, attention, on_this_thread, plain_attention, randn
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowtide.experts.rows import Routing
from lowtide.kernels.choice import choose_kernels
from lowtide.kernels.reference import REFERENCE, Kernels
from lowtide.layers import linear as linear_module
from lowtide.layers.batch import Segment
from lowtide.layers.linear import Linear
from lowtide.layers.rotary import Rotary
from lowtide.layers.router import SigmoidRouter
from lowtide.memory.arena import Arena
from lowtide.memory.kv_cache import KVCache, KVRange, storage_shape
from lowtide.memory.workspace import Buffers, Registrar, Workspace
from lowtide.threads.executor import InlineExecutor

FLOATS = [torch.float32, torch.bfloat16]


def run(layer: Callable[..., object], *arguments: Tensor) -> object:
    """Runs `layer(*arguments, workspace)` after registering it, and compares the bytes."""
    registrar = Registrar()
    layer(*(tensor.to("meta") for tensor in arguments), registrar)
    workspace = Watched(Arena(registrar.arena_bytes).bytes)
    result = layer(*arguments, workspace)
    assert workspace.highest == registrar.arena_bytes
    assert workspace.state.top == registrar.state.top == 0
    return result


# Norm


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(7, 48), (5, 3, 16), (1, 8)])
@pytest.mark.parametrize("in_place", [False, True])
def test_rms_norm_rounds_before_it_scales(
    dtype: torch.dtype, shape: tuple[int, ...], in_place: bool
) -> None:
    x, weight = randn(*shape, dtype=dtype) * 3, randn(shape[-1], seed=1, dtype=dtype)
    wide = x.float()
    expected = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)
    out = x if in_place else torch.empty_like(x)
    run(
        lambda x, weight, out, buffers: REFERENCE.rms_norm(x, weight, 1e-6, buffers, out),
        x,
        weight,
        out,
    )
    assert torch.equal(out, expected)


def test_rms_norm_of_zeros_is_zero_and_of_a_view_is_right() -> None:
    qkv = randn(6, 5, 8)
    expected = qkv.clone()
    heads = expected[:, 1:3]
    heads /= (heads.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    workspace = Workspace(Arena(1 << 16).bytes)
    REFERENCE.rms_norm(qkv[:, 1:3], torch.ones(8), 1e-5, workspace, qkv[:, 1:3])
    torch.testing.assert_close(qkv, expected)
    zeros = torch.zeros(2, 8)
    REFERENCE.rms_norm(zeros, torch.ones(8), 1e-5, workspace, zeros)
    assert not zeros.any()


# Rotary


def rotated(x: Tensor, positions: Tensor, dim: int, theta: float, workspace: Buffers) -> None:
    rotation = Rotary(dim, theta, x.device).rotation(positions, x.dtype, workspace)
    REFERENCE.rotate(x, rotation, workspace)


@pytest.mark.parametrize("rotary_dim", [2, 8, 16])
@pytest.mark.parametrize("theta", [1e4, 6e5])
def test_rotary_turns_pairs_by_their_angle(rotary_dim: int, theta: float) -> None:
    x, positions = randn(9, 3, 16), torch.tensor([0, 1, 2, 31, 32, 511, 4095, 5, 5])
    expected, half = x.double(), rotary_dim // 2
    for row, position in enumerate(positions.tolist()):
        for i in range(half):
            angle = position * theta ** (-2 * i / rotary_dim)
            first, second = x[row, :, i].double(), x[row, :, i + half].double()
            expected[row, :, i] = first * math.cos(angle) - second * math.sin(angle)
            expected[row, :, i + half] = second * math.cos(angle) + first * math.sin(angle)
    run(lambda x, at, buffers: rotated(x, at, rotary_dim, theta, buffers), x, positions)
    torch.testing.assert_close(x.double(), expected, atol=2e-3, rtol=0)  # float32 angles at 4095
    torch.testing.assert_close(x[:5].double(), expected[:5], atol=2e-5, rtol=0)
    assert torch.equal(x[..., rotary_dim:].double(), expected[..., rotary_dim:])


def test_rotary_in_bfloat16_rounds_as_the_families_own_code() -> None:
    x, positions = randn(40, 2, 16, dtype=torch.bfloat16), torch.arange(100, 140)
    frequencies = 1.0 / (6e5 ** (torch.arange(0, 8, 2).float() / 8))
    angles = positions[:, None, None].float() * torch.cat([frequencies, frequencies])
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    turned = torch.cat([-x[..., 4:8], x[..., :4]], -1)
    expected = torch.cat([x[..., :8] * cos + turned * sin, x[..., 8:]], -1)
    workspace = Workspace(Arena(1 << 16).bytes)
    rotated(x, positions, 8, 6e5, workspace)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("num_rows", [5, 700])
def test_rotary_in_float32_rounds_once(num_rows: int) -> None:
    """As LLaDA's own code does it with bfloat16, by whatever kernels a model has."""
    x, positions = randn(num_rows, 2, 16, dtype=torch.bfloat16), torch.arange(100, 100 + num_rows)
    frequencies = 1.0 / (5e5 ** (torch.arange(0, 16, 2).float() / 16))
    angles = positions[:, None, None].float() * torch.cat([frequencies, frequencies])
    turned = torch.cat([-x[..., 8:], x[..., :8]], -1).float()
    expected = (x.float() * angles.cos() + turned * angles.sin()).bfloat16()
    workspace = Workspace(Arena(1 << 20).bytes)
    rotation = Rotary(16, 5e5, x.device).rotation(positions, torch.float32, workspace)
    for kernels in (REFERENCE, choose_kernels("auto", torch.bfloat16)):
        found = x.clone()
        kernels.rotate(found, rotation, workspace)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_end_of_every_head_rotates_by_itself(dtype: torch.dtype) -> None:
    """As in latent attention, whose heads have a part that does not rotate."""
    x, positions = randn(5, 3, 24, dtype=torch.bfloat16), torch.arange(100, 105)
    workspace = Workspace(Arena(1 << 20).bytes)
    rotation = Rotary(16, 5e5, x.device).rotation(positions, dtype, workspace)
    expected = x.clone()
    end = x[..., 8:].contiguous()
    REFERENCE.rotate(end, rotation, workspace)
    expected[..., 8:] = end
    for kernels in (REFERENCE, choose_kernels("auto", torch.bfloat16)):
        found = x.clone()
        kernels.rotate(found[..., 8:], rotation, workspace)
        assert torch.equal(found, expected)


# Attention


@st.composite
def sequences(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Per sequence: block length, tokens in the cache already (whole blocks), new rows."""
    result = []
    for _ in range(draw(st.integers(1, 3))):
        block_length = draw(st.sampled_from([1, 4, 7, 32]))
        cached = block_length * draw(st.integers(0, 3))
        result.append((block_length, cached, draw(st.integers(1, 40))))
    return result


@pytest.mark.parametrize(("heads", "kv_heads", "layers"), [(4, 2, 1), (3, 1, 2), (2, 2, 1)])
@examples(25)
@given(wanted=sequences(), seed=st.integers(0, 10**6))
def test_attention_is_block_causal_for_every_segment(
    heads: int, kv_heads: int, layers: int, wanted: list[tuple[int, int, int]], seed: int
) -> None:
    head_dim, layer = 8, layers - 1
    num_rows = sum(rows for _, _, rows in wanted)
    query = randn(num_rows, heads, head_dim, seed=seed)
    key, value = (randn(num_rows, kv_heads, head_dim, seed=seed + i) for i in (1, 2))
    cache = KVCache(torch.full(storage_shape(layers, kv_heads, head_dim, 500), torch.nan))
    segments, expected, start = [], torch.empty(num_rows, heads, head_dim).double(), 0
    for i, (block_length, cached, rows) in enumerate(wanted):
        kv = cache.allocate(cached + rows)
        old = [randn(cached, kv_heads, head_dim, seed=seed + 10 * i + j) for j in (3, 4)]
        cache.write(layer, kv, 0, *old)
        segments.append(Segment(start, start + rows, cached, block_length, kv))
        new = slice(start, start + rows)
        keys, values = torch.cat([old[0], key[new]]), torch.cat([old[1], value[new]])
        position = torch.arange(cached + rows)
        sees = position // block_length <= (position[cached:] // block_length)[:, None]
        expected[new] = plain_attention(query[new], keys, values, sees)
        start += rows
    out = torch.full_like(query, torch.nan)
    run_attention(layer, query, key, value, segments, cache, out)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    for segment in segments:
        keys, values = cache.read(layer, segment.kv, segment.end_position)
        new = slice(segment.first_position, segment.end_position)
        assert torch.equal(keys[:, new].transpose(0, 1), key[segment.start : segment.stop])
        assert torch.equal(values[:, new].transpose(0, 1), value[segment.start : segment.stop])


@pytest.mark.parametrize("window", [0, 20])
def test_a_decoding_rows_attention_depends_on_its_sequence_alone(window: int) -> None:
    """Compiled: 12 sequences at once, and each by itself; beside the reference's."""
    compiled = choose_kernels("auto", torch.bfloat16)
    num_rows, heads, kv_heads, head_dim = 12, 4, 2, 16
    query, key, value = (
        randn(num_rows, count, head_dim, seed=seed, dtype=torch.bfloat16)
        for seed, count in enumerate((heads, kv_heads, kv_heads))
    )
    shape = storage_shape(1, kv_heads, head_dim, 2000)
    cache = KVCache(torch.full(shape, torch.nan, dtype=torch.bfloat16))
    segments = []
    for row in range(num_rows):
        kv = cache.allocate(10 * row + 1)
        old = randn(10 * row, kv_heads, head_dim, seed=row, dtype=torch.bfloat16)
        cache.write(0, kv, 0, old, old)
        segments.append(Segment(row, row + 1, 10 * row, 1, kv))
    workspace = Workspace(Arena(1 << 20).bytes)

    def attended(chosen: Sequence[Segment], kernels: Kernels) -> Tensor:
        out = torch.full_like(query, torch.nan)
        compute = on_this_thread(workspace, kernels)
        attention(0, query, key, value, chosen, cache, compute, out, window=window)
        return out

    together = attended(segments, compiled)
    for segment in segments:
        alone = attended([segment], compiled)
        assert torch.equal(alone[segment.start], together[segment.start])
    torch.testing.assert_close(together, attended(segments, REFERENCE), atol=2e-2, rtol=2e-2)


def run_attention(
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Sequence[Segment],
    cache: KVCache,
    out: Tensor,
) -> None:
    def on(device_cache: KVCache) -> Callable[..., None]:
        return lambda q, k, v, out, buffers: attention(
            layer, q, k, v, segments, device_cache, on_this_thread(buffers), out
        )

    registrar = Registrar()
    [rows] = cache.rows(KVRange(0, cache.num_tokens), 0, cache.num_tokens)
    meta_cache = KVCache(torch.empty(rows.shape, dtype=cache.dtype, device="meta"))
    on(meta_cache)(*(tensor.to("meta") for tensor in (query, key, value, out)), registrar)
    workspace = Watched(Arena(registrar.arena_bytes).bytes)
    on(cache)(query, key, value, out, workspace)
    assert workspace.highest == registrar.arena_bytes
    assert workspace.state.top == 0


# Linear


@pytest.fixture
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.invariant
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("num_threads", [1, 2, 3, 40])
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 37])
@pytest.mark.parametrize("num_features", [40, 129, 330, 512])
def test_linear_gives_the_same_bits_on_any_number_of_threads(
    dtype: torch.dtype,
    num_threads: int,
    rows: int,
    num_features: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear_module, "SPLIT_BYTES", 0)
    x, weight = randn(rows, 96, dtype=dtype), randn(num_features, 96, seed=1, dtype=dtype)
    out = torch.full((rows, num_features), torch.nan, dtype=dtype)
    # As in a pass: OpenMP would divide one-row products itself, at other features.
    with ThreadPoolExecutor(2, "", torch.set_num_threads, (1,)) as pool:
        Linear(weight, on_this_thread(executor=Threads(num_threads, pool))).forward(x, out)
    assert torch.equal(out, x @ weight.T)


def test_small_products_stay_on_one_thread() -> None:
    class Refuses(InlineExecutor):
        num_threads = 4

        def run(self, works: Sequence[Callable[[], None]]) -> None:
            raise AssertionError("not worth handing over")

    out = torch.empty(3, 64)
    Linear(torch.ones(64, 8), on_this_thread(executor=Refuses())).forward(torch.ones(3, 8), out)
    assert bool((out == 8).all())


def test_a_bias_is_divided_as_its_features_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "SPLIT_BYTES", 0)
    weight, bias, x = randn(150, 8), randn(150, seed=1), randn(5, 8, seed=2)
    executor = InlineExecutor()
    executor.num_threads = 3
    out = torch.empty(5, 150)
    Linear(weight, on_this_thread(executor=executor), bias).forward(x, out)
    torch.testing.assert_close(out, x @ weight.T + bias)


# Router


def make_router(seed: int, num_experts: int, hidden: int = 12, **changes: object) -> SigmoidRouter:
    settings: dict[str, object] = {
        "compute": on_this_thread(),
        "weight": randn(num_experts, hidden, seed=seed),
        "bias": randn(num_experts, seed=seed + 1) * 0.3,
        "num_experts_per_token": 2,
        "num_groups": 1,
        "num_groups_per_token": 1,
        "capacity": 0,
        "window_tokens": 1,
        "normalise": True,
        "scaling_factor": 2.5,
        **changes,
    }
    return SigmoidRouter(**settings)


def route(router: SigmoidRouter, x: Tensor, segments: Sequence[Segment] = ()) -> Routing:
    result = run(
        lambda x, weight, bias, buffers: (
            changed(router, weight, bias).within(buffers).route(x, segments)
        ),
        x,
        router.weight,
        router.bias if router.bias is not None else torch.empty(0),
    )
    assert isinstance(result, Routing)
    assert result.weights.dtype == torch.float32
    assert torch.equal(result.experts, result.experts.sort().values)
    return result


def changed(router: SigmoidRouter, weight: Tensor, bias: Tensor) -> SigmoidRouter:
    """The same router on the device of `weight`."""
    return replace(router, weight=weight, bias=None if router.bias is None else bias)


def choose(rank: list[float], allowed: Sequence[int], k: int) -> list[int]:
    return sorted(sorted(allowed, key=lambda e: -rank[e])[:k])


def check_weights(router: SigmoidRouter, scores: list[float], row: Tensor, ids: list[int]) -> None:
    total = sum(scores[e] for e in ids) if router.normalise else 1.0
    expected = torch.tensor([scores[e] / total * router.scaling_factor for e in ids])
    torch.testing.assert_close(row, expected, atol=1e-6, rtol=1e-5)


@given(
    seed=st.integers(0, 10**6),
    groups=st.sampled_from([(1, 1, 6), (4, 2, 4), (4, 4, 2), (8, 4, 3), (3, 1, 5), (6, 3, 1)]),
    k=st.integers(1, 3),
    has_bias=st.booleans(),
    normalise=st.booleans(),
    dtype=st.sampled_from(FLOATS),
)
def test_grouped_routing_is_the_rule_token_by_token(
    seed: int,
    groups: tuple[int, int, int],
    k: int,
    has_bias: bool,
    normalise: bool,
    dtype: torch.dtype,
) -> None:
    num_groups, num_kept, size = groups
    router = make_router(
        seed,
        num_groups * size,
        num_experts_per_token=k,
        num_groups=num_groups,
        num_groups_per_token=num_kept,
        normalise=normalise,
    )
    if not has_bias:
        router = replace(router, bias=None)
    x = randn(9, 12, seed=seed + 2, dtype=dtype)
    routing = route(router, x)
    all_scores = (x.float() @ router.weight.T).sigmoid()
    bias = router.bias if router.bias is not None else torch.zeros(num_groups * size)
    for token in range(9):
        scores, rank = all_scores[token].tolist(), (all_scores[token] + bias).tolist()
        members = [list(range(g * size, (g + 1) * size)) for g in range(num_groups)]
        group_rank = [sum(sorted((rank[e] for e in m), reverse=True)[:2]) for m in members]
        kept = choose(group_rank, range(num_groups), num_kept)
        ids = choose(rank, [e for g in kept for e in members[g]], k)
        assert routing.experts[token].tolist() == ids
        check_weights(router, scores, routing.weights[token], ids)


@given(
    seed=st.integers(0, 10**6),
    window=st.sampled_from([1, 4, 8]),
    lengths=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), min_size=1, max_size=3),
    capacity=st.integers(2, 16),
    is_whole=st.booleans(),
)
def test_block_routing_limits_the_experts_of_every_window_of_every_sequence(
    seed: int, window: int, lengths: list[tuple[int, int]], capacity: int, is_whole: bool
) -> None:
    """LLaDA2.2: a window's experts rank by the best of its tokens; no window spans sequences."""
    router = make_router(
        seed,
        16,
        num_groups=4,  # present in the config, and ignored
        num_groups_per_token=1,
        capacity=capacity,
        window_tokens=window,
    )
    segments, windows, row = [], [], 0
    for first, count in lengths:
        num_rows = count * window if is_whole else count
        segments.append(Segment(row, row + num_rows, first * window, window, KVRange(0, 0)))
        windows += [
            range(start, min(start + window, row + num_rows))
            for start in range(row, row + num_rows, window)
        ]
        row += num_rows
    x = randn(row, 12, seed=seed + 2)
    routing = route(router, x, segments)
    scores = (x @ router.weight.T).sigmoid()
    assert router.bias is not None
    rank = scores + router.bias
    for tokens in windows:
        best = rank[tokens.start : tokens.stop].max(0).values.tolist()
        allowed = choose(best, range(16), capacity)
        distinct = set()
        for token in tokens:
            ids = choose(rank[token].tolist(), allowed, 2)
            assert routing.experts[token].tolist() == ids
            check_weights(router, scores[token].tolist(), routing.weights[token], ids)
            distinct.update(ids)
        assert len(distinct) <= capacity


def test_windows_are_aligned_to_absolute_positions() -> None:
    """A segment that starts inside a window has a shorter first one."""
    router = make_router(3, 16, capacity=3, window_tokens=8)
    x = randn(12, 12, seed=9)
    routing = route(router, x, [Segment(0, 12, 5, 8, KVRange(0, 0))])
    for start, stop, first in ((0, 3, 5), (3, 11, 8), (11, 12, 16)):
        segment = Segment(0, stop - start, first, 8, KVRange(0, 0))
        part = route(router, x[start:stop], [segment])
        assert torch.equal(part.experts, routing.experts[start:stop])
