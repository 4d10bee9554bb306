"""A client that goes while its request waits frees its place at once.

In every API, whatever the request waits for.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from apis import APIS
from serving import LIMIT_S, talking_folder
from starlette.types import Message, Scope

from lowtide import AsyncLLM
from lowtide.decode.request import Committed, Event, Request
from lowtide.serve.app import build_app
from lowtide.serve.errors import QueueFull
from lowtide.serve.service import Served, Service
from lowtide.serve.settings import ServeSettings

BODIES = {path: api.ask("import", 4) for path, api in APIS.items()}

Waiting = Iterator[asyncio.Event]  # set once a request waits


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(talking_folder(tmp_path_factory.mktemp("gone") / "model"), context=256)
    yield llm
    asyncio.run(llm.close())


class Client:
    """One that asks, and goes when it is told to."""

    def __init__(self, path: str, body: dict[str, Any]) -> None:
        self.goes = asyncio.Event()
        self.scope: Scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [(b"host", b"127.0.0.1")],
        }
        self._asks = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive(self) -> Message:
        if self._asks:
            return self._asks.pop()
        await self.goes.wait()
        return {"type": "http.disconnect"}

    async def send(self, _: Message) -> None:
        pass


@contextmanager
def waiting_in_its_thread(owner: object, name: str, monkeypatch: pytest.MonkeyPatch) -> Waiting:
    waits, end, running = asyncio.Event(), threading.Event(), asyncio.get_running_loop()

    def call(*_: object, **__: object) -> None:
        running.call_soon_threadsafe(waits.set)
        end.wait(LIMIT_S)
        raise AssertionError("not waited for")

    monkeypatch.setattr(owner, name, call)
    try:
        yield waits
    finally:
        end.set()


def template_that_waits(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> AbstractContextManager[asyncio.Event]:
    return waiting_in_its_thread(service.llm, "prompt_ids", monkeypatch)


def grammar_that_waits(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> AbstractContextManager[asyncio.Event]:
    return waiting_in_its_thread(service, "_request", monkeypatch)


@contextmanager
def engine_that_waits(service: Service, monkeypatch: pytest.MonkeyPatch) -> Waiting:
    """It has no room for another request."""
    waits = asyncio.Event()

    async def events(_: list[Request], is_whole: bool) -> AsyncGenerator[Event, None]:
        waits.set()
        await asyncio.Event().wait()
        yield Committed(0, (5,))

    monkeypatch.setattr(service.llm, "events", events)
    yield waits


@contextmanager
def echo_that_waits(service: Service, monkeypatch: pytest.MonkeyPatch) -> Waiting:
    """Passes over the prompt, which has its place by then."""
    waits = asyncio.Event()

    async def prompt_logprobs(*_: object) -> list[None]:
        waits.set()
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(service.llm, "prompt_logprobs", prompt_logprobs)
    yield waits


ECHO = {"prompt": "import", "max_tokens": 1, "echo": True, "logprobs": 1}
WAITING = (template_that_waits, grammar_that_waits, engine_that_waits)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "body", "waiting"),
    [
        *((path, body, waiting) for path, body in BODIES.items() for waiting in WAITING),
        ("/v1/completions", ECHO, echo_that_waits),
    ],
)
def test_its_place_is_free_at_once(
    llm: AsyncLLM,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    stream: bool,
    waiting: Any,
) -> None:
    async def ask() -> None:
        service = Service(llm, ServeSettings(max_requests=1))
        ended: list[Served] = []
        service.on_served.append(ended.append)
        app = build_app(service)
        client = Client(path, {**body, "stream": stream})
        with waiting(service, monkeypatch) as waits:
            asked = asyncio.ensure_future(app(client.scope, client.receive, client.send))
            await waits.wait()
            with pytest.raises(QueueFull):
                service.admission.enter()
            client.goes.set()
            await asked
            assert service.is_idle and [one.reason for one in ended] == ["abort"]

    asyncio.run(asyncio.wait_for(ask(), LIMIT_S))
