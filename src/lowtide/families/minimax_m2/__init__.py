"""MiniMax-M2, M2.1 and M2.5: `config.json`, tensors, sizes."""

from __future__ import annotations

from lowtide.config import ModelConfig, Published, keys
from lowtide.config.fields import OTHER_MODEL, Fields
from lowtide.config.keys import Origin
from lowtide.errors import UnsupportedError
from lowtide.families.family import Family
from lowtide.families.minimax_m2.gguf import GGUF
from lowtide.families.mixtral import storages
from lowtide.families.olmoe import attention
from lowtide.files.json_file import shown
from lowtide.schemas.parts import decoder
from lowtide.schemas.schema import ModelSchema, TensorSpec


def read(fields: Fields, origin: Origin) -> ModelConfig:
    fields.only("scoring_func", "sigmoid")
    fields.only("qk_norm_type", "per_layer")  # over all heads together
    for name in ("use_qk_norm", "use_routing_bias"):
        fields.only(name, True)
    fields.only("shared_intermediate_size", 0)
    fields.refuse("sliding_window")
    kinds = fields.raw("attn_type_list") or []
    if not isinstance(kinds, list) or any(kind != 1 for kind in kinds):
        raise UnsupportedError(
            f"config.json: attn_type_list {shown(kinds)}: only 1, full attention, is supported; "
            f"{OTHER_MODEL}."
        )
    experts = keys.experts(
        fields,
        keys.width(fields, "intermediate_size"),
        norm_topk_prob=True,
        score_function="sigmoid",
        has_bias=True,
    )
    grouped = keys.grouped_attention(fields, can_stretch=True, usual_factor=1.0, has_qk_norm=True)
    return keys.decoder(fields, origin, grouped, experts)


def schema(config: ModelConfig) -> ModelSchema:
    return decoder(config, attention, _moe, storages=storages(config))


def _moe(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    experts, hidden = config.moe.num_experts, config.hidden_size
    # Files in transformers' own layout call the layer `mlp`.
    weight, own_weight = (f"{prefix}{x}.gate.weight" for x in ("block_sparse_moe", "mlp"))
    bias, own_bias = (f"{prefix}{x}.e_score_correction_bias" for x in ("block_sparse_moe", "mlp"))
    return [
        TensorSpec(weight, (experts, hidden), other_name=own_weight, keeps_type=True),
        TensorSpec(bias, (experts,), other_name=own_bias),
    ]


FAMILY = Family(
    name="minimax_m2",
    architectures=("MiniMaxM2ForCausalLM",),
    published=Published(eos_token_ids=(200020,)),
    read=read,
    schema=schema,
    decoder=f"{__name__}.model:MiniMaxM2",
    gguf=GGUF,
)
