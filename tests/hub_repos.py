"""Repositories for the hub's stand-in: small whole ones, and large ones that are headers alone."""

from __future__ import annotations

import json
from pathlib import Path

from hub_stand_in import Content

from lowtide.families import families
from lowtide.model_writing.safetensors_writer import header_bytes
from lowtide.model_writing.synth import plan_shards
from lowtide.model_writing.synth_weights import tensors_of

GOLDEN = Path(__file__).parent / "goldens" / "llada2-a"


def whole_repo(folder: Path = GOLDEN) -> dict[str, bytes | Content]:
    """A folder's files, and some that lowtide has no use for."""
    files: dict[str, bytes | Content] = {p.name: p.read_bytes() for p in folder.iterdir()}
    return {**files, "modeling.py": b"raise SystemExit", "README.md": b"#", "onnx/x.json": b"{}"}


def published_repo(family: str) -> dict[str, bytes | Content]:
    """Return the published files of a family's largest model that `synth` knows, in files of 5 GB.

    Headers and sizes are right; the weights are zeros that no disk holds.
    """
    size = families()[family].sizes()["full"]
    shards = plan_shards(list(tensors_of(size)), 5 * 10**9)
    files: dict[str, bytes | Content] = {"config.json": json.dumps(size.config).encode()}
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        header = header_bytes([t.output for t in shard], {"format": "pt"})
        num_bytes = len(header) + sum(t.output.num_bytes for t in shard)
        files[name] = Content(header, num_bytes)
        weight_map |= dict.fromkeys((t.name for t in shard), name)
    index = json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2).encode()
    return {**files, "model.safetensors.index.json": index, "tokenizer.json": b" " * (10 << 20)}
