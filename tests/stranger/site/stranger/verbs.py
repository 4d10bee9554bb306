"""A verb; that it was imported is said on standard error."""

from __future__ import annotations

import sys

print("stranger.verbs was imported", file=sys.stderr)


def greet(name: str) -> None:
    """Say hello to somebody."""
    print(f"Hello, {name}.")
