"""LFM2 and LFM2.5 without experts: `config.json`, tensors, sizes.

Most layers have a short convolution in place of attention. LFM2 with experts (`families/lfm2_moe`)
has the same mixers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lowtide.config import (
    AttentionSpec,
    DenseSpec,
    ExpertSpec,
    LayerSpec,
    ModelConfig,
    Published,
    ShortConvSpec,
    keys,
)
from lowtide.config.fields import MAX_WIDTH, OTHER_MODEL, Fields
from lowtide.config.keys import Origin
from lowtide.errors import ConfigError, UnsupportedError
from lowtide.families.family import Family
from lowtide.families.lfm2.gguf import GGUF
from lowtide.families.lfm2.names import NAMES
from lowtide.files.json_file import shown
from lowtide.schemas.parts import decoder, in_layers, normed_qkv, vector
from lowtide.schemas.schema import ModelSchema, TensorSpec

CONV, ATTENTION = "conv", "full_attention"

_USUAL_THETA = 1e6
_MAX_KERNEL = 64


def read(fields: Fields, origin: Origin) -> ModelConfig:
    dense = DenseSpec(_dense_size(fields))
    return read_layers(fields, origin, [dense] * keys.num_layers(fields))


def read_layers(
    fields: Fields, origin: Origin, mlps: Sequence[DenseSpec | ExpertSpec]
) -> ModelConfig:
    """Read a model with these MLPs, layer by layer."""
    mixers: dict[str, ShortConvSpec | AttentionSpec] = {
        CONV: ShortConvSpec(
            width=keys.width(fields, "hidden_size"),
            kernel=fields.integer("conv_L_cache", low=2, high=_MAX_KERNEL, default=3),
            has_bias=fields.boolean("conv_bias", default=False),
        ),
        ATTENTION: keys.grouped_attention(
            fields, can_stretch=True, usual_theta=_USUAL_THETA, has_qk_norm=True
        ),
    }
    pairs = zip(_layer_types(fields), mlps, strict=True)
    specs = [LayerSpec(mixers[kind], mlp) for kind, mlp in pairs]
    alike = {spec: spec for spec in specs}
    layers = [alike[spec] for spec in specs]
    is_tied = fields.boolean("tie_word_embeddings", "tie_embedding", default=True)
    config = keys.layered(fields.renamed({"rms_norm_eps": "norm_eps"}), origin, layers)
    return replace(config, tie_word_embeddings=is_tied)


def schema(config: ModelConfig) -> ModelSchema:
    return decoder(config, mixer, names=NAMES, absent=absent(config))


def mixer(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    """List the tensors of a layer's convolution or attention."""
    spec, hidden = config.layers[0].mixer, config.hidden_size
    if not isinstance(spec, ShortConvSpec):
        return normed_qkv(config, prefix, NAMES)
    conv = f"{prefix}conv."
    tensors = [
        TensorSpec(f"{conv}in_proj.weight", (3 * hidden, hidden)),
        TensorSpec(f"{conv}conv.weight", (hidden, 1, spec.kernel), keeps_type=True),
        TensorSpec(f"{conv}out_proj.weight", (hidden, hidden)),
    ]
    if spec.has_bias:
        widths = {"in_proj": 3 * hidden, "conv": hidden, "out_proj": hidden}
        tensors += [vector(f"{conv}{name}.bias", width) for name, width in widths.items()]
    return tensors


def absent(config: ModelConfig) -> tuple[str, ...]:
    """List names of biases that contradict the config."""
    names = ["self_attn.q_proj.bias"]
    if not any(
        isinstance(layer.mixer, ShortConvSpec) and layer.mixer.has_bias for layer in config.kinds
    ):
        names.append("conv.in_proj.bias")
    return in_layers(config, *names)


def _layer_types(fields: Fields) -> list[str]:
    """Read the kind of each layer's mixer, or else the numbers of those with attention."""
    kinds, count = fields.raw("layer_types"), keys.num_layers(fields)
    if kinds is None:
        return _with_attention(fields, count)
    if not isinstance(kinds, list) or len(kinds) != count:
        raise fields.error("layer_types", f"must be a list of {count} kinds of layers")
    if any(kind not in (CONV, ATTENTION) for kind in kinds):
        raise UnsupportedError(
            f"config.json: layer_types {shown(kinds)}: only {CONV} and {ATTENTION} are supported; "
            f"{OTHER_MODEL}."
        )
    return kinds


def _with_attention(fields: Fields, count: int) -> list[str]:
    numbers = fields.raw("full_attn_idxs")
    if numbers is None:
        raise ConfigError("config.json has no layer_types or full_attn_idxs.")
    if not isinstance(numbers, list) or any(number not in range(count) for number in numbers):
        raise fields.error("full_attn_idxs", f"must be a list of layers from 0 to {count - 1}")
    return [ATTENTION if layer in numbers else CONV for layer in range(count)]


def _dense_size(fields: Fields) -> int:
    """Read the width of the MLPs; by default the file has that before it was shrunk and padded."""
    size = fields.optional_integer("block_ff_dim", low=1, high=MAX_WIDTH)
    if size is None:
        size = keys.width(fields, "intermediate_size")
    is_adjusted = fields.boolean("block_auto_adjust_ff_dim", default=True)
    factor = fields.optional_number("block_ffn_dim_multiplier", low=1e-3, high=1e3)
    unit = fields.integer("block_multiple_of", low=1, high=MAX_WIDTH, default=256)
    if not is_adjusted:
        return size
    size = int((1.0 if factor is None else factor) * int(2 * size / 3))
    return -(-size // unit) * unit


FAMILY = Family(
    name="lfm2",
    architectures=("Lfm2ForCausalLM",),
    published=Published(eos_token_ids=(7,)),  # <|im_end|>
    read=read,
    schema=schema,
    decoder=f"{__name__}.model:Lfm2",
    gguf=GGUF,
)
