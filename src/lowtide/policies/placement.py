"""Placement: which experts of a layer stay resident from one step to the next.

Pure decisions from facts: no tensors, clocks or I/O, and no randomness but what is drawn from a
seed at the start. A policy is told what a layer asks for and what is resident, and answers with
moves; the runtime, or a simulator, obeys. `Static`, `LRU` and `Tide` admit only experts of the
present demand; `DaliWindow` and `Lowtide` may also admit others, to be fetched for later steps in
idle link time. A placement that `KeepsFetched` is told first which experts the step fetches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.random import default_rng

from lowtide.core import (
    NO_MOVES,
    BoolArray,
    Costs,
    Demand,
    FloatArray,
    IntArray,
    Moves,
    Step,
    StepKind,
)
from lowtide.errors import UsageError
from lowtide.policies.budgets import Budgets
from lowtide.policies.forecast import Forecast
from lowtide.policies.tau import OnlineTau

_NUM_KNOWN = 1025  # token counts whose worth is looked up


class Placement(Protocol):
    """Chooses the residents of every layer, within that layer's capacity."""

    def initial(self, layer: int) -> IntArray:
        """Experts to make resident before the first step, ascending."""
        ...

    def update(self, step: Step, layer: int, demand: Demand, is_resident: BoolArray) -> Moves:
        """What to admit and evict, after the layer's router and before its experts.

        `is_resident` [num_experts] is the layer's present state. After the moves a layer has at
        most its capacity of residents. Admitting and evicting nothing is always safe.
        """
        ...


class Static:
    """The same experts for ever; `Static` of all experts is the `resident` preset.

    Without a calibration the first experts by id are kept.
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

    def update(self, step: Step, layer: int, demand: Demand, is_resident: BoolArray) -> Moves:
        return NO_MOVES


class LRU:
    """Keeps the experts used last, admitting each on demand (Mixtral-Offloading, per layer).

    Within a step experts count as used in ascending id.
    """

    def __init__(self, capacity: Sequence[int], num_experts: int) -> None:
        self._capacity = capacity
        self._last_use = np.full((len(capacity), num_experts), -1, np.int64)
        self._num_uses = 0

    def initial(self, layer: int) -> IntArray:
        return np.empty(0, np.int64)

    def update(self, step: Step, layer: int, demand: Demand, is_resident: BoolArray) -> Moves:
        last_use = self._last_use[layer]
        last_use[demand.experts] = np.arange(self._num_uses, self._num_uses + len(demand.experts))
        self._num_uses += len(demand.experts)
        candidates = is_resident.copy()
        candidates[demand.experts] = True
        return _moves(_top(last_use, candidates, self._capacity[layer]), is_resident)


class Tide:
    """Refreshes a layer's residents at every `tau`-th denoising step, and never in between.

    TIDE, Algorithm 1 as its text has it: at steps with `t % tau == 0` the experts with most hits
    in this very step become resident; residents that are not displaced stay. Prefill does not
    count as a step. Among equals residents stay, then lower ids win.
    """

    def __init__(self, capacity: Sequence[int], num_experts: int, tau: int | OnlineTau) -> None:
        self._capacity = capacity
        self._hits = np.empty(num_experts, np.int64)
        self._tau = tau

    def initial(self, layer: int) -> IntArray:
        return np.empty(0, np.int64)

    def update(self, step: Step, layer: int, demand: Demand, is_resident: BoolArray) -> Moves:
        if isinstance(self._tau, OnlineTau):
            self._tau.observe(step, layer, demand)
        tau = _interval(self._tau)
        if step.kind is StepKind.PREFILL or step.index % tau:
            return NO_MOVES
        rank = self._hits  # 2 * hits, plus one for residents, so that they win ties
        rank[:] = is_resident
        rank[demand.experts] += 2 * demand.num_tokens
        return _moves(_top(rank, rank > 0, self._capacity[layer]), is_resident)


@runtime_checkable
class KeepsFetched(Protocol):
    """A placement that wants to know which experts a step fetches: keeping those moves no bytes."""

    def fetched(self, layer: int, experts: IntArray) -> None:
        """Said between a step's assignment and `update` of the same layer."""
        ...


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
        frequency = self._frequency[layer]
        everyone = np.ones(len(frequency), np.bool_)
        return np.sort(_top(frequency, everyone, self._capacity[layer]))

    def update(self, step: Step, layer: int, demand: Demand, is_resident: BoolArray) -> Moves:
        if not self._learns:
            return NO_MOVES
        frequency = self._frequency[layer]
        frequency[demand.experts] += 1
        candidates = is_resident.copy()
        candidates[demand.experts] = True
        return _moves(_keep(frequency, candidates, is_resident, self._capacity[layer]), is_resident)


class ScoreCache:
    """Keeps the experts with the highest running score of activation (HybriMoE).

    The score is an exponential mean of an expert's share of the step's hits, weight `alpha` for
    the newest. (HybriMoE averages router scores; hits are what every router shows.) It starts
    with the first experts by id; only experts that this step fetches may enter. Residents win
    ties.
    """

    def __init__(self, capacity: Sequence[int], num_experts: int, alpha: float = 0.5) -> None:
        _check_share("alpha", alpha)
        self._capacity = capacity
        self._score = np.zeros((len(capacity), num_experts))
        self._is_fetched = np.zeros((len(capacity), num_experts), np.bool_)
        self._alpha = alpha

    def initial(self, layer: int) -> IntArray:
        return np.arange(self._capacity[layer])

    def fetched(self, layer: int, experts: IntArray) -> None:
        self._is_fetched[layer] = False
        self._is_fetched[layer, experts] = True

    def update(self, step: Step, layer: int, demand: Demand, is_resident: BoolArray) -> Moves:
        score = self._score[layer]
        score *= 1 - self._alpha
        score[demand.experts] += self._alpha * demand.num_tokens / max(1, demand.num_tokens.sum())
        candidates = is_resident | self._is_fetched[layer]
        self._is_fetched[layer] = False
        return _moves(_keep(score, candidates, is_resident, self._capacity[layer]), is_resident)


class DaliWindow:
    """DALI, Algorithm 2: every `w_size` steps up to `u_size` residents give way to hotter experts.

    Scores sum tokens over the window and start anew after it. Where the paper contradicts itself,
    its text counts: the swap comes after a full window and the *lowest* residents leave. Readings
    of ours: every forward pass is a step, prefill too; a swap only where the score rises; the
    cache changes at no other time; residents start at random, drawn from `seed`.
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
        self._capacity = capacity
        self._score = np.zeros((len(capacity), num_experts), np.int64)
        self._num_steps = [0] * len(capacity)
        self._w_size = w_size
        self._u_size = u_size

    def initial(self, layer: int) -> IntArray:
        return self._initial[layer]

    def update(self, step: Step, layer: int, demand: Demand, is_resident: BoolArray) -> Moves:
        score = self._score[layer]
        score[demand.experts] += demand.num_tokens
        self._num_steps[layer] += 1
        if self._num_steps[layer] % self._w_size:
            return NO_MOVES
        moves = self._swap(score, is_resident, self._capacity[layer])
        score[:] = 0
        return moves

    def _swap(self, score: IntArray, is_resident: BoolArray, capacity: int) -> Moves:
        entering = _top(score, ~is_resident & (score > 0), self._u_size)
        residents = is_resident.nonzero()[0]
        leaving = residents[score[residents].argsort(kind="stable")]
        num_free = max(0, capacity - len(residents))
        return _exchange(entering, leaving, score[entering], score, num_free)


class Lowtide:
    """TIDE's interval with a memory, and only moves that pay for themselves.

    For each expert it forecasts the seconds per step that residency would save: the cheaper way
    of running it absent, less its time when resident. At each step the rest of the interval,
    `tau - t % tau` steps, is what a move can still earn: an expert enters only where its saving
    over that time, less its cost, exceeds that of the resident it replaces. Experts that this
    step fetches anyway cost nothing. Another move costs the time it takes from demand on the
    link: its transfer times the share of time the link is busy with demand. And such moves ride
    in idle link time: per layer as many as fit into what demand left idle, at most
    `max_step_bytes` per step over all layers; what a layer does not use it may use within `tau`
    steps.

    `Budgets` moves residents between layers. A layer that has too many by that evicts those that
    are worth least, and does nothing else in that step.
    """

    def __init__(
        self,
        capacity: Sequence[int],
        num_experts: int,
        costs: Costs,
        tau: int | OnlineTau = 4,
        decay: float = 0.5,
        max_step_bytes: int | None = None,
        frequency: FloatArray | None = None,
    ) -> None:
        """`decay`: weight of the past in the link's mean use. `frequency` [layers, experts]: steps
        of a calibration in which each was active; its most active start, else the first by id.
        """
        _check_share("decay", decay)
        if not isinstance(tau, OnlineTau) and tau < 1:
            raise UsageError(f"tau must be a whole number of steps from 1, not {tau}.")
        num_layers = len(capacity)
        self._last_layer = num_layers
        self._budgets = Budgets(capacity, num_experts)
        self._capacity = self._budgets.capacity
        self._costs = costs
        self._tau = tau
        self._decay = decay
        self._frequency = frequency
        self._forecast = Forecast(num_layers, num_experts, frequency)
        self._known_s = self._seconds(np.arange(_NUM_KNOWN))
        self._sides = np.ones((2, num_experts))  # [all activated experts, those on the host]
        self._is_fetched = np.zeros(num_experts, np.bool_)  # in the step of one layer
        per_layer = np.inf if max_step_bytes is None else max_step_bytes / max(1, num_layers)
        self._max_moves = per_layer / costs.expert_bytes
        self._credit = [0.0] * num_layers  # moves that a layer may still make
        self._busy = [0.0] * num_layers  # share of a layer's time that demand keeps the link busy

    @property
    def tau(self) -> int:
        """The interval in force, in steps."""
        return _interval(self._tau)

    def initial(self, layer: int) -> IntArray:
        if self._frequency is None:
            return np.arange(self._capacity[layer])
        frequency = self._frequency[layer]
        everyone = np.ones(len(frequency), np.bool_)
        return np.sort(_top(frequency, everyone, self._capacity[layer]))

    def fetched(self, layer: int, experts: IntArray) -> None:
        self._is_fetched[experts] = True

    def update(self, step: Step, layer: int, demand: Demand, is_resident: BoolArray) -> Moves:
        if isinstance(self._tau, OnlineTau):
            self._tau.observe(step, layer, demand)
        # Not by layer 0: a layer whose experts are all resident is not heard of.
        is_first, self._last_layer = layer <= self._last_layer, layer
        if is_first and step.kind is not StepKind.PREFILL:
            self._budgets.begin_step(self._forecast.of_all_layers)
        self._learn(layer, demand)
        num_over = self._budgets.settle(layer, int(np.count_nonzero(is_resident)))
        remaining = self.tau if step.kind is StepKind.PREFILL else self.tau - step.index % self.tau
        if num_over:
            moves = self._shrink(layer, num_over, is_resident)
        elif self._credit[layer] >= 1 or np.count_nonzero(self._is_fetched):
            moves = self._swap(layer, remaining, is_resident)
        else:
            moves = NO_MOVES  # nothing could be afforded
        self._is_fetched.fill(False)
        return moves

    def _learn(self, layer: int, demand: Demand) -> None:
        if not len(demand.experts):
            return
        try:
            seconds = self._known_s[demand.num_tokens]
        except IndexError:
            seconds = self._seconds(demand.num_tokens)
        self._forecast.observe(layer, demand.experts, demand.num_tokens, seconds[:, 2])
        self._watch_link(layer, demand, seconds)

    def _seconds(self, num_tokens: IntArray) -> FloatArray:
        """On the device, on the host, and saved by residency. [len(num_tokens), 3]"""
        costs = self._costs
        device_s, host_s = costs.device_s(num_tokens), costs.host_s(num_tokens)
        absent_s = np.maximum(device_s, costs.fetch_s) if costs.num_staging else host_s
        saved_s = np.maximum(0.0, np.minimum(absent_s, host_s) - device_s)
        return np.stack([device_s, host_s, saved_s], axis=1)

    def _watch_link(self, layer: int, demand: Demand, seconds: FloatArray) -> None:
        """Learns how busy demand keeps the link, and grants moves for the time it leaves."""
        costs, num_tokens = self._costs, demand.num_tokens
        link_s = np.count_nonzero(self._is_fetched) * costs.fetch_s
        sides = self._sides[:, : len(num_tokens)]
        sides[1] = ~(demand.is_resident | self._is_fetched[demand.experts])
        # All sums in one product: each costs as much as it.
        (all_s, _, _), (spared_s, host_part_s, _) = sides.dot(seconds).tolist()
        # A pass has at least as many rows as its busiest expert has tokens.
        dense_s = costs.dense_s.at(int(num_tokens[num_tokens.argmax()]))
        layer_s = dense_s + max(link_s, host_part_s, all_s - spared_s)
        busy = link_s / max(layer_s, 1e-30)
        self._busy[layer] += (1 - self._decay) * (busy - self._busy[layer])
        granted = min(self._max_moves, (layer_s - link_s) / costs.fetch_s)
        most = max(1.0, granted) * self.tau
        self._credit[layer] = min(self._credit[layer] + granted, most)

    def _swap(self, layer: int, remaining: int, is_resident: BoolArray) -> Moves:
        gain_s = self._forecast(layer) * remaining
        net_s = gain_s - self._costs.fetch_s * self._busy[layer]
        np.copyto(net_s, gain_s, where=self._is_fetched)
        residents = is_resident.nonzero()[0]
        kept_s = gain_s[residents]
        num_free = max(0, self._capacity[layer] - len(residents))
        floor_s = kept_s[kept_s.argmin()] if len(residents) and not num_free else 0.0
        entering = ((net_s > floor_s) > is_resident).nonzero()[0]
        if not len(entering):
            return NO_MOVES
        entering = entering[(-net_s[entering]).argsort(kind="stable")]
        entering = self._affordable(layer, entering)
        if not len(entering):
            return NO_MOVES
        worse = (kept_s < net_s[entering[0]]).nonzero()[0]
        leaving = residents[worse[kept_s[worse].argsort(kind="stable")]]
        moves = _exchange(entering, leaving, net_s[entering], gain_s, num_free)
        is_fetched = self._is_fetched[moves.admit]
        self._credit[layer] -= len(is_fetched) - np.count_nonzero(is_fetched)
        return moves

    def _shrink(self, layer: int, num_over: int, is_resident: BoolArray) -> Moves:
        residents = is_resident.nonzero()[0]
        leaving = residents[self._forecast(layer)[residents].argsort(kind="stable")[:num_over]]
        return Moves(NO_MOVES.admit, np.sort(leaving))

    def _affordable(self, layer: int, entering: IntArray) -> IntArray:
        """Those, best first, that cost nothing, and of the others as many as there is credit."""
        credit = int(self._credit[layer])
        if len(entering) <= credit:
            return entering
        is_free = self._is_fetched[entering]
        if not np.count_nonzero(is_free):
            return entering[:credit]
        num_paid = (~is_free).cumsum()
        affordable: IntArray = entering[(is_free | (num_paid <= credit)).nonzero()[0]]
        return affordable


def layer_budgets(frequency: FloatArray, total: int, least: int = 0) -> IntArray:
    """Residents per layer, `total` in all, where they do most: by marginal benefit.

    frequency [layers, experts]: what an expert's residency is worth, in any one unit; the best
    `total` experts of the whole model are counted by layer. Equal worth goes round the layers,
    the next best expert of each in turn. Every layer gets `least`. Raises UsageError when that
    does not fit, or `total` exceeds the experts there are. [layers]
    """
    num_layers, num_experts = frequency.shape
    if not num_layers * least <= total <= num_layers * num_experts or not 0 <= least <= num_experts:
        raise UsageError(
            f"{total} residents cannot be spread over {num_layers} layers of {num_experts} "
            f"experts with at least {least} in each."
        )
    worth = -np.sort(-frequency, axis=1)  # a layer's marginal benefit of one more resident
    worth[:, :least] = np.inf
    rank = np.broadcast_to(np.arange(num_experts), worth.shape)
    order = np.lexsort((rank.ravel(), -worth.ravel()))
    budgets: IntArray = np.bincount(order[:total] // num_experts, minlength=num_layers)
    return budgets


def _top(rank: IntArray | FloatArray, candidates: BoolArray, count: int) -> IntArray:
    """The `count` candidates with the highest rank; lower ids win ties."""
    experts = candidates.nonzero()[0]
    order = (-rank[experts]).argsort(kind="stable")
    return experts[order[:count]]


def _interval(tau: int | OnlineTau) -> int:
    """The refresh interval in force, in steps."""
    return tau.tau if isinstance(tau, OnlineTau) else tau


def _moves(target: IntArray, is_resident: BoolArray) -> Moves:
    """From the present residents to exactly those in `target`."""
    is_target = np.zeros(len(is_resident), np.bool_)
    is_target[target] = True
    return Moves(
        admit=(is_target > is_resident).nonzero()[0],
        evict=(is_resident > is_target).nonzero()[0],
    )


def _keep(score: FloatArray, candidates: BoolArray, is_resident: BoolArray, count: int) -> IntArray:
    """The `count` candidates with the highest score; residents, then lower ids, win ties."""
    residents, others = is_resident.nonzero()[0], (candidates > is_resident).nonzero()[0]
    experts = np.concatenate((residents, others))
    order = (-score[experts]).argsort(kind="stable")
    return experts[order[:count]]


def _exchange(
    entering: IntArray,
    leaving: IntArray,
    entering_worth: FloatArray | IntArray,
    worth: FloatArray | IntArray,
    num_free: int,
) -> Moves:
    """Admits the best of `entering`, each for a free slot or for a resident that is worth less.

    `entering` best first with `entering_worth`; `leaving`: residents that may go, least `worth`
    first.
    """
    rest = entering[num_free:]
    num_pairs = min(len(rest), len(leaving))
    is_better = entering_worth[num_free : num_free + num_pairs] > worth[leaving[:num_pairs]]
    # Both sides are sorted, so the pairs that pay come first.
    num_swaps = np.count_nonzero(is_better)
    admit, evict = entering[: num_free + num_swaps].copy(), leaving[:num_swaps].copy()
    admit.sort()
    evict.sort()
    return Moves(admit, evict)


def _check_share(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise UsageError(f"{name} must be a number from 0 to 1, not {value}.")
