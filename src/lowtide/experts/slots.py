"""Expert slots of one tier: their experts and uses.

`SlotLedger` is the bookkeeping, `ExpertSlots` the bytes. A placement policy decides what to keep,
and a transfer moves bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lowtide.core import BoolArray, IntArray
from lowtide.errors import InternalError
from lowtide.experts.layout import ExpertLayout, SlotLayout
from lowtide.formats import MatrixFormat
from lowtide.kernels.operands import AnyWeights
from lowtide.memory.arena import Region
from lowtide.schemas.schema import SlotTarget

NO_SLOT = -1
"""Slot number of an expert that is in none."""

FREE, TAKEN, RETIRED = -1, -2, -3
"""State of a slot without a resident expert; `residency.hpp` shares the first two."""


class FreeSlots:
    """Queue of free slots, first freed first, in memory shared with compiled code."""

    def __init__(self, slots: Sequence[int]) -> None:
        """Fill the queue in order; slots: all that can ever be in it at once."""
        self.ring: IntArray = np.array(slots, np.int64)
        # The first one's place, and how many there are.
        self.state: IntArray = np.array([0, len(slots)], np.int64)

    def __len__(self) -> int:
        return int(self.state[1])

    def __iter__(self) -> Iterator[int]:
        first, count = self.state.tolist()
        return iter(np.roll(self.ring, -first)[:count].tolist())

    def add(self, *slots: int) -> None:
        first, count = self.state.tolist()
        for end, slot in enumerate(slots, first + count):
            self.ring[end % len(self.ring)] = slot
        self.state[1] = count + len(slots)

    def fill(self, slots: Sequence[int]) -> None:
        """Replace the queue by these slots, in order."""
        self.ring[: len(slots)] = slots
        self.state[:] = 0, len(slots)


class SlotLedger:
    """Ledger of slots and their owners. A leased slot cannot be evicted; all changes are checked.

    A slot is free, taken (its bytes are arriving or it will be dropped after use), or bound to an
    expert, which is then resident; or it is retired, when it has no memory. A compiled pass reads
    and changes `table`, `owner` and `free` (`residency.hpp`).
    """

    def __init__(self, num_layers: int, num_experts: int, num_slots: int) -> None:
        self.num_layers, self.num_experts = num_layers, num_experts
        self.max_slots = num_slots
        self.table: IntArray = np.full((num_layers, num_experts), NO_SLOT, np.int64)
        # By slot: layer * num_experts + expert of what is bound to it, or what it is instead.
        self.owner: IntArray = np.full(num_slots, FREE, np.int64)
        self._num_leases = [0] * num_slots
        self.free = FreeSlots(list(range(num_slots)))

    @property
    def num_free(self) -> int:
        return int(self.free.state[1])

    @property
    def num_slots(self) -> int:
        """Number of slots that have memory: all but the retired ones."""
        return int(np.count_nonzero(self.owner != RETIRED))

    @property
    def num_resident(self) -> int:
        return int(np.count_nonzero(self.residents))

    @property
    def residents(self) -> BoolArray:
        """True for experts in a slot: [num_layers, num_experts]."""
        residents: BoolArray = self.table != NO_SLOT
        return residents

    def is_resident(self, layer: int) -> BoolArray:
        """Return True for experts of `layer` in a slot: [num_experts]."""
        is_resident: BoolArray = self.table[layer] != NO_SLOT
        return is_resident

    def has(self, layer: int, expert: int) -> bool:
        """Return True if an expert is resident."""
        return bool(self.table[layer, expert] != NO_SLOT)

    def slot_of(self, layer: int, expert: int) -> int:
        """Return the slot of a resident expert."""
        slot = int(self.table[layer, expert])
        if slot == NO_SLOT:
            raise InternalError(f"Expert {expert} of MoE layer {layer} is in no slot.")
        return slot

    def take(self) -> int:
        """Take a free slot."""
        [slot] = self.take_several(1)
        return slot

    def take_several(self, num_slots: int) -> list[int]:
        """Take `num_slots` free slots, or none. Raises InternalError if there are fewer."""
        ring, (first, count) = self.free.ring, self.free.state.tolist()
        if count < num_slots:
            raise InternalError(f"All {self.num_slots} expert slots are in use.")
        slots: list[int] = ring.take(range(first, first + num_slots), mode="wrap").tolist()
        self.free.state[:] = (first + num_slots) % len(ring), count - num_slots
        self.owner[slots] = TAKEN
        return slots

    def bind(self, layer: int, expert: int, slot: int) -> None:
        """Bind `expert` to a taken slot, which makes it resident."""
        if self.owner[slot] != TAKEN:
            raise _not_taken(slot)
        if self.table[layer, expert] != NO_SLOT:
            raise InternalError(f"Expert {expert} of MoE layer {layer} is in a slot already.")
        self.owner[slot] = layer * self.num_experts + expert
        self.table[layer, expert] = slot

    def drop(self, slot: int) -> None:
        """Free a taken slot: its content is forgotten."""
        if self.owner[slot] != TAKEN:
            raise _not_taken(slot)
        self._free_again(slot)

    def retire(self, slot: int) -> None:
        """Retire a free slot: its memory may be freed."""
        if not self.is_free(slot):
            raise InternalError(f"Slot {slot} is not free to be retired.")
        self.free.fill([each for each in self.free if each != slot])
        self.owner[slot] = RETIRED

    def restore(self, slot: int) -> None:
        """Free a retired slot, which has memory again."""
        if self.owner[slot] != RETIRED:
            raise InternalError(f"Slot {slot} is not retired.")
        self._free_again(slot)

    def move(self, slot: int, target: int) -> None:
        """Bind the expert of `slot` to the taken slot `target`, its new copy, and free `slot`."""
        if not self.is_bound(slot):
            raise InternalError(f"Slot {slot} holds no expert to move.")
        layer, expert = divmod(int(self.owner[slot]), self.num_experts)
        if self.owner[target] != TAKEN:
            raise _not_taken(target)
        self.evict(layer, expert)
        self.bind(layer, expert, target)

    def is_free(self, slot: int) -> bool:
        """Return True if nothing uses the slot, and it is not retired."""
        return bool(self.owner[slot] == FREE)

    def is_bound(self, slot: int) -> bool:
        """Return True if the slot has a resident expert (and is not free or taken)."""
        return bool(self.owner[slot] >= 0)

    def is_leased(self, slot: int) -> bool:
        """Return True if the expert in `slot` is in use."""
        return self._num_leases[slot] > 0

    def slots_of(self, layer: int, experts: IntArray) -> IntArray:
        """Return the slots of resident experts."""
        slots: IntArray = self.table[layer, experts]
        if len(slots) and slots.min() == NO_SLOT:
            raise InternalError(f"Some of experts {experts} of MoE layer {layer} are in no slot.")
        return slots

    def lease(self, slot: int) -> None:
        """Forbid the eviction of the expert bound to `slot` until the matching `release`."""
        if not self.is_bound(slot):
            raise InternalError(f"Slot {slot} holds no expert to lease.")
        self._num_leases[slot] += 1

    def release(self, slot: int) -> None:
        if self._num_leases[slot] < 1:
            raise InternalError(f"Slot {slot} was released without a lease.")
        self._num_leases[slot] -= 1

    def evict(self, layer: int, *experts: int) -> None:
        """Evict resident experts and free their slots.

        Weights are read-only, so nothing is copied back.
        """
        if not experts:
            return
        slots: list[int] = self.table[layer, experts].tolist()
        for expert, slot in zip(experts, slots, strict=True):
            if slot == NO_SLOT:
                raise InternalError(f"Expert {expert} of MoE layer {layer} is in no slot.")
            if self._num_leases[slot]:
                raise InternalError(f"Slot {slot} holds expert {expert}, which is in use.")
        self.table[layer, experts] = NO_SLOT
        self.owner[slots] = FREE
        self.free.add(*slots)

    def reclaim(self, set_aside: Collection[int] = ()) -> None:
        """Free every taken slot except `set_aside`, and end all leases, since nothing uses them.

        Retired slots stay retired. Also undoes a change that Ctrl-C interrupted.
        """
        bound = np.flatnonzero(self.owner >= 0)
        is_lost = self.table.flat[self.owner[bound]] != bound
        self.owner[bound[is_lost]] = FREE
        self.owner[self.owner == TAKEN] = FREE
        self.owner[list(set_aside)] = TAKEN
        self._num_leases = [0] * self.max_slots
        self.free.fill(np.flatnonzero(self.owner == FREE).tolist())

    def check_integrity(self) -> None:
        """Recount every slot; InternalError if one is lost, shared or still leased."""
        free = list(self.free)
        bound = np.flatnonzero(self.owner >= 0)
        if sorted(free) != np.flatnonzero(self.owner == FREE).tolist():
            taken, retired = (
                int(np.count_nonzero(self.owner == kind)) for kind in (TAKEN, RETIRED)
            )
            raise InternalError(
                f"{len(bound)} bound, {taken} taken, {retired} retired and {len(free)} free slots "
                f"do not make {self.max_slots}."
            )
        for slot, owner in zip(bound.tolist(), self.owner[bound].tolist(), strict=True):
            layer, expert = divmod(owner, self.num_experts)
            if self.table[layer, expert] != slot:
                raise InternalError(f"Slot {slot} and its expert {(layer, expert)} disagree.")
        if self.num_resident != len(bound):
            raise InternalError(f"{self.num_resident} residents for {len(bound)} bound slots.")
        if any(self._num_leases):
            raise InternalError(f"{sum(self._num_leases)} leases were not released.")

    def _free_again(self, slot: int) -> None:
        self.owner[slot] = FREE
        self.free.add(slot)


def _not_taken(slot: int) -> InternalError:
    return InternalError(f"Slot {slot} is not taken.")


class ExpertSlots:
    """Bytes of a tier's slots, in one arena, addressed by slot number."""

    def __init__(self, arena: Region, layout: SlotLayout) -> None:
        self._arena = arena
        self.memory = arena.array()  # all slots, consecutive
        self.layout = layout
        # By slot, and shared by layers of one layout.
        made: dict[ExpertLayout, dict[int, AnyWeights]] = {}
        self._weights = [made.setdefault(each, {}) for each in layout.layers]
        self._images: dict[int, Tensor] = {}

    def weights(self, layer: int, slot: int) -> AnyWeights:
        """Return the weights of an expert of `layer` in a slot.

        They are made once, since a slot never moves, unless experts of a layer differ.
        """
        layout, made = self.layout.layers[layer], self._weights[layer]
        if layout.tags is not None:
            return layout.weights_in(self.image(slot))
        if slot not in made:
            made[slot] = layout.weights_in(self.image(slot))
        return made[slot]

    def part_as(
        self, layer: int, slot: int, part: int, stored: MatrixFormat
    ) -> tuple[NDArray[np.uint8], MatrixFormat]:
        """Return the bytes of an expert's part that is stored as `stored`, and its format there.

        Tags the slot with the format if experts of a layer differ.
        """
        layout, target = self.layout.layers[layer], self.part(layer, slot, part)
        place, tag = layout.parts[part], layout.variant(part, stored)
        if tag is None or layout.tags is None:
            return target, place.format
        self.memory[slot * self.layout.num_bytes + layout.tags + part] = tag
        return target[: stored.matrix_bytes(place.shape)], stored

    def part(self, layer: int, slot: int, part: int) -> NDArray[np.uint8]:
        """Return the bytes of a one-tensor part: 0 gate, 1 up, 2 down, then biases."""
        place = self.layout.layers[layer].parts[part]
        start = slot * self.layout.num_bytes + place.offsets[0]
        return self.memory[start : start + place.num_bytes[0]]

    def in_file_order(
        self, layer: int, slot: int, target: SlotTarget, tensor: int = 0
    ) -> NDArray[Any]:
        """View the bits of a target's parts in the order in which a file stores them.

        [rows, parts, columns], or [columns, rows, parts] if transposed; a bias has one column.
        Block formats have bytes instead of elements. tensor: which of the format's.
        """
        places = self.layout.layers[layer].parts[target.first : target.first + target.num_parts]
        first, num_rows = places[0], places[0].shape[0]
        item_bytes = first.format.block_bytes[0] if first.format.block_size == 1 else 1
        row_bytes = first.num_bytes[tensor] // num_rows
        starts = [place.offsets[tensor] for place in places]
        parts: NDArray[Any] = np.ndarray(
            (target.num_parts, num_rows, row_bytes // item_bytes),
            f"u{item_bytes}",
            self.memory.data,
            slot * self.layout.num_bytes + starts[0],
            (starts[-1] - starts[0] or row_bytes, row_bytes, item_bytes),
        )
        return parts.transpose((2, 1, 0) if target.is_transposed else (1, 0, 2))

    def image(self, slot: int) -> Tensor:
        """Return all bytes of a slot as one contiguous tensor, made once: [slot_bytes] uint8."""
        if slot not in self._images:
            start = slot * self.layout.num_bytes
            self._images[slot] = self._arena.bytes[start : start + self.layout.num_bytes]
        return self._images[slot]
