"""GLM-4.7-Flash: `config.json` and sizes; the layers are DeepSeek-V3's."""

from __future__ import annotations

from lowtide.config import ModelConfig, Published, keys
from lowtide.config.fields import MAX_LAYERS, Fields
from lowtide.config.keys import Origin
from lowtide.families.deepseek_v3 import FAMILY as DEEPSEEK_V3
from lowtide.families.deepseek_v3 import read_with
from lowtide.families.family import Family
from lowtide.families.glm4_moe_lite.gguf import GGUF
from lowtide.families.sigmoid_experts import read_sigmoid_experts


def read(fields: Fields, origin: Origin) -> ModelConfig:
    return read_with(fields, origin, read_sigmoid_experts(fields), _moe_layers(fields))


def _moe_layers(fields: Fields) -> list[int]:
    """Return the layers with experts; `mlp_layer_types` names the kind of each layer."""
    first = fields.integer("first_k_dense_replace", low=0, high=MAX_LAYERS, default=1)
    kinds, count = fields.raw("mlp_layer_types"), keys.num_layers(fields)
    if kinds is None:
        return list(range(first, count))
    if not isinstance(kinds, list) or len(kinds) != count or not {*kinds} <= {"dense", "sparse"}:
        raise fields.error("mlp_layer_types", f"must be a list of {count} of 'dense' and 'sparse'")
    return [layer for layer, kind in enumerate(kinds) if kind == "sparse"]


FAMILY = Family(
    name="glm4_moe_lite",
    architectures=("Glm4MoeLiteForCausalLM",),
    # <|endoftext|>, <|user|>, <|observation|>
    published=Published(eos_token_ids=(154820, 154827, 154829)),
    read=read,
    schema=DEEPSEEK_V3.schema,
    decoder=DEEPSEEK_V3.decoder,
    gguf=GGUF,
    series=("glm_4.7_flash",),
)
