"""A decoder of each kind over any model."""

from __future__ import annotations

from typing import Any

from lowtide.config import Blocks, Canvas, Causal
from lowtide.core import CacheMode, Reuse
from lowtide.decode.batch_decoder import BatchDecoder
from lowtide.decode.kinds import make_kind
from lowtide.decode.logits import Model
from lowtide.memory.kv_cache import KVCache


def causal_decoder(
    model: Model,
    kv_cache: KVCache,
    max_rows: int,
    use_kv_cache: bool = True,
    reuse: Reuse = Reuse.OFF,
) -> BatchDecoder[Any, Any]:
    return BatchDecoder(make_kind(Causal(), use_kv_cache), model, kv_cache, max_rows, reuse)


def blocks_decoder(
    model: Model,
    kv_cache: KVCache,
    mask: int,
    max_rows: int,
    use_kv_cache: bool = True,
    reuse: Reuse = Reuse.OFF,
) -> BatchDecoder[Any, Any]:
    return BatchDecoder(make_kind(Blocks(mask), use_kv_cache), model, kv_cache, max_rows, reuse)


def canvas_decoder(
    model: Model,
    kv_cache: KVCache,
    mask: int,
    max_rows: int,
    *,
    cache_mode: CacheMode = CacheMode.EXACT,
    **facts: Any,
) -> BatchDecoder[Any, Any]:
    kind = make_kind(Canvas(mask, **facts), cache_mode=cache_mode)
    return BatchDecoder(kind, model, kv_cache, max_rows)
