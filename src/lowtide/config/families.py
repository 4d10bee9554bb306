"""How each family's `config.json` is read. A reader refuses by name what its model does not do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from lowtide.config.fields import Fields
from lowtide.config.model import FAMILIES, Family, ModelConfig
from lowtide.config.rope import Rope, mscale, read_rope
from lowtide.dtypes import MXFP4_BLOCK, SAFETENSORS_NAME
from lowtide.errors import ConfigError, UnsupportedError
from lowtide.files.json_file import shown

# Far above any model, low enough that no product of sizes leaves 63 bits or fills memory.
_MAX_VOCAB = 2**24
_MAX_WIDTH = 2**20
_MAX_LAYERS = 1024
_MAX_HEADS = 4096
_MAX_EXPERTS = 4096
_MAX_POSITIONS = 2**28


def supported_architectures() -> tuple[str, ...]:
    """The names under `architectures` that can be read, in alphabetical order."""
    return tuple(sorted(_ARCHITECTURES))


def read_config(
    config: Mapping[str, object], generation: Mapping[str, object], overrides: Mapping[str, object]
) -> ModelConfig:
    """See `ModelConfig.from_dict`."""
    fields = Fields({**config, **overrides})
    architecture = _architecture(fields)
    eos = _eos_token_ids(fields, generation, "eos_token_id" in overrides)
    result = _ARCHITECTURES[architecture].read(fields, architecture, eos)
    for name in overrides:
        fields.refuse_unread(name)
    return result


class _Heads(NamedTuple):
    """The attention of a family."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    kv_lora_rank: int = 0
    q_lora_rank: int = 0
    value_head_dim: int = 0
    softmax_factor: float = 1.0
    windows: tuple[int, ...] = ()


class _Routed(NamedTuple):
    """The experts of a family and the choice among them."""

    expert_size: int
    num_experts: int
    norm_topk_prob: bool
    first_layer: int = 0
    layer_step: int = 1
    dense_size: int = 0
    num_shared: int = 0
    shared_size: int = 0  # of all shared experts together
    num_groups: int = 1
    num_groups_per_token: int = 1
    scaling_factor: float = 1.0
    score_function: str = "softmax"
    has_bias: bool = False
    capacity: int = 0
    block_size: int = 0
    is_clamped: bool = False
    is_mxfp4: bool = False


def _read_ling(
    fields: Fields, architecture: str, eos_token_ids: tuple[int, ...] | None
) -> ModelConfig:
    """The Ling 2.0 body: LLaDA2.x, which are diffusion models, and BailingMoeV2, which are not."""
    fields.only("score_function", "sigmoid")
    fields.only("use_rmsnorm", True)
    for name in (
        "use_bias",
        "use_qkv_bias",
        "attention_bias",
        "norm_head",
        "norm_softmax",
        "use_sliding_window",
        "using_split_qkv_in_self_attention",
    ):
        fields.only(name, False)
    expert_size = fields.integer(*_EXPERT_WIDTH_NAMES, low=1, high=_MAX_WIDTH)
    num_experts = fields.integer(*_EXPERT_COUNT_NAMES, low=1, high=_MAX_EXPERTS)
    num_shared = fields.integer("num_shared_experts", low=0, high=64, default=0)
    shared_size = fields.integer(
        "moe_shared_expert_intermediate_size", low=1, high=_MAX_WIDTH, default=expert_size
    )
    capacity = fields.integer("expert_capacity", low=0, high=_MAX_EXPERTS, default=0)
    groups = _ling_groups(fields, num_experts, capacity)
    block_size = fields.integer("block_size", low=1, high=_MAX_POSITIONS, default=32)
    block_length = fields.integer("block_length", low=1, high=_MAX_POSITIONS, default=block_size)
    routed = _Routed(
        expert_size=expert_size,
        num_experts=num_experts,
        norm_topk_prob=fields.boolean("norm_topk_prob", default=True),
        first_layer=fields.integer("first_k_dense_replace", low=0, high=_MAX_LAYERS),
        dense_size=fields.integer("intermediate_size", low=1, high=_MAX_WIDTH),
        num_shared=num_shared,
        shared_size=num_shared * shared_size,
        num_groups=groups[0],
        num_groups_per_token=groups[1],
        scaling_factor=fields.number("routed_scaling_factor", low=1e-6, high=1e6),
        score_function="sigmoid",
        has_bias=fields.boolean("moe_router_enable_expert_bias", default=True),
        capacity=capacity,
        block_size=block_size if capacity else 0,
    )
    # Absent from the published LLaDA2.0 and 2.1 configs, whose checkpoints have the tensors.
    heads = _heads(fields, can_be_partial=True)
    heads = heads._replace(has_qk_norm=fields.boolean("use_qk_norm", default=True))
    return _decoder(fields, architecture, eos_token_ids, heads, routed, block_length)


def _ling_groups(fields: Fields, num_experts: int, capacity: int) -> tuple[int, int]:
    # LLaDA2.2 still carries both numbers, but its capacity limit took their place.
    limit = num_experts if capacity == 0 else _MAX_EXPERTS
    default = 1 if capacity else None
    num_groups = fields.integer("n_group", low=1, high=limit, default=default)
    per_token = fields.integer("topk_group", low=1, high=limit, default=default)
    return (1, 1) if capacity else (num_groups, per_token)


def _read_qwen3_moe(
    fields: Fields, architecture: str, eos_token_ids: tuple[int, ...] | None
) -> ModelConfig:
    fields.only("attention_bias", False)
    _refuse_sliding_windows(fields)
    heads = _heads(fields, can_yarn=True)._replace(has_qk_norm=True)
    return _decoder(fields, architecture, eos_token_ids, heads, _qwen_experts(fields))


def _read_qwen2_moe(
    fields: Fields, architecture: str, eos_token_ids: tuple[int, ...] | None
) -> ModelConfig:
    _refuse_sliding_windows(fields)
    has_bias = fields.boolean("qkv_bias", default=True)
    heads = _heads(fields, can_yarn=True)._replace(has_qkv_bias=has_bias)
    shared_size = fields.integer("shared_expert_intermediate_size", low=1, high=_MAX_WIDTH)
    routed = _qwen_experts(fields)._replace(num_shared=1, shared_size=shared_size)
    return _decoder(fields, architecture, eos_token_ids, heads, routed)


def _qwen_experts(fields: Fields) -> _Routed:
    first_layer, layer_step = _qwen_moe_layers(fields)
    num_layers = fields.integer("num_hidden_layers", low=1, high=_MAX_LAYERS)
    has_dense_layers = len(range(first_layer, num_layers, layer_step)) < num_layers
    dense_size = 0
    if has_dense_layers:
        dense_size = fields.integer("intermediate_size", low=1, high=_MAX_WIDTH)
    return _Routed(
        expert_size=fields.integer(*_EXPERT_WIDTH_NAMES, low=1, high=_MAX_WIDTH),
        num_experts=fields.integer(*_EXPERT_COUNT_NAMES, low=1, high=_MAX_EXPERTS),
        norm_topk_prob=fields.boolean("norm_topk_prob", default=False),
        first_layer=first_layer,
        layer_step=layer_step,
        dense_size=dense_size,
    )


def _qwen_moe_layers(fields: Fields) -> tuple[int, int]:
    """The first layer with experts, and the step to the next one."""
    num_layers = fields.integer("num_hidden_layers", low=1, high=_MAX_LAYERS)
    step = fields.integer("decoder_sparse_step", low=1, high=_MAX_LAYERS, default=1)
    dense = fields.raw("mlp_only_layers") or []
    if not isinstance(dense, list | tuple):
        raise fields.error("mlp_only_layers", "must be a list of layers")
    layers = [i for i in range(num_layers) if (i + 1) % step == 0 and i not in dense]
    first = layers[0] if layers else num_layers
    if layers != list(range(first, num_layers, step)):
        raise UnsupportedError(
            f"config.json: mlp_only_layers {shown(dense)} leaves experts in {len(layers)} layers "
            "that are not evenly spaced up to the last; only leading layers can be without them."
        )
    return first, step


def _read_mixtral(
    fields: Fields, architecture: str, eos_token_ids: tuple[int, ...] | None
) -> ModelConfig:
    fields.refuse("sliding_window")
    routed = _Routed(
        expert_size=fields.integer("intermediate_size", low=1, high=_MAX_WIDTH),
        num_experts=fields.integer(*_EXPERT_COUNT_NAMES, low=1, high=_MAX_EXPERTS),
        norm_topk_prob=True,
    )
    return _decoder(fields, architecture, eos_token_ids, _heads(fields), routed)


def _read_olmoe(
    fields: Fields, architecture: str, eos_token_ids: tuple[int, ...] | None
) -> ModelConfig:
    fields.only("attention_bias", False)
    fields.refuse("clip_qkv")
    routed = _Routed(
        expert_size=fields.integer("intermediate_size", low=1, high=_MAX_WIDTH),
        num_experts=fields.integer(*_EXPERT_COUNT_NAMES, low=1, high=_MAX_EXPERTS),
        norm_topk_prob=fields.boolean("norm_topk_prob", default=False),
    )
    heads = _heads(fields)._replace(has_qk_norm=True)
    return _decoder(fields, architecture, eos_token_ids, heads, routed)


def _read_deepseek_v2(
    fields: Fields, architecture: str, eos_token_ids: tuple[int, ...] | None
) -> ModelConfig:
    fields.only("scoring_func", "softmax")
    fields.only("moe_layer_freq", 1)
    # The published modelling codes disagree on what renormalised weights are scaled by.
    for name in ("attention_bias", "mlp_bias", "norm_topk_prob"):
        fields.only(name, False)
    expert_size = fields.integer(*_EXPERT_WIDTH_NAMES, low=1, high=_MAX_WIDTH)
    num_experts = fields.integer(*_EXPERT_COUNT_NAMES, low=1, high=_MAX_EXPERTS)
    num_shared = fields.integer("n_shared_experts", low=0, high=64, default=0)
    groups = _deepseek_groups(fields, num_experts)
    scaling_factor = fields.optional_number("routed_scaling_factor", low=1e-6, high=1e6)
    routed = _Routed(
        expert_size=expert_size,
        num_experts=num_experts,
        norm_topk_prob=False,
        first_layer=fields.integer("first_k_dense_replace", low=0, high=_MAX_LAYERS, default=0),
        dense_size=fields.integer("intermediate_size", low=1, high=_MAX_WIDTH),
        num_shared=num_shared,
        shared_size=num_shared * expert_size,
        num_groups=groups[0],
        num_groups_per_token=groups[1],
        scaling_factor=1.0 if scaling_factor is None else scaling_factor,
    )
    return _decoder(fields, architecture, eos_token_ids, _latent_heads(fields), routed)


def _read_gpt_oss(
    fields: Fields, architecture: str, eos_token_ids: tuple[int, ...] | None
) -> ModelConfig:
    fields.only("attention_bias", True)
    fields.only("swiglu_alpha", 1.702)
    fields.only("swiglu_limit", 7.0)
    expert_size = fields.integer("intermediate_size", low=1, high=_MAX_WIDTH)
    routed = _Routed(
        expert_size=expert_size,
        num_experts=fields.integer(*_EXPERT_COUNT_NAMES, low=1, high=_MAX_EXPERTS),
        norm_topk_prob=True,
        is_clamped=True,
        is_mxfp4=_is_mxfp4(fields, expert_size),
    )
    heads = _heads(fields, can_yarn=True)
    heads = heads._replace(has_qkv_bias=True, windows=_windows(fields))
    return _decoder(fields, architecture, eos_token_ids, heads, routed)


def _is_mxfp4(fields: Fields, expert_size: int) -> bool:
    """Whether experts are published in MXFP4, which is unpacked as they are read."""
    quantised = fields.raw("quantization_config")
    if quantised is None:
        return False
    if not isinstance(quantised, dict):
        raise fields.error("quantization_config", "must be an object")
    Fields(quantised, "quantization_config.").only("quant_method", "mxfp4")
    hidden_size = fields.integer("hidden_size", low=1, high=_MAX_WIDTH)
    for width in (hidden_size, expert_size):
        if width % MXFP4_BLOCK:
            raise ConfigError(
                f"config.json: MXFP4 experts of {hidden_size} by {expert_size} weights do not "
                f"divide into blocks of {MXFP4_BLOCK}."
            )
    return True


def _windows(fields: Fields) -> tuple[int, ...]:
    """Each layer's sliding window; every other layer has one where the file does not say."""
    num_layers = fields.integer("num_hidden_layers", low=1, high=_MAX_LAYERS)
    window = fields.integer("sliding_window", low=1, high=_MAX_POSITIONS, default=128)
    sizes = {"sliding_attention": window, "full_attention": 0}
    kinds = fields.raw("layer_types")
    if kinds is None:
        return tuple(0 if layer % 2 else window for layer in range(num_layers))
    if not isinstance(kinds, list | tuple) or len(kinds) != num_layers:
        raise fields.error("layer_types", f"must be a list of {num_layers} kinds")
    for kind in kinds:
        if not isinstance(kind, str) or kind not in sizes:
            raise UnsupportedError(
                f"config.json: layer_types has {shown(kind)}; supported: {', '.join(sizes)}."
            )
    return tuple(sizes[kind] for kind in kinds)


def _deepseek_groups(fields: Fields, num_experts: int) -> tuple[int, int]:
    num_groups = fields.integer("n_group", low=1, high=num_experts, default=1)
    per_token = fields.integer("topk_group", low=1, high=num_experts, default=1)
    method = fields.text("topk_method", default="greedy")
    if method == "greedy":
        return 1, 1
    if method != "group_limited_greedy":
        raise UnsupportedError(
            f"config.json: topk_method {shown(method)} is not supported, only 'greedy' and "
            "'group_limited_greedy'."
        )
    return num_groups, per_token


def _latent_heads(fields: Fields) -> _Heads:
    """Multi-head latent attention; queries and keys are [without rotation | rotating]."""
    num_heads = fields.integer("num_attention_heads", low=1, high=_MAX_HEADS)
    fixed_dim = fields.integer("qk_nope_head_dim", low=1, high=_MAX_HEADS)
    rotary_dim = fields.integer("qk_rope_head_dim", low=2, high=_MAX_HEADS)
    max_positions = fields.integer("max_position_embeddings", low=1, high=_MAX_POSITIONS)
    rope = read_rope(fields, rotary_dim, max_positions, can_yarn=True)
    softmax_factor = 1.0
    if rope.yarn is not None and rope.mscale_all_dim:
        softmax_factor = mscale(rope.yarn.factor, rope.mscale_all_dim) ** 2
    return _Heads(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=fixed_dim + rotary_dim,
        rope=rope,
        kv_lora_rank=fields.integer("kv_lora_rank", low=1, high=_MAX_WIDTH),
        q_lora_rank=fields.optional_integer("q_lora_rank", low=0, high=_MAX_WIDTH) or 0,
        value_head_dim=fields.integer("v_head_dim", low=1, high=_MAX_HEADS),
        softmax_factor=softmax_factor,
    )


_EXPERT_COUNT_NAMES = ("num_experts", "n_routed_experts", "num_local_experts")
_EXPERT_WIDTH_NAMES = ("moe_intermediate_size", "expert_intermediate_size")


def _decoder(
    fields: Fields,
    architecture: str,
    eos_token_ids: tuple[int, ...] | None,
    heads: _Heads,
    routed: _Routed,
    block_length: int = 1,
) -> ModelConfig:
    """Joins what a family says of its attention and experts with what all say alike."""
    fields.only("hidden_act", "silu")
    if not routed.is_mxfp4:
        _refuse_quantised(fields)
    family = _ARCHITECTURES[architecture].family
    facts = FAMILIES[family]
    vocab_size = fields.integer("vocab_size", low=1, high=_MAX_VOCAB)
    return ModelConfig(
        architecture=architecture,
        family=family,
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size", low=1, high=_MAX_WIDTH),
        num_layers=fields.integer("num_hidden_layers", low=1, high=_MAX_LAYERS),
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        dense_intermediate_size=routed.dense_size,
        expert_intermediate_size=routed.expert_size,
        num_experts=routed.num_experts,
        num_experts_per_token=fields.integer("num_experts_per_tok", low=1, high=_MAX_EXPERTS),
        num_shared_experts=routed.num_shared,
        shared_intermediate_size=routed.shared_size,
        first_dense_layers=routed.first_layer,
        num_expert_groups=routed.num_groups,
        num_groups_per_token=routed.num_groups_per_token,
        routed_scaling_factor=routed.scaling_factor,
        norm_topk_prob=routed.norm_topk_prob,
        score_function=routed.score_function,
        has_expert_bias=routed.has_bias,
        expert_capacity=routed.capacity,
        routing_block_size=routed.block_size,
        has_qk_norm=heads.has_qk_norm,
        rms_norm_eps=fields.number("rms_norm_eps", low=1e-12, high=1.0),
        rope_theta=heads.rope.theta,
        rotary_dim=heads.rope.rotary_dim,
        max_positions=fields.integer("max_position_embeddings", low=1, high=_MAX_POSITIONS),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False),
        dtype=_dtype(fields),
        mask_token_id=_mask_token_id(fields, facts, vocab_size),
        eos_token_ids=_or_published(eos_token_ids, facts, vocab_size),
        pad_token_id=fields.optional_integer("pad_token_id", low=0, high=vocab_size - 1),
        block_length=block_length if facts.decoding else 1,
        moe_layer_step=routed.layer_step,
        has_qkv_bias=heads.has_qkv_bias,
        yarn=heads.rope.yarn,
        kv_lora_rank=heads.kv_lora_rank,
        q_lora_rank=heads.q_lora_rank,
        value_head_dim=heads.value_head_dim,
        softmax_factor=heads.softmax_factor,
        windows=heads.windows,
        has_clamped_experts=routed.is_clamped,
        has_mxfp4_experts=routed.is_mxfp4,
    )


def _heads(fields: Fields, can_yarn: bool = False, can_be_partial: bool = False) -> _Heads:
    """Grouped-query attention."""
    num_heads = fields.integer("num_attention_heads", low=1, high=_MAX_HEADS)
    hidden_size = fields.integer("hidden_size", low=1, high=_MAX_WIDTH)
    head_dim = _head_dim(fields, hidden_size, num_heads)
    max_positions = fields.integer("max_position_embeddings", low=1, high=_MAX_POSITIONS)
    return _Heads(
        num_heads=num_heads,
        num_kv_heads=fields.integer(
            "num_key_value_heads", low=1, high=_MAX_HEADS, default=num_heads
        ),
        head_dim=head_dim,
        rope=read_rope(fields, head_dim, max_positions, can_yarn, can_be_partial),
    )


def _head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    head_dim = fields.optional_integer("head_dim", low=1, high=_MAX_HEADS)
    if head_dim is not None:
        return head_dim
    if hidden_size % num_heads:
        raise ConfigError(
            f"config.json has no head_dim, and hidden_size {hidden_size} does not divide by "
            f"{num_heads} heads."
        )
    return hidden_size // num_heads


def _refuse_sliding_windows(fields: Fields) -> None:
    fields.only("use_sliding_window", False)
    kinds = fields.raw("layer_types")
    if kinds is None:
        return
    if not isinstance(kinds, list | tuple) or any(kind != "full_attention" for kind in kinds):
        raise UnsupportedError(
            f"config.json: layer_types {shown(kinds)}: only full_attention is supported."
        )


def _refuse_quantised(fields: Fields) -> None:
    if fields.raw("quantization_config") is not None:
        raise UnsupportedError(
            "config.json has a quantization_config; only unquantised checkpoints "
            f"({', '.join(SAFETENSORS_NAME)}) are read."
        )


def _architecture(fields: Fields) -> str:
    names = fields.raw("architectures")
    supported = ", ".join(supported_architectures())
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ConfigError(f"config.json names no architecture; supported: {supported}.")
    if names[0] not in _ARCHITECTURES:
        raise ConfigError(
            f"config.json: the architecture {shown(names[0])} is not supported; "
            f"supported: {supported}."
        )
    return names[0]


def _eos_token_ids(
    fields: Fields, generation: Mapping[str, object], is_overridden: bool
) -> tuple[int, ...] | None:
    """None where neither file says. As in transformers, generation_config.json has the last word:
    what ends a chat's turn is often said only there."""
    published = fields.raw("eos_token_id")
    generated = generation.get("eos_token_id")
    if not is_overridden and generated not in (None, []):
        return _token_ids(generated, "generation_config.json")
    return None if published is None else _token_ids(published, "config.json")


def _token_ids(value: object, source: str) -> tuple[int, ...]:
    ids = value if isinstance(value, list | tuple) else [value]
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < _MAX_VOCAB:
            raise ConfigError(f"{source}: eos_token_id {shown(token)} is not a token id.")
    return tuple(dict.fromkeys(ids))


def _dtype(fields: Fields) -> str:
    dtype = fields.text("dtype", "torch_dtype", default="bfloat16").removeprefix("torch.")
    if dtype not in SAFETENSORS_NAME:
        raise UnsupportedError(
            f"config.json: dtype {shown(dtype)} is not supported; "
            f"supported: {', '.join(SAFETENSORS_NAME)}."
        )
    return dtype


def _mask_token_id(fields: Fields, facts: Family, vocab_size: int) -> int | None:
    mask = fields.optional_integer("mask_token_id", low=0, high=vocab_size - 1)
    if facts.mask_token_id is None:
        return None
    if mask is None and facts.mask_token_id >= vocab_size:
        raise ConfigError(
            f"config.json has no mask_token_id, and the family's {facts.mask_token_id} is not in "
            f"a vocabulary of {vocab_size}; give the config override mask_token_id."
        )
    return facts.mask_token_id if mask is None else mask


def _or_published(ids: tuple[int, ...] | None, facts: Family, vocab_size: int) -> tuple[int, ...]:
    if ids is not None:
        return ids
    return tuple(token for token in facts.eos_token_ids if token < vocab_size)


class _Architecture(NamedTuple):
    family: str
    read: Callable[[Fields, str, tuple[int, ...] | None], ModelConfig]


_ARCHITECTURES: Mapping[str, _Architecture] = {
    "LLaDA2MoeModelLM": _Architecture("llada2", _read_ling),
    "BailingMoeV2ForCausalLM": _Architecture("bailing_moe_v2", _read_ling),
    "Qwen3MoeForCausalLM": _Architecture("qwen3_moe", _read_qwen3_moe),
    "Qwen2MoeForCausalLM": _Architecture("qwen2_moe", _read_qwen2_moe),
    "MixtralForCausalLM": _Architecture("mixtral", _read_mixtral),
    "OlmoeForCausalLM": _Architecture("olmoe", _read_olmoe),
    "DeepseekV2ForCausalLM": _Architecture("deepseek_v2", _read_deepseek_v2),
    "GptOssForCausalLM": _Architecture("gpt_oss", _read_gpt_oss),
}
