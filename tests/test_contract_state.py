"""What every cache of sequences' states promises, against the obvious model of it.

A cache that is added gets a row in `CACHES`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowtide.core import align_up
from lowtide.errors import InternalError, PlanError
from lowtide.memory.arena import PagedArena
from lowtide.memory.host_pages import HostPages
from lowtide.memory.kv_cache import GRANULE_TOKENS, KVCache, KVRange, storage_shape
from lowtide.memory.kv_pages import KVLayout, KVPages
from lowtide.memory.pages import PageBudget

NUM_LAYERS, PAGE_BYTES = 2, 4096


def fixed(num_heads: int, num_arrays: int) -> Callable[[int], KVCache]:
    """All of whose memory is there."""

    def make(num_tokens: int) -> KVCache:
        return KVCache(torch.zeros(storage_shape(NUM_LAYERS, num_heads, 4, num_tokens, num_arrays)))

    return make


def paged(num_tokens: int) -> KVCache:
    """Four tokens of a head fill a page."""
    layout = KVLayout(storage_shape(NUM_LAYERS, 2, 256, num_tokens), torch.float32)
    pages = HostPages(layout.address_bytes(PAGE_BYTES), PAGE_BYTES)
    account = PageBudget(1 << 40).open("KV cache")
    memory = KVPages((PagedArena(pages, account, layout.num_parts), layout))
    return KVCache(memory.storage, memory)


CACHES: Mapping[str, Callable[[int], KVCache]] = {
    "heads": fixed(num_heads=2, num_arrays=2),
    "latent": fixed(num_heads=1, num_arrays=1),
    "paged": paged,
}


class Held:
    """A range and what was written to it: numbers [layers, tokens]."""

    def __init__(self, kv: KVRange, numbers: Tensor | None = None) -> None:
        self.kv = kv
        self.numbers = torch.zeros(NUM_LAYERS, 0) if numbers is None else numbers

    def append(self, cache: KVCache, numbers: Tensor) -> None:
        first, num_rows = self.numbers.shape[1], numbers.shape[1]
        cache.prepare(self.kv, first + num_rows)
        for layer in range(NUM_LAYERS):
            keys, _ = cache.read(layer, self.kv, 0)
            heads, _, width = keys.shape
            rows = numbers[layer, :, None, None] + 0.25 * torch.arange(1, heads + 1)[:, None]
            rows = rows.expand(num_rows, heads, width)
            cache.write(layer, self.kv, first, rows, -rows)
        self.numbers = torch.cat([self.numbers, numbers], 1)

    def check(self, cache: KVCache) -> None:
        for layer in range(NUM_LAYERS):
            keys, values = cache.read(layer, self.kv, self.numbers.shape[1])
            heads = 0.25 * torch.arange(1, len(keys) + 1)[:, None, None]
            assert torch.equal(keys, (self.numbers[layer, :, None] + heads).expand_as(keys))
            assert torch.equal(values, keys if len(keys) == 1 else -keys)


every_cache = pytest.mark.parametrize("make", CACHES.values(), ids=list(CACHES))
actions = st.tuples(
    st.sampled_from(["allocate", "write", "free", "keep", "resume", "branch"]), st.integers(0, 90)
)


@every_cache
@examples(80)
@given(num_tokens=st.integers(0, 200), steps=st.lists(actions, max_size=40))
def test_what_was_written_is_there_wherever_a_range_is_moved(
    make: Callable[[int], KVCache], num_tokens: int, steps: list[tuple[str, int]]
) -> None:
    """Ranges never overlap, and room is refused only where too little is free.

    Of kept ranges the one that was longest not used goes first.
    """
    cache = make(num_tokens)
    held: list[Held] = []
    kept: list[Held] = []  # the one that was longest not used first
    fresh = itertools.count()
    for action, number in steps:
        if action == "allocate" and has_room(cache, held, max(1, number)):
            held.append(Held(cache.allocate(max(1, number))))
        elif action == "write" and held:
            each = held[number % len(held)]
            num_rows = min(number, each.kv.capacity - each.numbers.shape[1])
            numbers = [[float(next(fresh)) for _ in range(num_rows)] for _ in range(NUM_LAYERS)]
            each.append(cache, torch.tensor(numbers).view(NUM_LAYERS, num_rows))
        elif action == "free" and held:
            cache.free(held.pop(number % len(held)).kv)
        elif action == "keep" and held:
            each = held.pop(number % len(held))
            if each.numbers.shape[1]:
                cache.keep(each.kv, each.numbers.shape[1])
                kept.append(each)
            else:
                cache.free(each.kv)
        elif action == "resume" and kept:
            each = kept[number % len(kept)]
            num_same = max(1, each.numbers.shape[1] - number % 5)
            if has_room(cache, held, num_same + number):
                cache.resume(each.kv, num_same, num_same + number)
                kept.remove(each)
                held.append(Held(each.kv, each.numbers[:, :num_same]))
        elif action == "branch" and (held or kept):
            each = [*held, *kept][number % len([*held, *kept])]
            num_same = each.numbers.shape[1] - number % 3
            if num_same > 0 and cache.can_branch(each.kv, num_same + number):
                made = cache.branch(each.kv, num_same, num_same + number)
                held.append(Held(made, each.numbers[:, :num_same]))
                if each in kept:  # used now
                    kept.append(kept.pop(kept.index(each)))
        is_there = [cache.is_kept(each.kv) for each in kept]
        assert is_there == sorted(is_there)
        kept = [each for each, is_kept in zip(kept, is_there, strict=True) if is_kept]
        check(cache, [*held, *kept])
    for each in [*held, *kept]:
        cache.free(each.kv)
    assert cache.num_free_tokens == cache.num_tokens and cache.is_unused


def has_room(cache: KVCache, held: list[Held], num_tokens: int) -> bool:
    """Whether a further range fits, which the cache has to know."""
    num_free = cache.num_tokens - sum(each.kv.capacity for each in held)
    has_room = align_up(num_tokens, GRANULE_TOKENS) <= num_free
    assert cache.num_free_tokens == num_free
    assert cache.can_allocate(num_tokens) == has_room
    if not has_room:
        with pytest.raises(PlanError, match=f"{num_tokens} tokens: {num_free} of.*context"):
            cache.allocate(num_tokens)
    return has_room


def check(cache: KVCache, ranges: list[Held]) -> None:
    end = 0
    for each in sorted(ranges, key=lambda each: each.kv.start):
        assert each.kv.start >= end and each.kv.start % GRANULE_TOKENS == 0
        end = each.kv.start + each.kv.capacity
        each.check(cache)
    assert end <= cache.num_tokens


@every_cache
def test_a_range_that_is_copied_meanwhile_is_the_one_that_was_kept(
    make: Callable[[int], KVCache],
) -> None:
    """A range that went on and was kept again is another one."""
    cache = make(64)
    each = Held(cache.allocate(48))
    each.append(cache, torch.arange(40.0).view(NUM_LAYERS, 20))
    cache.keep(each.kv, 20)
    first = each.kv.num_kept
    target = [np.zeros_like(rows) for rows in cache.rows(each.kv, 0, 20)]
    assert cache.copy_kept(each.kv, first, 0, target)
    assert all(map(np.array_equal, target, cache.rows(each.kv, 0, 20)))
    cache.resume(each.kv, 8, 48)
    target = [np.full_like(rows, 7) for rows in target]
    assert not cache.copy_kept(each.kv, first, 0, target)
    cache.keep(each.kv, 8)
    assert not cache.copy_kept(each.kv, first, 0, target)
    assert all((rows == 7).all() for rows in target)
    cache.free(each.kv)
    assert not cache.copy_kept(each.kv, each.kv.num_kept, 0, target)


@every_cache
def test_a_write_past_the_range_is_caught_before_it_hits_a_neighbour(
    make: Callable[[int], KVCache],
) -> None:
    cache = make(64)
    first, second = (Held(cache.allocate(16)) for _ in range(2))
    second.append(cache, torch.ones(NUM_LAYERS, 16))
    first.append(cache, torch.zeros(NUM_LAYERS, 14))
    with pytest.raises(InternalError, match="3 rows from position 14.*16"):
        cache.claim(first.kv, 14, 3)
    second.check(cache)


@every_cache
def test_a_range_is_freed_once(make: Callable[[int], KVCache]) -> None:
    cache = make(64)
    kv = cache.allocate(16)
    cache.free(kv)
    with pytest.raises(InternalError, match="not taken"):
        cache.free(kv)
