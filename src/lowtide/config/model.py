"""`ModelConfig`: a model's facts under family-neutral names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lowtide.config.decoding import Causal, Decoding
from lowtide.config.quantisation import Quantisation
from lowtide.config.sampling import PublishedSampling
from lowtide.config.specs import AttentionSpec, ExpertSpec
from lowtide.core import MoEShape
from lowtide.errors import ConfigError, UnsupportedError

_MAX_PARAMETERS = 2**50  # far above any model, and no product of sizes leaves 63 bits


class Published(NamedTuple):
    """Facts published about a family but missing from its `config.json`."""

    eos_token_ids: tuple[int, ...]
    decoding: Decoding = Causal()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's facts under family-neutral names.

    Made by `families.read_config`. Other instances get the same consistency checks, which raise
    ConfigError.
    """

    architecture: str  # as published: "LLaDA2MoeModelLM"
    family: str  # the name of a `lowtide.families.Family`
    vocab_size: int
    hidden_size: int
    num_layers: int  # all of them, with experts and without
    attention: AttentionSpec
    experts: ExpertSpec | None  # None: no layer has any
    dense_size: int  # width of the MLP in layers without experts; 0 = none
    rms_norm_eps: float
    max_positions: int
    tie_word_embeddings: bool
    dtype: str  # as published: "bfloat16", "float16", "float32"
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    decoding: Decoding  # how it writes: its family's kind, with this model's values
    quantisation: Quantisation | None = None  # that others rounded the weights to
    sampling: PublishedSampling = PublishedSampling()  # where tokens are written in order

    def __post_init__(self) -> None:
        if self.experts is not None:
            _check_experts(self, self.experts)

    @property
    def moe(self) -> ExpertSpec:
        """The routed experts; raises ValueError if there are none."""
        if self.experts is None:
            raise ValueError(f"{self.architecture} has no layer with experts.")
        return self.experts

    @property
    def moe_layers(self) -> range:
        """Layers with experts, by their number in the model."""
        return range(0) if self.experts is None else self.experts.layers(self.num_layers)

    @property
    def num_moe_layers(self) -> int:
        return len(self.moe_layers)

    @property
    def moe_shape(self) -> MoEShape:
        """Shape of the MoE layers; only the hidden size is set without experts."""
        if self.experts is None:
            return MoEShape(0, 0, 0, self.hidden_size, 0)
        return MoEShape(
            num_layers=self.num_moe_layers,
            num_experts=self.moe.num_experts,
            num_experts_per_token=self.moe.num_experts_per_token,
            hidden_size=self.hidden_size,
            expert_size=self.moe.expert_size,
        )

    def check_experts(self, asked: str) -> None:
        """Raise UnsupportedError if there are no experts; `asked` begins its sentence."""
        if self.experts is None:
            raise UnsupportedError(f"{asked}: {self.architecture} has no experts.")

    @property
    def num_leading_layers(self) -> int:
        """Number of first layers that include every kind of layer."""
        windows = self.attention.windows
        firsts = [windows.index(window) for window in set(windows)]
        return max([*self.moe_layers[:1], *firsts], default=0) + 1


def _check_experts(config: ModelConfig, experts: ExpertSpec) -> None:
    if config.num_moe_layers == 0:
        raise ConfigError(
            f"config.json: {experts.first_layer} dense layers of {config.num_layers} leave "
            "no layer with experts."
        )
    expert_elements = experts.elements(config.hidden_size)
    if expert_elements * experts.num_experts * config.num_moe_layers > _MAX_PARAMETERS:
        raise ConfigError(
            f"config.json: {config.num_moe_layers} layers of {experts.num_experts} experts with "
            f"{expert_elements} weights each are more than any model has."
        )
    block_length, window = config.decoding.block_length, experts.window_tokens
    if experts.capacity and not config.decoding.writes_in_order and block_length % window:
        raise ConfigError(
            f"config.json: a block of {block_length} is not a multiple of block_size {window}."
        )
