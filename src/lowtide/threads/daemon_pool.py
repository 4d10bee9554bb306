"""Threads for work that may never end, such as reads from a drive that does not answer."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from time import monotonic

from lowtide.errors import StorageError


class DaemonPool:
    """Pool of daemon threads, which do not keep the process alive."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads, self._name = num_threads, name
        self._threads: list[threading.Thread] = []
        self._work: Works = queue.SimpleQueue()
        self._unfinished: set[Future[int]] = set()
        self._gate = threading.Lock()
        self._is_closed = False
        weakref.finalize(self, _end_threads, self._work, num_threads).atexit = False

    def submit(self, work: Callable[[], int]) -> Future[int]:
        """Queue work for a thread, in order of submission.

        Raises StorageError if the pool is closed or the system refuses a thread.
        """
        answer: Future[int] = Future()
        with self._gate:
            if self._is_closed:
                raise StorageError("No read can start on a closed reader.")
            if len(self._threads) < self._num_threads:
                self._begin_thread()
            self._unfinished.add(answer)
            answer.add_done_callback(self._unfinished.discard)
            self._work.put(lambda: _answer(answer, work))
        return answer

    def drain(self, limit_s: float) -> bool:
        """Wait for all work submitted so far; return False if some exceeds `limit_s`."""
        with self._gate:
            unfinished = list(self._unfinished)
        return not wait(unfinished, limit_s).not_done

    def close(self, limit_s: float) -> bool:
        """Cancel pending work and end the threads.

        Returns False if running work exceeds `limit_s`; it continues to use its resources.
        """
        end_s = monotonic() + limit_s
        with self._gate:
            self._is_closed = True
            unfinished = list(self._unfinished)
        for answer in unfinished:
            answer.cancel()
        _end_threads(self._work, self._num_threads)
        for thread in self._threads:
            thread.join(max(0.0, end_s - monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _begin_thread(self) -> None:
        number = len(self._threads)
        thread = threading.Thread(
            target=_serve, args=(self._work,), name=f"{self._name}_{number}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            told = f"The system gives no thread that reads: {error}"
            raise StorageError(
                f"{told}. Raise the limit (ulimit -u, or the container's)."
            ) from error
        self._threads.append(thread)


Works = queue.SimpleQueue[Callable[[], None] | None]
"""Work items in order; None ends one thread."""


def _serve(works: Works) -> None:
    while (work := works.get()) is not None:
        work()
        del work  # release what it refers to


def _end_threads(works: Works, num_threads: int) -> None:
    for _ in range(num_threads):
        works.put(None)


def _answer(answer: Future[int], work: Callable[[], int]) -> None:
    if not answer.set_running_or_notify_cancel():
        return
    try:
        found = work()
    except BaseException as error:
        answer.set_exception(error)
    else:
        answer.set_result(found)
