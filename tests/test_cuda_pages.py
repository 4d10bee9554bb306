"""CUDA's virtual memory management, against a driver that checks the rules; on a GPU for real."""

from __future__ import annotations

import sys

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from stand_in_driver import GRANULARITY, CUresult, StandInDriver

from lowtide.errors import DeviceError, PageError, PlanError, UnsupportedError
from lowtide.memory.arena import ElasticArena
from lowtide.memory.cuda_pages import CudaPages
from lowtide.memory.pages import PageBudget

OUT_OF_MEMORY = CUresult.CUDA_ERROR_OUT_OF_MEMORY
INVALID = CUresult.CUDA_ERROR_INVALID_VALUE


def make_pages(num_groups: int, driver: StandInDriver) -> CudaPages:
    return CudaPages(num_groups * GRANULARITY, driver=driver, gpu=driver)


def make_arena(num_groups: int, driver: StandInDriver, num_affordable: int = 99) -> ElasticArena:
    budget = PageBudget(num_affordable * GRANULARITY)
    return ElasticArena(make_pages(num_groups, driver), budget.open("slots"))


def test_a_group_is_created_mapped_and_made_accessible_and_undone_in_turn() -> None:
    driver = StandInDriver()
    pages = make_pages(4, driver)
    assert not driver.mapped and not driver.created, "a reservation has no memory"
    driver.calls.clear()
    pages.commit(GRANULARITY, 3 * GRANULARITY)
    assert driver.calls == ["cuMemCreate", "cuMemMap"] * 2 + ["cuMemSetAccess"]
    pages.bytes[GRANULARITY : 3 * GRANULARITY] = 7
    driver.is_idle = False
    driver.calls.clear()
    pages.release(GRANULARITY, 2 * GRANULARITY)
    assert driver.calls == ["synchronize", "cuMemUnmap", "cuMemRelease"]
    first = pages.bytes.data_ptr()
    assert driver.accessible == {first + 2 * GRANULARITY}
    pages.close()
    assert driver.is_empty
    assert driver.calls[-3:] == ["cuMemUnmap", "cuMemRelease", "cuMemAddressFree"]
    pages.close()


def test_a_coarser_granularity_makes_larger_groups() -> None:
    driver = StandInDriver(granularity=3 * GRANULARITY)
    pages = make_pages(4, driver)
    assert (pages.group_bytes, pages.num_bytes) == (3 * GRANULARITY, 6 * GRANULARITY)
    pages.commit(3 * GRANULARITY, 6 * GRANULARITY)
    assert list(driver.created.values()) == [3 * GRANULARITY]
    assert make_pages(0, driver).bytes.numel() == 0


changes = st.lists(
    st.tuples(st.booleans(), st.tuples(st.integers(0, 8), st.integers(0, 8))), max_size=12
)


@examples(40)
@given(changes, st.integers(1, 6), st.integers(1, 6))
def test_the_gpu_has_what_the_arena_counts_and_gets_it_back(
    changes: list[tuple[bool, tuple[int, int]]], num_affordable: int, num_there: int
) -> None:
    driver = StandInDriver(memory_bytes=num_there * GRANULARITY)
    arena = make_arena(8, driver, num_affordable)
    expected: set[int] = set()
    for is_commit, (first, end) in changes:
        groups = set(range(first, end))
        span = (first * GRANULARITY, max(first, end) * GRANULARITY)
        if not is_commit:
            arena.release(*span)
            expected -= groups
        elif len(expected | groups) > min(num_affordable, num_there):
            with pytest.raises(PageError):
                arena.commit(*span)
        else:
            arena.commit(*span)
            expected |= groups
        first_address = arena.bytes.data_ptr()
        places = {(address - first_address) // GRANULARITY for address in driver.mapped}
        assert places == expected and driver.accessible == set(driver.mapped)
        assert sum(driver.created.values()) == arena.committed_bytes == len(expected) * GRANULARITY
    arena.close()
    assert driver.is_empty


@pytest.mark.parametrize(
    ("name", "when", "code", "error", "message"),
    [
        ("cuMemCreate", 2, OUT_OF_MEMORY, PageError, "no memory left .cuMemCreate"),
        ("cuMemMap", 2, INVALID, DeviceError, "cuMemMap failed.*INVALID"),
        ("cuMemMap", 1, OUT_OF_MEMORY, PageError, "no memory left .cuMemMap"),
        ("cuMemSetAccess", 1, INVALID, DeviceError, "cuMemSetAccess failed"),
    ],
)
def test_a_commit_that_fails_anywhere_leaves_nothing(
    name: str, when: int, code: CUresult, error: type[Exception], message: str
) -> None:
    driver = StandInDriver()
    arena = make_arena(4, driver)
    arena.commit(0, GRANULARITY)
    driver.fail(name, when, code)
    with pytest.raises(error, match=message):
        arena.commit(0, 4 * GRANULARITY)
    assert arena.committed_bytes == GRANULARITY == sum(driver.created.values())
    assert list(driver.mapped) == [arena.bytes.data_ptr()]
    driver.fails.clear()
    arena.commit(0, 4 * GRANULARITY)
    arena.close()
    assert driver.is_empty


def test_addresses_that_are_refused_are_a_plan_error() -> None:
    driver = StandInDriver()
    driver.fail("cuMemAddressReserve", 1, OUT_OF_MEMORY)
    with pytest.raises(PlanError, match=f"{4 * GRANULARITY} bytes.*--gpu-memory"):
        make_pages(4, driver)


def test_a_gpu_without_memory_for_one_group_is_left_as_it_was() -> None:
    driver = StandInDriver(memory_bytes=0)
    with pytest.raises(PageError):
        make_pages(4, driver)
    assert driver.is_empty


def test_a_gpu_without_such_management_says_so() -> None:
    with pytest.raises(UnsupportedError, match="GPU 0 .*no virtual memory management"):
        make_pages(4, StandInDriver(is_able=False))


def test_a_machine_without_the_bindings_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(UnsupportedError, match=r"cuda-bindings.*install lowtide\[gpu\]"):
        CudaPages(GRANULARITY)


def test_a_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = StandInDriver()

    def no_library(flags: int) -> None:
        raise RuntimeError("libcuda is not there")

    monkeypatch.setattr(driver, "cuInit", no_library)
    with pytest.raises(UnsupportedError, match="libcuda is not there"):
        make_pages(4, driver)


@pytest.mark.gpu
def test_on_a_gpu_memory_goes_and_comes_under_one_address() -> None:
    pytest.importorskip("cuda.bindings")
    before_bytes = torch.cuda.mem_get_info()[0]
    arena = ElasticArena(CudaPages(64 * GRANULARITY), PageBudget(1 << 40).open("slots"))
    tensor = arena.tensor(16 * GRANULARITY, (1024, 1024), torch.float32)
    assert torch.cuda.mem_get_info()[0] >= before_bytes - 4 * GRANULARITY
    for value in (1.0, 2.0):
        arena.commit(16 * GRANULARITY, 48 * GRANULARITY)
        assert torch.cuda.mem_get_info()[0] <= before_bytes - 32 * GRANULARITY
        tensor.fill_(value)
        assert float(tensor.sum()) == value * tensor.numel()
        product = tensor @ tensor
        assert float(product[0, 0]) == pytest.approx(1024 * value * value)
        del product
        torch.cuda.empty_cache()
        arena.release(0, arena.num_bytes)
        assert torch.cuda.mem_get_info()[0] >= before_bytes - 16 * GRANULARITY
    del tensor
    arena.close()
