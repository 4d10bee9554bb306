"""Kept keys beside expert slots: how long each has waited, and what passes were measured to take.

Decides by `policies/kept_keys.py` which of the two has the memory that both could use.
"""

from __future__ import annotations

from collections.abc import Callable

from lowtide.memory.kept_rule import KeptRule
from lowtide.memory.kv_cache import KVRange
from lowtide.policies.kept_keys import Continuations, MemoryPrices, gives_way

PROMPT_ROWS = 64
"""Fewer rows of a prompt are not timed: what a pass takes by itself would count for too much."""

_NEWEST = 1 / 16
"""Weight of the last pass in what passes take."""


class KeptRoom(KeptRule):
    """Owns the ages of kept ranges, in passes, and measured seconds. Moves no memory.

    Where nothing was measured yet, or `slot_use` is None, kept ranges have the plan's room.
    """

    def __init__(self, planned_tokens: int, token_bytes: int, slot_bytes: int) -> None:
        """token_bytes: of keys and values in all layers.

        slot_use: told bytes, says in which share of passes each slot that they would make saves a
        read; 0 where slots need no more memory.
        """
        self.slot_use: Callable[[int], float] | None = None
        self._planned_tokens = planned_tokens
        self._token_bytes, self._slot_bytes = token_bytes, slot_bytes
        self._continuations = Continuations()
        self._kept_at: dict[KVRange, int] = {}  # after which pass
        self._prompt_row, self._miss = _MeanSeconds(), _MeanSeconds()
        self._num_misses, self._wait_s = 0, 0.0
        self.num_passes = 0
        self.num_given_up = 0

    def note_pass(
        self, num_prompt_rows: int, prompt_s: float, num_misses: int, wait_s: float
    ) -> None:
        """Note a pass: rows and seconds of a prompt, absent experts, and seconds waited for them.

        The latter two count all passes so far.
        """
        self.num_passes += 1
        if num_prompt_rows >= PROMPT_ROWS:
            self._prompt_row.add(prompt_s, num_prompt_rows)
        elif not num_prompt_rows:
            self._miss.add(wait_s - self._wait_s, num_misses - self._num_misses)
        self._num_misses, self._wait_s = num_misses, wait_s

    def kept(self, kv_range: KVRange) -> None:
        self._kept_at[kv_range] = self.num_passes

    def copied(self, kv_range: KVRange) -> None:
        self.ended(kv_range, is_continued=True)
        self.kept(kv_range)

    def ended(self, kv_range: KVRange, is_continued: bool) -> None:
        age_passes = self.num_passes - self._kept_at.pop(kv_range, self.num_passes)
        self._continuations.ended(age_passes, is_continued)

    def gives_way(self, kv_range: KVRange, num_tokens: int) -> bool:
        age_passes = self.num_passes - self._kept_at.get(kv_range, self.num_passes)
        prices = self._prices()
        if prices is not None and kv_range.num_stored == kv_range.num_kept:
            prices = prices.of_stored_keys()
        slot_use = 0.0
        if self.slot_use is not None and prices is not None:
            slot_use = self.slot_use(kv_range.num_usable * self._token_bytes)
        is_given_up = gives_way(
            is_planned=num_tokens <= self._planned_tokens,
            age_passes=age_passes,
            chance=self._continuations.chance(age_passes),
            slot_use=slot_use,
            prices=prices,
        )
        self.num_given_up += is_given_up
        return is_given_up

    def as_dict(self) -> dict[str, float]:
        """Kept sequences now, and those that were given up, by the plan or for slots, so far."""
        return {"num_kept": len(self._kept_at), "num_kept_given_up": self.num_given_up}

    def _prices(self) -> MemoryPrices | None:
        token_s, read_s = self._prompt_row.each_s, self._miss.each_s
        if self.slot_use is None or token_s is None or read_s is None:
            return None
        return MemoryPrices(token_s, self._token_bytes, read_s, self._slot_bytes)


class _MeanSeconds:
    """Seconds for each of what passes count, the last passes above all."""

    def __init__(self) -> None:
        self._seconds = self._count = 0.0

    def add(self, seconds: float, count: int) -> None:
        self._seconds += _NEWEST * (seconds - self._seconds)
        self._count += _NEWEST * (count - self._count)

    @property
    def each_s(self) -> float | None:
        """None where there was nothing to count."""
        return self._seconds / self._count if self._count else None
