"""A memory budget divided among accounts while a model runs.

Pure arithmetic. KV cache, workspace and expert slots each have an account; together they never draw
more than the budget. Knows nothing of addresses: `PagedArena` makes drawn bytes physical, and
gives bytes back only when they are no longer physical, so that shrinking completes before another
account grows.
"""

from __future__ import annotations

from collections.abc import Callable

from lowtide.config import format_size
from lowtide.errors import InternalError, PageError


class PageBudget:
    """Owns `num_bytes`, divided among accounts; bytes that none has drawn are free."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.accounts: list[PageAccount] = []

    @property
    def num_free_bytes(self) -> int:
        return self.num_bytes - sum(account.num_bytes for account in self.accounts)

    def open(self, owner: str) -> PageAccount:
        """Open an empty account; `owner` names it in refusals and tables."""
        account = PageAccount(self, owner)
        self.accounts.append(account)
        return account

    def ask(self, num_bytes: int, asking: PageAccount | None = None) -> int:
        """Ask other accounts, in order, to release `num_bytes`; return the bytes released."""
        before = self.num_free_bytes
        for account in self.accounts:
            num_wanted = num_bytes + before - self.num_free_bytes
            if num_wanted > 0 and account is not asking and account.give_way is not None:
                account.give_way(num_wanted)
        return self.num_free_bytes - before

    def shares(self) -> dict[str, int]:
        """Return the bytes that each owner has drawn."""
        return {account.owner: account.num_bytes for account in self.accounts}


class PageAccount:
    """Bytes that one owner has drawn from a budget.

    give_way: releases memory on request, as far as the owner can do without, before it returns.
    None for an owner that never does.
    """

    def __init__(self, budget: PageBudget, owner: str) -> None:
        self.budget = budget
        self.owner = owner
        self.num_bytes = 0
        self.give_way: Callable[[int], None] | None = None

    def draw(self, num_bytes: int) -> None:
        """Take bytes that are free, or that others release on request.

        Raises PageError, taking none, if there are too few.
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
        """Return drawn bytes that are no longer physical."""
        if num_bytes > self.num_bytes:
            raise InternalError(
                f"{self.owner} gives back {num_bytes} bytes and has drawn {self.num_bytes}."
            )
        self.num_bytes -= num_bytes
