"""Multiple choice by likelihood: which of several continuations a model finds likeliest.

The last token of the context and all of a choice go through decoding's own passes, so that a policy
that spares prompts is asked about every token that counts.

A diffusion model's likelihood of a choice is estimated block by block as it is trained: with a
part of the choice hidden, its loss there times the share that it is of the whole, in the mean over
`NUM_MASKS` parts from all of it downwards (LLaDA, section 2.4 and appendix B.5, with a fixed
number of parts in place of draws).
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
    """What a setting made of the questions."""

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
    """Questions in tokens of one model. Raises UsageError where one of them cannot be asked."""

    def __init__(
        self,
        questions: Sequence[ChoiceQuestion],
        tokenizer: Tokenizer | None,
        config: ModelConfig,
        context: int,
    ) -> None:
        """context: tokens that the KV cache holds."""
        self._questions = questions
        self._config = config
        room = min(context, config.max_positions)
        room -= room % config.decoding.block_length
        self._encoded = [_encode(one, tokenizer, room) for one in questions]

    def __len__(self) -> int:
        return len(self._questions)

    def prompt(self) -> list[int]:
        """The prompt of the first question."""
        first = self._encoded[0][0]
        return first.token_ids[: first.num_context]

    def score(
        self, llm: LLM, label: str, progress: Progress, beside: ChoiceScores | None = None
    ) -> ChoiceScores:
        """Asks all of them, one after the other; beside: the reference's."""
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
        """The log-likelihood of a choice, in nats."""
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
        """The choice's tokens, block by block."""
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
    """Each choice behind its context. A token that context and choice share is the choice's."""
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
    """What a row's logarithm counts for, by mask and position. Each [tokens]."""
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
