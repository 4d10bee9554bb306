"""Weights and buffers of layers, for kernels that run whole layers in a call."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple, Protocol

from torch import Tensor

from lowtide.core import IntArray
from lowtide.kernels.cpu.weight_calls import CompiledExperts
from lowtide.kernels.operands import ExpertChoice, HeadNorms, Matrix, Rotation, SlotPlaces


class Product(NamedTuple):
    """Matrix [out, in] and the bias [out] of its product."""

    weight: Matrix
    bias: Tensor | None = None


class AttentionParts(NamedTuple):
    """Grouped-query attention over all earlier tokens."""

    norm: Tensor
    projections: tuple[Product, ...]  # queries, keys and values, or all of them in one
    head_norms: HeadNorms | None
    output: Product
    keys: Tensor  # [kv_heads, tokens, head_dim]: the layer's cache
    values: Tensor
    num_heads: int


class RouterParts(NamedTuple):
    """Weights and rule by which a layer chooses its experts."""

    weight: Tensor  # [num_experts, hidden], float32 or the compute dtype, as the logits are
    bias: Tensor | None  # [num_experts] float32, which ranks and does not weigh
    choice: ExpertChoice


class MLPParts(NamedTuple):
    """Gated MLP that all rows use."""

    gate: Matrix
    up: Matrix
    down: Matrix
    share: Tensor | None = None  # [1, hidden]: its weight for each row is a sigmoid of the product


class ExpertParts(NamedTuple):
    """Routed experts of a layer in the host's slots."""

    kernels: CompiledExperts  # what runs those of few rows
    places: SlotPlaces
    number: int  # of the layers that have experts, which one
    expert_size: int


class LayerParts(NamedTuple):
    """Layer with at least one of `router` and `shared`."""

    attention: AttentionParts | None  # None: it is computed by itself
    mlp_norm: Tensor
    router: RouterParts | None
    shared: MLPParts | None
    experts: ExpertParts | None  # None: they are computed by themselves
    eps: float

    @property
    def products(self) -> list[Product]:
        """List the products with matrices of any format.

        These are attention's projections and output, then gate, up and down of the shared MLP.
        """
        found: list[Product] = []
        if self.attention is not None:
            found += [*self.attention.projections, self.attention.output]
        if self.shared is not None:
            found += map(Product, self.shared[:3])
        return found

    @property
    def tensors(self) -> list[Tensor]:
        """List the tensors that are in the compute dtype whatever the matrices' format.

        A router may be in float32 instead.
        """
        found: list[Tensor | None] = [self.mlp_norm, *(each.bias for each in self.products)]
        if self.attention is not None:
            norm, _, head_norms, _, *cache, _ = self.attention
            found += [norm, *(head_norms or ()), *cache]
        if self.router is not None and self.router.weight.dtype == self.mlp_norm.dtype:
            found.append(self.router.weight)
        if self.shared is not None:
            found.append(self.shared.share)
        return [tensor for tensor in found if tensor is not None]


class Scratch(NamedTuple):
    """Scratch of a layer's operators.

    Rows are those of the pass, or pairs of a row and one of its experts; None: a layer of these
    parts does not need it.
    """

    normed: Tensor | None  # [rows, hidden]: attention's input
    qkv: Tensor | None  # [rows, heads, head_dim]
    attended: Tensor | None  # [rows, heads, head_dim]
    update: Tensor | None  # [rows, hidden]
    mlp_input: Tensor | None  # [rows, hidden], of every layer
    router_input: Tensor | None  # [rows, hidden] float32, for a router in float32
    logits: Tensor | None  # [rows, num_experts]
    parts: Tensor | None  # [pairs, hidden]
    gate: Tensor | None  # [pairs, expert_size]
    up: Tensor | None  # [pairs, expert_size]
    routed: Tensor | None  # [rows, hidden] float32
    shared_gate: Tensor | None  # [rows, width]
    shared_up: Tensor | None  # [rows, width]
    shared: Tensor | None  # [rows, hidden]
    share: Tensor | None  # [rows, 1]


class PassFacts(NamedTuple):
    """Arguments that all layers of a pass share."""

    x: Tensor  # [rows, hidden], which every layer adds to
    rotation: Rotation
    tokens: IntArray  # [rows, 2]: the first token of the cache that a row sees, and how many; its
    # own is the last of them. Unused by layers whose rows had their attention already.


class Status(IntEnum):
    """End of a call over layers: `Status` of residency.hpp."""

    DONE = 0
    WAITS = 1  # for a read, for longer than one call may
    READS = 2  # once experts are being read that Python reads
    FAILED = 3  # with a read
    STUCK = 4  # no slot will come free for an expert


class Residents(Protocol):
    """Residency of experts while layers run."""

    address: int  # of what the call is told

    def serve(self, status: Status) -> None:
        """Do what a call that ended with `status`, not DONE, waits for, so that it can go on.

        Raises StorageError if an expert cannot be read.
        """
        ...

    def give_up(self) -> None:
        """Give up a call that will not go on: slots become free once nothing fills them."""
        ...
