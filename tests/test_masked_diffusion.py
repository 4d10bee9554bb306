"""The decoder of bidirectional models over a model of hashes (exact, so everything is compared
exactly) and over transformers' implementations (so whole published trajectories are)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hash_model import make_kv_cache
from masked_oracle import FullModel, golden_cases, load_full
from whole import decoded

from lowtide.config import DecodingDefaults
from lowtide.decode.masked_diffusion import MaskedDiffusion
from lowtide.decode.masked_options import resolve
from lowtide.decode.request import Draft, Event, Finished, Request
from lowtide.params import DiffusionParams, SamplingParams

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
    asked = resolve(DiffusionParams(**diffusion), defaults, sampling.max_tokens, "Test")
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


def golden_request(name: str, index: int, case: dict) -> Request:
    params = case["params"]
    asked = {n: params[n] for n in ("steps", "block_length", "cfg_scale") if n in params}
    if name == "dream-a":
        asked |= {"remasking": params["alg"]}
        asked |= {"threshold": params["threshold"]} if "threshold" in params else {}
    defaults = DREAM if name == "dream-a" else LLADA
    return make_request(index, case["prompt"], defaults, max_tokens=params["gen_length"], **asked)


@pytest.mark.parametrize("name", ["llada-a", "llada-moe-a", "dream-a"])
def test_golden_trajectories(name) -> None:
    """Whole trajectories of the original implementations, all cases as one batch."""
    cases = golden_cases(name)
    mask, is_dream = cases[0]["params"]["mask_id"], name == "dream-a"
    decoder = MaskedDiffusion(
        FullModel(load_full(name)),
        make_kv_cache(1024),
        mask,
        1024,
        logits_shift=int(is_dream),
        is_measured_as_drawn=is_dream,
    )
    requests = [golden_request(name, index, case) for index, case in enumerate(cases)]
    events = decoded(decoder, requests)
    finished = {event.request: event for event in events if isinstance(event, Finished)}
    for request, case in zip(requests, cases, strict=True):
        rows = trajectory(request, events, mask)
        assert (rows if is_dream else rows[:-1]) == case["trajectory"]
        assert list(finished[request.id].token_ids) == case["output"]
        assert finished[request.id].num_forwards == len(rows) - 1
        assert is_dream or finished[request.id].num_forwards == case["forwards"]
