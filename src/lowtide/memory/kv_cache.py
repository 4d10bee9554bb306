"""Memory of sequences: a bundle of stores, of keys and values and of states.

Keys and values lie in one contiguous token range for each sequence, which can be cut at any token.
States (`memory/states.py`) have a fixed size; a sequence can be cut where they were copied.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lowtide.core import align_up
from lowtide.errors import InternalError, PageError, PlanError
from lowtide.memory.kept_rule import KeptRule
from lowtide.memory.kv_pages import KVPages, KVPlace, StorageShape
from lowtide.memory.states import HALVES, RangeStates, States, StateStore
from lowtide.memory.workspace import Buffers

GRANULE_TOKENS = 16
"""Ranges start on such multiples, so that a sequence's position never changes an alignment."""

GROWTH_TOKENS = 256
"""Step in which a range's memory grows, up to its capacity."""


def storage_shape(
    num_layers: int, num_kv_heads: int, head_dim: int, num_tokens: int, num_arrays: int = 2
) -> StorageShape:
    """Return the shape of a cache for `num_tokens` tokens."""
    num_tokens = align_up(num_tokens, GRANULE_TOKENS)
    return StorageShape(num_layers, num_arrays, num_kv_heads, num_tokens, head_dim)


@dataclass(eq=False, slots=True)
class KVRange:
    """A sequence's place in the cache: tokens `start` to `start + capacity`.

    The cache changes these numbers when it moves ranges between passes: keep the range, not its
    numbers.
    """

    start: int
    capacity: int
    num_written: int = 0  # leading tokens that may hold values
    num_usable: int = 0  # leading tokens with committed memory, if memory is elastic
    num_kept: int = 0  # how often it was kept
    num_stored: int = 0  # the latest keeping stored completely in a file, as noted by the writer
    is_mixed: bool = False  # written under two policies, one of which changes tokens
    states: RangeStates | None = None  # None: of a model without states

    @property
    def num_snapshots(self) -> int:
        """Copies of its states."""
        return 0 if self.states is None else len(self.states.snapshots)

    def part(self, index: int, num_parts: int) -> KVRange:
        """Return one of `num_parts` equal parts of a committed range, for one pass.

        It does not follow moves of the whole range, and its writes are not noted there.
        """
        capacity = self.capacity // num_parts
        return KVRange(self.start + index * capacity, capacity, num_usable=capacity)


class KVCache:
    """Owns the token ranges; does not know what a sequence is.

    Its tensors have a `StorageShape` each and the compute dtype. Only written tokens are ever
    touched, so that memory which becomes physical on first use grows with the sequences. With
    `pages` memory is committed before use, and released. See also `memory/transient_kv.py`.
    """

    def __init__(
        self,
        storage: Tensor | Sequence[Tensor],
        pages: KVPages | None = None,
        max_range_tokens: int | None = None,
        rule: KeptRule | None = None,
        places: Sequence[KVPlace | None] = (),
        states: StateStore | None = None,
    ) -> None:
        """storage: one tensor of all layers, or one for each group of them.

        places: of the layers in these tensors; by default all of the first, in order.
        pages: provides memory behind `storage`; by default it is all there.
        max_range_tokens: limit of one range, by default the whole cache.
        rule: for `apply_rule`.
        states: of the layers that have any.
        """
        self._storage = (storage,) if isinstance(storage, Tensor) else tuple(storage)
        self._pages = pages
        # By layer: keys and values [kv_heads, tokens, head_dim]; each pass asks for all of them.
        first = self._storage[0]
        places = places or [KVPlace(0, index) for index in range(len(first))]
        self._arrays = [place and self._layer(place) for place in places]
        self.num_tokens = first.shape[3]
        self.max_range_tokens = max_range_tokens or self.num_tokens
        self._rule = rule or KeptRule()
        self._states = states
        self._snapshot_tokens = 0  # tokens that take as much memory as a snapshot
        if states is not None:
            token_bytes = sum(x[:, :, :, :1].numel() * x.element_size() for x in self._storage)
            self._snapshot_tokens = -(-states.slot_bytes // token_bytes)
        self._taken: list[KVRange] = []  # ascending by start, kept ones included
        self._kept: list[KVRange] = []  # the first one is dropped first
        self._gate = threading.RLock()  # held while kept ranges are moved, dropped or copied

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of keys and values: the compute dtype."""
        return self._storage[0].dtype

    @property
    def has_states(self) -> bool:
        """True if a sequence can only be cut where its states were copied."""
        return self._states is not None

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of a copy of a sequence's states; 0 without states."""
        return 0 if self._states is None else self._states.slot_bytes

    @property
    def num_free_tokens(self) -> int:
        """Number of tokens that are unused or in kept ranges."""
        return self._num_unused_tokens + sum(kept.capacity for kept in self._kept)

    @property
    def taken(self) -> tuple[KVRange, ...]:
        """All ranges in ascending order of their starts, kept ones included."""
        return tuple(self._taken)

    @property
    def kept(self) -> tuple[KVRange, ...]:
        """Kept ranges; the first is the first to be dropped."""
        return tuple(self._kept)

    @property
    def is_unused(self) -> bool:
        """True if all ranges are kept ones."""
        return len(self._taken) == len(self._kept)

    def can_allocate(self, num_tokens: int) -> bool:
        """Return True if `allocate(num_tokens)` would succeed now."""
        capacity = align_up(num_tokens, GRANULE_TOKENS)
        has_tokens = capacity <= min(self.num_free_tokens, self.max_range_tokens)
        return has_tokens and (self._states is None or self._num_free_slots >= HALVES)

    def allocate(self, num_tokens: int) -> KVRange:
        """Allocate a range of at least `num_tokens` tokens, dropping the oldest kept ones.

        Takes the first fit. Between passes only: fragmented free tokens are joined by moving other
        ranges. Raises PlanError if there are too few tokens, PageError if a move finds no memory.
        """
        if not self.can_allocate(num_tokens):
            raise self._refusal(num_tokens)
        capacity = align_up(num_tokens, GRANULE_TOKENS)
        self._drop_until_unused(capacity)
        start = self._find(capacity)
        kv_range = KVRange(self._compact() if start is None else start, capacity)
        if self._states is not None:
            store = self._states
            kv_range.states = RangeStates(self._take_slot(store), self._take_slot(store))
        self._taken.append(kv_range)
        self._taken.sort(key=lambda taken: taken.start)
        return kv_range

    def free(self, kv_range: KVRange) -> None:
        """Free a range; its contents are lost."""
        if kv_range not in self._taken:
            raise InternalError(f"{kv_range} was freed but is not taken.")
        with self._gate:
            self._taken.remove(kv_range)
            if kv_range in self._kept:
                self._kept.remove(kv_range)
                self._rule.ended(kv_range, is_continued=False)
            if self._states is not None and kv_range.states is not None:
                self._states.free(*kv_range.states.slots)
                kv_range.states = None
            self._release_unused()

    def keep(self, kv_range: KVRange, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens of an ended sequence until others need the room.

        num_tokens: where it can be cut. The rest of the range is freed. `is_kept` tells if the
        range still exists.
        """
        if self._states is not None and (states := kv_range.states) is not None:
            self._states.settle(states, num_tokens)
        kv_range.num_written = num_tokens
        kv_range.capacity = align_up(num_tokens, GRANULE_TOKENS)
        kv_range.num_usable = min(kv_range.num_usable, kv_range.capacity)
        kv_range.num_kept += 1
        self._kept.append(kv_range)
        self._rule.kept(kv_range)
        self._release_unused()
        self.apply_rule()

    def is_kept(self, kv_range: KVRange) -> bool:
        with self._gate:  # a range being copied is briefly not in the list
            return kv_range in self._kept

    def resume(self, kv_range: KVRange, num_tokens: int, capacity: int) -> None:
        """Give a kept range back to a sequence, with at least `capacity` tokens.

        The first `num_tokens` tokens stay, in place if there is room behind them. Raises as
        `allocate`; the range then stays kept.
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
        self._resume_states(kv_range, num_tokens)
        kv_range.num_written = num_tokens
        kv_range.capacity = align_up(capacity, GRANULE_TOKENS)
        kv_range.num_usable = min(kv_range.num_usable, kv_range.capacity)

    def grow(self, kv_range: KVRange, num_tokens: int) -> bool:
        """Extend a range to `num_tokens` tokens, dropping the oldest kept ranges.

        Returns False, and changes nothing, if there are too few tokens. Between passes only. Raises
        PageError if moving other ranges finds no memory.
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
        """Return True if `branch` would find room."""
        room = self.num_free_tokens - (kv_range.capacity if self.is_kept(kv_range) else 0)
        if self._states is not None and self._num_free_slots - kv_range.num_snapshots < HALVES:
            return False
        return align_up(capacity, GRANULE_TOKENS) <= min(room, self.max_range_tokens)

    def branch(self, kv_range: KVRange, num_tokens: int, capacity: int) -> KVRange:
        """Allocate a range and copy the first `num_tokens` tokens of another to it.

        num_tokens: where the source can be cut. It has at least `capacity` tokens. The source
        stays; a kept one counts as used now. Raises as `allocate`.
        """
        is_kept, made = kv_range in self._kept, None
        with self._gate:  # another thread still finds it kept
            states, kv_range.states = kv_range.states, None
            if is_kept:
                self._kept.remove(kv_range)  # so that allocating drops neither it nor its states
            try:
                made = self.allocate(capacity)
                self.prepare(made, num_tokens)
                self._copy(kv_range.start, self.claim(made, 0, num_tokens), num_tokens)
                if self._states is not None and states is not None and made.states is not None:
                    self._states.start_at(
                        made.states, self._states.slot_at(states, num_tokens), num_tokens
                    )
            except BaseException:
                if made is not None:
                    self.free(made)
                raise
            finally:
                kv_range.states = states
                if is_kept:
                    self._kept.append(kv_range)
            if is_kept:
                self._rule.copied(kv_range)
                self.apply_rule()  # the source may be dropped again
        return made

    def copy_kept(
        self, kv_range: KVRange, num_kept: int, first: int, target: Sequence[NDArray[Any]]
    ) -> bool:
        """Copy tokens of a range in its `num_kept`th keeping to `target`. Thread-safe.

        target: for each of the cache's tensors [layers, arrays, kv_heads, tokens, head_dim],
        integers of the dtype's size, in host memory, filled with tokens from `first` on. Returns
        False, without copying, if the range is gone.
        """
        with self._gate:
            is_there = self.is_kept(kv_range) and kv_range.num_kept == num_kept
            if is_there:
                rows = self.rows(kv_range, first, target[0].shape[3])
                for own, there in zip(target, rows, strict=True):
                    own[...] = there
            return is_there

    def kept_snapshots(self, kv_range: KVRange, num_kept: int) -> tuple[int, ...] | None:
        """Return the snapshots of a range in its `num_kept`th keeping, by their tokens.

        None if the range is gone. Thread-safe.
        """
        with self._gate:
            if not self.is_kept(kv_range) or kv_range.num_kept != num_kept:
                return None
            return () if kv_range.states is None else tuple(kv_range.states.snapshots)

    def copy_kept_states(
        self,
        kv_range: KVRange,
        num_kept: int,
        num_tokens: int,
        offset: int,
        target: NDArray[np.uint8],
    ) -> bool:
        """Copy bytes of a snapshot from `offset` on; do otherwise as `copy_kept`."""
        with self._gate:
            places = self.kept_snapshots(kv_range, num_kept) or ()
            if self._states is None or kv_range.states is None or num_tokens not in places:
                return False
            content = self._states.content(kv_range.states.snapshots[num_tokens]).numpy()
            target[:] = content[offset : offset + len(target)]
            return True

    def restored_states(
        self, kv_range: KVRange, num_tokens: int, snapshots: Iterable[int]
    ) -> dict[int, NDArray[np.uint8]]:
        """Return host memory for a new range's states, by their tokens, to be filled before a pass.

        They are those behind `num_tokens` tokens and, while there is room, earlier snapshots.
        """
        store, states = self._states, kv_range.states
        if store is None or states is None or states.before is None:
            return {}
        states.num_tokens, states.is_clear = num_tokens, False
        states.crossed.clear()
        found = {num_tokens: store.content(states.before).numpy()}
        for place in snapshots:
            if place < num_tokens and store.num_free:
                with suppress(PageError):
                    found[place] = store.content(store.new_snapshot(states, place)).numpy()
        return found

    def rows(self, kv_range: KVRange, first: int, num_tokens: int) -> list[NDArray[Any]]:
        """Return host memory of tokens from `first` on, in the layout of `copy_kept`.

        It may be written in a range that no pass has seen, before `claim`.
        """
        integers: torch.dtype = getattr(torch, f"int{8 * self.dtype.itemsize}")
        start = kv_range.start + first
        wanted = (tensor.narrow(3, start, num_tokens) for tensor in self._storage)
        return [tensor.view(integers).numpy() for tensor in wanted]

    def give_way(self, num_bytes: int) -> None:
        """Drop kept ranges, oldest first, until their pages have released `num_bytes`."""
        if self._pages is None:
            return
        left_bytes = self._pages.committed_bytes - num_bytes
        while self._kept and self._pages.committed_bytes > left_bytes:
            self.free(self._kept[0])

    def apply_rule(self, num_more: int = 0) -> None:
        """Drop kept ranges, oldest first, while the rule says so for `num_more` further tokens."""
        num_tokens = num_more + sum(map(self._weight, self._taken))
        while self._kept and self._rule.gives_way(self._kept[0], num_tokens):
            num_tokens -= self._weight(self._kept[0])
            self.free(self._kept[0])

    def prepare(self, kv_range: KVRange, num_tokens: int) -> None:
        """Commit memory before a pass writes up to `num_tokens` tokens of a range.

        Raises PageError, changing nothing but kept ranges, if there is none.
        """
        if self._pages is None:
            return
        if kv_range.states is not None and not kv_range.states.has_memory:
            self._commit_states(kv_range.states)
        if num_tokens <= kv_range.num_usable:
            return
        num_usable = min(align_up(num_tokens, GROWTH_TOKENS), kv_range.capacity)
        self.apply_rule(num_usable - kv_range.num_usable)
        self._commit(kv_range.start, kv_range.start + num_usable)
        kv_range.num_usable = num_usable

    def of_pass(self, kv_range: KVRange, rows: slice, num_tokens: int) -> KVRange:
        """Return the range that a pass uses for the first `num_tokens` tokens; rows: its rows.

        States go on from those of the tokens before these rows.
        """
        self.prepare(kv_range, num_tokens)
        if self._states is not None and kv_range.states is not None:
            first = num_tokens - (rows.stop - rows.start)
            self._states.begin_pass(kv_range.states, first, num_tokens)
        return kv_range

    def states(self, layer: int, kv_range: KVRange) -> States:
        """Return a layer's states of a sequence in this pass, in place.

        The layer fills `after` behind the sequence's last row. A pass that does not come to its end
        (`end_pass`) leaves what it found.
        """
        if self._states is None:
            raise InternalError(f"Layer {layer} has no states.")
        return self._states.of(layer, kv_range.states)

    def state_offsets(self, layer: int) -> tuple[int, ...]:
        """Return the first byte of each of a layer's states among all of a sequence."""
        if self._states is None:
            raise InternalError(f"Layer {layer} has no states.")
        return self._states.offsets(layer)

    def claim_states(self, kv_range: KVRange, layers: Collection[int]) -> tuple[int, int]:
        """Return the addresses of a sequence's states before and behind this pass; 0 without any.

        layers: those that will write theirs, as with `states`.
        """
        return (0, 0) if self._states is None else self._states.claim(kv_range.states, layers)

    def end_pass(self, kv_ranges: Iterable[KVRange]) -> None:
        """Take over the states that a pass has written, once all of it has gone well."""
        if self._states is not None:
            for kv_range in kv_ranges:
                if kv_range.states is not None:
                    self._states.end_pass(kv_range.states)

    def cut(self, kv_range: KVRange, num_tokens: int, unit: int = 1) -> int:
        """Return the most tokens, at most `num_tokens`, behind which a range can be cut.

        They are a multiple of `unit`.
        """
        states = kv_range.states
        return num_tokens // unit * unit if states is None else states.cut(num_tokens, unit)

    def snapshot(self, kv_range: KVRange, may_drop: bool) -> None:
        """Copy a running sequence's states, so that it can be cut here, if there is room.

        may_drop: kept ranges give up theirs for it, the oldest first.
        """
        store, states = self._states, kv_range.states
        if store is None or states is None or not states.num_tokens:
            return
        if states.before is None or states.num_tokens in states.snapshots:
            return
        if not store.num_free and not (may_drop and self._kept and self._give_up_snapshot()):
            return
        with suppress(PageError):
            store.add_snapshot(states)

    def inherit(self, kv_range: KVRange, heir: KVRange) -> None:
        """Move the snapshots of a kept range to one that begins with its tokens."""
        source, target = kv_range.states, heir.states
        if source is not None and target is not None:
            with self._gate:
                for place in [*source.snapshots]:
                    if place not in target.snapshots:
                        target.add(place, source.snapshots.pop(place))

    def open_layer(self, layer: int, num_rows: int, workspace: Buffers) -> None:
        """Prepare for a layer of a pass with `num_rows` rows, until its scope ends."""

    def arrays(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Return all keys and values of a layer, each [kv_heads, tokens, head_dim].

        They stay in place; None if nothing is kept between passes.
        """
        return self._of(layer)

    def claim(self, kv_range: KVRange, position: int, num_rows: int) -> int:
        """Mark rows from `position` on as written; return the cache's token of the first."""
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
        """Store rows of keys and values, each [rows, kv_heads, head_dim], from `position` on.

        A cache of one array stores the keys only.
        """
        num_rows = key.shape[0]
        start = self.claim(kv_range, position, num_rows)
        keys, values = self._of(layer)
        keys.narrow(1, start, num_rows).copy_(key.transpose(0, 1))
        if values is not keys:
            values.narrow(1, start, num_rows).copy_(value.transpose(0, 1))

    def read(self, layer: int, kv_range: KVRange, num_tokens: int) -> tuple[Tensor, Tensor]:
        """View the first `num_tokens` keys and values, each [kv_heads, tokens, head_dim]."""
        keys, values = self._of(layer)
        start = kv_range.start
        return keys.narrow(1, start, num_tokens), values.narrow(1, start, num_tokens)

    def _of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return all keys and values of a layer, each [kv_heads, tokens, head_dim]."""
        arrays = self._arrays[layer]
        if arrays is None:
            raise InternalError(f"Layer {layer} stores no tokens.")
        return arrays

    def _layer(self, place: KVPlace) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer, which are one tensor where it has one array."""
        arrays = self._storage[place.group][place.number].unbind()
        return arrays[0], arrays[-1]

    @property
    def _num_free_slots(self) -> int:
        """The slots of states that are unused or hold snapshots."""
        if self._states is None:
            return 0
        return self._states.num_free + sum(taken.num_snapshots for taken in self._taken)

    def _weight(self, kv_range: KVRange) -> int:
        """Return the tokens that take as much memory as a range has."""
        states = kv_range.states
        num_slots = 0 if states is None else len(states.slots)
        return kv_range.num_usable + num_slots * self._snapshot_tokens

    def _take_slot(self, store: StateStore) -> int:
        """Take a slot, dropping snapshots if there is none."""
        while not store.num_free and self._give_up_snapshot():
            pass
        return store.take()

    def _give_up_snapshot(self) -> bool:
        """Drop a snapshot, of the oldest kept range if there is one; return False without any.

        A range goes with its last one, since its tokens are worthless without it.
        """
        owners = self._kept[:1] or [taken for taken in self._taken if taken.num_snapshots]
        if self._states is None or not owners:
            return False
        owner = owners[0]
        with self._gate:
            states = owner.states
            place = None if states is None else states.least_useful()
            if owner in self._kept and place is None:
                self.free(owner)
            elif states is not None:
                self._states.drop(states, max(states.snapshots) if place is None else place)
        return True

    def _resume_states(self, kv_range: KVRange, num_tokens: int) -> None:
        """Let a kept range's states go on behind `num_tokens` tokens.

        Earlier snapshots stay; that one does if there is room for both.
        """
        store, states = self._states, kv_range.states
        if store is None or states is None:
            return
        with self._gate:
            store.drop(states, *(place for place in states.snapshots if place > num_tokens))
            source = store.slot_at(states, num_tokens)
            states.has_memory, states.before = False, None
            if store.num_free >= HALVES:
                states.before = store.take()
                try:
                    store.start_at(states, source, num_tokens)
                except PageError:
                    store.free(states.before)
                    states.before = None
            if states.before is None:
                states.before = states.snapshots.pop(num_tokens)
                states.num_tokens, states.is_clear = num_tokens, False
                states.crossed.clear()
            states.after = self._take_slot(store)

    def _commit_states(self, states: RangeStates) -> None:
        """Provide memory for a running sequence's states, dropping kept ranges if there is none."""
        while self._states is not None and not states.has_memory:
            try:
                self._states.commit(*(x for x in (states.before, states.after) if x is not None))
                states.has_memory = True
            except PageError:
                if not self._kept:
                    raise
                self.free(self._kept[0])

    @property
    def _num_unused_tokens(self) -> int:
        return self.num_tokens - sum(taken.capacity for taken in self._taken)

    def _refusal(self, num_tokens: int) -> PlanError:
        if self._states is not None and self._num_free_slots < HALVES:
            return PlanError(
                "The states of another sequence have no room: those of running ones take all but "
                f"{self._num_free_slots} of {self._states.num_slots} slots, and it needs {HALVES}; "
                "wait for a sequence to end, or raise context."
            )
        return PlanError(
            f"The KV cache has no room for {num_tokens} tokens: {self.num_free_tokens} of its "
            f"{self.num_tokens} are free, {self.max_range_tokens} for a sequence at most; wait "
            "for a sequence to end, or raise context."
        )

    def _drop_until_unused(self, num_tokens: int) -> None:
        """Drop kept ranges, oldest first, until `num_tokens` tokens are unused."""
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
        """Return the unused tokens between a range and the next."""
        starts = [*(taken.start for taken in self._taken), self.num_tokens]
        return starts[self._taken.index(kv_range) + 1] - (kv_range.start + kv_range.capacity)

    def _part_behind(self, kv_range: KVRange) -> None:
        """Move a range and all before it to the front, all behind it to the end."""
        index = self._taken.index(kv_range) + 1
        behind = self._taken[index:]  # before kept ranges give way, where moving wants memory
        self._compact(index)
        start = self.num_tokens
        for taken in reversed(behind):
            start -= taken.capacity
            self._move(taken, start)
        self._release_unused()

    def _compact(self, count: int | None = None) -> int:
        """Move the first `count` ranges (by default all) to the front; return where they end."""
        end = 0
        for taken in self._taken[:count]:
            self._move(taken, end)
            end += taken.capacity
        self._release_unused()
        return end

    def _release_unused(self) -> None:
        """Release all memory that no range uses."""
        if self._pages is None:
            return
        end = 0
        for taken in self._taken:
            self._pages.release(end, taken.start)
            end = taken.start + taken.num_usable
        self._pages.release(end, self.num_tokens)

    def _move(self, kv_range: KVRange, start: int) -> None:
        """Move a range and its written tokens to `start`."""
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
        """Copy tokens of all layers to a place that may overlap the source."""
        # A piece may be as long as the distance: then no copy overlaps its source.
        distance = abs(target - source)
        firsts = range(0, num_tokens, distance)
        for first in firsts if target < source else reversed(firsts):
            length = min(distance, num_tokens - first)
            for tensor in self._storage:
                piece = tensor.narrow(3, source + first, length)
                tensor.narrow(3, target + first, length).copy_(piece)

    def _commit(self, start: int, stop: int) -> None:
        """Commit memory of tokens, dropping kept ranges if there is none."""
        while self._pages is not None:
            try:
                return self._pages.commit(start, stop)
            except PageError:
                if not self._kept:
                    self._release_unused()  # what one of several tensors has got
                    raise
                self.free(self._kept[0])
