"""A copy of a GGUF model's experts, each in one contiguous range.

A GGUF file has the gate matrices of all experts of a layer, then their up matrices and so on: one
expert takes three reads. In the copy beside it an expert's parts follow each other, aligned to
4,096 bytes for direct reads. It is a safetensors file with a tensor `experts.LAYER` [num_experts,
bytes] for each MoE layer and the fingerprint of its model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from lowtide.core import align_up
from lowtide.errors import CheckpointError
from lowtide.files.json_file import parse_object
from lowtide.model_folder.checkpoint import Checkpoint, read_header
from lowtide.reading.fingerprint import fingerprint
from lowtide.schemas.weights import ExpertTable, WeightMap

BORDER_BYTES = 4096
"""Alignment of each copied expert in the file, in bytes."""

SOURCE = "source"
"""Metadata key of the fingerprint of the copied model."""


def copy_path(model: Path) -> Path:
    """Return the path of the copy, beside the model's (first) file."""
    return model.with_name(f"{model.name}.experts")


def tensor_name(layer: int) -> str:
    """Return the name of the tensor with the experts of a MoE layer, counted from 0."""
    return f"experts.{layer}"


def expert_bytes(table: ExpertTable, layer: int) -> int:
    """Return the distance in bytes between two experts of a layer in the copy."""
    kinds = [table.layers[layer], *(each for (own, _), each in table.odd.items() if own == layer)]
    return max(align_up(sum(each.part_bytes), BORDER_BYTES) for each in kinds)


def part_starts(table: ExpertTable, layer: int, expert: int) -> list[int]:
    """Return the start of each stored part in the copy, in bytes from the expert's start."""
    ends = np.cumsum(table.stored(layer, expert).part_bytes).tolist()
    return [0, *ends[:-1]]


def with_copy(
    model: Path, checkpoint: Checkpoint, weight_map: WeightMap
) -> tuple[Checkpoint, WeightMap]:
    """Redirect experts to the copy; returns the arguments if there is none.

    Raises CheckpointError for a copy that is damaged or of another model.
    """
    path = copy_path(model)
    if not path.exists():
        return checkpoint, weight_map
    file, header = read_header(path)
    found = Checkpoint.of_headers([(file, header)])
    way_out = "remove it, and make it again (lowtide pack --by-expert)"
    metadata = parse_object(header, str(path), way_out=way_out).get("__metadata__")
    source = metadata.get(SOURCE) if isinstance(metadata, Mapping) else None
    if source != fingerprint(checkpoint, checkpoint.tensors):
        raise CheckpointError(
            f"{path} has the experts of another model than {model}: remove it, and make it again "
            f"(lowtide pack {model} --by-expert) if it is wanted."
        )
    table = weight_map.experts
    offsets = np.empty_like(table.offsets)
    num_layers, num_experts, _ = offsets.shape
    for layer in range(num_layers):
        pitch = expert_bytes(table, layer)
        entry = found.tensors.get(tensor_name(layer))
        if entry is None or (entry.dtype, *entry.shape) != ("U8", num_experts, pitch):
            raise CheckpointError(
                f"{path} has no tensor {tensor_name(layer)} of {num_experts} experts of {pitch} "
                f"bytes: it is damaged. Remove it, and make it again (lowtide pack --by-expert)."
            )
        for expert in range(num_experts):
            begin = entry.offset + expert * pitch
            offsets[layer, expert] = begin + np.array(part_starts(table, layer, expert))
    offsets.flags.writeable = False
    files = np.full_like(offsets, len(checkpoint.files))
    files.flags.writeable = False
    copied = replace(weight_map, experts=replace(table, files=files, offsets=offsets))
    return replace(checkpoint, files=(*checkpoint.files, file)), copied
