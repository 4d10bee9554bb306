"""Connections that say nothing, or what is no request: others get in, and the log stays short."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from serving import Running, ServerProcess, serving, serving_process, talking_folder
from whole import LIMIT_S, wait_until

from lowtide import AsyncLLM
from lowtide.serve import connection, request_log
from lowtide.serve.request_log import MAX_KINDS, MAX_LINES, LimitedLog, LineLimit, Served

pytestmark = pytest.mark.hostile

HOST = b"Host: 127.0.0.1\r\n"
CLOSE = b"Connection: close\r\n\r\n"
SECRET = "a prompt that is nobody's business"
KEY = "sk-0123456789"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    folder = talking_folder(tmp_path_factory.mktemp("silent") / "model")
    llm = AsyncLLM(folder, context=2048, dtype="float32", cache="off")
    yield llm
    asyncio.run(llm.close())


@pytest.fixture
def running(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr(request_log, "LIMIT", LineLimit())
    with serving(llm) as found:
        yield found


def connected(running: Running | ServerProcess) -> socket.socket:
    url = urlsplit(running.url)
    return socket.create_connection((url.hostname, url.port), LIMIT_S)


def said_to(running: Running | ServerProcess, data: bytes, is_half: bool = False) -> bytes:
    """Return the server's output until it closes.

    is_half: the client closes its sending half.
    """
    with connected(running) as client:
        client.sendall(data)
        if is_half:
            client.shutdown(socket.SHUT_WR)
        said = b""
        with suppress(ConnectionError):
            while part := client.recv(1 << 16):
                said += part
        return said


def completion(**more: object) -> bytes:
    """A request of a completion that closes the connection."""
    body = {"prompt": "def", "max_tokens": 6, "ignore_eos": True, "temperature": 0, **more}
    content = json.dumps({**body, "return_token_ids": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nConnection: close\r\n" + HOST
    return head + b"Content-Length: %d\r\n\r\n" % len(content) + content


def ids_in(said: bytes) -> list[int]:
    ids: list[int] = json.loads(said[said.index(b"{") :])["choices"][0]["token_ids"]
    return ids


def test_silent_connections_shut_nobody_out(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = ids_in(said_to(running, completion()))
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 8)
    with ExitStack() as stack:
        answered = stack.enter_context(connected(running))
        answered.sendall(completion(max_tokens=400, stream=True))
        assert answered.recv(1)  # its answer runs
        half = [stack.enter_context(connected(running)) for _ in range(8)]
        for client in half[::2]:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\n")
        for _ in range(10):
            assert ids_in(said_to(running, completion())) == alone
        said = b""
        while part := answered.recv(1 << 16):
            said += part
        assert b"[DONE]" in said
    assert ids_in(said_to(running, completion())) == alone


def test_silent_connections_leave_files_to_open(tmp_path: Path) -> None:
    limit = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (64, 64))
    with (
        serving_process(talking_folder(tmp_path / "model"), preexec_fn=limit) as server,
        ExitStack() as stack,
    ):
        for _ in range(48):
            stack.enter_context(connected(server))
        assert ids_in(said_to(server, completion()))
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        form = {"response_format": {"type": "json_object"}}  # compiled in a new process
        said = httpx.post(f"{server.url}/v1/chat/completions", json=body | form, timeout=LIMIT_S)
        assert said.status_code == 200, said.text
    assert not any("out of system resource" in line for line in server.said)


def test_a_connection_without_its_first_byte_has_little_time(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "FIRST_BYTE_S", 0.2)
    with connected(running) as silent, connected(running) as begun:
        begun.sendall(b"GET /health HTTP/1.1\r\n")
        assert silent.recv(1) == b""
        begun.sendall(HOST + b"Connection: close\r\n\r\n")
        assert begun.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_load_balancers_ask_in_http_1_0(running: Running, path: str) -> None:
    assert b" 200 " in said_to(running, f"GET {path} HTTP/1.0\r\n\r\n".encode())
    by_head = said_to(running, f"HEAD {path} HTTP/1.0\r\n\r\n".encode())
    assert b" 200 " in by_head and by_head.endswith(b"\r\n\r\n")
    assert b" 403 " in said_to(running, b"GET /v1/models HTTP/1.0\r\n\r\n")
    assert b" 400 " in said_to(running, f"GET {path} HTTP/1.1\r\n\r\n".encode())
    other = f"GET {path} HTTP/1.0\r\nHost: evil.example\r\n\r\n"
    assert b" 403 " in said_to(running, other.encode())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_sends_no_more_is_answered(running: Running, stream: bool) -> None:
    said = said_to(running, completion(stream=stream, max_tokens=60), is_half=True)
    assert b"HTTP/1.1 200 " in said
    if stream:
        assert b"[DONE]" in said
    else:
        assert len(ids_in(said[said.index(b"HTTP/1.1 200 ") :])) == 60


@pytest.mark.parametrize("size", [1, connection.PART_BYTES, 5 * connection.PART_BYTES])
def test_a_client_that_sends_no_more_is_answered_all_that_it_has_sent(
    running: Running, size: int
) -> None:
    """However long a request is, and however many were sent at once."""
    one = completion(user="a" * size)
    assert len(ids_in(said_to(running, one, is_half=True).partition(b"1.1 200 ")[2])) == 6
    several = one.replace(b"Connection: close\r\n", b"", 1) * 3
    assert said_to(running, several, is_half=True).count(b"HTTP/1.1 200 ") == 3
    refused = b"GET /" + b"a" * min(size, 60_000) + b" HTTP/1.1\r\n" + HOST + b"\r\n"
    assert b" 404 " in said_to(running, refused, is_half=True)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_of_http_1_0_that_sends_no_more_is_answered(
    running: Running, stream: bool
) -> None:
    asked = completion(stream=stream, max_tokens=60).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    said = said_to(running, asked, is_half=True)
    assert said.startswith(b"HTTP/1.1 200 ")  # without an interim answer
    assert b"[DONE]" in said if stream else len(ids_in(said)) == 60


def test_a_client_of_http_1_0_that_has_gone_is_not_answered(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "KEEPALIVE_S", 1)
    monkeypatch.setattr(connection, "PROBE_S", (0.1, 0.1))
    ended: list[Served] = []
    running.service.on_served.append(ended.append)
    with connected(running) as client:
        # Its kernel forgets the connection in a second instead of a minute.
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_LINGER2, 1)
        client.sendall(completion(max_tokens=1900).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        wait_until(lambda: running.service.admission.num_running)
    wait_until(lambda: ended)
    assert [served.reason for served in ended] == ["abort"]


def test_a_client_that_has_gone_is_not_answered(running: Running) -> None:
    ended: list[Served] = []
    running.service.on_served.append(ended.append)
    with connected(running) as client:
        client.sendall(completion(max_tokens=1900))
        wait_until(lambda: running.service.admission.num_running)
    wait_until(lambda: ended)
    assert [served.reason for served in ended] == ["abort"]


@pytest.mark.parametrize("size", [70_000, 100_000])
def test_heads_in_one_packet_have_their_bound(running: Running, size: int) -> None:
    head = b"GET /health HTTP/1.1\r\n" + HOST + b"X-Long: " + b"x" * size + b"\r\n\r\n"
    said = said_to(running, head + b"Connection: close\r\n\r\n")
    assert b" 431 " in said or b" 400 " in said


def test_a_method_is_no_way_around_the_bound(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    for size, status in ((70_000, b" 431 "), (60_000, b" 405 ")):
        said = said_to(running, b"A" * size + b" /health HTTP/1.1\r\n" + HOST + CLOSE)
        assert status in said and len(said) < 1000
    assert all(len(record.getMessage()) < 1000 for record in caplog.records)


def test_a_body_whose_end_is_said_twice_is_refused(running: Running) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Length: 5\r\n"
    said = said_to(running, head + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
    assert b" 400 " in said and b"exclude each other" in said


def test_a_body_in_small_chunks_is_read(running: Running) -> None:
    head, _, content = completion().partition(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if not line.startswith(b"Content-Length")]
    content += b" " * 20_000
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in content) + b"0\r\n\r\n"
    said = said_to(running, b"\r\n".join([*lines, b"Transfer-Encoding: chunked", b"", chunks]))
    assert ids_in(said[said.index(b"\r\n\r\n") :]) == ids_in(said_to(running, completion()))


def test_the_log_has_few_lines_of_a_kind_and_nobody_s_words(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(30):
        said_to(running, b"nonsense\r\n\r\n")
        said_to(running, completion(top_k=SECRET))
        said_to(running, completion(**{SECRET: 1}))
        said_to(
            running, b"GET /" + KEY.encode()[:3] + b"?key=" + KEY.encode() + b" HTTP/1.0\r\n\r\n"
        )
    lines = [record.getMessage() for record in caplog.records]
    assert sum("Invalid HTTP" in line for line in lines) == MAX_LINES
    assert sum(line.startswith("POST /v1/completions 400") for line in lines) <= 2 * MAX_LINES
    assert not any(SECRET in line or KEY in line for line in lines)


def test_what_the_log_leaves_out_is_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = LineLimit()
    assert [limit.allows("kind") for _ in range(25)] == [True] * MAX_LINES + [False] * 15
    later_s = time.monotonic() + request_log.WINDOW_S
    monkeypatch.setattr(request_log.time, "monotonic", lambda: later_s)
    assert limit.allows("kind")
    assert "kind: 15 more in a minute." in caplog.text


def test_what_nobody_logs_is_not_counted(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as uvicorn's traces of connections, whose number would be logged each minute."""
    counted: list[str] = []
    monkeypatch.setattr(request_log.LIMIT, "allows", counted.append)
    assert said_to(running, b"GET /health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200")
    assert not counted


def test_an_answer_that_the_server_s_end_cuts_off_is_no_failure(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client does not read; uvicorn logs that it is cancelled, in a line of its own."""
    monkeypatch.setattr(request_log, "LIMIT", LineLimit())
    log = LimitedLog(logging.getLogger("uvicorn.error"))
    log.error("Exception in ASGI application", exc_info=asyncio.CancelledError())
    assert not caplog.records
    log.error("Exception in ASGI application", exc_info=ValueError())
    assert [record.exc_info is not None for record in caplog.records] == [True]


def test_lines_of_any_number_of_kinds_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = LineLimit()
    told = [limit.allows(f"kind {i}") for i in range(3 * MAX_KINDS)]
    assert sum(told) == MAX_KINDS + MAX_LINES
    later_s = time.monotonic() + request_log.WINDOW_S
    monkeypatch.setattr(request_log.time, "monotonic", lambda: later_s)
    assert all(limit.allows(f"other {i}") for i in range(MAX_KINDS)), "the first are forgotten"


def test_each_request_is_a_line_at_v(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lowtide")
    said_to(running, completion())
    wait_until(lambda: "POST /v1/completions 200: " in caplog.text)
    [line] = [r.getMessage() for r in caplog.records if "/v1/completions" in r.getMessage()]
    assert "3 prompt, 0 kept, 6 new, " in line
    assert "tokens/s" in line


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/chat/completions", "/v1."),
        ("/completions", "/v1."),
        ("/models", "/v1."),
        ("/responses", "/v1."),
        ("/v1/v1/chat/completions", "/v1."),
        ("/openai/v1/chat/completions", "/v1."),
        ("/v1/v1/messages", "Anthropic"),
        ("/messages", "Anthropic"),
        ("/v1/api/chat", "Ollama"),
        ("/infill", "/v1/completions"),
        ("/tokenize", "count_tokens"),
        ("/v1/rerank", "ranks"),
        ("/rerank", "ranks"),
        ("/nothing", "/v1, all others"),
    ],
)
def test_a_wrong_base_address_is_told_the_right_one(running: Running, path: str, told: str) -> None:
    with running.client() as client:
        said = client.post(path, json={})
        assert said.status_code == 404
        message = said.json()["error"]["message"]
        assert told in message and repr(path) in message
        if "base address" in message:
            assert running.url in message
