"""States of sequences: arrays of fixed size, in which a layer has gathered all tokens so far.

A state cannot be cut. A sequence can be taken up again only after a token at which its states
were copied: a snapshot.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.config import StateArray
from lowtide.core import align_up
from lowtide.errors import InternalError, PageError
from lowtide.memory.arena import PagedArena

PAGE_BYTES = 4096
"""Slots begin on such multiples, so that each can be given memory by itself."""

HALVES = 2
"""Slots of a running sequence: the states before a pass, and those that the pass writes."""


class States(NamedTuple):
    """A layer's states of one sequence in a pass, one tensor for each `StateArray`.

    before: what the sequence had, zeros at its first token. after: to be filled by the layer, and
    the same tensors as `before` where a pass goes on without a copy.
    """

    before: tuple[Tensor, ...]
    after: tuple[Tensor, ...]


class StateLayout(NamedTuple):
    """Memory layout of slots, each with one sequence's states in all layers."""

    layers: tuple[tuple[StateArray, ...], ...]  # nothing for a layer without states
    dtype: torch.dtype  # that is computed in
    num_slots: int

    @property
    def slot_bytes(self) -> int:
        ends = [0, *(end for layer in self.places() for *_, end in layer)]
        return align_up(ends[-1], PAGE_BYTES)

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self.slot_bytes

    def places(self) -> list[tuple[tuple[tuple[int, ...], torch.dtype, int, int], ...]]:
        """Return shape, dtype, first byte in a slot and end of each array, by layer."""
        found, end = [], 0
        for arrays in self.layers:
            placed = []
            for shape, name in arrays:
                dtype = self.dtype if name is None else getattr(torch, name)
                start = align_up(end)
                end = start + math.prod(shape) * dtype.itemsize
                placed.append((shape, dtype, start, end))
            found.append(tuple(placed))
        return found


@dataclass(eq=False, slots=True)
class RangeStates:
    """The slots of one sequence: those of its passes, and snapshots by their number of tokens."""

    before: int | None = None  # None: it is not running
    after: int | None = None
    num_tokens: int = 0  # that `before` has gathered
    is_clear: bool = False  # `before` is all zeros
    has_memory: bool = False  # both slots have
    ends: tuple[int, ...] = ()  # of the pass's parts: positions after them; (): there is no pass
    asked: dict[int, int] = field(default_factory=dict)  # by layer: parts that it has asked for
    written: set[int] = field(default_factory=set)  # layers that have asked for all of them
    crossed: set[int] = field(default_factory=set)  # layers whose states lie in `after`
    first: int = 0  # position of the chunk of the pass whose turn it is in the layers
    coming: dict[int, int] = field(default_factory=dict)  # snapshots that the pass is to fill
    snapshots: dict[int, int] = field(default_factory=dict)  # ascending

    @property
    def slots(self) -> list[int]:
        own = [slot for slot in (self.before, self.after) if slot is not None]
        return [*own, *self.snapshots.values(), *self.coming.values()]

    @property
    def num_held(self) -> int:
        """Number of slots with memory, where each draws its own."""
        return len(self.slots) if self.has_memory else len(self.snapshots)

    @property
    def places(self) -> list[int]:
        """The numbers of tokens after which there are states."""
        return [*self.snapshots, *([] if self.before is None else [self.num_tokens])]

    def add(self, num_tokens: int, slot: int) -> None:
        """Note a snapshot."""
        self.snapshots[num_tokens] = slot
        self.snapshots = dict(sorted(self.snapshots.items()))

    def least_useful(self) -> int | None:
        """Return the snapshot, but for the last, whose loss costs the fewest tokens."""
        places = [0, *self.snapshots]
        gaps = [(place - before, place) for before, place in zip(places, places[1:], strict=False)]
        return min(gaps[:-1])[1] if len(gaps) > 1 else None


class StateStore:
    """Owns the slots; does not know who is running or kept."""

    def __init__(self, layout: StateLayout, memory: Tensor, arena: PagedArena | None = None):
        """memory: uint8, of all slots. arena: provides it; by default it is all there."""
        self.slot_bytes, self.num_slots = layout.slot_bytes, layout.num_slots
        self._memory, self._arena = memory, arena
        self._places = layout.places()
        self._layers = frozenset(n for n, arrays in enumerate(layout.layers) if arrays)
        self._free = [*reversed(range(layout.num_slots))]
        self._views: dict[tuple[int, int], tuple[Tensor, ...]] = {}  # by slot and layer

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        return self._free.pop()

    def free(self, *slots: int) -> None:
        """Give slots back, and their memory where it comes in pages."""
        self._free.extend(slots)
        if self._arena is not None:
            for slot in slots:  # with its free neighbours, as two slots may share a page
                first, stop = slot, slot + 1
                while first and first - 1 in self._free:
                    first -= 1
                while stop in self._free:
                    stop += 1
                end = stop * self.slot_bytes
                if stop == self.num_slots:
                    end = self._arena.part_bytes
                self._arena.release(first * self.slot_bytes, end)

    def commit(self, *slots: int) -> None:
        """Give slots memory. Raises PageError."""
        if self._arena is not None:
            for slot in slots:
                self._arena.commit(slot * self.slot_bytes, (slot + 1) * self.slot_bytes)

    def content(self, slot: int) -> Tensor:
        """View all bytes of a slot."""
        return self._memory[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def slot_at(self, states: RangeStates, num_tokens: int) -> int:
        """Return the slot that has a sequence's states after `num_tokens` tokens."""
        if num_tokens in states.snapshots:
            return states.snapshots[num_tokens]
        if states.before is None or num_tokens != states.num_tokens:
            raise InternalError(f"A sequence has no states after {num_tokens} tokens.")
        self._uncross(states)
        return states.before

    def start_at(self, states: RangeStates, source: int, num_tokens: int) -> None:
        """Copy a slot to the states that a sequence's next pass begins with. Raises PageError."""
        if states.before is None:
            raise InternalError("Only a running sequence can start.")
        self.commit(states.before)
        self.content(states.before).copy_(self.content(source))
        states.num_tokens, states.is_clear = num_tokens, False
        states.crossed.clear()

    def add_snapshot(self, states: RangeStates) -> None:
        """Copy a running sequence's states to a free slot. Raises PageError."""
        if states.before is None:
            raise InternalError("A kept sequence has no states but snapshots.")
        slot = self.new_snapshot(states, states.num_tokens)
        self._uncross(states)
        self.content(slot).copy_(self.content(states.before))

    def new_snapshot(self, states: RangeStates, num_tokens: int) -> int:
        """Give a sequence a free slot, to be filled. Raises PageError."""
        slot = self.take()
        try:
            self.commit(slot)
        except PageError:
            self.free(slot)
            raise
        states.add(num_tokens, slot)
        return slot

    def drop(self, states: RangeStates, *places: int) -> None:
        """Free snapshots."""
        self.free(*(states.snapshots.pop(place) for place in places))

    def settle(self, states: RangeStates, num_tokens: int) -> None:
        """End a sequence, of which the first `num_tokens` tokens are kept, with their snapshots.

        Its last states become one where they are just after these tokens.
        """
        if states.before is not None and states.after is not None:
            self._uncross(states)
            self.free(states.after)
            if states.num_tokens == num_tokens and num_tokens not in states.snapshots:
                states.add(num_tokens, states.before)
            else:
                self.free(states.before)
            states.before = states.after = None
        self._drop_coming(states)
        self.drop(states, *[place for place in states.snapshots if place > num_tokens])
        if num_tokens not in states.snapshots:
            raise InternalError(f"A sequence has no states after {num_tokens} tokens.")

    def begin_pass(self, states: RangeStates, first: int, ends: Sequence[int]) -> None:
        """Note that a pass computes the tokens from `first` on; any before it has failed.

        ends: the positions after each part of the pass. Layers write their states there.
        """
        states.ends = ()
        states.asked.clear()
        states.written.clear()
        self._drop_coming(states)
        if states.before is None or states.after is None:
            raise InternalError(f"Tokens from {first} on are of a sequence that has ended.")
        if not first and not states.is_clear:
            self.content(states.before).zero_()
            states.num_tokens, states.is_clear = 0, True
            states.crossed.clear()
        if first != states.num_tokens:
            raise InternalError(
                f"Tokens from {first} on cannot follow states of {states.num_tokens} tokens."
            )
        states.first, states.ends = first, tuple(ends)

    def expect(self, states: RangeStates, num_tokens: int) -> None:
        """Let the pass that has begun fill a snapshot after the sequence's first tokens.

        num_tokens: of these, where a part of the pass ends. Raises PageError.
        """
        self.new_snapshot(states, num_tokens)
        states.coming[num_tokens] = states.snapshots.pop(num_tokens)

    def of(self, layer: int, states: RangeStates | None) -> States:
        """Return a layer's states in the next part of the pass that has begun.

        A layer asks once for each part, in their order. What it writes after one is a snapshot if
        that is expected, and what it reads for the next.
        """
        if self._memory.is_meta:
            return States(self._of(0, layer), self._of(HALVES - 1, layer))
        if states is None or states.before is None or states.after is None or not states.ends:
            raise InternalError(f"Layer {layer} asks for states, and no pass has begun.")
        part = min(states.asked.get(layer, 0), len(states.ends) - 1)
        if (states.ends[part - 1] if part else states.num_tokens) < states.first:
            raise InternalError(
                f"Layer {layer} asks for states after {states.first} tokens too early."
            )
        states.asked[layer] = part + 1
        if part + 1 == len(states.ends):
            states.written.add(layer)
        slots = self._slots(states, part)
        if layer in states.crossed:
            other = {states.before: states.after, states.after: states.before}
            slots = (other.get(slots[0], slots[0]), other.get(slots[1], slots[1]))
        return States(*(self._of(slot, layer) for slot in slots))

    def offsets(self, layer: int) -> tuple[int, ...]:
        """Return the first byte of each of a layer's states in a slot."""
        return tuple(start for _, _, start, _ in self._places[layer])

    def claim(
        self, states: RangeStates | None, first: int, layers: Collection[int]
    ) -> tuple[int, int]:
        """Return the addresses of the slots before and after a part of the pass that has begun.

        first: the part's position. layers: those whose states will be written there.
        """
        if states is None or states.before is None or states.after is None or not states.ends:
            raise InternalError("States are asked for, and no pass has begun.")
        states.written |= self._layers.intersection(layers)
        part = (states.num_tokens, *states.ends).index(first)
        start = self._memory.data_ptr()
        before, after = (start + slot * self.slot_bytes for slot in self._slots(states, part))
        return before, after

    def end_pass(self, states: RangeStates) -> None:
        """Make what a pass has written the states that the next one finds."""
        if not states.ends:
            return
        if missing := states.asked.keys() - states.written:
            raise InternalError(
                f"Layer {min(missing)} has asked for the states of {states.asked[min(missing)]} of "
                f"a sequence's {len(states.ends)} segments."
            )
        states.before, states.after = states.after, states.before
        # A layer that was not run, as speed is measured, keeps its states where they are.
        states.crossed = {n for n in self._layers if (n in states.written) == (n in states.crossed)}
        states.num_tokens, states.ends, states.is_clear = states.ends[-1], (), False
        states.asked.clear()
        states.written.clear()
        while states.coming:
            states.add(*states.coming.popitem())

    def _slots(self, states: RangeStates, part: int) -> tuple[int, int]:
        """Return the slots before and after a part: snapshots to come, or those of the pass."""
        if states.before is None or states.after is None:
            raise InternalError("Only a running sequence has passes.")
        inner = (states.coming.get(end, states.after) for end in states.ends[:-1])
        path = (states.before, *inner, states.after)
        return path[part], path[part + 1]

    def _drop_coming(self, states: RangeStates) -> None:
        """Free the snapshots that a failed pass was to fill."""
        self.free(*states.coming.values())
        states.coming.clear()

    def _uncross(self, states: RangeStates) -> None:
        """Bring all layers' states into `before`."""
        for layer in states.crossed:
            if states.before is not None and states.after is not None:
                for to, source in zip(
                    self._of(states.before, layer), self._of(states.after, layer), strict=True
                ):
                    to.copy_(source)
        states.crossed.clear()

    def _of(self, slot: int, layer: int) -> tuple[Tensor, ...]:
        found = self._views.get((slot, layer))
        if found is None:
            content = self.content(slot)
            found = tuple(
                content[start:end].view(dtype).view(shape)
                for shape, dtype, start, end in self._places[layer]
            )
            if not found:
                raise InternalError(f"Layer {layer} has no states.")
            self._views[slot, layer] = found
        return found
