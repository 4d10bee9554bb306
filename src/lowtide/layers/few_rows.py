"""Short passes: the kernels run all layers in one call, absent experts included.

Where a layer's mixer is torch's, one call runs the rest of each layer. If a substitution or an
observer acts between a layer's router and its experts, there are two calls, and the runtime runs
the experts. All layers share one block of scratch, whose size follows from widths and rows alone,
and buffers of their experts after it; both are taken once for all passes over the same memory.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowtide.compute import Compute
from lowtide.config import Rope
from lowtide.core import IntArray, align_up
from lowtide.errors import InternalError
from lowtide.experts.rows import ExpertBuffers, Routing
from lowtide.kernels.cpu.layer import CompiledLayer, CompiledLayers, CompiledPass
from lowtide.kernels.layer_parts import (
    LayerParts,
    MixerParts,
    PassFacts,
    Scratch,
)
from lowtide.layers.batch import Batch
from lowtide.layers.linear import GatedMLP
from lowtide.layers.moe import ModelExperts, MoELayer
from lowtide.layers.norm import Norm
from lowtide.layers.rotary import Rotations
from lowtide.memory.kv_cache import KVCache
from lowtide.memory.workspace import Buffers, State

MAX_SHORT_ROWS = 32
"""Most rows of a short pass with any kernels: memory is planned for as many on every processor."""

_NO_TOKENS: IntArray = np.empty((1, 0, 2), np.int64)
_NO_SEQUENCES: IntArray = np.empty((0, 4), np.int64)


class Places(NamedTuple):
    """Places of a layer's scratch in the block of a pass."""

    views: tuple[tuple[str, int, int, torch.dtype], ...]  # name, first byte, width, dtype
    num_bytes: int
    pairs: tuple[int, int] = (0, 0)  # experts of a row, their width; 0: not run in the call

    @classmethod
    def of(cls, parts: LayerParts, num_rows: int) -> Places:
        """Place the mixer's scratch and the MLP's, of which one follows the other in time."""
        views, most = [], 0
        for scratch in parts.scratch:
            end = 0
            for name, (width, dtype) in scratch.items():
                views.append((name, end, width, dtype))
                end += align_up(num_rows * width * dtype.itemsize)
            most = max(most, end)
        pairs = (0, 0)
        if parts.router is not None and parts.experts is not None:
            pairs = parts.router.choice.num_chosen, parts.experts.expert_size
        return cls(tuple(views), most, pairs)


class ShortPass:
    """State and buffers shared by the layers of one short pass."""

    def __init__(
        self, x: Tensor, rope: Rope, compute: Compute, layers: Sequence[LayerParts]
    ) -> None:
        """x: [rows, hidden], accepted by the kernels; layers: all; call `begin` next.

        rope: of the layers whose attention is in the call.
        """
        self._rope = rope
        self.x = x
        self.num_rows = x.shape[0]
        self.workspace = compute.workspace
        self.attends = False
        self.layers: dict[object, CompiledLayers] = {}  # by what binds them
        self._num_threads = compute.executor.num_cores
        self._facts: PassFacts
        self._drawn: dict[Places, CompiledPass] = {}
        with self.workspace.scope():
            self._block = take_block(self.workspace, layers, self.num_rows)
            self._at_experts = self.workspace.state

    def begin(
        self, batch: Batch, rotations: Rotations, kv_cache: KVCache, layers: Collection[int]
    ) -> None:
        """Begin another pass over the same memory; layers: those that will be run."""
        # Rows of a prompt or a block, which see each other, go the long way.
        self.attends = all(segment.goes_by_rows for segment in batch.segments)
        tokens, sequences = _NO_TOKENS, _NO_SEQUENCES
        if self.attends:
            tokens = _tokens(batch, kv_cache)
        if self.attends and kv_cache.has_states:
            sequences = _sequences(batch, kv_cache, layers)
        self._facts = PassFacts(self.x, (rotations.whole(self._rope),), tokens, sequences)
        for bound in self._drawn.values():
            bound.begin(self._facts)

    def bound(self, parts: LayerParts, layer: CompiledLayer) -> CompiledPass:
        """Return the pass for layers with scratch at the same places, of which `layer` is one."""
        places = Places.of(parts, self.num_rows)
        if places not in self._drawn:
            buffers = {
                name: self._view(first, width, dtype) for name, first, width, dtype in places.views
            }
            num_chosen, width = places.pairs
            if width:
                buffers |= self._pairs(num_chosen, width)
            scratch = Scratch(*map(buffers.get, Scratch._fields))
            self._drawn[places] = layer.bind(self._facts, scratch, self._num_threads)
        return self._drawn[places]

    def begin_experts(self) -> State:
        """Release all but the block, for experts that the runtime runs; return what was there."""
        before = self.workspace.state
        self.workspace.state = self._at_experts
        return before

    def _view(self, first: int, width: int, dtype: torch.dtype) -> Tensor:
        num_bytes = self.num_rows * width * dtype.itemsize
        return self._block[first : first + num_bytes].view(dtype).view(self.num_rows, width)

    def _pairs(self, num_chosen: int, width: int) -> dict[str, Tensor]:
        """Allocate the buffers of experts' rows where the runtime would."""
        before = self.begin_experts()
        pairs = ExpertBuffers.of_pairs(self.workspace, self.num_rows * num_chosen, width, self.x)
        self.workspace.state = before
        return pairs._asdict()


def take_block(workspace: Buffers, layers: Sequence[LayerParts], num_rows: int) -> Tensor:
    """Allocate a block of scratch that suffices for each of the layers."""
    num_bytes = max((Places.of(parts, num_rows).num_bytes for parts in layers), default=0)
    return workspace.take("short pass", (num_bytes,), torch.uint8)


def layer_parts(
    mixer: MixerParts | None, mlp_norm: Norm, moe: MoELayer | None, dense: GatedMLP | None
) -> LayerParts | None:
    """Return a layer's parts; None if its routing needs more than logits."""
    norm = mlp_norm.parts()
    if moe is None:
        return LayerParts(mixer, norm, None, None if dense is None else dense.parts(), None)
    router = moe.router.parts()
    if router is None:
        return None
    return LayerParts(mixer, norm, router, moe.shared_parts, moe.experts.parts(moe.index))


class WholeLayer:
    """One layer of a short pass, run by the kernels."""

    def __init__(self, compiled: CompiledLayer, parts: LayerParts, moe: MoELayer | None) -> None:
        self.compiled = compiled
        self.has_mixer = parts.mixer is not None
        self.has_experts = moe is not None
        self._parts = parts
        self._moe = moe

    @classmethod
    def of(
        cls, parts: LayerParts | None, moe: MoELayer | None, compute: Compute
    ) -> WholeLayer | None:
        """Make a compiled layer; None if the kernels lack it."""
        compiled = None if parts is None else compute.kernels.whole_layer(parts)
        return None if parts is None or compiled is None else cls(compiled, parts, moe)

    def takes(self, short: ShortPass) -> bool:
        """Return True if `forward` accepts the rows; some formats' products take fewer rows."""
        return short.num_rows <= self.compiled.max_rows

    def attends(self, short: ShortPass) -> bool:
        """Return True if `forward` includes the attention."""
        return self.has_mixer and short.attends

    def bound(self, short: ShortPass) -> CompiledPass:
        """Return the compiled layer's binding to the pass."""
        return short.bound(self._parts, self.compiled)

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
        bound = self.bound(short)
        x, routed = bound.scratch.mlp_input, bound.scratch.routed
        if x is None or routed is None or self._parts.router is None:
            raise InternalError("A layer with experts has no scratch for their sum.")
        routing = _routing(short.num_rows, self._parts.router.choice.num_chosen)
        self.compiled.run_to_router(bound, attends, *routing)
        before = short.begin_experts()
        moe.run_experts(x, routing, batch.step, routed)
        self.compiled.run_from_experts(bound)
        short.workspace.state = before


class WholeModel:
    """All layers of a model in one call."""

    def __init__(self, layers: Sequence[WholeLayer], experts: ModelExperts) -> None:
        """layers: each with its mixer."""
        self._layers = layers
        self._experts = experts
        self._has_experts = any(layer.has_experts for layer in layers)
        # `max_expert_rows` is `max_rows` of a layer that has none.
        self._max_rows = min(layer.compiled.max_expert_rows for layer in layers)

    @classmethod
    def of(cls, layers: Sequence[WholeLayer | None], experts: ModelExperts) -> WholeModel | None:
        """Make a whole model; None if a layer is missing or lacks its mixer."""
        found = [layer for layer in layers if layer is not None and layer.has_mixer]
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
    """Return `PassFacts.tokens`, claiming the rows in the cache."""
    tokens = np.empty((kv_cache.num_groups, batch.token_ids.shape[0], 2), np.int64)
    for segment in batch.segments:
        first, num_rows = segment.first_position, segment.stop - segment.start
        kv_cache.claim(segment.kv, first, num_rows)
        rows = tokens[:, segment.start : segment.stop]
        rows[:, :, 0] = np.array(kv_cache.origins(segment.kv))[:, None]
        rows[:, :, 1] = np.arange(first + 1, first + num_rows + 1)
    return tokens


def _sequences(batch: Batch, kv_cache: KVCache, layers: Collection[int]) -> IntArray:
    """Return `PassFacts.sequences`, claiming the states of these layers in the cache."""
    found = [
        (one.start, one.stop, *kv_cache.claim_states(one.kv, one.first_position, layers))
        for one in batch.segments
    ]
    return np.array(found, np.int64)
