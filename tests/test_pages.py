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


def test_an_owner_has_one_account() -> None:
    budget = PageBudget(1)
    budget.open("slots")
    with pytest.raises(InternalError, match="slots has an account"):
        budget.open("slots")
