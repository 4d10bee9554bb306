"""`ModelConfig`: a model's facts under family-neutral names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from lowtide.config.decoding import Causal, Decoding
from lowtide.config.fields import OTHER_MODEL
from lowtide.config.layers import LayerSpec, Mixer
from lowtide.config.quantisation import Quantisation
from lowtide.config.rope import Rope
from lowtide.config.sampling import PublishedSampling
from lowtide.config.specs import AttentionSpec, ExpertSpec
from lowtide.core import MoEShape
from lowtide.errors import ConfigError, UnsupportedError

_Mixer = TypeVar("_Mixer", bound=Mixer)

_MAX_PARAMETERS = 2**50  # far above any model, and no product of sizes leaves 63 bits


class Multipliers(NamedTuple):
    """Constant factors of a model's steps; 1 and, of the cap, 0 change nothing."""

    embedding: float = 1.0
    residual: float = 1.0  # of what each half of a layer adds
    logits: float = 1.0
    logit_cap: float = 0.0  # c: logits become c tanh(logits / c)


NO_MULTIPLIERS = Multipliers()


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
    layers: tuple[LayerSpec, ...]  # equal ones are one object
    rms_norm_eps: float
    max_positions: int
    tie_word_embeddings: bool
    dtype: str  # as published: "bfloat16", "float16", "float32"
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    decoding: Decoding  # how it writes: its family's kind, with this model's values
    quantisation: Quantisation | None = None  # that others rounded the weights to
    sampling: PublishedSampling = PublishedSampling()  # where tokens are written in order
    multipliers: Multipliers = NO_MULTIPLIERS
    is_adjusted: bool = False  # files have dense weights as they are computed with

    def __post_init__(self) -> None:
        if self.experts is not None:
            _check_experts(self, self.experts)
        if self.has_states and not self.decoding.writes_in_order:
            raise UnsupportedError(
                "config.json: layers keep states of a sequence, which only models that write one "
                f"token after the other do here; {OTHER_MODEL}."
            )

    @property
    def num_layers(self) -> int:
        """Number of all layers, with experts and without."""
        return len(self.layers)

    def first_layers(self, num_layers: int) -> ModelConfig:
        """Return the same model with its first layers alone."""
        return replace(self, layers=self.layers[:num_layers])

    @property
    def attention(self) -> AttentionSpec:
        """The first layer's grouped-query attention, which in most models all layers have."""
        return self.mixer(AttentionSpec)

    def mixer(self, kind: type[_Mixer], layer: int | None = None) -> _Mixer:
        """Return a layer's mixer of this kind, by default the first of the model.

        Raises ValueError if it is of another.
        """
        layers = self.layers if layer is None else self.layers[layer : layer + 1]
        found = [each.mixer for each in layers if isinstance(each.mixer, kind)]
        if not found:
            raise ValueError(f"{self.architecture} has no {kind.__name__} there.")
        return found[0]

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The rotary embeddings of all layers, each once."""
        ropes = [layer.mixer.rope for layer in self.kinds if layer.mixer is not None]
        return tuple(dict.fromkeys(rope for rope in ropes if rope is not None))

    @property
    def kinds(self) -> tuple[LayerSpec, ...]:
        """The kinds of layers, in the order in which they first occur."""
        return tuple(dict.fromkeys(self.layers))

    @property
    def has_states(self) -> bool:
        """True if a sequence has states, which cannot be cut at any token."""
        return any(layer.mixer is not None and layer.mixer.states for layer in self.kinds)

    @property
    def dense_size(self) -> int:
        """Width of the MLP in layers without experts; 0 = none."""
        return next((layer.dense.size for layer in self.kinds if layer.dense is not None), 0)

    @property
    def experts(self) -> ExpertSpec | None:
        """The routed experts, which are alike in all layers that have any; None without."""
        return next((layer.experts for layer in self.kinds if layer.experts is not None), None)

    @property
    def moe(self) -> ExpertSpec:
        """The routed experts; raises ValueError if there are none."""
        if (experts := self.experts) is None:
            raise ValueError(f"{self.architecture} has no layer with experts.")
        return experts

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers with experts, by their number in the model."""
        return tuple(n for n, layer in enumerate(self.layers) if layer.experts is not None)

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
            raise UnsupportedError(
                f"{asked}: {self.architecture} has no experts; leave this out, or {OTHER_MODEL}."
            )

    @property
    def num_leading_layers(self) -> int:
        """Number of first layers that include every kind of layer."""
        return max((self.layers.index(kind) + 1 for kind in self.kinds), default=0)


def _check_experts(config: ModelConfig, experts: ExpertSpec) -> None:
    others = {layer.experts for layer in config.kinds} - {None, experts}
    if others:
        raise UnsupportedError(
            f"config.json: layers have routed experts of {1 + len(others)} kinds; only one kind "
            f"is supported: {OTHER_MODEL}."
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
