"""Number of residents allowed in each layer, which may change between two passes."""

from __future__ import annotations

import numpy as np

from lowtide.core import IntArray


class Capacity:
    """Present capacity, and the most that there has been."""

    def __init__(self, capacity: IntArray) -> None:
        self.per_layer = capacity
        self._most = capacity
        self.has_changed = False

    def change(self, capacity: IntArray) -> None:
        """Set the capacity; surplus residents leave as their layers run."""
        self.per_layer = capacity
        self.has_changed = True
        self._most = np.maximum(self._most, capacity)

    def is_short(self, layer: int, num_residents: int) -> bool:
        """Return True if a layer may have to evict, with `num_residents` in all layers.

        It may if the capacity has been larger, or if there are too many residents in all. More
        residents than one layer's capacity prove nothing: a policy may divide the total otherwise.
        """
        if not self.has_changed:
            return False
        is_less = bool(self.per_layer[layer] < self._most[layer])
        return is_less or num_residents > int(self.per_layer.sum())
