"""Token ranges of the KV cache, against the obvious model of them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from family_models import write_model
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowtide import LLM, SamplingParams
from lowtide.engine.planning.budget_division import SMALL_GROUP_BYTES
from lowtide.engine.running.moving_memory import kv_pages
from lowtide.errors import InternalError, PageError
from lowtide.hardware.memory import resident_bytes
from lowtide.memory.kv_cache import GRANULE_TOKENS, KVCache, KVRange, storage_shape
from lowtide.memory.kv_pages import KVLayout, KVShape
from lowtide.memory.pages import PageBudget
from lowtide.memory.transient_kv import TransientKV
from lowtide.memory.workspace import Workspace


def make_cache(num_tokens: int, num_layers: int = 1, kv_heads: int = 1) -> KVCache:
    return KVCache(torch.zeros(storage_shape(num_layers, kv_heads, 4, num_tokens)))


class Held:
    """A range and what was written to it: rows [layers, tokens] of numbers that are used once."""

    def __init__(self, kv: KVRange) -> None:
        self.kv = kv
        self.rows = torch.zeros(2, 0)

    def append(self, cache: KVCache, rows: torch.Tensor) -> None:
        """rows: [layers, tokens]."""
        first = self.rows.shape[1]
        self.rows = torch.cat([self.rows, rows], 1)
        for layer in (0, 1):
            keys = rows[layer, :, None, None] + torch.tensor([0.25, 0.5])[:, None].expand(2, 4)
            cache.write(layer, self.kv, first, keys, -keys)

    def check(self, cache: KVCache) -> None:
        for layer in (0, 1):
            keys, values = cache.read(layer, self.kv, self.rows.shape[1])
            expected = self.rows[layer, None, :, None].expand(2, -1, 4)
            assert torch.equal(keys, expected + torch.tensor([0.25, 0.5])[:, None, None])
            assert torch.equal(values, -keys)


def test_nothing_moves_while_a_range_fits_where_it_is() -> None:
    cache = make_cache(64)
    first, second, third = (cache.allocate(16) for _ in range(3))
    cache.free(first)
    assert cache.allocate(10).start == 0
    cache.free(second)
    assert (cache.allocate(16).start, third.start) == (16, 32)


def test_a_move_that_was_interrupted_joins_no_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache(96, num_layers=2, kv_heads=2)
    first, second = cache.allocate(16), Held(cache.allocate(64))
    second.append(cache, torch.arange(80.0).view(2, 40))
    cache.free(first)
    calls = itertools.count()
    copy = torch.Tensor.copy_

    def interrupted(target: torch.Tensor, source: torch.Tensor) -> None:
        if next(calls):
            raise KeyboardInterrupt
        copy(target, source)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache.allocate(32)
    with pytest.raises(InternalError, match="leave a KV range"):
        second.append(cache, torch.ones(2, 1))
    # What is left of it disturbs nobody who comes after.
    others = [Held(cache.allocate(16)) for _ in range(6)]
    for number, each in enumerate(others):
        each.append(cache, torch.full((2, 16), 100.0 + number))
    for each in others[::2]:
        cache.free(each.kv)
    wide = cache.allocate(48)
    for each in others[1::2]:
        each.check(cache)
        cache.free(each.kv)
    cache.free(wide)
    cache.free(second.kv)
    assert cache.allocate(96).start == 0


def test_memory_grows_with_the_sequences(tmp_path: Path) -> None:
    """Nothing of a long context is physical before it is used."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
    written = write_model("qwen3_moe", 0, tmp_path, num_hidden_layers=8, **heads)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    with LLM(written.folder, context=128) as llm:
        llm.generate([[1] * 100], params)  # what libraries take at first use
    before_bytes = resident_bytes()
    with LLM(written.folder, context=1 << 15) as llm:
        llm.generate([[1] * 100], params)
        assert llm.plan.host.kv_cache_bytes == 128 << 20
        assert resident_bytes() - before_bytes < 32 << 20


def test_reading_copies_nothing() -> None:
    storage = torch.zeros(storage_shape(1, 1, 4, 32))
    cache = KVCache(storage)
    keys, _ = cache.read(0, cache.allocate(32), 32)
    storage.fill_(3.0)
    assert bool((keys == 3.0).all())


@given(st.integers(0, 1000))
def test_storage_is_whole_granules(num_tokens: int) -> None:
    layers, both, heads, tokens, head_dim = storage_shape(3, 2, 8, num_tokens)
    assert (layers, both, heads, head_dim) == (3, 2, 2, 8)
    assert tokens % GRANULE_TOKENS == 0
    assert num_tokens <= tokens < num_tokens + GRANULE_TOKENS


@pytest.mark.parametrize("is_paged", [False, True])
def test_layers_may_store_tokens_of_different_shapes(is_paged: bool) -> None:
    """Grouped heads of two widths, a latent and a layer without tokens: they move together."""
    layers = [(2, 2, 8), (2, 1, 24), None, (1, 1, 20), (2, 2, 8)]
    shape = KVShape.of(layers, 96)
    if is_paged:
        layouts = [KVLayout(group, torch.float32) for group in shape.groups]
        num_bytes = sum(layout.address_bytes(SMALL_GROUP_BYTES) for layout in layouts)
        pages = kv_pages(PageBudget(num_bytes), layouts)
        cache = KVCache(pages.storage, pages, places=shape.places)
    else:
        cache = KVCache([torch.zeros(group) for group in shape.groups], places=shape.places)

    def written(number: int, num_tokens: int) -> tuple[KVRange, list[tuple[Tensor, Tensor]]]:
        kv_range, rows = cache.allocate(num_tokens), []
        cache.prepare(kv_range, num_tokens)
        for layer, stored in enumerate(layers):
            if stored is not None:
                seeded = torch.Generator().manual_seed(10 * number + layer)
                key, value = torch.randn(2, num_tokens, *stored[1:], generator=seeded).unbind()
                cache.write(layer, kv_range, 0, key, value)
                rows.append((key, key if stored[0] == 1 else value))
        return kv_range, rows

    def found(kv_range: KVRange, num_tokens: int) -> list[tuple[Tensor, Tensor]]:
        places = [layer for layer, stored in enumerate(layers) if stored is not None]
        arrays = [cache.read(layer, kv_range, num_tokens) for layer in places]
        return [(keys.transpose(0, 1), values.transpose(0, 1)) for keys, values in arrays]

    first, _ = written(0, 32)
    second, rows = written(1, 30)
    cache.free(first)
    third = cache.allocate(50)  # moves the second to the front
    assert second.start == 0 and third.start == 32
    copy = cache.rows(second, 0, 30)
    assert [each.shape for each in copy] == [(2, 2, 2, 30, 8), (1, 2, 1, 30, 24), (1, 1, 1, 30, 20)]
    cache.free(third)
    branch = cache.branch(second, 30, 32)
    for kv_range in (second, branch):
        for (keys, values), (key, value) in zip(found(kv_range, 30), rows, strict=True):
            assert torch.equal(keys, key) and torch.equal(values, value)
    with pytest.raises(InternalError, match="Layer 2 stores no tokens"):
        cache.read(2, second, 1)


def test_keys_of_which_nothing_is_kept_lie_by_the_rows_of_a_pass() -> None:
    """A pass has whole sequences, wherever their ranges are; each row begins on an alignment."""
    turns = TransientKV(KVShape.of([(2, 2, 4)] * 8, 64).of_one_layer(), torch.float32)
    turns.allocate(16)
    kv_range = turns.of_pass(turns.allocate(30), slice(5, 35), 30)
    workspace = Workspace(torch.zeros(1 << 16, dtype=torch.uint8))
    turns.open_layer(7, 35, workspace)
    key, value = torch.randn(2, 30, 2, 4).unbind()
    turns.write(7, kv_range, 0, key, value)
    keys, values = turns.read(7, kv_range, 30)
    assert torch.equal(keys, key.transpose(0, 1)) and torch.equal(values, value.transpose(0, 1))
    assert workspace.state.top == 2 * 2 * 35 * 64
    assert all(row.data_ptr() % 64 == 0 for row in keys[1])
    with pytest.raises(InternalError, match="A pass has 30 rows of a sequence of 31 tokens"):
        turns.of_pass(kv_range, slice(5, 35), 31)


def test_a_kept_range_that_cannot_grow_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache(128)
    kept, _ = cache.allocate(64), cache.allocate(16)
    cache.claim(kept, 0, 60)
    cache.keep(kept, 60)

    def refuses(*_: object) -> None:
        raise PageError("no pages")

    monkeypatch.setattr(KVCache, "widen", refuses)
    with pytest.raises(PageError):
        cache.resume(kept, 20, 96)
    assert cache.is_kept(kept) and kept.num_written == 60
