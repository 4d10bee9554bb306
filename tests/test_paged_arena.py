"""Memory that comes and goes under addresses that stay, by the kernel's own count."""

from __future__ import annotations

import errno
import mmap
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from programs import python

from lowtide.errors import InternalError, PageError, PlanError, UnsupportedError
from lowtide.hardware.memory import resident_bytes
from lowtide.memory.arena import HUGE_PAGE_BYTES, PagedArena
from lowtide.memory.host_pages import HostPages
from lowtide.memory.pages import PageBudget

PAGE = mmap.PAGESIZE
MiB = 1 << 20


def make_arena(
    num_groups: int,
    group_bytes: int = HUGE_PAGE_BYTES,
    budget_bytes: int | None = None,
    free_bytes: Callable[[], int] | None = None,
) -> PagedArena:
    num_bytes = num_groups * group_bytes
    budget = PageBudget(num_bytes if budget_bytes is None else budget_bytes)
    pages = HostPages(num_bytes, group_bytes)
    return PagedArena(pages, budget.open("slots"), free_bytes=free_bytes)


def physical_pages(arena: PagedArena) -> np.ndarray:
    """Mark the pages of an arena that have memory behind them, by the kernel's page table."""
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        file.seek(arena.bytes.data_ptr() // PAGE * 8)
        entries = np.frombuffer(file.read(arena.num_bytes // PAGE * 8), np.uint64)
    return entries >> np.uint64(63) == 1


def physical_bytes(arena: PagedArena) -> int:
    return int(physical_pages(arena).sum()) * PAGE


@pytest.mark.parametrize("group_bytes", [PAGE, 16 * PAGE, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES])
def test_commit_touches_what_was_asked_for_and_nothing_else(group_bytes: int) -> None:
    arena = make_arena(8, group_bytes)
    assert arena.bytes.data_ptr() % HUGE_PAGE_BYTES == 0
    assert physical_bytes(arena) == arena.committed_bytes == 0
    arena.commit(2 * group_bytes, 3 * group_bytes)
    arena.commit(5 * group_bytes + 1, 5 * group_bytes + 2)
    groups = physical_pages(arena).reshape(8, -1)
    assert groups.all(axis=1).tolist() == groups.any(axis=1).tolist()
    assert np.flatnonzero(groups[:, 0]).tolist() == [2, 5]
    assert arena.committed_bytes == 2 * group_bytes
    assert not arena.array()[2 * group_bytes : 3 * group_bytes].any()


def test_spans_outside_of_an_arena_are_refused() -> None:
    arena = make_arena(4, PAGE)
    for span in ((-1, 0), (3, 2), (0, 4 * PAGE + 1)):
        with pytest.raises(InternalError, match="are not of"):
            arena.commit(*span)
        with pytest.raises(InternalError, match="are not of"):
            arena.release(*span)


def test_tensors_stay_where_they_are_while_memory_goes_and_comes() -> None:
    arena = make_arena(2)
    tensor = arena.tensor(HUGE_PAGE_BYTES, (4, 8), torch.float32)
    address = tensor.data_ptr()
    for value in (1.0, 2.0):
        arena.commit(HUGE_PAGE_BYTES, 2 * HUGE_PAGE_BYTES)
        assert not tensor.any()
        tensor.fill_(value)
        assert arena.array()[HUGE_PAGE_BYTES:].view(np.float32)[:32].tolist() == [value] * 32
        arena.release(0, arena.num_bytes)
    assert tensor.data_ptr() == address


changes = st.lists(
    st.tuples(st.booleans(), st.integers(0, 10 * PAGE), st.integers(0, 10 * PAGE)), max_size=12
)


@examples(40)
@given(changes, st.integers(0, 20), st.integers(1, 3))
def test_the_kernel_counts_what_the_arena_and_the_budget_count(
    changes: list[tuple[bool, int, int]], num_affordable: int, num_parts: int
) -> None:
    budget = PageBudget(num_affordable * PAGE)
    pages = HostPages(num_parts * 10 * PAGE, PAGE)
    arena = PagedArena(pages, budget.open("cache"), num_parts)
    expected: set[int] = set()
    for is_commit, *ends in changes:
        a, b = sorted(ends)
        if is_commit:
            wanted = set(range(a // PAGE, -(-b // PAGE))) if a < b else set()
            assert arena.missing_bytes(a, b) == len(wanted - expected) * num_parts * PAGE
            if wanted - expected and len(wanted | expected) * num_parts > num_affordable:
                with pytest.raises(PageError, match="cache wants"):
                    arena.commit(a, b)
            else:
                arena.commit(a, b)
                expected |= wanted
        else:
            gone = set(range(-(-a // PAGE), b // PAGE)) & expected
            assert arena.release(a, b) == len(gone) * num_parts * PAGE
            expected -= gone
        for part in physical_pages(arena).reshape(num_parts, 10):
            assert np.flatnonzero(part).tolist() == sorted(expected)
        held_bytes = len(expected) * num_parts * PAGE
        assert arena.committed_bytes == budget.shares()["cache"] == held_bytes
    arena.close()
    assert physical_bytes(arena) == 0 and budget.num_free_bytes == budget.num_bytes


def test_what_the_system_does_not_have_is_refused_before_it_is_touched() -> None:
    arena = make_arena(4, free_bytes=lambda: HUGE_PAGE_BYTES)
    arena.commit(0, HUGE_PAGE_BYTES)
    with pytest.raises(PageError, match=f"wants {2 * HUGE_PAGE_BYTES} .* has {HUGE_PAGE_BYTES} "):
        arena.commit(0, 3 * HUGE_PAGE_BYTES)
    assert physical_bytes(arena) == arena.committed_bytes == HUGE_PAGE_BYTES


class RefusingPages(HostPages):
    """The system refuses the second commit, once."""

    num_commits = 0

    def commit(self, start: int, stop: int) -> None:
        self.num_commits += 1
        if self.num_commits == 2:
            raise PageError("The system refuses.")
        super().commit(start, stop)


def test_a_commit_is_whole_or_nothing() -> None:
    budget = PageBudget(8 * PAGE)
    arena = PagedArena(RefusingPages(9 * PAGE, PAGE), budget.open("cache"), num_parts=3)
    with pytest.raises(PageError, match="refuses"):
        arena.commit(0, 2 * PAGE)
    assert physical_bytes(arena) == arena.committed_bytes == 0
    assert budget.num_free_bytes == budget.num_bytes
    arena.commit(0, 2 * PAGE)
    assert physical_pages(arena).tolist() == [True, True, False] * 3


def test_when_the_system_refuses_others_give_way_and_it_is_asked_once_more() -> None:
    budget = PageBudget(16 * PAGE)
    slots = PagedArena(HostPages(8 * PAGE, PAGE), budget.open("expert slots"))
    account = budget.open("KV cache")
    cache = PagedArena(
        HostPages(8 * PAGE, PAGE), account, free_bytes=lambda: 4 * PAGE - slots.committed_bytes
    )
    slots.commit(0, 3 * PAGE)
    with pytest.raises(PageError, match=f"KV cache wants {2 * PAGE} .* system has {PAGE} "):
        cache.commit(0, 2 * PAGE)
    asked: list[int] = []
    [slots_account, _] = budget.accounts

    def give_way(num_bytes: int) -> None:
        asked.append(num_bytes)
        slots.release(PAGE, 8 * PAGE)

    slots_account.give_way = give_way
    cache.commit(0, 2 * PAGE)
    assert asked == [2 * PAGE]
    assert budget.shares() == {"expert slots": PAGE, "KV cache": 2 * PAGE}
    with pytest.raises(PageError, match="KV cache wants"):
        cache.commit(2 * PAGE, 6 * PAGE)
    assert len(asked) == 2, "once"


class NoMemory(mmap.mmap):
    """Of a kernel that has populated the first page when its memory ends."""

    code = errno.ENOMEM

    def madvise(self, advice: int, *span: int) -> None:
        if advice == 23:
            if self.code == errno.ENOMEM:
                super().madvise(advice, span[0], PAGE)
            raise OSError(self.code, "as told")
        super().madvise(advice, *span)


class OldKernel(NoMemory):
    code = errno.EINVAL


def test_memory_that_ends_half_way_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", NoMemory)
    arena = make_arena(4, PAGE)
    with pytest.raises(PageError, match=f"refuses {3 * PAGE} bytes.*as told.*`host_memory`"):
        arena.commit(0, 3 * PAGE)
    assert physical_bytes(arena) == 0


def test_a_kernel_that_cannot_populate_is_helped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", OldKernel)
    arena = make_arena(4, 2 * PAGE)
    arena.commit(2 * PAGE, 6 * PAGE)
    assert physical_pages(arena).tolist() == [False] * 2 + [True] * 4 + [False] * 2


def test_a_kernel_without_huge_pages_has_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class SmallPages(mmap.mmap):
        def madvise(self, advice: int, *span: int) -> None:
            if advice in (mmap.MADV_HUGEPAGE, mmap.MADV_NOHUGEPAGE):
                raise OSError(errno.EINVAL, "Invalid argument")
            super().madvise(advice, *span)

    monkeypatch.setattr(mmap, "mmap", SmallPages)
    arena = make_arena(3)
    arena.commit(HUGE_PAGE_BYTES, 2 * HUGE_PAGE_BYTES)
    assert physical_bytes(arena) == HUGE_PAGE_BYTES
    arena.release(0, arena.num_bytes)
    assert physical_bytes(arena) == 0


def test_a_system_that_is_not_linux_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UnsupportedError, match="needs Linux, not darwin"):
        HostPages(1 << 20)


def test_groups_are_whole_pages() -> None:
    with pytest.raises(InternalError, match="not whole pages"):
        HostPages(1 << 20, 1000)


def test_more_addresses_than_there_is_memory_are_no_matter() -> None:
    """Reserving is not having: a long context's addresses cost nothing before they are used."""
    before_bytes = resident_bytes()
    arena = make_arena(1 << 19)  # 1 TiB
    arena.commit(1 << 39, (1 << 39) + 1)
    assert resident_bytes() - before_bytes < 20 * MiB
    with pytest.raises(PlanError, match="refuses to reserve"):
        HostPages(1 << 60)


def test_an_address_limit_is_a_refusal_not_the_end(tmp_path: Path) -> None:
    code = """
import resource
from lowtide.errors import PageError, PlanError
from lowtide.memory.arena import PagedArena
from lowtide.memory.host_pages import HostPages
from lowtide.memory.pages import PageBudget

vm_bytes = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (vm_bytes + (64 << 20),) * 2)
try:
    HostPages(128 << 20)
except PlanError as error:
    print(error)
arena = PagedArena(HostPages(32 << 20), PageBudget(16 << 20).open("slots"))
arena.commit(0, 16 << 20)
try:
    arena.commit(16 << 20, 18 << 20)
except PageError as error:
    print(error)
"""
    result = python("-c", code)
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.splitlines()
    assert f"refuses to reserve {128 << 20} bytes" in first
    assert f"wants {2 << 20} bytes more, and 0 of the budget's {16 << 20}" in second
