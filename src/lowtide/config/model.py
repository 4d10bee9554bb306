"""`ModelConfig`: what a model is, whatever its family calls these things."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from lowtide.config.quantisation import Quantisation
from lowtide.config.sampling import PublishedSampling
from lowtide.config.specs import AttentionSpec, ExpertSpec
from lowtide.core import MoEShape
from lowtide.errors import ConfigError, UnsupportedError

_MAX_PARAMETERS = 2**50  # far above any model, and no product of sizes leaves 63 bits


@dataclass(frozen=True, slots=True)
class DecodingDefaults:
    """A diffusion family's published decoding settings; see `params.DiffusionParams`."""

    block_length: int | None = 32  # None: the whole answer is one
    steps: int = 32  # as the family's own code counts them
    threshold: float | None = 0.95
    edit_threshold: float | None = None
    max_post_steps: int = 16
    remasking: str = "low_confidence"
    eps: float | None = None  # where the schedule ends; of Dream's alone
    is_measured_as_drawn: bool = False  # see `decode.candidates.Reading`


class Published(NamedTuple):
    """What is published about a family but not written in its `config.json`."""

    eos_token_ids: tuple[int, ...]
    mask_token_id: int | None = None
    decoding: DecodingDefaults | None = None  # None: autoregressive


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder, whatever its family calls these things.

    Made by `families.read_config`. One that is made by hand gets the same checks of what must
    fit together; they raise ConfigError.
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
    mask_token_id: int | None  # None: an autoregressive model
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    decoding: DecodingDefaults | None  # as published, in this model's blocks
    is_bidirectional: bool = False  # every position sees every other
    logits_shift: int = 0  # a position's logits come from the hidden state so far before it
    quantisation: Quantisation | None = None  # that others rounded the weights to
    sampling: PublishedSampling = PublishedSampling()  # of an autoregressive model

    def __post_init__(self) -> None:
        if self.experts is not None:
            _check_experts(self, self.experts)

    @property
    def is_diffusion(self) -> bool:
        return self.mask_token_id is not None

    @property
    def block_length(self) -> int:
        """Positions that see each other, where not all do; 1 = causal."""
        if self.decoding is None or self.is_bidirectional:
            return 1
        return self.decoding.block_length or 1

    @property
    def moe(self) -> ExpertSpec:
        """The experts of a model that has some."""
        if self.experts is None:
            raise ValueError(f"{self.architecture} has no layer with experts.")
        return self.experts

    @property
    def moe_layers(self) -> range:
        """The layers that have experts, by their number in the model."""
        return range(0) if self.experts is None else self.experts.layers(self.num_layers)

    @property
    def num_moe_layers(self) -> int:
        return len(self.moe_layers)

    @property
    def moe_shape(self) -> MoEShape:
        """Nothing but the hidden size where there are no experts."""
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
        """Raises UnsupportedError where there are none; `asked` is about them."""
        if self.experts is None:
            raise UnsupportedError(f"{asked}: {self.architecture} has no experts.")

    @property
    def num_leading_layers(self) -> int:
        """Layers from the first on until each kind of them has come."""
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
    if experts.capacity and config.is_diffusion and config.block_length % experts.window_tokens:
        raise ConfigError(
            f"config.json: a block of {config.block_length} is not a multiple of block_size "
            f"{experts.window_tokens}."
        )
