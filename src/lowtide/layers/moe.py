"""The mixture-of-experts layer: route, run the routed experts, add the shared one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from lowtide.compute import Compute
from lowtide.core import Step
from lowtide.experts.no_experts import NoExperts
from lowtide.experts.rows import LayerCall, Routing
from lowtide.experts.runtime import ExpertRuntime
from lowtide.kernels.layer_parts import MLPParts
from lowtide.layers.batch import Batch
from lowtide.layers.linear import GatedMLP
from lowtide.layers.router import Router
from lowtide.layers.rows import in_chunks, in_tiles

ModelExperts = ExpertRuntime | NoExperts
"""Runs the routed experts of all layers."""


_ROUTING = (torch.int64, torch.float32)
"""Dtypes of a routing's experts and weights."""


class MoELayer:
    """Routed experts plus an optional shared expert that every token uses."""

    def __init__(
        self,
        index: int,
        router: Router,
        experts: ModelExperts,
        compute: Compute,
        shared: GatedMLP | None = None,
        shared_gate: Tensor | None = None,
    ) -> None:
        """index: counts MoE layers.

        shared_gate: [1, hidden]; the sigmoid of its product weighs the shared expert's output per
        token.
        """
        self.index = index
        self.router = router
        self.experts = experts
        self._compute = compute
        self._shared = shared
        self._shared_gate = shared_gate

    @property
    def shared_parts(self) -> MLPParts | None:
        """Parts of the shared expert for kernels that run whole layers."""
        return None if self._shared is None else self._shared.parts(self._shared_gate)

    def forward(
        self, x: Tensor, batch: Batch, out: Tensor, router_input: Tensor | None = None
    ) -> None:
        """Compute x, out [rows, hidden] compute dtype; `out` may be `x`.

        router_input: hidden states by which experts are chosen, by default `x`.
        """
        workspace = self._compute.workspace
        before = workspace.state
        routing = self.router.route(x if router_input is None else router_input, batch.segments)
        routed = workspace.take("routed", tuple(x.shape), torch.float32)
        self.run_experts(x, routing, batch.step, routed)
        if self._shared is None:
            out.copy_(routed)
        else:
            self._add_to_routed(x, routed, out)
        workspace.state = before

    def forward_chunks(self, x: Tensor, chunks: Sequence[tuple[slice, Batch]], out: Tensor) -> None:
        """Compute several chunks of a prompt as `forward` does each, and read experts once for all.

        x, out [rows, hidden]; chunks: the rows of each, and its batch. `out` may be `x`.
        """
        workspace, step = self._compute.workspace, chunks[0][1].step
        with workspace.scope():
            found = [self.router.route(x[rows], batch.segments) for rows, batch in chunks]
            routing = Routing(*(torch.cat(parts) for parts in zip(*found, strict=True)))
            num_bytes = routing.experts.nbytes + routing.weights.nbytes
            workspace.library("routing", 2 * num_bytes)  # parts are alive, too
            routed = workspace.take("routed", tuple(x.shape), torch.float32)
            ends = tuple(rows.stop for rows, _ in chunks)
            self.run_experts(x, routing, step, routed, ends)
            for rows, _ in chunks:
                self._add_to_routed(x[rows], routed[rows], out[rows])

    def run_experts(
        self,
        x: Tensor,
        routing: Routing,
        step: Step,
        out: Tensor,
        chunk_ends: tuple[int, ...] = (),
    ) -> None:
        """Compute the weighted sum of routed experts: out [rows, hidden] float32.

        chunk_ends: see `LayerCall`.
        """
        workspace = self._compute.workspace
        scores = self.router.scores(x) if self.experts.asks_scores else None
        before = workspace.state
        self.experts.forward(
            LayerCall(self.index, x, routing, step, workspace, out, scores, chunk_ends)
        )
        workspace.state = before

    def register_experts(self, x: Tensor, num_chosen: int, step: Step) -> None:
        """Register the memory of `run_experts` for rows x [rows, hidden] on the meta device."""
        shape = (len(x), num_chosen)
        routing = Routing(*(torch.empty(shape, dtype=each, device=x.device) for each in _ROUTING))
        self.run_experts(x, routing, step, x)

    def _add_to_routed(self, x: Tensor, routed: Tensor, out: Tensor) -> None:
        """Compute `out = routed`, plus the shared expert of x if there is one; `out` may be `x`."""
        if self._shared is None:
            out.copy_(routed)
        else:
            add_shared = partial(self._add_shared, self._shared)
            in_chunks("mlp", self._compute.workspace, add_shared, x, routed, out)

    def _add_shared(self, expert: GatedMLP, x: Tensor, routed: Tensor, out: Tensor) -> None:
        """Compute `out = routed + expert(x)`; `out` may be `x`."""
        workspace = self._compute.workspace
        with workspace.scope():
            shared = workspace.take("shared", tuple(x.shape), x.dtype)
            expert.forward(x, shared)
            if self._shared_gate is not None:
                share = workspace.take("shared gate", (x.shape[0], 1), x.dtype)
                in_tiles(partial(self._multiply, self._shared_gate), x, share)
                in_tiles(self._compute.kernels.weigh_rows, shared, share)
            out.copy_(routed).add_(shared)

    def _multiply(self, weight: Tensor, x: Tensor, out: Tensor) -> None:
        self._compute.kernels.multiply(x, weight.t(), None, out)
