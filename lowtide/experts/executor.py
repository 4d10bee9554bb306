"""Compute threads of the host: whole experts, or large pieces of a layer, side by side.

A step's products are small. Splitting each over all cores would mean a barrier per product, and
one core that somebody else is using would hold up every one of them; here threads take the next
piece as they become free and meet once per layer (docs/log.md has the measurement). Results do
not depend on the number of threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import Barrier
from typing import Protocol

import torch

from lowtide.errors import InternalError

DRAIN_LIMIT_S = 60.0
"""After a failure, what is under way may take this long to end."""

Work = Callable[[], None]


class Executor(Protocol):
    """Runs pieces of work that share nothing."""

    num_threads: int

    def submit(self, work: Work) -> Future[None]:
        """Starts `work`; the answer raises what it raised."""
        ...

    def run(self, works: Sequence[Work]) -> None:
        """Runs all of `works` and waits for them; one of them on the calling thread."""
        ...

    def drain(self) -> None:
        """Waits until all that was submitted has ended, whoever has its answers."""
        ...


class HostExecutor:
    """Owns the compute threads; does not know what they compute."""

    def __init__(self, num_experts_per_token: int, num_cores: int | None = None) -> None:
        """As many threads as one token's experts keep busy; more cores go into each product.

        `num_cores`: what to use of the machine, by default all that this process may use.
        """
        num_cores = num_cores or len(os.sched_getaffinity(0))
        self.num_threads = max(1, min(num_cores, num_experts_per_token))
        cores_per_thread = max(1, num_cores // self.num_threads)
        with process_threads_kept():
            self._pool = ThreadPoolExecutor(
                self.num_threads, "lowtide-compute", torch.set_num_threads, (cores_per_thread,)
            )
            # A pool makes a thread only while the others are busy: all are held until all exist.
            all_exist = threading.Barrier(self.num_threads)
            for future in [self._pool.submit(all_exist.wait) for _ in range(self.num_threads)]:
                future.result()

    def submit(self, work: Work) -> Future[None]:
        return self._pool.submit(_without_gradients, work)

    def run(self, works: Sequence[Work]) -> None:
        futures = [self.submit(work) for work in works[1:]]
        try:
            works[0]()
        finally:
            errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error

    def drain(self) -> None:
        drain(self._pool, self.num_threads)

    @contextmanager
    def in_charge(self) -> Iterator[None]:
        """Meanwhile the calling thread's own operators stay on that thread."""
        with process_threads_kept():
            torch.set_num_threads(1)
            yield

    def close(self) -> None:
        """Waits for the work under way and ends the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class InlineExecutor:
    """Runs everything at once on the calling thread: for passes that are only counted."""

    num_threads = 1

    def submit(self, work: Work) -> Future[None]:
        future: Future[None] = Future()
        work()
        future.set_result(None)
        return future

    def run(self, works: Sequence[Work]) -> None:
        for work in works:
            work()

    def drain(self) -> None:
        pass


def drain(pool: ThreadPoolExecutor, num_threads: int, limit_s: float = DRAIN_LIMIT_S) -> None:
    """Waits until a pool of `num_threads` has ended all that was submitted to it.

    Needs no list of what that was: once all threads stand at one barrier, none is at work.
    Raises InternalError after `limit_s`.
    """
    barrier = Barrier(num_threads)
    try:
        pending = wait([pool.submit(barrier.wait) for _ in range(num_threads)], limit_s).not_done
    except BaseException:
        barrier.abort()
        raise
    if pending:
        barrier.abort()
        raise InternalError(
            f"A thread has not ended its work within {limit_s:g} s; close the model, and look for "
            "a disk or network drive that does not answer."
        )


@contextmanager
def process_threads_kept() -> Iterator[None]:
    """Setting one thread's count also sets the default of the process: put it back."""
    num_threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _without_gradients(work: Work) -> None:
    with torch.inference_mode():  # a setting of the thread
        work()
