"""One budget of memory that changes hands while a model runs.

Pure arithmetic. KV cache, workspace and expert slots each have an account; what one draws no other
has, and all of them together never draw more than the budget, whatever the order of their asking.
Knows nothing of addresses: `ElasticArena` makes physical what its account has drawn, and gives
back only what is physical no more, so that shrinking completes before another account grows.
"""

from __future__ import annotations

from collections.abc import Callable

from lowtide.config import format_size
from lowtide.errors import InternalError, PageError


class PageBudget:
    """Owns `num_bytes`, divided among accounts; what none of them has drawn is free."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.accounts: list[PageAccount] = []

    @property
    def num_free_bytes(self) -> int:
        return self.num_bytes - sum(account.num_bytes for account in self.accounts)

    def open(self, owner: str) -> PageAccount:
        """A new account with nothing in it; `owner` names it in refusals and tables."""
        account = PageAccount(self, owner)
        self.accounts.append(account)
        return account

    def ask(self, num_bytes: int, asking: PageAccount | None = None) -> int:
        """Has all but who asks give so many bytes up, in the order of their accounts; how many they
        gave.
        """
        before = self.num_free_bytes
        for account in self.accounts:
            num_wanted = num_bytes + before - self.num_free_bytes
            if num_wanted > 0 and account is not asking and account.give_way is not None:
                account.give_way(num_wanted)
        return self.num_free_bytes - before

    def shares(self) -> dict[str, int]:
        """Bytes that each owner has drawn."""
        return {account.owner: account.num_bytes for account in self.accounts}


class PageAccount:
    """What one owner has drawn from a budget.

    give_way: gives memory up when others want so many bytes, as far as the owner can do without;
    it gives back before it returns. None for an owner who never does.
    """

    def __init__(self, budget: PageBudget, owner: str) -> None:
        self.budget = budget
        self.owner = owner
        self.num_bytes = 0
        self.give_way: Callable[[int], None] | None = None

    def draw(self, num_bytes: int) -> None:
        """Takes bytes of the budget that are free, or that others give up for it.

        Raises PageError, taking none, where there are too few.
        """
        num_short = num_bytes - self.budget.num_free_bytes
        if num_short > 0:
            self.budget.ask(num_short, self)
        if num_bytes > self.budget.num_free_bytes:
            budget, shares = self.budget, self.budget.shares().items()
            held = ", ".join(f"{name} {format_size(num_held)}" for name, num_held in shares)
            raise PageError(
                f"{self.owner} wants {num_bytes} bytes more, and {budget.num_free_bytes} of the "
                f"budget's {budget.num_bytes} are free ({held}). Wait for a sequence to end, or "
                "raise the memory budget."
            )
        self.num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Frees bytes that were drawn and are physical no more."""
        if num_bytes > self.num_bytes:
            raise InternalError(
                f"{self.owner} gives back {num_bytes} bytes and has drawn {self.num_bytes}."
            )
        self.num_bytes -= num_bytes
