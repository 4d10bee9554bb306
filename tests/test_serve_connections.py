"""Slow clients, over raw sockets: each is ended by a limit of time, and none holds back another."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from inside import worker_of
from serving import Running, serving, talking_folder
from uvicorn import Config
from uvicorn.server import ServerState
from whole import LIMIT_S, wait_until

from lowtide import AsyncLLM, SamplingParams
from lowtide.errors import StorageError
from lowtide.serve import connection, guard, server
from lowtide.serve import service as service_module
from lowtide.serve.connection import Connection
from lowtide.serve.errors import Draining
from lowtide.serve.service import Ask, Served, Service
from lowtide.serve.settings import ServeSettings

PATH = "/v1/completions"
HEADERS = "Host: 127.0.0.1\r\nContent-Type: application/json\r\n"
BODY_LATER = f"POST {PATH} HTTP/1.1\r\n{HEADERS}Content-Length: 100000\r\n\r\n".encode()
GET_HEALTH = f"GET /health HTTP/1.1\r\n{HEADERS}\r\n".encode()
SMALL_BYTES = 4096  # of the kernel's buffers


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    folder = talking_folder(tmp_path_factory.mktemp("connections") / "model")
    llm = AsyncLLM(folder, context=2048, dtype="float32", cache="off")
    yield llm
    asyncio.run(llm.close())


@pytest.fixture
def running(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr(server, "SEND_BUFFER_BYTES", SMALL_BYTES)
    with serving(llm) as found:
        yield found


@contextmanager
def connected(running: Running) -> Iterator[socket.socket]:
    url = urlsplit(running.url)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BYTES)
        client.settimeout(LIMIT_S)
        client.connect((url.hostname, url.port))
        yield client


def request(**body: object) -> bytes:
    """Of a completion."""
    content = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\n{HEADERS}Content-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


def until_closed(client: socket.socket) -> bytes:
    """Read from the server until it closes, while a byte is sent to it now and then."""
    said, end_s = b"", time.monotonic() + LIMIT_S
    client.settimeout(0.02)
    while time.monotonic() < end_s:
        try:
            client.sendall(b"x")
            part = client.recv(1 << 16)
        except TimeoutError:
            continue
        except OSError:
            return said
        if not part:
            return said
        said += part
    raise AssertionError("the connection is still open")


def answer(client: socket.socket) -> bytes:
    """An answer that is one JSON object."""
    said = b""
    while not said.endswith(b"}"):
        said += client.recv(1 << 16)
    return said


def is_healthy(running: Running) -> bool:
    with running.client() as client:
        return client.get("/health").status_code == 200


@pytest.mark.parametrize("begun", [b"GET /heal", b"GET /health HTTP/1.1\r\nHost: "])
def test_headers_that_come_byte_by_byte_are_not_waited_for(
    running: Running, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(connection, "RECEIVE_S", 0.3)
        with connected(running) as client:
            client.sendall(begun)
            assert until_closed(client) == b""
    assert is_healthy(running)


def test_headers_have_a_bound(running: Running) -> None:
    with connected(running) as client, suppress(ConnectionError):
        client.sendall(GET_HEALTH[:-2] + b"X-Long: " + b"x" * (1 << 20))
        until_closed(client)
    assert is_healthy(running)


def test_a_connection_without_a_request_ends(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "RECEIVE_S", 0.1)
    with connected(running) as client:
        assert client.recv(1) == b""


def test_a_body_that_comes_byte_by_byte_is_refused_and_then_not_waited_for(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(guard, "BODY_TIMEOUT_S", 0.1)
        patch.setattr(connection, "RECEIVE_S", 3.0)  # on a busy machine, too, the later of the two
        with connected(running) as client:
            client.sendall(BODY_LATER)
            head, _, body = until_closed(client).partition(b"\r\n\r\n")
    assert b" 408 " in head and "did not come" in json.loads(body)["error"]["message"]
    assert is_healthy(running)


def test_each_request_of_a_connection_has_its_own_time(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(running) as client:
        # The second pause is longer than a request may take.
        for part_s, pause_s in ((0.0, 0.0), (0.1, 0.6), (0.0, 0.0)):
            client.sendall(GET_HEALTH[:20])
            time.sleep(part_s)
            client.sendall(GET_HEALTH[20:])
            assert answer(client).startswith(b"HTTP/1.1 200 ")
            monkeypatch.setattr(connection, "RECEIVE_S", 0.5)
            time.sleep(pause_s)
        client.sendall(GET_HEALTH[:20])
        assert until_closed(client) == b""


@contextmanager
def read_slowly(client: socket.socket) -> Iterator[None]:
    """Meanwhile a byte is read twenty times a second."""
    is_over = Event()

    def read() -> None:
        with suppress(OSError):
            while not is_over.wait(0.05) and client.recv(1):
                pass

    thread = Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(LIMIT_S)


@pytest.fixture
def waiting_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that wait in the process, each time that the kernel's buffer is full."""
    noted: list[int] = []
    pause_writing = Connection.pause_writing

    def noting(self: Connection) -> None:
        pause_writing(self)
        noted.append(self.transport.get_write_buffer_size())

    monkeypatch.setattr(Connection, "pause_writing", noting)
    return noted


def ids_of(client: httpx.Client) -> list[int]:
    """Of a short answer that is always the same."""
    body = {"prompt": "def", "max_tokens": 12, "ignore_eos": True, "temperature": 0}
    answer = client.post(PATH, json={**body, "return_token_ids": True}).json()
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def test_a_stream_that_is_not_read_ends_and_holds_back_no_other(
    running: Running,
    waiting_bytes: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(connection, "UNREAD_S", 0.5)
    ended: list[Served] = []
    running.service.on_served.append(ended.append)
    body = {"prompt": "import", "max_tokens": 1800, "ignore_eos": True, "logprobs": 5}
    with running.client() as other, connected(running) as client:
        alone = ids_of(other)
        client.sendall(request(**body, stream=True))
        with read_slowly(client):
            wait_until(lambda: waiting_bytes)
            assert ids_of(other) == alone
            wait_until(lambda: any(one.reason == "abort" for one in ended))
            assert ids_of(other) == alone
    [left] = [one for one in ended if one.reason == "abort"]
    assert left.num_new < 1800 and len(ended) == 4
    assert max(waiting_bytes) < 16 << 10  # one token's event
    assert "its request ends" in caplog.text
    wait_until(lambda: worker_of(running.service.llm).is_idle)


def test_a_whole_answer_that_is_not_read_does_not_stay(
    running: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "UNREAD_S", 0.2)
    with connected(running) as client:
        client.sendall(f"GET /openapi.json HTTP/1.1\r\n{HEADERS}\r\n".encode())
        wait_until(lambda: "its request ends" in caplog.text)
        said = b"".join(iter(partial(client.recv, 1 << 16), b""))
    head, _, body = said.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    assert length is not None and len(body) < int(length[1])


def test_an_answer_that_is_read_slowly_goes_on() -> None:
    sizes = [200_000, 180_000, 160_000, 159_000]
    checks: list[Any] = []
    aborted: list[bool] = []

    def call_later(delay_s: float, check: Callable[..., None], *arguments: Any) -> SimpleNamespace:
        checks.append(partial(check, *arguments))
        return SimpleNamespace(cancel=checks.clear)

    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    loop: Any = SimpleNamespace(call_later=call_later, time=lambda: 0.0)
    config = Config(app, http=Connection, ws="none", lifespan="off", log_config=None)
    slow = Connection(config, ServerState(), {}, loop)
    transport: Any = SimpleNamespace(
        get_write_buffer_size=lambda: sizes[0],
        set_write_buffer_limits=lambda high: None,
        get_extra_info=lambda name: None,
        is_closing=lambda: bool(aborted),
        abort=lambda: aborted.append(True),
    )
    slow.connection_made(transport)
    checks.clear()  # of the request's own time
    slow.pause_writing()
    while sizes[1:]:
        assert not aborted
        sizes.pop(0)
        checks.pop()()
    assert aborted and not checks


def test_requests_that_wait_in_threads_hold_up_no_other(llm: AsyncLLM) -> None:
    """Such as for their turn to be put into a template, or to have a grammar compiled."""
    service = Service(llm, ServeSettings())

    async def wait() -> None:
        is_over = Event()
        async with service.running():
            all_there_may_be = range(service.settings.max_requests)
            waiting = [asyncio.to_thread(is_over.wait, LIMIT_S) for _ in all_there_may_be]
            waiters = [asyncio.ensure_future(each) for each in waiting]
            await asyncio.wait_for(asyncio.to_thread(int), LIMIT_S)
            assert not any(waiter.done() for waiter in waiters)
            is_over.set()
            await asyncio.gather(*waiters)

    asyncio.run(wait())


def test_memory_is_given_back_between_requests_whatever_fails(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service, given_back = Service(llm, ServeSettings()), 0

    async def fails() -> None:
        nonlocal given_back
        given_back += 1
        raise StorageError("A read does not end.")

    async def idle() -> None:
        async with service.running():
            while given_back < 2:
                await asyncio.sleep(0.01)

    monkeypatch.setattr(service_module, "IDLE_S", 0.01)
    monkeypatch.setattr(service, "release_memory", fails)
    asyncio.run(asyncio.wait_for(idle(), LIMIT_S))
    assert "Memory could not be given back: A read does not end." in caplog.text


def test_the_heap_is_returned_once_after_requests(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, moments, num_rounds = Service(llm, ServeSettings()), list[int](), 0

    async def next_round() -> None:
        nonlocal num_rounds
        num_rounds += 1

    async def idle() -> None:
        async with service.running():
            for num_requests in (0, 1, 2):
                for _ in range(num_requests):
                    await service.count(Ask(prompt="Sort 93 21 57"))
                seen = num_rounds
                while num_rounds < seen + 3:
                    await asyncio.sleep(0.01)

    monkeypatch.setattr(service_module, "IDLE_S", 0.01)
    monkeypatch.setattr(service, "release_memory", next_round)
    returned = lambda: moments.append(service.admission.num_entered)  # noqa: E731
    monkeypatch.setattr(service_module, "return_heap", returned)
    asyncio.run(asyncio.wait_for(idle(), LIMIT_S))
    assert moments[0] == 1 and moments[-1] == 3 and len(moments) <= 3


def test_the_end_of_a_hosts_context_lets_answers_end(llm: AsyncLLM) -> None:
    """Whatever hosts the app: no more requests are taken, and those there are come to their end."""
    service = Service(llm, ServeSettings())

    async def answered() -> list[str]:
        ask = Ask(prompt="Sort 93 21 57", params=SamplingParams(max_tokens=40, ignore_eos=True))

        async def whole() -> str:
            async with aclosing(service.answer(ask)) as pieces:
                return [type(piece).__name__ async for piece in pieces][-1]

        async with service.running():
            answers = [asyncio.create_task(whole()) for _ in range(3)]
            while not service.admission.num_running:
                await asyncio.sleep(0.001)
        assert service.state == "draining" and service.is_idle
        with pytest.raises(Draining):
            await whole()
        return list(await asyncio.gather(*answers))

    assert asyncio.run(answered()) == ["Done"] * 3
