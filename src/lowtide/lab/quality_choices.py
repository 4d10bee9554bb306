"""Multiple choice by likelihood: which continuation a model finds likeliest.

The context's last token and all of a choice go through decoding's own passes, so that a policy
which spares prompts still acts on every token that counts.

A diffusion model's likelihood of a choice is estimated block by block, as in training: with part of
the choice hidden, its loss there times that part's share of the whole, averaged over `NUM_MASKS`
parts from the whole downwards (LLaDA, section 2.4 and appendix B.5, with fixed parts instead of
draws).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import eq
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from lowtide.config import ModelConfig
from lowtide.core import FloatArray, IntArray
from lowtide.decode.forced import ForcedText
from lowtide.errors import PlanError, UsageError
from lowtide.lab.quality_questions import ChoiceQuestion
from lowtide.lab.quality_scores import Estimate
from lowtide.lab.quality_text import encode, nested_masks
from lowtide.llm import LLM
from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.progress import Progress

NUM_MASKS = 4


class Shares(NamedTuple):
    """Right answers out of all: by the likelihood of a choice, and by that of a byte of it."""

    raw: Estimate
    normalised: Estimate


@dataclass(frozen=True, slots=True)
class ChoiceScores:
    """A setting's answers to the questions."""

    log_likelihood: tuple[FloatArray, ...]  # [choices] of each question, nats
    accuracy: Shares
    agreement: Shares  # with the reference's choices
    num_cut: int  # questions whose context is longer than the model's: its end was taken

    def as_dict(self) -> dict[str, Any]:
        return {
            "num_questions": len(self.log_likelihood),
            "num_cut": self.num_cut,
            "accuracy": self.accuracy.raw._asdict(),
            "accuracy_normalised": self.accuracy.normalised._asdict(),
            "agreement": self.agreement.raw._asdict(),
            "agreement_normalised": self.agreement.normalised._asdict(),
        }


class _Encoded(NamedTuple):
    """A context with one choice."""

    token_ids: list[int]
    num_context: int
    is_cut: bool


class Questions:
    """Questions encoded for one model. Raises UsageError if one of them does not fit."""

    def __init__(
        self,
        questions: Sequence[ChoiceQuestion],
        tokenizer: Tokenizer | None,
        config: ModelConfig,
        context: int,
    ) -> None:
        """context: the KV cache's size in tokens."""
        self._questions = questions
        self._config = config
        room = min(context, config.max_positions)
        room -= room % config.decoding.block_length
        self._encoded = [_encode(one, tokenizer, room) for one in questions]

    def __len__(self) -> int:
        return len(self._questions)

    def prompt(self) -> list[int]:
        """Return the prompt of the first question."""
        first = self._encoded[0][0]
        return first.token_ids[: first.num_context]

    def score(
        self, llm: LLM, label: str, progress: Progress, beside: ChoiceScores | None = None
    ) -> ChoiceScores:
        """Ask all questions in order. beside: the reference's scores."""
        found: list[FloatArray] = []
        for index, choices in enumerate(self._encoded):
            progress(f"{label}: questions", index, len(self))
            seeds = ((index, place) for place in range(len(choices)))
            found.append(
                np.array([self._read(llm, c, s) for c, s in zip(choices, seeds, strict=True)])
            )
        progress(f"{label}: questions", len(self), len(self))
        return self._judged(found, beside)

    def _read(self, llm: LLM, encoded: _Encoded, seed: Sequence[int]) -> float:
        """Return the log-likelihood of a choice, in nats."""
        text = self._text(encoded, seed)
        ids = np.asarray(encoded.token_ids)
        weights = _weights(text, self._spans(encoded))
        total = 0.0

        def add(mask: int, positions: IntArray, logits: Tensor) -> None:
            nonlocal total
            for position, row in zip(positions.tolist(), logits, strict=True):
                log_p = row.double().log_softmax(dim=-1)
                total += float(log_p[ids[position]]) * weights[mask][position]

        llm.read(text, add)
        return total

    def _text(self, encoded: _Encoded, seed: Sequence[int]) -> ForcedText:
        ids, num_context = encoded.token_ids, encoded.num_context
        if self._config.decoding.writes_in_order:
            return ForcedText(ids, num_context - 1)
        ratios = [1 - index / NUM_MASKS for index in range(NUM_MASKS)]
        return ForcedText(
            ids, num_context, nested_masks(len(ids), self._spans(encoded), ratios, seed)
        )

    def _spans(self, encoded: _Encoded) -> list[tuple[int, int]]:
        """Return the choice's token ranges, block by block."""
        num_tokens, num_context = len(encoded.token_ids), encoded.num_context
        decoding = self._config.decoding
        if decoding.writes_in_order or not decoding.keeps_keys:
            return [(num_context, num_tokens)]
        step = decoding.block_length
        first = num_context // step * step
        return [
            (max(at, num_context), min(at + step, num_tokens))
            for at in range(first, num_tokens, step)
        ]

    def _judged(self, found: Sequence[FloatArray], beside: ChoiceScores | None) -> ChoiceScores:
        lengths = [
            np.array([len(choice.encode()) for choice in one.choices]) for one in self._questions
        ]
        answers = [one.answer for one in self._questions]
        others = found if beside is None else beside.log_likelihood
        accuracy, agreement = [], []
        for divisors in ([np.ones(1)] * len(found), lengths):
            own, theirs = (
                [int((x / n).argmax()) for x, n in zip(scores, divisors, strict=True)]
                for scores in (found, others)
            )
            accuracy.append(_share(list(map(eq, own, answers))))
            agreement.append(_share(list(map(eq, own, theirs))))
        num_cut = sum(choices[0].is_cut for choices in self._encoded)
        return ChoiceScores(tuple(found), Shares(*accuracy), Shares(*agreement), num_cut)


def _encode(question: ChoiceQuestion, tokenizer: Tokenizer | None, room: int) -> list[_Encoded]:
    """Encode each choice after its context. A token spanning both belongs to the choice."""
    encoded = []
    alone, bos = encode(tokenizer, question.context)
    for choice in question.choices:
        both, _ = encode(tokenizer, question.context + choice)
        num_shared = next(
            (i for i, (a, b) in enumerate(zip(alone, both, strict=False)) if a != b),
            min(len(alone), len(both)),
        )
        num_shared = min(num_shared, len(both) - 1)
        ids, num_context = [*bos, *both], len(bos) + num_shared
        num_over = max(0, len(ids) - room)
        if num_context - num_over < 2:
            raise _unaskable(question, choice, num_context, len(ids), room)
        encoded.append(_Encoded(ids[num_over:], num_context - num_over, num_over > 0))
    return encoded


def _unaskable(
    question: ChoiceQuestion, choice: str, num_context: int, num_tokens: int, room: int
) -> UsageError | PlanError:
    shown = f"The question {question.context[:40]!r} with the choice {choice[:40]!r}"
    if num_context < 2:
        return UsageError(
            f"{shown}: the context is {num_context} tokens, and it takes 2; make it longer."
        )
    return PlanError(
        f"{shown} takes {num_tokens} tokens, and there is room for {room}; raise --context."
    )


def _weights(text: ForcedText, spans: Sequence[tuple[int, int]]) -> list[FloatArray]:
    """Return the weight of each row's log-probability, by mask and position, each [tokens]."""
    if not text.masks:
        return [np.ones(len(text.token_ids))]
    weights = []
    for mask in text.masks:
        own = np.zeros(len(text.token_ids))
        for start, stop in spans:
            own[start:stop] = (stop - start) / mask[start:stop].sum() / len(text.masks)
        weights.append(own)
    return weights


def _share(flags: Sequence[bool]) -> Estimate:
    share = sum(flags) / len(flags)
    if len(flags) < 2:
        return Estimate(share, None)
    return Estimate(share, math.sqrt(share * (1 - share) / (len(flags) - 1)))
