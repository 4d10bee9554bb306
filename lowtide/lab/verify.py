"""`lowtide verify`: proof that placement decides only speed.

The same text goes through a model with every expert resident (or as many as this machine holds)
and through runs that hold fewer, under every lossless preset: each MoE layer's output and the
logits are compared to the last bit, and so are the tokens of a whole answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lowtide.core import MemoryPlan, Step
from lowtide.engine import EngineConfig, open_model
from lowtide.experts.rows import Routing
from lowtide.llm import LLM, plan_model
from lowtide.params import SamplingParams

LOSSLESS_PRESETS = ("tide", "lru", "static")
"""Presets that promise the resident run's tokens while holding fewer experts."""

NUM_BUDGETS = 3
NUM_PROMPT_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Verdict:
    """One offloaded run beside the reference run."""

    policy: str
    budget_bytes: int
    num_residents: int
    hit_rate: float
    largest_layer_difference: float  # of any MoE layer's output; 0.0 is bit-identical
    first_layer: int | None  # the first MoE layer that differs
    largest_logit_difference: float
    first_token: int | None  # the first token of the answer that differs

    @property
    def is_same(self) -> bool:
        """Bits of layers and logits, and the whole answer."""
        has_same_bits = self.first_layer is None and self.largest_logit_difference == 0
        return has_same_bits and self.first_token is None


@dataclass(frozen=True, slots=True)
class _Run:
    """What a run of the model showed."""

    layers: list[Tensor]  # each MoE layer's output for the prompt
    logits: Tensor
    token_ids: list[int]
    plan: MemoryPlan
    hit_rate: float


def verify(
    model: str | Path,
    prompt: Sequence[int] | None = None,
    max_tokens: int = 64,
    on_verdict: Callable[[Verdict], None] | None = None,
    **options: object,
) -> list[Verdict]:
    """Compares runs at several budgets, the least among them, with the reference run.

    `options` are `LLM`'s, except `host_memory` and `policy`. `prompt`: token ids, by default
    seeded random ones. Raises what `LLM` raises.
    """
    full = plan_model(model, **{**options, "host_memory": "auto", "policy": "auto"})
    ids = _random_prompt(model, options) if prompt is None else prompt
    reference = _run(model, ids, max_tokens, {**options, "host_memory": full.budget_bytes})
    verdicts = []
    for budget_bytes, policy in _cases(full):
        setting = {**options, "host_memory": budget_bytes, "policy": policy}
        verdict = _compare(_run(model, ids, max_tokens, setting), reference)
        verdicts.append(verdict)
        if on_verdict is not None:
            on_verdict(verdict)
    return verdicts


def _cases(full: MemoryPlan) -> Iterator[tuple[int, str]]:
    """Budgets from the least to just below the reference's, each under every preset."""
    span = max(0, full.budget_bytes - full.minimum_bytes)
    for i in range(NUM_BUDGETS):
        for policy in LOSSLESS_PRESETS:
            yield full.minimum_bytes + span * i // NUM_BUDGETS, policy


def _run(
    model: str | Path, ids: Sequence[int], max_tokens: int, options: Mapping[str, object]
) -> _Run:
    with LLM(model, **options) as llm:
        layers = _Layers()
        with llm.observed(layers):
            logits = llm.logits(ids)
        [completion] = llm.generate([list(ids)], SamplingParams(max_tokens=max_tokens))
        hit_rate = llm.stats()["hit_rate"]
        return _Run(layers.outputs, logits, completion.token_ids, llm.plan, hit_rate)


class _Layers:
    """Keeps a copy of every MoE layer's output."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []

    def saw_layer(self, layer: int, step: Step, x: Tensor, routing: Routing, out: Tensor) -> None:
        self.outputs.append(out.clone())


def _compare(run: _Run, reference: _Run) -> Verdict:
    differences = [_difference(a, b) for a, b in zip(run.layers, reference.layers, strict=True)]
    return Verdict(
        policy=run.plan.policy,
        budget_bytes=run.plan.budget_bytes,
        num_residents=sum(run.plan.residents_per_layer),
        hit_rate=run.hit_rate,
        largest_layer_difference=max(differences, default=0.0),
        first_layer=_first(difference != 0 for difference in differences),
        largest_logit_difference=_difference(run.logits, reference.logits),
        first_token=_first_different(run.token_ids, reference.token_ids),
    )


def _difference(a: Tensor, b: Tensor) -> float:
    """The largest difference of two tensors; NaNs in the same places are equal."""
    if torch.equal(a, b):
        return 0.0
    return float((a - b).abs().nan_to_num(torch.inf).max())


def _first_different(a: Sequence[int], b: Sequence[int]) -> int | None:
    if len(a) != len(b):
        return min(len(a), len(b))
    return _first(x != y for x, y in zip(a, b, strict=True))


def _first(flags: Iterator[bool]) -> int | None:
    return next((i for i, flag in enumerate(flags) if flag), None)


def _random_prompt(model: str | Path, options: Mapping[str, object]) -> list[int]:
    """Seeded ids of text, not of special tokens: those lie at the end of the vocabulary or are
    named in the config."""
    config = open_model(model, EngineConfig(**options)).config  # type: ignore[arg-type]
    special = {config.mask_token_id, config.pad_token_id, *config.eos_token_ids}
    ordinary = [i for i in range(config.vocab_size) if i not in special]
    random = np.random.default_rng(0)
    return [ordinary[i] for i in random.integers(len(ordinary), size=NUM_PROMPT_TOKENS)]
