"""Decides, in seconds, whether memory saves more as kept KV cache or as expert slots.

A kept KV cache saves the passes over its tokens if a request continues from it or, if it is also on
disk, the difference to reading it. A slot saves reads of an expert in pass after pass. Both savings
are compared over as many passes as the cache has waited.
"""

from __future__ import annotations

from typing import NamedTuple

from lowtide.policies.slot_lending import MOVE_READS

PRIOR_CHANCE = 0.25
"""Assumed chance that a request continues from a kept cache before its age doubles."""

PRIOR_SEQUENCES = 4
"""Number of observed sequences that weigh as much as the assumption."""

YOUNG_PASSES = 64
"""Within the plan, younger caches are never dropped: until then neither the use of experts nor the
chance of a continuation is known."""

_NUM_CLASSES = 48  # of ages, which double from class to class


class Continuations:
    """Share of kept sequences from which requests continued, by age.

    Ages are in passes, in classes of 0, 1, 2 to 3, 4 to 7 and so on.
    """

    def __init__(self) -> None:
        self._num_seen = [0] * _NUM_CLASSES  # that went on in this class or outlived it
        self._num_continued = [0] * _NUM_CLASSES

    def ended(self, age_passes: int, is_continued: bool) -> None:
        """Record that a KV cache is no longer kept.

        Either a request continued from it, or it was dropped and nothing more is known.
        """
        reached = _age_class(age_passes)
        for outlived in range(reached):
            self._num_seen[outlived] += 1
        if is_continued:
            self._num_seen[reached] += 1
            self._num_continued[reached] += 1

    def chance(self, age_passes: int) -> float:
        """Return the chance, 0 to 1, that a request continues before the age has doubled."""
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
        """Return the prices of a KV cache that is also on disk.

        It is read back as experts are, if that is faster than computing it.
        """
        read_s = self.token_bytes * self.read_s / self.slot_bytes
        return self._replace(token_s=min(self.token_s, read_s))

    def keys_save_more(self, chance: float, age_passes: int, slot_use: float) -> bool:
        """Return True if a kept cache saves at least as much as slots made from its memory.

        The sequence's length cancels out. slot_use: the share of passes in which one more resident
        saves a read.
        """
        num_reads = max(0.0, age_passes * slot_use - MOVE_READS)
        kept_s = chance * self.token_s / self.token_bytes
        return kept_s >= num_reads * self.read_s / self.slot_bytes


def gives_way(
    is_planned: bool, age_passes: int, chance: float, slot_use: float, prices: MemoryPrices | None
) -> bool:
    """Return True if a kept KV cache should be dropped, so that its memory holds experts.

    is_planned: all KV caches fit into the planned size. age_passes: passes since it was used.
    chance: probability that a request reuses it. slot_use: share of passes in which an expert slot
    in its place would save a read. prices: None until measured; the plan alone then decides.
    """
    if prices is None:
        return not is_planned
    if is_planned and age_passes < YOUNG_PASSES:
        return False
    return not prices.keys_save_more(chance, age_passes, slot_use)


def _age_class(age_passes: int) -> int:
    return min(age_passes.bit_length(), _NUM_CLASSES - 1)
