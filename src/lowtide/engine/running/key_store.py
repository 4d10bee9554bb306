"""`cache_dir`: where kept sequences lie on disk, and what decides that they are of this model."""

from __future__ import annotations

import hashlib
import os
from contextlib import ExitStack, suppress
from pathlib import Path

import torch

from lowtide.decode.stored_sequences import StoredSequences
from lowtide.engine.opening.model import OpenModel
from lowtide.files.json_file import as_text
from lowtide.files.kept_file import KeyLayout
from lowtide.files.stored_files import StoredFiles
from lowtide.hardware.machine import cpu_model
from lowtide.memory.kv_cache import KVCache
from lowtide.model_folder.checkpoint import Checkpoint
from lowtide.reading.fingerprint import fingerprint
from lowtide.version import __version__


def open_files(opened: OpenModel, undo: ExitStack) -> StoredFiles | None:
    """Before anything is loaded; None where nothing is to be kept there. `undo` closes them.

    Raises UsageError for a folder that cannot be trusted, StorageError.
    """
    options = opened.options
    if options.cache_dir is None or not opened.stores_keys:
        return None
    files = StoredFiles.open(Path(options.cache_dir), options.cache_disk)
    undo.callback(files.close)
    with suppress(OSError):  # where nothing can be removed nothing can be written, which is told
        files.make_room(0)
    return files


def stored_sequences(
    opened: OpenModel, checkpoint: Checkpoint, files: StoredFiles, kv_cache: KVCache
) -> StoredSequences:
    """Open the model's sequences in `files`, which are closed with them.

    Raises StorageError where weights cannot be read.
    """
    layers, arrays, heads, _, width = opened.kv_shape
    layout = KeyLayout((layers, arrays, heads, width), opened.dtype.itemsize)
    digest, name = _digest(opened, checkpoint), _name(opened.folder)
    return StoredSequences(files, digest, name, kv_cache, layout)


def _digest(opened: OpenModel, checkpoint: Checkpoint) -> bytes:
    """Digest of all that decides which bits keys and values have, and which of them are kept."""
    options, inputs = opened.options, opened.inputs
    weights = fingerprint(checkpoint, checkpoint.tensors, is_thorough=True)
    facts = (
        *(__version__, torch.__version__, weights, opened.config, opened.dtype, opened.reuse),
        *(opened.formats, options.formats, None if inputs is None else inputs.digest),
        *(opened.device, opened.kernels.name, sorted(opened.rounded)),
        *(cpu_model(), len(os.sched_getaffinity(0))),
    )
    return hashlib.sha256(repr(facts).encode()).digest()


def _name(path: Path) -> str:
    """What people call a model: a repository in the hub's cache, a folder or a file."""
    for part in path.parts:
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/", 1)
    return as_text(path.name)
