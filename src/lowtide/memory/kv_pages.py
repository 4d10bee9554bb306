"""Shapes of a KV cache, and the memory of its tokens and states.

Every part of the cache (a layer's keys or values, of one head) has addresses for all tokens that
there can ever be, so that growing adds memory at the end of each part, and nothing moves. Addresses
without memory cost nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.core import align_up
from lowtide.memory.arena import PagedArena
from lowtide.memory.pages import PageAccount

GRANULE_TOKENS = 16
"""Ranges start on such multiples, so that a sequence's position never changes an alignment."""

WINDOWS_SHARE = 2
"""Tokens of capped windows take one part in this many of the other layers' bytes."""

MOST_WINDOWS = 16
"""Sequences of full length for which capped windows have room at most."""


class StorageShape(NamedTuple):
    """Shape of a KV cache's tensor of layers that store tokens alike.

    Two arrays hold keys and values; one holds keys that are also the values (a latent).
    """

    num_layers: int
    num_arrays: int
    num_heads: int  # of keys and values
    num_tokens: int
    width: int  # of a head


class WindowShape(NamedTuple):
    """Shape of a tensor of layers with a sliding window, which keep a sequence's last tokens.

    Its tokens are the room of all sequences.
    """

    storage: StorageShape
    window: int  # positions that a row sees, its own included
    cap: int  # tokens that it keeps of one sequence

    def first_needed(self, num_tokens: int) -> int:
        """Return the first position to keep so that a sequence can go on after `num_tokens`.

        It is a whole granule, at or before the first position that the next row sees.
        """
        return max(0, num_tokens + 1 - self.window) // GRANULE_TOKENS * GRANULE_TOKENS


class KVPlace(NamedTuple):
    """A layer's place in a cache of several tensors."""

    group: int  # which tensor; those of windows come after the others
    number: int  # of the layer in it


class KVShape(NamedTuple):
    """Shape of a whole cache: a tensor for each group of layers that store tokens alike."""

    groups: tuple[StorageShape, ...]  # of layers that keep all tokens
    places: tuple[KVPlace | None, ...]  # of each layer; None: it stores no tokens
    num_tokens: int  # of all sequences
    windows: tuple[WindowShape, ...] = ()

    @classmethod
    def of(
        cls,
        layers: Sequence[tuple[int, int, int] | None],
        num_tokens: int,
        windows: Sequence[int] = (),
        max_rows: int = 0,
    ) -> KVShape:
        """layers: arrays, heads and width of a token in each layer, None for nothing.

        windows: positions that a row sees in each layer, 0 for all; a layer keeps the last ones
            only, where these are fewer than `num_tokens`. By default all keep everything.
        max_rows: most rows of a sequence in a pass.
        """
        counts: dict[tuple[tuple[int, int, int], int], int] = {}
        of_layers: list[tuple[tuple[tuple[int, int, int], int], int] | None] = []
        for layer, window in zip(layers, windows or [0] * len(layers), strict=True):
            if layer is None:
                of_layers.append(None)
                continue
            key = layer, window if window and _cap(window, max_rows) < num_tokens else 0
            of_layers.append((key, counts.get(key, 0)))
            counts[key] = counts.get(key, 0) + 1
        order = sorted(counts, key=lambda key: key[1] > 0)  # stable: else in order of appearance
        whole = [_storage(layer, counts[layer, 0], num_tokens) for layer, w in order if not w]
        capped = [
            WindowShape(_storage(layer, counts[layer, w], 0), w, _cap(w, max_rows))
            for layer, w in order
            if w
        ]
        places = [at and KVPlace(order.index(at[0]), at[1]) for at in of_layers]
        return cls(tuple(whole), tuple(places), num_tokens, tuple(capped)).grown(num_tokens)

    @property
    def num_elements(self) -> int:
        return sum(map(math.prod, self.storage))

    @property
    def storage(self) -> tuple[StorageShape, ...]:
        """The shapes of all tensors, those of windows last."""
        return (*self.groups, *(window.storage for window in self.windows))

    def at(self, num_tokens: int) -> KVShape:
        """Return the shape for another number of tokens, of which all layers keep all."""
        if self.windows:
            shapes = [place and self.storage[place.group] for place in self.places]
            layers = [
                None if shape is None else (shape.num_arrays, shape.num_heads, shape.width)
                for shape in shapes
            ]
            return KVShape.of(layers, num_tokens)
        groups = (group._replace(num_tokens=num_tokens) for group in self.groups)
        return self._replace(groups=tuple(groups), num_tokens=num_tokens)

    def grown(self, num_tokens: int) -> KVShape:
        """Return the shape for another number of tokens, with the same windows.

        These have room for one sequence, for more while they take no more than their share.
        """
        whole, capped = map(_token_elements, (self.groups, (each[0] for each in self.windows)))
        groups = tuple(group._replace(num_tokens=num_tokens) for group in self.groups)
        shared = num_tokens * (whole or capped) // WINDOWS_SHARE // max(1, capped)
        windows = []
        for each in self.windows:
            num_here = min(max(shared, each.cap), MOST_WINDOWS * each.cap, num_tokens)
            num_here = num_here // GRANULE_TOKENS * GRANULE_TOKENS
            windows.append(each._replace(storage=each.storage._replace(num_tokens=num_here)))
        return self._replace(groups=groups, num_tokens=num_tokens, windows=tuple(windows))

    def of_one_layer(self) -> KVShape:
        """Return the shape of a cache whose layers take turns: one layer of each group."""
        groups = (group._replace(num_layers=1) for group in self.groups)
        places = (place and place._replace(number=0) for place in self.places)
        return self._replace(groups=tuple(groups), places=tuple(places))


def _cap(window: int, max_rows: int) -> int:
    """Return the number of tokens that a pass of `max_rows` rows needs: its own, and those seen.

    The first of them are a whole granule.
    """
    return align_up(window - 1 + max_rows + GRANULE_TOKENS - 1, GRANULE_TOKENS)


def _storage(layer: tuple[int, int, int], num_layers: int, num_tokens: int) -> StorageShape:
    num_arrays, num_heads, width = layer
    return StorageShape(num_layers, num_arrays, num_heads, num_tokens, width)


def _token_elements(shapes: Iterable[StorageShape]) -> int:
    """Return the numbers that tensors keep of a token."""
    return sum(math.prod(shape._replace(num_tokens=1)) for shape in shapes)


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

    def strides(self, part_bytes: int) -> tuple[int, int, int, int, int]:
        """Return the strides, in elements, of a tensor over parts of `part_bytes` bytes."""
        part, row = part_bytes // self.dtype.itemsize, self.row_bytes // self.dtype.itemsize
        array = self.shape.num_heads * part
        return (self.shape.num_arrays * array, array, part, row, 1)


def longest(shape: KVShape, dtype: torch.dtype, num_bytes: int, group_bytes: int) -> KVShape:
    """Return the shape with as many tokens, in whole granules, as there are addresses for."""

    def has_room(num_granules: int) -> bool:
        grown = shape.grown(num_granules * GRANULE_TOKENS)
        layouts = (KVLayout(each, dtype) for each in grown.storage)
        return sum(layout.address_bytes(group_bytes) for layout in layouts) <= num_bytes

    layouts = [KVLayout(each, dtype) for each in shape.groups or shape.storage]
    most = num_bytes // (GRANULE_TOKENS * sum(layout.token_bytes for layout in layouts))
    num_granules = bisect_left(range(most + 1), True, key=lambda n: not has_room(n)) - 1
    return shape.grown(max(shape.num_tokens, num_granules * GRANULE_TOKENS))


class KVPages:
    """Memory of the tokens of all parts at once. `storage` has the tensors of the layouts."""

    def __init__(
        self,
        *groups: tuple[PagedArena, KVLayout],
        states: PagedArena | None = None,
        windows: Sequence[KVPages] = (),
    ) -> None:
        """groups: an arena has as many parts as its layout, each large enough for all tokens.

        states: of all slots of states (`StateStore`). windows: of each capped window. All arenas
        draw on one account.
        """
        self.account: PageAccount = groups[0][0].account if groups else windows[0].account
        self.states = states
        self.windows = tuple(windows)
        self.arenas = [(arena, layout.row_bytes) for arena, layout in groups]
        self.storage = [
            arena.bytes.view(layout.dtype).as_strided(
                layout.shape, layout.strides(arena.part_bytes)
            )
            for arena, layout in groups
        ]

    @property
    def all_storage(self) -> list[Tensor]:
        """The tensors of the layouts, those of windows last."""
        return [*self.storage, *(tensor for each in self.windows for tensor in each.storage)]

    @property
    def committed_bytes(self) -> int:
        """Memory committed now."""
        others = 0 if self.states is None else self.states.committed_bytes
        others += sum(each.committed_bytes for each in self.windows)
        return others + sum(arena.committed_bytes for arena, _ in self.arenas)

    def commit(self, start: int, stop: int) -> None:
        """Make tokens `start` to `stop` of every part usable, preserving those that are.

        Raises PageError if there is no memory for them; then `release` gives back what a first
        group has got.
        """
        for arena, row_bytes in self.arenas:
            arena.commit(start * row_bytes, stop * row_bytes)

    def release(self, start: int, stop: int) -> None:
        """Release the memory of tokens `start` to `stop`, except pages shared with neighbours."""
        for arena, row_bytes in self.arenas:
            arena.release(start * row_bytes, stop * row_bytes)

    def close(self) -> None:
        """Release everything; the storage must not be used afterwards."""
        for arena, _ in self.arenas:
            arena.close()
        for each in self.windows:
            each.close()
        if self.states is not None:
            self.states.close()
