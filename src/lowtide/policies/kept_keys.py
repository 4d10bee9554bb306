"""Whether memory saves more as kept keys or as expert slots, in seconds.

Kept keys save the passes over their tokens, if a request goes on from them; where they also lie on
disk, only reading them again. A slot saves reads of an expert, pass after pass. What both save is
compared over as many passes as the keys have waited.
"""

from __future__ import annotations

from typing import NamedTuple

from lowtide.policies.slot_lending import MOVE_READS

PRIOR_CHANCE = 0.25
"""That a request goes on from kept keys before they have waited twice as long, if none was seen."""

PRIOR_SEQUENCES = 4
"""Kept sequences that have to be seen until they count as much as that."""

YOUNG_PASSES = 64
"""Within the plan no keys give way that have waited for fewer: until then neither how often experts
are asked for nor whether a request goes on is known."""

_NUM_CLASSES = 48  # of ages, which double from class to class


class Continuations:
    """The share of kept sequences that requests went on from, by how long they had waited.

    Ages are in passes: 0, 1, 2 to 3, 4 to 7 and so on are a class each.
    """

    def __init__(self) -> None:
        self._num_seen = [0] * _NUM_CLASSES  # that went on in this class or outlived it
        self._num_continued = [0] * _NUM_CLASSES

    def ended(self, age_passes: int, is_continued: bool) -> None:
        """Note that keys are kept no longer.

        A request went on from them, or they were given up and nothing more is known of them.
        """
        reached = _age_class(age_passes)
        for outlived in range(reached):
            self._num_seen[outlived] += 1
        if is_continued:
            self._num_seen[reached] += 1
            self._num_continued[reached] += 1

    def chance(self, age_passes: int) -> float:
        """That a request goes on from keys of this age before it has doubled, 0 to 1."""
        reached = _age_class(age_passes)
        num_continued = PRIOR_SEQUENCES * PRIOR_CHANCE + self._num_continued[reached]
        return num_continued / (PRIOR_SEQUENCES + self._num_seen[reached])


class MemoryPrices(NamedTuple):
    """Measured seconds, and the memory that saves them."""

    token_s: float  # of a pass over a prompt, for each of its tokens
    token_bytes: int  # of keys and values
    read_s: float  # that an absent expert makes a pass wait
    slot_bytes: int

    def of_stored_keys(self) -> MemoryPrices:
        """Return the prices of keys that also lie on disk.

        They are read back as experts are, where that takes less than computing them.
        """
        read_s = self.token_bytes * self.read_s / self.slot_bytes
        return self._replace(token_s=min(self.token_s, read_s))

    def keys_save_more(self, chance: float, age_passes: int, slot_use: float) -> bool:
        """Return True if kept keys save at least as much as the slots that their memory would make.

        A sequence's length is in both, and does not matter. slot_use: the share of passes in which
        one more resident saves a read.
        """
        num_reads = max(0.0, age_passes * slot_use - MOVE_READS)
        kept_s = chance * self.token_s / self.token_bytes
        return kept_s >= num_reads * self.read_s / self.slot_bytes


def gives_way(
    is_planned: bool, age_passes: int, chance: float, slot_use: float, prices: MemoryPrices | None
) -> bool:
    """Whether keys of this age are to be given up.

    is_planned: all keys and values are within what the plan has for them. prices: None where
    nothing was measured yet, so that the plan alone decides.
    """
    if prices is None:
        return not is_planned
    if is_planned and age_passes < YOUNG_PASSES:
        return False
    return not prices.keys_save_more(chance, age_passes, slot_use)


def _age_class(age_passes: int) -> int:
    return min(age_passes.bit_length(), _NUM_CLASSES - 1)
