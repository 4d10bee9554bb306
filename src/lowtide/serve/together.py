"""`Together`: runs small work of many requests in one thread, several pieces at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

A = TypeVar("A")
B = TypeVar("B")

MOST = 32
"""Most pieces given to a thread at once; their outcomes come back together."""


class Together(Generic[A, B]):
    """Queue of small blocking work, done by one thread at a time, up to `MOST` pieces in a go.

    Handing work to a thread and back takes longer than the work itself. An error fails only the
    piece that raised it.
    """

    def __init__(self, work: Callable[[A], B]) -> None:
        self._work = work
        self._waiting: list[tuple[A, asyncio.Future[B]]] = []
        self._thread: asyncio.Future[list[B | BaseException]] | None = None

    async def __call__(self, asked: A) -> B:
        """Do one piece of work; return its result or raise its error."""
        running = asyncio.get_running_loop()
        outcome: asyncio.Future[B] = running.create_future()
        self._waiting.append((asked, outcome))
        if len(self._waiting) == 1 and not self._is_busy(running):
            running.call_soon(self._hand_over)  # with what else is asked until then
        return await outcome

    def _is_busy(self, running: asyncio.AbstractEventLoop) -> bool:
        thread = self._thread
        return thread is not None and not thread.done() and thread.get_loop() is running

    def _hand_over(self) -> None:
        """Give the first waiting pieces to a thread; the next ones follow when it is done."""
        self._waiting = [each for each in self._waiting if not each[1].done()]
        part, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
        if not part:
            return
        running = asyncio.get_running_loop()
        self._thread = running.run_in_executor(None, self._done, [asked for asked, _ in part])
        self._thread.add_done_callback(lambda thread: self._deliver(part, thread))

    def _done(self, asked: Sequence[A]) -> list[B | BaseException]:
        outcomes: list[B | BaseException] = []
        for each in asked:
            try:
                outcomes.append(self._work(each))
            except BaseException as error:
                outcomes.append(error)
        return outcomes

    def _deliver(
        self,
        part: Sequence[tuple[A, asyncio.Future[B]]],
        thread: asyncio.Future[list[B | BaseException]],
    ) -> None:
        self._hand_over()
        for (_, outcome), result in zip(part, thread.result(), strict=True):
            if outcome.done():  # the request was cancelled
                continue
            if isinstance(result, BaseException):
                outcome.set_exception(result)
            else:
                outcome.set_result(result)
