"""Compute threads of the host: whole experts, or large pieces of a layer, side by side.

A step's products are small. Splitting each over all cores would mean a barrier per product, and
one core that another program is using would hold up every one of them; here threads take the next
piece as they become free and meet once per layer (docs/log has the measurement). Results do
not depend on the number of threads.

They may depend on how many torch threads one product has: on an AMD Zen 5 float32 products of 5 to
7 rows have other bits with two than with one, on other machines larger products do. So a product
has one and the same count wherever it runs, and this file says which: an expert's products
`cores_per_expert`, all others `CORES_PER_PIECE`.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Barrier
from typing import NamedTuple

import torch

from lowtide.errors import InternalError, PlanError
from lowtide.threads.cores import CPU_FOLDER, by_core

DRAIN_LIMIT_S = 60.0
"""After a failure, what is under way may take this long to end."""

CORES_PER_PIECE = 1
"""torch threads of everything but experts, on the calling thread and on others: a layer is divided
among threads instead, at features and heads where that changes no bit, and idle OpenMP threads
would spin on the cores that the experts want (docs/log)."""

_IMPORTED_BY = os.getpid()

MAX_THREADS = 64
"""Most threads of a model without experts, which divides all products among as many as there are
cores. Their pieces are at least 64 features wide."""

Work = Callable[[], None]


class HostExecutor:
    """Owns the compute threads; does not know what they compute."""

    def __init__(
        self,
        num_experts_per_token: int,
        num_cores: int | None = None,
        cores_per_expert: int | None = None,
    ) -> None:
        """As many threads as one token's experts keep busy; more cores go into each expert's
        products (torch's, or the compiled operators', which have threads of their own).

        num_cores: what to use of the machine, by default all that this process may use. Then, and
        where there are more cores than threads, every thread keeps to cores of its own.
        cores_per_expert: torch threads of an expert's products, by default the cores of a thread.
        """
        division = _Division.of(num_experts_per_token, num_cores)
        self.num_cores, self.num_threads = division.num_cores, division.num_threads
        self.cores_per_expert = cores_per_expert or division.cores_per_expert
        shares = deque(division.shares)

        def begin() -> None:
            """What each thread does first: it takes its share of the cores."""
            with suppress(IndexError, OSError):  # no shares, or CPUs that were taken away meanwhile
                os.sched_setaffinity(0, shares.popleft())  # also of threads that it makes
            set_cores_per_product(CORES_PER_PIECE)

        with process_threads_kept():
            self._pool = ThreadPoolExecutor(self.num_threads, "lowtide-compute", begin)
            _make_threads(self._pool, self.num_threads)

    @staticmethod
    def count_threads(num_experts_per_token: int) -> int:
        """How many it would have."""
        return _Division.of(num_experts_per_token).num_threads

    @classmethod
    def beside_emulated(cls, num_experts_per_token: int) -> HostExecutor:
        """One thread, as an emulated device has, and each expert's products on as many cores as
        without that device: so they have the same bits.
        """
        return cls(num_experts_per_token, 1, _Division.of(num_experts_per_token).cores_per_expert)

    def submit(self, work: Work) -> Future[None]:
        """Starts `work`, an expert's or several experts'; the answer raises what it raised."""
        return self._pool.submit(_compute, work, self.cores_per_expert)

    def run(self, works: Sequence[Work]) -> None:
        """Runs all of `works`, pieces of a layer that share nothing, and waits for them; one of
        them on the calling thread.
        """
        futures = [self._pool.submit(_compute, work, CORES_PER_PIECE) for work in works[1:]]
        try:
            works[0]()
        finally:
            errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error

    def drain(self) -> None:
        """Waits for all submitted work, whether its future was kept or not."""
        drain(self._pool, self.num_threads)

    @contextmanager
    def in_charge(self) -> Iterator[None]:
        """Meanwhile the calling thread's own operators stay on that thread."""
        with process_threads_kept():
            set_cores_per_product(CORES_PER_PIECE)
            yield

    def take_charge(self) -> None:
        """The calling thread's own operators stay on that thread from now on."""
        num_threads = torch.get_num_threads()
        set_cores_per_product(CORES_PER_PIECE)
        # That was also the default of threads to come: another thread puts it back.
        other = threading.Thread(target=set_cores_per_product, args=(num_threads,))
        other.start()
        other.join()

    def close(self) -> None:
        """Waits for the work under way and ends the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class _Division(NamedTuple):
    """Cores divided among compute threads."""

    num_cores: int
    num_threads: int
    shares: list[frozenset[int]]  # see `core_shares`

    @classmethod
    def of(cls, num_experts_per_token: int, num_cores: int | None = None) -> _Division:
        """The division of `num_cores` that are not pinned, or of all that this process may use."""
        usable = os.sched_getaffinity(0)
        num_usable = num_cores or len(usable)
        num_threads = max(1, min(num_usable, num_experts_per_token))
        shares = [] if num_cores else core_shares(num_threads, usable)
        return cls(num_usable, num_threads, shares)

    @property
    def cores_per_expert(self) -> int:
        """The same for all threads, so that it does not matter which of them takes an expert."""
        return min([self.num_cores // self.num_threads, *map(len, self.shares)])


def core_shares(
    num_threads: int, usable: Iterable[int], folder: Path = CPU_FOLDER
) -> list[frozenset[int]]:
    """The CPUs that each of `num_threads` threads should keep to, no core in two shares.

    usable: CPUs by Linux's numbers, several to a core that has hyper-threads. folder: where Linux
    describes them. Empty where there are no more cores than threads: the scheduler then has to
    move threads out of other programs' way.
    """
    cores = by_core(usable, folder)
    if len(cores) <= num_threads:
        return []
    size = len(cores) // num_threads
    return [
        frozenset().union(*cores[start : start + size])
        for start in range(0, num_threads * size, size)
    ]


class InlineExecutor:
    """Runs everything at once on the calling thread: for passes that are only counted.

    num_threads: those that it stands for.
    """

    num_cores = 1

    def __init__(self, num_threads: int = 1) -> None:
        self.num_threads = num_threads

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


Executor = HostExecutor | InlineExecutor


def _make_threads(pool: ThreadPoolExecutor, num_threads: int) -> None:
    """Has a pool make all of its threads. Raises PlanError where the system refuses one."""
    # A pool makes a thread only while the others are busy: all are held until all exist.
    all_exist = Barrier(num_threads)
    try:
        for future in [pool.submit(all_exist.wait) for _ in range(num_threads)]:
            future.result()
    except BaseException as error:
        all_exist.abort()  # else those that there are would wait for ever, and the program for them
        pool.shutdown(wait=False)
        if not isinstance(error, RuntimeError):
            raise
        raise PlanError(
            f"The system refuses one of {num_threads} threads that compute: {error}. Raise the "
            "limit (ulimit -u, ulimit -v, or the container's), or give fewer cores (taskset)."
        ) from error


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


def set_cores_per_product(num_cores: int) -> None:
    """Says how many torch threads the calling thread's products have from now on.

    Sets the default of the process, too: see `process_threads_kept`.
    """
    torch.set_num_threads(num_cores)


def spare_forked_threads() -> None:
    """In a fork of a process that has computed, OpenMP waits for ever for threads that stayed
    behind: the calling thread's operators stay on that thread, as do those of threads made later.
    """
    if os.getpid() != _IMPORTED_BY:
        set_cores_per_product(CORES_PER_PIECE)


def _compute(work: Work, num_cores: int) -> None:
    if torch.get_num_threads() != num_cores:
        set_cores_per_product(num_cores)
    with torch.inference_mode():  # a setting of the thread
        work()
