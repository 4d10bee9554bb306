"""Token ranges of the KV cache, against the obvious model of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import InternalError, PlanError
from lowtide.memory.kv_cache import GRANULE_TOKENS, KVCache, KVRange, storage_shape


def make_cache(num_tokens: int, num_layers: int = 1, kv_heads: int = 1) -> KVCache:
    return KVCache(torch.zeros(storage_shape(num_layers, kv_heads, 4, num_tokens)))


@given(
    st.integers(0, 200),
    st.lists(st.one_of(st.integers(1, 90), st.integers(0, 20).map(lambda i: -i)), max_size=40),
)
def test_ranges_never_overlap_and_refusals_are_true(num_tokens: int, actions: list[int]) -> None:
    """Positive numbers allocate that many tokens; others free a range."""
    cache = make_cache(num_tokens)
    owner = [-1] * cache.num_tokens  # per token: the range that has it
    held: dict[int, KVRange] = {}
    for i, action in enumerate(actions):
        if action <= 0:
            if held:
                name = sorted(held)[-action % len(held)]
                cache.free(held.pop(name))
                owner = [-1 if o == name else o for o in owner]
            continue
        wanted = -(-action // GRANULE_TOKENS) * GRANULE_TOKENS
        starts = [
            start
            for start in range(cache.num_tokens - wanted + 1)
            if all(o == -1 for o in owner[start : start + wanted])
        ]
        assert cache.can_allocate(action) == bool(starts)
        if not starts:
            with pytest.raises(PlanError, match=f"{action} tokens.*{cache.num_tokens}.*context"):
                cache.allocate(action)
            continue
        kv = held[i] = cache.allocate(action)
        assert kv.start == starts[0]  # first fit
        assert kv.start % GRANULE_TOKENS == 0
        assert kv.capacity >= action
        assert all(o == -1 for o in owner[kv.start : kv.start + kv.capacity])
        owner[kv.start : kv.start + kv.capacity] = [i] * kv.capacity
    for kv in held.values():
        cache.free(kv)
    assert cache.can_allocate(cache.num_tokens) or cache.num_tokens == 0


def test_what_is_written_is_read_back_and_nothing_else() -> None:
    generator = torch.Generator().manual_seed(0)
    cache = make_cache(64, num_layers=2, kv_heads=3)
    first, second = cache.allocate(20), cache.allocate(16)
    keys, values = (torch.randn(2, 20, 3, 4, generator=generator) for _ in range(2))
    others = torch.randn(16, 3, 4, generator=generator)
    for layer in (0, 1):
        cache.write(layer, first, 0, keys[layer, :13], values[layer, :13])
        cache.write(layer, first, 13, keys[layer, 13:], values[layer, 13:])
    cache.write(1, second, 0, others, -others)
    for layer in (0, 1):
        for num_tokens in (0, 13, 20):
            read_keys, read_values = cache.read(layer, first, num_tokens)
            assert torch.equal(read_keys, keys[layer, :num_tokens].transpose(0, 1))
            assert torch.equal(read_values, values[layer, :num_tokens].transpose(0, 1))
    assert not cache.read(0, second, 16)[0].any()
    assert torch.equal(cache.read(1, second, 16)[1], -others.transpose(0, 1))


def test_reading_copies_nothing() -> None:
    storage = torch.zeros(storage_shape(1, 1, 4, 32))
    cache = KVCache(storage)
    keys, _ = cache.read(0, cache.allocate(32), 32)
    storage.fill_(3.0)
    assert bool((keys == 3.0).all())


def test_a_write_past_the_range_is_caught_before_it_hits_a_neighbour() -> None:
    cache = make_cache(64)
    first, second = cache.allocate(16), cache.allocate(16)
    rows = torch.ones(3, 1, 4)
    cache.write(0, first, 13, rows, rows)
    with pytest.raises(InternalError, match="3 rows from position 14.*16"):
        cache.write(0, first, 14, rows, rows)
    assert not cache.read(0, second, 16)[0].any()


def test_a_range_is_freed_once() -> None:
    cache = make_cache(64)
    kv = cache.allocate(16)
    cache.free(kv)
    with pytest.raises(InternalError, match="not taken"):
        cache.free(kv)


@given(st.integers(0, 1000))
def test_storage_is_whole_granules(num_tokens: int) -> None:
    layers, both, heads, tokens, head_dim = storage_shape(3, 2, 8, num_tokens)
    assert (layers, both, heads, head_dim) == (3, 2, 2, 8)
    assert tokens % GRANULE_TOKENS == 0
    assert num_tokens <= tokens < num_tokens + GRANULE_TOKENS
