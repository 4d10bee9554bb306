"""The engine's loop for coroutines: what is asked of it is awaited, nothing waits in a thread.

News of the engine's thread come by `call_soon_threadsafe` into a queue without a bound: a slow
reader delays neither the engine nor another. A task that is cancelled drops what it
asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from lowtide.decode.request import Committed, Draft, Event, Finished, Request
from lowtide.engine.running.loop import EngineLoop
from lowtide.engine.running.worker import Answers, Job, News, Passes

T = TypeVar("T")

NUM_TOGETHER = 64
"""Tokens of an answer that is told whole; more would hold the event loop up when they are read."""


class AsyncAnswers(Answers):
    """Answers whose events are awaited in the event loop that is running now."""

    def __init__(self, requests: Sequence[Request]) -> None:
        super().__init__(requests)
        self._loop = asyncio.get_running_loop()
        self._awaited: asyncio.Queue[News] = asyncio.Queue()

    async def next_events(self) -> list[Event]:
        """What comes next; raises what `fail` was told."""
        return self._read(await self._awaited.get())

    def put(self, news: News) -> None:
        _call(self._loop, partial(self._awaited.put_nowait, news))


class WholeAnswers(AsyncAnswers):
    """Answers that nobody reads before their end: the event loop is woken for few events.

    A request's first tokens are told at once, which is the time of its first token, then
    `NUM_TOGETHER` or more together; drafts are not told.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        super().__init__(requests)
        self._held: dict[int, list[Committed]] = {}  # by request, once its first were told

    def put(self, news: News) -> None:
        if isinstance(news, BaseException):
            super().put(news)
            return
        told: list[Event] = []
        for event in news:
            if isinstance(event, Committed):
                told += self._told_with(event)
            elif isinstance(event, Finished):
                told += [*_together(self._held.pop(event.request, [])), event]
            elif not isinstance(event, Draft):
                told.append(event)
        if told:
            super().put(told)

    def _told_with(self, event: Committed) -> list[Committed]:
        held = self._held.get(event.request)
        if held is None:
            self._held[event.request] = []
            return [event]
        held.append(event)
        if sum(len(each.tokens) for each in held) < NUM_TOGETHER:
            return []
        self._held[event.request] = []
        return _together(held)


def _together(events: Sequence[Committed]) -> list[Committed]:
    """One event in place of several of one request."""
    if not events:
        return []
    tokens = tuple(token for event in events for token in event.tokens)
    logprobs = tuple(each for event in events for each in event.logprobs)
    return [Committed(events[0].request, tokens, logprobs)]


async def answers(
    loop: EngineLoop, requests: Sequence[Request], is_whole: bool = False
) -> AsyncGenerator[Event, None]:
    """As `EngineLoop.answers`, for a coroutine; is_whole: see `WholeAnswers`."""
    asked = WholeAnswers(requests) if is_whole else AsyncAnswers(requests)
    try:
        loop.ask(asked)
        while not asked.is_over:
            for event in await asked.next_events():
                yield event
    finally:
        if not asked.is_over:
            loop.drop(asked)


async def run_passes(loop: EngineLoop, work: Passes[T], num_tokens: int) -> T:
    """As `EngineLoop.run_passes`, for a coroutine."""
    job = Job(work, num_tokens)
    running = asyncio.get_running_loop()
    is_done = asyncio.Event()
    job.outcome.add_done_callback(lambda _: _call(running, is_done.set))
    try:
        loop.ask(job)
        await is_done.wait()
        return job.outcome.result()
    finally:
        if not job.outcome.done():
            loop.drop(job)


def _call(running: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    """On the event loop's thread, soon; nowhere once that loop is closed: nothing waits there."""
    with suppress(RuntimeError):
        running.call_soon_threadsafe(function)
