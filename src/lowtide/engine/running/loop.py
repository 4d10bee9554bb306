"""One thread that runs a loaded model for all callers.

Requests, cancellations and work items reach it through a mailbox, read between two passes. Events
leave through one queue per caller.

So a slow reader delays no other, an exception in one caller's thread ends nothing of another's, and
state that belongs to a thread (torch's number of threads, inference mode, CUDA's current device) is
always on the same thread.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from lowtide.decode.request import Event, Request
from lowtide.engine.running.engine import Engine
from lowtide.engine.running.watching import Look, watched
from lowtide.engine.running.worker import (
    Answers,
    Delivery,
    Mailbox,
    Passes,
    Post,
    Worker,
    WorkItem,
)
from lowtide.errors import InternalError, UsageError
from lowtide.plan import predicted
from lowtide.threads.event import INTERRUPT_POLL_S

T = TypeVar("T")


class EngineLoop:
    """Owns a loaded model and the thread that runs it; knows nothing of prompts and text.

    All methods may be called from any thread at the same time. The first request starts the thread,
    `lowtide-engine`; it ends at `close`, with the last reference to this object, or at exit.
    """

    def __init__(self, engine: Engine) -> None:
        self._worker = Worker(engine)
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        # The thread keeps its worker alive, and the worker must not keep this object.
        weakref.finalize(self, self._worker.mailbox.put, Worker.stop).atexit = False

    @property
    def engine(self) -> Engine:
        """The model in its present state; only the loop may run passes on it."""
        return self._worker.engine

    @property
    def is_closed(self) -> bool:
        """True once the loop is closed or its thread has ended."""
        return self._worker.is_closed

    def stats(self) -> dict[str, float]:
        """Return counters since loading, and measured and predicted speed."""
        speed = self._worker.speed
        return self.look(
            lambda engine: {**engine.as_dict(), **speed.as_dict(), **predicted(engine.plan)}
        )

    def watched(self) -> AbstractContextManager[Callable[[], Look]]:
        """Yield a function that looks at the engine as it runs, without waiting for a pass."""
        return watched(self._worker)

    def answers(self, requests: Sequence[Request]) -> Generator[Event, None, None]:
        """Yield the events of `requests`, which begin together, until all have finished.

        They are queued at the first `next`. Closing the generator cancels unfinished requests. An
        error of a pass is raised here if one of `requests` took part in it.
        """
        answers = QueuedAnswers(requests)
        try:
            self.ask(answers)
            yield from answers.events()
        finally:
            if not answers.is_over:
                self.drop(answers)

    def run(self, work: Callable[[Engine], T]) -> T:
        """Run `work` between two passes, on the loop's thread; return or raise its result."""
        return self.run_passes(partial(_at_once, work), 0)

    def run_passes(self, work: Passes[T], num_tokens: int) -> T:
        """Run work with passes of its own, which yields where other passes may run.

        It begins once the KV cache has `num_tokens` free; later requests wait for it. If the caller
        is interrupted, it is closed at a `yield`.
        """
        return self._result(WorkItem(work, num_tokens))

    def replace(self, change: Callable[[Engine], Engine]) -> None:
        """Replace the engine by `change(engine)`, from the next pass on."""
        self.run(lambda engine: self._worker.adopt(change(engine)))

    def look(self, work: Callable[[Engine], T]) -> T:
        """Run `work` as `run` does, but also on a closed loop and within an observer's call."""
        self._check_process()
        worker = self._worker
        if self._is_own_thread:
            return work(worker.engine)
        with worker.gate:  # no thread can be made meanwhile
            if self._thread is None:
                return work(worker.engine)
        if worker.is_closed:
            _join(self._thread)
            return work(worker.engine)
        return self._result(WorkItem(partial(_at_once, work), 0, is_look=True))

    def close(self) -> None:
        """End the pass in progress, all requests and the thread; then close the engine.

        Callers that wait for an answer get a UsageError. Does not wait if called by an observer.
        """
        if os.getpid() != self._process:
            return
        worker = self._worker
        with worker.gate:
            worker.is_closed = True
            if self._thread is None:
                worker.end()
                return
            worker.engine.stop_waiting()
            worker.mailbox.put(Worker.stop)
        if not self._is_own_thread:
            _join(self._thread)

    def ask(self, queued: Answers | WorkItem[T]) -> None:
        """Queue requests or work; the caller waits for the result. Raise UsageError if closed."""
        self._check_process()
        if self._is_own_thread:
            raise UsageError(
                "An observer is called during a pass, so it cannot ask for another one."
            )
        with self._worker.gate:
            if self._worker.is_closed:
                raise self._worker.end_error()
            if self._thread is None:
                self._begin_thread()
            self._worker.mailbox.put(partial(Worker.accept, queued=queued))

    def expect(self, num_requests: int) -> None:
        """Have passes wait briefly for requests that are about to be queued.

        They wait only where these would add much to a pass. A negative number: as many of the
        expected requests will not come.
        """
        self._worker.mailbox.put(partial(Worker.expect, num_requests=num_requests))

    def drop(self, queued: Answers | WorkItem[Any]) -> None:
        """Cancel requests or work, queued or running."""
        self._worker.mailbox.put(partial(Worker.drop, queued=queued))

    def _result(self, item: WorkItem[T]) -> T:
        """Queue work and wait for its result."""
        try:
            self.ask(item)
            return item.result()
        finally:
            if not item.outcome.done():
                self.drop(item)

    @property
    def _is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def _begin_thread(self) -> None:
        worker = self._worker
        self._thread = threading.Thread(target=worker.serve, name="lowtide-engine", daemon=True)
        # A daemon thread within a product would crash the interpreter's exit.
        weakref.finalize(worker, _end_at_exit, worker.mailbox, self._thread)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._thread = None
            raise InternalError(f"The system gives the engine no thread: {error}.") from error

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise UsageError(
                f"This model was loaded by process {self._process}, and its threads are not in "
                f"process {os.getpid()}, a fork of it: load it there, or start that process again."
            )


class QueuedAnswers(Answers):
    """Events of some requests, awaited by the thread that made them."""

    def __init__(self, requests: Sequence[Request]) -> None:
        super().__init__(requests)
        self.deliveries: SimpleQueue[Delivery] = SimpleQueue()

    @property
    def post(self) -> Post:
        return _to_queues

    def events(self) -> Iterator[Event]:
        """Yield events in order; raise the error passed to `fail`."""
        while not self.is_over:
            yield from self._read(self._next_delivery())

    def _next_delivery(self) -> Delivery:
        while True:
            with suppress(Empty):
                return self.deliveries.get(timeout=INTERRUPT_POLL_S)


def _to_queues(deliveries: Sequence[tuple[QueuedAnswers, Delivery]]) -> None:
    for answers, each in deliveries:
        answers.deliveries.put(each)


def _end_at_exit(mailbox: Mailbox, thread: threading.Thread) -> None:
    if thread.is_alive() and thread is not threading.current_thread():
        mailbox.put(Worker.stop)
        _join(thread)


def _join(thread: threading.Thread) -> None:
    while thread.is_alive():
        thread.join(INTERRUPT_POLL_S)


def _at_once(work: Callable[[Engine], T], engine: Engine) -> Generator[None, None, T]:
    yield from ()
    return work(engine)
