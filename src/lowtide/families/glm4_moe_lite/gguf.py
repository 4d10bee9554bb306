"""GLM-4.7-Flash in GGUF files, where it is a DeepSeek-V3 with a vocabulary of its own."""

from __future__ import annotations

from lowtide.families.deepseek_v3.gguf import V3_NAMES, is_glm, is_v3, v3_config
from lowtide.families.gguf import GgufArchitecture

GGUF = GgufArchitecture(
    name="deepseek2",
    config=lambda keys: v3_config(keys, "Glm4MoeLiteForCausalLM"),
    names=V3_NAMES,
    suits=lambda keys: is_v3(keys) and is_glm(keys),
)
