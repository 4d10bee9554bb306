"""Makes a loaded model's decoder, and runs one pass of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from lowtide.core import Reuse
from lowtide.decode.batch_decoder import BatchDecoder
from lowtide.decode.kind import Kind
from lowtide.decode.kinds import make_kind
from lowtide.decode.request import Event
from lowtide.engine.running.engine import Engine
from lowtide.errors import UsageError
from lowtide.files.kept_file import num_common
from lowtide.model_folder.chat_messages import Message
from lowtide.model_folder.tokenizer import Tokenizer


def make_decoder(engine: Engine) -> BatchDecoder[Any, Any]:
    """Make the decoder of a loaded model."""
    kind, reuse = decoding_kind(engine), engine.options.reuse
    tail_tokens, tokenizer = 0, engine.facts.tokenizer
    if not engine.kv_cache.cuts_anywhere and reuse is not Reuse.OFF and tokenizer is not None:
        tail_tokens = template_tail(tokenizer)
    return BatchDecoder(
        *(kind, engine.model, engine.kv_cache, engine.plan.max_rows, reuse, tail_tokens),
        max_chunks=partial(_max_chunks, engine),
    )


def _max_chunks(engine: Engine) -> int:
    """Return the number of chunks of a prompt for which a pass reads absent experts once.

    engine: any state of the model.
    """
    experts = engine.experts
    return engine.plan.prompt_chunks if experts.joins_chunks else 1


def template_tail(tokenizer: Tokenizer) -> int:
    """Count the tokens at a prompt's end that a chat template drops once an answer follows.

    0 if that cannot be said.
    """
    first: Message = {"role": "user", "content": "a"}
    answer: Message = {"role": "assistant", "content": "b"}
    if not tokenizer.has_chat_template:
        return 0
    try:
        prompt = np.array(tokenizer.encode_chat([first]))
        later = np.array(tokenizer.encode_chat([first, answer, first]))
    except UsageError:  # a template that wants other conversations
        return 0
    return len(prompt) - num_common(prompt, later)


def decoding_kind(engine: Engine) -> Kind[Any, Any, Any]:
    """Return the model's kind of decoding, for its use of the KV cache."""
    asked = engine.options.asked
    return make_kind(engine.model.config.decoding, bool(asked.kv_cache), asked.cache_mode)


def run_pass(engine: Engine, decoder: BatchDecoder[Any, Any]) -> list[Event]:
    """Run one step of a decoder, then move memory."""
    model, moving = engine.model, engine.moving
    num_rows, start_s = model.num_prompt_rows, model.prompt_s
    events = decoder.step()
    if engine.home is not None:
        engine.home.settle()
    if moving is not None:
        moving.note_pass(model.num_prompt_rows - num_rows, model.prompt_s - start_s)
        moving.settle()
    return events
