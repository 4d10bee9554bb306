"""A GPU's memory management that is not there: `cuda.bindings.driver` as far as `CudaPages` uses
it, over host memory, with the rules of the driver API.

What the real driver refuses is refused with its codes; what it lets happen and should not be done
(unmapping what may be in use, releasing what is mapped) raises.
"""

from __future__ import annotations

import ctypes
import enum
import mmap
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

GRANULARITY = 2 << 20


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100


OK, INVALID = CUresult.CUDA_SUCCESS, CUresult.CUDA_ERROR_INVALID_VALUE


class StandInDriver:
    """Counts what is created, mapped, accessible; `calls` names every call in order."""

    CUresult = CUresult
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED="managed"
    )
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED="pinned")
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE="device")
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE="both")
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM="least")

    def __init__(
        self, memory_bytes: int = 1 << 40, granularity: int = GRANULARITY, is_able: bool = True
    ) -> None:
        self.memory_bytes = memory_bytes
        self.granularity = granularity
        self.is_able = is_able
        self.is_idle = True  # whether nothing queued may use memory
        self.calls: list[str] = []
        self.reserved: dict[int, tuple[int, mmap.mmap]] = {}
        self.created: dict[int, int] = {}  # handle: bytes
        self.mapped: dict[int, tuple[int, int]] = {}  # address: bytes, handle
        self.accessible: set[int] = set()
        self._num_handles = 0
        self.fails: dict[str, tuple[int, CUresult]] = {}  # call: when its count is, what it says

    # What the project calls

    def cuInit(self, flags: int) -> tuple[CUresult]:
        return (self._note("cuInit"),)

    def cuDeviceGet(self, index: int) -> tuple[CUresult, int]:
        return self._note("cuDeviceGet"), index

    def cuDeviceGetAttribute(self, attribute: str, device: int) -> tuple[CUresult, int]:
        assert attribute == "managed"
        return OK, int(self.is_able)

    @staticmethod
    def CUmemAllocationProp() -> Any:
        return SimpleNamespace(location=SimpleNamespace())

    @staticmethod
    def CUmemAccessDesc() -> Any:
        return SimpleNamespace()

    def cuMemGetAllocationGranularity(self, prop: Any, option: str) -> tuple[CUresult, int]:
        assert (prop.type, prop.location.type, option) == ("pinned", "device", "least")
        return OK, self.granularity

    def cuMemAddressReserve(
        self, num_bytes: int, alignment: int, hint: int, flags: int
    ) -> tuple[CUresult, int]:
        code = self._note("cuMemAddressReserve")
        if code != OK or num_bytes <= 0 or num_bytes % self.granularity or flags:
            return code or INVALID, 0
        memory = mmap.mmap(-1, num_bytes + self.granularity)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        address = -(-start // self.granularity) * self.granularity
        self.reserved[address] = num_bytes, memory
        return OK, address

    def cuMemCreate(self, num_bytes: int, prop: Any, flags: int) -> tuple[CUresult, int]:
        code = self._note("cuMemCreate")
        if code == OK and sum(self.created.values()) + num_bytes > self.memory_bytes:
            code = CUresult.CUDA_ERROR_OUT_OF_MEMORY
        if code != OK or num_bytes % self.granularity or flags:
            return code or INVALID, 0
        assert (prop.type, prop.location.type) == ("pinned", "device")
        self._num_handles += 1
        self.created[self._num_handles] = num_bytes
        return OK, self._num_handles

    def cuMemMap(
        self, address: int, num_bytes: int, offset: int, handle: int, flags: int
    ) -> tuple[CUresult]:
        code = self._note("cuMemMap")
        is_free = not any(
            start < address + num_bytes and address < start + size
            for start, (size, _) in self.mapped.items()
        )
        is_right = offset == flags == 0 and self.created.get(handle) == num_bytes
        if code != OK or not (is_free and is_right and self._is_reserved(address, num_bytes)):
            return (code or INVALID,)
        self.mapped[address] = num_bytes, handle
        return (OK,)

    def cuMemSetAccess(
        self, address: int, num_bytes: int, descriptions: list[Any], count: int
    ) -> tuple[CUresult]:
        code = self._note("cuMemSetAccess")
        [description] = descriptions
        assert (description.flags, description.location.type, count) == ("both", "device", 1)
        inside = {a: size for a, (size, _) in self.mapped.items() if 0 <= a - address < num_bytes}
        if code != OK or sum(inside.values()) != num_bytes:
            return (code or INVALID,)
        self.accessible |= set(inside)
        return (OK,)

    def cuMemUnmap(self, address: int, num_bytes: int) -> tuple[CUresult]:
        code = self._note("cuMemUnmap")
        if code != OK or self.mapped.get(address, (0, 0))[0] != num_bytes:
            return (code or INVALID,)
        if address in self.accessible:
            assert self.is_idle, "what is queued may still use it"
        del self.mapped[address]
        self.accessible.discard(address)
        return (OK,)

    def cuMemRelease(self, handle: int) -> tuple[CUresult]:
        code = self._note("cuMemRelease")
        if code != OK or handle not in self.created:
            return (code or INVALID,)
        assert all(handle != other for _, other in self.mapped.values()), "it is still mapped"
        del self.created[handle]
        return (OK,)

    def cuMemAddressFree(self, address: int, num_bytes: int) -> tuple[CUresult]:
        code = self._note("cuMemAddressFree")
        if code != OK or self.reserved.get(address, (0, None))[0] != num_bytes:
            return (code or INVALID,)
        assert not any(0 <= a - address < num_bytes for a in self.mapped), "some is still mapped"
        del self.reserved[address]
        return (OK,)

    # What a GPU is beside it

    def tensor(self, address: int, num_bytes: int) -> Tensor:
        """Torch asks what memory the first address has; there must be some."""
        assert address in self.accessible, "torch finds no GPU memory here"
        size, memory = self.reserved[address]
        assert num_bytes == size
        offset = address - ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=offset)

    def synchronize(self) -> None:
        self.calls.append("synchronize")
        self.is_idle = True

    def fail(self, name: str, when: int, code: CUresult) -> None:
        """The `when`-th call of that name from now on answers with `code`."""
        self.fails[name] = when + self.calls.count(name), code

    @property
    def is_empty(self) -> bool:
        return not (self.reserved or self.created or self.mapped or self.accessible)

    def _note(self, name: str) -> CUresult:
        self.calls.append(name)
        when, code = self.fails.get(name, (0, OK))
        return code if self.calls.count(name) == when else OK

    def _is_reserved(self, address: int, num_bytes: int) -> bool:
        is_whole = address % self.granularity == num_bytes % self.granularity == 0
        return is_whole and any(
            start <= address and address + num_bytes <= start + size
            for start, (size, _) in self.reserved.items()
        )
