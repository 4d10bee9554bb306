"""MoE-Lightning's plan: one split of the experts for the whole run, searched before it begins.

The paper's plan comes from a model of the machine and the load, by enumeration. So here: fixed
residents, a fixed share of the absent experts fetched and the rest run on the host, and a fixed
number of experts brought ahead of their layer, whichever combination would take least time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from lowtide.core import Assignment, BoolArray, Costs, Facts, FloatArray, IntArray
from lowtide.policies.assignment import divide, is_here
from lowtide.policies.prefetch import Ahead, Prefetch

_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
_SEARCH_PASSES = 32  # of a calibration, evenly spaced: enough to see the load
_COMPARED_PASSES = 128  # where two ways differ by little (docs/log)


class Split(NamedTuple):
    """A plan, for all layers and steps."""

    resident_share: float  # of each layer's capacity
    fetch_share: float  # of a step's absent experts; the others run on the host
    num_ahead: int  # experts of the next layer brought ahead, the most used ones


def best_split(
    hits: IntArray, capacity: Sequence[int], frequency: FloatArray, costs: Costs, max_ahead: int
) -> Split:
    """The split of least `split_s` over all shares in quarters, with `max_ahead` and without.

    Among equals the one with most residents and least transfers. hits [passes, layers, experts]:
    the load; frequency [layers, experts]: who is kept and brought.
    """
    some, aheads = _evenly(hits, _SEARCH_PASSES), sorted({0, max_ahead})
    splits = [Split(*parts) for parts in product(_SHARES[::-1], _SHARES, aheads)]
    return min(splits, key=lambda split: split_s(split, some, capacity, frequency, costs))


def least_s(hits: IntArray, capacity: Sequence[int], frequency: FloatArray, costs: Costs) -> float:
    """`split_s` of some passes of `hits` with all residents, at the best share of fetches."""
    some = _evenly(hits, _COMPARED_PASSES)
    splits = [Split(1.0, share, 0) for share in _SHARES]
    return min(split_s(split, some, capacity, frequency, costs) for split in splits)


def split_s(
    split: Split, hits: IntArray, capacity: Sequence[int], frequency: FloatArray, costs: Costs
) -> float:
    """Seconds that the passes of `hits` would take: device, host and link work side by side.

    A layer takes its dense part, a synchronisation unless all its experts are resident, and the
    slowest of the three, or the time of all its transfers, where those brought ahead make that
    longer.
    """
    if split.fetch_share and not costs.num_staging:
        return np.inf
    is_here_now = _favourites(frequency, [round(split.resident_share * c) for c in capacity])
    sync_s = np.where(is_here_now.all(axis=1), 0.0, costs.sync_s)
    is_here_now |= _favourites(np.where(is_here_now, -1.0, frequency), split.num_ahead)
    is_absent = (hits > 0) & ~is_here_now
    place = np.cumsum(is_absent, axis=2)
    is_fetched = is_absent & (place <= split.fetch_share * place[:, :, -1:])
    is_on_host = is_absent & ~is_fetched
    host_s = np.where(is_on_host, costs.host_s(hits), 0.0).sum(axis=2)
    device_s = np.where(is_on_host, 0.0, costs.device_s(hits)).sum(axis=2)
    fetch_s = costs.fetch_s * is_fetched.sum(axis=2)
    # A pass has at least as many rows as its busiest expert has tokens.
    dense_s = costs.dense_s(hits.max(axis=(1, 2)))[:, None]
    layer_s = dense_s + sync_s + np.maximum(np.maximum(host_s, device_s), fetch_s)
    return float(np.maximum(layer_s, fetch_s + split.num_ahead * costs.fetch_s).sum())


class FixedShare:
    """Residents on the device; a fixed share of the absent experts fetched, by ascending id.

    A prefetched expert that has arrived counts as resident.
    """

    def __init__(self, fetch_share: float) -> None:
        self._fetch_share = fetch_share

    def __call__(self, facts: Facts) -> Assignment:
        mask = is_here(facts)
        absent = (~mask).nonzero()[0]
        fetched = absent[: int(self._fetch_share * len(absent))]
        return divide(facts.demand, mask | np.isin(np.arange(len(mask)), fetched))


class Favourites(Prefetch):
    """Always the most used experts that are not resident: no prediction."""

    def __init__(self, num_experts_ahead: int, frequency: FloatArray) -> None:
        """`frequency` [layers, experts]."""
        super().__init__(num_experts_ahead)
        self._frequency = frequency

    def score(self, ahead: Ahead) -> FloatArray:
        favourites: FloatArray = self._frequency[ahead.layer]
        return favourites


def _evenly(hits: IntArray, most: int) -> IntArray:
    """At most `most` of the passes."""
    chosen = np.unique(np.linspace(0, len(hits) - 1, min(len(hits), most)).astype(int))
    some: IntArray = hits[chosen]
    return some


def _favourites(frequency: FloatArray, num_kept: Sequence[int] | int) -> BoolArray:
    """The `num_kept` most used experts of each layer; lower ids win ties. [layers, experts]."""
    rank = np.argsort(np.argsort(-frequency, axis=1, kind="stable"), axis=1, kind="stable")
    mask: BoolArray = rank < np.asarray(num_kept).reshape(-1, 1)
    return mask
