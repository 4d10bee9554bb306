"""What tells a model's weights from another's of the same shape, without reading them all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from lowtide.model_folder.checkpoint import Checkpoint
from lowtide.reading.finite_weights import read_part

PART_BYTES = 1024


def fingerprint(checkpoint: Checkpoint, names: Iterable[str]) -> str:
    """A SHA-256 of the names, types, shapes and first `PART_BYTES` of these tensors.

    The same whatever type they are computed in, and however they are divided into files. Raises
    StorageError where they cannot be read.
    """
    by_file: dict[int, list[str]] = {}
    for name in names:
        by_file.setdefault(checkpoint.tensors[name].file, []).append(name)
    parts: dict[str, bytes] = {}
    for file, of_file in by_file.items():
        descriptor = checkpoint.files[file].open()
        try:
            for name in of_file:
                parts[name] = _start(checkpoint, name, descriptor).tobytes()
        finally:
            os.close(descriptor)
    digest = hashlib.sha256()
    for name in sorted(parts):
        entry = checkpoint.tensors[name]
        digest.update(repr((name, entry.dtype, entry.shape)).encode() + parts[name])
    return digest.hexdigest()


def _start(checkpoint: Checkpoint, name: str, descriptor: int) -> NDArray[np.uint8]:
    place = checkpoint.tensors[name].places[0]
    return read_part(checkpoint, name, place, descriptor, 0, PART_BYTES)
