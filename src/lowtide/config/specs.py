"""Kinds of mixers and of MLPs: what a layer of any family is made of.

Each instance checks that its numbers fit together and raises ConfigError if not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from lowtide.config.rope import Rope
from lowtide.errors import ConfigError

ACTIVATIONS = {
    "silu": "silu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "relu2": "relu2",
    "clamped": "silu",
}
"""Names in `config.json` -> functions between an MLP's matrices.

silu and gelu_tanh: down(f(gate x) * up x). relu2: down(relu(up x) ** 2), without a gate. clamped:
gpt-oss's, with biases (`kernels.reference.clamped_swiglu`), of experts alone.
"""


class StateArray(NamedTuple):
    """An array of fixed size that a layer keeps for a sequence, however long that is."""

    shape: tuple[int, ...]
    dtype: str | None = None  # as torch calls it; None: the compute dtype


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention.

    Except for a window, the batch decides which positions see each other.
    """

    states: ClassVar[tuple[StateArray, ...]] = ()

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope | None  # None: positions are not told
    has_qk_norm: bool = False  # before rotation
    has_qkv_bias: bool = False
    window: int = 0  # positions that a row sees, its own included; 0 = all
    scale: float | None = None  # of attention scores; None: head_dim ** -0.5
    has_value_norm: bool = False  # an RMS norm of each value head, without a weight
    has_gate: bool = False  # a sigmoid of hidden states weighs what was attended to

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"config.json: {self.num_heads} attention heads do not divide among "
                f"{self.num_kv_heads} key/value heads."
            )
        if self.rope is not None:
            _check_rotation(self.rope, self.head_dim)

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys (or of the values) of one token."""
        return self.num_kv_heads * self.head_dim

    @property
    def softmax_scale(self) -> float:
        """Factor of attention scores."""
        return 1.0 / math.sqrt(self.head_dim) if self.scale is None else self.scale

    @property
    def cache_shape(self) -> CacheShape:
        return CacheShape(2, self.num_kv_heads, self.head_dim)


@dataclass(frozen=True, slots=True)
class LatentAttentionSpec:
    """Multi-head latent attention: a token keeps one latent and one rotating key for all heads.

    A head's queries and keys are [without rotation | rope.rotary_dim].
    """

    states: ClassVar[tuple[StateArray, ...]] = ()
    window: ClassVar[int] = 0

    num_heads: int
    head_dim: int  # of queries and keys
    value_head_dim: int
    rope: Rope
    kv_lora_rank: int  # width of the latent
    q_lora_rank: int = 0  # 0 = queries are projected in one step
    softmax_factor: float = 1.0  # on the softmax scale, head_dim ** -0.5

    def __post_init__(self) -> None:
        _check_rotation(self.rope, self.head_dim)

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def softmax_scale(self) -> float:
        """Factor of attention scores."""
        return self.softmax_factor / math.sqrt(self.head_dim)

    @property
    def cache_shape(self) -> CacheShape:
        return CacheShape(1, 1, self.kv_lora_rank + self.rope.rotary_dim)


class CacheShape(NamedTuple):
    """Arrays that a token has in a layer's KV cache.

    Two arrays are keys and values; one is a latent that serves as both.
    """

    num_arrays: int
    num_heads: int
    width: int  # of a head


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """A short causal convolution over gated hidden states, for each channel by itself."""

    rope: ClassVar[None] = None
    cache_shape: ClassVar[None] = None
    window: ClassVar[int] = 0

    width: int  # channels
    kernel: int  # positions that a row sees, its own included
    has_bias: bool = False

    @property
    def states(self) -> tuple[StateArray, ...]:
        """The convolution's inputs of the last positions."""
        return (StateArray((self.kernel - 1, self.width)),)


@dataclass(frozen=True, slots=True)
class DeltaNetSpec:
    """A gated delta-net: a matrix for each value head, after a short convolution."""

    rope: ClassVar[None] = None
    cache_shape: ClassVar[None] = None
    window: ClassVar[int] = 0

    key_heads: int  # as many of queries
    value_heads: int
    key_width: int  # of a head
    value_width: int
    kernel: int  # positions that the convolution sees
    is_tiled: bool = False  # value head h has key head h % key_heads; else neighbours share one
    is_fused: bool = False  # one projection makes a key head's queries, keys, values and gates
    is_joint: bool = False  # one projection makes a key head's strengths and decays

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ConfigError(
                f"config.json: {self.value_heads} value heads do not divide among "
                f"{self.key_heads} key heads."
            )

    @property
    def key_size(self) -> int:
        """Width of the keys (or of the queries) of one token."""
        return self.key_heads * self.key_width

    @property
    def value_size(self) -> int:
        return self.value_heads * self.value_width

    @property
    def channels(self) -> int:
        """Width of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def states(self) -> tuple[StateArray, ...]:
        """The convolution's inputs of the last positions, and the heads' matrices."""
        matrices = (self.value_heads, self.key_width, self.value_width)
        return (
            StateArray((self.kernel - 1, self.channels)),
            StateArray(matrices, "float32"),
        )


def _check_rotation(rope: Rope, head_dim: int) -> None:
    rotary_dim = rope.rotary_dim
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise ConfigError(
            f"config.json: {rotary_dim} rotating dimensions must be even and from 2 to the "
            f"head's {head_dim}."
        )


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """An MLP that every token uses."""

    size: int
    activation: str = "silu"  # see `ACTIVATIONS`


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """The routed experts of a layer, their routing, and the shared expert."""

    num_experts: int
    num_experts_per_token: int
    expert_size: int  # width of one
    norm_topk_prob: bool  # the weights of the chosen add up to one
    first_layer: int = 0  # the first that has experts, where those after it all have them
    shared_size: int = 0  # width of the one MLP that all shared experts form; 0 = none
    num_groups: int = 1  # 1 = no group limit
    num_groups_per_token: int = 1
    scaling_factor: float = 1.0
    score_function: str = "softmax"  # or "sigmoid"
    has_bias: bool = False  # added to scores when choosing experts, not to their weights
    capacity: int = 0  # experts that one window may use (LLaDA2.2); 0 = no such limit
    window_tokens: int = 0  # positions that share this limit; 0 without one
    activation: str = "silu"  # see `ACTIVATIONS`
    is_mxfp4: bool = False  # as published: weights of four bits, blocks with scales

    def __post_init__(self) -> None:
        experts, top_k = self.num_experts, self.num_experts_per_token
        groups, kept = self.num_groups, self.num_groups_per_token
        if top_k > experts:
            raise ConfigError(f"config.json: {top_k} experts per token, but there are {experts}.")
        if experts % groups:
            raise ConfigError(f"config.json: {experts} experts do not divide into {groups} groups.")
        if kept > groups:
            raise ConfigError(f"config.json: {kept} groups per token, but there are {groups}.")
        if self.score_function == "sigmoid" and groups > 1 and experts // groups < 2:
            raise ConfigError(
                f"config.json: {groups} groups of one expert; a group is judged by its best two."
            )
        if top_k > kept * (experts // groups):
            raise ConfigError(
                f"config.json: {top_k} experts per token, but {kept} groups hold only "
                f"{kept * (experts // groups)}."
            )
        if self.capacity and not top_k <= self.capacity <= experts:
            raise ConfigError(
                f"config.json: expert_capacity {self.capacity} must be from the experts per "
                f"token, {top_k}, to the {experts} there are."
            )

    @property
    def is_clamped(self) -> bool:
        """True for experts with biases and gpt-oss's activation."""
        return self.activation == "clamped"

    @property
    def is_gated(self) -> bool:
        """True for experts of gate, up and down, False for those of up and down."""
        return self.activation != "relu2"

    def elements(self, hidden_size: int) -> int:
        """Return the number of elements of one routed expert: its matrices, and biases if any."""
        matrices = (3 if self.is_gated else 2) * hidden_size * self.expert_size
        return matrices + (2 * self.expert_size + hidden_size if self.is_clamped else 0)
