"""Recording of a run's routing, which `simulate` replays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from lowtide.core import Step, StepKind
from lowtide.experts.rows import Routing
from lowtide.llm import LLM
from lowtide.replay.trace import TraceShape, TraceWriter

_MOVES = ("num_moves_asked", "num_moves_done")


@contextmanager
def recorded(llm: LLM, path: Path, model: str) -> Iterator[None]:
    """Record the routing of every pass of the block, and write it to `path` at the end.

    `model`: the model's name in the trace. Raises StorageError if it cannot be written,
    UnsupportedError for a model without experts.
    """
    recorder = Recorder(llm, model)
    with llm.observed(recorder):
        yield
    recorder.finish()
    recorder.writer.trace().save(path)


class Recorder:
    """Observer of an `LLM` that records its routing; `writer` has the trace.

    A diffusion block begins when the step counter restarts.
    """

    def __init__(self, llm: LLM, model: str) -> None:
        llm.config.check_experts("A trace is of experts")
        self.writer = TraceWriter(model, TraceShape(*llm.config.moe_shape))
        self._llm = llm
        self._num_committed = self._total("committed_tokens")
        self._num_moves = [self._total(name) for name in _MOVES]
        self._num_passes = 0
        self._block = 0
        self._last_index = -1

    def saw_layer(self, layer: int, step: Step, x: Tensor, routing: Routing, out: Tensor) -> None:
        if layer == 0:
            self._begin(step, routing.experts.shape[0])
        experts, weights = (part.cpu().numpy() for part in routing)
        self.writer.record(layer, experts, weights)
        if layer == self._llm.config.moe_shape.num_layers - 1:
            self._count_moves()

    def finish(self) -> None:
        """Count the tokens that the last pass committed."""
        if self._num_passes:
            num_committed = self._total("committed_tokens")
            self.writer.commit(num_committed - self._num_committed)
            self._num_committed = num_committed

    def _begin(self, step: Step, num_rows: int) -> None:
        self.finish()
        if step.kind is not StepKind.PREFILL:
            self._block += 0 <= step.index <= self._last_index
            self._last_index = step.index
        self._num_passes += 1
        self.writer.begin(step, self._block, num_rows)

    def _count_moves(self) -> None:
        num_moves = [self._total(name) for name in _MOVES]
        asked, done = (now - then for now, then in zip(num_moves, self._num_moves, strict=True))
        self.writer.count_moves(asked, done)
        self._num_moves = num_moves

    def _total(self, name: str) -> int:
        return int(self._llm.stats()[name])
