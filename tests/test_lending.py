"""Expert slots that come and go: pure decisions."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lowtide.policies.slot_lending import MOVE_READS, ExpertUse, grown, shrunk, worth_lending


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 8))
def test_room_shrinks_and_grows_by_as_much_as_it_was_asked(
    seed: int, num_layers: int, num_experts: int
) -> None:
    draw = np.random.default_rng(seed)
    is_resident = draw.random((num_layers, num_experts)) < 0.5
    use = draw.random((num_layers, num_experts))
    # A preset may divide its room otherwise than it was given.
    num_residents = int(is_resident.sum())
    total = int(draw.integers(num_residents, is_resident.size + 1))
    capacity = np.zeros(num_layers, np.int64)
    while capacity.sum() < total:
        layer = int(draw.integers(num_layers))
        capacity[layer] += capacity[layer] < num_experts
    before = capacity.copy()

    count = int(draw.integers(0, total + 1))
    less, evict = shrunk(capacity, is_resident, use, count)
    assert less.sum() == total - count and (less >= 0).all()
    assert len(set(evict)) == len(evict) and all(is_resident[place] for place in evict)
    assert num_residents - len(evict) <= total - count
    assert len(evict) <= count
    left = is_resident.copy()
    for place in evict:
        left[place] = False
    if evict and left.any():
        assert max(use[place] for place in evict) <= use[left].min(), "the coldest leave"

    more = grown(less, left, use, count)
    assert more.sum() == min(total, num_layers * num_experts) and (more >= less).all()
    assert (more <= num_experts).all() and np.array_equal(capacity, before)


def test_room_that_no_expert_fills_goes_first() -> None:
    is_resident = np.array([[True, True, False], [True, False, False]])
    use = np.array([[0.5, 0.1, 0.0], [0.3, 0.9, 0.2]])
    less, evict = shrunk(np.array([2, 3]), is_resident, use, 2)
    assert (less.tolist(), evict) == ([2, 1], [])
    less, evict = shrunk(np.array([2, 2]), is_resident, use, 3)
    assert (less.tolist(), evict) == ([1, 0], [(0, 1), (1, 0)])


def test_room_goes_where_absent_experts_are_asked_for() -> None:
    is_resident = np.array([[True, True, False], [True, False, False]])
    use = np.array([[0.5, 0.1, 0.4], [0.3, 0.9, 0.2]])
    assert grown(np.array([2, 1]), is_resident, use, 1).tolist() == [2, 2]
    assert grown(np.array([2, 1]), is_resident, use, 2).tolist() == [3, 2]
    assert grown(np.array([2, 1]), is_resident, use, 9).tolist() == [3, 3]


def test_use_is_a_share_of_the_last_steps() -> None:
    use = ExpertUse(2, 3)
    for _ in range(400):
        use.saw(np.array([[0, 0, 0], [1, 0, 3]]))
        use.saw(np.array([[0, 0, 0], [0, 0, 1]]))
    assert use.mean[1, 2] > 0.999 and 0.4 < use.mean[1, 0] < 0.5
    assert not use.mean[0].any() and use.mean[1, 1] == 0


def test_memory_is_lent_when_it_saves_more_than_it_costs() -> None:
    assert worth_lending(1000, growth_bytes=0.0, absent_use=0.1) == 1000
    assert worth_lending(1000, growth_bytes=0.0, absent_use=0.0) == 0
    # It comes back after two steps, in which it would save one read.
    assert worth_lending(1000, growth_bytes=250.0, absent_use=0.5) == 1000 - 500 * MOVE_READS
    assert worth_lending(1000, growth_bytes=501.0, absent_use=0.5) == 0
