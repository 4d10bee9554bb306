"""Records the routing of a run: what `simulate` replays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from lowtide.core import Step, StepKind
from lowtide.experts.rows import Routing
from lowtide.llm import LLM
from lowtide.replay.trace import TraceShape, TraceWriter


@contextmanager
def recorded(llm: LLM, path: Path, model: str) -> Iterator[None]:
    """Writes the routing of every pass inside to `path`, when the last one is done.

    `model`: the name that the trace will carry. Raises StorageError if it cannot be written,
    UnsupportedError for a model without experts.
    """
    recorder = Recorder(llm, model)
    with llm.observed(recorder):
        yield
    recorder.finish()
    recorder.writer.save(path)


class Recorder:
    """Watches an `LLM` and writes down who was routed where; `writer` has the trace.

    A diffusion block begins where the step counter restarts.
    """

    def __init__(self, llm: LLM, model: str) -> None:
        llm.config.check_experts("A trace is of experts")
        self.writer = TraceWriter(model, TraceShape(*llm.config.moe_shape))
        self._llm = llm
        self._num_committed = self._total_committed()
        self._num_passes = 0
        self._block = 0
        self._last_index = -1

    def saw_layer(self, layer: int, step: Step, x: Tensor, routing: Routing, out: Tensor) -> None:
        if layer == 0:
            self._begin(step, routing.experts.shape[0])
        experts, weights = (part.cpu().numpy() for part in routing)
        self.writer.record(layer, experts, weights)

    def finish(self) -> None:
        """Counts the answer's tokens that the last pass made final."""
        if self._num_passes:
            self.writer.commit(self._total_committed() - self._num_committed)
            self._num_committed = self._total_committed()

    def _begin(self, step: Step, num_rows: int) -> None:
        self.finish()
        if step.kind is not StepKind.PREFILL:
            self._block += 0 <= step.index <= self._last_index
            self._last_index = step.index
        self._num_passes += 1
        self.writer.begin(step, self._block, num_rows)

    def _total_committed(self) -> int:
        return int(self._llm.stats()["committed_tokens"])
