"""Lowtide's own placement: moves that pay for themselves, in time that the link has left."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lowtide.core import NO_MOVES, Costs, Facts, FloatArray, IntArray, Moves, StepKind
from lowtide.errors import UsageError
from lowtide.policies.budgets import Budgets
from lowtide.policies.forecast import Forecast
from lowtide.policies.online_tau import OnlineTau, interval
from lowtide.policies.ranking import at_most, exchange, favourites

_NUM_KNOWN = 1025  # token counts whose worth is looked up


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

    `Budgets` moves residents between layers, as many in all as there is room for. A layer that has
    too many by that evicts those that are worth least, and does nothing else in that step.
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
        if not 0.0 <= decay <= 1.0:
            raise UsageError(f"decay must be a number from 0 to 1, not {decay}.")
        if not isinstance(tau, OnlineTau) and tau < 1:
            raise UsageError(f"tau must be a whole number of steps from 1, not {tau}.")
        num_layers = len(capacity)
        self._last_layer = num_layers
        self._budgets = Budgets(capacity, num_experts)
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
        return interval(self._tau)

    def initial(self, layer: int) -> IntArray:
        if self._frequency is None:
            return np.arange(self._budgets.capacity[layer])
        return favourites(self._frequency[layer], self._budgets.capacity[layer])

    def update(self, facts: Facts) -> Moves:
        step, layer, is_kept = facts.step, facts.layer, facts.is_kept
        if isinstance(self._tau, OnlineTau):
            self._tau.observe(step, layer, facts.demand)
        is_prefill = step.kind is StepKind.PREFILL
        self._budgets.resize(facts.capacity)
        # Not by layer 0: a layer whose experts are all resident is not heard of.
        is_first, self._last_layer = layer <= self._last_layer, layer
        if is_first and not is_prefill:
            self._budgets.begin_step(self._forecast.of_all_layers)
        self._is_fetched[facts.fetched] = True
        self._learn(facts)
        remaining = self.tau if is_prefill else self.tau - step.index % self.tau
        if self._budgets.settle(layer, int(np.count_nonzero(is_kept))):
            moves = at_most(self._budgets.capacity[layer], self._forecast(layer), is_kept)
        elif self._credit[layer] >= 1 or len(facts.fetched):
            moves = self._swap(facts, remaining)
        else:
            moves = NO_MOVES  # nothing could be afforded
        self._is_fetched.fill(False)
        return moves

    def _learn(self, facts: Facts) -> None:
        demand = facts.demand
        if not len(demand.experts):
            return
        try:
            seconds = self._known_s[demand.num_tokens]
        except IndexError:
            seconds = self._seconds(demand.num_tokens)
        self._forecast.observe(facts.layer, demand.experts, demand.num_tokens, seconds[:, 2])
        self._watch_link(facts, seconds)

    def _seconds(self, num_tokens: IntArray) -> FloatArray:
        """On the device, on the host, and saved by residency. [len(num_tokens), 3]"""
        costs = self._costs
        device_s, host_s = costs.device_s(num_tokens), costs.host_s(num_tokens)
        absent_s = np.maximum(device_s, costs.fetch_s) if costs.num_staging else host_s
        saved_s = np.maximum(0.0, np.minimum(absent_s, host_s) - device_s)
        return np.stack([device_s, host_s, saved_s], axis=1)

    def _watch_link(self, facts: Facts, seconds: FloatArray) -> None:
        """Learns how busy demand keeps the link, and grants moves for the time it leaves."""
        layer, demand, costs = facts.layer, facts.demand, facts.costs
        num_tokens, fetch_s = demand.num_tokens, costs.fetch_s
        link_s = len(facts.fetched) * fetch_s
        sides = self._sides[:, : len(num_tokens)]
        sides[1] = ~(demand.is_resident | self._is_fetched[demand.experts])
        # All sums in one product: each costs as much as it.
        (all_s, _, _), (spared_s, host_part_s, _) = sides.dot(seconds).tolist()
        # A pass has at least as many rows as its busiest expert has tokens.
        dense_s = costs.dense_s.at(int(num_tokens[num_tokens.argmax()]))
        layer_s = dense_s + max(link_s, host_part_s, all_s - spared_s)
        busy = link_s / max(layer_s, 1e-30)
        self._busy[layer] += (1 - self._decay) * (busy - self._busy[layer])
        granted = min(self._max_moves, (layer_s - link_s) / fetch_s)
        most = max(1.0, granted) * self.tau
        self._credit[layer] = min(self._credit[layer] + granted, most)

    def _swap(self, facts: Facts, remaining: int) -> Moves:
        layer, is_kept = facts.layer, facts.is_kept
        gain_s = self._forecast(layer) * remaining
        net_s = gain_s - facts.costs.fetch_s * self._busy[layer]
        np.copyto(net_s, gain_s, where=self._is_fetched)
        residents = is_kept.nonzero()[0]
        kept_s = gain_s[residents]
        num_free = max(0, self._budgets.capacity[layer] - len(residents))
        floor_s = kept_s[kept_s.argmin()] if len(residents) and not num_free else 0.0
        entering = ((net_s > floor_s) > is_kept).nonzero()[0]
        if not len(entering):
            return NO_MOVES
        entering = entering[(-net_s[entering]).argsort(kind="stable")]
        entering = self._affordable(layer, entering)
        if not len(entering):
            return NO_MOVES
        worse = (kept_s < net_s[entering[0]]).nonzero()[0]
        leaving = residents[worse[kept_s[worse].argsort(kind="stable")]]
        moves = exchange(entering, leaving, net_s[entering], gain_s, num_free)
        is_fetched = self._is_fetched[moves.admit]
        self._credit[layer] -= len(is_fetched) - np.count_nonzero(is_fetched)
        return moves

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
