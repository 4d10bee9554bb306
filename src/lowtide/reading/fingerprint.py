"""What tells a model's weights from another's of the same shape, without reading them all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from lowtide.model_folder.checkpoint import Checkpoint, StoredPart, TensorEntry
from lowtide.reading.finite_weights import read_part

PART_BYTES = 1024
_NUM_THREADS = 8
_SAMPLES_AT_ONCE = 64


class _Sample(NamedTuple):
    """`PART_BYTES`, or what there is, from byte `start` on of what is stored of a tensor."""

    name: str
    place: TensorEntry | StoredPart
    start: int


def fingerprint(checkpoint: Checkpoint, names: Iterable[str], is_thorough: bool = False) -> str:
    """A SHA-256 of the names, types, shapes and first `PART_BYTES` of these tensors.

    is_thorough: of all that is stored of them, and where a tensor is a stack of matrices, such as
    experts, of the beginning of each. The same whatever type they are computed in, and however
    they are divided into files. Raises StorageError where they cannot be read.
    """
    samples = [
        _Sample(name, place, start)
        for name in sorted(set(names))
        for place, start in _places(checkpoint.tensors[name], is_thorough)
    ]
    batches = [
        samples[at : at + _SAMPLES_AT_ONCE] for at in range(0, len(samples), _SAMPLES_AT_ONCE)
    ]
    digest, last = hashlib.sha256(), None
    with ExitStack() as stack:
        descriptors = {}
        for file in {sample.place.file for sample in samples}:
            descriptors[file] = checkpoint.files[file].open()
            stack.callback(os.close, descriptors[file])
        threads = stack.enter_context(ThreadPoolExecutor(_NUM_THREADS))
        read_all = threads.map if is_thorough else map
        read = read_all(partial(_read, checkpoint, descriptors), batches)
        for batch, contents in zip(batches, read, strict=True):
            for sample, content in zip(batch, contents, strict=True):
                if sample.name != last:
                    last, entry = sample.name, checkpoint.tensors[sample.name]
                    digest.update(repr((last, entry.dtype, entry.shape)).encode())
                digest.update(content)
    return digest.hexdigest()


def _places(
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


def _read(
    checkpoint: Checkpoint, descriptors: Mapping[int, int], samples: Sequence[_Sample]
) -> list[bytes]:
    return [
        read_part(checkpoint, name, place, descriptors[place.file], start, PART_BYTES).tobytes()
        for name, place, start in samples
    ]
