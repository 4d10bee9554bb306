"""Admission control: a queue bounded by the number of requests and by waiting prompt tokens."""

from __future__ import annotations

import time
from typing import Self

from lowtide.serve.errors import Draining, QueueFull

_RETRY_S = (1, 60)
"""Bounds of the `Retry-After` header."""


class Admission:
    """Counts running and waiting requests; does not know the engine.

    A prompt of any length is admitted while no other prompt waits.
    """

    def __init__(self, max_requests: int, max_queued_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_queued_tokens = max_queued_tokens
        self._mean_s = 0.0  # of answers so far, the last ones most
        self.num_running = self.num_waiting = self.num_waiting_tokens = 0
        self.num_entered = self.num_refused = 0
        self.is_draining = False

    def enter(self) -> QueuePlace:
        """Admit a request. Raise Draining or QueueFull."""
        if self.is_draining:
            raise Draining
        num_there = self.num_running + self.num_waiting
        if num_there >= self._max_requests:
            self._refuse(f"{num_there} requests are running or waiting, the most there may be")
        self.num_entered += 1
        return QueuePlace(self)

    def check_tokens(self, num_tokens: int) -> None:
        """Raise QueueFull if `num_tokens` more would exceed the waiting tokens' limit."""
        num_there = self.num_waiting_tokens
        if num_there and num_there + num_tokens > self._max_queued_tokens:
            self._refuse(
                f"prompts of {num_there} tokens are waiting, and with {num_tokens} more they are "
                f"above {self._max_queued_tokens}"
            )

    def note_duration(self, seconds: float) -> None:
        """Record how long a finished answer took; `Retry-After` is the mean of recent answers."""
        self._mean_s = seconds if not self._mean_s else 0.8 * self._mean_s + 0.2 * seconds

    def _refuse(self, reason: str) -> None:
        self.num_refused += 1
        low, high = _RETRY_S
        retry_s = round(min(max(low, self._mean_s), high))
        raise QueueFull(f"The server is busy: {reason}. Ask again in {retry_s} s.", retry_s)


class QueuePlace:
    """One request's place in the queue: waiting until `begin`, freed at the end of `with`."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._num_tokens = 0
        self._has_begun = False
        self._start_s = time.monotonic()

    def __enter__(self) -> Self:
        self._admission.num_waiting += 1
        return self

    def wait_with(self, num_tokens: int) -> None:
        """Count the prompt's tokens as waiting. Raise QueueFull."""
        self._admission.check_tokens(num_tokens)
        self._num_tokens = num_tokens
        self._admission.num_waiting_tokens += num_tokens

    def begin(self) -> None:
        """Count the request as running: the engine has started it."""
        if not self._has_begun:
            self._has_begun = True
            self._admission.num_waiting -= 1
            self._admission.num_waiting_tokens -= self._num_tokens
            self._admission.num_running += 1

    def __exit__(self, error: object, *_: object) -> None:
        self.begin()
        self._admission.num_running -= 1
        if error is None:
            self._admission.note_duration(time.monotonic() - self._start_s)
