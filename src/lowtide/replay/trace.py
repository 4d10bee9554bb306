"""Routing traces: which experts every token of every pass chose, kept small and read safely.

A trace replays against any policy and any machine. On disk it is a numpy archive of plain
arrays: no pickle, every size checked before a byte of data is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.core import (
    BoolArray,
    Demand,
    IntArray,
    PassRows,
    RoutedTokens,
    RowKind,
    Step,
    StepKind,
    WeightArray,
)
from lowtide.errors import StorageError, UsageError
from lowtide.files.array_file import (
    Arrays,
    Contradiction,
    holds_arrays,
    load_arrays,
    made_again,
    save_arrays,
)
from lowtide.files.json_file import as_text

TRACE_VERSION = 3
MAX_TRACE_BYTES = 1 << 32
"""Most routing data of one trace, in memory and when read."""

TRACE_DTYPES = {
    "version": "<i8",
    "shape": "<i8",
    "model": "|u1",
    "passes": "<i4",
    "ids": "<u2",
    "weights": "<f4",
    "requests": "<i4",
    "kinds": "|u1",
}
"""Arrays of a stored trace and their types."""

_KINDS = (StepKind.PREFILL, StepKind.DENOISE, StepKind.DECODE)
_MAX_COUNT = 2**31 - 1
_MAKER = "lowtide generate --trace"


def is_trace(file: IO[bytes]) -> bool:
    """Return True if a file is a trace of any version."""
    return holds_arrays(file, "version", "shape", "passes", "ids")


class TraceShape(NamedTuple):
    """Shape that a trace and its model must share."""

    num_layers: int  # MoE layers
    num_experts: int
    num_experts_per_token: int
    hidden_size: int = 0  # what an expert costs follows from these two
    expert_size: int = 0


class Pass(NamedTuple):
    """One forward pass."""

    step: Step
    block: int  # running number of the diffusion block; 0 where there are none
    num_rows: int
    num_committed: int  # answer tokens that became final in it
    # experts that the placement in force asked to become resident, and that did by its end
    num_moves_asked: int = 0
    num_moves_done: int = 0


_NUM_COLUMNS = len(Pass._fields) + 1  # a step is two of them


class RoutedPass(NamedTuple):
    """One forward pass, row by row."""

    step: Step  # with its rows
    ids: NDArray[np.uint16]  # [rows, layers, k]
    weights: WeightArray  # [rows, layers, k]

    def routing(self, layer: int) -> RoutedTokens:
        """Return a layer's routing."""
        ids = self.ids[:, layer].astype(np.int64)
        return RoutedTokens(ids, np.ascontiguousarray(self.weights[:, layer]))


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """A record of routing, pass by pass: each token's experts, their weights, and its request.

    It holds the router's own choice, whatever ran instead, and nothing of an expert's weights, of
    scores or time.
    """

    model: str  # the model's name or fingerprint, as its recorder gave it
    shape: TraceShape
    passes: tuple[Pass, ...]
    ids: NDArray[np.uint16]  # [rows of all passes, layers, k]
    weights: WeightArray  # [rows of all passes, layers, k] of the router
    requests: NDArray[np.int32]  # [rows of all passes] numbered as they came; -1: none
    kinds: NDArray[np.uint8]  # [rows of all passes] of `RowKind`

    def iter_routed(self) -> Iterator[RoutedPass]:
        """Yield every pass, complete."""
        start = 0
        for one in self.passes:
            part = slice(start, start + one.num_rows)
            rows = PassRows(self.requests[part].astype(np.int64), self.kinds[part])
            step = replace(one.step, rows=rows)
            yield RoutedPass(step, self.ids[part], self.weights[part])
            start = part.stop

    def iter_ids(self) -> Iterator[NDArray[np.uint16]]:
        """Yield expert ids pass by pass, each [rows, layers, k]."""
        return (routed.ids for routed in self.iter_routed())

    def hits(self) -> IntArray:
        """Return tokens routed to each expert, [passes, layers, experts]."""
        counts = [count_hits(ids, self.shape.num_experts) for ids in self.iter_ids()]
        shape = (0, self.shape.num_layers, self.shape.num_experts)
        return np.stack(counts) if counts else np.zeros(shape, np.int64)

    def blocks(self, hits: IntArray | None = None) -> list[IntArray]:
        """Return hits of the passes other than prefill, split where the step counter restarts.

        Each is [steps, layers, experts], as the solvers of tau need. hits: of this trace, if
        already computed.
        """
        hits = self.hits() if hits is None else hits
        blocks: list[list[IntArray]] = []
        last_index = _MAX_COUNT
        for one, counts in zip(self.passes, hits, strict=True):
            if one.step.kind is StepKind.PREFILL:
                continue
            if one.step.index <= last_index:
                blocks.append([])
            blocks[-1].append(counts)
            last_index = one.step.index
        return [np.stack(block) for block in blocks]

    def beginning(self, num_passes: int) -> Trace:
        """Return the first passes as a trace."""
        passes = self.passes[:num_passes]
        rows = slice(sum(p.num_rows for p in passes))
        return replace(
            self,
            passes=passes,
            ids=self.ids[rows],
            weights=self.weights[rows],
            requests=self.requests[rows],
            kinds=self.kinds[rows],
        )

    @property
    def num_committed(self) -> int:
        return sum(p.num_committed for p in self.passes)

    def save(self, path: Path) -> None:
        """Write the trace atomically. Raise StorageError."""
        save_arrays(path, self.arrays(), "trace", is_trace)

    def arrays(self) -> dict[str, Any]:
        """Return the trace as the arrays of `TRACE_DTYPES`."""
        passes = [(_KINDS.index(p.step.kind), p.block, p.step.index, *p[2:]) for p in self.passes]
        return {
            "version": np.array([TRACE_VERSION], np.int64),
            "shape": np.array(self.shape, np.int64),
            "model": np.frombuffer(as_text(self.model).encode(), np.uint8),
            "passes": np.array(passes, np.int32).reshape(len(passes), _NUM_COLUMNS),
            "ids": np.ascontiguousarray(self.ids),
            "weights": np.ascontiguousarray(self.weights),
            "requests": np.ascontiguousarray(self.requests),
            "kinds": np.ascontiguousarray(self.kinds),
        }

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Read a trace that `save` wrote.

        Raises UsageError for another or contradictory file, StorageError if it cannot be read.
        """
        versions = {"version": TRACE_VERSION}
        arrays = load_arrays(path, TRACE_DTYPES, MAX_TRACE_BYTES, "trace", _MAKER, versions)
        try:
            return trace_of(arrays)
        except Contradiction as reason:
            told = f"Trace {path} contradicts itself: {reason}"
            raise UsageError(f"{told}; {made_again(_MAKER)}.") from None


class TraceWriter:
    """Collects passes in memory while a model runs; `trace` makes a `Trace` of them."""

    def __init__(self, model: str, shape: TraceShape, max_bytes: int = MAX_TRACE_BYTES) -> None:
        """`max_bytes`: of routing data, at most; beyond it `begin` raises StorageError."""
        self._model = model
        self._shape = shape
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._passes: list[Pass] = []
        self._ids: list[NDArray[np.uint16]] = []
        self._weights: list[WeightArray] = []
        self._rows: list[PassRows] = []
        self._numbers: dict[int, int] = {-1: -1}  # of requests, by name

    def begin(self, step: Step, block: int, num_rows: int) -> None:
        """Start a pass, whose rows `step` may describe; `record` fills it layer by layer."""
        layers, _, k = self._shape[:3]
        self._num_bytes += num_rows * (6 * layers * k + 5)
        if self._num_bytes > self._max_bytes:
            raise StorageError(
                f"The routing trace would pass {self._max_bytes} bytes; record a shorter run."
            )
        self._passes.append(Pass(Step(step.kind, step.index), block, num_rows, 0))
        self._ids.append(np.zeros((num_rows, layers, k), np.uint16))
        self._weights.append(np.full((num_rows, layers, k), 1 / k, np.float32))
        self._rows.append(step.rows_of(num_rows))

    def record(self, layer: int, ids: IntArray, weights: WeightArray | None = None) -> None:
        """Record one layer's choice in the pass that has begun. ids, weights [rows, k].

        Without weights all experts of a token count the same.
        """
        self._ids[-1][:, layer] = ids
        if weights is not None:
            self._weights[-1][:, layer] = weights

    def append(self, step: Step, block: int, ids: IntArray, num_committed: int = 0) -> None:
        """Add a whole pass. ids [rows, layers, k]."""
        self.begin(step, block, ids.shape[0])
        for layer in range(self._shape.num_layers):
            self.record(layer, ids[:, layer])
        self.commit(num_committed)

    def commit(self, num_tokens: int) -> None:
        """Count answer tokens that became final in the last pass."""
        last = self._passes[-1]
        self._passes[-1] = last._replace(num_committed=last.num_committed + num_tokens)

    def count_moves(self, num_asked: int, num_done: int) -> None:
        """Count experts that should become resident in the last pass, and those that did."""
        last = self._passes[-1]
        self._passes[-1] = last._replace(
            num_moves_asked=last.num_moves_asked + num_asked,
            num_moves_done=last.num_moves_done + num_done,
        )

    def trace(self) -> Trace:
        """Return all passes so far."""
        layers, _, k = self._shape[:3]
        nothing = np.zeros((0, layers, k))
        ids = np.concatenate([nothing.astype(np.uint16), *self._ids])
        weights = np.concatenate([nothing.astype(np.float32), *self._weights])
        names = np.concatenate([np.empty(0, np.int64), *(rows.request for rows in self._rows)])
        kinds = np.concatenate([np.empty(0, np.uint8), *(rows.kind for rows in self._rows)])
        requests = [self._numbers.setdefault(n, len(self._numbers) - 1) for n in names.tolist()]
        return Trace(
            self._model,
            self._shape,
            tuple(self._passes),
            ids,
            weights,
            np.array(requests, np.int32),
            kinds,
        )


def count_hits(ids: NDArray[np.uint16], num_experts: int) -> IntArray:
    """Count tokens routed to each expert: ids [rows, layers, k] -> [layers, experts]."""
    num_layers = ids.shape[1]
    offsets = np.arange(num_layers)[:, None] * num_experts
    flat = (ids.astype(np.int64) + offsets).ravel()
    counts: IntArray = np.bincount(flat, minlength=num_layers * num_experts)
    return counts.reshape(num_layers, num_experts)


def demand_of(hits: IntArray, is_resident: BoolArray) -> Demand:
    """Return one layer's demand from its hits. hits, is_resident [experts]."""
    experts = np.flatnonzero(hits)
    return Demand(experts, hits[experts], is_resident[experts])


def trace_of(arrays: Arrays) -> Trace:
    """Rebuild the trace from its `arrays`; raise Contradiction."""
    passes, ids = arrays["passes"], arrays["ids"]
    if (
        arrays["shape"].shape != (len(TraceShape._fields),)
        or passes.ndim != 2
        or passes.shape[1] != _NUM_COLUMNS
    ):
        raise Contradiction("its tables have other columns than a trace's")
    shape = TraceShape(*arrays["shape"].tolist())
    _check_shape(shape)
    try:
        model = arrays["model"].tobytes().decode()
    except UnicodeDecodeError as reason:
        raise Contradiction(str(reason)) from None
    if (passes < 0).any() or (passes[:, 0] >= len(_KINDS)).any():
        raise Contradiction("a pass has a kind or count that cannot be")
    num_rows = int(passes[:, 3].sum(dtype=np.int64))
    expected = (num_rows, shape.num_layers, shape.num_experts_per_token)
    if ids.shape != expected:
        raise Contradiction(f"its ids have shape {ids.shape}, its passes {expected}")
    if ids.size and int(ids.max()) >= shape.num_experts:
        raise Contradiction(f"expert {int(ids.max())} of {shape.num_experts} is named")
    weights, requests, kinds = (arrays[name] for name in ("weights", "requests", "kinds"))
    if weights.shape != expected or requests.shape != (num_rows,) or kinds.shape != (num_rows,):
        raise Contradiction("it has other weights or requests than rows")
    if not (np.isfinite(weights) & (weights >= 0)).all():
        raise Contradiction("a router's weight cannot be what it says")
    if (requests < -1).any() or (kinds > max(RowKind)).any():
        raise Contradiction("a row is of a request or kind that cannot be")
    rows = [
        Pass(Step(_KINDS[kind], index), block, *counts)
        for kind, block, index, *counts in passes.tolist()
    ]
    return Trace(model, shape, tuple(rows), ids, weights, requests, kinds)


def _check_shape(shape: TraceShape) -> None:
    layers, experts, k = shape[:3]
    if not all(0 <= size <= _MAX_COUNT for size in (shape.hidden_size, shape.expert_size)):
        raise Contradiction(
            f"its experts cannot be of {shape.hidden_size} x {shape.expert_size} weights"
        )
    if not (1 <= layers <= 1 << 16 and 1 <= experts <= 1 << 16 and 1 <= k <= experts):
        raise Contradiction(
            f"it cannot have {layers} layers of {experts} experts, {k} per token; each is from 1 "
            f"to {1 << 16}"
        )
