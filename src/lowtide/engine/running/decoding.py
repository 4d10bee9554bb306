"""The decoder of a loaded model, and one pass of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from lowtide.config import Blocks, Canvas
from lowtide.core import Reuse
from lowtide.decode.autoregressive import Autoregressive
from lowtide.decode.batch_decoder import BatchDecoder
from lowtide.decode.block_diffusion import BlockDiffusion
from lowtide.decode.masked_diffusion import MaskedDiffusion
from lowtide.decode.request import Event
from lowtide.engine.opening.config import MAX_PASS_ROWS
from lowtide.engine.running.engine import Engine


class DecoderKinds(NamedTuple):
    """What makes a decoder of each kind. keeps_keys: whether requests take over those of requests
    before them.
    """

    autoregressive: Callable[..., Autoregressive] = Autoregressive
    masked_diffusion: Callable[..., MaskedDiffusion] = MaskedDiffusion
    block_diffusion: Callable[..., BlockDiffusion] = BlockDiffusion
    keeps_keys: bool = True


ANSWERING = DecoderKinds()


def make_decoder(
    engine: Engine, kinds: DecoderKinds = ANSWERING
) -> Autoregressive | MaskedDiffusion | BlockDiffusion:
    """What decodes requests over a loaded model, as its family does."""
    opened = engine.opened
    config, use_kv_cache = opened.config, bool(opened.options.kv_cache)
    reuse = opened.reuse if kinds.keeps_keys else Reuse.OFF
    decoding = config.decoding
    if isinstance(decoding, Canvas) and decoding.mask_token_id is not None:
        return kinds.masked_diffusion(
            engine.model,
            engine.kv_cache,
            mask_token_id=decoding.mask_token_id,
            max_rows=opened.max_pass_rows,
            logits_shift=decoding.logits_shift,
            is_measured_as_drawn=decoding.is_measured_as_drawn,
            cache_mode=opened.cache_mode,
        )
    if isinstance(decoding, Blocks) and decoding.mask_token_id is not None:
        return kinds.block_diffusion(
            engine.model,
            engine.kv_cache,
            mask_token_id=decoding.mask_token_id,
            max_rows=MAX_PASS_ROWS,
            use_kv_cache=use_kv_cache,
            reuse=reuse,
        )
    return kinds.autoregressive(engine.model, engine.kv_cache, MAX_PASS_ROWS, use_kv_cache, reuse)


def run_pass(engine: Engine, decoder: BatchDecoder[Any]) -> list[Event]:
    """One step of a decoder, after which memory moves."""
    model, elastic = engine.model, engine.elastic
    num_rows, start_s = model.num_prompt_rows, model.prompt_s
    events = decoder.step()
    if elastic is not None:
        elastic.note_pass(model.num_prompt_rows - num_rows, model.prompt_s - start_s)
        elastic.settle()
    return events
