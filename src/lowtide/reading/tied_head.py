"""Refusal of a head in the files that contradicts the config's tied one."""

from __future__ import annotations

import os
from contextlib import ExitStack

from lowtide.errors import CheckpointError
from lowtide.model_folder.checkpoint import Checkpoint, TensorEntry
from lowtide.reading.finite_weights import read_part
from lowtide.schemas.names import Names

_SAMPLE_BYTES = 1024
_NUM_SAMPLES = 64


def refuse_other_head(checkpoint: Checkpoint, names: Names) -> None:
    """Refuse a head that is no copy of the embedding, by samples of both.

    For a model whose config ties them. Raises CheckpointError, and StorageError as `read_part`.
    """
    pair = (f"{names.embedding}.weight", f"{names.head}.weight")
    if not all(name in checkpoint.tensors for name in pair):
        return
    embedding, head = (checkpoint.tensors[name] for name in pair)
    if (embedding.dtype, embedding.shape) == (head.dtype, head.shape):
        if _samples(checkpoint, pair[0], embedding) == _samples(checkpoint, pair[1], head):
            return
    raise CheckpointError(
        f"config.json ties the head to the embedding (tie_word_embeddings), but the checkpoint's "
        f"{pair[1]} is not its {pair[0]}; one of the two is wrong. A config override can untie "
        "them."
    )


def _samples(checkpoint: Checkpoint, name: str, entry: TensorEntry) -> list[bytes]:
    """Read bytes at even distances of everything that is stored of a tensor."""
    found = []
    with ExitStack() as stack:
        for place in entry.places:
            descriptor = checkpoint.files[place.file].open()
            stack.callback(os.close, descriptor)
            for index in range(_NUM_SAMPLES):
                start = place.num_bytes * index // _NUM_SAMPLES
                part = read_part(checkpoint, name, place, descriptor, start, _SAMPLE_BYTES)
                found.append(part.tobytes())
    return found
