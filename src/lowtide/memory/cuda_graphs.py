"""CUDA graphs: work of a pass that is captured once, and queued again in few calls.

A graph repeats the same work over the same memory. What differs from pass to pass, such as
attention over one key more, is queued anew in a gap between two graphs: `Recorder.cut` makes one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import torch

from lowtide.errors import InternalError
from lowtide.memory.cuda_streams import CudaEvent

Gap = Callable[[Any], None]
"""Queues what differs from pass to pass, by what it is given of the pass.

It reads and writes memory that is the same in each pass, and no tensor that a graph has made.
"""


class Piece(NamedTuple):
    """A graph, and the gap after it."""

    graph: torch.cuda.CUDAGraph
    gap: Gap | None  # None after the last graph


class Recorder:
    """Captures what the calling thread queues on a GPU.

    Captures share one stream and one pool of memory, for what torch and cuBLAS allocate in them. A
    pass reads nothing that another one left there, and all are queued on one stream: so each may
    use again what the others do. The pool always has a graph, since torch cannot capture into one
    that has lost its last; and cuBLAS' memory for the stream is in it, which all graphs use.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # The default stream, on which everything else is queued, cannot be captured.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._first: torch.cuda.CUDAGraph | None = None  # keeps the pool
        self._pieces: list[Piece] = []
        self._graph: torch.cuda.CUDAGraph | None = None  # that is being captured
        self._on_stream = ExitStack()
        self.is_capturing = False  # also in a gap

    @contextmanager
    def capture(self) -> Iterator[list[Piece]]:
        """Capture within the context, and queue what is captured, piece by piece.

        Yields the pieces, which are complete after the context. Raises RuntimeError if CUDA refuses
        to capture something; what came before may be queued then.
        """
        self._pieces = pieces = list[Piece]()
        self.is_capturing = True
        try:
            if self._first is None:
                self._begin()
                torch.zeros(1, device=self._device)  # a graph must not be empty
                self._first = self._end()
            self._begin()
            yield pieces
            pieces.append(Piece(self._queued(), None))
        finally:
            self.is_capturing = False
            self._abandon()

    def cut(self, gap: Gap, given: object) -> None:
        """Begin another graph of the pass that is being captured, after a gap."""
        self._pieces.append(Piece(self._queued(), gap))
        gap(given)
        self._begin()

    def end_of_queue(self) -> CudaEvent:
        """Return the event of the end of all that is queued."""
        return CudaEvent(torch.cuda.current_stream(self._device).record_event())

    def _begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._on_stream.enter_context(torch.cuda.stream(self._stream))
        # Other threads may allocate memory and wait for the GPU meanwhile.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def _queued(self) -> torch.cuda.CUDAGraph:
        graph = self._end()
        graph.replay()
        return graph

    def _end(self) -> torch.cuda.CUDAGraph:
        graph, self._graph = self._graph, None
        if graph is None:
            raise InternalError("A gap between two graphs has another gap in it.")
        try:
            graph.capture_end()
        finally:
            self._on_stream.close()
        return graph

    def _abandon(self) -> None:
        """End a capture that failed."""
        if self._graph is not None:
            with suppress(RuntimeError, Warning):
                self._end()
        self._on_stream.close()


def queue_again(pieces: Sequence[Piece], given: object) -> None:
    """Queue what was captured; given: of this pass, for the gaps."""
    for graph, gap in pieces:
        graph.replay()
        if gap is not None:
            gap(given)
