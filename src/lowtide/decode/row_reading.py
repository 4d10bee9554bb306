"""Reads logits, or statistics of them, from a pass' hidden states, in tiles of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowtide.core import FloatArray, IntArray
from lowtide.decode.candidates import RowChoices
from lowtide.decode.logits import Model, tiled_logits
from lowtide.kernels.row_statistics import Guidance, Wanted
from lowtide.memory.pinned_copies import to_device

PART_ROWS = 8
"""Rows read together. Even, so that both rows of a guided pair are. The memory beside the logits is
a few arrays of this many rows; no row depends on the others."""


class Rows(NamedTuple):
    """Rows of hidden states whose logits are read.

    With guidance each has another row, of the same text without its prompt, and the logits are
    `other + factor * (logits - other)`. LLaDA's `cfg_scale` is the factor less 1.
    """

    own: IntArray  # [n]
    other: IntArray | None = None  # [n]
    factors: FloatArray | None = None  # [n]


def read_statistics(model: Model, hidden: Tensor, rows: Rows, wanted: Wanted) -> RowChoices:
    """Return statistics of the logits of each row; the host waits for a GPU once."""
    device = hidden.device
    [own] = to_device(device, torch.from_numpy(rows.own))
    guidance = None
    if rows.other is not None and rows.factors is not None:
        [other] = to_device(device, torch.from_numpy(rows.other))
        [factors] = to_device(device, torch.from_numpy(rows.factors).float())
        guidance = Guidance(other, factors)
    found = model.row_statistics(hidden, own, wanted, guidance)
    values = [
        torch.zeros_like(found.greatest) if value is None else value
        for value in (found.greatest, found.probability, found.second, found.entropy)
    ]
    # float64 holds ids and float32 exactly: everything crosses to the host in one copy.
    host = torch.stack([found.best.double(), *(value.double() for value in values)]).cpu().numpy()
    return RowChoices(host[0].astype(np.int64), *host[1:])


def read_logits(model: Model, hidden: Tensor, rows: Rows) -> Iterator[tuple[slice, Tensor]]:
    """Yield float32 logits [part, vocab] in host memory, part by part: (slice of rows, logits).

    Each part is valid until the next, and may be overwritten.
    """
    if rows.other is None or rows.factors is None:
        yield from _tiles(model, hidden, rows.own)
        return
    pairs = np.stack([rows.own, rows.other], axis=1).ravel()
    for rows_of_pairs, logits in _tiles(model, hidden, pairs):
        part = slice(rows_of_pairs.start // 2, rows_of_pairs.stop // 2)
        yield part, guided(logits[0::2], logits[1::2], rows.factors[part])


def guided(own: Tensor, other: Tensor, factors: FloatArray) -> Tensor:
    """Apply classifier-free guidance to logits [n, vocab] in `own`, as LLaDA's `generate` does."""
    own.sub_(other)
    for row, factor in zip(own, factors.tolist(), strict=True):
        row.mul_(factor)
    return own.add_(other)


def _tiles(model: Model, hidden: Tensor, rows: IntArray) -> Iterator[tuple[slice, Tensor]]:
    needs_logits = np.ones(len(rows), np.bool_)
    for tile, logits in tiled_logits(model, hidden, rows, needs_logits):
        if isinstance(logits, Tensor):  # as all of them are that need to be
            for first in range(0, len(logits), PART_ROWS):
                part = logits[first : first + PART_ROWS]
                yield slice(tile.start + first, tile.start + first + len(part)), part
