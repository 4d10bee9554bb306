"""The engine's thread: reads its mailbox, runs a pass, and delivers the events."""

from __future__ import annotations

import abc
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

import torch

from lowtide.decode.batch_decoder import nothing_to_heed
from lowtide.decode.request import Committed, Event, Finished, Request, new_caller
from lowtide.engine.running.decoding import make_decoder, run_pass
from lowtide.engine.running.engine import Engine
from lowtide.engine.running.own_run import MAX_PASSES, TimedPass, keep_run, waits
from lowtide.engine.running.policy_setting import follow_trial
from lowtide.errors import InternalError, UsageError
from lowtide.memory.cuda_streams import device_pass
from lowtide.threads.event import INTERRUPT_POLL_S

T = TypeVar("T")

EXPECTED_SHARE = 8
"""A pass waits for expected requests that would add more than this part to it."""

EXPECTED_S = 0.2
"""Longest silence in which expected requests are waited for."""

Delivery = list[Event] | BaseException
"""Events of requests queued together, or the error that ends them."""

Passes = Callable[[Engine], Generator[None, None, T]]
"""Work with passes of its own; it yields between them."""


class Answers(abc.ABC):
    """Events of requests queued together. Subclasses define how they are awaited.

    post: delivers events to the waiting caller; answers with equal posts are delivered in one call.
    """

    num_tokens = 0  # no room of its own to wait for: the decoder queues its requests

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self.is_over = not requests  # whether nothing more will come
        self._num_unfinished = len(requests)

    @property
    @abc.abstractmethod
    def post(self) -> Post: ...

    def due(self, events: list[Event]) -> list[Event]:
        """Return the events to deliver now, given new ones; called on the engine's thread."""
        return events

    def fail(self, error: BaseException) -> None:
        """End the requests with an error; called on the engine's thread."""
        self.post([(self, error)])

    def _read(self, delivery: Delivery) -> list[Event]:
        """Return delivered events after counting the finished requests; raise a delivered error."""
        if isinstance(delivery, BaseException):
            self.is_over = True
            raise _copied(delivery) from delivery
        self._num_unfinished -= sum(isinstance(event, Finished) for event in delivery)
        self.is_over = not self._num_unfinished
        return delivery


class WorkItem(Generic[T]):
    """Work to do between the passes of requests, and its future result."""

    def __init__(self, work: Passes[T], num_tokens: int, is_look: bool = False) -> None:
        """is_look: it changes nothing, and may also be done during a pass."""
        self.work = work
        self.num_tokens = num_tokens
        self.is_look = is_look
        self.outcome: Future[T] = Future()
        self._passes: Generator[None, None, T] | None = None

    def result(self) -> T:
        """Wait for the result."""
        while wait([self.outcome], INTERRUPT_POLL_S).not_done:
            pass
        return self.outcome.result()

    def advance(self, engine: Engine) -> bool:
        """Run to the next `yield`; return False once the work is done."""
        if self._passes is None:
            self._passes = self.work(engine)
        try:
            next(self._passes)
        except StopIteration as end:
            self.outcome.set_result(end.value)
            return False
        except BaseException as error:
            self.fail(error)
            return False
        return True

    def fail(self, error: BaseException) -> None:
        """End the work with an error, on the engine's thread, and free what it holds."""
        if self._passes is not None:
            self._passes.close()
        self.outcome.set_exception(error)


Post = Callable[[Sequence[tuple[Any, Delivery]]], None]
"""Takes deliveries to their readers' threads: to wake a reader takes longer than to deliver."""

Queued = Answers | WorkItem[Any]


class _PassEnded(Exception):
    """Ends a long pass whose request was cancelled, or whose model is closed."""


class Worker:
    """Owns engine and decoder; delivers their events to callers.

    Any thread may use `gate`, `mailbox` and `is_closed`, read `engine`, `speed`, `is_idle` and
    `num_running`, and call `end_error` once this is closed. Everything else belongs to the engine's
    thread once it runs.

    gate: lock for checking or changing `is_closed`. Messages in the mailbox are calls of methods.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.speed = Speed()
        self.mailbox: Mailbox = SimpleQueue()
        self.gate = threading.RLock()
        self.is_closed = False
        self._decoder = make_decoder(engine)
        self._stored = engine.stored
        self._waiting: deque[Queued] = deque()  # in the order in which they came
        self._work: list[WorkItem[Any]] = []  # that have begun
        self._answers: dict[int, Answers] = {}  # by request, of those that the decoder has
        self._decoder.on_begin = self._decoder.on_progress = partial(_deliver, self._answers)
        self._is_in_pass = False
        self._dropped: list[Queued] = []  # during a pass, after which they are cancelled
        self._num_expected = 0  # requests that are about to be queued
        self._is_stopped = self._has_ended = False
        self._fault: BaseException | None = None

    @property
    def is_idle(self) -> bool:
        """True if no request or work has begun or waits; the mailbox is not looked at."""
        return not (self._decoder.has_work or self._work or self._waiting)

    @property
    def num_running(self) -> int:
        """Number of requests that the decoder has."""
        return len(self._answers)

    # Messages

    def accept(self, queued: Queued) -> None:
        if isinstance(queued, Answers):
            self.expect(-len(queued.requests))
        if isinstance(queued, WorkItem) and not queued.num_tokens:
            self._work.append(queued)
        else:
            self._waiting.append(queued)

    def expect(self, num_requests: int) -> None:
        """Count requests that are about to be queued; below 0, requests that will not come."""
        self._num_expected = max(0, self._num_expected + num_requests)

    def drop(self, queued: Queued) -> None:
        """Cancel requests or work, queued or running."""
        error = UsageError("The request was cancelled.")
        if queued in self._waiting:
            self._waiting.remove(queued)
            queued.fail(error)
        elif self._is_in_pass:
            self._dropped.append(queued)
        elif isinstance(queued, Answers):
            self._cancel(queued)
        elif queued in self._work:
            self._work.remove(queued)
            queued.fail(error)

    def stop(self) -> None:
        self._is_stopped = True

    # The thread

    def serve(self) -> None:
        """Run the engine's thread, from beginning to end."""
        try:
            self._take_charge()
            while self._read_mail():
                self._work = [item for item in self._work if item.advance(self.engine)]
                self._begin_waiting()
                if self._decoder.has_work:
                    self._step()
                    if self._dropped:
                        self._end_dropped()
        except BaseException as error:
            self._fault = error
        self.end()

    def end(self) -> None:
        """Fail everything unfinished and close the engine."""
        with self.gate:
            self.is_closed = True
            if self._has_ended:
                return
            self._has_ended = True
            while not self.mailbox.empty():
                self.mailbox.get()(self)
        unfinished: list[Queued] = [*self._answers.values(), *self._work, *self._waiting]
        try:
            self._decoder.store_in(None if self._fault else self._stored)
            self._decoder.close()
        finally:  # whatever fails there
            for queued in dict.fromkeys(unfinished):
                queued.fail(self.end_error())
            self.engine.close()
        if self._fault is None:
            keep_run(self.engine, self.speed.passes)

    def adopt(self, engine: Engine) -> None:
        """Continue with the same model in another state, whose kept KV caches are not valid."""
        self._decoder.forget(is_mixed=self.engine.options.changes_words)
        self.engine = engine
        self.speed.passes.clear()
        if engine.options.changes_words:
            # Also those of what begins under it and ends under another.
            self._stored = None
            self._decoder.store_in(None)

    def _take_charge(self) -> None:
        """Bind torch's number of threads and its device to this thread."""
        self.engine.executor.take_charge()
        device = self.engine.model.device
        if device.type == "cuda":
            torch.cuda.set_device(device)

    def _read_mail(self) -> bool:
        """Drain the mailbox, blocking while idle. Return False once stopped."""
        if self.is_idle:
            self.engine.rest()
        while not self._is_stopped and (
            self.is_idle or not self.mailbox.empty() or self._waits_for_more()
        ):
            try:
                message = self.mailbox.get(timeout=None if self.is_idle else EXPECTED_S)
            except Empty:
                self._num_expected = 0  # what takes so long is not waited for
                continue
            message(self)
            if self._num_expected and self.mailbox.empty():
                self._begin_waiting()  # requests that came count among the expected ones
        return not self._is_stopped

    def _waits_for_more(self) -> bool:
        """Return True if expected requests would make the next pass much larger."""
        is_much = EXPECTED_SHARE * self._num_expected > self._decoder.num_requests
        return is_much and not (self._work or self._waiting or self._decoder.is_full)

    def _begin_waiting(self) -> None:
        """Start queued work first come, first served; stop at the first without room."""
        while self._waiting and self._has_room(self._waiting[0].num_tokens):
            queued = self._waiting.popleft()
            if not isinstance(queued, WorkItem):
                self._add(queued)
            elif queued.advance(self.engine):  # it holds its room before the next one is considered
                self._work.append(queued)

    def _has_room(self, num_tokens: int) -> bool:
        # With nothing running there is nothing to wait for: let the work itself find out.
        is_idle = not (self._decoder.has_work or self._work)
        return not num_tokens or is_idle or self.engine.kv_cache.can_allocate(num_tokens)

    def _add(self, answers: Answers) -> None:
        caller = new_caller()
        try:
            for request in answers.requests:
                if request.id in self._answers:
                    raise UsageError(
                        f"Request {request.id} is already being decoded; make another one with "
                        "requests()."
                    )
                self._decoder.add(replace(request, caller=request.caller or caller))
                self._answers[request.id] = answers
        except BaseException as error:
            self._cancel(answers)
            answers.fail(error)

    def _step(self) -> None:
        """Run one pass of the decoder, and deliver its events."""
        try:
            is_observed = self.engine.experts.observer is not None
            if is_observed:
                self._decoder.forget()  # an observer sees all rows of a request
            self._decoder.store_in(None if is_observed else self._stored)
            with (
                self.engine.faults.naming_faults(),
                device_pass(),
                self.engine.experts.whole_pass(),
                self.speed.measured(self.engine, is_kept=not is_observed),
            ):
                self._is_in_pass = True
                self._decoder.heed = self._heed  # for the pass alone, as a worker owns its decoder
                events = run_pass(self.engine, self._decoder)
            if not is_observed:
                self.engine = follow_trial(self.engine, *self.speed.last_pass)
        except _PassEnded:
            return
        except BaseException as error:
            self._fail_pass(error)
            return
        finally:
            self._is_in_pass, self._decoder.heed = False, nothing_to_heed
        events = [self._with_receipt(event) for event in events]
        self.speed.count(events)
        _deliver(self._answers, events)
        for event in events:
            if isinstance(event, Finished):
                del self._answers[event.request]

    def _heed(self) -> None:
        """Read the mail during a long pass, and run work that only looks.

        Requests and work are queued. Cancellations wait for the end of the pass, which is now if
        they are of its own requests.
        """
        while not self.mailbox.empty():
            self.mailbox.get()(self)
        self._work = [item for item in self._work if not item.is_look or item.advance(self.engine)]
        ids = {request.id for request in self._decoder.taking_part}
        answers = [each for each in self._dropped if isinstance(each, Answers)]
        is_cancelled = any(request.id in ids for each in answers for request in each.requests)
        if is_cancelled or self._is_stopped:
            raise _PassEnded

    def _with_receipt(self, event: Event) -> Event:
        """Attach the policy's receipt to an answer's last event."""
        if not isinstance(event, Finished):
            return event
        receipt = self.engine.experts.take_receipt(event.request)
        return event if receipt is None else replace(event, receipt=receipt)

    def _end_dropped(self) -> None:
        """Cancel requests that were dropped during a pass."""
        dropped, self._dropped = self._dropped, []
        for queued in dropped:
            self.drop(queued)

    def _fail_pass(self, error: BaseException) -> None:
        """Fail only the requests in this pass."""
        ids = [request.id for request in self._decoder.taking_part]
        concerned = [self._answers[i] for i in ids if i in self._answers]
        for answers in dict.fromkeys(concerned or self._answers.values()):
            self._cancel(answers, is_sound=False)
            answers.fail(error)

    def _cancel(self, answers: Answers, is_sound: bool = True) -> None:
        for request in answers.requests:
            if self._answers.get(request.id) is answers:
                del self._answers[request.id]
                self._decoder.cancel(request.id, is_sound)
                self.engine.experts.take_receipt(request.id)

    def end_error(self) -> Exception:
        """Return a UsageError once the loop was closed, an InternalError once it broke."""
        if self._fault is None:
            return UsageError("This LLM is closed; make another one.")
        error = InternalError(f"The engine's thread has ended: {self._fault!r}. Load it again.")
        error.__cause__ = self._fault
        return error


Mailbox = SimpleQueue[Callable[[Worker], None]]
"""A queue without locks, since garbage collection may fill it on any thread."""


class Speed:
    """Counts committed answer tokens, and their passes, rows and seconds.

    Other passes, such as those of `logits`, do not count. passes: the latest, for the run's
    averages.
    """

    def __init__(self) -> None:
        self._num_tokens = 0
        self._num_forwards = 0
        self._num_rows = 0
        self._seconds = 0.0
        self.last_pass = (0, 0.0)  # rows and seconds
        self.passes: deque[TimedPass] = deque(maxlen=MAX_PASSES)
        self._last: TimedPass | None = None  # whose tokens are not counted yet

    @contextmanager
    def measured(self, engine: Engine, is_kept: bool = True) -> Iterator[None]:
        """Measure a forward pass and the decisions after it. is_kept: add it to `passes`."""
        model, experts, start_s = engine.model, engine.experts, time.perf_counter()
        num_rows, waited_s, num_misses = model.num_rows, *waits(experts)
        self._last = None
        yield
        num_rows, seconds = model.num_rows - num_rows, time.perf_counter() - start_s
        self.last_pass = num_rows, seconds
        self._num_rows += num_rows
        self._seconds += seconds
        self._num_forwards += 1
        if is_kept:
            wait_s, num_missed = waits(experts)
            self._last = TimedPass(num_rows, 0, seconds, wait_s - waited_s, num_missed - num_misses)

    def count(self, events: Iterable[Event]) -> None:
        num_tokens = sum(len(e.tokens) for e in events if isinstance(e, Committed))
        self._num_tokens += num_tokens
        if self._last is not None:
            self.passes.append(self._last._replace(num_tokens=num_tokens))

    def as_dict(self) -> dict[str, float]:
        return {
            "committed_tokens": self._num_tokens,
            "forwards": self._num_forwards,
            "num_rows": self._num_rows,
            "generation_s": self._seconds,
            "tokens_per_s": self._num_tokens / self._seconds if self._seconds else 0.0,
        }


def _deliver(answers: Mapping[int, Answers], events: Iterable[Event]) -> None:
    # Not a method of Worker: decoder and worker would then keep each other in memory.
    deliveries: dict[Answers, list[Event]] = {}
    for event in events:
        deliveries.setdefault(answers[event.request], []).append(event)
    posts: dict[Post, list[tuple[Answers, Delivery]]] = {}
    for asked, part in deliveries.items():
        if due := asked.due(part):
            posts.setdefault(asked.post, []).append((asked, due))
    for post, each in posts.items():
        post(each)


def _copied(error: BaseException) -> BaseException:
    """Copy an error for one thread, because raising it extends its traceback."""
    try:
        return type(error)(*error.args)
    except TypeError:
        return InternalError(f"{type(error).__name__}: {error}")
