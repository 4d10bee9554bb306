"""Every checkpoint that `synth` can make: its `config.json`, and the character of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Character:
    """What makes random weights behave somewhat like trained ones.

    expert_bias: depth of the routing's skew. In every layer the experts are put into a random
    order, and the one of rank r gets the selection bias `-expert_bias * log(r) / log(N)`: equal
    steps for every doubling of the rank, as in Zipf's law, so a few experts take most tokens
    and a long tail takes few. router_std: spread of the router's logits over experts.
    qk_gain: weight of the query and key norms; above 1 attention picks fewer positions, which
    keeps the masked positions of a block, all of one embedding, from becoming alike.
    residual_gain: size of what all layers together add to the embedding's unit size.
    logit_std: spread of the output logits, in units of `sqrt(2 ln V)`: from about 1 on the
    likeliest token of V stands out, and its probability is spread widely between 0 and 1.
    router_skew: for routers without a selection bias; the logits of the expert of rank r have the
    spread `router_std * (1 + router_skew * (1 - 2 log(r) / log(N)))`, so that those of the first
    ranks are among the highest more often. Computed for independent logits: of 64 experts top-8
    the busiest tenth takes a quarter of the tokens, of 128 a third, and the last one hardly any.

    Synthetic, and no trained model's routing. Measured in float32 on `llada2 small`, seed 0, one
    block of 32 after a prompt of 64 tokens: 72 to 107 of 256 experts per layer are hit in the
    first step (all masked) and 108 to 124 in the last; the busiest tenth of the experts takes
    half of the tokens; about 70% of a layer's experts are hit again in the next step; threshold
    0.95 commits 4 tokens per step (2 to 9 while many are masked).
    """

    expert_bias: float = 0.33
    router_std: float = 1.1
    router_skew: float = 0.75
    qk_gain: float = 3.0
    residual_gain: float = 7.5
    logit_std: float = 2.5


@dataclass(frozen=True)
class SynthSize:
    """One checkpoint that can be made.

    config: what `config.json` will hold. eos_token_id: the first of the special tokens, which
    end the vocabulary. max_shard_bytes: of one file's tensors.
    """

    config: Mapping[str, Any]
    eos_token_id: int
    max_shard_bytes: int
    character: Character = Character()


def llada2_config(**sizes: Any) -> dict[str, Any]:
    """A `config.json` with the keys and constants published with LLaDA2.0-mini."""
    return {
        "architectures": ["LLaDA2MoeModelLM"],
        "attention_dropout": 0.0,
        "embedding_dropout": 0.0,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 32768,
        "model_type": "llada2_moe",
        "moe_router_enable_expert_bias": True,
        "norm_head": False,
        "norm_softmax": False,
        "norm_topk_prob": True,
        "num_shared_experts": 1,
        "output_dropout": 0.0,
        "output_router_logits": False,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 600000,
        "routed_scaling_factor": 2.5,
        "router_dtype": "fp32",
        "score_function": "sigmoid",
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_bias": False,
        "use_cache": False,
        "use_qkv_bias": False,
        "use_rmsnorm": True,
        "use_sliding_window": False,
        **sizes,
    }


def bailing_moe_v2_config(**sizes: Any) -> dict[str, Any]:
    """The same for Ling-mini-2.0: the body of LLaDA2.0, autoregressive."""
    return llada2_config(
        **{
            "architectures": ["BailingMoeV2ForCausalLM"],
            "model_type": "bailing_moe_v2",
            "use_qk_norm": True,
            **sizes,
        }
    )


def qwen3_moe_config(**sizes: Any) -> dict[str, Any]:
    """A `config.json` with the keys and constants published with Qwen3-30B-A3B."""
    return {
        **_usual("Qwen3MoeForCausalLM", "qwen3_moe"),
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
        **sizes,
    }


def qwen2_moe_config(**sizes: Any) -> dict[str, Any]:
    """The same for Qwen1.5-MoE-A2.7B."""
    return {
        **_usual("Qwen2MoeForCausalLM", "qwen2_moe"),
        "decoder_sparse_step": 1,
        "max_position_embeddings": 8192,
        "norm_topk_prob": False,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "use_sliding_window": False,
        **sizes,
    }


def mixtral_config(**sizes: Any) -> dict[str, Any]:
    """The same for Mixtral-8x7B."""
    return {
        **_usual("MixtralForCausalLM", "mixtral"),
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        **sizes,
    }


def olmoe_config(**sizes: Any) -> dict[str, Any]:
    """The same for OLMoE-1B-7B."""
    return {
        **_usual("OlmoeForCausalLM", "olmoe"),
        "attention_bias": False,
        "clip_qkv": None,
        "max_position_embeddings": 4096,
        "norm_topk_prob": False,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        **sizes,
    }


def deepseek_v2_config(**sizes: Any) -> dict[str, Any]:
    """The same for DeepSeek-V2-Lite."""
    return {
        **_usual("DeepseekV2ForCausalLM", "deepseek_v2"),
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 163840,
        "moe_layer_freq": 1,
        "n_group": 1,
        "norm_topk_prob": False,
        "q_lora_rank": None,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_group": 1,
        "topk_method": "greedy",
        **sizes,
    }


def gpt_oss_config(**sizes: Any) -> dict[str, Any]:
    """The same for gpt-oss-20b."""
    kinds = ("sliding_attention", "full_attention")
    return {
        **_usual("GptOssForCausalLM", "gpt_oss"),
        "attention_bias": True,
        "layer_types": [kinds[i % 2] for i in range(sizes["num_hidden_layers"])],
        "max_position_embeddings": 131072,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        **sizes,
    }


def _usual(architecture: str, model_type: str) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "model_type": model_type,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


_TINY_BODY = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 320,
    "eos_token_id": 304,
    "pad_token_id": 304,
}
_SMALL_BODY = {
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "vocab_size": 32768,
    "eos_token_id": 32752,
    "pad_token_id": 32752,
}


def _tiny(config: dict[str, Any]) -> SynthSize:
    return SynthSize(config, config["eos_token_id"], max_shard_bytes=1 << 20)


def _small(config: dict[str, Any]) -> SynthSize:
    return SynthSize(config, config["eos_token_id"], max_shard_bytes=1 << 30)


def _full(config: dict[str, Any]) -> SynthSize:
    return SynthSize(config, config["eos_token_id"], max_shard_bytes=4 << 30)


# Experts are most of it, so that a budget of half its size runs.
_LLADA2_TINY = SynthSize(
    llada2_config(
        hidden_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rotary_dim=8,
        intermediate_size=160,
        moe_intermediate_size=64,
        moe_shared_expert_intermediate_size=64,
        num_experts=64,
        num_experts_per_tok=4,
        n_group=8,
        topk_group=4,
        max_position_embeddings=1024,
        vocab_size=320,
        eos_token_id=304,
        pad_token_id=304,
        mask_token_id=307,
    ),
    eos_token_id=304,
    max_shard_bytes=3 << 20,
)

_LLADA2_SMALL = SynthSize(
    llada2_config(
        hidden_size=1024,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        rotary_dim=64,
        intermediate_size=2560,
        moe_intermediate_size=256,
        moe_shared_expert_intermediate_size=256,
        num_experts=256,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
        vocab_size=32768,
        eos_token_id=32752,
        pad_token_id=32752,
        mask_token_id=32755,
    ),
    eos_token_id=32752,
    max_shard_bytes=1 << 30,
)

# As published: the mask and end-of-text ids are the family's and not in config.json.
_LLADA2_FULL = SynthSize(
    llada2_config(
        hidden_size=2048,
        num_hidden_layers=20,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=128,
        rotary_dim=64,
        intermediate_size=5120,
        moe_intermediate_size=512,
        moe_shared_expert_intermediate_size=512,
        num_experts=256,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
        vocab_size=157184,
        pad_token_id=156892,
    ),
    eos_token_id=156892,
    max_shard_bytes=4 << 30,
)


def _without(config: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


_LING_ONLY_DIFFUSION = ("architectures", "model_type", "mask_token_id")

_QWEN3_MOE = {
    "tiny": _tiny(
        qwen3_moe_config(
            **_TINY_BODY,
            num_key_value_heads=2,
            head_dim=16,
            intermediate_size=160,
            moe_intermediate_size=64,
            num_experts=32,
            num_experts_per_tok=4,
        )
    ),
    # 0.98 GB, of which experts 0.81 GB.
    "small": _small(
        qwen3_moe_config(
            **_SMALL_BODY,
            num_hidden_layers=8,
            num_key_value_heads=2,
            head_dim=128,
            intermediate_size=3072,
            moe_intermediate_size=256,
            num_experts=64,
            num_experts_per_tok=8,
        )
    ),
    "full": _full(
        qwen3_moe_config(
            hidden_size=2048,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            vocab_size=151936,
            bos_token_id=151643,
            eos_token_id=151645,
        )
    ),
}

_QWEN2_MOE = {
    "tiny": _tiny(
        qwen2_moe_config(
            **_TINY_BODY,
            num_key_value_heads=4,
            intermediate_size=160,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=128,
            num_experts=30,
            num_experts_per_tok=4,
        )
    ),
    "small": _small(
        qwen2_moe_config(
            **_SMALL_BODY,
            num_hidden_layers=8,
            num_key_value_heads=8,
            intermediate_size=2816,
            moe_intermediate_size=256,
            shared_expert_intermediate_size=1024,
            num_experts=60,
            num_experts_per_tok=4,
        )
    ),
    "full": _full(
        qwen2_moe_config(
            hidden_size=2048,
            num_hidden_layers=24,
            num_attention_heads=16,
            num_key_value_heads=16,
            intermediate_size=5632,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
            num_experts=60,
            num_experts_per_tok=4,
            vocab_size=151936,
            bos_token_id=151643,
            eos_token_id=151643,
        )
    ),
}

_MIXTRAL = {
    "tiny": _tiny(
        mixtral_config(
            **_TINY_BODY,
            num_key_value_heads=2,
            intermediate_size=128,
            num_local_experts=8,
            num_experts_per_tok=2,
        )
    ),
    "small": _small(
        mixtral_config(
            **_SMALL_BODY,
            num_hidden_layers=6,
            num_key_value_heads=2,
            intermediate_size=2816,
            num_local_experts=8,
            num_experts_per_tok=2,
        )
    ),
    # Published with eos 2; here the special tokens end the vocabulary, as `synth` has them.
    "full": _full(
        mixtral_config(
            hidden_size=4096,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            intermediate_size=14336,
            num_local_experts=8,
            num_experts_per_tok=2,
            vocab_size=32000,
            eos_token_id=31984,
        )
    ),
}

_OLMOE = {
    "tiny": _tiny(
        olmoe_config(
            **_TINY_BODY,
            num_key_value_heads=4,
            intermediate_size=64,
            num_experts=32,
            num_experts_per_tok=4,
        )
    ),
    "small": _small(
        olmoe_config(
            **_SMALL_BODY,
            num_hidden_layers=8,
            num_key_value_heads=8,
            intermediate_size=256,
            num_experts=64,
            num_experts_per_tok=8,
        )
    ),
    "full": _full(
        olmoe_config(
            hidden_size=2048,
            num_hidden_layers=16,
            num_attention_heads=16,
            num_key_value_heads=16,
            intermediate_size=1024,
            num_experts=64,
            num_experts_per_tok=8,
            vocab_size=50304,
            eos_token_id=50279,
            pad_token_id=1,
        )
    ),
}

_DEEPSEEK_V2 = {
    "tiny": _tiny(
        deepseek_v2_config(
            **_TINY_BODY,
            num_key_value_heads=4,
            kv_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            intermediate_size=160,
            moe_intermediate_size=64,
            n_routed_experts=32,
            n_shared_experts=2,
            num_experts_per_tok=4,
        )
    ),
    "small": _small(
        deepseek_v2_config(
            **_SMALL_BODY,
            num_hidden_layers=9,
            num_key_value_heads=8,
            kv_lora_rank=256,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            intermediate_size=2816,
            moe_intermediate_size=256,
            n_routed_experts=64,
            n_shared_experts=2,
            num_experts_per_tok=6,
        )
    ),
    "full": _full(
        deepseek_v2_config(
            hidden_size=2048,
            num_hidden_layers=27,
            num_attention_heads=16,
            num_key_value_heads=16,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            intermediate_size=10944,
            moe_intermediate_size=1408,
            n_routed_experts=64,
            n_shared_experts=2,
            num_experts_per_tok=6,
            vocab_size=102400,
            bos_token_id=100000,
            eos_token_id=100001,
        )
    ),
}


_GPT_OSS = {
    "tiny": _tiny(
        gpt_oss_config(
            **_TINY_BODY,
            num_key_value_heads=2,
            head_dim=16,
            intermediate_size=64,
            num_local_experts=16,
            num_experts_per_tok=4,
            sliding_window=32,
        )
    ),
    "small": _small(
        gpt_oss_config(
            **_SMALL_BODY,
            num_hidden_layers=8,
            num_key_value_heads=2,
            head_dim=128,
            intermediate_size=512,
            num_local_experts=32,
            num_experts_per_tok=4,
        )
    ),
    "full": _full(
        gpt_oss_config(
            hidden_size=2880,
            num_hidden_layers=24,
            num_attention_heads=64,
            num_key_value_heads=8,
            head_dim=64,
            intermediate_size=2880,
            num_local_experts=32,
            num_experts_per_tok=4,
            vocab_size=201088,
            eos_token_id=200002,
            pad_token_id=199999,
        )
    ),
}


def _as_ling(size: SynthSize) -> SynthSize:
    """The autoregressive model of an LLaDA2's dimensions."""
    config = bailing_moe_v2_config(**_without(size.config, *_LING_ONLY_DIFFUSION))
    return replace(size, config={**config, "eos_token_id": size.eos_token_id})


_LLADA2 = {"tiny": _LLADA2_TINY, "small": _LLADA2_SMALL, "full": _LLADA2_FULL}

FAMILIES: Mapping[str, Mapping[str, SynthSize]] = {
    "llada2": _LLADA2,
    "bailing_moe_v2": {name: _as_ling(size) for name, size in _LLADA2.items()},
    "qwen3_moe": _QWEN3_MOE,
    "qwen2_moe": _QWEN2_MOE,
    "mixtral": _MIXTRAL,
    "olmoe": _OLMOE,
    "deepseek_v2": _DEEPSEEK_V2,
    "gpt_oss": _GPT_OSS,
}
"""Every checkpoint that can be made, by family and size: a few MB, about 1 GB (LLaDA2 and Ling
2 GB), and the published dimensions."""

SIZES: Mapping[str, tuple[str, ...]] = {name: tuple(sizes) for name, sizes in FAMILIES.items()}
"""The names of the sizes of every family."""
