"""Tokens of layers with a sliding window, which keep the last ones of each sequence.

They lie in order, in one piece. A window slides when a pass has no room after its tokens: those
that no later row sees are dropped, and the others move to the front. A sequence can be cut where
its window still has all that the next row sees, or where that was copied before it went.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from lowtide.core import align_up
from lowtide.errors import InternalError, PageError
from lowtide.memory.kv_pages import GRANULE_TOKENS, KVPages, WindowShape
from lowtide.memory.token_spans import Span, TokenSpans


@dataclass(eq=False, slots=True)
class Window(Span):
    """A sequence's place in layers of one window: its positions from `first` on."""

    first: int = 0  # a whole granule

    @property
    def stop(self) -> int:
        """End of the positions that may hold values."""
        return self.first + self.num_written


class WindowStore(TokenSpans[Window]):
    """Owns the windows of all sequences in layers that store tokens alike."""

    def __init__(self, shape: WindowShape, storage: Tensor, pages: KVPages | None = None) -> None:
        super().__init__((storage,), shape.storage.num_tokens, pages)
        self._shape = shape
        self._others_give_way: Callable[[], bool] = lambda: False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self._storage

    def join(self, gate: threading.RLock, give_way: Callable[[], bool]) -> None:
        """Belong to a cache, whose kept ranges give way where there is no memory."""
        self._gate, self._others_give_way = gate, give_way

    def capacity(self, num_tokens: int, first: int = 0) -> int:
        """Return the number of tokens that a sequence of `num_tokens` takes from `first` on."""
        num_after = max(1, num_tokens - first)  # a span without any would be in another's place
        return min(self._shape.cap, align_up(num_after, GRANULE_TOKENS))

    def first_needed(self, num_tokens: int) -> int:
        """Return the position from which tokens are needed to go on after `num_tokens`."""
        return self._shape.first_needed(num_tokens)

    def least_cut(self, window: Window) -> int:
        """Return the fewest tokens after which a sequence can go on; the most are `stop`."""
        return window.first and window.first + self._shape.window - 1

    def cut(self, window: Window, num_tokens: int, num_all: int) -> None:
        """Drop what is after `num_tokens` tokens, and room for more than `num_all` in all."""
        capacity = min(window.capacity, self.capacity(num_all, window.first))
        self.shrink(window, num_tokens - window.first, capacity)

    def begin_at(self, window: Window, num_tokens: int, num_all: int) -> None:
        """Let a new window begin where a sequence of `num_all` goes on after `num_tokens`."""
        window.first = self.first_needed(num_tokens)
        window.capacity = min(window.capacity, self.capacity(num_all, window.first))

    def num_without_room(self, window: Window, first: int, stop: int) -> int:
        """Return the number of tokens to drop before a pass over positions `first` to `stop`.

        Half of what could be dropped stays if the pass is short, so that a next turn that leaves a
        few tokens out can still go on there.
        """
        if stop - window.first <= window.capacity:
            return 0
        spare = (self._shape.cap - self._shape.window) // 2
        wanted = align_up(stop + spare - window.capacity, GRANULE_TOKENS)
        num_dropped = min(wanted, self.first_needed(first)) - window.first
        if stop - window.first - num_dropped > window.capacity:
            raise InternalError(
                f"Positions {first} to {stop} have no room in a window of {window.capacity} "
                f"tokens from {window.first} on."
            )
        return num_dropped

    def slide(self, window: Window, num_dropped: int) -> None:
        """Drop a window's first tokens."""
        with self._gate:
            capacity, num_left = window.capacity, window.num_written - num_dropped
            window.capacity = window.num_written = 0  # meanwhile, as in a move
            self._copy(window.start + num_dropped, window.start, num_left)
            window.first += num_dropped
            window.capacity, window.num_written = capacity, num_left

    def copied(self, window: Window, first: int, stop: int) -> Window:
        """Copy positions from `first` to `stop` into a window of their own.

        There must be as many unused tokens. Raises PageError.
        """
        copy = Window(0, self.capacity(stop, first), first=first)
        self.place(copy)
        try:
            self.commit_to(copy, copy.capacity)
        except PageError:
            self.remove(copy)
            raise
        copy.num_written = stop - first
        self.fill(copy, window)
        return copy

    def fill(self, window: Window, source: Window) -> None:
        """Copy all positions of a window from another that has them."""
        start = source.start + window.first - source.first
        self._copy(start, window.start, window.num_written)

    def _give_way(self) -> bool:
        return self._others_give_way()
