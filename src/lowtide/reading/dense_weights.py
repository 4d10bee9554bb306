"""Start-up: dense weights into their arena."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowtide.core import align_up
from lowtide.formats import format_of
from lowtide.formats.plain import plain_format
from lowtide.memory.arena import Arena
from lowtide.model_folder.checkpoint import TensorEntry
from lowtide.reading.file_reader import ArrayRead, FileReader, Piece, Read, Ticket

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, bytes done, bytes in all)."""


def no_progress(what: str, done_bytes: int, total_bytes: int) -> None:
    """Of a start-up that nobody watches."""


class DenseWeights:
    """Where every dense weight lies in one arena. Nothing is read until `load`."""

    def __init__(self, entries: Mapping[str, TensorEntry], dtypes: Mapping[str, torch.dtype]):
        """`dtypes`: the element type in memory of every entry."""
        self._entries = entries
        self._dtypes = dtypes
        self._offsets: dict[str, int] = {}
        self.num_bytes = 0
        for name, entry in entries.items():
            self._offsets[name] = self.num_bytes
            self.num_bytes += align_up(_num_elements(entry) * dtypes[name].itemsize)

    @property
    def largest_row_bytes(self) -> int:
        """Of what is read in one piece at least, of tensors that are put together of others."""
        parts = (part for entry in self._entries.values() for part in entry.parts)
        return max((part.num_bytes // part.view.stored_shape[0] for part in parts), default=0)

    def meta(self) -> dict[str, Tensor]:
        """The weights without bytes, for a pass that is only counted."""
        return {
            name: torch.empty(entry.shape, dtype=self._dtypes[name], device="meta")
            for name, entry in self._entries.items()
        }

    def load_onto(
        self, device: torch.device, reader: FileReader, progress: Progress
    ) -> dict[str, Tensor]:
        """Reads all of them onto a GPU, through host memory for one at a time."""
        weights: dict[str, Tensor] = {}
        done, total = 0, sum(entry.num_bytes for entry in self._entries.values())
        for name, entry in self._entries.items():
            alone = DenseWeights({name: entry}, self._dtypes)
            weights[name] = alone.load(reader, lambda *_: None)[name].to(device)
            done += entry.num_bytes
            progress("loading dense weights onto the GPU", done, total)
        return weights

    def load(self, reader: FileReader, progress: Progress) -> dict[str, Tensor]:
        """Reads all of them. The tensors share one arena, which lives as long as they do."""
        arena = Arena(self.num_bytes)
        array = arena.array()
        weights: dict[str, Tensor] = {}
        tickets: deque[Ticket] = deque()
        total = sum(entry.num_bytes for entry in self._entries.values())
        for name, entry in self._entries.items():
            offset, dtype = self._offsets[name], self._dtypes[name]
            weights[name] = arena.tensor(offset, entry.shape, dtype)
            stop = offset + _num_elements(entry) * dtype.itemsize
            target, stored = array[offset:stop], format_of(entry.dtype)
            reads: list[Read | ArrayRead] = _arranged(entry, target, dtype)
            if not reads:
                piece = Piece(0, entry.num_bytes, stored, target, plain_format(dtype))
                reads.append(Read(entry.file, entry.offset, entry.num_bytes, (piece,)))
            tickets.append(reader.submit(reads))
        done = 0
        while tickets:
            done += tickets.popleft().result()
            progress("loading dense weights", done, total)
        return weights


def _arranged(
    entry: TensorEntry, target: NDArray[np.uint8], dtype: torch.dtype
) -> list[Read | ArrayRead]:
    """Of a tensor that is put together of others, the reads of its parts into `target`."""
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


def _num_elements(entry: TensorEntry) -> int:
    return int(np.prod(entry.shape, dtype=np.int64))
