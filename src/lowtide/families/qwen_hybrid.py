"""Qwen3-Next and Qwen3.5: what families share whose layers are delta-nets or gated attention."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from lowtide.config import (
    AttentionSpec,
    DeltaNetSpec,
    DenseSpec,
    ExpertSpec,
    LayerSpec,
    ModelConfig,
    keys,
)
from lowtide.config.fields import MAX_HEADS, MAX_LAYERS, OTHER_MODEL, Fields
from lowtide.config.keys import Origin
from lowtide.errors import UnsupportedError
from lowtide.families.gguf import (
    ENDS,
    EXPERTS,
    OUTPUT,
    QK_NORMS,
    QKV,
    ROUTER,
    Config,
    GgufKeys,
    Names,
    RearrangedTensor,
    mlp,
)
from lowtide.files.json_file import shown
from lowtide.model_folder.checkpoint import ArrayView
from lowtide.model_folder.gguf_header import GgufArray
from lowtide.schemas.parts import mlp as mlp_tensors
from lowtide.schemas.parts import router, vector
from lowtide.schemas.schema import ModelSchema, TensorSpec

DELTA, ATTENTION = "linear_attention", "full_attention"

TILED_KEY = "lowtide_value_heads_are_tiled"
"""Key by which GGUF files' metadata say that value head h has key head h modulo their number."""

MAX_KERNEL = 64

_APART = ("in_proj_b", "in_proj_a")  # strengths and decays
_PROJECTION = re.compile(r"\.linear_attn\.in_proj_(\w+)\.")


def read_layers(
    fields: Fields,
    origin: Origin,
    mlps: Sequence[DenseSpec | ExpertSpec],
    *,
    is_fused: bool = False,
    is_joint: bool = False,
) -> ModelConfig:
    """Read a model with these MLPs, layer by layer; is_fused, is_joint: see `DeltaNetSpec`."""
    fields.only("attention_bias", False)
    fields.only("attn_output_gate", True)
    gate = fields.text("output_gate_type", default="silu")
    if gate not in ("silu", "swish"):
        raise UnsupportedError(
            f"config.json: output_gate_type {shown(gate)} is not supported, only 'silu'; "
            f"{OTHER_MODEL}."
        )
    attention = keys.grouped_attention(
        fields, can_stretch=True, usual_factor=0.25, has_qk_norm=True
    )
    mixers: Mapping[str, AttentionSpec | DeltaNetSpec]
    delta = _delta_net(fields, is_fused, is_joint)
    mixers = {ATTENTION: replace(attention, has_gate=True), DELTA: delta}
    layers = [
        LayerSpec(mixers[kind], own) for kind, own in zip(_layer_types(fields), mlps, strict=True)
    ]
    return keys.layered(fields, origin, layers)


def shared_size(fields: Fields) -> int:
    """Return the width of the shared expert."""
    return keys.width(fields, "shared_expert_intermediate_size")


def _delta_net(fields: Fields, is_fused: bool, is_joint: bool) -> DeltaNetSpec:
    return DeltaNetSpec(
        key_heads=fields.integer("linear_num_key_heads", low=1, high=MAX_HEADS),
        value_heads=fields.integer("linear_num_value_heads", low=1, high=MAX_HEADS),
        key_width=fields.integer("linear_key_head_dim", low=1, high=MAX_HEADS),
        value_width=fields.integer("linear_value_head_dim", low=1, high=MAX_HEADS),
        kernel=fields.integer("linear_conv_kernel_dim", low=2, high=MAX_KERNEL),
        is_tiled=fields.boolean(TILED_KEY, default=False),
        is_fused=is_fused,
        is_joint=is_joint,
    )


def _layer_types(fields: Fields) -> list[str]:
    """Read the kind of each layer's mixer; by default every fourth is attention."""
    count, kinds = keys.num_layers(fields), fields.raw("layer_types")
    interval = fields.integer("full_attention_interval", low=1, high=MAX_LAYERS, default=4)
    if kinds is None:
        return [DELTA if (layer + 1) % interval else ATTENTION for layer in range(count)]
    if not isinstance(kinds, list | tuple) or len(kinds) != count:
        raise fields.error("layer_types", f"must be a list of {count} kinds of layers")
    for kind in kinds:
        if kind not in (DELTA, ATTENTION):
            raise UnsupportedError(
                f"config.json: layer_types has {shown(kind)}; supported: {DELTA}, {ATTENTION}. "
                f"{OTHER_MODEL.capitalize()}."
            )
    return list(kinds)


# Tensors


def mixer_tensors(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    """List the tensors of gated attention, or of a delta-net."""
    mixer, hidden = config.layers[0].mixer, config.hidden_size
    if isinstance(mixer, DeltaNetSpec):
        return _delta_tensors(mixer, config, prefix + "linear_attn.")
    spec = config.mixer(AttentionSpec)
    attention = prefix + "self_attn."
    return [
        TensorSpec(attention + "q_proj.weight", (2 * spec.query_size, hidden)),
        TensorSpec(attention + "k_proj.weight", (spec.kv_size, hidden)),
        TensorSpec(attention + "v_proj.weight", (spec.kv_size, hidden)),
        TensorSpec(attention + "o_proj.weight", (hidden, spec.query_size)),
        *(vector(f"{attention}{x}_norm.weight", spec.head_dim) for x in "qk"),
    ]


def moe_tensors(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    """List the tensors of a router and of a gated shared expert."""
    shared = mlp_tensors(prefix + "mlp.shared_expert.", config.moe.shared_size, config.hidden_size)
    gate = TensorSpec(
        prefix + "mlp.shared_expert_gate.weight", (1, config.hidden_size), keeps_type=True
    )
    return [*router(config, prefix), *shared, gate]


def is_centred(name: str) -> bool:
    """Return True for the weight of a norm that multiplies by 1 + w."""
    return name.endswith("norm.weight") and not name.endswith(".linear_attn.norm.weight")


def with_centred_norms(schema: ModelSchema) -> ModelSchema:
    """Return the schema with these norms marked."""
    dense = (spec._replace(is_centred=is_centred(spec.name)) for spec in schema.dense)
    return replace(schema, dense=tuple(dense))


def as_stored(config: ModelConfig, names: Iterable[str]) -> ModelConfig:
    """Return the config with the projections of delta-nets that a checkpoint's tensors name.

    Newer tools store Qwen3-Next's as Qwen3.5's are.
    """
    found = {match[1] for match in map(_PROJECTION.search, names) if match}

    def stored(layer: LayerSpec) -> LayerSpec:
        if not isinstance(layer.mixer, DeltaNetSpec):
            return layer
        is_fused = "qkvz" in found or ("qkv" not in found and layer.mixer.is_fused)
        is_joint = "ba" in found or ("b" not in found and layer.mixer.is_joint)
        return replace(layer, mixer=replace(layer.mixer, is_fused=is_fused, is_joint=is_joint))

    return replace(config, layers=tuple(map(stored, config.layers)))


def _delta_tensors(spec: DeltaNetSpec, config: ModelConfig, prefix: str) -> list[TensorSpec]:
    hidden, heads, channels = config.hidden_size, spec.value_heads, spec.channels
    rows = {"in_proj_qkv": channels, "in_proj_z": spec.value_size}
    if spec.is_fused:
        rows = {"in_proj_qkvz": channels + spec.value_size}
    rows |= {"in_proj_ba": 2 * heads} if spec.is_joint else dict.fromkeys(_APART, heads)
    # GGUF files have no dimension of one.
    conv = (channels, spec.kernel) if config.is_adjusted else (channels, 1, spec.kernel)
    return [
        *(TensorSpec(f"{prefix}{name}.weight", (count, hidden)) for name, count in rows.items()),
        TensorSpec(prefix + "conv1d.weight", conv, keeps_type=True),
        vector(prefix + "A_log", heads),
        vector(prefix + "dt_bias", heads),
        vector(prefix + "norm.weight", spec.value_width),
        TensorSpec(prefix + "out_proj.weight", (hidden, spec.value_size)),
    ]


# GGUF

_LAYER = "model.layers.#."
_DELTA = _LAYER + "linear_attn."

GGUF_NAMES: Names = {
    **ENDS,
    **QKV,
    **OUTPUT,
    **QK_NORMS,
    "blk.#.attn_norm.weight": _LAYER + "input_layernorm.weight",
    "blk.#.post_attention_norm.weight": _LAYER + "post_attention_layernorm.weight",
    "blk.#.attn_qkv.weight": _DELTA + "in_proj_qkv.weight",
    "blk.#.attn_gate.weight": _DELTA + "in_proj_z.weight",
    "blk.#.ssm_beta.weight": _DELTA + "in_proj_b.weight",
    "blk.#.ssm_alpha.weight": _DELTA + "in_proj_a.weight",
    "blk.#.ssm_conv1d.weight": _DELTA + "conv1d.weight",
    "blk.#.ssm_a": _DELTA + "A_log",  # -exp of it
    "blk.#.ssm_dt.bias": _DELTA + "dt_bias",
    "blk.#.ssm_norm.weight": _DELTA + "norm.weight",
    "blk.#.ssm_out.weight": _DELTA + "out_proj.weight",
}

GGUF_EXPERT_NAMES: Names = {
    **ROUTER,
    **EXPERTS,
    **mlp("_shexp", "mlp.shared_expert."),
    # A vector in most files.
    "blk.#.ffn_gate_inp_shexp.weight": RearrangedTensor(
        _LAYER + "mlp.shared_expert_gate.weight",
        lambda config: ArrayView((1, config.hidden_size), order=(0, 1)),
    ),
}


def gguf_layers(file_keys: GgufKeys, is_tiled: bool) -> Config:
    """Convert the metadata of the mixers; layers that predict further tokens are not counted."""
    count = file_keys.integer_within("block_count", 1, MAX_LAYERS)
    count -= file_keys.integer("nextn_predict_layers", default=0)
    num_heads = file_keys.integer_within("ssm.time_step_rank", 1, MAX_HEADS)
    width, rest = divmod(file_keys.integer("ssm.inner_size"), num_heads)
    if rest:
        raise file_keys.error("ssm.inner_size", f"does not divide among {num_heads} value heads")
    return {
        "num_hidden_layers": count,
        "linear_num_key_heads": file_keys.need("ssm.group_count"),
        "linear_num_value_heads": num_heads,
        "linear_key_head_dim": file_keys.need("ssm.state_size"),
        "linear_value_head_dim": width,
        "linear_conv_kernel_dim": file_keys.need("ssm.conv_kernel"),
        "layer_types": _gguf_layer_types(file_keys, count),
        keys.ADJUSTED_KEY: True,
        TILED_KEY: is_tiled,
    }


def _gguf_layer_types(file_keys: GgufKeys, count: int) -> list[str]:
    """Read the layers with delta-nets: an array of flags, or an interval without them."""
    key = "attention.recurrent_layers"
    flags = file_keys.get(key)
    if not isinstance(flags, GgufArray):
        interval = file_keys.integer("full_attention_interval", default=4)
        if not 1 <= interval <= MAX_LAYERS:
            raise file_keys.error("full_attention_interval", f"must be from 1 to {MAX_LAYERS}")
        return [DELTA if (layer + 1) % interval else ATTENTION for layer in range(count)]
    if flags.is_text or not count <= flags.num_elements <= MAX_LAYERS:
        raise file_keys.error(key, f"must be a flag for each of {count} layers")
    return [DELTA if flag else ATTENTION for flag in flags.numbers()[:count]]
