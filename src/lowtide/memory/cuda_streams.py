"""CUDA streams, events with a time limit, pinned rows and typed errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from os import sched_yield
from time import perf_counter, sleep
from typing import Any, NamedTuple, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from lowtide.config import format_size
from lowtide.errors import DeviceError, PlanError
from lowtide.threads.event import WAIT_LIMIT_S, Event

_SPIN_S = 2e-3  # a layer's synchronisation is shorter; any sleep takes at least 60 us
_PAUSE_S = 1e-4


class RecordedEvent(Protocol):
    """A recorded CUDA event."""

    def query(self) -> bool: ...


class Stream(Protocol):
    """A CUDA stream."""

    def wait_event(self, event: Any) -> None: ...

    def record_event(self) -> RecordedEvent: ...


class Streams(Protocol):
    """The interface to CUDA that a device needs."""

    torch_device: torch.device
    copies: Stream
    is_capturing: Callable[[], bool]  # True while the calling thread's work becomes a CUDA graph

    @property
    def current(self) -> Stream:
        """The stream that the calling thread queues on."""
        ...

    def use(self, stream: Stream) -> AbstractContextManager[None]:
        """Make `stream` current within the context."""
        ...

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate uninitialised pinned host memory. Raises RuntimeError if it is refused."""
        ...

    def release(self) -> None:
        """Return unused device memory from torch's cache to CUDA."""
        ...


class CudaStreams:
    """Streams of the process's current GPU."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self.copies: Stream = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self.is_capturing = torch.cuda.is_current_stream_capturing

    @property
    def current(self) -> Stream:
        stream: Stream = torch.cuda.current_stream(self.torch_device)
        return stream

    def use(self, stream: Stream) -> AbstractContextManager[None]:
        return torch.cuda.stream(stream)  # type: ignore[arg-type]

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def release(self) -> None:
        torch.cuda.empty_cache()


def free_memory_bytes() -> int:
    """Return the GPU memory available now to this process or any other."""
    torch.cuda.empty_cache()  # CUDA counts torch's cached memory as used
    return torch.cuda.mem_get_info()[0]


class CudaEvent:
    """A point in a stream's order of work."""

    __slots__ = ("recorded",)

    def __init__(self, recorded: RecordedEvent) -> None:
        self.recorded = recorded

    def is_done(self) -> bool:
        try:
            return self.recorded.query()
        except RuntimeError:  # ended by a failure, which `wait` reports
            return True

    def wait(self, limit_s: float = WAIT_LIMIT_S) -> None:
        try:
            if not self.recorded.query():
                _wait_until(self.recorded.query, limit_s)
        except RuntimeError as error:
            raise device_error("running what was queued", error) from error

    def wait_until_ended(self, limit_s: float = WAIT_LIMIT_S) -> None:
        """Wait as `wait` does, but ignore failures of the work."""
        _wait_until(self.is_done, limit_s)


def _wait_until(is_done: Callable[[], bool], limit_s: float) -> None:
    start_s = perf_counter()
    while not is_done():
        waited_s = perf_counter() - start_s
        if waited_s > limit_s:
            raise DeviceError(
                f"The GPU has not ended its work within {limit_s:g} s: its link or driver "
                "hangs. Restart the process; `nvidia-smi` tells whether the GPU answers."
            )
        if waited_s < _SPIN_S:
            sched_yield()  # also lets other threads have the interpreter
        else:
            sleep(_PAUSE_S)


class PinnedRow(NamedTuple):
    """The same memory as a tensor and as a numpy array, whose small operations cost far less."""

    tensor: Tensor
    array: NDArray[Any]


class PinnedRing:
    """Rows of pinned memory that are written and handed to a stream in turn."""

    def __init__(self, streams: Streams, shape: tuple[int, int], dtype: torch.dtype) -> None:
        with plan_errors(shape[0] * shape[1] * dtype.itemsize, "pinned host memory"):
            rows = streams.pinned(shape, dtype)
        self._rows = [PinnedRow(row, row.numpy()) for row in rows]
        self._uses: list[CudaEvent | None] = [None] * shape[0]
        self._next = 0
        self.num_columns = shape[1]

    def take(self) -> PinnedRow:
        """Return the next row once its last use has ended; call `used` afterwards."""
        use = self._uses[self._next]
        if use is not None:
            use.wait()
        return self._rows[self._next]

    def used(self, use: CudaEvent) -> None:
        """Mark the latest row as free after `use`."""
        self._uses[self._next] = use
        self._next = (self._next + 1) % len(self._uses)


def wait_on(stream: Stream, after: Event | None) -> None:
    if isinstance(after, CudaEvent):
        stream.wait_event(after.recorded)
    elif after is not None:  # of another kind of device
        after.wait()


@contextmanager
def device_errors(doing: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise device_error(doing, error) from error


def device_error(doing: str, error: RuntimeError) -> DeviceError:
    """Return the typed error; for calls in every layer, to which a context adds three."""
    return DeviceError(f"The GPU failed while {doing}: {error}")


@contextmanager
def device_pass() -> Iterator[None]:
    """Set GPU options for passes, and convert torch's errors to DeviceError.

    cuDNN's attention, torch's first choice on some GPUs, builds a plan for every number of keys,
    which takes about 30 ms on the host, and every block has another number. Float32 products, above
    all routers', must not use TF32, which some containers enable. Both settings belong to the
    process and are restored afterwards.
    """
    attention, products = torch.backends.cuda, torch.backends.cuda.matmul
    uses_cudnn = attention.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    precision = products.fp32_precision
    try:
        attention.enable_cudnn_sdp(False)
        products.fp32_precision = "ieee"
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            "The GPU's memory ran out; lower `gpu_memory` or `context`, or free memory that other "
            f"programs hold: {error}"
        ) from error
    except torch.AcceleratorError as error:
        raise DeviceError(f"The GPU failed: {error}") from error
    finally:
        attention.enable_cudnn_sdp(uses_cudnn)
        products.fp32_precision = precision


@contextmanager
def plan_errors(num_bytes: int, what: str) -> Iterator[None]:
    """Convert torch's refusals of memory to PlanError."""
    try:
        yield
    except RuntimeError as error:
        raise PlanError(
            f"{format_size(num_bytes)} of {what} cannot be had; lower `gpu_memory` or `context`, "
            f"or free memory that other programs hold: {error}"
        ) from error
