"""Gated delta-net: a mixer that keeps a matrix for each value head in place of keys and values.

Hidden states are projected to queries, keys and values, which pass a short causal convolution, and
to an output gate, a strength and a decay for each value head (`kernels/reference_delta.py`). Rows
of an answer advance the state one by one. Rows of a prompt do so in chunks that end at multiples of
`CHUNK` of their absolute positions, so that results do not depend on how passes divide a prompt at
such places, nor on which other sequences are in the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lowtide.compute import Compute
from lowtide.config import DeltaNetSpec, ModelConfig
from lowtide.kernels.layer_parts import DeltaParts, NormParts
from lowtide.kernels.operands import DeltaRows, DeltaState, DeltaWeights
from lowtide.layers.batch import Batch, Segment
from lowtide.layers.linear import Linear
from lowtide.layers.norm import Norm
from lowtide.layers.rotary import Rotations
from lowtide.memory.kv_cache import KVCache

CHUNK = 64
"""Rows of a prompt that advance the state together. Fixed, because it decides bits."""


@dataclass(frozen=True, slots=True)
class DeltaProjections:
    """Projections of hidden states.

    gates: None if `mixed` makes both, key head by key head: [query | key | values | gates].
    time: None if `beta` makes both, key head by key head: [beta | time].
    """

    spec: DeltaNetSpec
    compute: Compute
    mixed: Linear
    gates: Linear | None
    beta: Linear
    time: Linear | None

    def forward(self, x: Tensor, rows: DeltaRows, gates: Tensor) -> None:
        """Project x [rows, hidden]; rows, gates [rows, value_size]: to be filled."""
        if self.gates is None:
            self._divide(self.mixed, x, self._by_key_head(rows.mixed, gates))
        else:
            self.mixed.forward(x, rows.mixed)
            self.gates.forward(x, gates)
        if self.time is None:
            heads = (x.shape[0], self.spec.key_heads, -1)
            self._divide(self.beta, x, (rows.beta.view(heads), rows.time.view(heads)))
        else:
            self.beta.forward(x, rows.beta)
            self.time.forward(x, rows.time)

    def _by_key_head(self, mixed: Tensor, gates: Tensor) -> tuple[Tensor, ...]:
        """View queries, keys, values and gates, each [rows, key_heads, width]."""
        spec = self.spec
        own = torch.split(mixed, [spec.key_size, spec.key_size, spec.value_size], dim=1)
        return tuple(part.view(len(mixed), spec.key_heads, -1) for part in (*own, gates))

    def _divide(self, linear: Linear, x: Tensor, parts: Sequence[Tensor]) -> None:
        """Compute a product whose features are key heads, each with its share of all parts."""
        workspace, widths = self.compute.workspace, [part.shape[2] for part in parts]
        with workspace.scope():
            shape = (x.shape[0], self.spec.key_heads, sum(widths))
            whole = workspace.take("delta product", shape, x.dtype)
            linear.forward(x, whole.view(len(x), -1))
            for part, own in zip(parts, torch.split(whole, widths, dim=2), strict=True):
                part.copy_(own)


class DeltaNet:
    """Gated delta-net of one layer, with its projections."""

    def __init__(
        self,
        layer: int,
        config: ModelConfig,
        projections: DeltaProjections,
        weights: DeltaWeights,
        norm: Tensor,
        output: Linear,
        kv_cache: KVCache,
        compute: Compute,
    ) -> None:
        """norm: [value_width], of each head's output before its gate."""
        self._layer = layer
        self._spec = weights.spec
        self._eps = config.rms_norm_eps
        self._projections = projections
        self._weights = weights
        self._norm = norm
        self._output = output
        self._kv_cache = kv_cache
        self._compute = compute

    def parts(self, norm: Norm) -> DeltaParts:
        """Return parts for kernels that run whole layers."""
        gates, time = self._projections.gates, self._projections.time
        tail, matrices = self._kv_cache.state_offsets(self._layer)
        return DeltaParts(
            norm.parts(),
            self._projections.mixed.product,
            None if gates is None else gates.product,
            self._projections.beta.product,
            None if time is None else time.product,
            self._weights,
            NormParts(self._norm, self._eps),
            self._output.product,
            (tail, matrices),
        )

    def forward(self, x: Tensor, norm: Norm, batch: Batch, rotations: Rotations) -> None:
        """Compute `x += mixer(norm(x))`, x [rows, hidden]; writes the sequences' states."""
        spec, workspace, kernels = self._spec, self._compute.workspace, self._compute.kernels
        num_rows, num_cores = len(x), self._compute.executor.num_cores

        def take(name: str, *shape: int) -> Tensor:
            return workspace.take(name, (num_rows, *shape), x.dtype)

        normed = norm.of(x)
        gates = take("delta gates", spec.value_heads, spec.value_width)
        attended = take("attended", spec.value_heads, spec.value_width)
        rows = DeltaRows(
            take("delta mixed", spec.channels),
            take("delta strengths", spec.value_heads),
            take("delta time", spec.value_heads),
        )
        self._projections.forward(normed, rows, gates.view(num_rows, -1))
        workspace.give_back(normed)
        self._compute.between_graphs(partial(self._advance_all, rows, attended), batch.segments)
        workspace.give_back(*rows)
        kernels.gated_norm(attended, gates, self._norm, self._eps, workspace, num_cores)
        update = take("update", x.shape[1])
        self._output.forward(attended.view(num_rows, -1), update)
        x.add_(update)

    def _advance_all(self, rows: DeltaRows, out: Tensor, segments: Sequence[Segment]) -> None:
        for segment in segments:
            self._advance(segment, rows, out)

    def _advance(self, segment: Segment, rows: DeltaRows, out: Tensor) -> None:
        """Advance a sequence's state by its rows; out [rows, value_heads, value_width]."""
        kernels, workspace = self._compute.kernels, self._compute.workspace
        executor = self._compute.executor
        states = self._kv_cache.states(self._layer, segment.kv)
        before, after = DeltaState(*states.before), DeltaState(*states.after)
        for part in _kinds_of(segment) if out.is_meta else parts_of(segment):
            own = DeltaRows(*(tensor[part] for tensor in rows))
            operands = (own, self._weights, before, after, out[part], workspace)
            if segment.goes_by_rows or part.stop - part.start == 1:
                kernels.delta_steps(*operands, executor.num_cores)
            else:
                kernels.delta_chunk(*operands, executor.run, executor.num_cores)
            before = after


def parts_of(segment: Segment) -> Iterator[slice]:
    """Divide a segment's rows by calls, each of which advances the sequence's state."""
    if segment.goes_by_rows:
        yield slice(segment.start, segment.stop)
        return
    row, position = segment.start, segment.first_position
    while row < segment.stop:
        length = min(segment.stop - row, CHUNK - position % CHUNK)
        yield slice(row, row + length)
        row, position = row + length, position + length


def _kinds_of(segment: Segment) -> list[slice]:
    """Return the largest rows that each kernel gets of a segment, for passes that are counted."""
    num_rows = segment.stop - segment.start
    return [slice(0, 1), *([slice(0, min(num_rows, CHUNK))] if num_rows > 1 else [])]
