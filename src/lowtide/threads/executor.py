"""Compute threads of the host, which run whole experts or large pieces of a layer in parallel.

A step's products are small. Splitting each over all cores would need a barrier per product, and a
core used by another program would delay every one of them; here threads take the next piece when
they are free and meet once per layer (measured in docs/log). Results do not depend on the number of
threads.

They may depend on the torch threads of a single product: on an AMD Zen 5, float32 products of 5 to
  7 rows have other bits with two threads than with one, on other machines larger products do. Each
product therefore has a fixed count: an expert's products `cores_per_expert`, all others
  `CORES_PER_PIECE`.
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
"""Longest time for running work to end after a failure."""

CORES_PER_PIECE = 1
"""Torch threads of everything but experts, on any thread.

A layer is divided among threads instead, at features and heads where that changes no bit; idle
OpenMP threads would spin on the cores of experts (docs/log).
"""

_IMPORTED_BY = os.getpid()

MAX_THREADS = 64
"""Most threads of a model without experts, which divides all products among its cores.

Their pieces are at least 64 features wide.
"""

Work = Callable[[], None]


class HostExecutor:
    """Owns the compute threads; does not know what they compute."""

    def __init__(
        self,
        num_experts_per_token: int,
        num_cores: int | None = None,
        cores_per_expert: int | None = None,
    ) -> None:
        """Start a thread per expert of a token; further cores serve each expert's products.

        If there are more cores than threads, each thread is pinned to its own cores, unless
        `num_cores` is given.

        num_cores: cores to use, by default all that this process may use.
        cores_per_expert: torch threads of an expert's products, by default the cores of a thread.
        """
        division = _Division.of(num_experts_per_token, num_cores)
        self.num_cores, self.num_threads = division.num_cores, division.num_threads
        self.cores_per_expert = cores_per_expert or division.cores_per_expert
        shares = deque(division.shares)

        def begin() -> None:
            """Pin a new thread to its share of the cores."""
            with suppress(IndexError, OSError):  # no shares, or CPUs no longer available
                os.sched_setaffinity(0, shares.popleft())  # also of threads that it makes
            set_cores_per_product(CORES_PER_PIECE)

        with process_threads_kept():
            self._pool = ThreadPoolExecutor(self.num_threads, "lowtide-compute", begin)
            _make_threads(self._pool, self.num_threads)

    @staticmethod
    def count_threads(num_experts_per_token: int) -> int:
        """Return the number of threads for this number of experts per token."""
        return _Division.of(num_experts_per_token).num_threads

    @classmethod
    def of_threads(cls, num_threads: int, num_experts_per_token: int) -> HostExecutor:
        """Make an executor of that many threads.

        Each expert's products use as many cores as by default, which gives the same bits.
        """
        cores_per_expert = _Division.of(num_experts_per_token).cores_per_expert
        return cls(num_experts_per_token, num_threads, cores_per_expert)

    def submit(self, work: Work) -> Future[None]:
        """Start the work of one or several experts; the future raises its exception."""
        return self._pool.submit(_compute, work, self.cores_per_expert)

    def run(self, works: Sequence[Work]) -> None:
        """Run independent pieces of a layer, one on the calling thread, and wait for all."""
        futures = [self._pool.submit(_compute, work, CORES_PER_PIECE) for work in works[1:]]
        try:
            works[0]()
        finally:
            errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error

    def drain(self) -> None:
        """Wait for all submitted work, including work without a kept future."""
        drain(self._pool, self.num_threads)

    @contextmanager
    def in_charge(self) -> Iterator[None]:
        """Keep the calling thread's own operators single-threaded within the context."""
        with process_threads_kept():
            set_cores_per_product(CORES_PER_PIECE)
            yield

    def take_charge(self) -> None:
        """Keep the calling thread's own operators single-threaded from now on."""
        num_threads = torch.get_num_threads()
        set_cores_per_product(CORES_PER_PIECE)
        # This also set the default for later threads; another thread restores it.
        other = threading.Thread(target=set_cores_per_product, args=(num_threads,))
        other.start()
        other.join()

    def close(self) -> None:
        """Wait for running work and end the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class _Division(NamedTuple):
    """Division of cores among compute threads."""

    num_cores: int
    num_threads: int
    shares: list[frozenset[int]]  # see `core_shares`

    @classmethod
    def of(cls, num_experts_per_token: int, num_cores: int | None = None) -> _Division:
        """Divide `num_cores` unpinned cores, or all that this process may use."""
        usable = os.sched_getaffinity(0)
        num_usable = num_cores or len(usable)
        num_threads = max(1, min(num_usable, num_experts_per_token))
        shares = [] if num_cores else core_shares(num_threads, usable)
        return cls(num_usable, num_threads, shares)

    @property
    def cores_per_expert(self) -> int:
        """Cores per expert, equal for all threads, so that any of them can take any expert."""
        return min([self.num_cores // self.num_threads, *map(len, self.shares)])


def core_shares(
    num_threads: int, usable: Iterable[int], folder: Path = CPU_FOLDER
) -> list[frozenset[int]]:
    """Divide CPUs among threads so that no core is in two shares.

    usable: Linux CPU numbers, several per core with hyper-threads.
    folder: Linux's description of them.

    Empty if there are no more cores than threads: the scheduler must then be free to move threads.
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
    """Executor that runs work at once on the calling thread, for passes that are only counted.

    num_threads: the number of threads it stands for.
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
    """Make a pool start all of its threads. Raises PlanError if the system refuses one."""
    # A pool makes a thread only while the others are busy: all are held until all exist.
    all_exist = Barrier(num_threads)
    try:
        for future in [pool.submit(all_exist.wait) for _ in range(num_threads)]:
            future.result()
    except BaseException as error:
        all_exist.abort()  # otherwise the started threads, and the program, would wait for ever
        pool.shutdown(wait=False)
        if not isinstance(error, RuntimeError):
            raise
        raise PlanError(
            f"The system refuses one of {num_threads} threads that compute: {error}. Raise the "
            "limit (ulimit -u, ulimit -v, or the container's), or give fewer cores (taskset)."
        ) from error


def drain(pool: ThreadPoolExecutor, num_threads: int, limit_s: float = DRAIN_LIMIT_S) -> None:
    """Wait until a pool of `num_threads` has finished all submitted work.

    All threads meet at one barrier, so no list of work is needed. Raises InternalError after
    `limit_s`.
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
    """Restore the process's default thread count, which setting one thread's count changes."""
    num_threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def set_cores_per_product(num_cores: int) -> None:
    """Set the torch threads of the calling thread's products.

    This also sets the default of the process: see `process_threads_kept`.
    """
    torch.set_num_threads(num_cores)


def spare_forked_threads() -> None:
    """Use single-threaded operators in a fork of a process that has computed.

    OpenMP would wait for ever for threads that the fork does not have.
    """
    if os.getpid() != _IMPORTED_BY:
        set_cores_per_product(CORES_PER_PIECE)


def _compute(work: Work, num_cores: int) -> None:
    if torch.get_num_threads() != num_cores:
        set_cores_per_product(num_cores)
    with torch.inference_mode():  # a setting of the thread
        work()
