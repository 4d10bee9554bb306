"""A KV cache whose memory comes and goes: what is read, and what the kernel counts."""

from __future__ import annotations

import itertools

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from test_kv_cache import Held
from test_paged_arena import physical_bytes

from lowtide.core import align_up
from lowtide.errors import InternalError, PageError
from lowtide.memory import kv_cache
from lowtide.memory.arena import PagedArena
from lowtide.memory.host_pages import HostPages
from lowtide.memory.kv_cache import KVCache, storage_shape
from lowtide.memory.kv_pages import KVLayout, KVPages
from lowtide.memory.pages import PageBudget

PAGE = 4096


def make_layout(num_tokens: int, head_dim: int = 4) -> KVLayout:
    return KVLayout(storage_shape(2, 2, head_dim, num_tokens), torch.float32)


def make_cache(
    pages: HostPages, layout: KVLayout, budget_bytes: int = 1 << 40
) -> tuple[KVCache, PagedArena]:
    account = PageBudget(budget_bytes).open("KV cache")
    arena = PagedArena(pages, account, layout.num_parts)
    memory = KVPages((arena, layout))
    return KVCache(memory.storage, memory), arena


def host_cache(layout: KVLayout, budget_bytes: int = 1 << 40) -> tuple[KVCache, PagedArena]:
    return make_cache(HostPages(layout.address_bytes(PAGE), PAGE), layout, budget_bytes)


actions = st.one_of(
    st.tuples(st.just("allocate"), st.integers(1, 90)),
    st.tuples(st.just("write"), st.integers(0, 40)),
    st.tuples(st.just("free"), st.integers(0, 20)),
)


@examples(40)
@given(
    num_tokens=st.integers(0, 200),
    steps=st.lists(actions, max_size=30),
    growth_tokens=st.sampled_from([16, 48]),
)
def test_what_is_written_is_read_wherever_memory_comes_and_goes(
    num_tokens: int,
    steps: list[tuple[str, int]],
    growth_tokens: int,
) -> None:
    """Four tokens of a head fill a page, two where heads lie together; sequences share some."""
    layout = make_layout(num_tokens, 256)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, "GROWTH_TOKENS", growth_tokens)
        cache, arena = host_cache(layout)
        held: list[Held] = []
        fresh = itertools.count()
        for action, number in steps:
            if action == "allocate" and cache.can_allocate(number):
                held.append(Held(cache.allocate(number)))
            elif held and action == "free":
                cache.free(held.pop(number % len(held)).kv)
            elif held and action == "write":
                write(cache, held[number % len(held)], number, fresh)
            check(cache, arena, held, layout)
        for each in held:
            cache.free(each.kv)
        assert physical_bytes(arena) == 0


def write(cache: KVCache, each: Held, number: int, fresh: itertools.count[int]) -> None:
    """Rows of numbers that are used once, [layers, tokens]; values are the negative of keys."""
    first = each.rows.shape[1]
    num_rows = min(number, each.kv.capacity - first)
    cache.prepare(each.kv, first + num_rows)
    numbers = [[float(next(fresh)) for _ in range(num_rows)] for _ in (0, 1)]
    rows = torch.tensor(numbers).view(2, num_rows)
    each.rows = torch.cat([each.rows, rows], 1)
    for layer in (0, 1):
        keys = rows[layer, :, None, None].expand(num_rows, 2, 256)
        cache.write(layer, each.kv, first, keys, -keys)


def check(cache: KVCache, arena: PagedArena, held: list[Held], layout: KVLayout) -> None:
    for each, layer in itertools.product(held, (0, 1)):
        keys, values = cache.read(layer, each.kv, each.rows.shape[1])
        assert torch.equal(keys, each.rows[layer, None, :, None].expand_as(keys))
        assert torch.equal(values, -keys)
    pages: set[int] = set()
    for each in held:
        first, end = each.kv.start, each.kv.start + each.kv.num_usable
        if first < end:
            start, stop = (token * layout.row_bytes for token in (first, end))
            pages |= set(range(start // PAGE, -(-stop // PAGE)))
        assert each.rows.shape[1] <= each.kv.num_usable <= each.kv.capacity
    expected_bytes = len(pages) * PAGE * layout.num_parts
    assert arena.committed_bytes == physical_bytes(arena) == expected_bytes


def test_a_sequence_takes_memory_as_it_grows_and_no_more_than_its_range() -> None:
    layout = make_layout(4096, 64)  # 16 tokens fill a page of a part
    cache, arena = host_cache(layout)
    kv = cache.allocate(1000)
    assert arena.committed_bytes == 0
    for num_tokens, num_usable in [(1, 256), (256, 256), (257, 512), (600, 768), (1000, 1008)]:
        cache.prepare(kv, num_tokens)
        assert kv.num_usable == num_usable
        assert arena.committed_bytes == physical_bytes(arena) == num_usable * layout.token_bytes


def test_memory_that_is_refused_costs_a_sequence_nothing_it_has() -> None:
    layout = make_layout(4096, 64)
    cache, arena = host_cache(layout, budget_bytes=512 * layout.token_bytes)
    first, second = cache.allocate(1000), cache.allocate(1000)
    cache.prepare(first, 200)
    rows = torch.ones(200, 2, 64)
    for layer in (0, 1):
        cache.write(layer, first, 0, rows, -rows)
    cache.prepare(second, 256)
    with pytest.raises(PageError, match="KV cache wants"):
        cache.prepare(first, 257)
    assert first.num_usable == 256 and arena.committed_bytes == 512 * layout.token_bytes
    assert bool((cache.read(1, first, 200)[1] == -1).all())
    cache.free(second)
    cache.prepare(first, 257)


def test_what_was_not_prepared_is_not_written() -> None:
    cache, _ = host_cache(make_layout(64))
    kv, rows = cache.allocate(32), torch.ones(3, 2, 4)
    with pytest.raises(InternalError, match="3 rows from position 0 on have memory for 0 tokens"):
        cache.write(0, kv, 0, rows, rows)


def test_addresses_are_for_all_tokens_in_whole_groups() -> None:
    layout = KVLayout(storage_shape(3, 1, 576, 1000, num_arrays=1), torch.bfloat16)  # latents
    assert layout.num_parts == 3 and layout.row_bytes == 1152
    assert layout.address_bytes(PAGE) == 3 * align_up(1008 * 1152, PAGE)
    cache, _ = host_cache(layout)
    kv = cache.allocate(1000)
    cache.prepare(kv, 1000)
    rows = torch.randn(1000, 1, 576).bfloat16()
    for layer in range(3):
        cache.write(layer, kv, 0, rows + layer, rows)
    for layer in range(3):
        assert torch.equal(cache.read(layer, kv, 1000)[0][0], (rows + layer)[:, 0])
