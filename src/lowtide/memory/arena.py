"""Memory ranges for tensors, on huge pages where they pay.

The pages under a buffer decide the cost of disk reads into it: huge pages reach two to three times
the speed of 4 KiB pages (docs/log). An `Arena` keeps all its memory; a `PagedArena` acquires and
releases parts of it while its addresses, and tensors over them, stay. Knows nothing of its
contents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowtide.core import BoolArray
from lowtide.errors import InternalError, PageError
from lowtide.memory.host_pages import HUGE_PAGE_BYTES, HostMapping, HostPages
from lowtide.memory.pages import PageAccount

__all__ = ["HUGE_PAGE_BYTES", "Arena", "PagedArena", "Region"]

Span = tuple[int, int]
"""Start and end of a byte range."""


class Region:
    """Tensors and arrays over a byte range, without copies."""

    def __init__(self, memory: Tensor) -> None:
        """memory: uint8, of one dimension."""
        self.bytes = memory
        self.num_bytes = memory.numel()

    def array(self) -> NDArray[np.uint8]:
        """Return the whole range of host memory as a numpy array of bytes (shared, not copied)."""
        array: NDArray[np.uint8] = self.bytes.numpy()
        return array

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor over the bytes from `offset`."""
        num_bytes = math.prod(shape) * dtype.itemsize
        return self.bytes[offset : offset + num_bytes].view(dtype).view(shape)


class Arena(Region):
    """`num_bytes` of zeroed host memory, starting on a huge-page boundary.

    Pages become physical when first touched: small ones with `grows_slowly`, for memory filled in
    many places a little at a time. The memory lives until the last tensor or array over it is gone.
    Raises PlanError if the system refuses it.
    """

    def __init__(self, num_bytes: int, grows_slowly: bool = False) -> None:
        mapping = HostMapping(num_bytes, has_huge_pages=not grows_slowly, is_promised=True)
        super().__init__(mapping.bytes)


class PagedArena(Region):
    """Address range whose memory grows and shrinks on account of a budget.

    It may have several equal parts, whose bytes are committed and released alike: bytes `start` to
    `stop` mean those of every part. Sizes are rounded to whole groups, outwards for a commit and
    inwards for a release, so that neighbours may share a group.
    """

    def __init__(
        self,
        pages: HostPages,
        account: PageAccount,
        num_parts: int = 1,
        free_bytes: Callable[[], int] | None = None,
    ) -> None:
        """free_bytes: returns the memory that the system has for this process now.

        It is called before each commit: a process that exceeds a control group's limit is killed,
        not refused.
        """
        super().__init__(pages.bytes)
        self.group_bytes = pages.group_bytes
        self.num_parts = num_parts
        self.part_bytes = pages.num_bytes // num_parts
        self._pages = pages
        self.account = account
        self.free_bytes = free_bytes
        num_groups = self.part_bytes // pages.group_bytes
        self._is_committed: BoolArray = np.zeros(num_groups, np.bool_)  # of each part

    @property
    def committed_bytes(self) -> int:
        """Memory committed now."""
        return self._num_bytes(self._is_committed)

    def missing_bytes(self, start: int, stop: int) -> int:
        """Return the bytes that `commit` would draw; 0 if all are usable."""
        return self._num_bytes(self._missing(start, stop))

    def commit(self, start: int, stop: int) -> None:
        """Make bytes `start` to `stop` usable, all of them or none.

        If the budget or the system lacks memory, other owners are asked once to release some.
        Raises PageError, with the numbers, if that is not enough.
        """
        is_missing = self._missing(start, stop)
        missing_bytes = self._num_bytes(is_missing)
        if not missing_bytes:
            return
        self.account.draw(missing_bytes)
        try:
            self._take_or_ask(is_missing)
        except BaseException:
            self.account.give_back(missing_bytes)
            raise
        self._is_committed |= is_missing

    def release(self, start: int, stop: int) -> int:
        """Release the groups that lie within bytes `start` to `stop`; return their bytes.

        They must be unused from now on: reads into them and queued work have ended.
        """
        self._check_inside(start, stop)
        is_freed = np.zeros_like(self._is_committed)
        is_freed[-(-start // self.group_bytes) : stop // self.group_bytes] = True
        is_freed &= self._is_committed
        for span in self._spans(is_freed):
            self._pages.release(*span)
        self._is_committed &= ~is_freed
        freed_bytes = self._num_bytes(is_freed)
        self.account.give_back(freed_bytes)
        return freed_bytes

    def close(self) -> None:
        """Release everything; the arena must not be used afterwards."""
        self.release(0, self.part_bytes)
        self._pages.close()

    def _take_or_ask(self, groups: BoolArray) -> None:
        """Commit groups; if the system refuses, ask other owners once and try again.

        Another process may have taken memory that the budget promises.
        """
        try:
            self._take(groups)
        except PageError:
            if not self.account.budget.ask(self._num_bytes(groups), self.account):
                raise
            self._take(groups)

    def _take(self, groups: BoolArray) -> None:
        self._check_free(self._num_bytes(groups))
        done: list[Span] = []
        try:
            for span in self._spans(groups):
                self._pages.commit(*span)
                done.append(span)
        except BaseException:
            for span in done:
                self._pages.release(*span)
            raise

    def _check_free(self, num_bytes: int) -> None:
        num_free = None if self.free_bytes is None else self.free_bytes()
        if num_free is not None and num_bytes > num_free:
            raise PageError(
                f"{self.account.owner} wants {num_bytes} bytes more, and the system has "
                f"{num_free} for this process. Free memory that other programs hold, or lower "
                "the memory budget."
            )

    def _missing(self, start: int, stop: int) -> BoolArray:
        """Return the groups of a part that overlap the range and have no memory."""
        self._check_inside(start, stop)
        is_missing = np.zeros_like(self._is_committed)
        if start < stop:
            is_missing[start // self.group_bytes : -(-stop // self.group_bytes)] = True
        return is_missing & ~self._is_committed

    def _num_bytes(self, groups: BoolArray) -> int:
        return int(np.count_nonzero(groups)) * self.num_parts * self.group_bytes

    def _spans(self, groups: BoolArray) -> Iterator[Span]:
        """Yield the byte spans of groups in all parts, merging adjacent ones."""
        edges = np.flatnonzero(np.diff(groups, prepend=False, append=False)) * self.group_bytes
        for first in range(0, self.num_parts * self.part_bytes, self.part_bytes or 1):
            for start, stop in edges.reshape(-1, 2).tolist():
                yield first + start, first + stop

    def _check_inside(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.part_bytes:
            raise InternalError(f"Bytes {start} to {stop} are not of {self.part_bytes}.")
