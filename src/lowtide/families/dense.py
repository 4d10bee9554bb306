"""Dense autoregressive decoders: what `config.json` and schema of Llama, Qwen2 and Qwen3 share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lowtide.config import DenseSpec, LayerSpec, ModelConfig, keys
from lowtide.config.fields import Fields
from lowtide.config.keys import Origin
from lowtide.schemas.parts import decoder, in_layers, normed_attention, normed_qkv
from lowtide.schemas.schema import ModelSchema

_USUAL_THETA = 10000.0


def read_dense(
    fields: Fields,
    origin: Origin,
    windows: Sequence[int],
    *,
    has_qkv_bias: bool,
    has_qk_norm: bool = False,
) -> ModelConfig:
    """Read a model of grouped-query attention and gated MLPs.

    windows: the sliding window of each layer; 0 without.
    """
    attention = keys.grouped_attention(
        fields,
        can_stretch=True,
        usual_theta=_USUAL_THETA,
        has_qk_norm=has_qk_norm,
        has_qkv_bias=has_qkv_bias,
    )
    dense = DenseSpec(keys.width(fields, "intermediate_size"))
    kinds = {window: LayerSpec(replace(attention, window=window), dense) for window in windows}
    return keys.layered(fields, origin, [kinds[window] for window in windows])


def dense_schema(config: ModelConfig, *, has_output_bias: bool) -> ModelSchema:
    """Make the schema of a model that `read_dense` has read."""
    spec = config.attention
    attention = normed_attention if has_output_bias else normed_qkv
    present = {"q_proj": spec.has_qkv_bias, "o_proj": has_output_bias}
    absent = [f"self_attn.{name}.bias" for name, is_there in present.items() if not is_there]
    if not spec.has_qk_norm:
        absent.append("self_attn.q_norm.weight")
    return decoder(config, attention, absent=in_layers(config, *absent))
