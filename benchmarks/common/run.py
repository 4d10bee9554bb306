"""One lowtide engine, loaded and timed: what the scripts measure, in their process or another's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from lowtide.config import Blocks, ModelConfig
from lowtide.decode.batch_decoder import BatchDecoder
from lowtide.decode.kinds import make_kind
from lowtide.decode.logits import Model
from lowtide.decode.request import Committed, Finished, Request
from lowtide.engine.opening.config import MAX_PASS_ROWS, EngineConfig
from lowtide.engine.opening.model import open_model
from lowtide.engine.planning.plan import make_plan
from lowtide.engine.running.engine import Engine
from lowtide.engine.running.wiring import load
from lowtide.errors import UsageError
from lowtide.memory.kv_cache import KVCache
from lowtide.params import DiffusionParams, SamplingParams


class Decoded(NamedTuple):
    """Tokens and cost of one generation."""

    num_tokens: int  # committed
    num_forwards: int  # passes through the model, prefill included
    seconds: float
    token_ids: tuple[int, ...]  # of the answer; empty where passes were limited

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def decode(
    decoder: BatchDecoder[Any, Any], request: Request, max_forwards: int | None = None
) -> Decoded:
    """Runs `request` alone until it is finished, or for `max_forwards` passes."""
    num_tokens = num_forwards = 0
    answer: tuple[int, ...] = ()
    decoder.add(request)
    start_s = time.perf_counter()
    try:
        while decoder.has_work and num_forwards != max_forwards:
            for event in decoder.step():
                if isinstance(event, Committed):
                    num_tokens += len(event.tokens)
                if isinstance(event, Finished):
                    answer = event.token_ids
            num_forwards += 1
        seconds = time.perf_counter() - start_s
    finally:
        decoder.close()
    return Decoded(num_tokens, num_forwards, seconds, answer)


def make_decoder(
    model: Model, kv_cache: KVCache, config: ModelConfig, max_rows: int, use_kv_cache: bool
) -> BatchDecoder[Any, Any]:
    """Lowtide's decoder over `model`. Raises UsageError for a model that is not of its kind."""
    if not isinstance(config.decoding, Blocks):
        raise UsageError(f"{config.architecture} is not a block diffusion model.")
    return BatchDecoder(make_kind(config.decoding, use_kv_cache), model, kv_cache, max_rows)


def make_request(config: ModelConfig, num_prompt: int, num_new: int, seed: int) -> Request:
    """`num_prompt` random ids and `num_new` tokens to come, ends ignored, by published defaults."""
    if not isinstance(config.decoding, Blocks):
        raise UsageError(f"{config.architecture} does not write by blocks.")
    defaults = config.decoding.defaults
    diffusion = DiffusionParams(
        block_length=defaults.block_length,
        steps=defaults.steps,
        threshold=defaults.threshold,
        eos_early_stop=False,
    )
    params = SamplingParams(max_tokens=num_new, ignore_eos=True, diffusion=diffusion)
    ordinary = min((config.vocab_size, *config.eos_token_ids))  # special ids are the last ones
    prompt = np.random.default_rng(seed).integers(0, ordinary, num_prompt).tolist()
    return Request(id=0, prompt=prompt, params=params)


@contextmanager
def loaded_engine(model: str, options: EngineConfig) -> Iterator[Engine]:
    """A loaded engine, closed at the end."""
    opened = open_model(model, options)
    engine = load(opened, make_plan(opened))
    try:
        yield engine
    finally:
        engine.close()


def engine_decoder(engine: Engine, use_kv_cache: bool = True) -> BatchDecoder[Any, Any]:
    """A decoder over a loaded engine, as `LLM` has it."""
    return make_decoder(
        engine.model, engine.kv_cache, engine.model.config, MAX_PASS_ROWS, use_kv_cache
    )
