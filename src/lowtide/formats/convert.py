"""Convert weights from their stored format to their format in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtide.formats.matrix import Bytes, MatrixFormat
from lowtide.formats.plain import CHUNK_WEIGHTS, ITEM_BYTES, convert_plain

Importance = NDArray[np.float32]

Pack = Callable[[MatrixFormat, Bytes, str, Bytes, Importance | None], None]
"""Type of `pack` and its compiled twin."""


def pack(
    to: MatrixFormat, source: Bytes, name: str, target: Bytes, importance: Importance | None = None
) -> None:
    """Pack weights stored in the named plain format, by `MatrixFormat.pack`."""
    weights = np.empty(len(source) // ITEM_BYTES[name], np.float32)
    convert_plain(source, name, weights.view(np.uint8), "F32")
    to.pack(weights, target, importance)


def convert(
    stored: Sequence[Bytes],
    source: MatrixFormat,
    target: Bytes,
    to: MatrixFormat,
    pack: Pack = pack,
    importance: Importance | None = None,
) -> None:
    """Write whole blocks of weights into `target`, converted to another format if needed.

    stored: the blocks' bytes in each tensor of `source`, 1-D.
    target: 1-D, for the same number of weights in the format `to`, which is plain, or the kept
      format of `source` with one tensor, or can be packed, weighted by `importance` of inputs.
    """
    is_packed = to.unpacked != to.name
    if source is to:
        np.copyto(target, stored[0])
    elif source.kept is to:
        source.arrange(stored, target)
    elif source.unpacked == source.name and not is_packed:
        convert_plain(stored[0], source.name, target, to.name)
    else:
        unit = to.block_size if is_packed else source.block_size  # `source` divides into it
        num_weights = len(stored[0]) // source.num_bytes(unit) * unit
        step = max(1, CHUNK_WEIGHTS // unit) * unit
        for start in range(0, num_weights, step):
            stop = min(start + step, num_weights)
            weights = source.unpack(*_parts(stored, source, start, stop))
            part = target[to.num_bytes(start) : to.num_bytes(stop)]
            if is_packed:
                pack(to, weights, source.unpacked, part, importance)
            else:
                convert_plain(weights, source.unpacked, part, to.name)


def convert_rows(
    stored: Sequence[Bytes], source: MatrixFormat, target: NDArray[Any], to: MatrixFormat
) -> None:
    """Convert as `convert` does, into an array of any strides, in the order of its axes.

    target [rows, ...]: plain weights as unsigned integers of their width, or bytes of blocks; each
    row is a whole number of blocks.
    """
    row_size = to.num_weights(target[0].size)
    num_rows = max(1, CHUNK_WEIGHTS // row_size)
    for first in range(0, len(target), num_rows):
        rows = target[first : first + num_rows]
        contiguous = np.empty(rows.shape, target.dtype)
        pieces = _parts(stored, source, first * row_size, (first + len(rows)) * row_size)
        convert(pieces, source, contiguous.reshape(-1).view(np.uint8), to)
        rows[...] = contiguous


def _parts(stored: Sequence[Bytes], source: MatrixFormat, start: int, stop: int) -> list[Bytes]:
    """Slice each tensor's bytes to weights `start` to `stop`, whole blocks."""
    return [
        each[source.num_bytes(start, tensor) : source.num_bytes(stop, tensor)]
        for tensor, each in enumerate(stored)
    ]
