"""The moves that follow from ranks, against the rule written out one expert at a time."""

from __future__ import annotations

import numpy as np
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from lowtide.core import Moves
from lowtide.policies.ranks import NO_LIMIT, Ranks, admit

NUM_LAYERS, NUM_EXPERTS = 3, 9


@st.composite
def all_ranks(draw: st.DrawFn) -> Ranks:
    """Few different numbers, so that many are equal; some are below 0."""
    numbers = st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0, 3.0])
    size = NUM_LAYERS * NUM_EXPERTS
    rank = np.array(draw(st.lists(numbers, min_size=size, max_size=size)))
    room = st.lists(st.integers(0, NUM_EXPERTS), min_size=NUM_LAYERS, max_size=NUM_LAYERS)
    gain = st.sampled_from([0.0, 0.5, 1.0])
    return Ranks(
        rank.reshape(NUM_LAYERS, NUM_EXPERTS),
        np.array(draw(room), np.int64),
        draw(st.sampled_from([0, 1, 2, NO_LIMIT])),
        draw(gain),
        draw(gain),
        draw(gain),
        draw(st.sampled_from([None, np.array([0.0, 0.5, 0.75]), np.zeros(3)])),
        np.array([7]) if draw(st.booleans()) else None,
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.booleans()),
    )


def copied(ranks: Ranks) -> Ranks:
    clock = None if ranks.clock is None else ranks.clock.copy()
    return ranks._replace(rank=ranks.rank.copy(), clock=clock)


def one_by_one(
    ranks: Ranks, layer: int, hits: dict[int, int], residents: set[int]
) -> tuple[set[int], int]:
    """Residents afterwards, and how many were left out who would have come."""
    rank, room, stay = ranks.rank[layer], ranks.room[layer], set(residents)
    for expert in sorted(hits):
        if ranks.clock is not None:
            ranks.clock[0] += 1
            rank[expert] = ranks.clock[0]
        else:
            worth = {e: float(hits[e]) for e in sorted(hits)}
            if ranks.worth is not None:
                worth = {e: ranks.worth[min(hits[e], len(ranks.worth) - 1)] for e in sorted(hits)}
            rank[expert] += ranks.per_token * hits[expert] + ranks.per_expert
            if ranks.per_share and any(worth.values()):
                rank[expert] += ranks.per_share * worth[expert] / sum(worth.values())

    def first_to_leave(among: set[int]) -> int:
        return min(among, key=lambda e: (rank[e], e if ranks.low_ids_leave else -e))

    while len(stay) > room:
        stay.remove(first_to_leave(stay))
    absent = set(range(NUM_EXPERTS)) if ranks.includes_all else set(hits)
    entering = sorted(
        (e for e in absent - residents if rank[e] > 0 or ranks.is_forced),
        key=lambda e: (-rank[e], e),
    )
    admitted: set[int] = set()
    for expert in entering[: ranks.most]:
        if len(stay) + len(admitted) == room:
            if not stay:
                break
            if not ranks.is_forced and rank[expert] <= rank[first_to_leave(stay)]:
                break
            stay.remove(first_to_leave(stay))
        admitted.add(expert)
    others = admitted - hits.keys()  # as many of those who were to leave stay, lower ids first
    back = sorted(residents - stay)[: len(others)]
    return stay | admitted - others | set(back), len(others)


demands = st.dictionaries(st.integers(0, NUM_EXPERTS - 1), st.integers(1, 4))


@examples(300)
@given(
    ranks=all_ranks(),
    layer=st.integers(0, NUM_LAYERS - 1),
    hits=demands,
    residents=st.sets(st.integers(0, NUM_EXPERTS - 1)),
)
def test_moves_are_those_of_the_rule_one_expert_at_a_time(
    ranks: Ranks, layer: int, hits: dict[int, int], residents: set[int]
) -> None:
    told, is_resident = copied(ranks), mask(residents)
    moves = asked(told, layer, hits, is_resident)
    assert np.array_equal(is_resident, mask(residents))
    wanted, num_left_out = one_by_one(ranks, layer, hits, residents)
    admitted = set(moves.admit.tolist())
    assert (residents - set(moves.evict.tolist())) | admitted == wanted
    assert moves.num_left_out == num_left_out and not len(moves.later)
    assert admitted <= hits.keys() - residents
    assert set(moves.evict.tolist()) <= residents
    for ids in moves[:2]:
        assert ids.dtype == np.int64
        assert np.array_equal(ids, np.unique(ids))
    assert np.allclose(told.rank, ranks.rank, rtol=0, atol=1e-12)
    assert told.clock is None or told.clock[0] == ranks.clock[0]
    assert len(wanted) <= ranks.room[layer]


def asked(ranks: Ranks, layer: int, hits: dict[int, int], is_resident: np.ndarray) -> Moves:
    experts = np.array(sorted(hits), np.int64)
    num_tokens = np.array([hits[expert] for expert in sorted(hits)], np.int64)
    return admit(ranks, layer, experts, num_tokens, is_resident)


def mask(experts: set[int], num_experts: int = NUM_EXPERTS) -> np.ndarray:
    is_resident = np.zeros(num_experts, np.bool_)
    is_resident[sorted(experts)] = True
    return is_resident
