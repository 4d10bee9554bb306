"""Weights and buffers of layers, for kernels that run whole layers in a call."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lowtide.core import IntArray
from lowtide.kernels.cpu.weight_calls import CompiledExperts
from lowtide.kernels.operands import DeltaWeights, ExpertChoice, Matrix, Rotation, SlotPlaces


class Product(NamedTuple):
    """Matrix [out, in] and the bias [out] of its product."""

    weight: Matrix
    bias: Tensor | None = None


class NormParts(NamedTuple):
    """RMS norm, by a weight in the compute dtype or in float32."""

    weight: Tensor  # [length]
    eps: float


class GroupedParts(NamedTuple):
    """Attention of query heads that share key heads, over all earlier tokens or a window."""

    norm: NormParts
    projections: tuple[Product, ...]  # queries, keys and values, or all of them in one
    query_norm: NormParts | None  # of a head, or of all heads together
    key_norm: NormParts | None
    output: Product
    keys: Tensor  # [kv_heads, tokens, head_dim]: the layer's cache
    values: Tensor
    num_heads: int
    scale: float
    window: int = 0  # tokens that a row sees, its own included; 0: all
    sinks: Tensor | None = None  # [num_heads] float32
    has_gates: bool = False  # queries' own product makes a head's query, then its gate
    group: int = 0  # of layers, whose `PassFacts.tokens` are this one's

    @property
    def products(self) -> tuple[Product, ...]:
        return (*self.projections, self.output)

    @property
    def norms(self) -> tuple[NormParts | None, ...]:
        return self.norm, self.query_norm, self.key_norm

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Other tensors in the compute dtype."""
        return self.keys, self.values

    @property
    def wide(self) -> tuple[Tensor, ...]:
        """Other tensors in float32."""
        return () if self.sinks is None else (self.sinks,)

    @property
    def scratch(self) -> dict[str, int]:
        """Widths by the names of `Scratch`."""
        num_key_heads, _, head_dim = self.keys.shape
        hidden = len(self.norm.weight)
        return {
            "normed": hidden,
            "projected": (self.num_heads + 2 * num_key_heads) * head_dim,
            "attended": self.num_heads * head_dim,
            "product": 2 * self.num_heads * head_dim if self.has_gates else 0,
            "update": hidden,
        }


class LatentParts(NamedTuple):
    """Attention over latents, with one rotating key for all heads beside each."""

    norm: NormParts
    query_down: Product | None  # None: queries are projected at once
    query_norm: NormParts | None
    query: Product  # a head's are [fixed | rotating]
    latent_down: Product
    latent_norm: NormParts
    expansion: Tensor  # [heads * (fixed + value), rank]: a head's keys, then its values
    output: Product
    cache: Tensor  # [1, tokens, rank + rotating]
    num_heads: int
    fixed_dim: int
    scale: float

    @property
    def products(self) -> tuple[Product, ...]:
        down = () if self.query_down is None else (self.query_down,)
        return (*down, self.query, self.latent_down, self.output)

    @property
    def norms(self) -> tuple[NormParts | None, ...]:
        return self.norm, self.query_norm, self.latent_norm

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Other tensors in the compute dtype."""
        return self.expansion, self.cache

    @property
    def wide(self) -> tuple[Tensor, ...]:
        """Other tensors in float32."""
        return ()

    @property
    def rank(self) -> int:
        return len(self.latent_norm.weight)

    @property
    def value_dim(self) -> int:
        return len(self.expansion) // self.num_heads - self.fixed_dim

    @property
    def scratch(self) -> dict[str, int]:
        """Widths by the names of `Scratch`."""
        hidden, width = len(self.norm.weight), self.cache.shape[2]
        return {
            "normed": hidden,
            "query_latent": 0 if self.query_norm is None else len(self.query_norm.weight),
            "projected": self.query.weight.shape[0],
            "latent": width,
            "latent_query": self.num_heads * width,
            "attended": self.num_heads * self.rank,
            "value": self.num_heads * self.value_dim,
            "update": hidden,
        }


class ShortConvParts(NamedTuple):
    """Gated causal convolution of few positions, for each channel by itself."""

    norm: NormParts
    inward: Product  # to gates, output gates and inputs
    kernel: Tensor  # [hidden, positions], a row's own last
    bias: Tensor | None  # [hidden]
    outward: Product
    state: int  # first byte of the layer's states among all of a sequence

    @property
    def products(self) -> tuple[Product, ...]:
        return self.inward, self.outward

    @property
    def norms(self) -> tuple[NormParts | None, ...]:
        return (self.norm,)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Other tensors in the compute dtype."""
        return (self.kernel,) if self.bias is None else (self.kernel, self.bias)

    @property
    def wide(self) -> tuple[Tensor, ...]:
        """Other tensors in float32."""
        return ()

    @property
    def scratch(self) -> dict[str, int]:
        """Widths by the names of `Scratch`."""
        hidden = len(self.norm.weight)
        return {"normed": hidden, "projected": 3 * hidden, "attended": hidden, "update": hidden}


class DeltaParts(NamedTuple):
    """Gated delta-net, with an RMS norm of each value head and its gate after it.

    Where a product makes two things, it does so key head by key head (`DeltaProjections`).
    """

    norm: NormParts
    mixed: Product
    gates: Product | None  # None: `mixed` makes both
    beta: Product
    time: Product | None  # None: `beta` makes both
    weights: DeltaWeights
    head_norm: NormParts
    outward: Product
    states: tuple[int, int]  # first bytes of the tail and of the matrices among all states

    @property
    def products(self) -> tuple[Product, ...]:
        found = self.mixed, self.gates, self.beta, self.time, self.outward
        return tuple(each for each in found if each is not None)

    @property
    def norms(self) -> tuple[NormParts | None, ...]:
        return self.norm, self.head_norm

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Other tensors in the compute dtype."""
        return ()

    @property
    def wide(self) -> tuple[Tensor, ...]:
        """Other tensors in float32."""
        return self.weights.conv, self.weights.decay, self.weights.time_bias

    @property
    def scratch(self) -> dict[str, int]:
        """Widths by the names of `Scratch`."""
        hidden, spec = len(self.norm.weight), self.weights.spec
        of_gates = spec.channels + spec.value_size if self.gates is None else 0
        of_time = 2 * spec.value_heads if self.time is None else 0
        return {
            "normed": hidden,
            "projected": spec.channels,
            "gates": spec.value_size,
            "strengths": 2 * spec.value_heads,
            "product": max(of_gates, of_time),
            "attended": spec.value_size,
            "update": hidden,
        }


MixerParts = GroupedParts | LatentParts | ShortConvParts | DeltaParts
"""Parts of a layer's mixer, by its kind."""


class RouterParts(NamedTuple):
    """Weights and rule by which a layer chooses its experts."""

    weight: Tensor  # [num_experts, hidden], float32 or the compute dtype, as the logits are
    bias: Tensor | None  # [num_experts] float32, which ranks and does not weigh
    choice: ExpertChoice
    logit_bias: Tensor | None = None  # [num_experts], of the weight's dtype


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

    mixer: MixerParts | None  # None: it is computed by itself
    mlp_norm: NormParts
    router: RouterParts | None
    shared: MLPParts | None
    experts: ExpertParts | None  # None: they are computed by themselves

    @property
    def products(self) -> list[Product]:
        """List the products with matrices of any format.

        These are the mixer's, then gate, up and down of the shared MLP.
        """
        found: list[Product] = []
        if self.mixer is not None:
            found += self.mixer.products
        if self.shared is not None:
            found += map(Product, self.shared[:3])
        return found

    @property
    def norms(self) -> list[NormParts]:
        """List the norms, whose weights are in the compute dtype or in float32."""
        mixers = () if self.mixer is None else self.mixer.norms
        return [norm for norm in (self.mlp_norm, *mixers) if norm is not None]

    @property
    def tensors(self) -> list[Tensor]:
        """List the tensors that are in the compute dtype whatever the matrices' format."""
        found = [each.bias for each in self.products]
        if self.mixer is not None:
            found += self.mixer.tensors
        if self.shared is not None:
            found.append(self.shared.share)
        return [tensor for tensor in found if tensor is not None]

    @property
    def scratch(self) -> tuple[dict[str, tuple[int, torch.dtype]], ...]:
        """Widths and dtypes of the mixer's and of the MLP's scratch, by the names of `Scratch`.

        The two are never alive together; none of it is the experts' own.
        """
        weight, router, shared = self.mlp_norm.weight, self.router, self.shared
        hidden, narrow, wide = len(weight), torch.bfloat16, torch.float32
        of_mixer = {} if self.mixer is None else self.mixer.scratch
        of_mlp = {"mlp_input": (hidden, narrow)}
        if router is not None:
            of_mlp["logits"] = (len(router.weight), router.weight.dtype)
            of_mlp["routed"] = (hidden, wide)
            if router.weight.dtype is wide:
                of_mlp["router_input"] = (hidden, wide)
        if shared is not None:
            width = shared.gate.shape[0]
            of_mlp |= {"shared": (hidden, narrow), "shared_gate": (width, narrow)}
            of_mlp["shared_up"] = (width, narrow)
            if shared.share is not None:
                of_mlp["share"] = (1, narrow)
        return {name: (width, narrow) for name, width in of_mixer.items()}, of_mlp


class Scratch(NamedTuple):
    """Scratch of a layer's operators.

    Rows are those of the pass, or pairs of a row and one of its experts; None: a layer of these
    parts does not need it.
    """

    normed: Tensor | None  # [rows, hidden]: the mixer's input
    projected: Tensor | None  # [rows, heads * head_dim]: queries, perhaps keys and values
    attended: Tensor | None  # [rows, heads * head_dim], or what is convolved
    update: Tensor | None  # [rows, hidden]
    query_latent: Tensor | None  # [rows, query rank]
    latent: Tensor | None  # [rows, rank + rotating]
    latent_query: Tensor | None  # [rows, heads * (rank + rotating)]
    value: Tensor | None  # [rows, heads * value_dim]
    product: Tensor | None  # [rows, ..]: what one product makes of several things, head by head
    gates: Tensor | None  # [rows, value_heads * value_width]
    strengths: Tensor | None  # [rows, 2 * value_heads]: betas, then times
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
    rotations: tuple[Rotation, ...]
    tokens: IntArray  # [groups, rows, 2]: for each group of layers where position 0 of a row's
    # sequence is in the cache, or would be if it were still there, and how many tokens the row
    # sees, its own the last. Unused by layers whose rows had their attention already.
    sequences: IntArray  # [sequences, 4]: the first row, the end of the rows, and the addresses of
    # states before and after them; none where no layer has states.


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
