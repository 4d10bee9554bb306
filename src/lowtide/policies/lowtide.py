"""Lowtide's own placement: moves that pay for themselves, made while the link is idle."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lowtide.core import (
    NO_MOVES,
    NUM_KNOWN,
    Costs,
    Facts,
    FloatArray,
    IntArray,
    Moves,
    Step,
    StepKind,
)
from lowtide.policies.budgets import Budgets
from lowtide.policies.forecast import Forecast, stays
from lowtide.policies.online_tau import OnlineTau, interval
from lowtide.policies.placement import Placement, favourites
from lowtide.policies.ranks import Ranks, choose


class Lowtide(Placement):
    """TIDE's interval with a memory, and only moves that pay for themselves.

    For each expert it forecasts the seconds per step that residency would save: the cheaper way of
    running it absent, less its time when resident. A move can earn that for the rest of the
    interval, `tau - t % tau` steps. An expert enters only if its saving over that time, less the
    move's cost, exceeds the saving of the resident it replaces.

    Experts that this step fetches anyway cost nothing. Another move costs the time it takes from
    demand: its transfer times the share of time the link is busy with demand. Such moves are made
    in idle link time, at most as many per layer as fit into it, and at most `max_step_bytes` per
    step over all layers. A layer may use unused idle time within `tau` steps.

    `Budgets` moves residents between layers within the total room; a layer with too many evicts the
    least valuable. Both use facts from before the pass; a pass' own demand counts as much as in the
    forecast's memories. Without a device every move is free.
    """

    def __init__(
        self,
        capacity: Sequence[int],
        num_experts: int,
        costs: Costs,
        tau: int | OnlineTau = 4,
        max_step_bytes: int | None = None,
        frequency: FloatArray | None = None,
    ) -> None:
        """Begin with the experts most active in a calibration, else with the first by id.

        frequency [layers, experts]: number of the calibration's steps in which each was active.
        """
        num_layers = len(capacity)
        super().__init__(num_layers, num_experts)
        self._num_residents[:] = capacity  # complete layers are never reported
        self._budgets = Budgets(capacity, num_experts)
        self._costs = costs
        self._tau = tau
        self._interval = interval(tau)  # of the pass
        self._frequency = frequency
        self._forecast = Forecast(num_layers, num_experts, frequency)
        counts = np.arange(NUM_KNOWN)
        self._known_s = self._seconds(counts)
        self._known_dense_s = costs.dense_s(counts)
        self._staying_s = self._known_s[:, 2] * stays(counts)
        self._sides = np.ones((2, num_experts))  # [all activated experts, those on the host]
        self._is_fetched = np.zeros(num_experts, np.bool_)  # in the step of one layer
        per_layer = np.inf if max_step_bytes is None else max_step_bytes / max(1, num_layers)
        self._max_moves = per_layer / costs.expert_bytes
        self._fetch_s = costs.fetch_s
        self._credit = [0.0] * num_layers  # moves that a layer may still make
        self._busy = [0.0] * num_layers  # share of its time that demand keeps the link: a mean

    @property
    def tau(self) -> int:
        """The present interval, in steps."""
        return interval(self._tau)

    def initial(self, layer: int) -> IntArray:
        capacity = int(self._budgets.capacity[layer])
        if self._frequency is None:
            return np.arange(capacity)
        return favourites(self._frequency[layer], capacity)

    def begin_pass(self, step: Step, num_residents: IntArray, capacity: IntArray) -> Ranks:
        self._interval = interval(self._tau)
        budgets = self._budgets
        budgets.resize(capacity)
        if step.kind is not StepKind.PREFILL:
            budgets.begin_step(self._forecast)
        budgets.settle(num_residents)
        own_share = self._forecast.before(self._rank)
        return Ranks(
            self._rank,
            budgets.capacity,
            per_share=own_share,
            worth=self._staying_s,
            low_ids_leave=True,
        )

    def end_pass(self, step: Step, hits: IntArray) -> None:
        if isinstance(self._tau, OnlineTau):
            self._tau.observe(step, hits)
        self._forecast.observe(hits, self._of(hits)[..., 2])

    def update(self, facts: Facts) -> Moves:
        ranks, layer = self.ranks_for(facts), facts.layer
        tau = self._interval
        self._is_fetched[facts.fetched] = True
        worth_s = self._watch_link(facts, tau) or self._forecast.worth_s[layer]
        is_over = self._num_residents[layer] > ranks.room[layer]
        moves = NO_MOVES
        if is_over or self._credit[layer] >= 1 or len(facts.fetched):
            moves = self._affordable(facts, ranks, worth_s, tau)
        self._is_fetched.fill(False)
        return moves

    def _of(self, num_tokens: IntArray) -> FloatArray:
        """Return `_seconds`, from a table if possible."""
        try:
            return self._known_s[num_tokens]
        except IndexError:
            return self._seconds(num_tokens)

    def _seconds(self, num_tokens: IntArray) -> FloatArray:
        """Return seconds on the device, on the host, and saved by residency: [..., 3]."""
        costs = self._costs
        device_s, host_s = costs.device_s(num_tokens), costs.host_s(num_tokens)
        absent_s = np.maximum(device_s, costs.fetch_s) if costs.num_staging else host_s
        saved_s = np.maximum(0.0, np.minimum(absent_s, host_s) - device_s)
        return np.stack([device_s, host_s, saved_s], axis=-1)

    def _watch_link(self, facts: Facts, tau: int) -> float:
        """Learn how busy demand keeps the link, and grant moves for its idle time.

        Returns the worth of having all activated experts resident.
        """
        layer, demand, costs = facts.layer, facts.demand, facts.costs
        num_tokens, fetch_s = demand.num_tokens, self._fetch_s
        if not len(num_tokens):
            return 0.0
        # A pass has at least as many rows as its busiest expert has tokens.
        most = int(num_tokens[num_tokens.argmax()])
        if most < NUM_KNOWN:
            known_s, dense_s = self._known_s[num_tokens], float(self._known_dense_s[most])
        else:
            known_s, dense_s = self._seconds(num_tokens), costs.dense_s.at(most)
        link_s = len(facts.fetched) * fetch_s
        sides = self._sides[:, : len(num_tokens)]
        sides[1] = ~(demand.is_resident | self._is_fetched[demand.experts])
        # All sums in one product: each costs as much as it.
        (all_s, _, worth_s), (spared_s, host_part_s, _) = sides.dot(known_s).tolist()
        layer_s = dense_s + max(link_s, host_part_s, all_s - spared_s)
        busy = link_s / max(layer_s, 1e-30)
        self._busy[layer] += 0.5 * (busy - self._busy[layer])
        granted = min(self._max_moves, (layer_s - link_s) / fetch_s)
        self._credit[layer] = min(self._credit[layer] + granted, max(1.0, granted) * tau)
        return float(worth_s)

    def _affordable(self, facts: Facts, ranks: Ranks, worth_s: float, tau: int) -> Moves:
        """Return the moves that pay within the rest of the interval.

        These are the moves that cost nothing and, best first, as many others as the credit allows.
        """
        step, layer = facts.step, facts.layer
        is_prefill = step.kind is StepKind.PREFILL
        remaining = tau if is_prefill else tau - step.index % tau
        net_s = ranks.rank[layer].clip(0.0) * (worth_s * remaining)
        is_paid = ~(facts.is_kept | self._is_fetched)
        net_s[is_paid] -= self._fetch_s * self._busy[layer]
        paid = (is_paid & (net_s > 0)).nonzero()[0]
        too_many = paid[(-net_s[paid]).argsort(kind="stable")][int(self._credit[layer]) :]
        net_s[too_many] = 0.0
        alone = ranks._replace(rank=net_s[None], room=ranks.room[layer : layer + 1])
        moves = choose(alone, 0, ~facts.is_kept, facts.is_kept)
        self._credit[layer] -= np.count_nonzero(is_paid[moves.admit])
        return moves
