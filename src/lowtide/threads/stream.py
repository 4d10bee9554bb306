"""A stream of work on its own thread: queued work ends in order, possibly by failing.

Streams wait for each other's events without involving the thread that queued the work. A failure
affects the work itself and work waiting for it, and is remembered until the stream is drained; the
stream continues.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

import torch

from lowtide.errors import DeviceError
from lowtide.threads.event import WAIT_LIMIT_S, Event
from lowtide.threads.executor import process_threads_kept, set_cores_per_product

ThreadWork = Callable[[float], None]
"""Work, given the time (`perf_counter`) at which it could start."""


class ThreadEvent:
    """The end of one work item of a stream."""

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self.end_s = 0.0  # by `perf_counter`, once it is done
        self._has_ended = threading.Event()
        self._error: BaseException | None = None

    def is_done(self) -> bool:
        """Return True if the work has ended, failed or not."""
        return self._has_ended.is_set()

    def wait(self, limit_s: float = WAIT_LIMIT_S) -> None:
        """Wait. Raises DeviceError after `limit_s`, or if the work failed."""
        if not self._has_ended.wait(limit_s):
            raise DeviceError(_stalled(self._stream, limit_s))
        if self._error is not None:
            raise DeviceError(f"Work on {self._stream} failed: {self._error}") from self._error

    def end(self, error: BaseException | None) -> None:
        """Mark the work as ended and wake all waiters; called once, by the stream."""
        self._error = error
        self.end_s = perf_counter()
        self._has_ended.set()


class _Task(NamedTuple):
    work: ThreadWork
    after: Event | None
    queued_s: float
    event: ThreadEvent

    def run(self) -> None:
        ready_s = self.queued_s
        if self.after is not None:
            self.after.wait()
            ended_s = self.after.end_s if isinstance(self.after, ThreadEvent) else perf_counter()
            ready_s = max(ready_s, ended_s)
        self.work(ready_s)


class ThreadStream:
    """Owner of one thread; does not know what its work is about."""

    def __init__(self, name: str, num_cores: int = 1) -> None:
        """num_cores: torch threads of each of its products."""
        self.name = name
        self._num_cores = num_cores
        self._change = threading.Condition()
        self._tasks: deque[_Task] = deque()  # the first one is under way
        self._is_open = True
        self._failed: ThreadEvent | None = None  # the first one since a drain
        is_set_up = threading.Event()
        self._thread = threading.Thread(
            target=self._serve, args=(is_set_up,), name=name, daemon=True
        )
        with process_threads_kept():
            self._thread.start()
            is_set_up.wait()

    def queue(self, work: ThreadWork, after: Event | None = None) -> ThreadEvent:
        """Queue work that starts after all earlier work and `after`.

        It fails if `after` does. Raises DeviceError if the stream has ended.
        """
        event = ThreadEvent(self.name)
        with self._change:
            if not self._is_open:
                raise DeviceError(_ended(self.name))
            self._tasks.append(_Task(work, after, perf_counter(), event))
            self._change.notify_all()
        return event

    def check(self) -> None:
        """Raise DeviceError if any work has failed since the last `drain`."""
        if self._failed is not None:
            self._failed.wait()

    def drain(self, limit_s: float = WAIT_LIMIT_S) -> None:
        """Wait until all queued work has ended, failed or not, and forget failures.

        Raises DeviceError after `limit_s`.
        """
        with self._change:
            self._change.notify_all()  # Ctrl-C may have come between queueing and notifying
            if not self._change.wait_for(lambda: not self._tasks, limit_s):
                raise DeviceError(_stalled(self.name, limit_s))
            self._failed = None

    def stop(self) -> None:
        """Start no more work; queued work fails once the current one has ended."""
        with self._change:
            self._is_open = False
            self._change.notify_all()

    def join(self, limit_s: float = WAIT_LIMIT_S) -> None:
        """Wait for the thread after `stop`. Raises DeviceError."""
        self._thread.join(limit_s)
        if self._thread.is_alive():
            raise DeviceError(_stalled(self.name, limit_s))

    def _serve(self, is_set_up: threading.Event) -> None:
        set_cores_per_product(self._num_cores)  # a setting of the thread, as is the mode
        is_set_up.set()
        try:
            with torch.inference_mode():
                while (task := self._next()) is not None:
                    self._end(task, _outcome(task))
                    del task  # with what it refers to
        finally:
            self._fail_all()

    def _next(self) -> _Task | None:
        """Wait for a task; None if the stream was stopped."""
        with self._change:
            self._change.wait_for(lambda: self._tasks or not self._is_open)
            return self._tasks[0] if self._is_open else None

    def _end(self, task: _Task, error: Exception | None) -> None:
        with self._change:
            task.event.end(error)
            if error is not None and self._failed is None:
                self._failed = task.event
            self._tasks.popleft()
            self._change.notify_all()

    def _fail_all(self) -> None:
        """Fail all queued work when the thread ends, so that no caller waits for it."""
        with self._change:
            self._is_open = False
            for task in self._tasks:
                task.event.end(DeviceError(_ended(self.name)))
            self._tasks.clear()
            self._change.notify_all()


def _outcome(task: _Task) -> Exception | None:
    try:
        task.run()
    except Exception as error:  # the thread that waits for the event raises it
        return error
    return None


def _stalled(stream: str, limit_s: float) -> str:
    return (
        f"{stream} has not ended its work within {limit_s:g} s. Close the model and load it again; "
        "on an emulated device, a higher link_GBps shortens copies."
    )


def _ended(stream: str) -> str:
    return (
        f"The thread of {stream} has ended, its device was closed or broke; load the model again."
    )
