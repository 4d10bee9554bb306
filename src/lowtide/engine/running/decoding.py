"""Makes a loaded model's decoder, and runs one pass of it."""

from __future__ import annotations

from typing import Any

from lowtide.decode.batch_decoder import BatchDecoder
from lowtide.decode.kind import Kind
from lowtide.decode.kinds import make_kind
from lowtide.decode.request import Event
from lowtide.engine.running.engine import Engine


def make_decoder(engine: Engine) -> BatchDecoder[Any, Any]:
    """Make the decoder of a loaded model."""
    kind, reuse = decoding_kind(engine), engine.options.reuse
    return BatchDecoder(kind, engine.model, engine.kv_cache, engine.plan.max_rows, reuse)


def decoding_kind(engine: Engine) -> Kind[Any, Any, Any]:
    """Return the model's kind of decoding, for its use of the KV cache."""
    asked = engine.options.asked
    return make_kind(engine.model.config.decoding, bool(asked.kv_cache), asked.cache_mode)


def run_pass(engine: Engine, decoder: BatchDecoder[Any, Any]) -> list[Event]:
    """Run one step of a decoder, then move memory."""
    model, elastic = engine.model, engine.elastic
    num_rows, start_s = model.num_prompt_rows, model.prompt_s
    events = decoder.step()
    if elastic is not None:
        elastic.note_pass(model.num_prompt_rows - num_rows, model.prompt_s - start_s)
        elastic.settle()
    return events
