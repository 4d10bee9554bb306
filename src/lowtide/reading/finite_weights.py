"""Weights that are not numbers, found in the files and named."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from lowtide.dtypes import ITEM_BYTES, PACKED_DTYPE, convert, is_finite
from lowtide.errors import CheckpointError, StorageError
from lowtide.model_folder.checkpoint import Checkpoint, TensorEntry
from lowtide.reading.dense_weights import Progress

_CHECK_BYTES = 8 << 20


def check_finite(
    checkpoint: Checkpoint,
    progress: Progress,
    dtypes: Mapping[str, str] | None = None,
    limit_s: float = math.inf,
) -> float:
    """Reads weights once and raises CheckpointError at an infinity or NaN, by its tensor's name.

    `dtypes`: the tensors that matter, in order, and what each is converted to when it is loaded:
    a weight that overflows there counts, too. By default all are read, as they are stored. Of
    MXFP4 weights the scales are looked at. Returns the share that was read within `limit_s`.
    """
    names = checkpoint.tensors if dtypes is None else dtypes
    checked = {n: checkpoint.tensors[n] for n in names if _is_checked(n, checkpoint.tensors[n])}
    total = sum(entry.num_bytes for entry in checked.values())
    done, start_s = 0, time.monotonic()
    for name, entry in checked.items():
        dtype = entry.dtype if dtypes is None or entry.dtype == PACKED_DTYPE else dtypes[name]
        descriptor = checkpoint.files[entry.file].open()
        try:
            for start in range(0, entry.num_bytes, _CHECK_BYTES):
                if time.monotonic() - start_s > limit_s:
                    return done / total
                chunk = _read(checkpoint, name, descriptor, start)
                _check(chunk, dtype, name, checkpoint)
                done += len(chunk)
                progress("checking weights", done, total)
        finally:
            os.close(descriptor)
    return 1.0


def _is_checked(name: str, entry: TensorEntry) -> bool:
    is_scales = entry.dtype == PACKED_DTYPE and name.endswith("_scales")
    return entry.dtype in ITEM_BYTES or is_scales


def _read(checkpoint: Checkpoint, name: str, descriptor: int, start: int) -> NDArray[np.uint8]:
    entry = checkpoint.tensors[name]
    num_bytes = min(_CHECK_BYTES, entry.num_bytes - start)
    path = checkpoint.files[entry.file].path
    try:
        chunk = os.pread(descriptor, num_bytes, entry.offset + start)
    except OSError as reason:
        raise StorageError(f"{path} cannot be read: {reason.strerror}.") from reason
    if len(chunk) < num_bytes:
        raise StorageError(f"{path} ends inside {name}; fetch it again.")
    return np.frombuffer(chunk, np.uint8)


def _check(chunk: NDArray[np.uint8], dtype: str, name: str, checkpoint: Checkpoint) -> None:
    """`dtype`: what the weights are converted to."""
    entry = checkpoint.tensors[name]
    path = checkpoint.files[entry.file].path
    if not is_finite(chunk, entry.dtype):
        raise CheckpointError(f"{name} in {path} holds an infinity or NaN; the file is damaged.")
    if dtype == entry.dtype:
        return
    converted = np.empty(len(chunk) // ITEM_BYTES[entry.dtype] * ITEM_BYTES[dtype], np.uint8)
    convert(chunk, entry.dtype, converted, dtype)
    if not is_finite(converted, dtype):
        raise CheckpointError(
            f"{name} in {path} holds a weight of {entry.dtype} that is infinite in {dtype}; "
            "choose a wider dtype."
        )
