"""What tells a model's weights from another's of the same shape, without reading them all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack

from lowtide.model_folder.checkpoint import Checkpoint, StoredPart, TensorEntry
from lowtide.reading.finite_weights import read_part

PART_BYTES = 1024


def fingerprint(checkpoint: Checkpoint, names: Iterable[str], is_thorough: bool = False) -> str:
    """A SHA-256 of the names, types, shapes and first `PART_BYTES` of these tensors.

    is_thorough: of all that is stored of them, and where a tensor is a stack of matrices, such as
    experts, of the beginning of each. The same whatever type they are computed in, and however
    they are divided into files. Raises StorageError where they cannot be read.
    """
    tensors = {name: checkpoint.tensors[name] for name in sorted(names)}
    samples = {name: list(_samples(entry, is_thorough)) for name, entry in tensors.items()}
    digest, files = hashlib.sha256(), {}
    with ExitStack() as stack:
        for number in {place.file for taken in samples.values() for place, _ in taken}:
            files[number] = checkpoint.files[number].open()
            stack.callback(os.close, files[number])
        for taken in samples.values():
            for place, start in taken:  # so that the disk has many to bring at once
                at, advice = place.offset + start, os.POSIX_FADV_WILLNEED
                os.posix_fadvise(files[place.file], at, PART_BYTES, advice)
        for name, entry in tensors.items():
            digest.update(repr((name, entry.dtype, entry.shape)).encode())
            for place, start in samples[name]:
                of_file = files[place.file]
                digest.update(read_part(checkpoint, name, place, of_file, start, PART_BYTES).data)
    return digest.hexdigest()


def _samples(
    entry: TensorEntry, is_thorough: bool
) -> Iterator[tuple[TensorEntry | StoredPart, int]]:
    """What is stored of a tensor, and from where in it bytes are taken."""
    if not is_thorough:
        yield entry.places[0], 0
        return
    num_matrices = max(1, entry.shape[0]) if len(entry.shape) > 2 else 1
    for place in entry.places:
        for index in range(num_matrices):
            yield place, place.num_bytes * index // num_matrices
