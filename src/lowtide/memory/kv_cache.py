"""Keys and values of running sequences, one contiguous token range for each sequence."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from lowtide.core import align_up
from lowtide.errors import InternalError, PageError, PlanError
from lowtide.memory.kept_rule import KeptRule
from lowtide.memory.kv_pages import KVPages, StorageShape
from lowtide.memory.workspace import Buffers

GRANULE_TOKENS = 16
"""Ranges start on such multiples, so that a sequence's place never changes an alignment."""

GROWTH_TOKENS = 256
"""A range's memory grows by so many tokens at a time, as far as it reaches."""


def storage_shape(
    num_layers: int, num_kv_heads: int, head_dim: int, num_tokens: int, num_arrays: int = 2
) -> StorageShape:
    """The shape of a cache for `num_tokens` tokens."""
    num_tokens = align_up(num_tokens, GRANULE_TOKENS)
    return StorageShape(num_layers, num_arrays, num_kv_heads, num_tokens, head_dim)


@dataclass(eq=False, slots=True)
class KVRange:
    """Where a sequence's keys and values lie: tokens `start` to `start + capacity` of the cache,
    which moves it when it makes room, between passes: keep the range, not its numbers.
    """

    start: int
    capacity: int
    num_written: int = 0  # leading tokens that may hold something
    num_usable: int = 0  # leading tokens with memory behind them, where that comes and goes
    num_kept: int = 0  # times that it was kept
    num_stored: int = 0  # of these, the last that a file has all of: its writer says so
    is_mixed: bool = False  # written under two policies, of which one changes words

    def part(self, index: int, num_parts: int) -> KVRange:
        """One of so many equal parts of a range whose memory is seen to, good for one pass: it
        does not follow the whole, and the whole does not hear of what is written to it.
        """
        capacity = self.capacity // num_parts
        return KVRange(self.start + index * capacity, capacity, num_usable=capacity)


class KVCache:
    """Owns the token ranges; does not know what a sequence is.

    `storage` is of a `storage_shape`, in the compute dtype. Only what was written of a range is
    ever touched, so that memory which is physical from its first use grows with the sequences. With
    `pages` it is asked for before it is used, and given back. See `memory/kv_turns.py`, too.
    """

    def __init__(
        self,
        storage: Tensor,
        pages: KVPages | None = None,
        max_range_tokens: int | None = None,
        rule: KeptRule | None = None,
    ) -> None:
        """pages: what puts memory behind `storage`; without, it is all there for good.
        max_range_tokens: of one range, by default as many as there are. rule: for `apply_rule`.
        """
        self._storage = storage
        self._pages = pages
        # By layer: keys and values [kv_heads, tokens, head_dim]; each pass asks for all of them.
        self._arrays = [(layer[0], layer[-1]) for layer in storage]
        self.num_tokens = storage.shape[3]
        self.max_range_tokens = max_range_tokens or self.num_tokens
        self._rule = rule or KeptRule()
        self._taken: list[KVRange] = []  # ascending by start, kept ones included
        self._kept: list[KVRange] = []  # the one that goes first in front
        self._gate = threading.RLock()  # while kept ranges move or go, or are copied from

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of keys and values, which is the compute dtype."""
        return self._storage.dtype

    def place(self, layer: int) -> int:
        """Which of the storage's layers has a model's layer."""
        return layer

    @property
    def num_free_tokens(self) -> int:
        """Tokens that can be had: no range's, or a kept one's."""
        return self._num_unused_tokens + sum(kept.capacity for kept in self._kept)

    @property
    def is_unused(self) -> bool:
        """Whether all ranges are kept ones."""
        return len(self._taken) == len(self._kept)

    def can_allocate(self, num_tokens: int) -> bool:
        """Whether `allocate(num_tokens)` would succeed now."""
        capacity = align_up(num_tokens, GRANULE_TOKENS)
        return capacity <= min(self.num_free_tokens, self.max_range_tokens)

    def allocate(self, num_tokens: int) -> KVRange:
        """A free range of at least `num_tokens` tokens, first fit; kept ranges give way to it,
        oldest first.

        Between passes only: where the free tokens are in pieces, other ranges move together.
        Raises PlanError when there are not as many, PageError where moving finds no memory.
        """
        if not self.can_allocate(num_tokens):
            raise self._refusal(num_tokens)
        capacity = align_up(num_tokens, GRANULE_TOKENS)
        self._drop_until_unused(capacity)
        start = self._find(capacity)
        kv_range = KVRange(self._compact() if start is None else start, capacity)
        self._taken.append(kv_range)
        self._taken.sort(key=lambda taken: taken.start)
        return kv_range

    def free(self, kv_range: KVRange) -> None:
        """Gives a range back; its contents are forgotten."""
        if kv_range not in self._taken:
            raise InternalError(f"{kv_range} was freed but is not taken.")
        with self._gate:
            self._taken.remove(kv_range)
            if kv_range in self._kept:
                self._kept.remove(kv_range)
                self._rule.ended(kv_range, is_continued=False)
            self._release_unused()

    def keep(self, kv_range: KVRange, num_tokens: int) -> None:
        """Instead of `free`: the first `num_tokens` tokens of a range stay until others need the
        room (`is_kept` says whether they are still there); the rest is given back.
        """
        kv_range.num_written = num_tokens
        kv_range.capacity = align_up(num_tokens, GRANULE_TOKENS)
        kv_range.num_usable = min(kv_range.num_usable, kv_range.capacity)
        kv_range.num_kept += 1
        self._kept.append(kv_range)
        self._rule.kept(kv_range)
        self._release_unused()
        self.apply_rule()

    def is_kept(self, kv_range: KVRange) -> bool:
        with self._gate:  # while one is copied from it is not among them
            return kv_range in self._kept

    def resume(self, kv_range: KVRange, num_tokens: int, capacity: int) -> None:
        """A kept range is a sequence's again, of at least `capacity` tokens, of which the first
        `num_tokens` stay as they are: in place, where those behind it leave room.

        Raises as `allocate`; the range is kept then.
        """
        if not self.can_allocate(capacity):
            raise self._refusal(capacity)
        with self._gate:
            self._kept.remove(kv_range)
        try:
            self.grow(kv_range, capacity)
        except BaseException:
            self._kept.append(kv_range)
            raise
        self._rule.ended(kv_range, is_continued=True)
        kv_range.num_written = num_tokens
        kv_range.capacity = align_up(capacity, GRANULE_TOKENS)
        kv_range.num_usable = min(kv_range.num_usable, kv_range.capacity)

    def grow(self, kv_range: KVRange, num_tokens: int) -> bool:
        """Gives a range room for `num_tokens` tokens, in place where those behind it leave some;
        kept ranges give way, oldest first. Whether there was as much: else nothing changes.

        Between passes only. Raises PageError where moving others finds no memory.
        """
        num_more = align_up(num_tokens, GRANULE_TOKENS) - kv_range.capacity
        if num_more <= 0:
            return True
        if num_more > self.num_free_tokens:
            return False
        self._drop_until_unused(num_more)
        if num_more > self._gap_behind(kv_range):
            self._part_behind(kv_range)
        kv_range.capacity += num_more
        return True

    def can_branch(self, kv_range: KVRange, capacity: int) -> bool:
        """Whether `branch` would find room."""
        room = self.num_free_tokens - (kv_range.capacity if self.is_kept(kv_range) else 0)
        return align_up(capacity, GRANULE_TOKENS) <= min(room, self.max_range_tokens)

    def branch(self, kv_range: KVRange, num_tokens: int, capacity: int) -> KVRange:
        """A new range of at least `capacity` tokens, the first `num_tokens` of them copied from
        another, which stays: a kept one counts as used now. Raises as `allocate`.
        """
        is_kept, made = kv_range in self._kept, None
        with self._gate:  # another thread still finds it kept
            if is_kept:
                self._kept.remove(kv_range)  # it does not give way meanwhile
            try:
                made = self.allocate(capacity)
                self.prepare(made, num_tokens)
                self._copy(kv_range.start, self.claim(made, 0, num_tokens), num_tokens)
            except BaseException:
                if made is not None:
                    self.free(made)
                raise
            finally:
                if is_kept:
                    self._kept.append(kv_range)
            if is_kept:
                self._rule.copied(kv_range)
                self.apply_rule()  # what was copied can give way again
        return made

    def copy_kept(self, kv_range: KVRange, num_kept: int, first: int, target: NDArray[Any]) -> bool:
        """On any thread: copies tokens from `first` on of a range that is kept for the
        `num_kept`th time into `target` [layers, arrays, kv_heads, tokens, head_dim], integers of
        the dtype's size, in host memory. False, and nothing copied, where it has gone.
        """
        with self._gate:
            is_there = self.is_kept(kv_range) and kv_range.num_kept == num_kept
            if is_there:
                target[...] = self.rows(kv_range, first, target.shape[3])
            return is_there

    def rows(self, kv_range: KVRange, first: int, num_tokens: int) -> NDArray[Any]:
        """Host memory of tokens from `first` on, as `copy_kept` copies it: to be written in a range
        that no pass has seen, before `claim`.
        """
        integers: torch.dtype = getattr(torch, f"int{8 * self.dtype.itemsize}")
        wanted = self._storage.narrow(3, kv_range.start + first, num_tokens)
        rows: NDArray[Any] = wanted.view(integers).numpy()
        return rows

    def give_way(self, num_bytes: int) -> None:
        """Kept ranges go, oldest first, until their pages have given so many bytes back."""
        if self._pages is None:
            return
        left_bytes = self._pages.arena.committed_bytes - num_bytes
        while self._kept and self._pages.arena.committed_bytes > left_bytes:
            self.free(self._kept[0])

    def apply_rule(self, num_more: int = 0) -> None:
        """Kept ranges give way, oldest first, while the rule says so of so many tokens more."""
        num_tokens = num_more + sum(taken.num_usable for taken in self._taken)
        while self._kept and self._rule.gives_way(self._kept[0], num_tokens):
            num_tokens -= self._kept[0].num_usable
            self.free(self._kept[0])

    def prepare(self, kv_range: KVRange, num_tokens: int) -> None:
        """Before a pass writes up to `num_tokens` tokens of a range: sees to their memory.

        Raises PageError, changing nothing but kept ranges, where it is not to be had.
        """
        if self._pages is None or num_tokens <= kv_range.num_usable:
            return
        num_usable = min(align_up(num_tokens, GROWTH_TOKENS), kv_range.capacity)
        self.apply_rule(num_usable - kv_range.num_usable)
        self._commit(kv_range.start, kv_range.start + num_usable)
        kv_range.num_usable = num_usable

    def of_pass(self, kv_range: KVRange, rows: slice, num_tokens: int) -> KVRange:
        """Where a pass, of which these rows are the range's, has its first `num_tokens` tokens."""
        self.prepare(kv_range, num_tokens)
        return kv_range

    def open_layer(self, num_rows: int, workspace: Buffers) -> None:
        """Before a layer of a pass of so many rows writes anything; until its scope ends."""

    def arrays(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """All keys and values of a layer, each [kv_heads, tokens, head_dim], which stay where they
        are; None where nothing is kept.
        """
        return self._arrays[layer]

    def claim(self, kv_range: KVRange, position: int, num_rows: int) -> int:
        """Where rows from `position` on are to be written: the first one's token of the cache."""
        stop, rows = position + num_rows, f"{num_rows} rows from position {position} on"
        if stop > kv_range.capacity:
            raise InternalError(f"{rows} leave a KV range of {kv_range.capacity} tokens.")
        if self._pages is not None and stop > kv_range.num_usable:
            told = f"{rows} have memory for {kv_range.num_usable} tokens"
            raise InternalError(f"{told}: `prepare` comes first.")
        kv_range.num_written = max(kv_range.num_written, stop)
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

    @property
    def _num_unused_tokens(self) -> int:
        return self.num_tokens - sum(taken.capacity for taken in self._taken)

    def _refusal(self, num_tokens: int) -> PlanError:
        return PlanError(
            f"The KV cache has no room for {num_tokens} tokens: {self.num_free_tokens} of its "
            f"{self.num_tokens} are free, {self.max_range_tokens} for a sequence at most; wait "
            "for a sequence to end, or raise context."
        )

    def _drop_until_unused(self, num_tokens: int) -> None:
        """Kept ranges give way, oldest first, until so many tokens are no range's."""
        while self._kept and self._num_unused_tokens < num_tokens:
            self.free(self._kept[0])

    def _find(self, capacity: int) -> int | None:
        start = 0
        for taken in self._taken:
            if taken.start - start >= capacity:
                return start
            start = taken.start + taken.capacity
        return start if self.num_tokens - start >= capacity else None

    def _gap_behind(self, kv_range: KVRange) -> int:
        """Unused tokens between a range and the next."""
        starts = [*(taken.start for taken in self._taken), self.num_tokens]
        return starts[self._taken.index(kv_range) + 1] - (kv_range.start + kv_range.capacity)

    def _part_behind(self, kv_range: KVRange) -> None:
        """Moves a range and all before it to the front, all behind it to the end."""
        index = self._taken.index(kv_range) + 1
        behind = self._taken[index:]  # before kept ranges give way, where moving wants memory
        self._compact(index)
        start = self.num_tokens
        for taken in reversed(behind):
            start -= taken.capacity
            self._move(taken, start)
        self._release_unused()

    def _compact(self, count: int | None = None) -> int:
        """Moves the first `count` ranges, by default all, together at the front; returns where
        they end.
        """
        end = 0
        for taken in self._taken[:count]:
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
        """Moves a range and what is written in it to `start`, before or behind where it is."""
        before = replace(kv_range)
        if start == before.start or kv_range not in self._taken:
            return
        self._commit(start, start + before.num_usable)
        if kv_range not in self._taken:  # it has given way itself
            return
        with self._gate:
            # Empty meanwhile: after Ctrl-C between two pieces the owner's next write is refused.
            kv_range.capacity = kv_range.num_written = kv_range.num_usable = 0
            self._copy(before.start, start, before.num_written)
            kv_range.start, kv_range.capacity = start, before.capacity
            kv_range.num_written, kv_range.num_usable = before.num_written, before.num_usable
            self._release_unused()

    def _copy(self, source: int, target: int, num_tokens: int) -> None:
        """Copies tokens of all layers to another place, which may overlap."""
        # A piece may be as long as the distance: then no copy overlaps its source.
        distance = abs(target - source)
        firsts = range(0, num_tokens, distance)
        for first in firsts if target < source else reversed(firsts):
            length = min(distance, num_tokens - first)
            piece = self._storage.narrow(3, source + first, length)
            self._storage.narrow(3, target + first, length).copy_(piece)

    def _commit(self, start: int, stop: int) -> None:
        """Sees to the memory of tokens; kept ranges give way where it is not to be had."""
        while self._pages is not None:
            try:
                return self._pages.commit(start, stop)
            except PageError:
                if not self._kept:
                    raise
                self.free(self._kept[0])
