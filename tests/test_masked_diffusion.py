"""The decoder of bidirectional models over a model of hashes, held against published loops.

Hashes are exact, so everything is compared exactly. Recorded trajectories are in test_llm_masked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from hash_model import EOS, MASK, VOCAB, HashModel, hash_logits, make_kv_cache
from hypothesis import given
from hypothesis import strategies as st
from kind_decoders import canvas_decoder
from published_loops import published_rows
from whole import decoded

from lowtide.config import DecodingDefaults
from lowtide.decode.masked_options import resolve
from lowtide.decode.request import Draft, Event, Finished, Request
from lowtide.params import REMASKING_RULES, DiffusionParams, SamplingParams

LLADA = DecodingDefaults(block_length=128, steps=128, threshold=None)
DREAM = DecodingDefaults(block_length=None, steps=512, threshold=None, remasking="origin", eps=1e-3)


def make_request(
    index: int = 0,
    prompt: Sequence[int] = (1, 2, 4),
    defaults: DecodingDefaults = LLADA,
    eos_token_ids: Sequence[int] = (),
    seed: int = 0,
    **params: object,
) -> Request:
    names = DiffusionParams.__dataclass_fields__
    diffusion = {name: value for name, value in params.items() if name in names}
    sampling = SamplingParams(**{n: value for n, value in params.items() if n not in names})
    asked = resolve(DiffusionParams(**diffusion), defaults, sampling.most_tokens, "Test")
    return Request(
        id=index,
        prompt=prompt,
        params=SamplingParams(
            **{n: getattr(sampling, n) for n in ("max_tokens", "temperature", "top_k", "top_p")},
            ignore_eos=sampling.ignore_eos,
            diffusion=asked,
        ),
        eos_token_ids=eos_token_ids,
        seed=seed,
    )


def trajectory(request: Request, events: Iterable[Event], mask: int) -> list[list[int]]:
    """The whole token row before the first step and after each."""
    row = [*request.prompt, *[mask] * request.params.max_tokens]
    rows = [list(row)]
    for draft in (e for e in events if isinstance(e, Draft) and e.request == request.id):
        row[draft.block_start : draft.block_start + len(draft.tokens)] = draft.tokens
        rows.append(list(row))
    return rows


class Run:
    """A finished run over a `HashModel`: events and what was fed."""

    def __init__(
        self,
        requests: Iterable[Request],
        num_tokens: int = 512,
        max_rows: int = 512,
        can_mask: bool = True,
        num_layers: int = 2,
        **options: object,
    ) -> None:
        self.kv_cache = make_kv_cache(num_tokens)
        self.model = HashModel(self.kv_cache, max_rows, can_mask, num_layers)
        self.decoder = canvas_decoder(self.model, self.kv_cache, MASK, max_rows, **options)
        self.events = decoded(self.decoder, requests)
        self.finished = {e.request: e for e in self.events if isinstance(e, Finished)}

    def of(self, index: int) -> list[Event]:
        """Return a request's events, which must not depend on neighbours or on timing."""
        return [e for e in self.events if e.request == index]


RULE_FIELDS = {
    "confidence_threshold": {"threshold": st.sampled_from([0.0, 0.3, 0.9, 1.0])},
    "factor": {"factor": st.sampled_from([0.0, 0.5, 1.0, 20.0])},
    "origin": {"eps": st.sampled_from([1e-3, 0.2])},
    "maskgit_plus": {"eps": st.just(1e-3), "alg_temp": st.sampled_from([0.0, 0.3])},
    "topk_margin": {"alg_temp": st.sampled_from([0.0, 2.0])},
    "entropy": {"alg_temp": st.sampled_from([0.0, 0.1])},
}


@st.composite
def requests(draw, index: int = 0, **fixed: object) -> Request:
    rule = draw(st.sampled_from(REMASKING_RULES))
    num_blocks, block_length = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    asked = {name: draw(values) for name, values in RULE_FIELDS.get(rule, {}).items()}
    params = {
        "max_tokens": num_blocks * block_length,
        "eos_token_ids": draw(st.sampled_from([(), (EOS,), (EOS, 5)])),
        "seed": draw(st.integers(0, 3)),
        "cfg_scale": draw(st.sampled_from([0.0, 0.0, 0.7, 3.0])),
        "eos_early_stop": draw(st.booleans()),
        "ignore_eos": draw(st.booleans()),
        "temperature": draw(st.sampled_from([0.0, 0.0, 0.7, 2.0])),
        "top_k": draw(st.none() | st.integers(1, VOCAB)),
        "top_p": draw(st.none() | st.floats(0.1, 1)),
        "defaults": draw(st.sampled_from([LLADA, DREAM])),
    }
    if num_blocks > 1 or draw(st.booleans()):
        params["block_length"] = block_length
    has_blocks = "block_length" in params or params["defaults"] is LLADA
    takes_steps = rule != "factor" and not (rule == "confidence_threshold" and has_blocks)
    if takes_steps and draw(st.booleans()):
        asked["steps"] = num_blocks * draw(st.integers(1, 15))
    prompt = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30))
    return make_request(index, prompt, remasking=rule, **{**params, **asked, **fixed})


batches = st.integers(1, 4).flatmap(lambda n: st.tuples(*(requests(i) for i in range(n))))
options = st.fixed_dictionaries(
    {"logits_shift": st.integers(0, 1), "is_measured_as_drawn": st.booleans()}
)


@given(requests(), options)
def test_every_rule_ends_in_its_steps_and_writes_each_position_once(request, options) -> None:
    run = Run([request], can_mask=False, **options)
    diffusion, max_tokens = request.params.diffusion, request.params.max_tokens
    finished = run.finished[0]
    rows = trajectory(request, run.events, MASK)
    for before, after in pairwise(rows):
        assert all(a in (b, MASK) for a, b in zip(before, after, strict=True))
    assert len(rows) == finished.num_forwards + 1
    num_blocks = -(-max_tokens // diffusion.block_length)
    if diffusion.steps is None or diffusion.remasking == "confidence_threshold":
        # A token in every pass at least.
        assert all(before != after for before, after in pairwise(rows))
        assert finished.num_forwards <= max_tokens
    else:
        assert finished.num_forwards <= diffusion.steps
        is_whole = finished.finish_reason == "length"
        per_block = diffusion.steps // num_blocks
        is_exact = diffusion.remasking in ("maskgit_plus", "topk_margin", "entropy")
        is_exact |= diffusion.remasking != "origin" and per_block <= diffusion.block_length
        if is_exact and is_whole:
            assert finished.num_forwards == diffusion.steps


@given(batches, options)
def test_a_pass_that_is_said_to_be_the_last_is(batch, options) -> None:
    """Under a schedule the last one is always known; else where a single mask is left."""
    batch = [replace(each, eos_token_ids=()) for each in batch]
    *before, last = Run(batch, can_mask=False, **options).model.steps
    assert not any(step.is_last for step in before)
    if all(each.params.diffusion.remasking in SCHEDULED for each in batch):
        assert last.is_last


@given(requests(), options)
def test_a_schedule_takes_its_steps_at_most(request, options) -> None:
    """And a pass more for each block whose masks the model itself predicts."""
    diffusion = request.params.diffusion
    if diffusion.steps and diffusion.remasking in SCHEDULED:
        num_blocks = -(-request.params.max_tokens // diffusion.block_length)
        num_forwards = Run([request], **options).finished[0].num_forwards
        assert num_forwards <= diffusion.steps + num_blocks


@given(requests(cfg_scale=0.0, temperature=0.0, top_k=None, top_p=None), options)
def test_trajectories_are_those_of_the_published_loops(request, options) -> None:
    if request.params.diffusion.alg_temp or request.params.diffusion.remasking in BY_CHANCE:
        return
    request = replace(request, eos_token_ids=(), prompt=[t % MASK for t in request.prompt])
    run = Run([request], can_mask=False, **options)
    expected = published(request, options["logits_shift"])
    assert trajectory(request, run.events, MASK) == expected


BY_CHANCE = ("random", "origin")
SCHEDULED = ("low_confidence", *BY_CHANCE, "maskgit_plus", "topk_margin", "entropy")


def published(request: Request, logits_shift: int) -> list[list[int]]:
    """Everything is recomputed in each step."""

    def logits(row: torch.Tensor, block: slice, step: int) -> torch.Tensor:
        return shifted_logits(row.numpy(), logits_shift)[block]

    params = request.params
    return published_rows(request.prompt, params.max_tokens, params.diffusion, MASK, logits)


def shifted_logits(row: np.ndarray, logits_shift: int) -> torch.Tensor:
    logits = hash_logits(row, len(row))
    return torch.cat([logits[:1], logits[:-1]]) if logits_shift else logits
