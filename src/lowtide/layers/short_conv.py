"""Gated short convolution: the mixer of LFM2's layers without attention."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.compute import Compute
from lowtide.config import ModelConfig
from lowtide.kernels.layer_parts import ShortConvParts
from lowtide.layers.batch import Batch, Segment
from lowtide.layers.linear import Linear
from lowtide.layers.norm import Norm
from lowtide.layers.rotary import Rotations
from lowtide.memory.kv_cache import KVCache


class ShortConv:
    """A short causal convolution of one layer, for each channel by itself.

    Hidden states are projected to [gate | output gate | input], and the convolution sees the
    products of gates and inputs. Those of a sequence's last positions are its state: [kernel - 1,
    hidden] in the compute dtype, the oldest first. A row's bits depend on its own and the rows
    before it alone, wherever they are: in the pass or in the state.
    """

    def __init__(
        self,
        layer: int,
        config: ModelConfig,
        inward: Linear,
        kernel: Tensor,
        bias: Tensor | None,
        outward: Linear,
        kv_cache: KVCache,
        compute: Compute,
    ) -> None:
        """layer: of the model, for its states in the cache.

        inward: from hidden states to three times their width.
        kernel: [hidden, 1, positions], the row's own last.
        bias: [hidden], of the convolution.
        """
        self._layer = layer
        self._factor = config.multipliers.residual
        self._inward, self._outward = inward, outward
        self._kernel = kernel.squeeze(1)
        self._bias = bias
        self._kv_cache = kv_cache
        self._compute = compute

    def parts(self, norm: Norm) -> ShortConvParts | None:
        """Return parts for kernels that run whole layers; None for what these lack."""
        if self._factor != 1:
            return None
        (state,) = self._kv_cache.state_offsets(self._layer)
        return ShortConvParts(
            norm.parts(),
            self._inward.product,
            self._kernel,
            self._bias,
            self._outward.product,
            state,
        )

    def forward(self, x: Tensor, norm: Norm, batch: Batch, rotations: Rotations) -> None:
        """Compute `x += convolution(norm(x))`, x [rows, hidden] in the compute dtype."""
        workspace, (rows, hidden) = self._compute.workspace, x.shape
        projected = workspace.take("gates and inputs", (rows, 3 * hidden), x.dtype)
        with workspace.scope():
            self._inward.forward(norm.of(x), projected)
        gate, output_gate, inputs = projected.chunk(3, dim=1)
        gated = workspace.take("convolution input", (rows, hidden), x.dtype)
        torch.mul(gate, inputs, out=gated)
        with workspace.scope():
            self._compute.between_graphs(partial(self._convolve, gated), batch.segments)
        gated.mul_(output_gate)
        update = workspace.take("update", (rows, hidden), x.dtype)
        self._outward.forward(gated, update)
        if self._factor != 1:
            update.mul_(self._factor)
        x.add_(update)

    def _convolve(self, gated: Tensor, segments: Sequence[Segment]) -> None:
        """Convolve gated inputs [rows, hidden] in place, and write the states after them.

        A row's sum is float32 and begins with its own product, then takes those before it.
        """
        workspace, num_taps = self._compute.workspace, self._kernel.shape[1]
        taps = workspace.take("taps", (num_taps, gated.shape[1]), torch.float32)
        sums, earlier = (
            workspace.take(name, tuple(gated.shape), torch.float32) for name in ("sums", "earlier")
        )
        taps.copy_(self._kernel.t())
        sums.copy_(gated).mul_(taps[-1])
        for segment in segments:  # one may go on from the state after another
            rows, part = slice(segment.start, segment.stop), self._part(gated, segment)
            for distance in range(1, num_taps):
                part.look_back(distance, earlier[rows])
                sums[rows].add_(earlier[rows].mul_(taps[-1 - distance]))
            part.end()
        if self._bias is not None:
            sums.add_(taps[0].copy_(self._bias))
        gated.copy_(sums)

    def _part(self, gated: Tensor, segment: Segment) -> _SequencePart:
        (before,), (after,) = self._kv_cache.states(self._layer, segment.kv)
        return _SequencePart(gated[segment.start : segment.stop], before, after)


class _SequencePart(NamedTuple):
    """One sequence's rows of a pass, [rows, hidden], and its state before and after them."""

    rows: Tensor
    before: Tensor
    after: Tensor

    def look_back(self, distance: int, out: Tensor) -> None:
        """Copy to each row of `out` [rows, hidden] what lies `distance` positions before it."""
        num_old = min(distance, len(out))
        first = len(self.before) - distance
        out[:num_old].copy_(self.before[first : first + num_old])
        out[num_old:].copy_(self.rows[: len(out) - num_old])

    def end(self) -> None:
        """Write the state after the rows, which may be where the one before them is."""
        num_old = max(len(self.after) - len(self.rows), 0)
        num_new = len(self.after) - num_old
        for place in range(num_old):
            self.after[place].copy_(self.before[num_new + place])
        self.after[num_old:].copy_(self.rows[len(self.rows) - num_new :])
