"""CUDA as lowtide uses it: streams, events that end within a limit, pinned rows, typed errors."""

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

_SPIN_S = 2e-3  # a layer's synchronisation is shorter; any sleep takes 60 us at least
_PAUSE_S = 1e-4


class RecordedEvent(Protocol):
    """A recorded event, as CUDA has it."""

    def query(self) -> bool: ...


class Stream(Protocol):
    """A stream, as CUDA has it."""

    def wait_event(self, event: Any) -> None: ...

    def record_event(self) -> RecordedEvent: ...


class Streams(Protocol):
    """All that a device needs of CUDA."""

    torch_device: torch.device
    copies: Stream

    @property
    def current(self) -> Stream:
        """The stream that the calling thread queues on."""
        ...

    def use(self, stream: Stream) -> AbstractContextManager[None]:
        """Makes `stream` the current one for a while."""
        ...

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised pinned host memory. Raises RuntimeError where it is refused."""
        ...

    def release(self) -> None:
        """Gives the device memory that torch keeps for later, but nothing uses, back to CUDA."""
        ...


class CudaStreams:
    """Streams of the process's current GPU."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self.copies: Stream = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]

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
    """GPU memory that can be taken now, by this process or any other."""
    torch.cuda.empty_cache()  # CUDA does not know what torch only keeps for later
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
        with device_errors("running what was queued"):
            _wait_until(self.recorded.query, limit_s)

    def wait_until_ended(self, limit_s: float = WAIT_LIMIT_S) -> None:
        """As `wait`, whether the work failed or not."""
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
    """The same memory for torch and for numpy, whose small operations cost far less."""

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
        """The next row, once its last use has ended; `used` follows."""
        use = self._uses[self._next]
        if use is not None:
            use.wait()
        return self._rows[self._next]

    def used(self, stream: Stream) -> None:
        """The row taken last is free after what has been queued on `stream`."""
        self._uses[self._next] = CudaEvent(stream.record_event())
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
        raise DeviceError(f"The GPU failed while {doing}: {error}") from error


@contextmanager
def device_pass() -> Iterator[None]:
    """Around passes of a model, on whatever device: settles how a GPU attends and multiplies, and
    makes what torch raises of one that fails a DeviceError.

    cuDNN's attention, torch's first choice on some GPUs, builds a plan of its own for every number
    of keys, for some 30 ms on the host, and there is another number in every block. Products in
    float32, routers' above all, are not to be TF32's, which some containers choose. Both are
    settings of the process, put back afterwards.
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
            "The GPU's memory ran out; lower --gpu-memory or --context, or free memory that other "
            f"programs hold: {error}"
        ) from error
    except torch.AcceleratorError as error:
        raise DeviceError(f"The GPU failed: {error}") from error
    finally:
        attention.enable_cudnn_sdp(uses_cudnn)
        products.fp32_precision = precision


@contextmanager
def plan_errors(num_bytes: int, what: str) -> Iterator[None]:
    """What torch says of memory that it does not get becomes a PlanError."""
    try:
        yield
    except RuntimeError as error:
        raise PlanError(
            f"{format_size(num_bytes)} of {what} cannot be had; lower --gpu-memory or --context, "
            f"or free memory that other programs hold: {error}"
        ) from error
