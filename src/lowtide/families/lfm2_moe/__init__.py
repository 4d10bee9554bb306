"""LFM2 and LFM2.5 with experts (8B-A1B, 24B-A2B): `config.json`, tensors, sizes."""

from __future__ import annotations

from lowtide.config import DenseSpec, ExpertSpec, ModelConfig, Published, keys
from lowtide.config.fields import MAX_LAYERS, Fields
from lowtide.config.keys import Origin
from lowtide.errors import ConfigError
from lowtide.families.family import Family
from lowtide.families.lfm2 import absent, mixer, read_layers
from lowtide.families.lfm2.names import NAMES
from lowtide.families.lfm2_moe.gguf import GGUF
from lowtide.families.mixtral import storages
from lowtide.schemas.parts import decoder, in_layers, vector
from lowtide.schemas.schema import ExpertStorage, ModelSchema, TensorSpec


def read(fields: Fields, origin: Origin) -> ModelConfig:
    count = keys.num_layers(fields)
    num_dense = fields.integer("num_dense_layers", low=0, high=MAX_LAYERS, default=2)
    if num_dense >= count:
        raise ConfigError(
            f"config.json: {num_dense} dense layers of {count} leave no layer with experts."
        )
    dense = [DenseSpec(keys.width(fields, "intermediate_size"))] if num_dense else []
    return read_layers(
        fields, origin, dense * num_dense + [_read_experts(fields)] * (count - num_dense)
    )


def _read_experts(fields: Fields) -> ExpertSpec:
    return keys.experts(
        fields,
        keys.expert_size(fields),
        norm_topk_prob=fields.boolean("norm_topk_prob", default=True),
        scaling_factor=fields.optional_number("routed_scaling_factor", low=1e-6, high=1e6) or 1.0,
        score_function="sigmoid",
        has_bias=fields.boolean("use_expert_bias", default=True),
    )


def schema(config: ModelConfig) -> ModelSchema:
    denied = () if config.moe.has_bias else in_layers(config, "feed_forward.expert_bias")
    return decoder(
        config,
        mixer,
        _moe,
        names=NAMES,
        storages=tuple(map(_renamed, storages(config))),
        absent=(*absent(config), *denied),
    )


def _moe(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    num_experts, prefix = config.moe.num_experts, f"{prefix}feed_forward."
    router = TensorSpec(f"{prefix}gate.weight", (num_experts, config.hidden_size), keeps_type=True)
    biases = [vector(f"{prefix}expert_bias", num_experts)] if config.moe.has_bias else []
    return [router, *biases]


def _renamed(storage: ExpertStorage) -> ExpertStorage:
    """Return Mixtral's storage under LFM2's name of the layer."""
    parts = []
    for part in storage.parts:
        template = part.template
        for name in ("mlp", "block_sparse_moe"):
            template = template.replace(f".{name}.", ".feed_forward.")
        parts.append(part._replace(template=template))
    return storage._replace(parts=tuple(parts))


FAMILY = Family(
    name="lfm2_moe",
    architectures=("Lfm2MoeForCausalLM",),
    published=Published(eos_token_ids=(7,)),  # <|im_end|>
    read=read,
    schema=schema,
    decoder=f"{__name__}.model:Lfm2Moe",
    gguf=GGUF,
)
