"""Ranges of memory that tensors lie over, on huge pages where they pay.

The pages under a buffer decide what a disk read into it costs: huge pages reach two to three
times the speed of 4 KiB pages (docs/log.md). An `Arena` has all its memory for good; an
`ElasticArena` takes and gives back parts of it while its addresses, and tensors over them, stay.
Knows nothing of what is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowtide.core import BoolArray
from lowtide.errors import InternalError, PageError
from lowtide.memory.host_pages import HUGE_PAGE_BYTES, HostMapping
from lowtide.memory.pages import PageAccount

__all__ = ["HUGE_PAGE_BYTES", "Arena", "ElasticArena", "Pages", "Region", "Span"]

Span = tuple[int, int]
"""Bytes of an arena, from the first to before the second."""


class Region:
    """Tensors and arrays over a range of bytes, without copies."""

    def __init__(self, memory: Tensor) -> None:
        """memory: uint8, of one dimension."""
        self.bytes = memory
        self.num_bytes = memory.numel()

    def array(self) -> NDArray[np.uint8]:
        """The whole range, of host memory, as a numpy array of bytes (shared, not copied)."""
        array: NDArray[np.uint8] = self.bytes.numpy()
        return array

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor of `shape` and `dtype` over the bytes from `offset`."""
        num_bytes = dtype.itemsize
        for size in shape:
            num_bytes *= size
        return self.bytes[offset : offset + num_bytes].view(dtype).view(shape)


class Arena(Region):
    """`num_bytes` of zeroed host memory, starting on a huge-page boundary.

    Pages become physical when they are first touched: with `grows_slowly` small ones, for what is
    filled in many places a little at a time. The memory lives until the last tensor or array over
    it is gone. Raises PlanError where the system refuses it.
    """

    def __init__(self, num_bytes: int, grows_slowly: bool = False) -> None:
        mapping = HostMapping(num_bytes, has_huge_pages=not grows_slowly, is_promised=True)
        super().__init__(mapping.bytes)


class Pages(Protocol):
    """Reserved addresses, and memory that is put behind them and taken away in whole groups.

    On the host `HostPages`, on a GPU `CudaPages`. Keeps no account of its groups: that is
    `ElasticArena`'s.
    """

    group_bytes: int
    num_bytes: int  # whole groups
    bytes: Tensor  # uint8; only what is committed may be used

    def commit(self, start: int, stop: int) -> None:
        """Puts memory behind bytes `start` to `stop`, groups that have none.

        Raises PageError when the system refuses; then none of them has any.
        """
        ...

    def release(self, start: int, stop: int) -> None:
        """Gives back the memory behind bytes `start` to `stop`, groups that have some; nothing
        uses it any more."""
        ...

    def close(self) -> None:
        """Gives back everything."""
        ...


class ElasticArena(Region):
    """A range of addresses whose memory grows and shrinks on account of a budget.

    What is asked for is rounded to whole groups: outwards when they are committed, inwards when
    they are released, so that neighbours may share one.
    """

    def __init__(
        self,
        pages: Pages,
        account: PageAccount,
        free_bytes: Callable[[], int] | None = None,
    ) -> None:
        """free_bytes: memory that the system has for this process now, asked before any is taken:
        who takes more of the host's than a control group's limit is killed, not refused."""
        super().__init__(pages.bytes)
        self.group_bytes = pages.group_bytes
        self._pages = pages
        self._account = account
        self._free_bytes = free_bytes
        self._is_committed: BoolArray = np.zeros(pages.num_bytes // pages.group_bytes, np.bool_)

    @property
    def committed_bytes(self) -> int:
        """Memory that it has now."""
        return int(np.count_nonzero(self._is_committed)) * self.group_bytes

    def missing_bytes(self, *spans: Span) -> int:
        """What `commit` would draw: nothing where all of the spans can be used."""
        is_missing = self._covering(spans) & ~self._is_committed
        return int(np.count_nonzero(is_missing)) * self.group_bytes

    def commit(self, *spans: Span) -> None:
        """Makes bytes usable: all of the spans, or none that was not before.

        Raises PageError when the budget or the system refuses, with the numbers.
        """
        is_missing = self._covering(spans) & ~self._is_committed
        missing_bytes = int(np.count_nonzero(is_missing)) * self.group_bytes
        self._account.draw(missing_bytes)
        done: list[slice] = []
        try:
            self._check_free(missing_bytes)
            for run in _runs(is_missing):
                self._pages.commit(run.start * self.group_bytes, run.stop * self.group_bytes)
                done.append(run)
        except BaseException:
            for run in done:
                self._pages.release(run.start * self.group_bytes, run.stop * self.group_bytes)
            self._account.give_back(missing_bytes)
            raise
        self._is_committed |= is_missing

    def release(self, *spans: Span) -> int:
        """Gives back the groups that lie within one of the spans; returns their bytes.

        Nothing may use them any more, now or later: reads into them have ended, and so has queued
        work.
        """
        is_freed = self._within(spans) & self._is_committed
        for run in _runs(is_freed):
            self._pages.release(run.start * self.group_bytes, run.stop * self.group_bytes)
            self._is_committed[run] = False
            self._account.give_back((run.stop - run.start) * self.group_bytes)
        return int(np.count_nonzero(is_freed)) * self.group_bytes

    def close(self) -> None:
        """Gives back everything; nothing may use it any more."""
        self.release((0, self.num_bytes))
        self._pages.close()

    def _check_free(self, num_bytes: int) -> None:
        num_free = None if self._free_bytes is None or not num_bytes else self._free_bytes()
        if num_free is not None and num_bytes > num_free:
            raise PageError(
                f"{self._account.owner} wants {num_bytes} bytes more, and the system has "
                f"{num_free} for this process. Free memory that other programs hold, or lower "
                "the memory budget."
            )

    def _covering(self, spans: Iterable[Span]) -> BoolArray:
        """The groups that some byte of the spans lies in."""
        groups = np.zeros_like(self._is_committed)
        for start, stop in spans:
            self._check_inside(start, stop)
            if start < stop:
                groups[start // self.group_bytes : -(-stop // self.group_bytes)] = True
        return groups

    def _within(self, spans: Iterable[Span]) -> BoolArray:
        """The groups all of whose bytes lie in one span."""
        groups = np.zeros_like(self._is_committed)
        for start, stop in spans:
            self._check_inside(start, stop)
            groups[-(-start // self.group_bytes) : stop // self.group_bytes] = True
        return groups

    def _check_inside(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.num_bytes:
            raise InternalError(f"Bytes {start} to {stop} are not of {self.num_bytes}.")


def _runs(is_wanted: BoolArray) -> Iterator[slice]:
    """Neighbouring groups that are wanted, as few slices."""
    edges = np.flatnonzero(np.diff(is_wanted, prepend=False, append=False))
    for start, stop in edges.reshape(-1, 2).tolist():
        yield slice(start, stop)
