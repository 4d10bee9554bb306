"""Elastic memory behind the tokens of a KV cache, and behind states.

Every part of the cache (a layer's keys or values, of one head) has addresses for all tokens that
there can ever be, so that growing adds memory at the end of each part, and nothing moves. Addresses
without memory cost nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import torch

from lowtide.core import align_up
from lowtide.memory.arena import ElasticArena


class StorageShape(NamedTuple):
    """Shape of a KV cache's tensor of layers that store tokens alike.

    Two arrays hold keys and values; one holds keys that are also the values (a latent).
    """

    num_layers: int
    num_arrays: int
    num_heads: int  # of keys and values
    num_tokens: int
    width: int  # of a head


class KVPlace(NamedTuple):
    """A layer's place in a cache of several tensors."""

    group: int  # which tensor
    number: int  # of the layer in it


class KVShape(NamedTuple):
    """Shape of a whole cache: a tensor for each group of layers that store tokens alike."""

    groups: tuple[StorageShape, ...]
    places: tuple[KVPlace | None, ...]  # of each layer; None: it stores no tokens

    @classmethod
    def of(cls, layers: Sequence[tuple[int, int, int] | None], num_tokens: int) -> KVShape:
        """layers: arrays, heads and width of a token in each layer, None for nothing."""
        counts: dict[tuple[int, int, int], int] = {}
        places: list[KVPlace | None] = []
        for layer in layers:
            if layer is None:
                places.append(None)
                continue
            index = counts.setdefault(layer, 0)
            places.append(KVPlace(list(counts).index(layer), index))
            counts[layer] += 1
        return cls(
            tuple(
                StorageShape(count, num_arrays, num_heads, num_tokens, width)
                for (num_arrays, num_heads, width), count in counts.items()
            ),
            tuple(places),
        )

    @property
    def num_tokens(self) -> int:
        return self.groups[0].num_tokens

    @property
    def num_elements(self) -> int:
        return sum(map(math.prod, self.groups))

    def at(self, num_tokens: int) -> KVShape:
        """Return the shape for another number of tokens."""
        groups = (group._replace(num_tokens=num_tokens) for group in self.groups)
        return self._replace(groups=tuple(groups))

    def of_one_layer(self) -> KVShape:
        """Return the shape of a cache whose layers take turns: one layer of each group."""
        groups = (group._replace(num_layers=1) for group in self.groups)
        places = (place and place._replace(number=0) for place in self.places)
        return KVShape(tuple(groups), tuple(places))


class KVLayout(NamedTuple):
    """Memory layout of a tensor of `shape`, with the tokens of each head in one part."""

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
        """Return the addresses to reserve: whole groups of pages for every part."""
        return self.num_parts * align_up(self.shape.num_tokens * self.row_bytes, group_bytes)

    def at(self, num_tokens: int) -> KVLayout:
        """Return the layout for another number of tokens."""
        return self._replace(shape=self.shape._replace(num_tokens=num_tokens))

    def strides(self, part_bytes: int) -> tuple[int, int, int, int, int]:
        """Return the strides, in elements, of a tensor over parts of `part_bytes` bytes."""
        part, row = part_bytes // self.dtype.itemsize, self.row_bytes // self.dtype.itemsize
        array = self.shape.num_heads * part
        return (self.shape.num_arrays * array, array, part, row, 1)


def longest(
    layouts: Sequence[KVLayout], num_bytes: int, group_bytes: int, granule_tokens: int
) -> list[KVLayout]:
    """Return the layouts with as many tokens, in whole granules, as there are addresses for."""
    least = layouts[0].shape.num_tokens

    def has_room(num_granules: int) -> bool:
        grown = (layout.at(num_granules * granule_tokens) for layout in layouts)
        return sum(layout.address_bytes(group_bytes) for layout in grown) <= num_bytes

    most = num_bytes // (granule_tokens * sum(layout.token_bytes for layout in layouts))
    num_granules = bisect_left(range(most + 1), True, key=lambda n: not has_room(n)) - 1
    return [layout.at(max(least, num_granules * granule_tokens)) for layout in layouts]


class KVPages:
    """Memory behind tokens of all parts at once. `storage` has the tensors of the layouts."""

    def __init__(
        self, *groups: tuple[ElasticArena, KVLayout], states: ElasticArena | None = None
    ) -> None:
        """groups: an arena has as many parts as its layout, each large enough for all tokens.

        states: of all slots of states (`StateStore`). The arenas draw on one account.
        """
        self.account = groups[0][0].account
        self.states = states
        self._arenas = [(arena, layout.row_bytes) for arena, layout in groups]
        self.storage = [
            arena.bytes.view(layout.dtype).as_strided(
                layout.shape, layout.strides(arena.part_bytes)
            )
            for arena, layout in groups
        ]

    @property
    def committed_bytes(self) -> int:
        """Memory committed now."""
        of_states = 0 if self.states is None else self.states.committed_bytes
        return of_states + sum(arena.committed_bytes for arena, _ in self._arenas)

    def commit(self, start: int, stop: int) -> None:
        """Make tokens `start` to `stop` of every part usable, preserving those that are.

        Raises PageError if there is no memory for them; then `release` gives back what a first
        group has got.
        """
        for arena, row_bytes in self._arenas:
            arena.commit(start * row_bytes, stop * row_bytes)

    def release(self, start: int, stop: int) -> None:
        """Release the memory of tokens `start` to `stop`, except pages shared with neighbours."""
        for arena, row_bytes in self._arenas:
            arena.release(start * row_bytes, stop * row_bytes)

    def close(self) -> None:
        """Release everything; the storage must not be used afterwards."""
        for arena, _ in self._arenas:
            arena.close()
        if self.states is not None:
            self.states.close()
