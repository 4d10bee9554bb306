"""Events: points in the order of work of a stream, on a thread or a GPU."""

from __future__ import annotations

from typing import Protocol

WAIT_LIMIT_S = 60.0
"""Longest wait between devices: a stalled link or a dead thread becomes an error."""

INTERRUPT_POLL_S = 0.3
"""Longest single wait, after which a closed model or KeyboardInterrupt is noticed."""


class Event(Protocol):
    def is_done(self) -> bool:
        """Return True if all work before it has ended; never waits."""
        ...

    def wait(self, limit_s: float = WAIT_LIMIT_S) -> None:
        """Wait on the calling thread.

        Raises DeviceError after `limit_s`, or if the work before it failed.
        """
        ...
