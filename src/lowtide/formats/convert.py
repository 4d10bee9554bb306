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
    if source is to:
        np.copyto(target, stored[0])
    elif source.kept is to:
        source.arrange(stored, target)
    elif to.unpacked != to.name:
        _pack(stored, source, target, to, pack, importance)
    elif source.unpacked == source.name:
        convert_plain(stored[0], source.name, target, to.name)
    else:
        _unpack(stored, source, target, to)


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
        start, stop = first * row_size, (first + len(rows)) * row_size
        contiguous = np.empty(rows.shape, target.dtype)
        pieces = [
            each[source.num_bytes(start, tensor) : source.num_bytes(stop, tensor)]
            for tensor, each in enumerate(stored)
        ]
        convert(pieces, source, contiguous.reshape(-1).view(np.uint8), to)
        rows[...] = contiguous


def _pack(
    stored: Sequence[Bytes],
    source: MatrixFormat,
    target: Bytes,
    to: MatrixFormat,
    pack: Pack,
    importance: Importance | None,
) -> None:
    """Some blocks of the target at a time; `source` divides into them."""
    source_bytes = source.num_bytes(to.block_size)
    num_blocks, step = len(stored[0]) // source_bytes, max(1, CHUNK_WEIGHTS // to.block_size)
    for first in range(0, num_blocks, step):
        stop = min(first + step, num_blocks)
        pieces = [
            each[
                source.num_bytes(first * to.block_size, i) : source.num_bytes(
                    stop * to.block_size, i
                )
            ]
            for i, each in enumerate(stored)
        ]
        start, end = (to.num_bytes(block * to.block_size) for block in (first, stop))
        pack(to, source.unpack(*pieces), source.unpacked, target[start:end], importance)


def _unpack(stored: Sequence[Bytes], source: MatrixFormat, target: Bytes, to: MatrixFormat) -> None:
    num_blocks = len(stored[0]) // source.block_bytes[0]
    step = max(1, CHUNK_WEIGHTS // source.block_size)
    for first in range(0, num_blocks, step):
        stop = min(first + step, num_blocks)
        pieces = [
            each[first * size : stop * size]
            for each, size in zip(stored, source.block_bytes, strict=True)
        ]
        start, end = (to.num_bytes(block * source.block_size) for block in (first, stop))
        convert_plain(source.unpack(*pieces), source.unpacked, target[start:end], to.name)
