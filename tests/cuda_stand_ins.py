"""CUDA's streams and runtime, stood in for: work runs at once, on the calling thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class StandInMark:
    """An event that has ended, unless a test says otherwise."""

    def __init__(self) -> None:
        self.has_ended = True
        self.failure: RuntimeError | None = None

    def query(self) -> bool:
        if self.failure is not None:
            raise self.failure
        return self.has_ended


class StandInStream:
    """Work runs at once, on the calling thread; what was waited for is noted."""

    def __init__(self) -> None:
        self.waited_for: list[StandInMark] = []
        self.recorded: list[StandInMark] = []

    def wait_event(self, event: StandInMark) -> None:
        self.waited_for.append(event)

    def record_event(self) -> StandInMark:
        self.recorded.append(StandInMark())
        return self.recorded[-1]


class StandInStreams:
    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self.copies = StandInStream()
        self.current = StandInStream()
        self.is_capturing = lambda: False
        self.refuses_pinned = False
        self.pinned_bytes = 0
        self.num_released = 0

    @contextmanager
    def use(self, stream: StandInStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self.refuses_pinned:
            raise RuntimeError("out of memory")
        block = torch.empty(shape, dtype=dtype)
        self.pinned_bytes += block.nbytes
        return block

    def release(self) -> None:
        self.num_released += 1


class StandInCudart:
    """Registers host memory, or refuses with an error code."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if self.code == 0:
            self.registered[address] = num_bytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0
