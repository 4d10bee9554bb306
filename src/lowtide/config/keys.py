"""Keys of `config.json` that most decoders share, assembled by a family's reader.

chosen = experts(fields, expert_size(fields), norm_topk_prob=True)
return decoder(fields, origin, grouped_attention(fields), chosen)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from lowtide.config.fields import (
    MAX_EXPERTS,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
    MAX_WIDTH,
    OTHER_MODEL,
    Fields,
)
from lowtide.config.layers import LayerSpec, Mixer, layers_of
from lowtide.config.model import NO_MULTIPLIERS, ModelConfig, Multipliers, Published
from lowtide.config.quantisation import read_quantisation
from lowtide.config.rope import read_rope
from lowtide.config.specs import ACTIVATIONS, AttentionSpec, ExpertSpec
from lowtide.config.token_ids import eos_token_ids, mask_token_id
from lowtide.errors import ConfigError, UnsupportedError
from lowtide.files.json_file import shown
from lowtide.formats.plain import SAFETENSORS_NAME

ADJUSTED_KEY = "lowtide_weights_are_adjusted"
"""Key by which GGUF files' metadata say that weights need no `Decoder.adjust`."""


class Origin(NamedTuple):
    """Family, architecture and published facts behind a `config.json`."""

    family: str
    architecture: str
    published: Published
    eos_token_ids: tuple[int, ...] | None  # from the model's files; None: not given


def decoder(
    fields: Fields,
    origin: Origin,
    mixer: Mixer,
    experts: ExpertSpec | None,
    dense_size: int = 0,
    block_length: int | None = None,
    moe_layers: Collection[int] | None = None,
) -> ModelConfig:
    """Make the config of a model with one kind of mixer.

    dense_size, moe_layers: see `layers_of`; others: see `layered`.
    """
    layers = layers_of(num_layers(fields), mixer, experts, dense_size, moe_layers)
    return layered(fields, origin, layers, block_length)


def layered(
    fields: Fields,
    origin: Origin,
    layers: Sequence[LayerSpec],
    block_length: int | None = None,
    multipliers: Multipliers = NO_MULTIPLIERS,
) -> ModelConfig:
    """Make the config of a model with these layers; the other keys are those of all families.

    block_length: of a diffusion model that gives one.
    """
    mlps = [mlp for layer in layers for mlp in (layer.dense, layer.experts) if mlp is not None]
    for activation in {ACTIVATIONS[mlp.activation] for mlp in mlps}:
        fields.only("hidden_act", activation)
    if origin.published.decoding.writes_in_order:
        fields.only("is_causal", True)  # false in models of embeddings
    experts = next((layer.experts for layer in layers if layer.experts is not None), None)
    vocab_size = fields.integer("vocab_size", low=1, high=MAX_VOCAB)
    is_mxfp4 = experts is not None and experts.is_mxfp4
    mask = mask_token_id(fields, origin.published.decoding.mask_token_id, vocab_size)
    return ModelConfig(
        architecture=origin.architecture,
        family=origin.family,
        vocab_size=vocab_size,
        hidden_size=width(fields, "hidden_size"),
        layers=tuple(layers),
        rms_norm_eps=fields.number("rms_norm_eps", low=1e-12, high=1.0),
        max_positions=max_positions(fields),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False),
        dtype=_dtype(fields),
        eos_token_ids=eos_token_ids(origin.eos_token_ids, origin.published, vocab_size),
        pad_token_id=fields.optional_integer("pad_token_id", low=0, high=vocab_size - 1),
        decoding=origin.published.decoding.in_model(mask, block_length),
        quantisation=None if is_mxfp4 else read_quantisation(fields),
        multipliers=multipliers,
        is_adjusted=fields.boolean(ADJUSTED_KEY, default=False),
    )


def grouped_attention(
    fields: Fields,
    *,
    can_stretch: bool = False,
    usual_factor: float | None = None,
    usual_theta: float | None = None,
    has_qk_norm: bool = False,
    has_qkv_bias: bool = False,
) -> AttentionSpec:
    """Read attention whose heads share keys and values in groups.

    can_stretch, usual_factor, usual_theta: see `read_rope`.
    """
    num_heads = fields.integer("num_attention_heads", low=1, high=MAX_HEADS)
    head_dim = _head_dim(fields, width(fields, "hidden_size"), num_heads)
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=fields.integer(
            "num_key_value_heads", low=1, high=MAX_HEADS, default=num_heads
        ),
        head_dim=head_dim,
        rope=read_rope(
            fields, head_dim, max_positions(fields), can_stretch, usual_factor, usual_theta
        ),
        has_qk_norm=has_qk_norm,
        has_qkv_bias=has_qkv_bias,
    )


def num_layers(fields: Fields) -> int:
    return fields.integer("num_hidden_layers", low=1, high=MAX_LAYERS)


def max_positions(fields: Fields) -> int:
    return fields.integer("max_position_embeddings", low=1, high=MAX_POSITIONS)


def num_experts(fields: Fields) -> int:
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    return fields.integer(*names, low=1, high=MAX_EXPERTS)


def experts(fields: Fields, size: int, norm_topk_prob: bool, **others: Any) -> ExpertSpec:
    """Read the routed experts of this width; others: further fields of `ExpertSpec`."""
    per_token = fields.integer("num_experts_per_tok", low=1, high=MAX_EXPERTS)
    return ExpertSpec(num_experts(fields), per_token, size, norm_topk_prob, **others)


def expert_size(fields: Fields) -> int:
    """Read an expert's width, in a family whose `intermediate_size` is its dense layers'."""
    return width(fields, "moe_intermediate_size", "expert_intermediate_size")


def width(fields: Fields, *names: str, default: int | None = None) -> int:
    return fields.integer(*names, low=1, high=MAX_WIDTH, default=default)


def refuse_sliding_windows(fields: Fields) -> None:
    fields.only("use_sliding_window", False)
    kinds = fields.raw("layer_types")
    if kinds is None:
        return
    if not isinstance(kinds, list | tuple) or any(kind != "full_attention" for kind in kinds):
        raise UnsupportedError(
            f"config.json: layer_types {shown(kinds)}: only full_attention is supported; "
            f"{OTHER_MODEL}."
        )


def layer_windows(fields: Fields, window: int, usual: Sequence[int]) -> tuple[int, ...]:
    """Return each layer's sliding window; 0 for layers without.

    window: of the layers that the config calls sliding; 0: it may call none so.
    usual: the windows if it does not name the kinds of layers.
    """
    kinds, count = fields.raw("layer_types"), num_layers(fields)
    if kinds is None:
        return tuple(usual)
    if not isinstance(kinds, list | tuple) or len(kinds) != count:
        raise fields.error("layer_types", f"must be a list of {count} kinds")
    sizes = {"sliding_attention": window, "full_attention": 0}
    for kind in kinds:
        if not isinstance(kind, str) or kind not in sizes:
            raise UnsupportedError(
                f"config.json: layer_types has {shown(kind)}; supported: {', '.join(sizes)}. "
                f"{OTHER_MODEL.capitalize()}."
            )
        if kind == "sliding_attention" and not window:
            raise fields.error("layer_types", "names windows, but no sliding_window is in use")
    return tuple(sizes[kind] for kind in kinds)


def _head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    head_dim = fields.optional_integer("head_dim", low=1, high=MAX_HEADS)
    if head_dim is not None:
        return head_dim
    if hidden_size % num_heads:
        raise ConfigError(
            f"config.json has no head_dim, and hidden_size {hidden_size} does not divide by "
            f"{num_heads} heads."
        )
    return hidden_size // num_heads


def _dtype(fields: Fields) -> str:
    dtype = fields.text("dtype", "torch_dtype", default="bfloat16").removeprefix("torch.")
    if dtype not in SAFETENSORS_NAME:
        raise UnsupportedError(
            f"config.json: dtype {shown(dtype)} is not supported; "
            f"supported: {', '.join(SAFETENSORS_NAME)}. Give one of them as a config override."
        )
    return dtype
