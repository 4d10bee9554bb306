"""Whether a kept range of a KV cache gives way early; in which order is `KVCache`'s list."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowtide.memory.kv_cache import KVRange


class KeptRule:
    """By default no range gives way early. Called on the engine's thread for each kept range."""

    def kept(self, kv_range: KVRange) -> None:
        """A sequence has ended."""

    def copied(self, kv_range: KVRange) -> None:
        """A request went on from a copy of it."""

    def ended(self, kv_range: KVRange, is_continued: bool) -> None:
        """It is kept no longer. is_continued: because a request went on from it."""

    def gives_way(self, kv_range: KVRange, num_tokens: int) -> bool:
        """Whether the range that was longest not used is given up, while `num_tokens` of all
        ranges, running ones included, have or want memory.
        """
        return False
