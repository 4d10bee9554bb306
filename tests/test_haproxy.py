"""The HAProxy file of docs/scale.md before two servers, with the program that Debian has."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import pytest
from serving import LIMIT_S, ServerProcess, serving_process
from whole import wait_until

HAPROXY = shutil.which("haproxy")
pytestmark = [
    pytest.mark.haproxy,
    pytest.mark.skipif(HAPROXY is None, reason="no program haproxy: apt install haproxy"),
]

FILE = Path(__file__).parent.parent / "docs" / "haproxy.cfg"
DEMO = "demo:autoregressive"
CHAT = "/v1/chat/completions"
FLAGS = ("--context", "2048", "--host-memory", "24MiB")


class Site(NamedTuple):
    url: str
    servers: list[ServerProcess]
    stats: Path

    def state(self) -> dict[str, str]:
        """UP or DOWN, by the names of servers."""
        with socket.socket(socket.AF_UNIX) as asked:
            asked.connect(str(self.stats))
            asked.sendall(b"show stat\n")
            table = b"".join(iter(lambda: asked.recv(65536), b"")).decode()
        rows = [row.split(",") for row in table.splitlines() if row.startswith("engines,")]
        return {row[1]: row[17] for row in rows if row[1] != "BACKEND"}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def site(folder: Path) -> Iterator[Site]:
    """Two servers behind the documented file, of which addresses alone are changed."""
    with ExitStack() as stack:
        servers = [stack.enter_context(serving_process(DEMO, *FLAGS)) for _ in range(2)]
        addresses = iter(urlsplit(url).netloc for _, url, _ in servers)
        port, stats = free_port(), folder / "stats"
        text = FILE.read_text().replace("127.0.0.1:8080", f"127.0.0.1:{port}")
        text = re.sub(r"192\.0\.2\.\d+:8000", lambda _: next(addresses), text)
        text = text.replace("global\n", f"global\n  stats socket {stats}\n", 1)
        (folder / "haproxy.cfg").write_text(text)
        process = subprocess.Popen([str(HAPROXY), "-f", folder / "haproxy.cfg", "-db"])
        stack.callback(process.wait, LIMIT_S)
        stack.callback(process.terminate)
        found = Site(f"http://127.0.0.1:{port}", servers, stats)
        wait_until(lambda: stats.exists() and set(found.state().values()) == {"UP"})
        yield found


def messages(texts: list[str], system: str | None) -> list[dict[str, Any]]:
    """A conversation, some of whose contents are parts, as agents send them."""
    roles = itertools.cycle(("user", "assistant"))
    made: list[dict[str, Any]] = [
        {"role": role, "content": text if len(text) % 2 else [{"type": "text", "text": text}]}
        for role, text in zip(roles, texts, strict=False)
    ]
    return made if system is None else [{"role": "system", "content": system}, *made]


def check_conversation(asked: httpx.Client, number: int, system: str | None, pad: str) -> None:
    """Every turn takes over all but what is new."""
    texts, num_before = list[str](), 0
    for turn in range(6):
        texts.append(f"Sort {number + 10} {turn + 20} 31 14{pad}")
        body = {"messages": messages(texts, system), "temperature": 0, "max_tokens": 12}
        answer = asked.post(CHAT, json=body).json()
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        if turn >= 2:  # short beginnings are not kept
            assert cached >= num_before, (turn, usage)
        num_before = usage["prompt_tokens"]
        texts.append(answer["choices"][0]["message"]["content"])


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("haproxy")) as found:
        yield found


@pytest.mark.parametrize("system", [None, "You sort numbers."])
def test_conversations_stay_without_any_header(running: Site, system: str | None) -> None:
    """Also where all have the same system prompt: they are spread over both servers."""
    with httpx.Client(base_url=running.url, timeout=LIMIT_S) as asked:
        for number in range(6):
            check_conversation(asked, number + 10 * (system is None), system, "")
    counts = []
    for _, url, _ in running.servers:
        with httpx.Client(base_url=url, timeout=LIMIT_S) as asked:
            counts.append(asked.get("/v1/lowtide/stats").json()["forwards"])
    assert min(counts) > 0


def where(asked: httpx.Client, servers: list[str], **request: Any) -> int:
    """Return the index of the server that a request reaches, by its own count of passes."""

    def counts() -> list[int]:
        return [httpx.get(f"{url}/v1/lowtide/stats").json()["forwards"] for url in servers]

    before = counts()
    reply = asked.post(**request)
    assert reply.status_code == 200, reply.text
    [place] = [
        place for place, (new, old) in enumerate(zip(counts(), before, strict=True)) if new != old
    ]
    return place


@pytest.mark.parametrize(
    "name", ["x-session-id", "x-claude-code-session-id", "session-id", "session_id"]
)
def test_headers_come_before_bodies(running: Site, name: str) -> None:
    servers = [url for _, url, _ in running.servers]
    with httpx.Client(base_url=running.url, timeout=LIMIT_S) as asked:
        found = set()
        for session in range(8):
            places = {
                where(
                    asked,
                    servers,
                    url=CHAT,
                    headers={name: f"{session}"},
                    json={"messages": messages([f"{n} + {session}"], None), "max_tokens": 2},
                )
                for n in range(2)
            }
            assert len(places) == 1
            found |= places
    assert found == {0, 1}


@pytest.mark.parametrize("kind", ["prompt_cache_key", "user_id"])
def test_what_bodies_say_comes_before_their_words(running: Site, kind: str) -> None:
    servers, found = [url for _, url, _ in running.servers], set()
    with httpx.Client(base_url=running.url, timeout=LIMIT_S) as asked:
        for number in range(8):
            key = f"key {number}"
            said = (
                {"prompt_cache_key": key} if kind != "user_id" else {"metadata": {"user_id": key}}
            )
            places = {
                where(
                    asked,
                    servers,
                    url=CHAT,
                    json={"messages": messages([text], None), "max_tokens": 2, **said},
                )
                for text in ("1 + 2", "30 + 4")
            }
            assert len(places) == 1
            found |= places
    assert found == {0, 1}


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("has_parts", [False, True])
def test_input_items_stay_by_the_first_of_the_user(
    running: Site, role: str, has_parts: bool
) -> None:
    """An item that all conversations begin with sends none to a server of its own choice."""
    servers, found = [url for _, url, _ in running.servers], set()

    def item(role: str, text: str) -> dict[str, Any]:
        parts = [{"type": "input_text", "text": text}]
        return {"role": role, "content": parts if has_parts else text}

    with httpx.Client(base_url=running.url, timeout=LIMIT_S) as asked:
        for number in range(8):
            items = [item(role, "You sort numbers."), item("user", f"{number} + 5")]
            places = {
                where(
                    asked,
                    servers,
                    url="/v1/responses",
                    json={"input": [*items, *more], "max_output_tokens": 2},
                )
                for more in ([], [item("assistant", "7"), item("user", "8 + 9")])
            }
            assert len(places) == 1
            found |= places
    assert found == {0, 1}


def test_an_empty_header_or_key_is_none(running: Site) -> None:
    servers = [url for _, url, _ in running.servers]
    with httpx.Client(base_url=running.url, timeout=LIMIT_S) as asked:
        found = {
            where(
                asked,
                servers,
                url=CHAT,
                headers={"x-session-id": ""},
                json={
                    "messages": messages([f"{number} + 3"], None),
                    "prompt_cache_key": "",
                    "max_tokens": 2,
                },
            )
            for number in range(8)
        }
    assert found == {0, 1}


def test_a_large_body_is_looked_at_whole(running: Site) -> None:
    """300 kB of tools before the message that tells whose the conversation is."""
    servers = [url for _, url, _ in running.servers]
    with httpx.Client(base_url=running.url, timeout=LIMIT_S) as asked:
        for number in range(4):
            body = {
                "user": "x" * 300_000,
                "messages": messages([f"{number} + 7"], None),
                "max_tokens": 2,
            }
            text = json.dumps(body)
            assert len(text) > 300_000
            places = {where(asked, servers, url=CHAT, content=text) for _ in range(3)}
            assert len(places) == 1


def test_a_server_that_ends_gets_nothing_new_and_finishes_its_streams(tmp_path: Path) -> None:
    body = {"prompt": "Sort 9 8", "max_tokens": 600, "ignore_eos": True, "stream": True}

    async def stream(asked: httpx.AsyncClient, number: int) -> str:
        headers = {"x-session-id": str(number)}
        async with asked.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
            return "".join([part async for part in reply.aiter_text()])

    async def run(found: Site) -> tuple[list[str], list[int]]:
        async with httpx.AsyncClient(base_url=found.url, timeout=LIMIT_S) as asked:
            streams = [asyncio.create_task(stream(asked, number)) for number in range(8)]
            await asyncio.sleep(0.5)
            found.servers[0].process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(wait_until, lambda: found.state()["a"].startswith("DOWN"))
            new = [
                asked.post(CHAT, json={"messages": messages([f"{n} + 1"], None), "max_tokens": 4})
                for n in range(20)
            ]
            statuses = [reply.status_code for reply in await asyncio.gather(*new)]
            return await asyncio.gather(*streams), statuses

    with site(tmp_path) as found:
        streams, statuses = asyncio.run(run(found))
    assert statuses == [200] * 20
    assert all(each.rstrip().endswith("[DONE]") for each in streams)
