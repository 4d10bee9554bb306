"""Models that people ask for and lowtide does not run: what they are, and what does run instead.

By the names under `architectures` in `config.json`, of which one beginning stands for a series: the
commonest ones, for any other is refused with what is supported.
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
_LAYERS = "a model whose layers lowtide does not compute yet"

_QWEN = ("Qwen/Qwen3-30B-A3B",)
_MISTRAL = ("mistralai/Mixtral-8x7B-Instruct-v0.1",)
_DEEPSEEK = ("deepseek-ai/DeepSeek-V2-Lite-Chat",)
_DIFFUSION = ("inclusionAI/LLaDA2.0-mini", "GSAI-ML/LLaDA-8B-Instruct")
_ANY = (*_QWEN, "openai/gpt-oss-20b", *_MISTRAL)


class Unsupported(NamedTuple):
    """A series of models, why it does not run, and hub ids of some that do."""

    name: str
    reason: str
    instead: tuple[str, ...]


_BY_BEGINNING = {
    "LlamaFor": Unsupported("Llama, or a model built like it", _DENSE, _ANY),
    "Llama4": Unsupported("Llama 4", _EXPERTS, _ANY),
    "MistralFor": Unsupported("Mistral", _DENSE, _MISTRAL),
    "Qwen2For": Unsupported("Qwen2 or Qwen2.5", _DENSE, _QWEN),
    "Qwen3For": Unsupported("Qwen3 without experts", _DENSE, _QWEN),
    "Qwen3Next": Unsupported("Qwen3-Next", _HYBRID, _QWEN),
    "Qwen3_5": Unsupported("Qwen3.5 or Qwen3.6", _HYBRID, _QWEN),
    "Qwen3VL": Unsupported("Qwen3-VL", _IMAGES, _QWEN),
    "Gemma": Unsupported("Gemma", _LAYERS, _ANY),
    "SDAR": Unsupported("SDAR", _LAYERS, _DIFFUSION),
    "DeepseekV3": Unsupported("DeepSeek-V3, V3.2 or R1", _EXPERTS, _DEEPSEEK),
    "Kimi": Unsupported("Kimi", _EXPERTS, (*_DEEPSEEK, *_QWEN)),
    "Glm4Moe": Unsupported("GLM-4.5 or later", _EXPERTS, ("inclusionAI/Ling-mini-2.0", *_QWEN)),
    "MiniMax": Unsupported("MiniMax", _EXPERTS, _ANY),
    "Phi3": Unsupported("Phi-3 or Phi-4", _DENSE, _ANY),
}


def why_unsupported(architecture: str) -> Unsupported | None:
    """What is known of an architecture without a family; None for one never heard of."""
    beginnings = [name for name in _BY_BEGINNING if architecture.startswith(name)]
    return _BY_BEGINNING[max(beginnings, key=len)] if beginnings else None
