"""Fingerprint of a model's weights that reads only a part of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack

from lowtide.model_folder.checkpoint import Checkpoint, StoredPart, TensorEntry
from lowtide.reading.finite_weights import read_part

PART_BYTES = 1024


def fingerprint(checkpoint: Checkpoint, names: Iterable[str], is_thorough: bool = False) -> str:
    """Return a SHA-256 of the names, types, shapes and first `PART_BYTES` of these tensors.

    is_thorough: sample everything stored of them, and each matrix of a stack, such as an expert.
    The result depends neither on the compute dtype nor on the division into files. Raises
    StorageError if a file cannot be read.
    """
    tensors = {name: checkpoint.tensors[name] for name in sorted(names)}
    samples = {name: list(_samples(entry, is_thorough)) for name, entry in tensors.items()}
    digest, files = hashlib.sha256(), {}
    with ExitStack() as stack:
        for number in {place.file for taken in samples.values() for place, _ in taken}:
            files[number] = checkpoint.files[number].open()
            stack.callback(os.close, files[number])
        for taken in samples.values():
            for place, start in taken:  # let the disk fetch many at once
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
    """Yield the places of a tensor, and the offsets in them that are sampled."""
    if not is_thorough:
        yield entry.places[0], 0
        return
    num_matrices = max(1, entry.shape[0]) if len(entry.shape) > 2 else 1
    for place in entry.places:
        for index in range(num_matrices):
            yield place, place.num_bytes * index // num_matrices
