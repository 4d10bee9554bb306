"""One thread that runs a loaded model for all callers.

Requests, cancellations and jobs reach it through a mailbox that it reads between two passes;
events leave through a queue for each who asked. So a slow reader delays no other, an
exception in one thread ends nothing of another's, and what belongs to a thread (torch's number of
threads, its inference mode, CUDA's current device) is always the same thread's.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from lowtide.decode.request import Event, Request
from lowtide.engine.running.engine import Engine
from lowtide.engine.running.worker import Answers, Job, Mailbox, News, Passes, Worker
from lowtide.errors import InternalError, UsageError
from lowtide.plan import predicted
from lowtide.threads.event import INTERRUPT_POLL_S

T = TypeVar("T")


class EngineLoop:
    """Owns a loaded model and the thread that runs it; knows nothing of prompts and text.

    Its methods are for any thread, all at once. The thread is made by the first request, is named
    `lowtide-engine`, and ends at `close`, with the last reference to this object, or at exit.
    """

    def __init__(self, engine: Engine) -> None:
        self._worker = Worker(engine)
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        # The thread keeps its worker alive, and the worker must not keep this object.
        weakref.finalize(self, self._worker.mailbox.put, Worker.stop).atexit = False

    @property
    def engine(self) -> Engine:
        """The model in its present state; what belongs to passes is the loop's to touch."""
        return self._worker.engine

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be asked any more: it was closed, or its thread has ended."""
        return self._worker.is_closed

    def stats(self) -> dict[str, float]:
        """What was done since loading, how fast, and how fast it was to be."""
        speed = self._worker.speed
        return self.look(
            lambda engine: {**engine.as_dict(), **speed.as_dict(), **predicted(engine.plan)}
        )

    def answers(self, requests: Sequence[Request]) -> Generator[Event, None, None]:
        """Events of `requests`, which begin together, until all have finished.

        Asked at the first `next`. Dropping the generator ends what has not finished, as does an
        error of a pass: it is raised here if one of `requests` took part.
        """
        answers = QueuedAnswers(requests)
        try:
            self.ask(answers)
            yield from answers.events()
        finally:
            if not answers.is_over:
                self.drop(answers)

    def run(self, work: Callable[[Engine], T]) -> T:
        """Does `work` between two passes, on the loop's thread; its answer or its error."""
        return self.run_passes(partial(_at_once, work), 0)

    def run_passes(self, work: Passes[T], num_tokens: int) -> T:
        """As `run`, for work with passes of its own: it yields wherever others may have one.

        It begins when the KV cache has `num_tokens` free; requests that are asked later wait until
        then. It is closed at a `yield` if the caller is interrupted.
        """
        job = Job(work, num_tokens)
        try:
            self.ask(job)
            return job.result()
        finally:
            if not job.outcome.done():
                self.drop(job)

    def replace(self, change: Callable[[Engine], Engine]) -> None:
        """Goes on with what `change` makes of the engine, from the next pass on."""
        self.run(lambda engine: self._worker.adopt(change(engine)))

    def look(self, work: Callable[[Engine], T]) -> T:
        """As `run`, also of a loop that is closed, and from the midst of a pass (an observer)."""
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
        return self.run(work)

    def close(self) -> None:
        """Ends the pass under way, all requests and the thread; then the engine is closed.

        Who waits for an answer gets a UsageError. Called by an observer it does not wait.
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

    def ask(self, asked: Answers | Job[T]) -> None:
        """Has something done; who asks waits for it itself. Raises UsageError where it cannot."""
        self._check_process()
        if self._is_own_thread:
            raise UsageError("An observer is called in the midst of a pass: it cannot ask for one.")
        with self._worker.gate:
            if self._worker.is_closed:
                raise self._worker.end_error()
            if self._thread is None:
                self._begin_thread()
            self._worker.mailbox.put(partial(Worker.accept, asked=asked))

    def drop(self, asked: Answers | Job[Any]) -> None:
        """Ends what was asked, wherever it is: nothing waits for it any more."""
        self._worker.mailbox.put(partial(Worker.drop, asked=asked))

    @property
    def _is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def _begin_thread(self) -> None:
        worker = self._worker
        self._thread = threading.Thread(target=worker.serve, name="lowtide-engine", daemon=True)
        # A daemon that is in the midst of a product would crash the interpreter's end.
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
    """Answers whose events are waited for by the thread that asked."""

    def __init__(self, requests: Sequence[Request]) -> None:
        super().__init__(requests)
        self._news: SimpleQueue[News] = SimpleQueue()

    def put(self, news: News) -> None:
        self._news.put(news)

    def events(self) -> Iterator[Event]:
        """In the order in which they happened; raises what `fail` was told."""
        while not self.is_over:
            yield from self._read(self._next_news())

    def _next_news(self) -> News:
        while True:
            with suppress(Empty):
                return self._news.get(timeout=INTERRUPT_POLL_S)


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
