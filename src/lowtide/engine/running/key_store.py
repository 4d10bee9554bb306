"""Opens `cache_dir`, where kept KV caches lie on disk, and identifies the model's own."""

from __future__ import annotations

import hashlib
import os
from contextlib import ExitStack, suppress
from pathlib import Path

import torch

from lowtide.decode.stored_sequences import StoredSequences
from lowtide.files.json_file import as_text
from lowtide.files.kept_file import KeyLayout
from lowtide.files.stored_files import StoredFiles
from lowtide.hardware.machine import cpu_model
from lowtide.memory.kv_cache import KVCache
from lowtide.memory.kv_pages import KVShape
from lowtide.model_folder.checkpoint import Checkpoint
from lowtide.reading.fingerprint import fingerprint
from lowtide.version import __version__


def open_files(folder: Path, most: str | int, undo: ExitStack) -> StoredFiles:
    """Open the folder before anything is loaded; `undo` closes it. most: its size limit.

    Raises UsageError for a folder that cannot be trusted, StorageError.
    """
    files = StoredFiles.open(folder, most)
    undo.callback(files.close)
    with suppress(OSError):  # where nothing can be removed nothing can be written, which is told
        files.make_room(0)
    return files


def stored_sequences(
    files: StoredFiles, digest: bytes, model: Path, kv_cache: KVCache, shape: KVShape
) -> StoredSequences:
    """Open the model's sequences in `files`, which are closed with them.

    digest: of everything that determines their bits. shape: of keys and values.
    """
    shapes = tuple(
        (layers, arrays, heads, width) for layers, arrays, heads, _, width in shape.groups
    )
    windows = tuple(
        ((each.storage.num_layers, *each.storage[1:3], each.storage.width), each.window)
        for each in shape.windows
    )
    layout = KeyLayout(shapes, kv_cache.dtype.itemsize, kv_cache.snapshot_bytes, windows)
    return StoredSequences(files, digest, _name(model), kv_cache, layout)


def digest_of(checkpoint: Checkpoint, *facts: object) -> bytes:
    """Digest everything that determines the bits of keys and values, and which are kept.

    These are the weights, this machine and version, and `facts`. Raises StorageError if weights
    cannot be read.
    """
    weights = fingerprint(checkpoint, checkpoint.tensors, is_thorough=True)
    machine = (cpu_model(), len(os.sched_getaffinity(0)))
    everything = (__version__, torch.__version__, weights, *facts, *machine)
    return hashlib.sha256(repr(everything).encode()).digest()


def _name(path: Path) -> str:
    """Return a model's name for people: a hub repository, a folder or a file."""
    for part in path.parts:
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/", 1)
    return as_text(path.name)
