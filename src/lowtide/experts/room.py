"""How many residents each layer may have now, which may change between two passes."""

from __future__ import annotations

import numpy as np

from lowtide.core import IntArray


class Room:
    """Knows the present capacity and the most that there has been; not who is resident."""

    def __init__(self, capacity: IntArray) -> None:
        """capacity: [num_layers], at the start."""
        self.capacity = capacity
        self._most = capacity

    def change(self, capacity: IntArray) -> None:
        """From now on. Residents that are too many leave as their layers run."""
        self.capacity = capacity
        self._most = np.maximum(self._most, capacity)

    def is_short(self, layer: int, num_residents: int) -> bool:
        """Whether a layer may have to give up experts, of `num_residents` in all layers.

        A policy may divide the room otherwise than `capacity` says, so that more residents than
        that are no sign: but a layer's room that was more once is, and too many in all are.
        """
        if self.capacity is self._most:
            return False
        is_less = bool(self.capacity[layer] < self._most[layer])
        return is_less or num_residents > int(self.capacity.sum())
