"""Responses that end when their client goes: event streams and whole answers.

async def respond(pieces: AsyncGenerator[Piece, None]) -> Response:
    return EventStream(_events(pieces), ping)

return WatchedAnswer(service.answer(ask), respond)
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, Generic, TypeVar

from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

T = TypeVar("T")

PING_S = 10.0
"""Silence after which a stream sends a ping: less than any client or proxy waits."""

compact_json = json.JSONEncoder(separators=(",", ":")).encode
"""A value's text without spaces; `json.dumps` would make such an encoder in each call."""

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class WatchedAnswer(Response, Generic[T]):
    """A response made from pieces while its client is connected.

    If the client goes, the response is cancelled and the pieces are closed. respond: called with
    the pieces once the first has come, so that an earlier refusal still gets an HTTP status.
    """

    def __init__(
        self,
        pieces: AsyncGenerator[T, None],
        respond: Callable[[AsyncGenerator[T, None]], Awaitable[Response]],
    ) -> None:
        super().__init__()
        self._pieces = pieces
        self._respond = respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_gone(receive, self._made_and_sent(scope, receive, send))

    async def _made_and_sent(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._pieces) as pieces:
            response = await self._respond(await begun(pieces))
            await response(scope, receive, send)


class EventStream(StreamingResponse):
    """Streams parts as they come, with pings during silence.

    Closes the parts at the end, or when the client goes. ping: makes the bytes sent after a
    silence, always between two parts.
    """

    def __init__(
        self,
        parts: AsyncGenerator[bytes, None],
        ping: Callable[[], bytes],
        media_type: str = "text/event-stream",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(parts, media_type=media_type, headers={**_HEADERS, **(headers or {})})
        self._parts = parts
        self._ping = ping
        self._turn = asyncio.Lock()  # to send
        self._sent_s = time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A ping that cannot be made ends the stream at once: silence would end its client later.
        async with aclosing(self._parts), asyncio.TaskGroup() as group:
            pinging = group.create_task(self._break_silences(send))
            with suppress(OSError):  # the client has gone
                await self.stream_response(partial(self._send, send))
            pinging.cancel()

    async def _send(self, send: Send, message: Message) -> None:
        async with self._turn:
            await send(message)
            self._sent_s = time.monotonic()

    async def _break_silences(self, send: Send) -> None:
        # A task beside the parts: one that waits for each part costs a token three turns of the
        # event loop more, and with each of them the interpreter's lock.
        while True:
            await asyncio.sleep(self._sent_s + PING_S - time.monotonic())
            async with self._turn:
                if time.monotonic() - self._sent_s >= PING_S:
                    part = {"type": "http.response.body", "body": self._ping(), "more_body": True}
                    with suppress(OSError):
                        await send(part)
                    self._sent_s = time.monotonic()


def event(data: Mapping[str, Any] | str, name: str | None = None) -> bytes:
    """Encode one server-sent event: JSON, or a plain text (`[DONE]`)."""
    text = data if isinstance(data, str) else compact_json(data)
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {text}\n\n".encode()


async def begun(pieces: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """Wait for the first piece, raising its error here; then return all pieces."""
    first = await anext(pieces)

    async def all_of_them() -> AsyncGenerator[T, None]:
        async with aclosing(pieces):
            yield first
            async for piece in pieces:
                yield piece

    return all_of_them()


async def until_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` until it ends or the client disconnects; raise its errors."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
