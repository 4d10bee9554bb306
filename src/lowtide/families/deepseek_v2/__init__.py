"""DeepSeek-V2 and V2-Lite: `config.json`, tensors, sizes."""

from __future__ import annotations

from lowtide.config import ExpertSpec, LatentAttentionSpec, ModelConfig, Published, keys
from lowtide.config.fields import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, OTHER_MODEL, Fields
from lowtide.config.keys import Origin
from lowtide.config.rope import mscale, read_rope
from lowtide.errors import UnsupportedError
from lowtide.families.deepseek_v2.gguf import GGUF
from lowtide.families.family import Family
from lowtide.families.sigmoid_experts import absent_shared
from lowtide.files.json_file import shown
from lowtide.schemas.parts import decoder, mlp, router, vector
from lowtide.schemas.schema import ModelSchema, TensorSpec


def read(fields: Fields, origin: Origin) -> ModelConfig:
    fields.only("scoring_func", "softmax")
    fields.only("moe_layer_freq", 1)
    # The published modelling codes disagree on what renormalised weights are scaled by.
    for name in ("attention_bias", "mlp_bias", "norm_topk_prob"):
        fields.only(name, False)
    dense_size = keys.width(fields, "intermediate_size")
    return keys.decoder(fields, origin, read_attention(fields), _read_experts(fields), dense_size)


def _read_experts(fields: Fields) -> ExpertSpec:
    each, count = keys.expert_size(fields), keys.num_experts(fields)
    num_groups, num_groups_per_token = _read_groups(fields, count)
    scaling_factor = fields.optional_number("routed_scaling_factor", low=1e-6, high=1e6)
    return keys.experts(
        fields,
        each,
        norm_topk_prob=False,
        first_layer=fields.integer("first_k_dense_replace", low=0, high=MAX_LAYERS, default=0),
        shared_size=each * fields.integer("n_shared_experts", low=0, high=64, default=0),
        num_groups=num_groups,
        num_groups_per_token=num_groups_per_token,
        scaling_factor=1.0 if scaling_factor is None else scaling_factor,
    )


def _read_groups(fields: Fields, num_experts: int) -> tuple[int, int]:
    num_groups = fields.integer("n_group", low=1, high=num_experts, default=1)
    per_token = fields.integer("topk_group", low=1, high=num_experts, default=1)
    method = fields.text("topk_method", default="greedy")
    if method == "greedy":
        return 1, 1
    if method != "group_limited_greedy":
        raise UnsupportedError(
            f"config.json: topk_method {shown(method)} is not supported, only 'greedy' and "
            f"'group_limited_greedy'; {OTHER_MODEL}."
        )
    return num_groups, per_token


def read_attention(fields: Fields, is_interleaved: bool = True) -> LatentAttentionSpec:
    """Read multi-head latent attention; queries and keys are [without rotation | rotating].

    is_interleaved: see `Rope`.
    """
    num_heads = fields.integer("num_attention_heads", low=1, high=MAX_HEADS)
    fixed_dim = fields.integer("qk_nope_head_dim", low=1, high=MAX_HEADS)
    rotary_dim = fields.integer("qk_rope_head_dim", low=2, high=MAX_HEADS)
    rope = read_rope(fields, rotary_dim, keys.max_positions(fields), can_stretch=True)
    softmax_factor = 1.0
    if rope.yarn is not None and rope.mscale_all_dim:
        softmax_factor = mscale(rope.yarn.factor, rope.mscale_all_dim) ** 2
    return LatentAttentionSpec(
        num_heads=num_heads,
        head_dim=fixed_dim + rotary_dim,
        rope=rope._replace(is_interleaved=is_interleaved),
        kv_lora_rank=keys.width(fields, "kv_lora_rank"),
        q_lora_rank=fields.optional_integer("q_lora_rank", low=0, high=MAX_WIDTH) or 0,
        value_head_dim=fields.integer("v_head_dim", low=1, high=MAX_HEADS),
        softmax_factor=softmax_factor,
    )


def schema(config: ModelConfig) -> ModelSchema:
    return decoder(config, attention, _moe, absent=absent_shared(config))


def attention(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    prefix += "self_attn."
    spec, hidden = config.mixer(LatentAttentionSpec), config.hidden_size
    rank, heads, rotary_dim = spec.kv_lora_rank, spec.num_heads, spec.rope.rotary_dim
    expanded = heads * (spec.head_dim - rotary_dim + spec.value_head_dim)
    return [
        *_queries(spec, hidden, prefix),
        # One latent for all heads, and one rotating key beside it.
        TensorSpec(prefix + "kv_a_proj_with_mqa.weight", (rank + rotary_dim, hidden)),
        vector(prefix + "kv_a_layernorm.weight", rank),
        # Rows of a head: its keys' part without rotation, then its values.
        TensorSpec(prefix + "kv_b_proj.weight", (expanded, rank), keeps_type=True),
        TensorSpec(prefix + "o_proj.weight", (hidden, heads * spec.value_head_dim)),
    ]


def _queries(spec: LatentAttentionSpec, hidden_size: int, prefix: str) -> list[TensorSpec]:
    if not spec.q_lora_rank:
        return [TensorSpec(prefix + "q_proj.weight", (spec.query_size, hidden_size))]
    return [
        TensorSpec(prefix + "q_a_proj.weight", (spec.q_lora_rank, hidden_size)),
        vector(prefix + "q_a_layernorm.weight", spec.q_lora_rank),
        TensorSpec(prefix + "q_b_proj.weight", (spec.query_size, spec.q_lora_rank)),
    ]


def _moe(config: ModelConfig, prefix: str) -> list[TensorSpec]:
    if not config.moe.shared_size:
        return router(config, prefix)
    shared = mlp(prefix + "mlp.shared_experts.", config.moe.shared_size, config.hidden_size)
    return [*router(config, prefix), *shared]


FAMILY = Family(
    name="deepseek_v2",
    architectures=("DeepseekV2ForCausalLM",),
    published=Published(eos_token_ids=(100001,)),
    read=read,
    schema=schema,
    decoder=f"{__name__}.model:DeepseekV2",
    gguf=GGUF,
    series=("deepseek2",),
)
