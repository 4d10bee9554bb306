"""Keys and values of running sequences, one contiguous token range for each sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowtide.core import align_up
from lowtide.errors import InternalError, PlanError
from lowtide.memory.kv_pages import KVPages
from lowtide.memory.workspace import Buffers

GRANULE_TOKENS = 16
"""Ranges start on such multiples, so that a sequence's place never changes an alignment."""

GROWTH_TOKENS = 256
"""A range's memory grows by so many tokens at a time, as far as it reaches."""


def storage_shape(
    num_layers: int, num_kv_heads: int, head_dim: int, num_tokens: int, num_arrays: int = 2
) -> tuple[int, int, int, int, int]:
    """[layers, arrays, kv_heads, tokens, head_dim] of a cache for `num_tokens` tokens.

    Two arrays hold keys and values; one holds keys that are also the values (a latent).
    """
    return (num_layers, num_arrays, num_kv_heads, align_up(num_tokens, GRANULE_TOKENS), head_dim)


@dataclass(eq=False, slots=True)
class KVRange:
    """Where a sequence's keys and values lie: tokens `start` to `start + capacity` of the cache.

    The cache moves it when it makes room, between passes: keep the range, not its numbers.
    """

    start: int
    capacity: int
    num_written: int = 0  # leading tokens that may hold something
    num_usable: int = 0  # leading tokens with memory behind them, where that comes and goes

    def part(self, index: int, num_parts: int) -> KVRange:
        """One of so many equal parts of a range whose memory is seen to, good for one pass: it
        does not follow the whole, and the whole does not hear of what is written to it."""
        capacity = self.capacity // num_parts
        return KVRange(self.start + index * capacity, capacity, num_usable=capacity)


class KVCache:
    """Owns the token ranges; does not know what a sequence is.

    `storage` is of a `storage_shape`, in the compute dtype. Only the part of a range that was
    written is ever touched, so that memory which is physical from its first use grows with the
    sequences. With `pages` that memory is asked for before it is used, and given back after. Where
    nothing is kept from pass to pass there is a `KVTurns` instead (`memory/kv_turns.py`).
    """

    def __init__(
        self, storage: Tensor, pages: KVPages | None = None, max_range_tokens: int | None = None
    ) -> None:
        """pages: what puts memory behind `storage`; without, it is all there for good.
        max_range_tokens: of one range, by default as many as there are."""
        self._storage = storage
        self._pages = pages
        # By layer: keys and values [kv_heads, tokens, head_dim]; each pass asks for all of them.
        self._arrays = [(layer[0], layer[-1]) for layer in storage]
        self.num_tokens = storage.shape[3]
        self.max_range_tokens = max_range_tokens or self.num_tokens
        self._taken: list[KVRange] = []  # ascending by start

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of keys and values, which is the compute dtype."""
        return self._storage.dtype

    def place(self, layer: int) -> int:
        """Which of the storage's layers has a model's layer."""
        return layer

    @property
    def num_free_tokens(self) -> int:
        return self.num_tokens - sum(taken.capacity for taken in self._taken)

    def can_allocate(self, num_tokens: int) -> bool:
        """Whether `allocate(num_tokens)` would succeed now."""
        capacity = align_up(num_tokens, GRANULE_TOKENS)
        return capacity <= min(self.num_free_tokens, self.max_range_tokens)

    def allocate(self, num_tokens: int) -> KVRange:
        """A free range of at least `num_tokens` tokens, first fit.

        Between passes only: where the free tokens are in pieces, other ranges move together.
        Raises PlanError when there are not as many, PageError where moving wants memory that
        it is not to be had.
        """
        if not self.can_allocate(num_tokens):
            raise PlanError(
                f"The KV cache has no room for {num_tokens} tokens: {self.num_free_tokens} of its "
                f"{self.num_tokens} are free, {self.max_range_tokens} for a sequence at most; wait "
                "for a sequence to end, or raise context."
            )
        capacity = align_up(num_tokens, GRANULE_TOKENS)
        start = self._find(capacity)
        kv_range = KVRange(self._compact() if start is None else start, capacity)
        self._taken.append(kv_range)
        self._taken.sort(key=lambda taken: taken.start)
        return kv_range

    def free(self, kv_range: KVRange) -> None:
        """Gives a range back; its contents are forgotten."""
        if kv_range not in self._taken:
            raise InternalError(f"{kv_range} was freed but is not taken.")
        self._taken.remove(kv_range)
        self._release_unused()

    def prepare(self, kv_range: KVRange, num_tokens: int) -> None:
        """Before a pass writes up to `num_tokens` tokens of a range: sees to their memory.

        Raises PageError, changing nothing, where it is not to be had.
        """
        if self._pages is None or num_tokens <= kv_range.num_usable:
            return
        num_usable = min(align_up(num_tokens, GROWTH_TOKENS), kv_range.capacity)
        self._pages.commit(kv_range.start, kv_range.start + num_usable)
        kv_range.num_usable = num_usable

    def of_pass(self, kv_range: KVRange, rows: slice, num_tokens: int) -> KVRange:
        """Where a pass, of which these rows are the range's, has its first `num_tokens` tokens."""
        self.prepare(kv_range, num_tokens)
        return kv_range

    def open_layer(self, num_rows: int, workspace: Buffers) -> None:
        """Before a layer of a pass of so many rows writes anything; until its scope ends."""

    def arrays(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """All keys and values of a layer, each [kv_heads, tokens, head_dim], which stay where they
        are; None where nothing is kept."""
        return self._arrays[layer]

    def claim(self, kv_range: KVRange, position: int, num_rows: int) -> int:
        """Where rows from `position` on are to be written: the first one's token of the cache."""
        if position + num_rows > kv_range.capacity:
            raise InternalError(
                f"{num_rows} rows from position {position} on leave a KV range of "
                f"{kv_range.capacity} tokens."
            )
        if self._pages is not None and position + num_rows > kv_range.num_usable:
            raise InternalError(
                f"{num_rows} rows from position {position} on have memory for "
                f"{kv_range.num_usable} tokens: `prepare` comes first."
            )
        kv_range.num_written = max(kv_range.num_written, position + num_rows)
        return kv_range.start + position

    def write(
        self, layer: int, kv_range: KVRange, position: int, key: Tensor, value: Tensor
    ) -> None:
        """Stores rows of keys and values, each [rows, kv_heads, head_dim], from `position` on.

        A cache of one array stores the keys only.
        """
        num_rows = key.shape[0]
        start = self.claim(kv_range, position, num_rows)
        keys, values = self._arrays[layer]
        keys.narrow(1, start, num_rows).copy_(key.transpose(0, 1))
        if self._storage.shape[1] == 2:
            values.narrow(1, start, num_rows).copy_(value.transpose(0, 1))

    def read(self, layer: int, kv_range: KVRange, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Views of the first `num_tokens` keys and values, each [kv_heads, tokens, head_dim]."""
        keys, values = self._arrays[layer]
        start = kv_range.start
        return keys.narrow(1, start, num_tokens), values.narrow(1, start, num_tokens)

    def _find(self, capacity: int) -> int | None:
        start = 0
        for taken in self._taken:
            if taken.start - start >= capacity:
                return start
            start = taken.start + taken.capacity
        return start if self.num_tokens - start >= capacity else None

    def _compact(self) -> int:
        """Moves all ranges together at the front; returns where they end."""
        end = 0
        for taken in self._taken:
            if taken.start > end:
                self._move(taken, end)
            end += taken.capacity
        self._release_unused()
        return end

    def _release_unused(self) -> None:
        """Gives back all memory that no range counts on."""
        if self._pages is None:
            return
        end = 0
        for taken in self._taken:
            self._pages.release(end, taken.start)
            end = taken.start + taken.num_usable
        self._pages.release(end, self.num_tokens)

    def _move(self, kv_range: KVRange, start: int) -> None:
        """Moves a range and what is written in it down to `start`."""
        capacity, num_written = kv_range.capacity, kv_range.num_written
        if self._pages is not None:
            self._pages.commit(start, start + kv_range.num_usable)
        # Empty meanwhile: were Ctrl-C to come between two pieces, the owner's next write would be
        # refused instead of joining halves.
        kv_range.capacity = kv_range.num_written = 0
        old, distance = kv_range.start, kv_range.start - start
        # A piece may be as long as the distance: then no copy overlaps its source.
        for first in range(0, num_written, distance):
            length = min(distance, num_written - first)
            source = self._storage.narrow(3, old + first, length)
            self._storage.narrow(3, start + first, length).copy_(source)
        kv_range.start, kv_range.capacity, kv_range.num_written = start, capacity, num_written
        if self._pages is not None:
            left = max(old, start + kv_range.num_usable)
            self._pages.release(left, old + kv_range.num_usable)
