"""Rule for dropping kept ranges of a KV cache early; `KVCache` keeps their order."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowtide.memory.kv_cache import KVRange


class KeptRule:
    """Base rule, which drops no range early. Called on the engine's thread for each kept range."""

    def kept(self, kv_range: KVRange) -> None:
        """Note that a sequence ended and its range is kept."""

    def copied(self, kv_range: KVRange) -> None:
        """Note that a request continued from a copy of the range."""

    def ended(self, kv_range: KVRange, is_continued: bool) -> None:
        """Note that the range is no longer kept; is_continued: a request continued in it."""

    def gives_way(self, kv_range: KVRange, num_tokens: int) -> bool:
        """Return True to drop the least recently used range.

        num_tokens: tokens with memory, or asking for it, of all ranges, running ones included.
        """
        return False
