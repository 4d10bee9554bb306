"""Most hits of any placement, with hindsight (Belady's replacement, with bypass)."""

from __future__ import annotations

import heapq

import numpy as np

from lowtide.core import IntArray
from lowtide.lab.simulation.oracle import first_uses, following_uses


def most_hits(hits: IntArray, num_slots: int) -> int:
    """Activated experts that can have been resident, at most, where all layers share the slots.

    hits [passes, layers, experts]. No placement that admits only what a step demands has more;
    one that brings experts ahead of demand, by a prefetch or by a swap between two steps, may have
    one more for each of them.
    """
    num_layers, num_experts = hits.shape[1:]
    uses = hits.reshape(len(hits) * num_layers, num_experts) > 0  # in the order of time
    following = following_uses(hits).reshape(uses.shape)
    first = first_uses(hits)
    order = np.argsort(first, axis=None, kind="stable")[:num_slots]
    kept = {int(i): float(first.flat[i]) for i in order if np.isfinite(first.flat[i])}
    farthest = [(-when, item) for item, when in kept.items()]
    heapq.heapify(farthest)
    num_hits = 0
    for time, (is_used, then) in enumerate(zip(uses, following, strict=True)):
        base = time % num_layers * num_experts
        used = [(base + e, float(then[e])) for e in np.flatnonzero(is_used).tolist()]
        is_hit = [item in kept for item, _ in used]
        num_hits += sum(is_hit)
        # Those here first: who is not wanted again makes way for the others of the same step.
        for place in sorted(range(len(used)), key=lambda place: not is_hit[place]):
            _keep(kept, farthest, *used[place], num_slots)
    return num_hits


def _keep(
    kept: dict[int, float],
    farthest: list[tuple[float, int]],
    item: int,
    when: float,
    num_slots: int,
) -> None:
    """Keeps the item just used, unless all who are kept are wanted sooner."""
    if not np.isfinite(when):
        kept.pop(item, None)
        return
    if item not in kept and len(kept) >= num_slots:
        while farthest and kept.get(farthest[0][1]) != -farthest[0][0]:
            heapq.heappop(farthest)  # has left, or has been used since
        if not farthest or -farthest[0][0] <= when:
            return
        del kept[heapq.heappop(farthest)[1]]
    kept[item] = when
    heapq.heappush(farthest, (-when, item))
