"""Models that people ask for and lowtide does not run: what they are, and what does run instead.

By the names under `architectures` in `config.json`, of which one beginning stands for a series.
"""

from __future__ import annotations

from typing import NamedTuple

_DENSE = (
    "a dense autoregressive model, all of whose weights every token needs: there are no experts to "
    "leave on the disk"
)
_HYBRID = "a model with layers of linear attention or state spaces, which lowtide does not compute"
_EXPERTS = "a mixture of experts whose layers lowtide does not compute yet"
_IMAGES = "a model that also reads images or sound, which lowtide does not compute"

_QWEN = ("Qwen/Qwen3-30B-A3B",)
_MISTRAL = ("mistralai/Mixtral-8x7B-Instruct-v0.1",)
_OLMO = ("allenai/OLMoE-1B-7B-0924-Instruct",)
_DEEPSEEK = ("deepseek-ai/DeepSeek-V2-Lite-Chat",)
_ANY = (*_QWEN, "openai/gpt-oss-20b", *_MISTRAL)
_DIFFUSION = ("inclusionAI/LLaDA2.0-mini", "GSAI-ML/LLaDA-8B-Instruct")


class Unsupported(NamedTuple):
    """A series of models, why it does not run, and hub ids of that kind that do."""

    name: str
    reason: str
    instead: tuple[str, ...]


_BY_BEGINNING = {
    "LlamaFor": Unsupported("Llama, or a model built like it", _DENSE, _ANY),
    "Llama4": Unsupported("Llama 4", _EXPERTS, _ANY),
    "MistralFor": Unsupported("Mistral", _DENSE, _MISTRAL),
    "Mistral3": Unsupported("Mistral 3", _DENSE, _MISTRAL),
    "Mistral4": Unsupported("Mistral 4", _EXPERTS, _MISTRAL),
    "MistralLarge": Unsupported("Mistral Large", _EXPERTS, _MISTRAL),
    "Qwen2For": Unsupported("Qwen2 or Qwen2.5", _DENSE, _QWEN),
    "Qwen3For": Unsupported("Qwen3 without experts", _DENSE, _QWEN),
    "Qwen3Next": Unsupported("Qwen3-Next", _HYBRID, _QWEN),
    "Qwen3_5": Unsupported("Qwen3.5 or Qwen3.6", _HYBRID, _QWEN),
    "Qwen2VL": Unsupported("Qwen2-VL", _IMAGES, _QWEN),
    "Qwen2_5": Unsupported("Qwen2.5-VL or Qwen2.5-Omni", _IMAGES, _QWEN),
    "Qwen3VL": Unsupported("Qwen3-VL", _IMAGES, _QWEN),
    "Qwen3Omni": Unsupported("Qwen3-Omni", _IMAGES, _QWEN),
    "GemmaFor": Unsupported("Gemma", _DENSE, _ANY),
    "Gemma2": Unsupported("Gemma 2", _DENSE, _ANY),
    "Gemma3": Unsupported("Gemma 3", _DENSE, _ANY),
    "Gemma4": Unsupported("Gemma 4", "a model whose layers lowtide does not compute yet", _ANY),
    "DiffusionGemma": Unsupported(
        "DiffusionGemma", "a diffusion model of another kind: its canvas has no mask", _DIFFUSION
    ),
    "SDAR": Unsupported(
        "SDAR", "a block-diffusion model whose layers lowtide does not compute yet", _DIFFUSION
    ),
    "DeepseekV3": Unsupported("DeepSeek-V3 or R1", _EXPERTS, _DEEPSEEK),
    "DeepseekV32": Unsupported("DeepSeek-V3.2", _EXPERTS, _DEEPSEEK),
    "DeepseekV4": Unsupported("DeepSeek-V4", _EXPERTS, _DEEPSEEK),
    "Kimi": Unsupported("Kimi", _EXPERTS, (*_DEEPSEEK, *_QWEN)),
    "Glm4Moe": Unsupported("GLM-4.5 or later", _EXPERTS, ("inclusionAI/Ling-mini-2.0", *_QWEN)),
    "Glm4For": Unsupported("GLM-4", _DENSE, _ANY),
    "MiniMax": Unsupported("MiniMax", _EXPERTS, _ANY),
    "Ernie4_5_Moe": Unsupported("ERNIE 4.5", _EXPERTS, _ANY),
    "Ernie4_5For": Unsupported("ERNIE 4.5 without experts", _DENSE, _ANY),
    "HunYuanMoE": Unsupported("Hunyuan", _EXPERTS, _ANY),
    "HunYuanDense": Unsupported("Hunyuan without experts", _DENSE, _ANY),
    "Dots1": Unsupported("dots.llm1", _EXPERTS, _ANY),
    "Phimoe": Unsupported("Phi-3.5-MoE", _EXPERTS, _MISTRAL),
    "PhiMoE": Unsupported("Phi-3.5-MoE", _EXPERTS, _MISTRAL),
    "Phi3": Unsupported("Phi-3 or Phi-4", _DENSE, _ANY),
    "GraniteFor": Unsupported("Granite", _DENSE, _ANY),
    "GraniteMoeHybrid": Unsupported("Granite 4", _HYBRID, _ANY),
    "GraniteMoe": Unsupported("Granite MoE", _EXPERTS, _ANY),
    "Olmo2": Unsupported("OLMo 2", _DENSE, _OLMO),
    "Olmo3": Unsupported("OLMo 3", _DENSE, _OLMO),
    "Jamba": Unsupported("Jamba", _HYBRID, _MISTRAL),
    "NemotronH": Unsupported("Nemotron-H", _HYBRID, _ANY),
    "FalconH1": Unsupported("Falcon-H1", _HYBRID, _ANY),
    "FalconFor": Unsupported("Falcon", _DENSE, _ANY),
}


def why_unsupported(architecture: str) -> Unsupported | None:
    """What is known of an architecture without a family; None for one never heard of."""
    beginnings = [name for name in _BY_BEGINNING if architecture.startswith(name)]
    return _BY_BEGINNING[max(beginnings, key=len)] if beginnings else None
