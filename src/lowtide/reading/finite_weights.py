"""Find weights that are infinite or NaN in the files."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from lowtide.errors import CheckpointError, StorageError
from lowtide.files.regular_file import OTHER_DRIVE
from lowtide.formats import MatrixFormat, formats
from lowtide.formats.convert import convert
from lowtide.model_folder.checkpoint import Checkpoint, StoredPart, TensorEntry
from lowtide.progress import Progress

_CHECK_BYTES = 8 << 20


def check_finite(
    checkpoint: Checkpoint,
    progress: Progress,
    dtypes: Mapping[str, str] | None = None,
    limit_s: float = math.inf,
) -> float:
    """Read weights once; raise CheckpointError, with the tensor's name, at an infinity or NaN.

    dtypes: the tensors to check, in order, and their dtype once loaded: an overflow in the
    conversion counts, too. By default all are read, as stored. For MXFP4 only scales are checked.
    Returns the share that was read within `limit_s`.
    """
    names = checkpoint.tensors if dtypes is None else dtypes
    checked = [
        (name, place, stored)
        for name in names
        for place in checkpoint.tensors[name].places
        if (stored := _stored_as(name, place.dtype, checkpoint.tensors[name].shape))
    ]
    total = sum(place.num_bytes for _, place, _ in checked)
    done, start_s = 0, time.monotonic()
    for name, place, stored in checked:
        is_as_stored = len(stored.dtypes) > 1  # one of several tensors converts to nothing
        loaded = stored if dtypes is None or is_as_stored else formats()[dtypes[name]]
        step = _CHECK_BYTES - _CHECK_BYTES % stored.block_bytes[0]
        descriptor = checkpoint.files[place.file].open()
        try:
            for start in range(0, place.num_bytes, step):
                if time.monotonic() - start_s > limit_s:
                    return done / total
                chunk = read_part(checkpoint, name, place, descriptor, start, step)
                _check(chunk, stored, loaded, name, checkpoint)
                done += len(chunk)
                progress("checking weights", done, total)
        finally:
            os.close(descriptor)
    return 1.0


def read_part(
    checkpoint: Checkpoint,
    name: str,
    place: TensorEntry | StoredPart,
    descriptor: int,
    start: int,
    most_bytes: int,
) -> NDArray[np.uint8]:
    """Read stored bytes of a tensor's `place` from `start`; fewer at its end.

    `descriptor` is of its file. Raises StorageError.
    """
    num_bytes = min(most_bytes, place.num_bytes - start)
    path = checkpoint.files[place.file].path
    try:
        chunk = os.pread(descriptor, num_bytes, place.offset + start)
    except OSError as reason:
        problem = f"cannot be read: {reason.strerror}"
        raise StorageError(f"{path} {problem}. {OTHER_DRIVE}") from reason
    if len(chunk) < num_bytes:
        raise StorageError(f"{path} ends inside {name}; fetch it again.")
    return np.frombuffer(chunk, np.uint8)


def _stored_as(name: str, dtype: str, shape: Sequence[int]) -> MatrixFormat | None:
    """Return the format of a tensor that may hold values that are not finite, else None."""
    found = next((known for known in formats().values() if known.has_tensor(name, dtype)), None)
    return found.for_rows(shape[-1]) if found is not None and shape else found


def _check(
    chunk: NDArray[np.uint8],
    stored: MatrixFormat,
    loaded: MatrixFormat,
    name: str,
    checkpoint: Checkpoint,
) -> None:
    path = checkpoint.files[checkpoint.tensors[name].file].path
    if not stored.is_finite(chunk):
        problem = "holds an infinity or NaN; the file is damaged"
        raise CheckpointError(f"{name} in {path} {problem}: fetch it again.")
    if loaded is stored:
        return
    num_weights = len(chunk) // stored.block_bytes[0] * stored.block_size
    converted = np.empty(loaded.num_bytes(num_weights), np.uint8)
    convert([chunk], stored, converted, loaded)
    if not loaded.is_finite(converted):
        raise CheckpointError(
            f"{name} in {path} holds a weight of {stored.name} that is infinite in {loaded.name}; "
            "choose a wider `dtype`."
        )
