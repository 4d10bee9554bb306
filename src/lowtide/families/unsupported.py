"""Well-known models that lowtide does not run, with the reason and alternatives that do run.

A model names itself in several ways (`model_type`, `architectures`, a GGUF file's
`general.architecture`, `general.basename`, `general.name`). The first name of a known series
counts; for any other model its config keys give the reason.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from itertools import accumulate
from typing import NamedTuple

from lowtide.errors import InternalError
from lowtide.files.json_file import shown

DENSE = (
    "a dense autoregressive model whose layers lowtide does not compute; of dense ones it runs "
    "Llama's, Qwen2's, Qwen3's, Qwen3.5's and LFM2's"
)
HYBRID = "a model whose linear attention or state spaces lowtide does not compute"
EXPERTS = "a mixture of experts whose layers lowtide does not compute yet"
IMAGES = "a model that also reads images or sound, which lowtide does not compute"
LAYERS = "a model whose layers lowtide does not compute yet"
ENCODER = "an encoder, or an encoder with a decoder; lowtide runs decoders that write text"
PROJECTOR = "the part of a model that reads images or sound, which lowtide does not compute"
SAFETENSORS = "a series that runs from its safetensors files, and whose GGUF files are not read"
ADAPTER = "an adapter (LoRA) of another model; lowtide runs whole models: merge it into its model"

_QWEN = ("Qwen/Qwen3-30B-A3B",)
_MISTRAL = ("mistralai/Mixtral-8x7B-Instruct-v0.1",)
_DEEPSEEK = ("deepseek-ai/DeepSeek-V2-Lite-Chat",)
_GLM = ("zai-org/GLM-4.7-Flash",)
_LING = ("inclusionAI/Ling-mini-2.0",)
_LFM = ("LiquidAI/LFM2-8B-A1B",)
_MOONLIGHT = ("moonshotai/Moonlight-16B-A3B-Instruct",)
_DIFFUSION = ("inclusionAI/LLaDA2.0-mini", "GSAI-ML/LLaDA-8B-Instruct")
_OLMOE = ("allenai/OLMoE-1B-7B-0924-Instruct",)
_ANY = (*_QWEN, "openai/gpt-oss-20b", *_MISTRAL)


SOME_THAT_RUN = f"Models that do run: {', '.join(_ANY)}."
"""End of an error message."""


class Unsupported(NamedTuple):
    """A series of models, why it does not run, and hub ids of some that do."""

    name: str
    reason: str
    instead: tuple[str, ...]

    def __str__(self) -> str:
        """Return the end of an error message."""
        return f"It is {self.name}: {self.reason}. Models that do run: {', '.join(self.instead)}."


class _Series(NamedTuple):
    name: str
    reason: str | None = None  # None: found in the model's keys
    instead: tuple[str, ...] = _ANY


_SERIES: Mapping[str, _Series] = {
    "afmoe": _Series("Trinity (AFMoE)", EXPERTS),
    "apertus": _Series("Apertus", DENSE),
    "arctic": _Series("Snowflake Arctic", EXPERTS),
    "baichuan": _Series("Baichuan", DENSE),
    "bailinghybrid": _Series("Ling or Ring with linear attention", HYBRID, _LING),
    "bailingmoe": _Series("Ling 1 (Bailing)", EXPERTS, _LING),
    "bailingmoe3": _Series("Ling 3", HYBRID, _LING),
    "bailingmoelinear": _Series("Ling or Ring with linear attention", HYBRID, _LING),
    "bamba": _Series("Bamba", HYBRID),
    "bart": _Series("BART", ENCODER),
    "bert": _Series("BERT", ENCODER),
    "bloom": _Series("BLOOM", DENSE),
    "chatglm": _Series("ChatGLM", DENSE, _GLM + _QWEN),
    "codestral": _Series("Codestral", DENSE, _MISTRAL),
    "cohere": _Series("Command (Cohere)"),
    "commandr": _Series("Command R (Cohere)", DENSE),
    "dbrx": _Series("DBRX", EXPERTS),
    "deci": _Series("Llama-Nemotron (Deci)", DENSE),
    "decilm": _Series("Llama-Nemotron (Deci)", DENSE),
    "deepseek": _Series("DeepSeek", EXPERTS, _DEEPSEEK),
    "deepseek2ocr": _Series("DeepSeek-OCR", IMAGES, _DEEPSEEK),
    "deepseekv32": _Series("DeepSeek-V3.2", EXPERTS, _DEEPSEEK),
    "deepseekv4": _Series("DeepSeek-V4", EXPERTS, _DEEPSEEK),
    "deepseekvl": _Series("DeepSeek-VL", IMAGES, _DEEPSEEK),
    "diffusiongemma": _Series("DiffusionGemma", LAYERS, _DIFFUSION),
    "dots1": _Series("dots.llm1", EXPERTS),
    "ernie": _Series("ERNIE"),
    "exaone": _Series("EXAONE"),
    "exaonemoe": _Series("K-EXAONE", EXPERTS),
    "falcon": _Series("Falcon", DENSE),
    "falconh1": _Series("Falcon-H1", HYBRID),
    "falconmamba": _Series("Falcon Mamba", HYBRID),
    "flexolmo": _Series("FlexOlmo", EXPERTS, _OLMOE),
    "gemma": _Series("Gemma"),
    "gemma4": _Series("Gemma 4", LAYERS),
    "gigachat": _Series("GigaChat", EXPERTS),
    "glm": _Series("GLM", None, _GLM + _QWEN),
    "glm4v": _Series("GLM-4V", IMAGES, _GLM + _QWEN),
    "glm5": _Series("GLM-5", EXPERTS, _GLM + _QWEN),
    "glmdsa": _Series("GLM-5", EXPERTS, _GLM + _QWEN),
    "glmmoedsa": _Series("GLM-5", EXPERTS, _GLM + _QWEN),
    "gpt2": _Series("GPT-2", DENSE),
    "gptj": _Series("GPT-J", DENSE),
    "gptneo": _Series("GPT-Neo", DENSE),
    "gptneox": _Series("GPT-NeoX or Pythia", DENSE),
    "granite": _Series("Granite"),
    "granitehybrid": _Series("Granite 4", HYBRID),
    "granitemoe": _Series("Granite with experts", EXPERTS),
    "granitemoehybrid": _Series("Granite 4", HYBRID),
    "grok": _Series("Grok", EXPERTS),
    "grovemoe": _Series("GroveMoE", EXPERTS),
    "hunyuan": _Series("Hunyuan"),
    "hunyuandense": _Series("Hunyuan without experts", DENSE),
    "hunyuanmoe": _Series("Hunyuan-A13B", EXPERTS),
    "hunyuanvl": _Series("Hunyuan-VL", IMAGES),
    "internlm": _Series("InternLM", DENSE),
    "internvl": _Series("InternVL", IMAGES),
    "jamba": _Series("Jamba", HYBRID),
    "jetmoe": _Series("JetMoE", EXPERTS),
    "kimi": _Series("Kimi", EXPERTS, _MOONLIGHT + _QWEN),
    "kimik25": _Series("Kimi-K2.5", EXPERTS, _MOONLIGHT + _QWEN),
    "kimilinear": _Series("Kimi-Linear", HYBRID, _MOONLIGHT + _QWEN),
    "kimivl": _Series("Kimi-VL", IMAGES, _MOONLIGHT + _QWEN),
    "lfm": _Series("LFM (Liquid)", HYBRID, _LFM),
    "lfm2audio": _Series("LFM2-Audio", IMAGES, _LFM),
    "lfm2vl": _Series("LFM2-VL", IMAGES, _LFM),
    "llama4": _Series("Llama 4", EXPERTS),
    "llamaembed": _Series("an embedding model built like Llama", ENCODER),
    "llava": _Series("LLaVA", IMAGES),
    "longcat": _Series("LongCat", EXPERTS),
    "longcatflash": _Series("LongCat-Flash", EXPERTS),
    "mamba": _Series("Mamba", HYBRID),
    "mimo": _Series("MiMo"),
    "mimo2": _Series("MiMo-V2", EXPERTS),
    "mimov2": _Series("MiMo-V2", EXPERTS),
    "minicpm": _Series("MiniCPM"),
    "minicpmv": _Series("MiniCPM-V", IMAGES),
    "minimax": _Series("MiniMax", HYBRID),
    "minimaxm": _Series("MiniMax-M", EXPERTS),
    "minimaxm1": _Series("MiniMax-M1", HYBRID),
    "ministral": _Series("Ministral", DENSE, _MISTRAL),
    "mistral": _Series("Mistral", DENSE, _MISTRAL),
    "mistral4": _Series("Mistral Small 4", EXPERTS, _MISTRAL),
    "mistrallarge3": _Series("Mistral Large 3", EXPERTS, _MISTRAL),
    "mistralsmall4": _Series("Mistral Small 4", EXPERTS, _MISTRAL),
    "mllama": _Series("Llama 3.2 Vision", IMAGES),
    "mpt": _Series("MPT", DENSE),
    "nemotron": _Series("Nemotron"),
    "nemotronh": _Series("Nemotron-H or Nemotron 3", HYBRID),
    "olmo": _Series("OLMo without experts", DENSE, _OLMOE),
    "olmohybrid": _Series("OLMo Hybrid", HYBRID, _OLMOE),
    "opt": _Series("OPT", DENSE),
    "paligemma": _Series("PaliGemma", IMAGES),
    "phi": _Series("Phi", DENSE),
    "phi3": _Series("Phi-3 or Phi-4", DENSE),
    "phi3v": _Series("Phi-3 Vision", IMAGES),
    "phi4": _Series("Phi-4", DENSE),
    "phi4mm": _Series("Phi-4 Multimodal", IMAGES),
    "phi4multimodal": _Series("Phi-4 Multimodal", IMAGES),
    "phimoe": _Series("Phi-3.5-MoE", EXPERTS),
    "pixtral": _Series("Pixtral", IMAGES, _MISTRAL),
    "qwen": _Series("Qwen", None, _QWEN),
    "qwen25omni": _Series("Qwen2.5-Omni", IMAGES, _QWEN),
    "qwen25vl": _Series("Qwen2.5-VL", IMAGES, _QWEN),
    "qwen2audio": _Series("Qwen2-Audio", IMAGES, _QWEN),
    "qwen2vl": _Series("Qwen2-VL", IMAGES, _QWEN),
    "qwen3omni": _Series("Qwen3-Omni", IMAGES, _QWEN),
    "qwen3vl": _Series("Qwen3-VL", IMAGES, _QWEN),
    "qwen3vlmoe": _Series("Qwen3-VL", IMAGES, _QWEN),
    "qwen4": _Series("Qwen 3.8 or 4", HYBRID, _QWEN),
    "recurrentgemma": _Series("RecurrentGemma", HYBRID),
    "rnd1": _Series("RND1", LAYERS, _DIFFUSION),
    "rwkv": _Series("RWKV", HYBRID),
    "sdar": _Series("SDAR", LAYERS, _DIFFUSION),
    "seedoss": _Series("Seed-OSS", DENSE),
    "smallthinker": _Series("SmallThinker", EXPERTS),
    "smollm3": _Series("SmolLM3", DENSE),
    "solaropen": _Series("Solar Open", EXPERTS),
    "stablelm": _Series("StableLM", DENSE),
    "starcoder": _Series("StarCoder", DENSE),
    "step3": _Series("Step-3", EXPERTS),
    "step35": _Series("Step-3.5", EXPERTS),
    "t5": _Series("T5", ENCODER),
    "voxtral": _Series("Voxtral", IMAGES, _MISTRAL),
    "whisper": _Series("Whisper", IMAGES),
    "zamba": _Series("Zamba", HYBRID),
}
"""Series that do not run, by the beginning of their names, without separators."""

_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|[0-9]+")
_HYBRID_KEY = re.compile(
    r"ssm|mamba|rwkv|wkv|shortconv|conv_L_cache|linear_(?:num|key|value|conv|attn)|lightning|"
    r"full_attention_interval|hybrid|recurrent"
)
_HYBRID_LAYERS = ("linear", "mamba", "conv", "recurrent", "rwkv", "lightning")
_IMAGE_KEY = re.compile(r"vision|audio|speech|image_|video_|(?:^|\.)clip\.")
_EXPERT_KEY = re.compile(r"(?:num|n)_(?:\w+_)?experts$|moe_num_experts$|(?:^|\.)expert_count$")
_ENCODER_KEY = re.compile(r"encoder_layers$|pooling_type$")


def why_unsupported(
    names: Iterable[str], keys: Mapping[str, object], running: Collection[str]
) -> Unsupported:
    """Explain why a model without a family does not run.

    names: its own names, the most specific first.
    keys: of its `config.json` or of a GGUF file's metadata.
    running: names of series that run.
    """
    given = [name for name in names if name]
    run = {_key_of(name) for name in running}
    for name in given:
        key = _longest(name, {*_SERIES, *run})
        if key in run and "general.architecture" in keys:
            return Unsupported(shown(name), SAFETENSORS, _DIFFUSION)
        if key not in run and (found := _SERIES.get(key)) is not None:
            return Unsupported(found.name, found.reason or _reason_in(keys), found.instead)
    called = f"of a series that lowtide has not heard of ({', '.join(map(shown, given))})"
    return Unsupported(called if given else "of no known series", _reason_in(keys), _ANY)


def runs(name: str, running: Collection[str]) -> bool:
    """Return True if the name belongs to one of the series that run."""
    run = {_key_of(each) for each in running}
    return _longest(name, {*_SERIES, *run}) in run


def another_of(names: Iterable[str], usual: str) -> Unsupported:
    """Explain why a model does not run whose architecture is shared by several series.

    The series is found by name; the reason is that of the `usual` one.
    """
    found = [_SERIES[key] for name in names if (key := _longest(name, _SERIES))]
    series = _SERIES[usual]
    if series.reason is None:
        raise InternalError(f"{usual} is no series with a reason.")
    named = found[0] if found else series
    return Unsupported(named.name, series.reason, named.instead)


def _key_of(name: str) -> str:
    return "".join(_WORD.findall(name)).lower()


def _longest(name: str, keys: Collection[str]) -> str:
    """Return the longest key that a name begins with, in whole words; or ""."""
    beginnings = list(accumulate(word.lower() for word in _WORD.findall(name)))
    return next((each for each in reversed(beginnings) if each in keys), "")


def _reason_in(keys: Mapping[str, object]) -> str:
    """Return the reason found in a model's keys."""
    kind = keys.get("general.type")
    if kind in ("mmproj", "adapter"):
        return PROJECTOR if kind == "mmproj" else ADAPTER
    inner = keys.get("text_config")
    if isinstance(inner, Mapping):
        keys = {**inner, **keys}
    said = {name: value for name, value in keys.items() if value not in (None, False, 0, [], {})}
    if any(map(_IMAGE_KEY.search, said)):
        return IMAGES
    kinds = said.get("layer_types", said.get("layers_block_type"))
    if any(map(_HYBRID_KEY.search, said)) or (isinstance(kinds, list) and _has_hybrid(kinds)):
        return HYBRID
    if said.get("is_encoder_decoder") or any(map(_ENCODER_KEY.search, said)):
        return ENCODER
    if keys.get(f"{keys.get('general.architecture')}.attention.causal") is False:
        return ENCODER
    if any(_EXPERT_KEY.search(name) and value != 1 for name, value in said.items()):
        return EXPERTS
    return DENSE if _says_layers(said) else LAYERS


def _has_hybrid(kinds: list[object]) -> bool:
    return any(word in str(kind) for kind in kinds for word in _HYBRID_LAYERS)


def _says_layers(said: Mapping[str, object]) -> bool:
    names = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
    return any(name in said for name in names) or any(n.endswith(".block_count") for n in said)
