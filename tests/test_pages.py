"""One budget among several owners, whatever the order of their asking."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import InternalError, PageError
from lowtide.memory.pages import PageBudget

changes = st.lists(st.tuples(st.integers(0, 2), st.integers(-50, 50)), max_size=40)


@given(st.integers(0, 100), changes)
def test_owners_never_have_more_than_the_budget(
    num_bytes: int, changes: list[tuple[int, int]]
) -> None:
    budget = PageBudget(num_bytes)
    accounts = [budget.open(owner) for owner in ("slots", "cache", "workspace")]
    held = [0, 0, 0]
    for which, change in changes:
        account = accounts[which]
        if change > num_bytes - sum(held):
            with pytest.raises(PageError, match=f"{account.owner} wants {change} bytes more"):
                account.draw(change)
        elif change >= 0:
            account.draw(change)
            held[which] += change
        elif -change > held[which]:
            with pytest.raises(InternalError, match=f"has drawn {held[which]}"):
                account.give_back(-change)
        else:
            account.give_back(-change)
            held[which] += change
        assert list(budget.shares().values()) == held
        assert budget.num_free_bytes == num_bytes - sum(held) >= 0


def test_a_refusal_names_who_has_the_pages() -> None:
    budget = PageBudget(6 << 20)
    budget.open("slots").draw(4 << 20)
    with pytest.raises(PageError, match=r"3145728 bytes more, and 2097152 .*slots 4.*raise"):
        budget.open("KV cache").draw(3 << 20)


def test_who_can_give_way_does_before_anybody_is_refused() -> None:
    budget = PageBudget(10)
    slots, cache, scratch = (budget.open(owner) for owner in ("slots", "cache", "scratch"))
    asked: list[int] = []

    def give_way(num_bytes: int) -> None:
        asked.append(num_bytes)
        slots.give_back(min(slots.num_bytes, num_bytes + 1))  # in pieces of its own

    slots.give_way = give_way
    slots.draw(8)
    cache.draw(4)
    assert (asked, budget.shares()) == ([2], {"slots": 5, "cache": 4, "scratch": 0})
    scratch.draw(1)
    assert asked == [2], "nobody is asked for what is free"
    with pytest.raises(PageError, match="slots wants 6"):
        slots.draw(6)
    assert asked == [2], "nobody is asked on his own account"
    with pytest.raises(PageError, match="cache wants 7 bytes more, and 5 .* are free"):
        cache.draw(7)
    assert asked == [2, 7] and budget.shares() == {"slots": 0, "cache": 4, "scratch": 1}


def test_the_first_who_gives_enough_is_the_last_to_be_asked() -> None:
    budget = PageBudget(10)
    first, second, third = (budget.open(owner) for owner in "abc")
    for account in (first, second):
        account.give_way = account.give_back
        account.draw(5)
    third.draw(5)
    assert budget.shares() == {"a": 0, "b": 5, "c": 5}
