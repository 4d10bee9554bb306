"""Weighs kept KV caches against expert slots, by their ages and measured times.

`policies/kept_keys.py` decides which of the two gets memory that both could use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lowtide.memory.kept_rule import KeptRule
from lowtide.memory.kv_cache import KVRange
from lowtide.policies.kept_keys import Continuations, MemoryPrices, gives_way

PROMPT_ROWS = 64
"""Prompts with fewer rows are not timed: a pass' fixed time would dominate."""

_NEWEST = 1 / 16
"""Weight of the newest pass in mean times."""


class KeptRoom(KeptRule):
    """Owns the ages of kept ranges, in passes, and mean times. Moves no memory.

    Until times are measured, or if `slot_use` is None, kept ranges have the planned room.
    """

    def __init__(
        self,
        planned_tokens: int,
        token_bytes: int,
        slot_bytes: int,
        snapshot_bytes: int = 0,
        window_bytes: Sequence[int] = (),
    ) -> None:
        """Begin with nothing kept.

        planned_tokens: room in tokens; windows and snapshots count as tokens of as many bytes.
        token_bytes: of keys and values in layers that keep all tokens.
        snapshot_bytes: of a copy of all states.
        window_bytes: of a token, in each group of layers that keep the last tokens.
        """
        # Share of passes in which an expert slot would save a read if slots got this many more
        # bytes; 0 if they need none.
        self.slot_use: Callable[[int], float] | None = None
        self._planned_tokens = planned_tokens
        self._token_bytes, self._slot_bytes = token_bytes, slot_bytes
        self._snapshot_bytes, self._window_bytes = snapshot_bytes, window_bytes
        self._continuations = Continuations()
        self._kept_at: dict[KVRange, int] = {}  # after which pass
        self._prompt_row, self._miss = _MeanSeconds(), _MeanSeconds()
        self._num_misses, self._wait_s = 0, 0.0
        self.num_passes = 0
        self.num_given_up = 0

    def note_pass(
        self, num_prompt_rows: int, prompt_s: float, num_misses: int, wait_s: float
    ) -> None:
        """Record a pass: a prompt's rows and seconds, absent experts, and seconds waited for them.

        The last two count all passes so far.
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
        prices = self.prices
        fixed_bytes = kv_range.num_snapshots * self._snapshot_bytes
        for index, window in kv_range.all_windows:
            fixed_bytes += window.num_usable * self._window_bytes[index]
        if prices is not None:  # each token that is saved takes its share
            token_bytes = prices.token_bytes + fixed_bytes // max(1, kv_range.num_usable)
            prices = prices._replace(token_bytes=max(1, token_bytes))
        if prices is not None and kv_range.num_stored == kv_range.num_kept:
            prices = prices.of_stored_keys()
        slot_use = 0.0
        if self.slot_use is not None and prices is not None:
            held_bytes = kv_range.num_usable * self._token_bytes + fixed_bytes
            slot_use = self.slot_use(held_bytes)
        is_given_up = gives_way(
            is_planned=num_tokens <= self._planned_tokens,
            age_passes=age_passes,
            chance=self._continuations.chance(age_passes),
            slot_use=slot_use,
            prices=prices,
        )
        self.num_given_up += is_given_up
        return is_given_up

    @property
    def prices(self) -> MemoryPrices | None:
        """Prices by the measured times; None until all of them are measured."""
        token_s, read_s = self._prompt_row.each_s, self._miss.each_s
        if self.slot_use is None or token_s is None or read_s is None:
            return None
        return MemoryPrices(token_s, self._token_bytes, read_s, self._slot_bytes)

    def as_dict(self) -> dict[str, float]:
        """Return the number of kept sequences, and of those given up so far."""
        return {"num_kept": len(self._kept_at), "num_kept_given_up": self.num_given_up}


class _MeanSeconds:
    """Mean seconds per counted item, weighted towards the newest passes."""

    def __init__(self) -> None:
        self._seconds = self._count = 0.0

    def add(self, seconds: float, count: int) -> None:
        self._seconds += _NEWEST * (seconds - self._seconds)
        self._count += _NEWEST * (count - self._count)

    @property
    def each_s(self) -> float | None:
        """Mean seconds per item; None if there was none."""
        return self._seconds / self._count if self._count else None
