"""`ModelConfig`: what a model is, whatever its family calls these things."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from lowtide.config.rope import Yarn
from lowtide.core import MoEShape
from lowtide.errors import ConfigError
from lowtide.files.json_file import read_object

MAX_CONFIG_BYTES = 16 << 20

_NOTHING: Mapping[str, object] = MappingProxyType({})

_MAX_PARAMETERS = 2**50  # far above any model, and no product of sizes leaves 63 bits


@dataclass(frozen=True, slots=True)
class DecodingDefaults:
    """A diffusion family's published decoding settings; see `params.DiffusionParams`."""

    block_length: int = 32
    steps: int = 32
    threshold: float = 0.95
    edit_threshold: float | None = None
    max_post_steps: int = 16
    eos_early_stop: bool = False


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A mixture-of-experts decoder, whatever its family calls these things.

    Made by `load` or `from_dict`. Whoever makes one by hand gets the same checks of what must
    fit together; they raise ConfigError.
    """

    architecture: str  # as published: "LLaDA2MoeModelLM"
    family: str  # a key of FAMILIES
    vocab_size: int
    hidden_size: int
    num_layers: int  # all of them, dense and MoE
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dense_intermediate_size: int  # width of the MLP in layers without experts; 0 = none
    expert_intermediate_size: int
    num_experts: int  # routed ones, per MoE layer
    num_experts_per_token: int
    num_shared_experts: int
    shared_intermediate_size: int  # width of the one MLP that all shared experts form; 0 = none
    first_dense_layers: int  # layers before the first MoE layer
    num_expert_groups: int  # 1 = no group limit
    num_groups_per_token: int
    routed_scaling_factor: float
    norm_topk_prob: bool
    score_function: str  # "sigmoid" or "softmax"
    has_expert_bias: bool  # a bias that takes part in choosing experts, not in weighing them
    expert_capacity: int  # experts that one block may use (LLaDA2.2); 0 = no such limit
    routing_block_size: int  # positions that share this limit; 0 without one
    has_qk_norm: bool  # per head, before RoPE
    rms_norm_eps: float
    rope_theta: float
    rotary_dim: int  # leading dimensions of a head that rotate
    max_positions: int
    tie_word_embeddings: bool
    dtype: str  # as published: "bfloat16", "float16", "float32"
    mask_token_id: int | None  # None: an autoregressive model
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    block_length: int  # positions that see each other; 1 = causal
    moe_layer_step: int = 1  # from one MoE layer to the next
    has_qkv_bias: bool = False
    yarn: Yarn | None = None
    # Multi-head latent attention, where a head is [without rotation | rotary_dim] and values
    # have a width of their own; 0 = not of this kind.
    kv_lora_rank: int = 0
    q_lora_rank: int = 0  # 0 = queries are projected in one step
    value_head_dim: int = 0
    softmax_factor: float = 1.0  # on the softmax scale, head_dim ** -0.5
    # Per layer: so many positions a row sees, its own included, 0 = all; () = all in every layer.
    windows: tuple[int, ...] = ()
    has_clamped_experts: bool = False  # biased, with gpt-oss's activation
    has_mxfp4_experts: bool = False  # as published: weights of four bits, blocks with scales

    def __post_init__(self) -> None:
        _check_attention(self)
        _check_experts(self)
        _check_tokens(self)

    @classmethod
    def load(cls, folder: Path, overrides: Mapping[str, object] = _NOTHING) -> ModelConfig:
        """Reads `config.json`, and of `generation_config.json` the end-of-text ids.

        `overrides` replace values under `config.json`'s own keys. Raises ConfigError for a file
        or value that cannot be right, UnsupportedError for a feature that lowtide does not have
        and UsageError for an override that would have no effect.
        """
        if not os.path.isdir(folder):
            raise ConfigError(f"{folder} is not a folder.")
        config = read_object(folder / "config.json", MAX_CONFIG_BYTES, ConfigError)
        path = folder / "generation_config.json"
        exists = os.path.lexists(path)
        generation = read_object(path, MAX_CONFIG_BYTES, ConfigError) if exists else _NOTHING
        return cls.from_dict(config, generation=generation, overrides=overrides)

    @classmethod
    def from_dict(
        cls,
        config: Mapping[str, object],
        *,
        generation: Mapping[str, object] = _NOTHING,
        overrides: Mapping[str, object] = _NOTHING,
    ) -> ModelConfig:
        """The same from the contents of the two files; raises as `load` does."""
        from lowtide.config.families import read_config  # which makes ModelConfigs

        return read_config(config, generation, overrides)

    @property
    def is_diffusion(self) -> bool:
        return self.mask_token_id is not None

    @property
    def decoding(self) -> DecodingDefaults | None:
        """The published settings with this model's block length; None if autoregressive."""
        defaults = FAMILIES[self.family].decoding
        if defaults is None:
            return None
        return replace(defaults, block_length=self.block_length)

    @property
    def moe_layers(self) -> range:
        """The layers that have experts, by their number in the model."""
        return range(self.first_dense_layers, self.num_layers, self.moe_layer_step)

    @property
    def num_moe_layers(self) -> int:
        return len(self.moe_layers)

    @property
    def moe_shape(self) -> MoEShape:
        return MoEShape(
            num_layers=self.num_moe_layers,
            num_experts=self.num_experts,
            num_experts_per_token=self.num_experts_per_token,
            hidden_size=self.hidden_size,
            expert_size=self.expert_intermediate_size,
        )

    @property
    def expert_elements(self) -> int:
        """Weights of one routed expert: gate, up and down together, and their biases if any."""
        matrices = 3 * self.hidden_size * self.expert_intermediate_size
        biases = 2 * self.expert_intermediate_size + self.hidden_size
        return matrices + (biases if self.has_clamped_experts else 0)

    @property
    def num_leading_layers(self) -> int:
        """Layers from the first on until each kind of them has come."""
        first_of_windows = [self.windows.index(window) for window in set(self.windows)]
        return max([self.moe_layers[0], *first_of_windows]) + 1

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys (or of the values) of one layer and token."""
        return self.num_kv_heads * self.head_dim

    @property
    def softmax_scale(self) -> float:
        """What attention scores are multiplied by."""
        return self.softmax_factor / math.sqrt(self.head_dim)

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """Arrays, heads and width of what is cached of a token in each layer.

        Two arrays are keys and values; one is a latent that serves as both.
        """
        if self.kv_lora_rank:
            return 1, 1, self.kv_lora_rank + self.rotary_dim
        return 2, self.num_kv_heads, self.head_dim

    @property
    def kv_token_elements(self) -> int:
        """What is cached of one token in all layers."""
        return self.num_layers * math.prod(self.cache_shape)


class Family(NamedTuple):
    """What is published about a family but not written in its `config.json`."""

    eos_token_ids: tuple[int, ...]
    mask_token_id: int | None
    decoding: DecodingDefaults | None  # None: autoregressive


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llada2": Family((156892,), 156895, DecodingDefaults()),
        # The same vocabulary, but 156895 is <|role_end|> here: ids belong to a family.
        "bailing_moe_v2": Family((156892,), None, None),
        "qwen3_moe": Family((151645, 151643), None, None),
        "qwen2_moe": Family((151643,), None, None),
        "mixtral": Family((2,), None, None),
        "olmoe": Family((50279,), None, None),
        "deepseek_v2": Family((100001,), None, None),
        "gpt_oss": Family((200002,), None, None),
    }
)


def _check_attention(config: ModelConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise ConfigError(
            f"config.json: {config.num_heads} attention heads do not divide among "
            f"{config.num_kv_heads} key/value heads."
        )
    if config.rotary_dim % 2 or not 2 <= config.rotary_dim <= config.head_dim:
        raise ConfigError(
            f"config.json: {config.rotary_dim} rotating dimensions must be even and from 2 to the "
            f"head's {config.head_dim}."
        )


def _check_experts(config: ModelConfig) -> None:
    experts, top_k = config.num_experts, config.num_experts_per_token
    groups, kept = config.num_expert_groups, config.num_groups_per_token
    if config.num_moe_layers == 0:
        raise ConfigError(
            f"config.json: {config.first_dense_layers} dense layers of {config.num_layers} leave "
            "no layer with experts."
        )
    if top_k > experts:
        raise ConfigError(f"config.json: {top_k} experts per token, but there are {experts}.")
    if experts % groups:
        raise ConfigError(f"config.json: {experts} experts do not divide into {groups} groups.")
    if kept > groups:
        raise ConfigError(f"config.json: {kept} groups per token, but there are {groups}.")
    if config.score_function == "sigmoid" and groups > 1 and experts // groups < 2:
        raise ConfigError(
            f"config.json: {groups} groups of one expert; a group is judged by its best two."
        )
    if top_k > kept * (experts // groups):
        raise ConfigError(
            f"config.json: {top_k} experts per token, but {kept} groups hold only "
            f"{kept * (experts // groups)}."
        )
    _check_capacity(config)
    if config.expert_elements * experts * config.num_moe_layers > _MAX_PARAMETERS:
        raise ConfigError(
            f"config.json: {config.num_moe_layers} layers of {experts} experts with "
            f"{config.expert_elements} weights each are more than any model has."
        )


def _check_capacity(config: ModelConfig) -> None:
    capacity, window = config.expert_capacity, config.routing_block_size
    if capacity == 0:
        return
    if not config.num_experts_per_token <= capacity <= config.num_experts:
        raise ConfigError(
            f"config.json: expert_capacity {capacity} must be from the experts per token, "
            f"{config.num_experts_per_token}, to the {config.num_experts} there are."
        )
    if config.is_diffusion and config.block_length % window:
        raise ConfigError(
            f"config.json: a block of {config.block_length} is not a multiple of block_size "
            f"{window}."
        )


def _check_tokens(config: ModelConfig) -> None:
    for token in config.eos_token_ids:
        if token >= config.vocab_size:
            raise ConfigError(
                f"config.json: eos_token_id {token} is outside the vocabulary of "
                f"{config.vocab_size}."
            )
