"""How answers leave: streams of events, and whole ones; both end what they asked when their client
goes.

    pieces = await begun(service.answer(ask))  # what is refused is refused before any header
    return EventStream(_events(with_pings(pieces)))
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

PING_S = 10.0
"""Silence after which a stream sends a ping: less than any client or proxy waits."""

CLIENT_GONE = 499
"""The status of an answer that has no reader any more, as nginx has it."""

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def event(data: Mapping[str, Any] | str, name: str | None = None) -> bytes:
    """One event of a stream: JSON, or a text as it is (`[DONE]`)."""
    text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {text}\n\n".encode()


async def begun(pieces: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """The same pieces, once the first is there: what is refused raises here, while a status can
    still be sent."""
    first = await anext(pieces)

    async def all_of_them() -> AsyncGenerator[T, None]:
        async with aclosing(pieces):
            yield first
            async for piece in pieces:
                yield piece

    return all_of_them()


async def with_pings(
    pieces: AsyncGenerator[T, None], silence_s: float | None = None
) -> AsyncGenerator[T | None, None]:
    """The pieces as they come, and None whenever none came for `silence_s` (`PING_S`)."""
    silence_s = PING_S if silence_s is None else silence_s
    coming: asyncio.Future[T] | None = None
    async with aclosing(pieces):
        try:
            while True:
                coming = coming or asyncio.ensure_future(anext(pieces))
                await asyncio.wait({coming}, timeout=silence_s)
                if not coming.done():
                    yield None
                    continue
                try:
                    piece = coming.result()
                except StopAsyncIteration:
                    return
                coming = None
                yield piece
        finally:
            if coming is not None and not coming.done():
                coming.cancel()
                with suppress(asyncio.CancelledError, StopAsyncIteration):
                    await coming


class EventStream(StreamingResponse):
    """Parts as they come, until there are no more or the client goes; then they are closed."""

    def __init__(
        self,
        parts: AsyncGenerator[bytes, None],
        media_type: str = "text/event-stream",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(parts, media_type=media_type, headers={**_HEADERS, **(headers or {})})
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_gone(receive, self._sent(send))

    async def _sent(self, send: Send) -> None:
        async with aclosing(self._parts):
            with suppress(OSError):  # the client has gone
                await self.stream_response(send)


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` returns or raises; None if the client goes first, and the work is cancelled."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
