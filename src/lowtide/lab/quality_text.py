"""Selects what is scored of a text: windows, their prompts, and masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lowtide.config import ModelConfig
from lowtide.core import BoolArray
from lowtide.decode.forced import ForcedText
from lowtide.errors import UsageError
from lowtide.model_folder.tokenizer import NO_TOKENIZER, Tokenizer

CONTEXT_TOKENS = 32
"""Prompt tokens of an autoregressive model's window."""

CLUSTER_TOKENS = 32
"""Neighbouring tokens counted as one observation of a standard error, since they are correlated;
for block diffusion it is a block."""


@dataclass(frozen=True, slots=True)
class Scope:
    """The scored part of a text. mask_ratios: of a diffusion model's tokens, one at a time."""

    num_tokens: int = 2048
    window_tokens: int = 256
    mask_ratios: tuple[float, ...] = (0.15, 0.5, 0.9)

    def __post_init__(self) -> None:
        for name, given in (("tokens", self.num_tokens), ("window", self.window_tokens)):
            if given < 1:
                raise UsageError(f"--{name} must be at least 1, not {given}.")
        ratios = self.mask_ratios
        if not ratios or len(set(ratios)) < len(ratios) or not all(0 < r <= 1 for r in ratios):
            raise UsageError(
                f"Mask ratios are different shares above 0 and up to 1, not {list(ratios)}."
            )


class TextSample(NamedTuple):
    """Windows of a text. Masks hide the most first, as decoding does."""

    warm_up: ForcedText  # finds the residents and is not scored
    scored: tuple[ForcedText, ...]
    mask_ratios: tuple[float, ...]  # of each mask; empty for an autoregressive model
    cluster_tokens: int

    @property
    def num_rows(self) -> int:
        """Scored rows of logits: each token under each mask that hides it."""
        return sum(num_rows(text) for text in self.scored)

    @property
    def num_tokens(self) -> int:
        """Scored tokens, or tokens of which masks hide a share."""
        if self.mask_ratios:
            return sum(len(text.token_ids) - text.num_context for text in self.scored)
        return self.num_rows


def num_rows(text: ForcedText) -> int:
    """Return the number of logit rows that reading a text yields."""
    if text.masks:
        return sum(int(mask.sum()) for mask in text.masks)
    return len(text.token_ids) - text.num_context - 1


def encode(tokenizer: Tokenizer | None, text: str) -> tuple[list[int], list[int]]:
    """Return a text's ids, and the ids that begin every text. Raise UsageError."""
    if tokenizer is None:
        raise UsageError(f"{NO_TOKENIZER}: it can be judged by token ids only.")
    ids = tokenizer.encode(text, add_special=False)
    with_special = tokenizer.encode(text[:1])
    bos = tokenizer.bos_token_id
    return ids, [bos] if bos is not None and with_special[:1] == [bos] else []


def make_sample(
    config: ModelConfig,
    context: int,
    token_ids: Sequence[int],
    bos: Sequence[int],
    scope: Scope,
    seed: int = 0,
) -> TextSample:
    """Cut evenly spaced windows from a text, each beginning with `bos`.

    They are fewer or shorter if the text has too few tokens. context: the KV cache's size in
    tokens. Raises UsageError for a text that is too short, naming the length needed.
    """
    layout = _Layout.of(config)
    most = min(scope.window_tokens, context, config.max_positions)
    window = layout.fitted(min(most, len(token_ids) // 2 + len(bos)))
    if window < layout.least:
        raise UsageError(
            f"A text of {len(token_ids)} tokens in windows of at most {most} cannot be scored: it "
            f"takes 2 windows of at least {layout.least} tokens, one of which warms up."
        )
    own = window - len(bos)  # of the text
    wanted = -(-scope.num_tokens // layout.num_scored(window))
    num_windows = 1 + min(wanted, len(token_ids) // own - 1)
    stride = len(token_ids) // num_windows
    ratios = (
        () if config.decoding.writes_in_order else tuple(sorted(scope.mask_ratios, reverse=True))
    )
    texts = [
        layout.text([*bos, *token_ids[index * stride :][:own]], ratios, (seed, index))
        for index in range(num_windows)
    ]
    return TextSample(texts[0], tuple(texts[1:]), ratios, layout.cluster_tokens)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Layout of a window for a kind of model."""

    block_tokens: int  # denoised together; 1: autoregressive, 0: everything after the prompt
    least: int  # fewest tokens of a window

    @classmethod
    def of(cls, config: ModelConfig) -> _Layout:
        if config.decoding.writes_in_order:
            return cls(1, CONTEXT_TOKENS + 1 + CLUSTER_TOKENS)
        if not config.decoding.keeps_keys:
            return cls(0, 16)
        return cls(config.decoding.block_length, 2 * config.decoding.block_length)

    @property
    def cluster_tokens(self) -> int:
        return self.block_tokens if self.block_tokens > 1 else CLUSTER_TOKENS

    def fitted(self, window: int) -> int:
        """The longest window up to this one that has whole blocks."""
        return window - window % max(1, self.block_tokens)

    def num_context(self, window: int) -> int:
        """Number of tokens of a window's prompt: with blocks one, so a pass has two at most."""
        if self.block_tokens > 1:
            return self.block_tokens
        return CONTEXT_TOKENS if self.block_tokens else window // 2

    def num_scored(self, window: int) -> int:
        """Number of tokens of a window that are scored; autoregressive models decode one fewer."""
        return window - self.num_context(window) - (self.block_tokens == 1)

    def text(
        self, token_ids: Sequence[int], ratios: Sequence[float], seed: Sequence[int]
    ) -> ForcedText:
        num_tokens, num_context = len(token_ids), self.num_context(len(token_ids))
        step = self.block_tokens or num_tokens
        spans = [(at, min(at + step, num_tokens)) for at in range(num_context, num_tokens, step)]
        return ForcedText(token_ids, num_context, nested_masks(num_tokens, spans, ratios, seed))


def nested_masks(
    num_tokens: int, spans: Sequence[tuple[int, int]], ratios: Sequence[float], seed: Sequence[int]
) -> tuple[BoolArray, ...]:
    """Make masks [num_tokens] that each hide a share of every span (from, to).

    Each hides at least one token of a span, and only tokens that the mask before it hides. ratios
    descend.
    """
    random = np.random.default_rng(list(seed))
    masks = tuple(np.zeros(num_tokens, np.bool_) for _ in ratios)
    for start, stop in spans:
        order = start + random.permutation(stop - start)
        for mask, ratio in zip(masks, ratios, strict=True):
            mask[order[: max(1, round(ratio * len(order)))]] = True
    return masks
