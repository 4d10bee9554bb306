"""A server among all kinds of clients for long: what it holds and what it answers stay the same.

The short run takes a quarter of a minute, most of it a processor's.
"""

from __future__ import annotations

import random
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from serving import ServerProcess, serving_process, talking_folder
from whole import LIMIT_S, wait_until

SOAK_S, SHORT_S = 1200.0, 10.0
NUM_CLIENTS = 12
MAX_REQUESTS = 4  # at once: some clients are told to come again
MOST_PAUSE_S = 0.5
CONTEXT = 2048
MEMORY = "32MiB"
GROWTH_BYTES = 32 << 20
"""Growth by the plan's pages that the soak touches first; a leak would soon be more."""

POOL_THREADS = 32
"""Those that asyncio makes for work outside its loop, as far as it needs them."""

TALK = [{"role": "user", "content": "Sort 93 21 57 40 12"}]
BODIES: Sequence[tuple[str, dict[str, Any]]] = (
    ("/v1/completions", {"prompt": "import os", "max_tokens": 24}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 12, "logprobs": 3, "n": 2}),
    ("/v1/completions", {"prompt": [5] * 1500, "max_tokens": 4}),
    ("/v1/chat/completions", {"messages": TALK, "max_tokens": 24}),
    ("/v1/responses", {"model": "any", "input": "Sort 4 1 3", "max_output_tokens": 24}),
    ("/v1/messages", {"model": "any", "messages": TALK, "max_tokens": 24}),
    ("/api/chat", {"messages": TALK, "options": {"num_predict": 24}}),
    ("/api/generate", {"prompt": "import os", "options": {"num_predict": 24}}),
)
LONG = ("/v1/completions", {"prompt": "def", "max_tokens": 400, "ignore_eos": True})
BAD: Sequence[tuple[str, bytes]] = (
    ("/v1/completions", b"{"),
    ("/v1/completions", b'{"prompt": "a", "max_tokens": 1e9}'),
    ("/v1/completions", b'{"prompt": ' + str([5] * (CONTEXT + 1)).encode() + b"}"),
    ("/v1/chat/completions", b'{"messages": [{"role": "wizard", "content": "a"}]}'),
    ("/v1/chat/completions", b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}"),
    ("/v1/responses", b'{"input": "a", "previous_response_id": "resp_1"}'),
    ("/v1/messages", b'{"max_tokens": 0, "messages": []}'),
    ("/api/chat", b'{"messages": [{"role": "user", "content": "a", "images": ["AAAA"]}]}'),
    ("/nowhere", b"{}"),
)
PAGES = ("/", "/health", "/ready", "/metrics", "/v1/models", "/v1/lowtide/stats", "/api/tags")


class Held(NamedTuple):
    """Resources that a process holds."""

    resident_bytes: int
    num_threads: int
    num_descriptors: int
    num_children: int


def held_by(server: ServerProcess) -> Held:
    process = psutil.Process(server.process.pid)
    with process.oneshot():
        return Held(
            process.memory_info().rss,
            process.num_threads(),
            process.num_fds(),
            len(process.children()),
        )


class Visitor:
    """One client after another, drawn from a seed."""

    def __init__(self, url: str, model: str, seed: int) -> None:
        self._url, self._model = url, model
        self._draw = random.Random(seed)
        self.statuses: Counter[int] = Counter()

    def visit_until(self, end_s: float) -> None:
        kinds = (self.whole, self.streamed, self.streamed, self.leaves, self.gives_up)
        kinds += (self.wrong, self.looks, self.is_cut_off)
        with httpx.Client(base_url=self._url, timeout=LIMIT_S) as client:
            while time.monotonic() < end_s:
                self._draw.choice(kinds)(client)
                time.sleep(self._draw.random() * MOST_PAUSE_S)

    def whole(self, client: httpx.Client) -> None:
        path, body = self._asked(stream=False)
        self._note(client.post(path, json=body).status_code)

    def streamed(self, client: httpx.Client) -> None:
        path, body = self._asked(stream=True)
        with client.stream("POST", path, json=body) as answer:
            self._note(answer.status_code)
            assert list(answer.iter_lines())

    def leaves(self, client: httpx.Client) -> None:
        """In the midst of a stream."""
        path, body = LONG
        with client.stream("POST", path, json={**body, "stream": True}) as answer:
            self._note(answer.status_code)
            lines = answer.iter_lines()
            for _ in range(self._draw.randrange(20)):
                next(lines, "")

    def gives_up(self, client: httpx.Client) -> None:
        """Before there is an answer."""
        path, body = LONG
        try:
            self._note(client.post(path, json=body, timeout=0.1).status_code)
        except httpx.TimeoutException:
            pass

    def wrong(self, client: httpx.Client) -> None:
        path, body = self._draw.choice(BAD)
        status = client.post(path, content=body).status_code
        assert 400 <= status < 500, (path, body[:80], status)

    def looks(self, client: httpx.Client) -> None:
        assert client.get(self._draw.choice(PAGES)).status_code == 200

    def is_cut_off(self, _: httpx.Client) -> None:
        """In the midst of its own request."""
        url = urlsplit(self._url)
        request = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{"
        with socket.create_connection((url.hostname, url.port), LIMIT_S) as client:
            client.sendall(request[: self._draw.randrange(len(request))])

    def _asked(self, stream: bool) -> tuple[str, dict[str, Any]]:
        path, body = self._draw.choice(BODIES)
        return path, {**body, **named(self._model, path), "stream": stream}

    def _note(self, status: int) -> None:
        assert status in (200, 429), status
        self.statuses[status] += 1


def named(model: str, path: str) -> dict[str, str]:
    """Of the APIs here one wants the model's name."""
    return {"model": model} if path.startswith("/api/") else {}


def ask_for_each_once(client: httpx.Client, model: str) -> None:
    """Ask for each kind once, so that the server has made what the first of a kind needs."""
    for path, body in BODIES:
        asked = {**body, **named(model, path), "stream": False}
        assert client.post(path, json=asked).status_code == 200


def visited(visitors: Sequence[Visitor], seconds: float) -> None:
    """By all of them at once, and idle again at the end."""
    end_s = time.monotonic() + seconds
    with ThreadPoolExecutor(len(visitors)) as pool:
        for done in [pool.submit(visitor.visit_until, end_s) for visitor in visitors]:
            done.result()


def is_idle(client: httpx.Client) -> bool:
    told = client.get("/metrics").text
    counts = re.findall(r"^lowtide:num_requests_(?:running|waiting){.*} (\S+)$", told, re.MULTILINE)
    return [float(count) for count in counts] == [0, 0]


def canary(client: httpx.Client) -> list[int]:
    """Token ids of an answer that is always the same."""
    body = {"prompt": "def", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    answer = client.post("/v1/completions", json={**body, "return_token_ids": True})
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


def settled(server: ServerProcess, is_so: Callable[[Held], bool]) -> Held:
    """Wait until an idle server's resources satisfy `is_so`; return them."""
    with httpx.Client(base_url=server.url, timeout=LIMIT_S) as client:
        wait_until(lambda: is_idle(client))
    wait_until(lambda: is_so(held_by(server)))
    return held_by(server)


@pytest.mark.parametrize("seconds", [SHORT_S, pytest.param(SOAK_S, marks=pytest.mark.slow)])
def test_what_a_server_holds_does_not_grow(seconds: float, tmp_path: Path) -> None:
    options = ["--context", str(CONTEXT), "--host-memory", MEMORY, "--dtype", "float32"]
    options += ["--max-requests", str(MAX_REQUESTS), "--served-name", "tiny"]
    with serving_process(talking_folder(tmp_path / "model"), *options) as server:
        visitors = [Visitor(server.url, "tiny", seed) for seed in range(NUM_CLIENTS)]
        with httpx.Client(base_url=server.url, timeout=LIMIT_S) as client:
            expected = canary(client)
            ask_for_each_once(client, "tiny")
        visited(visitors, seconds / 4)
        before = settled(server, lambda held: True)
        visited(visitors, seconds * 3 / 4)
        after = settled(server, lambda held: held.num_descriptors <= before.num_descriptors)
        with httpx.Client(base_url=server.url, timeout=LIMIT_S) as client:
            assert canary(client) == expected
        assert after.resident_bytes <= before.resident_bytes + GROWTH_BYTES
        assert after.num_threads <= before.num_threads + POOL_THREADS
        assert after.num_children <= before.num_children
        statuses = sum((visitor.statuses for visitor in visitors), Counter())
        assert statuses[200] > seconds / 4 and statuses[429]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(LIMIT_S) == 128 + signal.SIGTERM
    assert "Traceback" not in "".join(server.said)
