"""Qwen2 in GGUF files."""

from __future__ import annotations

from lowtide.families.gguf import (
    DENSE,
    QKV_BIASES,
    Config,
    GgufArchitecture,
    GgufKeys,
    dense_config,
)


def _config(keys: GgufKeys) -> Config:
    return dense_config(keys, "Qwen2ForCausalLM")


GGUF = GgufArchitecture(name="qwen2", config=_config, names={**DENSE, **QKV_BIASES})
