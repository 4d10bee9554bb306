"""Expert keys of Qwen's `config.json`, shared by two families."""

from __future__ import annotations

from lowtide.config import keys
from lowtide.config.fields import MAX_LAYERS, Fields
from lowtide.config.specs import ExpertSpec
from lowtide.errors import UnsupportedError
from lowtide.files.json_file import shown


def qwen_experts(fields: Fields, shared_size: int = 0) -> ExpertSpec:
    first_layer, layer_step = _moe_layers(fields)
    return keys.experts(
        fields,
        keys.expert_size(fields),
        norm_topk_prob=fields.boolean("norm_topk_prob", default=False),
        first_layer=first_layer,
        layer_step=layer_step,
        shared_size=shared_size,
    )


def qwen_dense_size(fields: Fields, experts: ExpertSpec) -> int:
    """Return the MLP width of layers without experts; 0 if every layer has experts."""
    count = keys.num_layers(fields)
    return keys.width(fields, "intermediate_size") if len(experts.layers(count)) < count else 0


def _moe_layers(fields: Fields) -> tuple[int, int]:
    """Return the first layer with experts and the step to the next."""
    count = keys.num_layers(fields)
    step = fields.integer("decoder_sparse_step", low=1, high=MAX_LAYERS, default=1)
    dense = fields.raw("mlp_only_layers") or []
    if not isinstance(dense, list | tuple):
        raise fields.error("mlp_only_layers", "must be a list of layers")
    layers = [i for i in range(count) if (i + 1) % step == 0 and i not in dense]
    first = layers[0] if layers else count
    if layers != list(range(first, count, step)):
        raise UnsupportedError(
            f"config.json: mlp_only_layers {shown(dense)} leaves experts in {len(layers)} layers "
            "that are not evenly spaced up to the last; only leading layers can be without them."
        )
    return first, step
