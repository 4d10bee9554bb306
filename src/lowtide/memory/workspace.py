"""Where a forward pass puts its intermediate results.

A model never allocates a transient: it takes named buffers from a workspace, inside scopes.
The same forward pass runs over two kinds of workspace: a `Registrar`, in which nothing is
computed (tensors are on the meta device) and the bytes are counted, and a `Workspace`, which
hands out views of one buffer of exactly the size that was counted. Lifetimes nest as scopes do,
so a stack is the whole plan: a buffer's offset is what its enclosing scopes have taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from lowtide.core import align_up
from lowtide.errors import InternalError

Mark = tuple[int, int, int]
START: Mark = (0, 0, 0)


class Buffers(Protocol):
    """What a model sees of its workspace."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised buffer that lives until the enclosing scope ends."""
        ...

    def scope(self) -> AbstractContextManager[None]:
        """`with workspace.scope():` gives back at its end what was taken inside."""
        ...

    def mark(self) -> Mark:
        """The present state, for `reset`."""
        ...

    def reset(self, mark: Mark = START) -> None:
        """Gives back all that was taken since `mark`; the start without one."""
        ...

    def library(self, name: str, num_bytes: int) -> None:
        """Declares what an operator without an `out=` form allocates until the scope ends."""
        ...


MAX_VIEWS = 4096
"""Views kept; a model's decoding passes need some hundred, prompts of all lengths many."""


class Workspace:
    """Hands out 64-byte-aligned views of one buffer; allocates nothing.

    The same view is handed out again for the same place, shape and type: making one costs as much
    as a small operator, and a pass takes some 25 per layer.
    """

    def __init__(self, buffer: Tensor) -> None:
        """`buffer`: uint8, of the size a `Registrar` counted for the largest pass."""
        self._buffer = buffer
        self._views: dict[tuple[int, tuple[int, ...], torch.dtype], tuple[Tensor, int]] = {}
        self.top = 0

    def scope(self) -> _Scope:
        return _Scope(self)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        place = (self.top, shape, dtype)
        if place not in self._views:
            if len(self._views) == MAX_VIEWS:
                self._views.clear()
            self._views[place] = self._view(name, shape, dtype)
        view, self.top = self._views[place]
        return view

    def _view(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, int]:
        """The view at `top`, and where the next one begins."""
        start, stop = self.top, self.top + _num_bytes(shape, dtype)
        if stop > self._buffer.numel():
            raise InternalError(
                f"Workspace buffer {name} {list(shape)} ends at {stop} bytes, "
                f"past the planned {self._buffer.numel()}."
            )
        return self._buffer[start:stop].view(dtype).view(shape), align_up(stop)

    def mark(self) -> Mark:
        return (self.top, 0, 0)

    def reset(self, mark: Mark = START) -> None:
        self.top = mark[0]

    def library(self, name: str, num_bytes: int) -> None:
        """Library outputs come from the library's allocator; only the registrar counts them."""


class Registrar:
    """Counts what a forward pass takes, computing nothing.

    `arena_bytes` is the size the pass's `Workspace` must have, `peak_bytes` also holds library
    outputs, and `peak` names what was alive when it was reached.
    """

    def __init__(self) -> None:
        self.top = 0
        self._library_bytes = 0
        self._alive: list[tuple[str, int]] = []
        self.arena_bytes = 0
        self.peak_bytes = 0
        self.peak: tuple[tuple[str, int], ...] = ()

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = align_up(_num_bytes(shape, dtype))
        self.top += num_bytes
        self._alive.append((name, num_bytes))
        self.arena_bytes = max(self.arena_bytes, self.top)
        self._note_peak()
        return torch.empty(shape, dtype=dtype, device="meta")

    def library(self, name: str, num_bytes: int) -> None:
        self._library_bytes += num_bytes
        self._alive.append((name, num_bytes))
        self._note_peak()

    @contextmanager
    def scope(self) -> Iterator[None]:
        mark = self.mark()
        try:
            yield
        finally:
            self.reset(mark)

    def mark(self) -> Mark:
        return (self.top, self._library_bytes, len(self._alive))

    def reset(self, mark: Mark = START) -> None:
        self.top, self._library_bytes = mark[:2]
        del self._alive[mark[2] :]

    def _note_peak(self) -> None:
        if self.top + self._library_bytes > self.peak_bytes:
            self.peak_bytes = self.top + self._library_bytes
            self.peak = tuple(self._alive)


class _Scope:
    """`Workspace.scope` without a generator: the hot path opens some ten of them per layer."""

    __slots__ = ("_mark", "_owner")

    def __init__(self, owner: Workspace) -> None:
        self._owner = owner

    def __enter__(self) -> None:
        self._mark = self._owner.top

    def __exit__(self, *_: object) -> None:
        self._owner.top = self._mark


def _num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    num_bytes = dtype.itemsize
    for size in shape:
        num_bytes *= size
    return num_bytes


TILE_ROWS = 512
"""Rows of a tile in a pass of many. Fixed, never a matter of the budget: it decides bits."""


def tiles(num_rows: int, tile_rows: int) -> Iterator[slice]:
    """Row tiles of an operator that is computed piecewise.

    `tile_rows` is a multiple of 16, and a remainder shorter than 16 rows joins its predecessor:
    matrix products then give each row the same bits whatever the tile (DESIGN: what must stay
    true), so a tile may be as long as `tile_rows + 15`.
    """
    start = 0
    while start < num_rows:
        stop = start + tile_rows
        if num_rows - stop < 16:
            stop = num_rows
        yield slice(start, stop)
        start = stop
