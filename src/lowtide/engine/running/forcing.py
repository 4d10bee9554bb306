"""Reads a given text through a loaded model in decoding's passes, on the engine's thread.

It uses a decoder of its own over the engine's model and KV cache, so that running answers are not
affected.
"""

from __future__ import annotations

from collections.abc import Generator
from time import perf_counter
from typing import NamedTuple

from torch import Tensor

from lowtide.core import IntArray
from lowtide.decode.batch_decoder import BatchDecoder
from lowtide.decode.forced import ForcedText, OnLogits
from lowtide.decode.request import Request
from lowtide.engine.running.decoding import decoding_kind, run_pass
from lowtide.engine.running.engine import Engine
from lowtide.memory.cuda_streams import device_pass
from lowtide.params import SamplingParams
from lowtide.policies.receipt import Receipt


class ForcedRun(NamedTuple):
    """Costs of reading a text. Passes that only fill the KV cache are included."""

    num_passes: int
    seconds: float  # of passes and their logits; what looks at those is left out
    receipt: Receipt | None = None  # of a policy that may change words


def forced_params(text: ForcedText, writes_in_order: bool) -> SamplingParams:
    """Return the parameters with which a text is read and whole rows of logits are computed."""
    num_new = len(text.token_ids) - text.num_context
    logprobs = 0 if writes_in_order else None
    return SamplingParams(max_tokens=num_new, ignore_eos=True, logprobs=logprobs, temperature=0.0)


def read_forced(
    engine: Engine, request: Request, text: ForcedText, on_logits: OnLogits
) -> Generator[None, None, ForcedRun]:
    """Read `text` with the request's prompt and parameters; yield between passes.

    `on_logits` is called on this thread during a pass; an exception from it ends the reading.
    """
    passes_s = looking_s = 0.0
    num_passes = 0

    def look(mask: int, positions: IntArray, logits: Tensor) -> None:
        nonlocal looking_s
        begin_s = perf_counter()
        on_logits(mask, positions, logits)
        looking_s += perf_counter() - begin_s

    kind = decoding_kind(engine).forced(text, look)
    # Nothing is taken over of requests before: what a text's passes cost is measured.
    decoder = BatchDecoder(kind, engine.model, engine.kv_cache, engine.plan.max_rows)
    decoder.add(request)
    try:
        while decoder.has_work:
            if num_passes:
                yield
            begin_s = perf_counter()
            with engine.faults.naming_faults(), device_pass():
                run_pass(engine, decoder)
            passes_s += perf_counter() - begin_s
            num_passes += 1
        receipt = engine.experts.take_receipt(request.id)
        return ForcedRun(num_passes, passes_s - looking_s, receipt)
    finally:
        decoder.close()
        engine.experts.take_receipt(request.id)
