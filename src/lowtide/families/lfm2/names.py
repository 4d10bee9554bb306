"""Names of LFM2's tensors, shared by schema and model."""

from __future__ import annotations

from lowtide.schemas.names import Names

NAMES = Names(
    norm="model.embedding_norm",
    attention_norm="operator_norm",
    mlp_norm="ffn_norm",
    query_norm="self_attn.q_layernorm",
    key_norm="self_attn.k_layernorm",
    output="self_attn.out_proj",
    mlp=("feed_forward.w1", "feed_forward.w3", "feed_forward.w2"),
)
