"""The plan of one byte budget."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import PlanError
from lowtide.memory.budget import LARGE_SLOT_BYTES, Needs, spend

sizes = st.one_of(st.just(0), st.integers(0, 1 << 40))
needs_of_any_model = st.builds(
    Needs,
    dense_bytes=sizes,
    kv_cache_bytes=sizes,
    workspace_bytes=sizes,
    ring_bytes=sizes,
    slot_bytes=st.one_of(st.integers(1, 4096), st.integers(1, 1 << 30)),
    num_layers=st.integers(0, 80),
    num_experts=st.integers(1, 512),
)
shares = st.floats(0, 1.5)


def budget_of(needs: Needs, share: float) -> int:
    """From the least that runs (0) to everything (1) and more."""
    return needs.minimum_bytes + int(share * (needs.full_bytes - needs.minimum_bytes))


@given(needs_of_any_model, shares)
def test_the_plan_is_never_above_the_budget(needs: Needs, share: float) -> None:
    budget_bytes = budget_of(needs, share)
    tier, residents = spend(needs, budget_bytes, context=4096)
    assert tier.budget_bytes == budget_bytes
    assert tier.used_bytes <= budget_bytes
    assert len(residents) == needs.num_layers
    assert all(0 <= count <= needs.num_experts for count in residents)
    assert max(residents, default=0) - min(residents, default=0) <= 1
    assert sorted(residents, reverse=True) == list(residents)


@given(needs_of_any_model, shares)
def test_slots_hold_the_residents_and_the_absent_can_still_stream(
    needs: Needs, share: float
) -> None:
    tier, residents = spend(needs, budget_of(needs, share), context=4096)
    total = needs.num_layers * needs.num_experts
    if sum(residents) == total:
        assert tier.num_slots == total
    else:
        assert tier.num_slots - sum(residents) == needs.num_staging_slots >= 1
        # Nothing is left over that a slot could be made of.
        assert tier.budget_bytes - tier.used_bytes < needs.slot_bytes


@given(needs_of_any_model, shares, shares)
def test_more_budget_never_keeps_less(needs: Needs, one: float, other: float) -> None:
    less, more = sorted([budget_of(needs, one), budget_of(needs, other)])
    small, large = spend(needs, less, 1)[0], spend(needs, more, 1)[0]
    assert small.num_slots <= large.num_slots
    for kept_small, kept_large in zip(
        spend(needs, less, 1)[1], spend(needs, more, 1)[1], strict=True
    ):
        assert kept_small <= kept_large


@given(needs_of_any_model)
def test_minimum_and_full_are_exact(needs: Needs) -> None:
    assert needs.fixed_bytes <= needs.minimum_bytes <= needs.full_bytes
    total = needs.num_layers * needs.num_experts
    assert sum(spend(needs, needs.full_bytes, 1)[1]) == total
    if needs.minimum_bytes < needs.full_bytes:
        assert sum(spend(needs, needs.minimum_bytes, 1)[1]) == 0
        assert sum(spend(needs, needs.full_bytes - 1, 1)[1]) < total
    with pytest.raises(PlanError):
        spend(needs, needs.minimum_bytes - 1, 1)


def test_a_refusal_says_what_how_much_and_what_to_change() -> None:
    needs = Needs(
        dense_bytes=3 << 30,
        kv_cache_bytes=5 << 20,
        workspace_bytes=7 << 20,
        ring_bytes=64 << 20,
        slot_bytes=6 << 20,
        num_layers=19,
        num_experts=256,
    )
    with pytest.raises(PlanError) as refusal:
        spend(needs, 1 << 30, context=1234)
    message = str(refusal.value)
    for part in (
        *("1.0 GiB", "3.0 GiB", "5.0 MiB", "7.0 MiB", "64.0 MiB", "12 expert slots", "6.0 MiB"),
        *("1234 tokens", f"{needs.minimum_bytes} bytes", "`host_memory`"),
    ):
        assert part in message
    assert "--context" not in message  # no context is short enough
    # The number in the refusal is the number that works.
    [minimum] = re.findall(r"\((\d+) bytes\)", message)
    spend(needs, int(minimum), context=1234)


def test_a_shorter_context_is_advised_where_it_may_suffice() -> None:
    needs = Needs(1 << 20, 5 << 20, 7 << 20, 0, slot_bytes=100, num_layers=1, num_experts=2)
    with pytest.raises(PlanError, match=r"Raise `host_memory` or lower `context`\."):
        spend(needs, 12 << 20, context=1234)


def test_the_refusal_counts_the_slots_that_a_tiny_model_really_needs() -> None:
    needs = Needs(0, 0, 0, 0, slot_bytes=100, num_layers=1, num_experts=2)
    assert needs.minimum_bytes == needs.full_bytes == 200
    with pytest.raises(PlanError, match="2 expert slots"):
        spend(needs, 199, 1)


def test_a_device_that_fetches_every_absent_expert_needs_a_slot() -> None:
    at_home = Needs(50, 0, 0, 0, slot_bytes=100, num_layers=1, num_experts=2, is_device=True)
    fetched = replace(at_home, fetches_all=True)
    assert (at_home.minimum_bytes, fetched.minimum_bytes) == (50, 150)
    assert spend(at_home, 50, 1)[0].num_slots == 0
    assert spend(fetched, 150, 1)[0].num_slots == 1
    with pytest.raises(PlanError, match=r"\(150 bytes\).* and 1 expert slot of .*`gpu_memory`"):
        spend(fetched, 149, 1)


def test_large_experts_read_less_far_ahead() -> None:
    small = Needs(0, 0, 0, 0, LARGE_SLOT_BYTES, 4, 8)
    large = Needs(0, 0, 0, 0, LARGE_SLOT_BYTES + 1, 4, 8)
    assert (small.num_staging_slots, large.num_staging_slots) == (12, 2)
