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

from lowtide.decode.request import Event, Request
from lowtide.engine.running.loop import EngineLoop
from lowtide.engine.running.worker import Answers, Job, News, Passes

T = TypeVar("T")


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


async def answers(loop: EngineLoop, requests: Sequence[Request]) -> AsyncGenerator[Event, None]:
    """As `EngineLoop.answers`, for a coroutine."""
    asked = AsyncAnswers(requests)
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
