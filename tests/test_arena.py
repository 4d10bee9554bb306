"""Host memory ranges."""

from __future__ import annotations

import errno
import gc
import mmap
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.core import ALIGNMENT
from lowtide.errors import PlanError
from lowtide.memory.arena import HUGE_PAGE_BYTES, Arena


@given(st.one_of(st.integers(0, 10_000), st.integers(0, 3 * HUGE_PAGE_BYTES)))
def test_zeroed_bytes_of_the_size_asked_for_on_a_huge_page_boundary(num_bytes: int) -> None:
    arena = Arena(num_bytes)
    assert arena.num_bytes == num_bytes == arena.bytes.numel() == len(arena.array())
    if num_bytes:
        assert arena.bytes.data_ptr() % HUGE_PAGE_BYTES == 0
        assert not arena.array()[::4096].any()
        assert arena.array()[-1] == 0


@pytest.mark.parametrize("grows_slowly", [False, True])
def test_a_kernel_without_huge_pages_has_small_ones(
    grows_slowly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SmallPages(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", SmallPages)
    arena = Arena(HUGE_PAGE_BYTES, grows_slowly)
    arena.bytes.fill_(3)
    assert arena.array().sum() == 3 * HUGE_PAGE_BYTES


def test_tensors_and_array_share_the_bytes() -> None:
    arena = Arena(4096)
    tensor = arena.tensor(64, (3, 5), torch.bfloat16)
    assert tensor.shape == (3, 5)
    assert tensor.dtype == torch.bfloat16
    assert tensor.is_contiguous()
    assert tensor.data_ptr() == arena.bytes.data_ptr() + 64
    assert tensor.data_ptr() % ALIGNMENT == 0
    tensor.fill_(1.0)
    assert arena.array()[64:94].tolist() == [0x80, 0x3F] * 15
    assert not arena.array()[94:].any()
    arena.array()[64:94] = 0
    assert not tensor.any()


def test_memory_lives_as_long_as_a_tensor_over_it() -> None:
    arena = Arena(1 << 16)
    tensor = arena.tensor(0, (1 << 14,), torch.float32)
    tensor.fill_(7.0)
    gone = weakref.ref(arena)
    del arena
    gc.collect()
    assert gone() is None
    assert bool((tensor == 7.0).all())


@pytest.mark.parametrize("num_bytes", [1 << 60, 1 << 62, 1 << 70])
def test_more_than_there_are_addresses_is_refused_with_the_number(num_bytes: int) -> None:
    with pytest.raises(PlanError, match=f"{num_bytes} bytes.*`host_memory`"):
        Arena(num_bytes)
