"""Expert slots of one tier: which expert lies where, and who is using it.

`SlotLedger` is the bookkeeping, `ExpertSlots` the bytes. Neither decides what to keep: that is a
placement policy's; and neither moves bytes: that is a transfer's.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lowtide.core import BoolArray, IntArray
from lowtide.errors import InternalError
from lowtide.experts.layout import ExpertLayout, SlotLayout
from lowtide.formats import MatrixFormat
from lowtide.kernels.operands import ClampedWeights, ExpertWeights
from lowtide.memory.arena import Region
from lowtide.schemas.schema import SlotTarget

_NO_SLOT = -1


def slots_per_device(num_slots: int, num_devices: int) -> list[int]:
    """Equal shares of a tier's slots; the first devices get the remainder."""
    share, remainder = divmod(num_slots, num_devices)
    return [share + (device < remainder) for device in range(num_devices)]


class SlotLedger:
    """Who owns each slot. A leased slot cannot be evicted; all changes are checked.

    A slot is free, taken (its bytes are arriving or it will be dropped after use), or bound to
    an expert, which is then resident; or it is retired, when there is no memory behind it. Of
    several devices each has a range of the slots.
    """

    def __init__(
        self, num_layers: int, num_experts: int, num_slots: int, num_devices: int = 1
    ) -> None:
        self.num_layers, self.num_experts = num_layers, num_experts
        self.num_slots = num_slots
        self.num_devices = num_devices
        devices = np.repeat(np.arange(num_devices), slots_per_device(num_slots, num_devices))
        self.device_of: IntArray = np.append(devices, -1)  # by slot, at last that of _NO_SLOT
        self._slot_of = np.full((num_layers, num_experts), _NO_SLOT, np.int64)
        self._owner: list[tuple[int, int] | None] = [None] * num_slots
        self._is_taken = [False] * num_slots
        self._is_retired = [False] * num_slots
        self._num_leases = [0] * num_slots
        self._num_bound = 0
        self._free = self._all_free()

    @property
    def num_free(self) -> int:
        return sum(map(len, self._free))

    def num_free_on(self, device: int) -> int:
        return len(self._free[device])

    def devices_with(self, layer: int, experts: IntArray) -> IntArray:
        """The device in whose slots each expert is resident, -1 where it is not."""
        devices: IntArray = self.device_of[self._slot_of[layer, experts]]
        return devices

    @property
    def num_resident(self) -> int:
        return int((self._slot_of != _NO_SLOT).sum())

    @property
    def has_everybody(self) -> bool:
        """Whether every expert of every layer is in a slot."""
        return self._num_bound == self._slot_of.size

    def table(self, layer: int) -> IntArray:
        """The slot of each expert of a layer, less than 0 where it is in none: always of the
        present, and not to be written to. [num_experts]"""
        table: IntArray = self._slot_of[layer]
        return table

    def is_resident(self, layer: int) -> BoolArray:
        """Per expert of `layer`: whether its weights are in a slot. [num_experts]"""
        is_resident: BoolArray = self._slot_of[layer] != _NO_SLOT
        return is_resident

    def slot_of(self, layer: int, expert: int) -> int:
        """The slot of a resident expert."""
        slot = int(self._slot_of[layer, expert])
        if slot == _NO_SLOT:
            raise InternalError(f"Expert {expert} of MoE layer {layer} is in no slot.")
        return slot

    def take(self, device: int = 0) -> int:
        """A free slot of `device`, now taken."""
        if not self._free[device]:
            own = np.flatnonzero(self.device_of == device).tolist()
            num_live = sum(not self._is_retired[slot] for slot in own)
            raise InternalError(f"All {num_live} expert slots are in use.")
        slot = self._free[device].popleft()
        self._is_taken[slot] = True
        return slot

    def bind(self, layer: int, expert: int, slot: int) -> None:
        """Makes a taken slot the place of `expert`, which becomes resident."""
        self._check_taken(slot)
        if self._slot_of[layer, expert] != _NO_SLOT:
            raise InternalError(f"Expert {expert} of MoE layer {layer} is in a slot already.")
        self._is_taken[slot] = False
        self._owner[slot] = (layer, expert)
        self._slot_of[layer, expert] = slot
        self._num_bound += 1

    def drop(self, slot: int) -> None:
        """Frees a taken slot: what was in it is forgotten."""
        self._check_taken(slot)
        self._is_taken[slot] = False
        self._free[self.device_of[slot]].append(slot)

    def retire(self, slot: int) -> None:
        """Takes a free slot out of use: its memory may go."""
        if slot not in self._free[self.device_of[slot]]:
            raise InternalError(f"Slot {slot} is not free to be retired.")
        self._free[self.device_of[slot]].remove(slot)
        self._is_retired[slot] = True

    def restore(self, slot: int) -> None:
        """Frees a retired slot, which has memory again."""
        if not self._is_retired[slot]:
            raise InternalError(f"Slot {slot} is not retired.")
        self._is_retired[slot] = False
        self._free[self.device_of[slot]].append(slot)

    def move(self, slot: int, target: int) -> None:
        """The expert bound to `slot` is in the taken slot `target`, to which its bytes were
        copied, from now on; `slot` is free."""
        owner = self._owner[slot]
        if owner is None:
            raise InternalError(f"Slot {slot} holds no expert to move.")
        self._check_taken(target)
        self.evict(*owner)
        self.bind(*owner, target)

    def is_free(self, slot: int) -> bool:
        """Whether nobody has the slot, and it is not retired."""
        return slot in self._free[self.device_of[slot]]

    def is_bound(self, slot: int) -> bool:
        """Whether a slot holds a resident expert (and is not free or taken)."""
        return self._owner[slot] is not None

    def is_leased(self, slot: int) -> bool:
        """Whether the expert in `slot` is in use."""
        return self._num_leases[slot] > 0

    def slots_of(self, layer: int, experts: IntArray) -> IntArray:
        """The slots of resident experts."""
        slots: IntArray = self._slot_of[layer, experts]
        if len(slots) and slots.min() == _NO_SLOT:
            raise InternalError(f"Some of experts {experts} of MoE layer {layer} are in no slot.")
        return slots

    def lease(self, slot: int) -> None:
        """Forbids the eviction of the expert bound to `slot` until the matching `release`."""
        if self._owner[slot] is None:
            raise InternalError(f"Slot {slot} holds no expert to lease.")
        self._num_leases[slot] += 1

    def release(self, slot: int) -> None:
        if self._num_leases[slot] < 1:
            raise InternalError(f"Slot {slot} was released without a lease.")
        self._num_leases[slot] -= 1

    def evict(self, layer: int, expert: int) -> None:
        """Frees the slot of a resident expert.

        Weights are read-only, so nothing is copied back.
        """
        slot = self.slot_of(layer, expert)
        if self._num_leases[slot]:
            raise InternalError(f"Slot {slot} holds expert {expert}, which is in use.")
        self._slot_of[layer, expert] = _NO_SLOT
        self._owner[slot] = None
        self._num_bound -= 1
        self._free[self.device_of[slot]].append(slot)

    def reclaim(self, set_aside: Collection[int] = ()) -> None:
        """Frees every taken slot but those `set_aside`, and ends every lease: nobody uses any of
        them any more. What is retired stays so.

        Also undoes a change that Ctrl-C left half made.
        """
        for slot, owner in enumerate(self._owner):
            if owner is not None and self._slot_of[owner] != slot:
                self._owner[slot] = None
        self._is_taken = [slot in set_aside for slot in range(self.num_slots)]
        self._num_leases = [0] * self.num_slots
        self._num_bound = self.num_resident
        self._free = self._all_free()

    def check_integrity(self) -> None:
        """Recounts every slot; raises InternalError if one is lost, shared or still leased."""
        owners = [(slot, owner) for slot, owner in enumerate(self._owner) if owner is not None]
        bound = [slot for slot, _ in owners]
        taken = [slot for slot, is_taken in enumerate(self._is_taken) if is_taken]
        retired = [slot for slot, is_retired in enumerate(self._is_retired) if is_retired]
        every = [*bound, *taken, *retired, *itertools.chain(*self._free)]
        if sorted(every) != list(range(self.num_slots)):
            raise InternalError(
                f"{len(bound)} bound, {len(taken)} taken, {len(retired)} retired and "
                f"{self.num_free} free slots do not make {self.num_slots}."
            )
        for slot, owner in owners:
            if self._slot_of[owner] != slot:
                raise InternalError(f"Slot {slot} and its expert {owner} disagree.")
        if self.num_resident != len(bound):
            raise InternalError(f"{self.num_resident} residents for {len(bound)} bound slots.")
        if any(self._num_leases):
            raise InternalError(f"{sum(self._num_leases)} leases were not released.")

    def _all_free(self) -> list[deque[int]]:
        """By device: slots without an owner; the one that is freed first is taken first."""
        free: list[deque[int]] = [deque() for _ in range(self.num_devices)]
        for slot, owner in enumerate(self._owner):
            if owner is None and not self._is_taken[slot] and not self._is_retired[slot]:
                free[self.device_of[slot]].append(slot)
        return free

    def _check_taken(self, slot: int) -> None:
        if not self._is_taken[slot]:
            raise InternalError(f"Slot {slot} is not taken.")


class ExpertSlots:
    """The bytes of a tier's slots, in one arena, addressed by slot number."""

    def __init__(self, arena: Region, layout: SlotLayout) -> None:
        self._arena = arena
        self._array = arena.array()
        self.layout = layout
        # By slot, and shared by layers of one layout.
        made: dict[ExpertLayout, dict[int, ExpertWeights | ClampedWeights]] = {}
        self._weights = [made.setdefault(each, {}) for each in layout.layers]

    def weights(self, layer: int, slot: int) -> ExpertWeights | ClampedWeights:
        """The weights of an expert of `layer` in a slot: made once, since a slot never moves, but
        where experts of a layer differ."""
        layout, made = self.layout.layers[layer], self._weights[layer]
        if layout.tags is not None:
            return layout.weights_in(self.image(slot))
        if slot not in made:
            made[slot] = layout.weights_in(self.image(slot))
        return made[slot]

    def part_as(
        self, layer: int, slot: int, part: int, stored: MatrixFormat
    ) -> tuple[NDArray[np.uint8], MatrixFormat]:
        """Where an expert's part that is stored so goes, and the format that it has there; notes
        which one, where experts of a layer differ."""
        layout, target = self.layout.layers[layer], self.part(layer, slot, part)
        place, tag = layout.parts[part], layout.variant(part, stored)
        if tag is None or layout.tags is None:
            return target, place.format
        self._array[slot * self.layout.num_bytes + layout.tags + part] = tag
        return target[: stored.matrix_bytes(place.shape)], stored

    def part(self, layer: int, slot: int, part: int) -> NDArray[np.uint8]:
        """The bytes of one part (0 gate, 1 up, 2 down, then their biases) of a slot, without
        padding; the part is of one tensor."""
        place = self.layout.layers[layer].parts[part]
        start = slot * self.layout.num_bytes + place.offsets[0]
        return self._array[start : start + place.num_bytes[0]]

    def in_file_order(
        self, layer: int, slot: int, target: SlotTarget, tensor: int = 0
    ) -> NDArray[Any]:
        """The bits of the elements of a target's parts, in the order in which they are stored.

        [rows, parts, columns], or [columns, rows, parts] where that is transposed; a bias has
        one column. Of a format's blocks, bytes instead of elements. tensor: which of the format's.
        """
        places = self.layout.layers[layer].parts[target.first : target.first + target.num_parts]
        first, num_rows = places[0], places[0].shape[0]
        item_bytes = first.format.block_bytes[0] if first.format.block_size == 1 else 1
        row_bytes = first.num_bytes[tensor] // num_rows
        starts = [place.offsets[tensor] for place in places]
        parts: NDArray[Any] = np.ndarray(
            (target.num_parts, num_rows, row_bytes // item_bytes),
            f"u{item_bytes}",
            self._array.data,
            slot * self.layout.num_bytes + starts[0],
            (starts[-1] - starts[0] or row_bytes, row_bytes, item_bytes),
        )
        return parts.transpose((2, 1, 0) if target.is_transposed else (1, 0, 2))

    def image(self, slot: int) -> Tensor:
        """All bytes of a slot, as one contiguous tensor. [slot_bytes] uint8"""
        start = slot * self.layout.num_bytes
        return self._arena.bytes[start : start + self.layout.num_bytes]
