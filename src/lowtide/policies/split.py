"""Seconds of passes under a fixed split of experts: residents, fetches, and experts brought ahead.

`division.py` compares ways to divide residents by this model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lowtide.core import BoolArray, Costs, FloatArray, IntArray

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
_COMPARED_PASSES = 128  # where two ways differ by little (docs/log)


class Split(NamedTuple):
    """A plan for all layers and steps."""

    resident_share: float  # of each layer's capacity
    fetch_share: float  # of a step's absent experts; the others run on the host
    num_ahead: int  # experts of the next layer brought ahead, the most used ones


def least_s(hits: IntArray, capacity: Sequence[int], frequency: FloatArray, costs: Costs) -> float:
    """Return `split_s` of some passes of `hits` at the best share of fetches."""
    some = evenly(hits, _COMPARED_PASSES)
    splits = [Split(1.0, share, 0) for share in SHARES]
    return min(split_s(split, some, capacity, frequency, costs) for split in splits)


def split_s(
    split: Split, hits: IntArray, capacity: Sequence[int], frequency: FloatArray, costs: Costs
) -> float:
    """Return the seconds of the passes in `hits`, with device, host and link working in parallel.

    A layer takes its dense part, a synchronisation unless all its experts are resident, and the
    slowest of the three; or the time of all its transfers, if experts brought ahead make that
    longer.
    """
    if split.fetch_share and not costs.num_staging:
        return np.inf
    is_here_now = most_used(frequency, [round(split.resident_share * c) for c in capacity])
    sync_s = np.where(is_here_now.all(axis=1), 0.0, costs.sync_s)
    is_here_now |= most_used(np.where(is_here_now, -1.0, frequency), split.num_ahead)
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


def evenly(hits: IntArray, most: int) -> IntArray:
    """Return at most `most` of the passes, evenly spaced."""
    chosen = np.unique(np.linspace(0, len(hits) - 1, min(len(hits), most)).astype(int))
    some: IntArray = hits[chosen]
    return some


def most_used(frequency: FloatArray, num_kept: Sequence[int] | int) -> BoolArray:
    """Return each layer's `num_kept` most used experts: [layers, experts]; lower ids win ties."""
    rank = np.argsort(np.argsort(-frequency, axis=1, kind="stable"), axis=1, kind="stable")
    mask: BoolArray = rank < np.asarray(num_kept).reshape(-1, 1)
    return mask
