"""CUDA graphs: work of a pass that is captured once, and queued again in few calls.

A graph repeats the same work over the same memory. What differs from pass to pass, such as
attention over one key more, is queued anew between two graphs: `Recorder.apart` says where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import torch

from lowtide.errors import InternalError
from lowtide.memory.cuda_streams import CudaEvent

Apart = Callable[[Any], None]
"""Queues what differs from pass to pass, by what it is given of the pass."""


class Step(NamedTuple):
    """A graph, and what is queued anew after it."""

    graph: torch.cuda.CUDAGraph
    apart: Apart | None  # None: nothing, after the last graph


class Recorder:
    """Captures what the calling thread queues on a GPU.

    All captures share a pool of memory, for what torch allocates in them: a capture may use again
    what another one does. So the steps of a capture are only ever queued all, in their order.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # The default stream, on which everything else is queued, cannot be captured.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._steps: list[Step] = []
        self._graph: torch.cuda.CUDAGraph | None = None  # that is being captured
        self._on_stream = ExitStack()
        self.is_capturing = False  # also in a part that is apart

    @contextmanager
    def capture(self) -> Iterator[list[Step]]:
        """Capture within the context, and queue what is captured, step by step.

        Yields the steps, which are complete after the context. Raises RuntimeError if CUDA refuses
        to capture something; what came before may be queued then.
        """
        self._steps = steps = list[Step]()
        self.is_capturing = True
        try:
            self._begin()
            yield steps
            self._end(None)
        finally:
            self.is_capturing = False
            self._abandon()

    def apart(self, part: Apart, given: object) -> None:
        """Queue a part of the pass that is being captured, between two graphs."""
        self._end(part)
        part(given)
        self._begin()

    def end_of_queue(self) -> CudaEvent:
        """Return the event of the end of all that is queued."""
        return CudaEvent(torch.cuda.current_stream(self._device).record_event())

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        self._on_stream.enter_context(torch.cuda.stream(self._stream))
        # Other threads may allocate memory and wait for the GPU meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._graph = graph

    def _end(self, apart: Apart | None) -> None:
        graph, self._graph = self._graph, None
        if graph is None:
            raise InternalError("A part of a pass that is apart from its graphs has another.")
        try:
            graph.capture_end()
        finally:
            self._on_stream.close()
        graph.replay()
        self._steps.append(Step(graph, apart))

    def _abandon(self) -> None:
        """End a capture that failed."""
        graph, self._graph = self._graph, None
        if graph is not None:
            with suppress(RuntimeError):
                graph.capture_end()
        self._on_stream.close()


def queue_again(steps: Sequence[Step], given: object) -> None:
    """Queue what was captured; given: of this pass, for what is apart."""
    for graph, apart in steps:
        graph.replay()
        if apart is not None:
            apart(given)
