"""Short passes: the kernels run all layers in one call, absent experts included.

Where attention is torch's, one call runs the rest of each layer. If a substitution or an observer
acts between a layer's router and its experts, there are two calls, and the runtime runs the
experts. Buffers are those of the layers' own operators, taken in the same order, once for all
layers and for all passes over the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowtide.compute import Compute
from lowtide.core import IntArray
from lowtide.experts.rows import ExpertBuffers, Routing
from lowtide.kernels.cpu.layer import CompiledLayer, CompiledLayers, CompiledPass
from lowtide.kernels.layer_parts import (
    AttentionParts,
    LayerParts,
    PassFacts,
    Scratch,
)
from lowtide.layers.batch import Batch
from lowtide.layers.linear import GatedMLP
from lowtide.layers.moe import ModelExperts, MoELayer
from lowtide.layers.norm import Norm
from lowtide.layers.rotary import Rotations
from lowtide.memory.kv_cache import KVCache
from lowtide.memory.workspace import State


class Widths(NamedTuple):
    """Sizes that determine a layer's buffers, beside the rows; 0 for absent parts."""

    heads: tuple[int, int, int]  # query heads, key heads, their dimension
    num_experts: int
    router_dtype: torch.dtype
    num_chosen: int
    expert_size: int  # also 0 if the call does not run the experts
    shared_size: int
    has_share: bool

    @classmethod
    def of(cls, parts: LayerParts) -> Widths:
        attention, router, shared = parts.attention, parts.router, parts.shared
        heads = (0, 0, 0)
        if attention is not None:
            heads = (attention.num_heads, attention.keys.shape[0], attention.keys.shape[2])
        return cls(
            heads,
            0 if router is None else len(router.weight),
            torch.bfloat16 if router is None else router.weight.dtype,
            0 if router is None else router.choice.num_chosen,
            0 if parts.experts is None else parts.experts.expert_size,
            0 if shared is None else shared.gate.shape[0],
            shared is not None and shared.share is not None,
        )


class LayerBuffers(NamedTuple):
    """Buffers of layers of equal widths, and the workspace's state when experts run."""

    bound: CompiledPass
    at_experts: State
    buffers: dict[str, Tensor]  # by the names of `Scratch`


class ShortPass:
    """State and buffers shared by the layers of one short pass."""

    def __init__(self, x: Tensor, compute: Compute) -> None:
        """x: [rows, hidden], accepted by the kernels; call `begin` next."""
        self.x = x
        self.num_rows = x.shape[0]
        self.workspace = compute.workspace
        self.attends = False
        self.layers: dict[object, CompiledLayers] = {}  # by what binds them
        self._num_threads = compute.executor.num_cores
        self._facts: PassFacts
        self._drawn: dict[Widths, LayerBuffers] = {}

    def begin(self, batch: Batch, rotations: Rotations, kv_cache: KVCache) -> None:
        """Begin another pass over the same memory."""
        rotation = rotations.whole
        # Rows of one sequence, which see each other, go the long way.
        self.attends = rotation.cos.dtype == self.x.dtype and all(
            one.block_length == 1 and one.stop - one.start == 1 for one in batch.segments
        )
        tokens = _tokens(batch, kv_cache) if self.attends else np.empty((0, 2), np.int64)
        self._facts = PassFacts(self.x, rotation, tokens)
        for drawn in self._drawn.values():
            drawn.bound.begin(self._facts)

    def drawn(self, widths: Widths, layer: CompiledLayer) -> LayerBuffers:
        """Return the buffers for layers of these widths, of which `layer` is one."""
        found = self._drawn.get(widths)
        if found is None:
            buffers, at_experts = self._draw(widths)
            scratch = Scratch(*map(buffers.get, Scratch._fields))
            bound = layer.bind(self._facts, scratch, self._num_threads)
            self._drawn[widths] = found = LayerBuffers(bound, at_experts, buffers)
        return found

    def _draw(self, widths: Widths) -> tuple[dict[str, Tensor], State]:
        """Take buffers in the order of the layers' own operators, which have the same lifetimes."""
        workspace, hidden = self.workspace, self.x.shape[1]
        drawn: dict[str, Tensor] = {}
        with workspace.scope():
            if widths.heads[0]:
                self._draw_attention(widths, drawn)
        with workspace.scope():
            drawn["mlp_input"] = self._take("normed", hidden)
            if widths.num_experts:
                with workspace.scope():
                    self._draw_router(widths, drawn)
                drawn["routed"] = self._take("routed", hidden, dtype=torch.float32)
            at_experts = workspace.state
            if widths.expert_size:
                with workspace.scope():
                    num_pairs = self.num_rows * widths.num_chosen
                    pairs = ExpertBuffers.of_pairs(workspace, num_pairs, widths.expert_size, self.x)
                    drawn.update(pairs._asdict())
            if widths.shared_size:
                self._draw_shared(widths, drawn)
        return drawn, at_experts

    def _draw_attention(self, widths: Widths, drawn: dict[str, Tensor]) -> None:
        workspace, (num_heads, num_key_heads, head_dim) = self.workspace, widths.heads
        drawn["qkv"] = self._take("qkv", num_heads + 2 * num_key_heads, head_dim)
        with workspace.scope():
            drawn["normed"] = self._take("normed", self.x.shape[1])
        drawn["attended"] = self._take("attended", num_heads, head_dim)
        workspace.give_back(drawn["qkv"])
        drawn["update"] = self._take("update", self.x.shape[1])

    def _draw_router(self, widths: Widths, drawn: dict[str, Tensor]) -> None:
        dtype = widths.router_dtype
        drawn["logits"] = self._take("router logits", widths.num_experts, dtype=dtype)
        if dtype != self.x.dtype:
            drawn["router_input"] = self._take("router input", self.x.shape[1], dtype=dtype)

    def _draw_shared(self, widths: Widths, drawn: dict[str, Tensor]) -> None:
        with self.workspace.scope():
            # A layer's own MLP writes to its input's place.
            is_own = not widths.num_experts
            drawn["shared"] = (
                drawn["mlp_input"] if is_own else self._take("shared", self.x.shape[1])
            )
            with self.workspace.scope():
                drawn["shared_gate"] = self._take("mlp gate", widths.shared_size)
                drawn["shared_up"] = self._take("mlp up", widths.shared_size)
            if widths.has_share:
                drawn["share"] = self._take("shared gate", 1)

    def _take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.workspace.take(name, (self.num_rows, *shape), dtype or self.x.dtype)


class WholeLayer:
    """One layer of a short pass; does not know how its parts compute."""

    def __init__(self, compiled: CompiledLayer, parts: LayerParts, moe: MoELayer | None) -> None:
        self.compiled = compiled
        self.has_attention = parts.attention is not None
        self.has_experts = moe is not None
        self._widths = Widths.of(parts)
        self._moe = moe

    @classmethod
    def of(
        cls,
        attention: AttentionParts | None,
        mlp_norm: Norm,
        moe: MoELayer | None,
        dense: GatedMLP | None,
        compute: Compute,
    ) -> WholeLayer | None:
        """Make a compiled layer; None if the kernels lack it, or routing needs more than logits."""
        if moe is None:
            router, experts, shared = None, None, None if dense is None else dense.parts()
        else:
            router, experts = moe.router.parts(), moe.experts.parts(moe.index)
            shared = moe.shared_parts
            if router is None:
                return None
        parts = LayerParts(attention, mlp_norm.weight, router, shared, experts, mlp_norm.eps)
        compiled = compute.kernels.whole_layer(parts)
        return None if compiled is None else cls(compiled, parts, moe)

    def takes(self, short: ShortPass) -> bool:
        """Return True if `forward` accepts the rows; some formats' products take fewer rows."""
        return short.num_rows <= self.compiled.max_rows

    def attends(self, short: ShortPass) -> bool:
        """Return True if `forward` includes the attention."""
        return self.has_attention and short.attends

    def bound(self, short: ShortPass) -> CompiledPass:
        """Return the compiled layer's binding to the pass."""
        return short.drawn(self._widths, self.compiled).bound

    def forward(self, short: ShortPass, batch: Batch) -> None:
        """Run the whole layer, or the part after its attention."""
        attends, residents = self.attends(short), None
        if self._moe is not None and short.num_rows <= self.compiled.max_expert_rows:
            residents = self._moe.experts.residents()
        if self._moe is None or residents is not None:
            self._bound_alone(short).run(attends, residents)
        else:
            self._run_in_parts(self._moe, short, batch, attends)

    def _bound_alone(self, short: ShortPass) -> CompiledLayers:
        if self not in short.layers:
            short.layers[self] = CompiledLayers([self.compiled], [self.bound(short)])
        return short.layers[self]

    def _run_in_parts(self, moe: MoELayer, short: ShortPass, batch: Batch, attends: bool) -> None:
        """Run up to the router, then the experts by the runtime, then the rest."""
        drawn, workspace = short.drawn(self._widths, self.compiled), short.workspace
        routing = _routing(short.num_rows, self._widths.num_chosen)
        self.compiled.run_to_router(drawn.bound, attends, *routing)
        before = workspace.state
        workspace.reset(drawn.at_experts)
        x, routed = drawn.buffers["mlp_input"], drawn.buffers["routed"]
        moe.run_experts(x, routing, batch.step, routed)
        self.compiled.run_from_experts(drawn.bound)
        workspace.reset(before)


class WholeModel:
    """All layers of a model in one call."""

    def __init__(self, layers: Sequence[WholeLayer], experts: ModelExperts) -> None:
        """layers: each with its attention."""
        self._layers = layers
        self._experts = experts
        self._has_experts = any(layer.has_experts for layer in layers)
        # `max_expert_rows` is `max_rows` of a layer that has none.
        self._max_rows = min(layer.compiled.max_expert_rows for layer in layers)

    @classmethod
    def of(cls, layers: Sequence[WholeLayer | None], experts: ModelExperts) -> WholeModel | None:
        """Make a whole model; None if a layer is missing or lacks its attention."""
        found = [layer for layer in layers if layer is not None and layer.has_attention]
        return cls(found, experts) if len(found) == len(layers) > 0 else None

    def run(self, short: ShortPass) -> bool:
        """Run all layers; return False if each needs its own call (`WholeLayer.forward`)."""
        if not short.attends or short.num_rows > self._max_rows:
            return False
        residents = self._experts.residents() if self._has_experts else None
        if self._has_experts and residents is None:
            return False
        if self not in short.layers:
            bounds = [layer.bound(short) for layer in self._layers]
            short.layers[self] = CompiledLayers([each.compiled for each in self._layers], bounds)
        short.layers[self].run(True, residents)
        return True


def _routing(num_rows: int, num_chosen: int) -> Routing:
    """Allocate a routing to be filled; new each time, since policies keep it."""
    shape = (num_rows, num_chosen)
    return Routing(torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.float32))


def _tokens(batch: Batch, kv_cache: KVCache) -> IntArray:
    """Return `PassFacts.tokens` of one row per sequence, claiming the rows in the cache."""
    tokens = np.empty((len(batch.segments), 2), np.int64)
    for row, segment in enumerate(batch.segments):
        last = kv_cache.claim(segment.kv, segment.first_position, 1)
        tokens[row] = last - segment.first_position, segment.first_position + 1
    return tokens
