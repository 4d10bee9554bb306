"""GPU memory as ranges of addresses: CUDA's virtual memory management under an elastic arena.

The raw driver calls (cuMem*, through `cuda-bindings`): addresses are reserved once; a group of
pages is created, mapped there and made accessible, later unmapped and released. The rules are
those of the CUDA driver API, "Virtual Memory Management".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from lowtide.core import align_up
from lowtide.errors import DeviceError, PageError, PlanError, UnsupportedError
from lowtide.memory.host_pages import HUGE_PAGE_BYTES


class Gpu(Protocol):
    """What is asked of a GPU beside its memory management."""

    def tensor(self, address: int, num_bytes: int) -> Tensor:
        """A tensor of bytes over memory that is mapped at `address`, without a copy."""
        ...

    def synchronize(self) -> None:
        """Waits until nothing that was queued uses any memory."""
        ...


class TorchGpu:
    """A GPU as torch knows it."""

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)

    def tensor(self, address: int, num_bytes: int) -> Tensor:
        return torch.as_tensor(_Memory(address, num_bytes), device=self._device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


class CudaPages:
    """Pages of a GPU's memory: a range of addresses, reserved without any memory behind it.

    Contents of a group that is committed are undefined. `close` gives all memory and the addresses
    back: no tensor over them may be used after it.
    """

    def __init__(
        self, num_bytes: int, index: int = 0, driver: Any = None, gpu: Gpu | None = None
    ) -> None:
        """index: of the GPU. driver: `cuda.bindings.driver`, by default the installed one.

        Raises UnsupportedError where there is no such management, PlanError where there are not as
        many addresses.
        """
        self._calls = _Calls(load_driver() if driver is None else driver, index)
        self._gpu = TorchGpu(index) if gpu is None else gpu
        self._gpu.synchronize()  # makes the GPU's context, if there is none yet
        self.group_bytes = align_up(HUGE_PAGE_BYTES, self._calls.granularity_bytes())
        self.num_bytes = align_up(num_bytes, self.group_bytes)
        self._handles: dict[int, Any] = {}  # by address, of groups that are mapped
        self._address = self._calls.reserve(self.num_bytes) if num_bytes else 0
        self.bytes = self._make_bytes()

    def commit(self, start: int, stop: int) -> None:
        """Makes bytes `start` to `stop`, whole groups that are not mapped, usable.

        Raises PageError when the GPU has no memory for them; then none of them is.
        """
        first, end = self._address + start, self._address + stop
        try:
            for address in range(first, end, self.group_bytes):
                self._handles[address] = self._calls.map_new(address, self.group_bytes)
            self._calls.make_accessible(first, end - first)
        except BaseException:
            self._unmap(first, end)
            raise

    def release(self, start: int, stop: int) -> None:
        """Gives the memory of bytes `start` to `stop`, whole groups, back to the GPU.

        Waits first for all that is queued: unmapping does not.
        """
        self._gpu.synchronize()
        self._unmap(self._address + start, self._address + stop)

    def close(self) -> None:
        """Gives everything back, the addresses too."""
        if self._address:
            self.release(0, self.num_bytes)
            self._calls.free(self._address, self.num_bytes)
            self._address = 0

    def _make_bytes(self) -> Tensor:
        """The tensor over all addresses. Torch looks once what memory the first of them has."""
        if not self.num_bytes:
            return torch.empty(0, dtype=torch.uint8)
        try:
            self.commit(0, self.group_bytes)
            try:
                return self._gpu.tensor(self._address, self.num_bytes)
            finally:
                self.release(0, self.group_bytes)
        except BaseException:
            self._calls.free(self._address, self.num_bytes)
            raise

    def _unmap(self, first: int, end: int) -> None:
        """One by one: a range can only be unmapped as it was mapped."""
        for address in range(first, end, self.group_bytes):
            handle = self._handles.pop(address, None)
            if handle is not None:
                self._calls.unmap(address, self.group_bytes, handle)


def load_driver() -> Any:
    """`cuda.bindings.driver`. Raises UnsupportedError where that is not installed."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise UnsupportedError(
            f"Memory that moves on a GPU needs cuda-bindings ({error}): install lowtide[gpu]."
        ) from error
    return driver


class _Memory:
    """How a range of GPU memory introduces itself to torch (CUDA Array Interface, version 3)."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class _Calls:
    """The driver's calls on one GPU, their refusals as typed errors."""

    def __init__(self, driver: Any, index: int) -> None:
        self._driver = driver
        try:
            self._call(driver.cuInit, 0)
        except RuntimeError as error:  # cuda-bindings finds no libcuda
            raise UnsupportedError(f"CUDA's driver cannot be used: {error}") from error
        device = self._call(driver.cuDeviceGet, index)
        attributes = driver.CUdevice_attribute
        wanted = attributes.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        if not self._call(driver.cuDeviceGetAttribute, wanted, device):
            raise UnsupportedError(
                f"GPU {index} or its driver has no virtual memory management: memory cannot move "
                "between expert slots, KV cache and workspace on it."
            )
        self._properties = driver.CUmemAllocationProp()
        kinds, places = driver.CUmemAllocationType, driver.CUmemLocationType
        self._properties.type = kinds.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location.type = places.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties.location.id = index
        self._access = driver.CUmemAccessDesc()
        self._access.location = self._properties.location
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE

    def granularity_bytes(self) -> int:
        """Sizes and places of mappings are multiples of this."""
        flags = self._driver.CUmemAllocationGranularity_flags
        least = flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._call(self._driver.cuMemGetAllocationGranularity, self._properties, least))

    def reserve(self, num_bytes: int) -> int:
        """The first of so many addresses. Raises PlanError where they are refused."""
        try:
            return int(self._call(self._driver.cuMemAddressReserve, num_bytes, 0, 0, 0))
        except (DeviceError, PageError) as error:
            raise PlanError(
                f"CUDA refuses to reserve addresses for {num_bytes} bytes: {error} Lower "
                "--gpu-memory or --context."
            ) from error

    def map_new(self, address: int, num_bytes: int) -> Any:
        """Puts new memory at an address; its handle. It cannot be accessed yet."""
        handle = self._call(self._driver.cuMemCreate, num_bytes, self._properties, 0)
        try:
            self._call(self._driver.cuMemMap, address, num_bytes, 0, handle, 0)
        except BaseException:
            self._call(self._driver.cuMemRelease, handle)
            raise
        return handle

    def make_accessible(self, address: int, num_bytes: int) -> None:
        self._call(self._driver.cuMemSetAccess, address, num_bytes, [self._access], 1)

    def unmap(self, address: int, num_bytes: int, handle: Any) -> None:
        self._call(self._driver.cuMemUnmap, address, num_bytes)
        self._call(self._driver.cuMemRelease, handle)

    def free(self, address: int, num_bytes: int) -> None:
        self._call(self._driver.cuMemAddressFree, address, num_bytes)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a driver function returns beside its code. Raises PageError where memory is out,
        DeviceError for any other failure."""
        code, *results = function(*arguments)
        codes = self._driver.CUresult
        if code == codes.CUDA_ERROR_OUT_OF_MEMORY:
            raise PageError(
                f"The GPU has no memory left ({function.__name__}): free what other programs "
                "hold, or lower --gpu-memory."
            )
        if code != codes.CUDA_SUCCESS:
            raise DeviceError(f"CUDA's {function.__name__} failed: {code.name}.")
        return results[0] if results else None
