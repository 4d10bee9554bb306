"""One readable file for each model family; `model_class` finds it by name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from lowtide.models.decoder import Decoder

_CLASSES: Mapping[str, tuple[str, str]] = {
    "llada2": ("llada2", "LLaDA2"),
    "bailing_moe_v2": ("llada2", "LLaDA2"),
    "qwen3_moe": ("qwen3_moe", "Qwen3Moe"),
    "qwen2_moe": ("qwen2_moe", "Qwen2Moe"),
    "mixtral": ("mixtral", "Mixtral"),
    "olmoe": ("olmoe", "Olmoe"),
    "deepseek_v2": ("deepseek_v2", "DeepseekV2"),
    "gpt_oss": ("gpt_oss", "GptOss"),
}


def model_class(family: str) -> type[Decoder]:
    """The model of a family (a key of `config.FAMILIES`); its file is imported when asked for."""
    module, name = _CLASSES[family]
    found: type[Decoder] = getattr(
        importlib.import_module(f"lowtide.families.{module}.model"), name
    )
    return found
