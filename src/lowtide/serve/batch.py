"""Answers a batch's lines by the server's own routes, in this process and without a socket.

A line is checked, answered and refused like a request to the server. Lines that run at the same
time share passes.

    async with Answerer(llm, settings) as answerer:
        await answer_all(answerer, lines, pending, results, at_once, stop)
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from starlette.types import ASGIApp, Message

from lowtide.async_llm import AsyncLLM
from lowtide.decode.request import new_caller
from lowtide.errors import InternalError
from lowtide.params import MAX_SEED
from lowtide.progress import Progress
from lowtide.serve.app import build_app
from lowtide.serve.batch_files import ROUTES, Asked, AskedLines, is_error
from lowtide.serve.openai_fields import MAX_ANSWERS, new_id
from lowtide.serve.service import Service
from lowtide.serve.settings import ServeSettings

MAX_AT_ONCE = 256

NUM_TRIES = 3
_RETRIED = (429, 500, 503)
"""Statuses of temporary errors: a full queue, a fault, a busy engine."""

BEGUN_TOGETHER = 32
"""Lines begun together at the start of a batch: their passes begin while other lines are read."""

FINISH_S = 30.0
"""Time that running lines have to finish once a run is stopped."""

_MAX_QUEUED_TOKENS = 2**31 - 1
"""No limit: lines wait in their file, so admission never needs to refuse prompts."""


class Sink(Protocol):
    """Destination of answers: `batch_files.Results`, or standard output."""

    def write(self, custom_id: str, line: bytes, is_error: bool) -> None: ...


def default_at_once(llm: AsyncLLM) -> int:
    """Return the default number of lines that run at once: as many as the context could hold."""
    return max(1, min(MAX_AT_ONCE, llm.plan.context))


class Answerer:
    """The app of one loaded model, made by `answering`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._app: ASGIApp = build_app(service, has_one_caller=True)

    async def answer(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """Answer one checked line of a batch by a line of its output.

        Raises InternalError once the engine has ended, since no line can then be answered.
        """
        made = {"id": new_id("batch_req_"), "custom_id": line["custom_id"]}
        if line["url"] not in ROUTES:
            message = f"{line['url']!r:.80} is not answered in a batch; choose {', '.join(ROUTES)}."
            error = {"code": "invalid_url", "message": message}
            return {**made, "response": None, "error": error}
        request = json.dumps(body_of(line)).encode()
        for number in range(NUM_TRIES):
            self._service.llm.expect(1)
            status, text = await _posted(self._app, line["url"], request)
            if status != 200:  # a refused line brings no request
                self._service.llm.expect(-1)
            if self._service.state == "ended":
                raise InternalError(f"The engine has ended: {_message(text)}")
            if status not in _RETRIED:
                break
            if number < NUM_TRIES - 1:
                await asyncio.sleep(2**number)
        body = json.loads(text)
        response = {"status_code": status, "request_id": new_id("req_"), "body": body}
        failed = {"code": str(status), "message": _message(text)} if status in _RETRIED else None
        return {**made, "response": response, "error": failed}


@asynccontextmanager
async def answering(
    llm: AsyncLLM, served_name: str, at_once: int
) -> AsyncGenerator[Answerer, None]:
    """Provide an answerer for a loaded model, with at most `at_once` lines at a time."""
    settings = ServeSettings(
        served_name=served_name,
        max_requests=at_once * MAX_ANSWERS,
        max_queued_tokens=_MAX_QUEUED_TOKENS,
    )
    # One caller waits for all lines, so their prompts need not leave time for answers.
    service = Service(llm, settings, caller=new_caller())
    async with service.running():
        yield Answerer(service)


def body_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line's request body: not streamed, for the loaded model, and with a seed.

    A missing seed is derived from the line's id, so that an answer does not depend on the run or
    machine.
    """
    body = {name: each for name, each in line["body"].items() if name not in ("model", "stream")}
    if body.get("seed") is None:
        digest = hashlib.sha256(line["custom_id"].encode(errors="surrogatepass")).digest()
        body["seed"] = int.from_bytes(digest[:8], "big") % (MAX_SEED + 1)
    return body


async def answer_all(
    answerer: Answerer,
    lines: AskedLines,
    pending: Sequence[Asked],
    sink: Sink,
    at_once: int,
    stop: asyncio.Event,
    progress: Progress,
) -> None:
    """Answer `pending` in order, and pass each answer to `sink` when it is complete.

    After `stop` no further line begins, and running ones have `FINISH_S`. Raises the errors of
    `sink` and `Answerer.answer`.
    """
    left, num_done = iter(pending), 0

    async def work() -> None:
        nonlocal num_done
        for asked in _until(stop, left):
            answer = await answerer.answer(lines.request(asked))
            # ASCII: a text may hold half a character, which UTF-8 has no bytes for.
            sink.write(asked.custom_id, json.dumps(answer).encode() + b"\n", is_error(answer))
            num_done += 1
            progress("answering", num_done, len(pending))

    try:
        async with asyncio.TaskGroup() as group:
            workers: list[asyncio.Task[None]] = []
            watch = group.create_task(_end_late(stop, workers))
            for number in range(min(at_once, len(pending))):
                workers.append(group.create_task(work()))
                if number % BEGUN_TOGETHER == BEGUN_TOGETHER - 1:
                    await asyncio.sleep(0)
            await asyncio.wait(workers)
            watch.cancel()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def _until(stop: asyncio.Event, left: Iterator[Asked]) -> Iterator[Asked]:
    while not stop.is_set() and (asked := next(left, None)) is not None:
        yield asked


async def _end_late(stop: asyncio.Event, workers: Sequence[asyncio.Task[None]]) -> None:
    await stop.wait()
    await asyncio.sleep(FINISH_S)
    for worker in workers:
        worker.cancel()


async def _posted(app: ASGIApp, path: str, body: bytes) -> tuple[int, bytes]:
    """Send a request to an app as a server would; return status and body."""
    headers = [(b"host", b"localhost"), (b"content-length", str(len(body)).encode())]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": ("localhost", 80),
    }
    asked = [{"type": "http.request", "body": body}]
    sent: list[Message] = []

    async def receive() -> Message:
        return asked.pop() if asked else await asyncio.Future[Message]()  # it never leaves

    async def send(message: Message) -> None:
        sent.append(message)

    try:
        await app(scope, receive, send)
    except Exception:
        if not sent:  # Starlette raises a route's fault again, once it has answered it with 500
            raise
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


def _message(text: bytes) -> str:
    """Extract the message of an error in OpenAI's form."""
    return str(json.loads(text)["error"]["message"])
