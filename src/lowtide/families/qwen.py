"""Keys of Qwen's `config.json`, shared by several families."""

from __future__ import annotations

from lowtide.config import ModelConfig, keys
from lowtide.config.fields import MAX_LAYERS, MAX_POSITIONS, Fields
from lowtide.config.keys import Origin
from lowtide.config.specs import AttentionSpec, ExpertSpec


def qwen_experts(fields: Fields, shared_size: int = 0) -> ExpertSpec:
    return keys.experts(
        fields,
        keys.expert_size(fields),
        norm_topk_prob=fields.boolean("norm_topk_prob", default=False),
        shared_size=shared_size,
    )


def qwen_decoder(
    fields: Fields, origin: Origin, attention: AttentionSpec, experts: ExpertSpec
) -> ModelConfig:
    """Read a model in which some layers may have a dense MLP in place of experts."""
    sparse = moe_layers(fields)
    every = len(sparse) == keys.num_layers(fields)
    dense_size = 0 if every else keys.width(fields, "intermediate_size")
    return keys.decoder(fields, origin, attention, experts, dense_size, moe_layers=sparse)


def moe_layers(fields: Fields) -> list[int]:
    """Return the layers with experts."""
    count = keys.num_layers(fields)
    step = fields.integer("decoder_sparse_step", low=1, high=MAX_LAYERS, default=1)
    dense = fields.raw("mlp_only_layers") or []
    if not isinstance(dense, list | tuple):
        raise fields.error("mlp_only_layers", "must be a list of layers")
    return [layer for layer in range(count) if (layer + 1) % step == 0 and layer not in dense]


def windows(fields: Fields) -> tuple[int, ...]:
    """Return each layer's sliding window, 0 without, of Qwen2 and Qwen3 without experts.

    Families with experts refuse windows: versions of transformers disagree about their layers.
    """
    usual = [0] * keys.num_layers(fields)
    is_used = fields.boolean("use_sliding_window", default=False)
    if not is_used or fields.is_null("sliding_window"):  # null: none, as in transformers
        return keys.layer_windows(fields, 0, usual)
    window = fields.integer("sliding_window", low=1, high=MAX_POSITIONS, default=4096)
    first = fields.integer("max_window_layers", low=0, high=MAX_LAYERS, default=28)
    return keys.layer_windows(fields, window, usual[:first] + [window] * len(usual[first:]))
