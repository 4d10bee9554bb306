"""Placement: decides which experts of a layer stay resident from step to step.

Placements are pure: no tensors, clocks or I/O, and randomness only from a seed at the start. Before
a pass a placement returns `Ranks`, which say which experts may become resident and which they
replace; after it, it learns the pass' demand. The runtime or a simulator applies them.

Beside a device it is called layer by layer and returns moves. There `DaliWindow` and `Lowtide` also
fetch experts that the step does not demand, while the link is idle.

The number of residents may shrink and grow between passes; never more experts stay than there is
room for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.random import default_rng

from lowtide.core import BoolArray, Demand, Facts, FloatArray, IntArray, Moves, Step, StepKind
from lowtide.policies.answers import check_ranks, is_own
from lowtide.policies.online_tau import OnlineTau, interval
from lowtide.policies.ranks import Ranks, bump, choose


class PassDemand:
    """Demand of the current pass, collected layer by layer; ends when the next pass begins."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.hits = np.zeros((num_layers, num_experts), np.int64)
        self.step: Step | None = None  # of the pass
        self._layer = 0

    def note(self, step: Step, layer: int, demand: Demand) -> bool:
        """Record a layer's demand; return False, without it, if another pass begins with it.

        That need not be with layer 0, which is not reported while it is fully resident.
        """
        if self.step is None or layer <= self._layer or step != self.step:
            return False
        self._layer = layer
        self.hits[layer, demand.experts] = demand.num_tokens
        return True

    def begin(self, step: Step) -> None:
        """Start a pass, forgetting the last one."""
        self.step, self._layer = step, -1
        self.hits.fill(0)


class Placement:
    """Chooses the residents of every layer by ranks, within its present room.

    Beside a device it is called layer by layer, and detects the passes itself.
    """

    is_owed = False  # of its moves beside a device

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._rank = np.zeros((num_layers, num_experts))
        self._demanded = PassDemand(num_layers, num_experts)
        self._num_residents = np.zeros(num_layers, np.int64)  # by layer, when last reported
        self._ranks: Ranks
        self._is_checked = not is_own(self)

    def initial(self, layer: int) -> IntArray:
        """Return the experts to make resident before the first step, ascending."""
        return np.empty(0, np.int64)

    def begin_pass(self, step: Step, num_residents: IntArray, capacity: IntArray) -> Ranks:
        """Return the ranks of all layers for the pass that begins.

        num_residents, capacity: [num_layers], each layer's residents and its present room.
        """
        raise NotImplementedError

    def end_pass(self, step: Step, hits: IntArray) -> None:
        """Learn the pass' demand: tokens of each expert [num_layers, num_experts].

        Unreported layers have 0. The pass has already raised the ranks, so often nothing is left to
        learn.
        """

    def update(self, facts: Facts) -> Moves:
        """Return the moves of a layer beside a device, after its router has run.

        After the moves the layer has at most `facts.room` residents. If no layer has more than
        that, moving nothing is always safe.
        """
        ranks = self.ranks_for(facts)
        moves = choose(ranks, facts.layer, self.may_enter(facts), facts.is_kept)
        return moves._replace(is_owed=True) if self.is_owed else moves

    def may_enter(self, facts: Facts) -> BoolArray:
        """Return the absent experts considered beside a device: by default the demanded ones."""
        is_demanded = np.zeros(len(facts.is_kept), np.bool_)
        is_demanded[facts.demand.experts] = True
        return is_demanded

    def ranks_for(self, facts: Facts) -> Ranks:
        """Return the pass' ranks, raised by the layer's demand."""
        demanded, layer, demand = self._demanded, facts.layer, facts.demand
        if not demanded.note(facts.step, layer, demand):
            if demanded.step is not None:
                self.end_pass(demanded.step, demanded.hits)
            demanded.step = None  # if this fails, no pass has begun
            ranks = self.begin_pass(facts.step, self._num_residents, facts.capacity)
            if self._is_checked:
                check_ranks(ranks, facts.capacity, len(facts.is_kept))
            self._ranks = ranks
            demanded.begin(facts.step)
            demanded.note(facts.step, layer, demand)
        self._num_residents[layer] = np.count_nonzero(facts.is_kept)
        bump(self._ranks, layer, demand.experts, demand.num_tokens)
        return self._ranks


class Static(Placement):
    """Keeps the same experts, as many as there is room for.

    Without a calibration these are the first by id. `Static` of all experts is the `resident`
    preset.
    """

    def __init__(
        self, orders: Sequence[IntArray], num_experts: int, capacity: Sequence[int] | None = None
    ) -> None:
        """Keep only experts of `orders`.

        orders: per layer, the experts that may be kept, best first. capacity: their number at the
        start, by default all.
        """
        super().__init__(len(orders), num_experts)
        self._initial = [np.sort(order) for order in orders]
        if capacity is not None:
            pairs = zip(orders, capacity, strict=True)
            self._initial = [np.sort(order[:count]) for order, count in pairs]
        self._places = np.full(self._rank.shape, num_experts)
        for places, order in zip(self._places, orders, strict=True):
            places[order] = np.arange(len(order))
        self._room: IntArray | None = None

    @classmethod
    def first(cls, capacity: Sequence[int], num_experts: int) -> Static:
        """Keep experts 0 to `capacity[layer]` of each layer."""
        return cls([np.arange(count) for count in capacity], num_experts)

    @classmethod
    def favourites(cls, capacity: Sequence[int], frequency: FloatArray) -> Static:
        """Keep the experts used most, lower ids first among equals. frequency [layers, experts]."""
        orders = list((-frequency).argsort(axis=1, kind="stable"))
        return cls(orders, frequency.shape[1], capacity)

    def initial(self, layer: int) -> IntArray:
        """Return the first experts of the layer's order, ascending."""
        return self._initial[layer]

    def begin_pass(self, step: Step, num_residents: IntArray, capacity: IntArray) -> Ranks:
        """Rank experts by their place in the order, those beyond the room not at all."""
        if self._room is None or not np.array_equal(self._room, capacity):
            self._room = capacity.copy()
            is_kept = self._places < capacity[:, None]
            self._rank[:] = np.where(is_kept, self._rank.shape[1] - self._places, 0)
        return Ranks(self._rank, self._room)

    def may_enter(self, facts: Facts) -> BoolArray:
        """Mark every absent expert: one that lost its place to a shrinking room comes back."""
        return ~facts.is_kept


class LRU(Placement):
    """Keeps the experts used last, admitting each on demand (Mixtral-Offloading, per layer).

    Within a step experts count as used in ascending order of ids.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        super().__init__(num_layers, num_experts)
        self._clock = np.zeros(1, np.int64)

    def begin_pass(self, step: Step, num_residents: IntArray, capacity: IntArray) -> Ranks:
        """Rank experts by a clock that each use sets to the next number."""
        return Ranks(self._rank, capacity, clock=self._clock)


class Tide(Placement):
    """Refreshes a layer's residents at every `tau`-th denoising step, and never in between.

    TIDE, Algorithm 1, as its text says: at steps with `t % tau == 0` the experts with most hits in
    this step become resident, and residents that are not displaced stay. Prefill is not counted as
    a step, but refreshes if the following step does; so the first pass chooses the first residents,
    unless it `starts_empty`. Among equals residents stay, then lower ids win. If room shrinks in
    between, the experts with least hits in this step leave.
    """

    def __init__(
        self, num_layers: int, num_experts: int, tau: int | OnlineTau, starts_empty: bool = False
    ) -> None:
        """starts_empty: no expert is resident before the first step other than prefill."""
        super().__init__(num_layers, num_experts)
        self._tau = tau
        self._starts_empty = starts_empty

    def begin_pass(self, step: Step, num_residents: IntArray, capacity: IntArray) -> Ranks:
        """Rank experts by the tokens of this pass alone, and admit none between refreshes."""
        self._rank.fill(0)
        if self.refreshes(step):
            return Ranks(self._rank, capacity, per_token=1)
        return Ranks(self._rank, capacity, most=0, per_token=1, low_ids_leave=True)

    def refreshes(self, step: Step) -> bool:
        """Return True if a pass chooses the residents again; called once for each pass."""
        is_left_out = self._starts_empty and step.kind is StepKind.PREFILL
        return not is_left_out and step.index % interval(self._tau) == 0

    def end_pass(self, step: Step, hits: IntArray) -> None:
        """Show the pass's demand to an interval that follows the drift."""
        if isinstance(self._tau, OnlineTau):
            self._tau.observe(step, hits)


class DaliWindow(Placement):
    """DALI, Algorithm 2: every `w_size` steps the hottest others replace `u_size` residents.

    Scores sum tokens over the window, and restart after it. Where the paper contradicts itself, we
    follow its text: the swap comes after a full window, and the *lowest* residents leave. As
    printed, all `u_size` are swapped; with `always` false, only where the score rises.

    Our readings: every forward pass is a step, prefill too. The cache changes at no other time
    unless room shrinks. Residents start at random, drawn from `seed`. A swap is owed: its transfer
    lies between two steps, as in the algorithm; only an expert that the step itself fetched stays
    without one.
    """

    is_owed = True

    def __init__(
        self,
        capacity: Sequence[int],
        num_experts: int,
        w_size: int = 4,
        u_size: int = 8,
        seed: int = 0,
        always: bool = True,
    ) -> None:
        super().__init__(len(capacity), num_experts)
        self._always = always
        draw = default_rng(seed)
        self._initial = [np.sort(draw.permutation(num_experts)[:slots]) for slots in capacity]
        self._num_passes = 0
        self._w_size = w_size
        self._u_size = u_size

    def initial(self, layer: int) -> IntArray:
        """Return the experts drawn from the seed, ascending."""
        return self._initial[layer]

    def begin_pass(self, step: Step, num_residents: IntArray, capacity: IntArray) -> Ranks:
        """Rank experts by their tokens in the window, whose last pass alone may swap."""
        if self._num_passes % self._w_size == 0:
            self._rank.fill(0)
        self._num_passes += 1
        most = 0 if self._num_passes % self._w_size else self._u_size
        return Ranks(
            self._rank,
            capacity,
            most,
            per_token=1,
            includes_all=True,
            low_ids_leave=True,
            is_forced=self._always and most > 0,
        )

    def may_enter(self, facts: Facts) -> BoolArray:
        """Mark every absent expert: the hottest of the window need not be in this step."""
        return ~facts.is_kept


def favourites(worth: FloatArray, count: int) -> IntArray:
    """Return the `count` most valuable experts, ascending; lower ids win ties."""
    return np.sort((-worth).argsort(kind="stable")[:count])
