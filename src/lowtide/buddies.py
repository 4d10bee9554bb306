"""What substitution is told of a layer, and who decides for all its tokens at once.

Shared by policies, which ask, and kernels: the plain twin of what is here is
`policies/plain_buddies.py`, the other one is compiled (`kernels/cpu/buddies.py`).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lowtide.core import (
    Assignment,
    BoolArray,
    Facts,
    FloatArray,
    IntArray,
    RoutedTokens,
    WeightArray,
)


class TokenGates(NamedTuple):
    """BuddyMoE's gates in one layer; see `policies.buddy_gates.Gates`."""

    exact_kinds: int  # bits: rows of these `RowKind`s run what their router chose
    temperature: float
    entropy: float  # below 0: none
    margin: float  # infinite: none
    beta: float  # infinite: none


class LayerRules(NamedTuple):
    """What stays the same from pass to pass."""

    lists: NDArray[np.int32]  # [num_experts, length] buddies, best first; -1 behind the last
    search_rank: int  # H: how far down a list to look
    gates: TokenGates


class LayerState(NamedTuple):
    """What one layer of a pass is like.

    Of the experts that it asks for those are absent that are neither here nor on their way.
    """

    experts: IntArray  # [tokens, k] that the router chose, ascending in each row
    weights: WeightArray  # [tokens, k]
    kinds: NDArray[np.uint8]  # [tokens] of `RowKind`
    is_here: BoolArray  # [num_experts]: who may stand in
    arriving_s: FloatArray | None  # of each expert that is asked for; infinite: it does not come
    is_open: BoolArray | None  # [tokens] in place of the gates
    lists: NDArray[np.int32] | None  # [pairs, length] every pair's own, in place of the rules'
    owner: IntArray | None  # [tokens] whose each token is, where something bounds that
    left: FloatArray | None  # [owners] what each may have moved
    rho: int  # substitutions of a token, at most


class Waits(NamedTuple):
    """What absent experts wait for: the disk (1), the link (2) or the host's threads (3).

    From disk and link the n-th comes after `starts_s + n * each_s`; the threads take those of most
    router mass first.
    """

    queue_of: NDArray[np.uint8] | None  # [num_experts], 0: for nothing; None: all for the disk
    starts_s: tuple[float, float]
    each_s: tuple[float, float]
    host_s: FloatArray | None  # [num_experts], where somebody waits for the threads
    deadline_s: float


class Moved(NamedTuple):
    """What a layer does not run of what was asked, owner by owner."""

    masses: list[float]  # router's weight
    pairs: list[int]
    tokens: list[int]  # that no earlier layer of the pass affected


class Saved(NamedTuple):
    """What a layer's substitutions saved, owner by owner."""

    shares: list[float]  # of experts' bytes, each divided among the pairs that gave it up
    in_vain: list[int]  # pairs whose expert saved nothing


class LayerTwin(Protocol):
    """Decides for a layer of some `LayerRules`."""

    def replace_absent(self, state: LayerState, num_fit: int = 0) -> RoutedTokens | None:
        """What runs by Algorithm 1, in order of ids; None where that is what the router chose.

        num_fit: so many absent experts, those of most router mass, are left as they are.
        """
        ...

    def give_up_late(self, state: LayerState, waits: Waits) -> RoutedTokens | None:
        """What runs where late experts are given up by all their tokens or by none.

        Of those that wait for one thing as many as come too late, of least router mass first.
        """
        ...

    def give_up_late_beside(self, state: LayerState, facts: Facts) -> RoutedTokens | None:
        """The same beside a device, where `BuddyTwins.balance` would assign what `facts` ask for:
        who waits for what is found in the same call."""
        ...


class MovedCount(Protocol):
    """Counts for a pass whose tokens have owners; knows whom it has seen affected."""

    def __call__(self, asked: RoutedTokens, run: RoutedTokens, num_experts: int) -> Moved | None:
        """None for a `run` that cannot be run."""
        ...

    def saved(self, asked: RoutedTokens, run: RoutedTokens, expert_bytes: FloatArray) -> Saved:
        """expert_bytes [num_experts]: what the replacement of each expert saved by itself."""
        ...


class Balancing(Protocol):
    """Assigns a layer's experts to the device and the host."""

    def __call__(self, facts: Facts) -> Assignment: ...


class BuddyTwins(Protocol):
    """A kind of twins: what decides beside a substitution is of the same kind."""

    def balance(self) -> Balancing:
        """Ours among the assignments, `policies.assignment.Balance`."""
        ...

    def of_layer(self, rules: LayerRules) -> LayerTwin: ...

    def of_pass(self, owner: IntArray, num_owners: int) -> MovedCount:
        """owner [tokens]"""
        ...
