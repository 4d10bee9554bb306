"""The least range that a graph of transients fits in, by branch and bound."""

from __future__ import annotations

from lowtide.core import align_up
from lowtide.memory.planner import Graph, Place, lowest_gap


def least_arena_bytes(graph: Graph) -> int:
    """Exact, and told nothing of the planner's own placement; for a few transients.

    Of any placement the transients in the order of their offsets, each moved down as far as it
    goes, are one by first fit that is no larger. So the best order has the best placement.
    """
    sizes = [align_up(transient.num_bytes) for transient in graph.transients]
    beside: list[set[int]] = [set(transient.beside) for transient in graph.transients]
    for i, transient in enumerate(graph.transients):
        for other in transient.beside:
            beside[other].add(i)
    best = sum(sizes)  # one after the other

    def place(placed: dict[int, Place], last_start: int) -> None:
        nonlocal best
        if len(placed) == len(sizes):
            best = min(best, max((p.stop for p in placed.values()), default=0))
            return
        for i in range(len(sizes)):
            if best == graph.least_bytes:
                return
            if i in placed:
                continue
            start = lowest_gap((placed[j] for j in beside[i] if j in placed), sizes[i])
            # In the order of offsets only, and never as high as the best.
            if start >= last_start and start + sizes[i] < best:
                place({**placed, i: Place(start, sizes[i])}, start)

    place({}, 0)
    return best
