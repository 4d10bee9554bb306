"""Turns of the event loop for a token.

With each turn the interpreter's lock changes hands, which the engine's thread wants between its
passes.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import AsyncGenerator

import pytest
from serving import LIMIT_S
from starlette.types import Message
from test_serve_gone import BODIES, Client, llm  # noqa: F401

from lowtide import AsyncLLM
from lowtide.decode.request import Committed, Event, Request
from lowtide.serve.app import build_app
from lowtide.serve.service import Service


class CountingSelector(selectors.DefaultSelector):
    """Asked once in every turn."""

    num_turns = 0

    def select(
        self, timeout: float | None = None
    ) -> list[tuple[selectors.SelectorKey, selectors._EventMask]]:
        self.num_turns += 1
        return super().select(timeout)


@pytest.mark.parametrize("path", BODIES)
def test_a_token_takes_one_turn_from_the_queue_to_its_client(
    llm: AsyncLLM,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    path: str,
) -> None:
    turns = CountingSelector()

    class Reader(Client):
        last_turn = 0

        async def send(self, _: Message) -> None:
            self.last_turn = turns.num_turns

    async def ask() -> None:
        service, client = Service(llm), Reader(path, {**BODIES[path], "stream": True})
        coming: asyncio.Queue[Event] = asyncio.Queue()
        waits = asyncio.Event()

        async def events(_: list[Request], is_whole: bool) -> AsyncGenerator[Event, None]:
            while True:
                waits.set()
                yield await coming.get()

        token_ids = await llm.token_ids("import os, sys, io, re", raw=True)
        monkeypatch.setattr(service.llm, "events", events)
        asked = asyncio.ensure_future(build_app(service)(client.scope, client.receive, client.send))
        taken = []
        for token in token_ids:
            await waits.wait()
            waits.clear()
            before = turns.num_turns
            coming.put_nowait(Committed(0, (token,)))
            await waits.wait()
            if client.last_turn > before:  # else its text is held back
                taken.append(client.last_turn - before)
        assert len(taken) > 3 and set(taken) == {1}
        client.goes.set()
        await asked

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(turns)) as runner:
        runner.run(asyncio.wait_for(ask(), LIMIT_S))
