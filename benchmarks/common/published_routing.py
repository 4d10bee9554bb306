"""Similarity of the routing of one request's tokens: published measurements, and synthetic traces.

The sources are public threads, named as OWNER/REPOSITORY#NUMBER.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from common.synth_trace import synth_decode_trace
from lowtide.core import BoolArray, Costs
from lowtide.lab.simulation.host_alone import compare_alone
from lowtide.policies.recipe import PolicyInputs
from lowtide.replay.trace import Trace, TraceShape

NUM_LAYERS = 4  # of the synthetic models: all layers are alike in them


class Preference(NamedTuple):
    """Preferences of synthetic routing: the arguments of `synth_decode_trace`."""

    skew: float = 0.0
    taste: float = 0.0
    locality: float = 0.0


class HitRate(NamedTuple):
    """A share of the experts that tokens ask for."""

    of: str  # one of `MEASURES`
    at: float  # tokens, or the share of a layer's experts that is kept
    published: float
    source: str


class PublishedModel(NamedTuple):
    """A model, and what was measured on it."""

    name: str
    shape: TraceShape
    num_tokens: int  # of an answer
    num_skipped: int  # of its first tokens, while a cache fills, which `lru` leaves out
    rates: tuple[HitRate, ...]

    def reached(self, preference: Preference, seed: int = 0) -> list[float]:
        """Return each of the rates as synthetic routing of this shape has it."""
        trace, other = (
            synth_decode_trace(
                self.shape,
                num_prompt=0,
                num_new=self.num_tokens,
                seed=seed,
                text=text,
                **preference._asdict(),
            )
            for text in (0, 1)
        )
        return [MEASURES[rate.of](trace, other, rate.at, self.num_skipped) for rate in self.rates]


def _repeated(trace: Trace, other: Trace, at: float, num_skipped: int) -> float:
    """Experts that one of the last `at` tokens has asked for, too."""
    is_used = _is_used(trace)
    start = int(at)
    is_recent = np.zeros_like(is_used[start:])
    for back in range(1, start + 1):
        is_recent |= is_used[start - back : len(is_used) - back]
    return float((is_used[start:] & is_recent).sum() / is_used[start:].sum())


def _lru(trace: Trace, other: Trace, at: float, num_skipped: int) -> float:
    """Hits of the preset `lru`, each layer with its own slots."""
    num_layers, num_experts = trace.shape[:2]
    setting = PolicyInputs([round(at * num_experts)] * num_layers, num_experts, Costs.unknown(1))
    [whole], [start] = (
        compare_alone(part, ["lru"], setting) for part in (trace, trace.beginning(num_skipped))
    )
    return (whole.num_hits - start.num_hits) / (whole.num_activated - start.num_activated)


def _own_favourites(trace: Trace, other: Trace, at: float, num_skipped: int) -> float:
    return _covered(trace, trace, at)


def _others_favourites(trace: Trace, other: Trace, at: float, num_skipped: int) -> float:
    return _covered(trace, other, at)


def _covered(trace: Trace, known: Trace, at: float) -> float:
    """Experts that are among those which `known` asks for most."""
    uses, known_uses = (_is_used(one).sum(axis=0) for one in (trace, known))
    num_kept = round(at * trace.shape.num_experts)
    kept = np.argsort(-known_uses, axis=1, kind="stable")[:, :num_kept]
    return float(np.take_along_axis(uses, kept, axis=1).sum() / uses.sum())


def _is_used(trace: Trace) -> BoolArray:
    """[tokens, layers, experts]."""
    return trace.hits() > 0


MEASURES: Mapping[str, Callable[[Trace, Trace, float, int], float]] = {
    "in the last tokens": _repeated,
    "in an LRU cache": _lru,
    "among the answer's own favourites": _own_favourites,
    "among another answer's favourites": _others_favourites,
}

FITTED = PublishedModel(
    "Qwen3-30B-A3B",
    TraceShape(NUM_LAYERS, 128, 8),
    num_tokens=512,
    num_skipped=64,
    rates=(
        HitRate("in the last tokens", 1, 0.45, "kekzl/imp#1359"),
        HitRate("in the last tokens", 8, 0.80, "kekzl/imp#1359"),
        HitRate("in an LRU cache", 24 / 128, 0.73, "JustVugg/colibri#698"),
        HitRate("in an LRU cache", 0.4, 0.933, "kekzl/imp#1359"),
        HitRate("among the answer's own favourites", 0.4, 0.921, "kekzl/imp#1358"),
        HitRate("among another answer's favourites", 0.4, 0.676, "kekzl/imp#1358"),
    ),
)
"""Published rates that a routing is fitted to; the mean of three prompts where there are three."""

HELD_OUT = (
    PublishedModel(
        "Qwen3.8-Flash-Next",
        TraceShape(NUM_LAYERS, 512, 10),
        num_tokens=300,
        num_skipped=0,
        rates=tuple(
            HitRate("in an LRU cache", num_slots / 512, published, "kekzl/imp#2061")
            for num_slots, published in (
                *((93, 0.435), (186, 0.62), (279, 0.72), (372, 0.789), (512, 0.85)),
            )
        ),
    ),
    PublishedModel(
        "OLMoE",
        TraceShape(NUM_LAYERS, 64, 8),
        num_tokens=704,
        num_skipped=0,
        rates=(HitRate("in an LRU cache", 0.25, 0.514, "JustVugg/colibri#1092"),),
    ),
)
"""Published rates to hold fitted routing against, with the models' own numbers of experts."""
