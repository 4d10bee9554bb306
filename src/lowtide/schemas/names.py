"""Names of the tensors that all families have."""

from __future__ import annotations

from typing import NamedTuple

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""Projections of a gated MLP, as most families name them."""


class Names(NamedTuple):
    """Names of tensors, by default the usual ones; those of a layer begin with `layer(n)`.

    Names of norms and projections are without their `.weight`.
    """

    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"  # before the head
    head: str = "lm_head"
    layers: str = "model.layers"
    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    output: str = "self_attn.o_proj"  # of attention
    mlp: tuple[str, str, str] = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")

    def layer(self, number: int) -> str:
        """Return the prefix of a layer's tensors."""
        return f"{self.layers}.{number}."

    @property
    def qkv(self) -> tuple[str, str, str]:
        return self.query, self.key, self.value

    @property
    def qk_norms(self) -> tuple[str, str]:
        return self.query_norm, self.key_norm


USUAL = Names()
