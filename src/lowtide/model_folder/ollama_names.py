"""Names of Ollama's library: their model on the hub, and Ollama's local file.

Ollama's names (`qwen3:30b`, `llama3`) differ from the hub's. Its files are GGUF, named by digest; a
manifest for each tag lists them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from lowtide.errors import CheckpointError
from lowtide.families.registry import why_unsupported
from lowtide.files.json_file import read_object

_NAME = re.compile(r"(?P<name>[a-zA-Z0-9][\w.-]*)(?::(?P<tag>[\w.-]+))?", re.ASCII)
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_MODEL = "application/vnd.ollama.image.model"
_MAX_MANIFEST_BYTES = 1 << 20

RUN: Mapping[str, Mapping[str, str]] = {
    "codellama": {
        "": "codellama/CodeLlama-7b-Instruct-hf",
        **{f"{size}b": f"codellama/CodeLlama-{size}b-Instruct-hf" for size in (7, 13, 34, 70)},
    },
    "deepseek-coder-v2": {
        "": "deepseek-ai/DeepSeek-Coder-V2-Lite-Instruct",
        "16b": "deepseek-ai/DeepSeek-Coder-V2-Lite-Instruct",
        "236b": "deepseek-ai/DeepSeek-Coder-V2-Instruct",
    },
    "deepseek-v2": {
        "": "deepseek-ai/DeepSeek-V2-Lite-Chat",
        "16b": "deepseek-ai/DeepSeek-V2-Lite-Chat",
        "236b": "deepseek-ai/DeepSeek-V2-Chat",
    },
    "deepseek-r1": {
        "": "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B",
        "8b": "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B",
        **{
            f"{size}b": f"deepseek-ai/DeepSeek-R1-Distill-Qwen-{size}B" for size in (1.5, 7, 14, 32)
        },
        "70b": "deepseek-ai/DeepSeek-R1-Distill-Llama-70B",
        "671b": "deepseek-ai/DeepSeek-R1",
    },
    "deepseek-v3": {"": "deepseek-ai/DeepSeek-V3", "671b": "deepseek-ai/DeepSeek-V3"},
    "glm-4.7-flash": {"": "zai-org/GLM-4.7-Flash"},
    "gpt-oss": {
        "": "openai/gpt-oss-20b",
        "20b": "openai/gpt-oss-20b",
        "120b": "openai/gpt-oss-120b",
    },
    "llama2": {
        "": "meta-llama/Llama-2-7b-chat-hf",
        **{f"{size}b": f"meta-llama/Llama-2-{size}b-chat-hf" for size in (7, 13, 70)},
    },
    "llama3": {
        "": "meta-llama/Meta-Llama-3-8B-Instruct",
        **{f"{size}b": f"meta-llama/Meta-Llama-3-{size}B-Instruct" for size in (8, 70)},
    },
    "llama3.1": {
        "": "meta-llama/Llama-3.1-8B-Instruct",
        **{f"{size}b": f"meta-llama/Llama-3.1-{size}B-Instruct" for size in (8, 70, 405)},
    },
    "llama3.2": {
        "": "meta-llama/Llama-3.2-3B-Instruct",
        **{f"{size}b": f"meta-llama/Llama-3.2-{size}B-Instruct" for size in (1, 3)},
    },
    "llama3.3": {
        "": "meta-llama/Llama-3.3-70B-Instruct",
        "70b": "meta-llama/Llama-3.3-70B-Instruct",
    },
    "mixtral": {
        "": "mistralai/Mixtral-8x7B-Instruct-v0.1",
        "8x7b": "mistralai/Mixtral-8x7B-Instruct-v0.1",
        "8x22b": "mistralai/Mixtral-8x22B-Instruct-v0.1",
    },
    "qwen2": {
        "": "Qwen/Qwen2-7B-Instruct",
        **{f"{size}b": f"Qwen/Qwen2-{size}B-Instruct" for size in (0.5, 1.5, 7, 72)},
    },
    "qwen2.5": {
        "": "Qwen/Qwen2.5-7B-Instruct",
        **{f"{size}b": f"Qwen/Qwen2.5-{size}B-Instruct" for size in (0.5, 1.5, 3, 7, 14, 32, 72)},
    },
    "qwen2.5-coder": {
        "": "Qwen/Qwen2.5-Coder-7B-Instruct",
        **{f"{size}b": f"Qwen/Qwen2.5-Coder-{size}B-Instruct" for size in (0.5, 1.5, 3, 7, 14, 32)},
    },
    "qwen3": {
        "": "Qwen/Qwen3-8B",
        **{f"{size}b": f"Qwen/Qwen3-{size}B" for size in (0.6, 1.7, 4, 8, 14, 32)},
        "30b": "Qwen/Qwen3-30B-A3B",
        "235b": "Qwen/Qwen3-235B-A22B",
    },
    "qwen3-coder": {
        "": "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        "30b": "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        "480b": "Qwen/Qwen3-Coder-480B-A35B-Instruct",
    },
    "smollm2": {
        "": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
        **{
            tag: f"HuggingFaceTB/SmolLM2-{tag.upper()}-Instruct" for tag in ("135m", "360m", "1.7b")
        },
    },
    "tinyllama": {
        "": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        "1.1b": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    },
}
"""Supported models by name and beginning of the tag; the empty tag is `latest`."""

OTHERS: Mapping[str, str] = {
    "gemma2": "google/gemma-2-9b-it",
    "gemma3": "google/gemma-3-4b-it",
    "granite4": "ibm-granite/granite-4.0-micro",
    "llama4": "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "mistral": "mistralai/Mistral-7B-Instruct-v0.3",
    "mistral-nemo": "mistralai/Mistral-Nemo-Instruct-2407",
    "mistral-small": "mistralai/Mistral-Small-24B-Instruct-2501",
    "olmo2": "allenai/OLMo-2-1124-7B-Instruct",
    "phi3": "microsoft/Phi-3-mini-4k-instruct",
    "phi4": "microsoft/phi-4",
    "qwen3-next": "Qwen/Qwen3-Next-80B-A3B-Instruct",
}
"""Popular models that are not supported, by name."""


def ollama_message(reference: str) -> str | None:
    """Explain a name of Ollama's library; None for any other name."""
    match = _NAME.fullmatch(reference)
    if match is None:
        return None
    name, tag = match["name"].lower(), (match["tag"] or "").lower()
    blob = next(_blobs(match["name"], match["tag"] or "latest"), None)
    here = f" Ollama's own file of it is {blob}: give that path." if blob is not None else ""
    tags = RUN.get(name, {})
    wanted = "" if tag == "latest" else tag
    hub_id = next((tags[t] for t in tags if t == wanted or (t and wanted.startswith(t))), None)
    begin = f"{reference} is a name of Ollama's library"
    if hub_id is not None:
        return f"{begin}; on the hub it is {hub_id}.{here}"
    if name in OTHERS:
        said = why_unsupported([name], {})
        return f"{begin}; on the hub it is {OTHERS[name]}, and it does not run here. {said}"
    if blob is not None or ":" in reference:
        names = f"{begin}, or built like one; the hub's are built like org/name or org/name:Q4_K_M."
        return names + here
    return None


def model_folders() -> list[Path]:
    """List Ollama's model folders: OLLAMA_MODELS, the user's and the service's."""
    told = os.environ.get("OLLAMA_MODELS")
    places = [Path(told)] if told else []
    try:
        places.append(Path.home() / ".ollama" / "models")
    except RuntimeError:  # a user without a home
        pass
    return [*places, Path("/usr/share/ollama/.ollama/models")]


def ollama_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield names and files of the models in one of `model_folders`.

    A folder that is missing or belongs to another user yields nothing.
    """
    try:
        manifests = sorted(folder.glob("manifests/*/*/*/*"))
    except OSError:
        return
    for manifest in manifests:
        for blob in _blobs_of(manifest, folder / "blobs"):
            yield f"{manifest.parent.name}:{manifest.name}", blob


def _blobs(name: str, tag: str) -> Iterator[Path]:
    """Yield the files of a model in Ollama's folders."""
    for folder in model_folders():
        try:
            manifests = list(folder.glob(f"manifests/*/*/{name}/{tag}"))
        except OSError:  # of another user
            continue
        for manifest in manifests:
            yield from _blobs_of(manifest, folder / "blobs")


def _blobs_of(manifest: Path, blobs: Path) -> Iterator[Path]:
    try:
        layers = read_object(manifest, _MAX_MANIFEST_BYTES).get("layers")
    except CheckpointError:
        return
    for layer in layers if isinstance(layers, list) else []:
        if isinstance(layer, dict) and layer.get("mediaType") == _MODEL:
            digest = _DIGEST.fullmatch(str(layer.get("digest")))
            if digest is not None and (blobs / f"sha256-{digest[1]}").is_file():
                yield blobs / f"sha256-{digest[1]}"
