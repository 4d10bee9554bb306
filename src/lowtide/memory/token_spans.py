"""Keys and values of layers that keep the same tokens: one contiguous span for each sequence."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from lowtide.errors import InternalError, PageError
from lowtide.memory.kv_pages import KVPages


@dataclass(eq=False, slots=True)
class Span:
    """A sequence's place in tensors of tokens: `start` to `start + capacity`.

    These numbers change when spans are moved between passes: keep the span, not its numbers.
    """

    start: int
    capacity: int
    num_written: int = 0  # leading tokens that may hold values
    num_usable: int = 0  # leading tokens with committed memory, if it comes in pages


S = TypeVar("S", bound=Span)


class TokenSpans(Generic[S]):
    """Owns the spans of some tensors; does not know what a sequence is, nor which are kept.

    Only written tokens are ever touched, so that memory which becomes physical on first use grows
    with the sequences. With `pages` memory is committed before use, and released.
    """

    def __init__(
        self, storage: Sequence[Tensor], num_tokens: int, pages: KVPages | None = None
    ) -> None:
        """storage: tensors [layers, arrays, kv_heads, tokens, width] of `num_tokens` tokens.

        pages: provides their memory; by default all of it is there.
        """
        self._storage = tuple(storage)
        self.pages = pages
        self.num_tokens = num_tokens
        self.token_bytes = sum(x[:, :, :, :1].numel() * x.element_size() for x in self._storage)
        self._taken: list[S] = []  # ascending by start
        self._gate = threading.RLock()  # held while spans are moved, dropped or copied

    @property
    def num_unused_tokens(self) -> int:
        return self.num_tokens - sum(taken.capacity for taken in self._taken)

    def rows(self, span: S, first: int, num_tokens: int) -> list[NDArray[Any]]:
        """Return host memory of tokens of a span, one array of integers for each tensor.

        They are [layers, arrays, kv_heads, tokens, width], of the dtype's size, and may be written
        in a span that no pass has seen.
        """
        wanted = (tensor.narrow(3, span.start + first, num_tokens) for tensor in self._storage)
        return [x.view(getattr(torch, f"int{8 * x.element_size()}")).numpy() for x in wanted]

    def place(self, span: S) -> None:
        """Give a new span its start: the first fit, or after all others once they have moved.

        There must be as many unused tokens. Raises PageError if a move finds no memory.
        """
        start = self._find(span.capacity)
        span.start = self._compact() if start is None else start
        self._taken.append(span)
        self._taken.sort(key=lambda taken: taken.start)

    def remove(self, span: S) -> None:
        """Give a span's tokens back, and their memory."""
        self._taken.remove(span)
        self.release_unused()

    def widen(self, span: S, num_more: int) -> None:
        """Extend a span by unused tokens, which there must be. Raises as `place`."""
        if num_more and num_more > self._gap_after(span):
            self._part_after(span)
        span.capacity += num_more

    def shrink(self, span: S, num_written: int, capacity: int) -> None:
        """Keep only the first tokens of a span; `release_unused` gives the rest back."""
        span.num_written, span.capacity = num_written, capacity
        span.num_usable = min(span.num_usable, capacity)

    def claim_rows(self, span: S, position: int, num_rows: int) -> int:
        """Mark rows from `position` on as written; return the token of the first."""
        stop = position + num_rows
        if stop > span.capacity:
            raise InternalError(
                f"{num_rows} rows from position {position} on leave a KV range of "
                f"{span.capacity} tokens."
            )
        if self.pages is not None and stop > span.num_usable:
            raise InternalError(
                f"{num_rows} rows from position {position} on have memory for "
                f"{span.num_usable} tokens: `prepare` comes first."
            )
        span.num_written = max(span.num_written, stop)
        return span.start + position

    def commit_to(self, span: S, num_usable: int) -> None:
        """Provide memory for the first `num_usable` tokens of a span. Raises PageError."""
        if self.pages is not None and num_usable > span.num_usable:
            self._commit(span.start, span.start + num_usable)
            span.num_usable = num_usable

    def release_unused(self) -> None:
        """Release all memory that no span uses."""
        if self.pages is None:
            return
        end = 0
        for taken in self._taken:
            self.pages.release(end, taken.start)
            end = taken.start + taken.num_usable
        self.pages.release(end, self.num_tokens)

    def _copy(self, source: int, target: int, num_tokens: int) -> None:
        """Copy tokens of all layers to a place that may overlap the source."""
        # A piece may be as long as the distance: then no copy overlaps its source.
        distance = abs(target - source)
        firsts = range(0, num_tokens, distance or 1)
        for first in firsts if target < source else reversed(firsts):
            length = min(distance, num_tokens - first)
            for tensor in self._storage:
                piece = tensor.narrow(3, source + first, length)
                tensor.narrow(3, target + first, length).copy_(piece)

    def _give_way(self) -> bool:
        """Free a span whose memory others need; return False if there is none."""
        return False

    def _find(self, capacity: int) -> int | None:
        start = 0
        for taken in self._taken:
            if taken.start - start >= capacity:
                return start
            start = taken.start + taken.capacity
        return start if self.num_tokens - start >= capacity else None

    def _gap_after(self, span: S) -> int:
        """Return the unused tokens between a span and the next."""
        starts = [*(taken.start for taken in self._taken), self.num_tokens]
        return starts[self._taken.index(span) + 1] - (span.start + span.capacity)

    def _part_after(self, span: S) -> None:
        """Move a span and all before it to the front, all after it to the end."""
        index = self._taken.index(span) + 1
        after = self._taken[index:]  # before kept ranges give way, where moving wants memory
        self._compact(index)
        start = self.num_tokens
        for taken in reversed(after):
            start -= taken.capacity
            self._move(taken, start)
        self.release_unused()

    def _compact(self, count: int | None = None) -> int:
        """Move the first `count` spans (by default all) to the front; return where they end."""
        end = 0
        for taken in self._taken[:count]:
            self._move(taken, end)
            end += taken.capacity
        self.release_unused()
        return end

    def _move(self, span: S, start: int) -> None:
        """Move a span and its written tokens to `start`."""
        before = replace(span)
        if start == before.start or span not in self._taken:
            return
        self._commit(start, start + before.num_usable)
        if span not in self._taken:  # it has given way itself
            return
        with self._gate:
            # Empty meanwhile: after Ctrl-C between two pieces the owner's next write is refused.
            span.capacity = span.num_written = span.num_usable = 0
            self._copy(before.start, start, before.num_written)
            span.start, span.capacity = start, before.capacity
            span.num_written, span.num_usable = before.num_written, before.num_usable
            self.release_unused()

    def _commit(self, start: int, stop: int) -> None:
        """Commit memory of tokens; spans give way if there is none."""
        while self.pages is not None:
            try:
                return self.pages.commit(start, stop)
            except PageError:
                if not self._give_way():
                    self.release_unused()  # what one of several tensors has got
                    raise
