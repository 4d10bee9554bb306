"""Qwen3.5 and Qwen3.6 without experts in GGUF files; a last layer of MTP is dropped."""

from __future__ import annotations

from lowtide.families.gguf import Config, GgufArchitecture, GgufKeys, dense_config, mlp
from lowtide.families.qwen_hybrid import GGUF_NAMES, gguf_layers


def _config(keys: GgufKeys) -> Config:
    return {**dense_config(keys, "Qwen3_5ForCausalLM"), **gguf_layers(keys, is_tiled=True)}


GGUF = GgufArchitecture(name="qwen35", config=_config, names={**GGUF_NAMES, **mlp("", "mlp.")})
