"""Numbers of examples for costly properties."""

from __future__ import annotations

from hypothesis import settings

NORMAL_EXAMPLES = 50
"""Examples of a property without a number of its own, unless another number is asked for."""


def examples(count: int) -> settings:
    """`count` examples normally; more or fewer in proportion under another profile."""
    return settings(max_examples=scaled(count))


def scaled(count: int) -> int:
    """At least one."""
    return max(1, count * settings().max_examples // NORMAL_EXAMPLES)
