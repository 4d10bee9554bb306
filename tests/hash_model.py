"""A model of hashes for decoders: exact, so that what it writes can be compared exactly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from row_model import RowStatisticsFromLogits

from lowtide.config import StateArray
from lowtide.core import Step, StepKind
from lowtide.decode.logits import LOGIT_ROWS
from lowtide.engine.planning.budget_division import SMALL_GROUP_BYTES
from lowtide.engine.running.moving_memory import kv_pages, kv_pages_of, paged_states
from lowtide.errors import InternalError
from lowtide.layers.batch import Batch, Segment
from lowtide.memory.kv_cache import KVCache, cache_over
from lowtide.memory.kv_pages import KVLayout, KVShape
from lowtide.memory.pages import PageBudget
from lowtide.memory.states import StateLayout, StateStore

VOCAB = 20
MASK = 19
EOS = 3


def mix(x: np.ndarray) -> np.ndarray:
    """A hash of uint64 values (the finalizer of splitmix64)."""
    x = np.asarray(x).astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class HashModel(RowStatisticsFromLogits):
    """Two block-causal layers of hashes: any wrong or stale key changes everything after it.

    With one, keys depend on tokens and places alone.
    """

    def __init__(
        self, kv_cache: KVCache, max_rows: int, can_mask: bool = True, num_layers: int = 2
    ) -> None:
        self.max_rows = max_rows
        self.steps = []
        self.rows = []
        self.can_mask = can_mask
        self.num_layers = num_layers
        self.fails_in: int | None = None
        self._kv_cache = kv_cache
        self._hidden = torch.zeros(max_rows, 1, dtype=torch.int64)
        self._logits = torch.zeros(LOGIT_ROWS + 15, VOCAB)

    def forward(self, batch: Batch) -> torch.Tensor:
        num_rows = len(batch.token_ids)
        assert 0 < num_rows <= self.max_rows
        if self.fails_in is not None:
            self.fails_in -= 1
            if self.fails_in < 0:
                raise InternalError("as told")
        self.steps.append(batch.step)
        self.rows.append(num_rows)
        self._hidden.fill_(-1)
        for segment in batch.segments:
            rows = slice(segment.start, segment.stop)
            positions = batch.positions[rows].numpy()
            assert positions.tolist() == list(range(segment.first_position, segment.end_position))
            state = self._segment(segment, positions, batch.token_ids[rows].numpy())
            self._hidden[rows, 0] = torch.from_numpy(state.view(np.int64))
        assert batch.segments[-1].stop == num_rows
        return self._hidden[:num_rows]

    def _segment(self, segment: Segment, positions: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        stop = max(segment.end_position, segment.sees_to)
        assert stop <= segment.kv.capacity
        state = mix(tokens + 1000 * positions)
        for layer in range(self.num_layers):
            state = self._attended(layer, segment, positions, state)
        return state

    def _attended(
        self, layer: int, segment: Segment, positions: np.ndarray, state: np.ndarray
    ) -> np.ndarray:
        first, stop = segment.first_position, max(segment.end_position, segment.sees_to)
        ends = np.minimum((positions // segment.block_length + 1) * segment.block_length, stop)
        rows = torch.from_numpy(mix(state).view(np.int64))[:, None, None]
        self._kv_cache.write(layer, segment.kv, first, rows, ~rows)
        keys, values = (x.numpy().ravel() for x in self._kv_cache.read(layer, segment.kv, stop))
        assert (keys == ~values).all(), "keys that nobody wrote"
        return mix(np.cumsum(keys.view(np.uint64))[ends - 1] ^ state)

    def mixes_rows(self, hidden: torch.Tensor) -> bool:
        return True

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        state = hidden.numpy().astype(np.uint64)
        words = mix(state ^ mix(np.arange(VOCAB) + 1)) >> np.uint64(40)
        sharpness = mix(state + np.uint64(1)) % np.uint64(60)
        logits = self._logits[: len(hidden)]
        logits[:] = torch.from_numpy(words / 2.0**24 * sharpness)
        if not self.can_mask:
            logits[:, MASK] = -100
        return logits


class Stubborn(HashModel):
    """Writes masks wherever it may."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().logits(hidden)
        logits[:, MASK] = 1000.0
        return logits


def make_kv_cache(num_tokens: int) -> KVCache:
    return KVCache(torch.zeros(2, 2, 1, num_tokens, 1, dtype=torch.int64))


def is_all_free(kv_cache: KVCache) -> bool:
    """But for what is kept until others need the room."""
    return kv_cache.num_free_tokens == kv_cache.num_tokens


def hash_logits(row: np.ndarray, block_length: int) -> torch.Tensor:
    """Of a whole row, in a pass of its own, without any for MASK."""
    kv_cache = make_kv_cache(128)
    model = HashModel(kv_cache, 128, can_mask=False)
    segment = Segment(0, len(row), 0, block_length, kv_cache.allocate(len(row)))
    tokens, positions = torch.from_numpy(row), torch.arange(len(row))
    hidden = model.forward(Batch(tokens, positions, (segment,), Step(StepKind.DENOISE, 0)))
    return torch.cat([model.logits(part).clone() for part in hidden.split(LOGIT_ROWS)])


FACTOR = np.uint64(0x5851F42D4C957F2D)


class StatefulHashModel(HashModel):
    """Behind each layer of keys one with a state: a number that hashes all rows so far, in order.

    fails_at: a layer that raises, once.
    """

    fails_at: int | None = None

    def forward(self, batch: Batch) -> torch.Tensor:
        return super().forward(batch.placed(self._kv_cache))

    def _segment(self, segment: Segment, positions: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        state = mix(tokens + 1000 * positions)
        for layer in range(0, 2 * self.num_layers, 2):
            self._fail(layer)
            state = self._attended(layer, segment, positions, state)
            self._fail(layer + 1)
            before, after = self._kv_cache.states(layer + 1, segment.kv)
            first = before[0].numpy().view(np.uint64)
            assert (before[1] == first.astype(np.float64)[0] % 97).all()
            # s_t = FACTOR * s_(t-1) + x_t, without a loop, as FACTOR has an inverse.
            powers = np.cumprod(np.full(len(state), FACTOR))
            inverses = np.cumprod(np.full(len(state), pow(int(FACTOR), -1, 1 << 64), np.uint64))
            hashes = powers * (first + np.cumsum(inverses * mix(state)))
            after[0].numpy().view(np.uint64)[:] = hashes[-1]
            after[1].fill_(float(hashes.astype(np.float64)[-1] % 97))
            state = mix(hashes ^ state)
        return state

    def _fail(self, layer: int) -> None:
        if self.fails_at == layer:
            self.fails_at = None
            raise InternalError("as told")


def make_state_cache(num_tokens: int, num_slots: int, is_paged: bool = False) -> KVCache:
    """Make the cache of a `StatefulHashModel` of two times two layers."""
    array = (StateArray((1,)), StateArray((5,), "float64"))
    layout = StateLayout(((), array) * 2, torch.int64, num_slots)
    shape = KVShape.of([(2, 1, 1), None] * 2, num_tokens)
    if not is_paged:
        storage = [torch.zeros(group, dtype=torch.int64) for group in shape.groups]
        memory = torch.full((layout.num_bytes,), 0x7F, dtype=torch.uint8)
        return KVCache(storage, places=shape.places, states=StateStore(layout, memory))
    layouts = [KVLayout(group, torch.int64) for group in shape.groups]
    num_bytes = sum(each.address_bytes(SMALL_GROUP_BYTES) for each in layouts)
    pages = kv_pages(PageBudget(num_bytes + layout.num_bytes), layouts, layout)
    states = paged_states(pages, layout)
    return KVCache(pages.storage, pages, places=shape.places, states=states)


class WindowedHashModel(HashModel):
    """Layers of hashes, some of which see the last positions alone."""

    def __init__(self, kv_cache: KVCache, max_rows: int, windows: Sequence[int]) -> None:
        """windows: of each layer, the positions that a row sees; 0: all."""
        super().__init__(kv_cache, max_rows, num_layers=len(windows))
        self.windows = windows

    def forward(self, batch: Batch) -> torch.Tensor:
        return super().forward(batch.placed(self._kv_cache))

    def _attended(
        self, layer: int, segment: Segment, positions: np.ndarray, state: np.ndarray
    ) -> np.ndarray:
        stop, window = segment.end_position, self.windows[layer] or segment.end_position
        rows = torch.from_numpy(mix(state).view(np.int64))[:, None, None]
        self._kv_cache.write(layer, segment.kv, segment.first_position, rows, ~rows)
        first = max(0, segment.first_position + 1 - window)
        read = self._kv_cache.read(layer, segment.kv, stop, first)
        keys, values = (x.numpy().ravel() for x in read)
        assert (keys == ~values).all(), "keys that nobody wrote"
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(keys.view(np.uint64))])
        seen = sums[positions + 1 - first] - sums[np.maximum(0, positions + 1 - window) - first]
        return mix(seen ^ state)


def make_windowed_cache(
    num_tokens: int, windows: Sequence[int], max_rows: int, is_paged: bool = False
) -> KVCache:
    """Make the cache of a `WindowedHashModel`; max_rows 0: one that keeps everything."""
    shape = KVShape.of([(2, 1, 1)] * len(windows), num_tokens)
    if max_rows:
        shape = KVShape.of([(2, 1, 1)] * len(windows), num_tokens, windows, max_rows)
    dtype = torch.int64
    if is_paged:
        layouts = [KVLayout(each, dtype) for each in shape.storage]
        num_bytes = sum(each.address_bytes(SMALL_GROUP_BYTES) for each in layouts)
        pages = kv_pages_of(PageBudget(num_bytes), shape, dtype, None)
        return cache_over(shape, pages.all_storage, pages)
    return cache_over(shape, [torch.zeros(each, dtype=dtype) for each in shape.storage])
