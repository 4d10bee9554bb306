"""Elastic memory behind the tokens of a KV cache.

Every part of the cache (a layer's keys or values, of one head) has addresses for all tokens that
there can ever be, so that growing adds memory at the end of each part, and nothing moves. Addresses
without memory cost nothing.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from lowtide.core import align_up
from lowtide.memory.arena import ElasticArena


class StorageShape(NamedTuple):
    """Shape of a KV cache's tensor.

    Two arrays hold keys and values; one holds keys that are also the values (a latent).
    """

    num_layers: int
    num_arrays: int
    num_heads: int  # of keys and values
    num_tokens: int
    width: int  # of a head


class KVLayout(NamedTuple):
    """Memory layout of a cache of `shape`, with the tokens of each head in one part."""

    shape: StorageShape
    dtype: torch.dtype

    @property
    def num_parts(self) -> int:
        return math.prod(self.shape[:3])

    @property
    def row_bytes(self) -> int:
        """Bytes of a token in one part."""
        return self.shape.width * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all parts."""
        return self.num_parts * self.row_bytes

    def address_bytes(self, group_bytes: int) -> int:
        """Return the addresses to reserve: whole groups for every part."""
        return self.num_parts * align_up(self.shape.num_tokens * self.row_bytes, group_bytes)

    def longest(self, num_bytes: int, group_bytes: int, granule_tokens: int) -> KVLayout:
        """Return the layout with as many tokens, in whole granules, as there are addresses for."""
        granule_bytes = granule_tokens * self.row_bytes
        part_bytes = num_bytes // self.num_parts // group_bytes * group_bytes
        num_tokens = max(self.shape.num_tokens, part_bytes // granule_bytes * granule_tokens)
        return self._replace(shape=self.shape._replace(num_tokens=num_tokens))

    def strides(self, part_bytes: int) -> tuple[int, int, int, int, int]:
        """Return the strides, in elements, of a tensor over parts of `part_bytes` bytes."""
        part, row = part_bytes // self.dtype.itemsize, self.row_bytes // self.dtype.itemsize
        array = self.shape.num_heads * part
        return (self.shape.num_arrays * array, array, part, row, 1)


class KVPages:
    """Memory behind tokens of all parts at once. `storage` has the layout's shape."""

    def __init__(self, arena: ElasticArena, layout: KVLayout) -> None:
        """arena: has as many parts as the layout, each large enough for all tokens."""
        self.arena = arena
        self._row_bytes = layout.row_bytes
        strides = layout.strides(arena.part_bytes)
        self.storage = arena.bytes.view(layout.dtype).as_strided(layout.shape, strides)

    def commit(self, start: int, stop: int) -> None:
        """Make tokens `start` to `stop` of every part usable, preserving those that are.

        Raises PageError, changing nothing, if there is no memory for them.
        """
        self.arena.commit(start * self._row_bytes, stop * self._row_bytes)

    def release(self, start: int, stop: int) -> None:
        """Release the memory of tokens `start` to `stop`, except groups shared with neighbours."""
        self.arena.release(start * self._row_bytes, stop * self._row_bytes)
