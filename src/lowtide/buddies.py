"""Inputs and results of a layer's substitutions, shared by policies and kernels.

There are two implementations, equal to the bit: plain Python (`policies/plain_buddies.py`), which
is the reference, and C++ (`kernels/cpu/buddies.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lowtide.core import Assignment, Facts, FloatArray, IntArray, Left, RoutedTokens, WeightArray
from lowtide.errors import InternalError

NOT_FINITE = "A substitution answered weights that are not finite."


class LayerRules(NamedTuple):
    """BuddyMoE's rules in one layer, constant over passes."""

    layer: int
    lists: NDArray[np.int32]  # [num_experts, length] buddies, best first; -1 after the last
    rho: int  # substitutions per token, at most
    exact_kinds: int  # bits: rows of these `RowKind`s run what their router chose
    # Gates; a token or layer at the threshold keeps its experts.
    entropy: float = -1.0  # of a token, at most this: it keeps its experts; below 0: no gate
    margin: float = np.inf  # between its two best weights, at least this: it keeps its experts
    beta: float = np.inf  # absent share of the experts asked for from which the layer keeps all
    temperature: float = 1.0  # that entropies are smoothed with
    # Psi (Eq. 3): the lists are in the order of its constant part, `psi` [num_experts, length].
    eta: float = 0.0  # weight of a token's own logits; 0: the lists' order is all
    psi: FloatArray | None = None  # where `eta` is not 0
    partition: IntArray | None = None  # [num_experts] each expert's device; None: all on one


def compatibility(routing: RoutedTokens, eta: float) -> FloatArray:
    """Return Psi's factor of local compatibility, 1 + eta * z, [tokens, num_experts].

    z is the router's logit of an expert for a token, normalised by a softmax over all experts.
    Raises InternalError for a routing without logits.
    """
    if routing.scores is None:
        raise InternalError("Psi with eta weighs the router's logits, and the facts lack them.")
    scores = routing.scores.astype(np.float64)
    exp = np.exp(scores - scores.max(axis=1, keepdims=True))
    factor: FloatArray = 1.0 + eta * (exp / exp.sum(axis=1, keepdims=True))
    return factor


class Waits(NamedTuple):
    """The queues in which absent experts wait: disk (1), link (2) or the host's threads (3).

    The n-th in the queue of disk or link is ready after `starts_s + n * each_s`; the threads take
    the experts of most router mass first.
    """

    queue_of: NDArray[np.uint8] | None  # [num_experts], 0: for nothing; None: all for the disk
    starts_s: tuple[float, float]
    each_s: tuple[float, float]
    host_s: FloatArray | None  # [num_experts], where the threads are waited for
    deadline_s: float


class Masses(NamedTuple):
    """Router's weight so far, by owner."""

    routed: list[float]
    moved: list[float]  # of what was asked and not run


class Moved(NamedTuple):
    """Pairs of a pass that were replaced."""

    pairs: list[list[int]]  # [layers][owners]
    tokens: list[int]  # [owners], each counted in the first layer that affects it
    hops: list[int]  # [owners], partitions that substitutions crossed; 0 on one device


class PassAccount(Protocol):
    """Limits and counts replacements in one pass, for each owner of its tokens."""

    def route(self, weights: WeightArray) -> Left | None:
        """Add a layer's router weights [tokens, k].

        Returns how much weight each owner may still move; None if there is no limit.
        """
        ...

    def move(self, layer: int, asked: RoutedTokens, run: RoutedTokens, num_experts: int) -> bool:
        """Count a layer's replacements; return False, counting none, if `run` is invalid."""
        ...

    @property
    def masses(self) -> Masses: ...

    @property
    def moved(self) -> Moved: ...


class LayerTwin(Protocol):
    """Substitutes for all tokens of a layer at once, by its `LayerRules`."""

    def __call__(
        self, facts: Facts, account: PassAccount, waits: Waits | None = None
    ) -> RoutedTokens | None:
        """Return the substituted routing, in order of ids; None if it is the router's.

        Without `waits` by Algorithm 1. With them, in each queue as many experts as come too late
        are replaced, those of least router mass first, each by all of its tokens or none. The
        account records the router's weights and the replacements, and limits them. Raises
        InternalError for weights that are not finite.
        """
        ...


class BuddyTwins(Protocol):
    """An implementation of BuddyMoE's steps, plain or compiled, with the assignment it assumes."""

    def balance(self) -> Callable[[Facts], Assignment]:
        """Lowtide's own assignment, `policies.assignment.Balance`."""
        ...

    def of_layer(self, rules: LayerRules) -> LayerTwin: ...

    def of_pass(
        self, owner: IntArray, before: Masses, num_layers: int, share: float | None
    ) -> PassAccount:
        """Return the account of a pass.

        owner: of each token, [tokens]. before: masses before the pass. share: limit of an owner's
        moved over routed mass.
        """
        ...
