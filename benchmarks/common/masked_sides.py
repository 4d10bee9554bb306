"""The sides of a comparison of one denoising step: the published one and how it may be run.

All sides but lowtide take the step as it is published: logits of all rows (Dream's moved on by a
concatenation), a softmax over them, the arg-max and its probability gathered; temperature 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from common.official import Official, Weights, read_weights
from lowtide.config import ModelConfig
from lowtide.errors import UsageError
from lowtide.families import read_config_in

__all__ = ["SIDES", "WARM_UP_TOKENS", "Side", "canvas", "layers_only", "open_sides", "read_weights"]

WARM_UP_TOKENS = (128, 192)
"""Lengths of the steps before the one that is measured; of `torch.compile` the first is compiled
for its own length, the second for all."""


class Side(Protocol):
    """Something that takes steps."""

    facts: Mapping[str, object]

    def step(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """token_ids [tokens] int64: one sequence. Tokens [tokens] and probabilities [tokens]."""
        ...


class Ported:
    """(b): the official forward for a flat batch, and torch's allocator."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self._forward = Official(config, weights)
        self._shift = config.decoding.logits_shift
        self.facts: Mapping[str, object] = {}

    def step(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        return self._published(token_ids)

    def _published(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = self._forward(token_ids, [token_ids.shape[0]])
        if self._shift:
            logits = torch.cat((logits[: self._shift], logits[: -self._shift]))
        return choose(logits)


class Compiled(Ported):
    """(c): (b)'s step, sampling included, compiled for all lengths."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        self._step = torch.compile(self._published, dynamic=True)

    def step(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        answer = self._step(token_ids)
        counters = torch._dynamo.utils.counters
        self.facts = {
            "num_graphs": counters["stats"]["unique_graphs"],  # more than before: compiled again
            "num_graph_breaks": sum(counters["graph_break"].values()),
            "graph_breaks": [reason.splitlines()[0] for reason in counters["graph_break"]],
        }
        return answer


class Transformers:
    """(a): the family's equivalent class there, no mask."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        from common.bidirectional_peer import open_peer  # imports transformers

        self._model = open_peer(config, weights)
        self._shift = config.decoding.logits_shift
        self.facts: Mapping[str, object] = {
            "class": type(self._model).__name__,
            "attention": self._model.config._attn_implementation,
            "experts": self._model.config._experts_implementation,
        }

    def step(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = self._model(input_ids=token_ids[None], use_cache=False).logits[0]
        if self._shift:
            logits = torch.cat((logits[: self._shift], logits[: -self._shift]))
        return choose(logits)


SIDES: Mapping[str, Callable[[ModelConfig, Weights], Side]] = {
    "transformers": Transformers,
    "ported": Ported,
    "compiled": Compiled,
}
"""Sides, in the order of the paper's letters (a), (b), (c)."""


def open_sides(
    config: ModelConfig, weights: Weights, names: Sequence[str], num_layers: int | None = None
) -> dict[str, Side]:
    """Over the same weights. num_layers: fewer than there are, the first ones."""
    if num_layers is not None:
        config = config.first_layers(num_layers)
    # transformers first: it puts experts into larger tensors, which the others then share.
    return {name: SIDES[name](config, weights) for name in SIDES if name in names}


def layers_only(folder: Path, num_layers: int) -> dict[str, object]:
    """Return the overrides of `config.json` that leave a model fewer layers."""
    name = "n_layers" if read_config_in(folder).family == "llada" else "num_hidden_layers"
    return {name: num_layers}


def choose(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The published choice at temperature 0: logits [rows, vocab]."""
    probabilities = torch.softmax(logits, dim=-1)
    best = logits.argmax(dim=-1)
    return best, probabilities.gather(-1, best[:, None])[:, 0]


def canvas(config: ModelConfig, num_tokens: int, num_masked: int) -> Tensor:
    """Token ids [tokens] of a first step: random ones, then masks."""
    if config.decoding.mask_token_id is None:
        raise UsageError(f"{config.architecture} is not a diffusion model.")
    generator = torch.Generator().manual_seed(0)
    ordinary = min((config.vocab_size, *config.eos_token_ids))
    ids = torch.randint(ordinary, (num_tokens,), generator=generator)
    ids[num_tokens - num_masked :] = config.decoding.mask_token_id
    return ids
