"""From the format that weights are stored in to the one that they have in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtide.formats.matrix import Bytes, MatrixFormat
from lowtide.formats.plain import CHUNK_WEIGHTS, ITEM_BYTES, convert_plain

Importance = NDArray[np.float32]

Pack = Callable[[MatrixFormat, Bytes, str, Bytes, Importance | None], None]
"""`pack`, or what does the same faster."""


def pack(
    to: MatrixFormat, source: Bytes, name: str, target: Bytes, importance: Importance | None = None
) -> None:
    """`MatrixFormat.pack` of weights in the plain format of this name."""
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
    """Writes whole blocks of weights into `target`: as they are, or in another format.

    stored: the blocks' bytes of each tensor of `source`, 1-D. target: 1-D, of as many weights in
    the format `to`, which is plain, or what `source` is kept as, of one tensor, or can be packed,
    with this importance of inputs.
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
    """As `convert`, into an array of any strides, in the order of its axes.

    target [rows, ...]: weights of the plain format `to` as unsigned integers of their width, or
    bytes of its blocks; a whole number of blocks in every row.
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
    """The bytes of each tensor that hold weights `start` to `stop`, whole blocks."""
    return [
        each[source.num_bytes(start, tensor) : source.num_bytes(stop, tensor)]
        for tensor, each in enumerate(stored)
    ]
