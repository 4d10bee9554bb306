"""Names of LLaDA's tensors, shared by schema and model."""

from __future__ import annotations

from lowtide.schemas.names import Names

NAMES = Names(
    embedding="model.transformer.wte",
    norm="model.transformer.ln_f",
    head="model.transformer.ff_out",
    layers="model.transformer.blocks",
    attention_norm="attn_norm",
    mlp_norm="ff_norm",
    query="q_proj",
    key="k_proj",
    value="v_proj",
    output="attn_out",
    mlp=("ff_proj", "up_proj", "ff_out"),
)
