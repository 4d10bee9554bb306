"""Table of the kinds of decoding: facts in `config.Decoding` -> behaviour in a `Kind`."""

from __future__ import annotations

from typing import Any

from lowtide.config import Blocks, Canvas, Causal, Decoding
from lowtide.core import CacheMode
from lowtide.decode.autoregressive import Autoregressive
from lowtide.decode.block_diffusion import BlockDiffusion
from lowtide.decode.kind import Kind
from lowtide.decode.masked_diffusion import MaskedDiffusion

_kinds: dict[type[Decoding], type[Kind[Any, Any, Any]]] = {
    Causal: Autoregressive,
    Blocks: BlockDiffusion,
    Canvas: MaskedDiffusion,
}


def register_kind(facts: type[Decoding], kind: type[Kind[Any, Any, Any]]) -> None:
    """Register the kind for models with these facts; raise ValueError if they have one."""
    if facts in _kinds:
        raise ValueError(f"{facts.__name__} has a kind: {_kinds[facts].__name__}.")
    _kinds[facts] = kind


def unregister_kind(facts: type[Decoding]) -> None:
    """Remove the kind of these facts; raise KeyError if there is none."""
    del _kinds[facts]


def make_kind(
    decoding: Decoding, use_kv_cache: bool = True, cache_mode: CacheMode = CacheMode.EXACT
) -> Kind[Any, Any, Any]:
    """Make the kind for a model's facts; `Kind` explains the other parameters."""
    return _kinds[type(decoding)](decoding, use_kv_cache, cache_mode)
