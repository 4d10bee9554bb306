"""A point in the order of work of a stream, whatever the stream is: a thread's or a GPU's."""

from __future__ import annotations

from typing import Protocol

WAIT_LIMIT_S = 60.0
"""No wait between devices lasts longer: a stalled link or a dead thread becomes an error."""

INTERRUPT_POLL_S = 0.3
"""No single wait lasts longer: in between waits a closed model is noticed and Python raises
KeyboardInterrupt."""


class Event(Protocol):
    """A point in a stream's order of work."""

    def is_done(self) -> bool:
        """Whether all work before it has ended; never waits."""
        ...

    def wait(self, limit_s: float = WAIT_LIMIT_S) -> None:
        """Waits on the calling thread. Raises DeviceError after `limit_s`, or when the work
        before it failed.
        """
        ...
