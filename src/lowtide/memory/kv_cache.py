"""Memory of sequences: a bundle of stores, of keys and values, of windows and of states.

Keys and values lie in one contiguous token range for each sequence, which can be cut at any token.
Layers with a sliding window may keep the last tokens alone (`memory/windows.py`); a sequence can
be cut where all that the next row sees is still there, or was copied. States (`memory/states.py`)
have a fixed size; a sequence can be cut where they were copied.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lowtide.core import align_up
from lowtide.errors import InternalError, PageError, PlanError
from lowtide.memory.kept_rule import KeptRule
from lowtide.memory.kv_pages import GRANULE_TOKENS, KVPages, KVPlace, KVShape, StorageShape
from lowtide.memory.states import HALVES, RangeStates, States, StateStore
from lowtide.memory.token_spans import Span, TokenSpans
from lowtide.memory.windows import Window, WindowStore
from lowtide.memory.workspace import Buffers

GROWTH_TOKENS = 256
"""Step in which a range's memory grows, up to its capacity."""


def storage_shape(
    num_layers: int, num_kv_heads: int, head_dim: int, num_tokens: int, num_arrays: int = 2
) -> StorageShape:
    """Return the shape of a cache for `num_tokens` tokens."""
    num_tokens = align_up(num_tokens, GRANULE_TOKENS)
    return StorageShape(num_layers, num_arrays, num_kv_heads, num_tokens, head_dim)


@dataclass(eq=False, slots=True)
class KVRange(Span):
    """A sequence's place in the cache: tokens `start` to `start + capacity`.

    The cache changes these numbers when it moves ranges between passes: keep the range, not its
    numbers.
    """

    num_kept: int = 0  # how often it was kept
    num_stored: int = 0  # the latest keeping stored completely in a file, as noted by the writer
    is_mixed: bool = False  # written under two policies, one of which changes tokens
    states: RangeStates | None = None  # None: of a model without states
    windows: list[Window] = field(default_factory=list)  # one for each of the cache's groups
    copies: list[list[Window]] = field(default_factory=list)  # of earlier windows, oldest first
    marks: set[int] = field(default_factory=set)  # where windows are to be copied before they go
    copies_due: dict[int, bool] = field(default_factory=dict)
    """Where the next pass is to copy states in its midst; whether kept ranges give up theirs."""

    @property
    def num_snapshots(self) -> int:
        """Number of copies of the range's states."""
        return 0 if self.states is None else len(self.states.snapshots)

    @property
    def all_windows(self) -> Iterator[tuple[int, Window]]:
        """Each window, or copy of one, with its group's number."""
        for windows in (self.windows, *self.copies):
            yield from enumerate(windows)

    def part(self, index: int, num_parts: int) -> KVRange:
        """Return one of `num_parts` equal parts of a committed range, for one pass.

        It does not follow moves of the whole range, and its writes are not noted there.
        """
        capacity = self.capacity // num_parts
        return KVRange(self.start + index * capacity, capacity, num_usable=capacity)


class LayerTokens(dict[int, tuple[Tensor, Tensor]]):
    """All keys and values, [kv_heads, tokens, head_dim], of each layer that stores tokens."""

    def __missing__(self, layer: int) -> tuple[Tensor, Tensor]:
        raise InternalError(f"Layer {layer} stores no tokens.")


class KVCache(TokenSpans[KVRange]):
    """Owns what sequences have in memory; does not know what a sequence is.

    Its tensors have a `StorageShape` each and the compute dtype. See also
    `memory/transient_kv.py`.
    """

    def __init__(
        self,
        storage: Tensor | Sequence[Tensor],
        pages: KVPages | None = None,
        max_range_tokens: int | None = None,
        rule: KeptRule | None = None,
        places: Sequence[KVPlace | None] = (),
        states: StateStore | None = None,
        windows: Sequence[WindowStore] = (),
        num_tokens: int = 0,
    ) -> None:
        """storage: one tensor of all layers, or one for each group of them.

        places: of the layers in these tensors; by default all of the first, in order.
        pages: provides the memory of `storage`; by default all of it is there.
        max_range_tokens: limit of one range, by default the whole cache.
        rule: for `apply_rule`.
        states: of the layers that have any.
        windows: of the layers that keep the last tokens alone.
        num_tokens: of all ranges; by default those of `storage`.
        """
        tensors = (storage,) if isinstance(storage, Tensor) else tuple(storage)
        super().__init__(tensors, num_tokens or tensors[0].shape[3], pages)
        self._windows = tuple(windows)
        for store in self._windows:
            store.join(self._gate, self._give_way)
        places = places or [KVPlace(0, index) for index in range(len(tensors[0]))]
        all_tensors = [*tensors, *(each for store in self._windows for each in store.tensors)]
        self._tokens = LayerTokens(
            (layer, keys_and_values(all_tensors, place))
            for layer, place in enumerate(places)
            if place is not None
        )
        self.dtype = all_tensors[0].dtype  # of keys and values: the compute dtype
        # By layer: which of the windows it is in; -1: none, as it keeps all tokens.
        self._window_of = [max(-1, place.group - len(tensors)) if place else -1 for place in places]
        self.max_range_tokens = max_range_tokens or self.num_tokens
        self._rule = rule or KeptRule()
        self._states = states
        # Bytes in which all that is kept is weighed.
        self._unit_bytes = self.token_bytes or sum(store.token_bytes for store in self._windows)
        self._kept: list[KVRange] = []  # the first one is dropped first

    @property
    def has_states(self) -> bool:
        """True if a sequence can only be cut where its states were copied."""
        return self._states is not None

    @property
    def cuts_anywhere(self) -> bool:
        """True if a sequence can be cut at any token."""
        return self._states is None and not self._windows

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of a copy of a sequence's states; 0 without states."""
        return 0 if self._states is None else self._states.slot_bytes

    @property
    def num_free_tokens(self) -> int:
        """Number of tokens that are unused or in kept ranges."""
        return self.num_unused_tokens + sum(kept.capacity for kept in self._kept)

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
        has_slots = self._states is None or self._num_free_slots >= HALVES
        return has_tokens and has_slots and self._have_windows_room(capacity)

    def allocate(self, num_tokens: int) -> KVRange:
        """Allocate a range of at least `num_tokens` tokens, dropping the oldest kept ones.

        Takes the first fit. Between passes only: fragmented free tokens are joined by moving other
        ranges. Raises PlanError if there are too few tokens, PageError if a move finds no memory.
        """
        if not self.can_allocate(num_tokens):
            raise self._refusal(num_tokens)
        capacity = align_up(num_tokens, GRANULE_TOKENS)
        wanted = [store.capacity(capacity) for store in self._windows]
        self._drop_until_unused(capacity, wanted)
        kv_range = KVRange(0, capacity)
        self.place(kv_range)
        try:
            for store, num_here in zip(self._windows, wanted, strict=True):
                window = Window(0, num_here)
                store.place(window)
                kv_range.windows.append(window)
            if self._states is not None:
                slots = self._take_slot(self._states), self._take_slot(self._states)
                kv_range.states = RangeStates(*slots)
        except BaseException:
            self.free(kv_range)
            raise
        return kv_range

    def free(self, kv_range: KVRange) -> None:
        """Free a range; its contents are lost."""
        if kv_range not in self._taken:
            raise InternalError(f"{kv_range} was freed but is not taken.")
        with self._gate:
            self.remove(kv_range)
            for index, window in kv_range.all_windows:
                self._windows[index].remove(window)
            kv_range.windows, kv_range.copies = [], []
            if kv_range in self._kept:
                self._kept.remove(kv_range)
                self._rule.ended(kv_range, is_continued=False)
            if self._states is not None and kv_range.states is not None:
                self._states.free(*kv_range.states.slots)
                kv_range.states = None

    def keep(self, kv_range: KVRange, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens of an ended sequence until others need the room.

        num_tokens: where it can be cut. The rest of the range is freed. `is_kept` tells if the
        range still exists.
        """
        if self._states is not None and (states := kv_range.states) is not None:
            self._states.settle(states, num_tokens)
        self._cut_tokens(kv_range, num_tokens, num_tokens)
        kv_range.num_kept += 1
        self._kept.append(kv_range)
        self._rule.kept(kv_range)
        self.release_unused()
        for store in self._windows:
            store.release_unused()
        self.apply_rule()

    def is_kept(self, kv_range: KVRange) -> bool:
        with self._gate:  # a range being copied is briefly not in the list
            return kv_range in self._kept

    def resume(self, kv_range: KVRange, num_tokens: int, capacity: int) -> None:
        """Give a kept range back to a sequence, with at least `capacity` tokens.

        The first `num_tokens` tokens stay, in place if there is room after them. Raises as
        `allocate`; the range then stays kept.
        """
        if not self.can_allocate(capacity):
            raise self._refusal(capacity)
        with self._gate:
            self._turn_back(kv_range, num_tokens)
            self._kept.remove(kv_range)
        try:
            self.grow(kv_range, capacity)
        except BaseException:
            self._kept.append(kv_range)
            raise
        self._rule.ended(kv_range, is_continued=True)
        self._resume_states(kv_range, num_tokens)
        self._cut_tokens(kv_range, num_tokens, capacity)

    def grow(self, kv_range: KVRange, num_tokens: int) -> bool:
        """Extend a range to `num_tokens` tokens, dropping the oldest kept ranges.

        Returns False, and changes nothing, if there are too few tokens. Between passes only. Raises
        PageError if moving other ranges finds no memory.
        """
        num_more = max(0, align_up(num_tokens, GRANULE_TOKENS) - kv_range.capacity)
        more = [
            max(0, store.capacity(num_tokens, window.first) - window.capacity)
            for store, window in zip(self._windows, kv_range.windows, strict=True)
        ]
        if not num_more and not any(more):
            return True
        if num_more > self.num_free_tokens or not self._have_windows_free(more):
            return False
        self._drop_until_unused(num_more, more)
        for store, window, num_here in zip(self._windows, kv_range.windows, more, strict=True):
            store.widen(window, num_here)
        self.widen(kv_range, num_more)
        return True

    def can_branch(self, kv_range: KVRange, capacity: int) -> bool:
        """Return True if `branch` would find room."""
        is_kept = self.is_kept(kv_range)
        room = self.num_free_tokens - (kv_range.capacity if is_kept else 0)
        if not self._have_windows_room(capacity, kv_range if is_kept else None):
            return False
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
            copies, kv_range.copies = kv_range.copies, []
            windows = self._windows_at(num_tokens, (kv_range.windows, *copies))
            if is_kept:
                self._kept.remove(kv_range)  # so that allocating drops neither it nor its states
            try:
                made = self.allocate(capacity)
                self.begin_at(made, num_tokens)
                self.prepare(made, num_tokens)
                self.claim(made, 0, num_tokens)
                self._copy(kv_range.start, made.start, num_tokens)
                for store, source, target in zip(self._windows, windows, made.windows, strict=True):
                    store.fill(target, source)
                if self._states is not None and states is not None and made.states is not None:
                    self._states.start_at(
                        made.states, self._states.slot_at(states, num_tokens), num_tokens
                    )
            except BaseException:
                if made is not None:
                    self.free(made)
                raise
            finally:
                kv_range.states, kv_range.copies = states, copies
                if is_kept:
                    self._kept.append(kv_range)
            if is_kept:
                self._rule.copied(kv_range)
            self.apply_rule()  # the source has its states again, and may be dropped
        return made

    def begin_at(self, kv_range: KVRange, num_tokens: int) -> None:
        """Let a new range's windows begin where a sequence goes on after `num_tokens` tokens."""
        for store, window in zip(self._windows, kv_range.windows, strict=True):
            store.begin_at(window, num_tokens, kv_range.capacity)

    def copy_kept(
        self,
        kv_range: KVRange,
        num_kept: int,
        first: int,
        target: Sequence[NDArray[Any]],
        group: int = 0,
    ) -> bool:
        """Copy tokens of a range in its `num_kept`th keeping to `target`. Thread-safe.

        target: for each of the tensors of a group [layers, arrays, kv_heads, tokens, head_dim],
        integers of the dtype's size, in host memory, filled with tokens from `first` on. group: as
        in `rows_of`. Returns False, without copying, if the range is gone.
        """
        with self._gate:
            is_there = self.is_kept(kv_range) and kv_range.num_kept == num_kept
            if is_there:
                rows = self.rows_of(kv_range, first, target[0].shape[3], group)
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

    def kept_firsts(self, kv_range: KVRange, num_kept: int) -> tuple[int, ...] | None:
        """Return the first position of each window of a range, otherwise as `kept_snapshots`."""
        with self._gate:
            is_there = self.is_kept(kv_range) and kv_range.num_kept == num_kept
            return tuple(self.firsts(kv_range)[1:]) if is_there else None

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

        They are those after `num_tokens` tokens and, while there is room, earlier snapshots.
        """
        store, states = self._states, kv_range.states
        if store is None or states is None or states.before is None:
            return {}
        states.num_tokens, states.is_clear = num_tokens, False
        states.crossed.clear()
        found = {num_tokens: store.content(states.before).numpy()}
        for place in snapshots:
            if place < num_tokens and store.num_free:
                self.apply_rule(store.slot_bytes)
                with suppress(PageError):
                    found[place] = store.content(store.new_snapshot(states, place)).numpy()
        return found

    def rows_of(
        self, kv_range: KVRange, first: int, num_tokens: int, group: int = 0
    ) -> list[NDArray[Any]]:
        """Return host memory of tokens from position `first` on, in the layout of `copy_kept`.

        group: 0, the layers that keep all tokens, or from 1 on those of a window. It may be written
        in a range that no pass has seen, before `claim`.
        """
        if not group:
            return self.rows(kv_range, first, num_tokens)
        window = kv_range.windows[group - 1]
        return self._windows[group - 1].rows(window, first - window.first, num_tokens)

    def give_way(self, num_bytes: int) -> None:
        """Drop kept ranges, oldest first, until their pages have released `num_bytes`."""
        if self.pages is None:
            return
        left_bytes = self.pages.committed_bytes - num_bytes
        while self._kept and self.pages.committed_bytes > left_bytes:
            self.free(self._kept[0])

    def apply_rule(self, more_bytes: int = 0) -> None:
        """Drop kept ranges, oldest first, while the rule says so for `more_bytes` more."""
        num_tokens = more_bytes // self._unit_bytes + sum(map(self._weight, self._taken))
        while self._kept and self._rule.gives_way(self._kept[0], num_tokens):
            num_tokens -= self._weight(self._kept[0])
            self.free(self._kept[0])

    def prepare(self, kv_range: KVRange, num_tokens: int) -> None:
        """Commit memory before a pass writes up to `num_tokens` tokens of a range.

        Raises PageError, changing nothing but kept ranges, if there is none.
        """
        if self.pages is None:
            return
        is_plain = kv_range.states is None and not kv_range.windows
        if is_plain and num_tokens <= kv_range.num_usable:
            return  # as for nearly all tokens
        # A window slides before it needs more than its capacity.
        needs = [
            (store, window, usable_with(window, num_tokens - window.first))
            for store, window in zip(self._windows, kv_range.windows, strict=True)
        ]
        num_usable = usable_with(kv_range, num_tokens)
        more_bytes = (num_usable - kv_range.num_usable) * self.token_bytes
        if kv_range.states is not None and not kv_range.states.has_memory:
            more_bytes += HALVES * self.snapshot_bytes
        for store, window, num_here in needs:
            more_bytes += (num_here - window.num_usable) * store.token_bytes
        # Where all layers have windows, tokens of the range itself take no bytes.
        if not more_bytes and num_usable <= kv_range.num_usable:
            return
        self.apply_rule(more_bytes)
        if kv_range.states is not None:
            self._commit_states(kv_range.states)
        for store, window, num_here in needs:
            store.commit_to(window, num_here)
        self.commit_to(kv_range, num_usable)

    def of_pass(
        self, kv_range: KVRange, rows: slice, num_tokens: int, inner_ends: Sequence[int] = ()
    ) -> KVRange:
        """Return the range that a pass uses for the first `num_tokens` tokens; rows: its rows.

        States go on from those of the tokens before these rows. inner_ends: positions after all
        parts of the pass but the last, where states may be copied.
        """
        self.prepare(kv_range, num_tokens)
        first = num_tokens - (rows.stop - rows.start)
        self._slide(kv_range, first, num_tokens)
        if self._states is not None and kv_range.states is not None:
            self._states.begin_pass(kv_range.states, first, [*inner_ends, num_tokens])
            due, kv_range.copies_due = kv_range.copies_due, {}
            for place, may_drop in due.items():
                if place in inner_ends and self._has_slot(kv_range, place, may_drop):
                    self.apply_rule(self._states.slot_bytes)
                    with suppress(PageError):
                        self._states.expect(kv_range.states, place)
        return kv_range

    def begin_chunk(self, kv_range: KVRange, first: int) -> None:
        """Note which chunk of a pass over several has its turn in a layer: that from `first` on."""
        if kv_range.states is not None:
            kv_range.states.first = first

    def states(self, layer: int, kv_range: KVRange) -> States:
        """Return a layer's states of a sequence's next segment in this pass, in place.

        A layer asks once for each segment, in their order, and fills `after` after its last row. A
        pass that does not reach `end_pass` leaves states as they were.
        """
        if self._states is None:
            raise InternalError(f"Layer {layer} has no states.")
        return self._states.of(layer, kv_range.states)

    def state_offsets(self, layer: int) -> tuple[int, ...]:
        """Return the first byte of each of a layer's states among all of a sequence."""
        if self._states is None:
            raise InternalError(f"Layer {layer} has no states.")
        return self._states.offsets(layer)

    def claim_states(
        self, kv_range: KVRange, first: int, layers: Collection[int]
    ) -> tuple[int, int]:
        """Return the addresses of the states before and after a segment; 0 without any.

        first: its position. layers: those that will write theirs, as with `states`.
        """
        if self._states is None:
            return 0, 0
        return self._states.claim(kv_range.states, first, layers)

    def end_pass(self, kv_ranges: Iterable[KVRange]) -> None:
        """Take over the states that a pass has written, once all of it has gone well."""
        if self._states is not None:
            for kv_range in kv_ranges:
                if kv_range.states is not None:
                    self._states.end_pass(kv_range.states)

    def largest_cut(self, kv_range: KVRange, num_tokens: int, unit: int = 1) -> int:
        """Return the largest number, at most `num_tokens`, to which a range can be cut; or 0.

        It is a multiple of `unit`.
        """
        states, pieces = kv_range.states, (kv_range.windows, *kv_range.copies)
        if states is not None:
            places = [n for n in states.places if n <= num_tokens and not n % unit]
        elif not kv_range.windows:
            return num_tokens // unit * unit
        else:  # the most in each of the windows
            ends = (min(window.stop for window in each) for each in pieces)
            places = [min(num_tokens, end) // unit * unit for end in ends]
        found = (n for n in places if any(self._covers(each, n) for each in pieces))
        return max(found, default=0)

    def mark(self, kv_range: KVRange, places: Iterable[int]) -> None:
        """Have windows copied before they can no longer be cut at these places, if there is room.

        They replace those that were marked before.
        """
        kv_range.marks = {*places} if self._windows else set()

    def snapshot(self, kv_range: KVRange, may_drop: bool) -> None:
        """Copy a running sequence's states, so that it can be cut here, if there is room.

        may_drop: kept ranges give up theirs for it, the oldest first.
        """
        store, states = self._states, kv_range.states
        if store is None or states is None or not states.num_tokens:
            return
        if states.before is None or not self._has_slot(kv_range, states.num_tokens, may_drop):
            return
        self.apply_rule(store.slot_bytes)
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
        with self._gate:
            heir.copies[:0], kv_range.copies = kv_range.copies, []

    def open_layer(self, layer: int, num_rows: int, workspace: Buffers) -> None:
        """Prepare for a layer of a pass with `num_rows` rows, until its scope ends."""

    def arrays(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Return all keys and values of a layer, each [kv_heads, tokens, head_dim].

        They stay in place; None if nothing is kept between passes.
        """
        return self._tokens[layer]

    def group(self, layer: int) -> int:
        """Return the group of a layer that stores tokens, as in `origins`."""
        return self._window_of[layer] + 1

    def origins(self, kv_range: KVRange) -> list[int]:
        """Return where position 0 of a range is, or would be, in each group's tensors.

        The first group are layers that keep all tokens, those of each window follow.
        """
        return [kv_range.start, *(each.start - each.first for each in kv_range.windows)]

    def firsts(self, kv_range: KVRange) -> list[int]:
        """Return the first position of a range that is there in each group."""
        return [0, *(each.first for each in kv_range.windows)]

    @property
    def num_groups(self) -> int:
        return 1 + len(self._windows)

    def claim(self, kv_range: KVRange, position: int, num_rows: int) -> int:
        """Mark rows from `position` on as written; return the cache's token of the first.

        A window has its rows alone.
        """
        for store, window in zip(self._windows, kv_range.windows, strict=False):
            first = max(position, window.first)
            store.claim_rows(window, first - window.first, position + num_rows - first)
        return self.claim_rows(kv_range, position, num_rows)

    def write(
        self, layer: int, kv_range: KVRange, position: int, key: Tensor, value: Tensor
    ) -> None:
        """Store rows of keys and values, each [rows, kv_heads, head_dim], from `position` on.

        A cache of one array stores the keys only.
        """
        num_rows, index = key.shape[0], self._window_of[layer]
        if index < 0:
            start = self.claim_rows(kv_range, position, num_rows)
        else:
            window = kv_range.windows[index]
            at = position - window.first
            start = self._windows[index].claim_rows(window, at, num_rows)
        keys, values = self._tokens[layer]
        keys.narrow(1, start, num_rows).copy_(key.transpose(0, 1))
        if values is not keys:
            values.narrow(1, start, num_rows).copy_(value.transpose(0, 1))

    def read(
        self, layer: int, kv_range: KVRange, num_tokens: int, first: int = 0
    ) -> tuple[Tensor, Tensor]:
        """View keys and values from position `first` up to `num_tokens`.

        Each is [kv_heads, tokens, head_dim].
        """
        keys, values = self._tokens[layer]
        start = kv_range.start + first
        if (index := self._window_of[layer]) >= 0:
            window = kv_range.windows[index]
            start = window.start + first - window.first
            if first < window.first:
                raise InternalError(
                    f"Layer {layer} keeps positions from {window.first} on, not from {first} on."
                )
        count = num_tokens - first
        return keys.narrow(1, start, count), values.narrow(1, start, count)

    def _cut_tokens(self, kv_range: KVRange, num_tokens: int, capacity: int) -> None:
        """Keep a range's first `num_tokens` tokens, and room for `capacity`."""
        self._turn_back(kv_range, num_tokens)
        for store, window in zip(self._windows, kv_range.windows, strict=True):
            store.cut(window, num_tokens, capacity)
        self.shrink(kv_range, num_tokens, align_up(capacity, GRANULE_TOKENS))

    def _have_windows_room(self, num_tokens: int, but: KVRange | None = None) -> bool:
        """Return True if a new range of `num_tokens` finds room; but: a kept range that stays."""
        return self._have_windows_free([store.capacity(num_tokens) for store in self._windows], but)

    def _have_windows_free(self, wanted: Sequence[int], but: KVRange | None = None) -> bool:
        """Return True if each window has the wanted number of tokens unused or kept."""
        num_free = [store.num_unused_tokens for store in self._windows]
        for taken in self._taken:
            for number, (index, window) in enumerate(taken.all_windows):
                is_copy = number >= len(self._windows)
                if taken is not but and (is_copy or taken in self._kept):
                    num_free[index] += window.capacity
        return all(num_here <= free for num_here, free in zip(wanted, num_free, strict=True))

    def _covers(self, windows: Sequence[Window], num_tokens: int) -> bool:
        """Return True if these windows have everything the row after `num_tokens` tokens sees."""
        return all(
            store.least_cut(window) <= num_tokens <= window.stop
            for store, window in zip(self._windows, windows, strict=False)
        )

    def _windows_at(self, num_tokens: int, pieces: Iterable[list[Window]]) -> list[Window]:
        """Return the windows that have everything the row after `num_tokens` tokens sees."""
        found = next((each for each in pieces if self._covers(each, num_tokens)), None)
        if found is None:
            raise InternalError(f"A range cannot be cut after {num_tokens} tokens.")
        return found

    def _turn_back(self, kv_range: KVRange, num_tokens: int) -> None:
        """Let the windows be those from which a range goes on after `num_tokens` tokens.

        Copies of later ones are dropped.
        """
        with self._gate:
            found = self._windows_at(num_tokens, (kv_range.windows, *kv_range.copies))
            if found is not kv_range.windows:
                kv_range.copies.remove(found)
                self._remove_windows(kv_range.windows)
                kv_range.windows = found
            for copy in [*kv_range.copies]:
                if any(window.stop > num_tokens for window in copy):
                    kv_range.copies.remove(copy)
                    self._remove_windows(copy)

    def _remove_windows(self, windows: Iterable[Window]) -> None:
        for store, window in zip(self._windows, windows, strict=False):
            store.remove(window)

    def _slide(self, kv_range: KVRange, first: int, stop: int) -> None:
        """Make room in windows for a pass over the positions from `first` to `stop`."""
        if not self._windows:
            return
        pairs = list(zip(self._windows, kv_range.windows, strict=True))
        num_dropped = [store.num_without_room(window, first, stop) for store, window in pairs]
        if not any(num_dropped):
            return
        lost = {
            place
            for place in kv_range.marks
            if place <= first
            and self._covers(kv_range.windows, place)
            and any(
                window.first + num_here > store.first_needed(place)
                for (store, window), num_here in zip(pairs, num_dropped, strict=True)
            )
        }
        if lost:
            kv_range.marks -= lost
            self._copy_windows(kv_range, min(lost), max(lost))
        for (store, window), num_here in zip(pairs, num_dropped, strict=True):
            if num_here:
                store.slide(window, num_here)

    def _copy_windows(self, kv_range: KVRange, least: int, most: int) -> None:
        """Copy windows so that a range can be cut from `least` to `most` tokens, if there is room.

        Copies of kept ranges give way, the oldest first.
        """
        firsts = [store.first_needed(least) for store in self._windows]
        wanted = [
            store.capacity(most, first) for store, first in zip(self._windows, firsts, strict=True)
        ]
        while not self._have_unused(wanted):
            if not self._drop_copy(self._kept):
                return
        pairs = zip(self._windows, wanted, strict=True)
        self.apply_rule(sum(store.token_bytes * num_here for store, num_here in pairs))
        made: list[Window] = []
        try:
            for store, window, first in zip(self._windows, kv_range.windows, firsts, strict=True):
                made.append(store.copied(window, first, most))
        except PageError:
            self._remove_windows(made)
            return
        with self._gate:
            kv_range.copies.append(made)

    def _have_unused(self, wanted: Sequence[int]) -> bool:
        """Return True if each window has the wanted number of tokens unused."""
        pairs = zip(self._windows, wanted, strict=True)
        return all(num_here <= store.num_unused_tokens for store, num_here in pairs)

    def _drop_copy(self, ranges: Iterable[KVRange]) -> bool:
        """Drop the oldest copy of windows that ranges have; return False without any."""
        for each in ranges:
            if each.copies:
                with self._gate:
                    self._remove_windows(each.copies.pop(0))
                return True
        return False

    @property
    def _num_free_slots(self) -> int:
        """Number of slots of states that are unused or hold snapshots."""
        if self._states is None:
            return 0
        return self._states.num_free + sum(taken.num_snapshots for taken in self._taken)

    def _weight(self, kv_range: KVRange) -> int:
        """Return a range's memory as a number of tokens, rounded down as in a plan."""
        num_bytes = kv_range.num_usable * self.token_bytes
        if kv_range.states is not None:
            num_bytes += kv_range.states.num_held * self.snapshot_bytes
        for index, window in kv_range.all_windows:
            num_bytes += window.num_usable * self._windows[index].token_bytes
        return num_bytes // self._unit_bytes

    def _has_slot(self, kv_range: KVRange, place: int, may_drop: bool) -> bool:
        """Return True if there is a slot for a new snapshot; may_drop: as in `snapshot`."""
        store, states = self._states, kv_range.states
        if store is None or states is None or place in states.snapshots:
            return False
        return bool(store.num_free or (may_drop and self._kept and self._give_up_snapshot()))

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
        """Let a kept range's states go on after `num_tokens` tokens.

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

    def _refusal(self, num_tokens: int) -> PlanError:
        if self._states is not None and self._num_free_slots < HALVES:
            return PlanError(
                "The states of another sequence have no room: those of running ones take all but "
                f"{self._num_free_slots} of {self._states.num_slots} slots, and it needs {HALVES}; "
                "wait for a sequence to end, or raise `context`."
            )
        return PlanError(
            f"The KV cache has no room for {num_tokens} tokens: {self.num_free_tokens} of its "
            f"{self.num_tokens} are free, {self.max_range_tokens} for a sequence at most; wait "
            "for a sequence to end, or raise `context`."
        )

    def _drop_until_unused(self, num_tokens: int, in_windows: Sequence[int]) -> None:
        """Drop kept ranges, oldest first, until as many tokens are unused, also in each window.

        In windows the copies that kept ranges have go before these, those of running ones last.
        """
        while self._kept and num_tokens > self.num_unused_tokens:
            self.free(self._kept[0])
        while not self._have_unused(in_windows) and (
            self._drop_copy(self._kept) or self._give_way()
        ):
            pass

    def _give_way(self) -> bool:
        if not self._kept:
            return self._drop_copy(self._taken)
        self.free(self._kept[0])
        return True


def cache_over(
    shape: KVShape,
    storage: Sequence[Tensor],
    pages: KVPages | None = None,
    max_range_tokens: int | None = None,
    rule: KeptRule | None = None,
    states: StateStore | None = None,
) -> KVCache:
    """Make a cache over the tensors of `KVShape.storage`; otherwise as `KVCache`."""
    num_whole = len(shape.groups)
    of_windows = [None] * len(shape.windows) if pages is None else pages.windows
    windows = [
        WindowStore(*each)
        for each in zip(shape.windows, storage[num_whole:], of_windows, strict=True)
    ]
    return KVCache(
        storage[:num_whole],
        pages,
        max_range_tokens,
        rule,
        shape.places,
        states,
        windows,
        shape.num_tokens,
    )


def keys_and_values(tensors: Sequence[Tensor], place: KVPlace) -> tuple[Tensor, Tensor]:
    """Return keys and values of a layer; they are the same tensor if it has one array."""
    arrays = tensors[place.group][place.number].unbind()
    return arrays[0], arrays[-1]


def usable_with(span: Span, num_tokens: int) -> int:
    """Return the number of tokens with memory once a pass that needs `num_tokens` is prepared."""
    if num_tokens <= span.num_usable:
        return span.num_usable
    return min(align_up(num_tokens, GROWTH_TOKENS), span.capacity)
