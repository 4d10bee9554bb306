"""Placement: which experts of a layer stay resident from one step to the next.

Pure decisions from facts: no tensors, clocks or I/O, and no randomness but what is drawn from a
seed at the start. A policy is told what a layer asks for, what is resident and how much may be,
and answers with moves; the runtime, or a simulator, obeys. `LRU` and `Tide` admit only experts of
the present demand; `DaliWindow` and `Lowtide` may also admit others, to be fetched for later steps
in idle link time. Room may shrink and grow from one step to the next: whatever was kept before,
no more stays than there is room for now.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.random import default_rng

from lowtide.core import NO_MOVES, BoolArray, Facts, FloatArray, IntArray, Moves, StepKind
from lowtide.errors import UsageError
from lowtide.policies.online_tau import OnlineTau, interval
from lowtide.policies.ranking import at_most, best_kept, exchange, favourites, moves_to, top


class Placement(Protocol):
    """Chooses the residents of every layer, within the room that it has now."""

    def initial(self, layer: int) -> IntArray:
        """Experts to make resident before the first step, ascending."""
        ...

    def update(self, facts: Facts) -> Moves:
        """What to admit and evict, told after the layer's router has spoken.

        After the moves the layer has at most `facts.room` residents. Where nobody has more than
        that, admitting and evicting nothing is always safe.
        """
        ...


class Static:
    """The same experts for ever, as many of them as there is room for.

    Without a calibration the first experts by id are kept. `Static` of all experts is the
    `resident` preset.
    """

    def __init__(self, residents: Sequence[IntArray]) -> None:
        """`residents`: per layer, the experts to keep, ascending."""
        self._residents = residents

    @classmethod
    def first(cls, capacity: Sequence[int]) -> Static:
        """Experts 0 to `capacity[layer]` of each layer."""
        return cls([np.arange(num_experts) for num_experts in capacity])

    def initial(self, layer: int) -> IntArray:
        return self._residents[layer]

    def update(self, facts: Facts) -> Moves:
        residents = self._residents[facts.layer][: facts.room]
        if np.count_nonzero(facts.is_kept) == len(residents):
            return NO_MOVES
        return moves_to(residents, facts.is_kept)


class LRU:
    """Keeps the experts used last, admitting each on demand (Mixtral-Offloading, per layer).

    Within a step experts count as used in ascending id.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._last_use = np.full((num_layers, num_experts), -1, np.int64)
        self._num_uses = 0

    def initial(self, layer: int) -> IntArray:
        return np.empty(0, np.int64)

    def update(self, facts: Facts) -> Moves:
        demand, last_use = facts.demand, self._last_use[facts.layer]
        last_use[demand.experts] = np.arange(self._num_uses, self._num_uses + len(demand.experts))
        self._num_uses += len(demand.experts)
        candidates = _kept_or_demanded(facts)
        return moves_to(top(last_use, candidates, facts.room), facts.is_kept)


class Tide:
    """Refreshes a layer's residents at every `tau`-th denoising step, and never in between.

    TIDE, Algorithm 1 as its text has it: at steps with `t % tau == 0` the experts with most hits
    in this very step become resident; residents that are not displaced stay. Prefill does not
    count as a step, but refreshes where the step that follows it does: so the first pass says who
    is resident first, unless it `starts_empty`. Among equals residents stay, then lower ids win.
    Where room is lost in between, those with least hits in this step leave.
    """

    def __init__(self, num_experts: int, tau: int | OnlineTau, starts_empty: bool = False) -> None:
        """starts_empty: nobody is resident before the first step that is no prefill."""
        self._hits = np.empty(num_experts, np.int64)
        self._tau = tau
        self._starts_empty = starts_empty

    def initial(self, layer: int) -> IntArray:
        return np.empty(0, np.int64)

    def update(self, facts: Facts) -> Moves:
        step, is_kept = facts.step, facts.is_kept
        if isinstance(self._tau, OnlineTau):
            self._tau.observe(step, facts.layer, facts.demand)
        is_left_out = self._starts_empty and step.kind is StepKind.PREFILL
        is_refresh = not is_left_out and step.index % interval(self._tau) == 0
        if not is_refresh and np.count_nonzero(is_kept) <= facts.room:
            return NO_MOVES
        rank = self._hits  # 2 * hits, plus one for residents, so that they win ties
        rank[:] = is_kept
        rank[facts.demand.experts] += 2 * facts.demand.num_tokens
        if is_refresh:
            return moves_to(top(rank, rank > 0, facts.room), is_kept)
        return at_most(facts.room, rank, is_kept)


class Frequency:
    """The experts that a calibration used most; optionally it goes on counting (EdgeMoE).

    EdgeMoE evicts by activation frequency and by how soon a layer comes round again; the slots
    of a layer are its own here, so only the frequency is left. Counting on, an expert of this
    step that is used more often than a resident takes its place.
    """

    def __init__(self, capacity: Sequence[int], frequency: FloatArray, learns: bool = False):
        """`frequency` [layers, experts]: activations, in any unit of one's own when not learning.

        When learning, one activation of a step counts 1.
        """
        self._capacity = capacity
        self._frequency = np.array(frequency, np.float64)
        self._learns = learns

    def initial(self, layer: int) -> IntArray:
        return favourites(self._frequency[layer], self._capacity[layer])

    def update(self, facts: Facts) -> Moves:
        frequency, is_kept = self._frequency[facts.layer], facts.is_kept
        if self._learns:
            frequency[facts.demand.experts] += 1
            candidates = _kept_or_demanded(facts)
            return moves_to(best_kept(frequency, candidates, is_kept, facts.room), is_kept)
        if np.count_nonzero(is_kept) == facts.room:
            return NO_MOVES
        return moves_to(favourites(frequency, facts.room), is_kept)


class ScoreCache:
    """Keeps the experts with the highest running score of activation (HybriMoE).

    The score is an exponential mean of an expert's share of the step's hits, weight `alpha` for
    the newest. (HybriMoE averages router scores; hits are what every router shows.) It starts
    with the first experts by id; only experts that this step fetches may enter. Residents win
    ties.
    """

    def __init__(self, capacity: Sequence[int], num_experts: int, alpha: float = 0.5) -> None:
        if not 0.0 <= alpha <= 1.0:
            raise UsageError(f"alpha must be a number from 0 to 1, not {alpha}.")
        self._capacity = capacity
        self._score = np.zeros((len(capacity), num_experts))
        self._alpha = alpha

    def initial(self, layer: int) -> IntArray:
        return np.arange(self._capacity[layer])

    def update(self, facts: Facts) -> Moves:
        demand, is_kept, score = facts.demand, facts.is_kept, self._score[facts.layer]
        score *= 1 - self._alpha
        score[demand.experts] += self._alpha * demand.num_tokens / max(1, demand.num_tokens.sum())
        candidates = is_kept.copy()
        candidates[facts.fetched] = True
        return moves_to(best_kept(score, candidates, is_kept, facts.room), is_kept)


class DaliWindow:
    """DALI, Algorithm 2: every `w_size` steps up to `u_size` residents give way to hotter experts.

    Scores sum tokens over the window and start anew after it. Where the paper contradicts itself,
    its text counts: the swap comes after a full window and the *lowest* residents leave. Readings
    of ours: every forward pass is a step, prefill too; a swap only where the score rises; the
    cache changes at no other time, unless room is lost; residents start at random, drawn from
    `seed`. A swap is owed: its transfer lies between two steps, as in the algorithm, and only an
    expert that the step itself has fetched stays without one.
    """

    def __init__(
        self,
        capacity: Sequence[int],
        num_experts: int,
        w_size: int = 4,
        u_size: int = 8,
        seed: int = 0,
    ) -> None:
        if w_size < 1 or u_size < 0:
            raise UsageError(
                f"DALI's window needs w_size >= 1 and u_size >= 0, not {w_size}, {u_size}."
            )
        draw = default_rng(seed)
        self._initial = [np.sort(draw.permutation(num_experts)[:slots]) for slots in capacity]
        self._score = np.zeros((len(capacity), num_experts), np.int64)
        self._num_steps = [0] * len(capacity)
        self._w_size = w_size
        self._u_size = u_size

    def initial(self, layer: int) -> IntArray:
        return self._initial[layer]

    def update(self, facts: Facts) -> Moves:
        layer, is_kept, score = facts.layer, facts.is_kept, self._score[facts.layer]
        score[facts.demand.experts] += facts.demand.num_tokens
        self._num_steps[layer] += 1
        is_full_window = self._num_steps[layer] % self._w_size == 0
        if np.count_nonzero(is_kept) > facts.room:
            moves = at_most(facts.room, score, is_kept)
        elif is_full_window:
            moves = self._swap(score, is_kept, facts.room)
        else:
            return NO_MOVES
        if is_full_window:
            score[:] = 0
        return moves

    def _swap(self, score: IntArray, is_kept: BoolArray, room: int) -> Moves:
        entering = top(score, ~is_kept & (score > 0), self._u_size)
        residents = is_kept.nonzero()[0]
        leaving = residents[score[residents].argsort(kind="stable")]
        moves = exchange(entering, leaving, score[entering], score, room - len(residents))
        return moves._replace(is_owed=True)


def _kept_or_demanded(facts: Facts) -> BoolArray:
    candidates = facts.is_kept.copy()
    candidates[facts.demand.experts] = True
    return candidates
