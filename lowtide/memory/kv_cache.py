"""Keys and values of running sequences, one contiguous token range for each sequence."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lowtide.core import align_up
from lowtide.errors import InternalError, PlanError

GRANULE_TOKENS = 16
"""Ranges start on such multiples, so that a sequence's place never changes an alignment."""


def storage_shape(
    num_layers: int, num_kv_heads: int, head_dim: int, num_tokens: int, num_arrays: int = 2
) -> tuple[int, int, int, int, int]:
    """[layers, arrays, kv_heads, tokens, head_dim] of a cache for `num_tokens` tokens.

    Two arrays hold keys and values; one holds keys that are also the values (a latent).
    """
    return (num_layers, num_arrays, num_kv_heads, align_up(num_tokens, GRANULE_TOKENS), head_dim)


@dataclass(frozen=True, slots=True)
class KVRange:
    """Where a sequence's keys and values lie: tokens `start` to `start + capacity` of the cache."""

    start: int
    capacity: int


class KVCache:
    """Owns the token ranges; does not know what a sequence is.

    `storage` is of a `storage_shape`, in the compute dtype.
    """

    def __init__(self, storage: Tensor) -> None:
        self._storage = storage
        self.num_tokens = storage.shape[3]
        self._taken: list[KVRange] = []  # ascending by start

    def can_allocate(self, num_tokens: int) -> bool:
        """Whether `allocate(num_tokens)` would succeed now."""
        return self._find(align_up(num_tokens, GRANULE_TOKENS)) is not None

    def allocate(self, num_tokens: int) -> KVRange:
        """A free range of at least `num_tokens` tokens, first fit.

        Raises PlanError when there is none.
        """
        capacity = align_up(num_tokens, GRANULE_TOKENS)
        start = self._find(capacity)
        if start is None:
            raise PlanError(
                f"The KV cache has no free range of {num_tokens} tokens (it holds "
                f"{self.num_tokens} in all); wait for a sequence to end, or raise context."
            )
        kv_range = KVRange(start, capacity)
        self._taken.append(kv_range)
        self._taken.sort(key=lambda taken: taken.start)
        return kv_range

    def free(self, kv_range: KVRange) -> None:
        """Gives a range back; its contents are forgotten."""
        if kv_range not in self._taken:
            raise InternalError(f"{kv_range} was freed but is not taken.")
        self._taken.remove(kv_range)

    def write(
        self, layer: int, kv_range: KVRange, position: int, key: Tensor, value: Tensor
    ) -> None:
        """Stores rows of keys and values, each [rows, kv_heads, head_dim], from `position` on.

        A cache of one array stores the keys only.
        """
        if position + key.shape[0] > kv_range.capacity:
            raise InternalError(
                f"{key.shape[0]} rows from position {position} on leave a KV range of "
                f"{kv_range.capacity} tokens."
            )
        start = kv_range.start + position
        stop = start + key.shape[0]
        self._storage[layer, 0, :, start:stop].copy_(key.transpose(0, 1))
        if self._storage.shape[1] == 2:
            self._storage[layer, 1, :, start:stop].copy_(value.transpose(0, 1))

    def read(self, layer: int, kv_range: KVRange, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Views of the first `num_tokens` keys and values, each [kv_heads, tokens, head_dim]."""
        stop = kv_range.start + num_tokens
        layer_storage = self._storage[layer, :, :, kv_range.start : stop]
        return layer_storage[0], layer_storage[-1]

    def _find(self, capacity: int) -> int | None:
        start = 0
        for taken in self._taken:
            if taken.start - start >= capacity:
                return start
            start = taken.start + taken.capacity
        return start if self.num_tokens - start >= capacity else None
