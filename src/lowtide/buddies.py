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
    Left,
    RoutedTokens,
    WeightArray,
)

NOT_FINITE = "A substitution answered weights that are not finite."


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
    layer: int = 0


class LayerState(NamedTuple):
    """What one layer of a pass is like.

    Of the experts that it asks for those are absent that are neither here nor on their way.
    """

    experts: IntArray  # [tokens, k] that the router chose, ascending in each row
    weights: WeightArray  # [tokens, k]
    kinds: NDArray[np.uint8]  # [tokens] of `RowKind`
    is_here: BoolArray  # [num_experts]: who may stand in
    arriving_s: FloatArray | None  # of each expert that is asked for; infinite: it does not come
    lists: NDArray[np.int32] | None  # [pairs, length] every pair's own, in place of the rules'
    owner: IntArray | None  # [tokens] whose each token is, where something bounds that
    left: FloatArray | None  # [owners] what each may have moved
    rho: int  # substitutions of a token, at most
    account: PassAccount | None = None  # who bounds and counts in the same call, in place of `left`


class Waits(NamedTuple):
    """What absent experts wait for: the disk (1), the link (2) or the host's threads (3).

    From disk and link the n-th comes after `starts_s + n * each_s`; the threads take those of most
    router mass first.
    """

    queue_of: NDArray[np.uint8] | None  # [num_experts], 0: for nothing; None: all for the disk
    starts_s: tuple[float, float]
    each_s: tuple[float, float]
    host_s: FloatArray | None  # [num_experts], where the threads are waited for
    deadline_s: float


class Masses(NamedTuple):
    """Router's weight so far, owner by owner."""

    routed: list[float]
    moved: list[float]  # of what was asked and not run


class Moved(NamedTuple):
    """What a pass does not run of what was asked."""

    pairs: list[list[int]]  # [layers][owners]
    tokens: list[int]  # [owners], each counted in the first layer that affects it


class Saved(NamedTuple):
    """What a layer's substitutions saved, owner by owner."""

    shares: list[float]  # of experts' bytes, each divided among the pairs that gave it up
    in_vain: list[int]  # pairs whose expert saved nothing


class LayerTwin(Protocol):
    """Decides for a layer of some `LayerRules`.

    Where the state has an account, what its router gave is added to that first, then bounds what
    is replaced, and what was replaced is added last. Raises InternalError then for weights that
    are not finite.
    """

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

    def give_up_late_alone(self, state: LayerState, facts: Facts) -> RoutedTokens | None:
        """The same where there is no device and absent experts are read."""
        ...

    def give_up_late_beside(self, state: LayerState, facts: Facts) -> RoutedTokens | None:
        """The same beside a device, where `BuddyTwins.balance` would assign what `facts` ask for:
        who waits for what is found in the same call."""
        ...


class PassAccount(Protocol):
    """Counts for a pass whose tokens have owners; knows which it has seen affected."""

    def route(self, weights: WeightArray) -> Left | None:
        """Adds what a layer's router gave [tokens, k]; what each owner may have moved of it, and
        before, where something bounds that."""
        ...

    def move(self, layer: int, asked: RoutedTokens, run: RoutedTokens, num_experts: int) -> bool:
        """Adds what a layer does not run; False, and adds nothing, for what cannot be run."""
        ...

    @property
    def masses(self) -> Masses: ...

    @property
    def moved(self) -> Moved: ...

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

    def of_pass(
        self, owner: IntArray, before: Masses, num_layers: int, share: float | None
    ) -> PassAccount:
        """owner [tokens]; before: the pass; share: moved over routed mass of an owner, at most."""
        ...
