"""`lowtide pack --by-expert`: a copy of a GGUF model's experts, each in one piece."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from lowtide.engine.opening.config import EngineConfig
from lowtide.engine.opening.facts import ModelFacts
from lowtide.engine.opening.model import open_model
from lowtide.errors import StorageError, UsageError
from lowtide.files.regular_file import RegularFile
from lowtide.formats.matrix import Bytes
from lowtide.model_folder.checkpoint import Checkpoint
from lowtide.model_folder.gguf_file import is_gguf
from lowtide.model_writing.pack import AS_IS, in_order
from lowtide.model_writing.safetensors_writer import OutputTensor, SafetensorsWriter
from lowtide.progress import Progress, no_progress
from lowtide.reading.by_expert import (
    BORDER_BYTES,
    SOURCE,
    copy_path,
    expert_bytes,
    part_starts,
    tensor_name,
)
from lowtide.reading.file_reader import NUM_READERS, ArrayRead, FileReader
from lowtide.reading.fingerprint import fingerprint
from lowtide.schemas.weights import ExpertTable

_PIECE_BYTES = 8 << 20


def pack_experts(model: str | Path, progress: Progress = no_progress) -> Path:
    """Write the copy beside a GGUF model, which is read from it once complete.

    Raises UsageError for a model without a GGUF file or experts, or with a copy, StorageError for a
    full disk or a source that changes, and the errors of opening a model.
    """
    opened = open_model(model, EngineConfig(device="cpu"))
    checkpoint, path = _source(opened.facts)
    table = opened.facts.weight_map.experts
    num_layers, num_experts, _ = table.files.shape
    widths = [expert_bytes(table, layer) for layer in range(num_layers)]
    entries = [
        OutputTensor(tensor_name(layer), "U8", (num_experts, width))
        for layer, width in enumerate(widths)
    ]
    metadata = {SOURCE: fingerprint(checkpoint, checkpoint.tensors)}
    done_bytes, total_bytes = 0, num_experts * sum(widths)
    with (
        _claimed(checkpoint.files[0]),
        SafetensorsWriter(path, entries, metadata=metadata, alignment=BORDER_BYTES) as writer,
        closing(FileReader(checkpoint.files, _PIECE_BYTES)) as reader,
    ):
        for target, _ in in_order(reader, _experts(table, widths), 2 * NUM_READERS):
            writer.write(target.data)
            done_bytes += len(target)
            progress("packing", done_bytes, total_bytes)
    return path


def _source(facts: ModelFacts) -> tuple[Checkpoint, Path]:
    """Return the source and the copy's path."""
    model = facts.folder
    if facts.checkpoint is None or not is_gguf(model):
        raise UsageError(
            f"{model} is not a GGUF file: in other files an expert is in one piece already. Leave "
            "--by-expert out."
        )
    if facts.config.experts is None:
        raise UsageError(f"{model} has no experts to copy.")
    if copy_path(model).exists():
        raise UsageError(f"{copy_path(model)} is there already, and in use.")
    return facts.checkpoint, copy_path(model)


@contextmanager
def _claimed(file: RegularFile) -> Iterator[None]:
    """Lock the model, so that no other process copies it."""
    descriptor = file.open()
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise UsageError(f"Another process packs {file.path}; wait for it.") from error
    except OSError as error:
        told = f"{file.path} cannot be claimed: {error.strerror}"
        raise StorageError(f"{told}; copy the model to a local disk.") from error
    finally:
        os.close(descriptor)


def _experts(table: ExpertTable, widths: Sequence[int]) -> Iterator[tuple[list[ArrayRead], Bytes]]:
    """Yield the reads of every expert and the memory they fill, layer by layer."""
    for layer, expert in np.ndindex(*table.files.shape[:2]):
        target = np.zeros(widths[layer], np.uint8)
        files, offsets = table.files[layer, expert].tolist(), table.offsets[layer, expert].tolist()
        part_bytes = table.stored(layer, expert).part_bytes
        places = zip(files, offsets, part_starts(table, layer, expert), part_bytes, strict=True)
        reads = [
            ArrayRead(((file, offset),), AS_IS, target[start : start + num_bytes], None)
            for file, offset, start, num_bytes in places
        ]
        yield reads, target
