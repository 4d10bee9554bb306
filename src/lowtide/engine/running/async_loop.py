"""The engine's loop for coroutines: awaits results without blocking a thread.

The engine's thread delivers events by `call_soon_threadsafe` into unbounded queues, so a slow
reader delays neither the engine nor other readers. Cancelling a task drops its requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from lowtide.decode.request import Committed, Draft, Event, Finished, Request
from lowtide.engine.running.loop import EngineLoop
from lowtide.engine.running.worker import Answers, Delivery, Passes, Post, WorkItem

T = TypeVar("T")

NUM_TOGETHER = 64
"""Tokens delivered together to a reader of whole answers: more would block its event loop."""


class AsyncAnswers(Answers):
    """Events of some requests, awaited in the running event loop."""

    def __init__(self, requests: Sequence[Request]) -> None:
        super().__init__(requests)
        self._post = _PostToLoop(asyncio.get_running_loop())
        self.awaited: asyncio.Queue[Delivery] = asyncio.Queue()

    @property
    def post(self) -> Post:
        return self._post

    async def next_events(self) -> list[Event]:
        """Return the next events; raise the error passed to `fail`."""
        return self._read(await self.awaited.get())


@dataclass(frozen=True)
class _PostToLoop:
    """Post that wakes its event loop once for all deliveries; equal for one loop."""

    loop: asyncio.AbstractEventLoop

    def __call__(self, deliveries: Sequence[tuple[AsyncAnswers, Delivery]]) -> None:
        _call(self.loop, partial(_to_queues, deliveries))


def _to_queues(deliveries: Sequence[tuple[AsyncAnswers, Delivery]]) -> None:
    for answers, each in deliveries:
        answers.awaited.put_nowait(each)


class WholeAnswers(AsyncAnswers):
    """Events for a reader that needs only whole answers, delivered in few batches.

    A request's first tokens are delivered at once, to time the first token; then `NUM_TOGETHER` or
    more together. Drafts are left out.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        super().__init__(requests)
        self._held: dict[int, _HeldTokens] = {}  # by request, once its first were delivered

    def due(self, events: list[Event]) -> list[Event]:
        due: list[Event] = []
        for event in events:
            if isinstance(event, Committed):
                due += self._due_with(event)
            elif isinstance(event, Finished):
                due += [*self._held.pop(event.request, _HeldTokens()).taken(), event]
            elif not isinstance(event, Draft):
                due.append(event)
        return due

    def _due_with(self, event: Committed) -> list[Committed]:
        held = self._held.get(event.request)
        if held is None:
            self._held[event.request] = _HeldTokens()
            return [event]
        held.add(event)
        return held.taken() if held.num_tokens >= NUM_TOGETHER else []


class _HeldTokens:
    """Token events of one request, to be merged into one."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._events: list[Committed] = []

    def add(self, event: Committed) -> None:
        self._events.append(event)
        self.num_tokens += len(event.tokens)

    def taken(self) -> list[Committed]:
        """Return one event in place of those so far, none if there are none."""
        if not self._events:
            return []
        events, self._events, self.num_tokens = self._events, [], 0
        tokens = tuple(token for event in events for token in event.tokens)
        logprobs = tuple(each for event in events for each in event.logprobs)
        return [Committed(events[0].request, tokens, logprobs)]


async def answers(
    loop: EngineLoop, requests: Sequence[Request], is_whole: bool = False
) -> AsyncGenerator[Event, None]:
    """Yield events as `EngineLoop.answers` does. is_whole: deliver them as `WholeAnswers`."""
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
    """Run work with passes of its own, as `EngineLoop.run_passes` does."""
    item = WorkItem(work, num_tokens)
    running = asyncio.get_running_loop()
    is_done = asyncio.Event()
    item.outcome.add_done_callback(lambda _: _call(running, is_done.set))
    try:
        loop.ask(item)
        await is_done.wait()
        return item.outcome.result()
    finally:
        if not item.outcome.done():
            loop.drop(item)


def _call(running: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    """Call a function on the event loop's thread; do nothing if that loop is closed."""
    with suppress(RuntimeError):
        running.call_soon_threadsafe(function)
