"""Load the dense weights into their arena at start-up."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowtide.core import NOTHING, align_up
from lowtide.errors import InternalError
from lowtide.formats import MatrixFormat, format_of
from lowtide.formats.arranged import Arranged
from lowtide.formats.plain import plain_format
from lowtide.kernels.operands import Matrix
from lowtide.memory.arena import Arena
from lowtide.model_folder.checkpoint import TensorEntry
from lowtide.progress import Progress
from lowtide.reading.file_reader import (
    AnyRead,
    ArrayRead,
    FileReader,
    MatrixRead,
    Piece,
    Read,
    Ticket,
    matrix_bytes_at_once,
)


class DenseWeights:
    """Layout of all dense weights in one arena. Nothing is read until `load`."""

    def __init__(
        self,
        entries: Mapping[str, TensorEntry],
        dtypes: Mapping[str, torch.dtype],
        kept: Mapping[str, MatrixFormat] = NOTHING,
    ) -> None:
        """dtypes: the element type in memory, except of entries that are `kept` in a format."""
        self._entries = entries
        self._dtypes = dtypes
        self._kept = kept
        self._offsets: dict[str, int] = {}
        self.num_bytes = 0
        for name in entries:
            self._offsets[name] = self.num_bytes
            self.num_bytes += align_up(self._num_bytes(name))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def only(self, names: Sequence[str]) -> DenseWeights:
        """Return the layout of some of the weights."""
        entries = {name: self._entries[name] for name in names}
        return DenseWeights(entries, self._dtypes, self._kept)

    @property
    def largest_stored_bytes(self) -> int:
        """Bytes of the largest weight, as stored."""
        return max(entry.num_bytes for entry in self._entries.values())

    @property
    def largest_row_bytes(self) -> int:
        """Bytes of the largest piece read at once for tensors assembled from others."""
        parts = (part for entry in self._entries.values() for part in entry.parts)
        rows = (part.num_bytes // part.view.stored_shape[0] for part in parts)
        units = (
            matrix_bytes_at_once(stored, entry.shape)
            for entry in self._entries.values()
            if entry.tensors and isinstance(stored := format_of(entry.dtype), Arranged)
        )
        return max((*rows, *units), default=0)

    def meta(self) -> dict[str, Matrix]:
        """Return the weights on the meta device, for a pass that is only counted."""
        return {
            name: self._weight(
                name, torch.empty(self._num_bytes(name), dtype=torch.uint8, device="meta")
            )
            for name in self._entries
        }

    def load_onto(
        self, device: torch.device, reader: FileReader, progress: Progress
    ) -> dict[str, Matrix]:
        """Read all weights onto a GPU, one at a time through host memory.

        None of them may be kept in a format.
        """
        weights: dict[str, Matrix] = {}
        done, total = 0, sum(entry.num_bytes for entry in self._entries.values())
        for name, entry in self._entries.items():
            alone = DenseWeights({name: entry}, self._dtypes)
            [weight] = alone.load(reader, lambda *_: None).values()
            if not isinstance(weight, Tensor):
                raise InternalError(f"{name} has a format that no GPU has kernels for.")
            weights[name] = weight.to(device)
            done += entry.num_bytes
            progress("loading dense weights onto the GPU", done, total)
        return weights

    def load(self, reader: FileReader, progress: Progress) -> dict[str, Matrix]:
        """Read all weights. They share one arena, which lives as long as they do."""
        arena = Arena(self.num_bytes)
        array = arena.array()
        weights: dict[str, Matrix] = {}
        tickets: deque[Ticket] = deque()
        total = sum(entry.num_bytes for entry in self._entries.values())
        for name, entry in self._entries.items():
            offset, num_bytes = self._offsets[name], self._num_bytes(name)
            weights[name] = self._weight(name, arena.tensor(offset, (num_bytes,), torch.uint8))
            target = array[offset : offset + num_bytes]
            stored, kept = format_of(entry.dtype), self._format(name)
            reads: list[AnyRead] = []
            if entry.parts:
                reads += _arranged(entry, target, self._dtypes[name])
            elif isinstance(stored, Arranged):
                places = tuple((part.file, part.offset) for part in entry.tensors)
                reads.append(MatrixRead(name, places, stored, entry.shape, target, kept))
            else:
                stored = stored.for_rows(entry.shape[-1])
                piece = Piece(0, entry.num_bytes, stored, target, kept)
                reads.append(Read(entry.file, entry.offset, entry.num_bytes, (piece,)))
            tickets.append(reader.submit(reads))
        done = 0
        while tickets:
            done += tickets.popleft().result()
            progress("loading dense weights", done, total)
        return weights

    def _format(self, name: str) -> MatrixFormat:
        """Return a weight's format in memory."""
        kept = self._kept.get(name)
        return plain_format(self._dtypes[name]) if kept is None else kept

    def _num_bytes(self, name: str) -> int:
        """Return a weight's size in memory."""
        return self._format(name).matrix_bytes(self._entries[name].shape)

    def _weight(self, name: str, content: Tensor) -> Matrix:
        """Wrap bytes `content` [num_bytes] uint8 as a weight."""
        shape = self._entries[name].shape
        if name in self._kept:
            return self._kept[name].matrix([content], shape)
        return content.view(self._dtypes[name]).view(shape)


def _arranged(entry: TensorEntry, target: NDArray[np.uint8], dtype: torch.dtype) -> list[AnyRead]:
    """List the reads of a tensor that is assembled from parts of others."""
    elements = target.view(f"u{dtype.itemsize}")
    return [
        ArrayRead(
            ((part.file, part.offset),),
            format_of(part.dtype),
            part.view.of(elements),
            plain_format(dtype),
        )
        for part in entry.parts
    ]
