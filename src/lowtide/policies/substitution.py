"""Substitution: other experts than the router chose, where some of those are absent.

The only decision that changes what a model says. It is made between the router's demand and the
assignment: who runs where goes by the answer, while placement and prefetch go on by what the
router asked for, so that whom it wants does come.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from lowtide.core import Facts, IntArray, RoutedTokens, WeightArray
from lowtide.errors import InternalError


class Substitution(Protocol):
    """Chooses other experts for some tokens. Asked only where a demanded expert is absent."""

    def __call__(self, facts: Facts) -> RoutedTokens | None:
        """What is to run instead of `facts.routing`; None leaves it as it is.

        The answer has as many tokens and experts per token; ids ascend in each row (`in_order`
        sees to it), none of them twice. Its scores are not looked at.
        """
        ...


def in_order(experts: IntArray, weights: WeightArray) -> RoutedTokens:
    """Ids [tokens, k] in any order, made to ascend in each row, and their weights with them."""
    order = experts.argsort(axis=1, kind="stable")
    return RoutedTokens(
        np.take_along_axis(experts, order, axis=1), np.take_along_axis(weights, order, axis=1)
    )


def check_substituted(answer: RoutedTokens, asked: RoutedTokens, num_experts: int) -> None:
    """Raises InternalError for an answer that could not be run where `asked` could."""
    for given, wanted in ((answer.experts, asked.experts), (answer.weights, asked.weights)):
        if given.shape != wanted.shape or given.dtype != wanted.dtype:
            raise InternalError(
                f"A substitution answered {given.dtype} {list(given.shape)} where the router chose "
                f"{wanted.dtype} {list(wanted.shape)}."
            )
    experts = answer.experts
    is_known = (experts >= 0) & (experts < num_experts)
    if not is_known.all():
        raise InternalError(
            f"A substitution answered expert {experts[~is_known][0]}; there are {num_experts}."
        )
    is_wrong = (experts[:, 1:] <= experts[:, :-1]).any(axis=1)
    if is_wrong.any():
        row = int(is_wrong.argmax())
        raise InternalError(
            f"A substitution gave token {row} the experts {experts[row].tolist()}: ids must "
            "ascend, and no expert may come twice."
        )
    if not np.isfinite(answer.weights).all():
        raise InternalError("A substitution answered weights that are not finite.")
