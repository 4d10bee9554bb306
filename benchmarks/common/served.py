"""A server in a process of its own, and clients of this process that ask it over the loopback.

Any server of OpenAI's `/v1/completions` will do; `stats` are lowtide's alone.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx
import numpy as np
import psutil

from lowtide.errors import InternalError

START_S, END_S = 300.0, 60.0
ASK_S = 60.0
"""Time limit of requests other than a model's answer."""

Body = Mapping[str, Any]
BodyOf = Callable[[int], Body]
Look = Callable[[], float]

NUM_STRETCHES = 3
"""Parts of a load, so that a range can be given."""


class Server(NamedTuple):
    """A server's address and process."""

    url: str
    process: psutil.Process

    @property
    def resident_bytes(self) -> int:
        return int(self.process.memory_info().rss)

    def stats(self) -> dict[str, float]:
        """The engine's counters since it was loaded."""
        found: dict[str, float] = _get(f"{self.url}/v1/lowtide/stats").json()
        return found


@contextmanager
def serving(*arguments: str) -> Iterator[Server]:
    """`python -m ARGUMENTS --port N`, once it answers. Raises InternalError if it ends first."""
    port = _free_port()
    command = [sys.executable, "-m", *arguments, "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_for(url, process)
            yield Server(url, psutil.Process(process.pid))
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        if process.poll() is not None:
            raise InternalError(f"The server ended with status {process.returncode} (see above).")
        try:
            _get(f"{url}/v1/models")
            return
        except httpx.TransportError:
            time.sleep(0.1)
    raise InternalError(f"The server did not answer within {START_S:g} s.")


def _get(url: str) -> httpx.Response:
    return httpx.get(url, timeout=ASK_S, trust_env=False)


def _free_port() -> int:
    """Below those that Linux by default gives to clients, so that none takes it meanwhile."""
    for port in random.sample(range(20_000, 30_000), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise InternalError("None of 100 ports of the loopback is free.")


@dataclass
class Reply:
    """An answer as it came.

    times_s: of its tokens, as far as they have a text of their own, since it was asked for at
    `start_s`. refused_s: after how long to ask again, if it was refused for now. usage: None while
    it has no end.
    """

    start_s: float = 0.0
    times_s: list[float] = field(default_factory=list)
    refused_s: float | None = None
    usage: Mapping[str, Any] | None = None
    token_ids: Sequence[int] = ()

    @property
    def num_cached(self) -> int:
        return int((self.usage or {})["prompt_tokens_details"]["cached_tokens"])


class Client:
    """One client that asks for one answer at a time."""

    def __init__(self, url: str) -> None:
        self._runner = asyncio.Runner()
        self._http = _http(url)

    def ask(self, body: Body) -> Reply:
        """The whole answer. Raises InternalError for one that fails or is refused."""
        reply = Reply()
        self._runner.run(_ask(self._http, body, reply))
        if reply.refused_s is not None:
            raise InternalError("A single client was refused.")
        return reply

    def close(self) -> None:
        self._runner.run(self._http.aclose())
        self._runner.close()


class Stretch(NamedTuple):
    """A third of a load: tokens that came, and by how much what was looked at grew."""

    seconds: float
    num_tokens: int
    growth: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


class Load(NamedTuple):
    """Replies to `num_clients` clients, each asking again as soon as it was answered."""

    num_clients: int
    replies: Sequence[Reply]
    stretches: Sequence[Stretch]

    @property
    def tokens_per_s(self) -> float:
        return float(np.median([stretch.tokens_per_s for stretch in self.stretches]))

    @property
    def num_refused(self) -> int:
        return sum(reply.refused_s is not None for reply in self.replies)

    def as_dict(self) -> dict[str, Any]:
        """Tokens per second, and how long was waited by all requests and all tokens."""
        begun = [reply for reply in self.replies if reply.times_s]
        whole = [reply.usage for reply in self.replies if reply.usage is not None]
        gaps = np.concatenate([np.diff(reply.times_s) for reply in begun] or [[]])
        lengths = [usage["prompt_tokens"] for usage in whole]
        return {
            "clients": self.num_clients,
            "tokens_per_s": self.tokens_per_s,
            "each_tokens_per_s": [round(each.tokens_per_s, 2) for each in self.stretches],
            **_percentiles("first_s", [reply.times_s[0] for reply in begun]),
            **_percentiles("token_s", gaps),
            "num_whole": len(whole),
            "num_without_token": len(self.replies) - len(begun) - self.num_refused,
            "num_refused": self.num_refused,
            "prompt_tokens": float(np.mean(lengths)) if lengths else None,
        }


def load_with(
    url: str, num_clients: int, seconds: float, body_of: BodyOf, look: Look = float
) -> Load:
    """Clients for so long; what is under way then is left.

    body_of: the request of a number; look: what is noted after each third.
    Raises InternalError for an answer that fails.
    """
    return asyncio.run(_load(url, num_clients, seconds, body_of, look))


async def _load(url: str, num_clients: int, seconds: float, body_of: BodyOf, look: Look) -> Load:
    replies: list[Reply] = []
    numbers = itertools.count()

    async def ask_on() -> None:
        while True:
            reply = Reply()
            replies.append(reply)
            await _ask(http, body_of(next(numbers)), reply)
            if reply.refused_s is not None:
                await asyncio.sleep(reply.refused_s)

    async with _http(url) as http:
        marks = [await _mark(look)]
        clients = [asyncio.create_task(ask_on()) for _ in range(num_clients)]
        try:
            for _ in range(NUM_STRETCHES):
                failed, _ = await asyncio.wait(
                    clients, timeout=seconds / NUM_STRETCHES, return_when=asyncio.FIRST_EXCEPTION
                )
                for client in failed:
                    client.result()
                marks.append(await _mark(look))
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
    return Load(num_clients, replies, split_stretches(replies, marks))


async def _mark(look: Look) -> tuple[float, float]:
    looked = await asyncio.to_thread(look)
    return time.perf_counter(), looked


def split_stretches(
    replies: Sequence[Reply], marks: Sequence[tuple[float, float]]
) -> Sequence[Stretch]:
    arrivals = [reply.start_s + time_s for reply in replies for time_s in reply.times_s]
    counts, _ = np.histogram(arrivals, [now_s for now_s, _ in marks])
    return [
        Stretch(end_s - start_s, int(count), after - before)
        for ((start_s, before), (end_s, after)), count in zip(
            itertools.pairwise(marks), counts, strict=True
        )
    ]


async def _ask(http: httpx.AsyncClient, body: Body, reply: Reply) -> None:
    """Fills the reply as it comes."""
    reply.start_s = time.perf_counter()
    async with http.stream("POST", "/v1/completions", json=dict(body)) as answer:
        if answer.status_code == 429:
            reply.refused_s = float(answer.headers["retry-after"])
            return
        if answer.status_code != 200:
            told = (await answer.aread()).decode(errors="replace")
            raise InternalError(f"The server answered {answer.status_code}: {told:.500}")
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                take(json.loads(line[6:]), time.perf_counter() - reply.start_s, reply)


def take(chunk: Mapping[str, Any], now_s: float, reply: Reply) -> None:
    if "error" in chunk:
        raise InternalError(f"An answer failed: {chunk['error']}")
    reply.usage = chunk.get("usage") or reply.usage
    for choice in chunk["choices"]:
        if choice["text"]:
            reply.times_s.append(now_s)
        reply.token_ids = choice.get("token_ids") or reply.token_ids


def _http(url: str) -> httpx.AsyncClient:
    """Waits as long as it takes, and for as many answers at once as there are clients."""
    return httpx.AsyncClient(base_url=url, timeout=None, limits=httpx.Limits(), trust_env=False)


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float | None]:
    return {
        f"{name}_p{percent}": float(np.percentile(values, percent)) if len(values) else None
        for percent in (50, 99)
    }
