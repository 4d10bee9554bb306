"""Replies: pieces of answers in one API's form, sent as a stream or whole.

    def create_message(body: MessagesBody) -> Response:
        return answered(service, [ask], MessageReply(model), body.stream)

Each API has one `Reply`; its `frames` says what is sent for each kind of piece.
"""

from __future__ import annotations

import abc
import asyncio
import json
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response

from lowtide.files.long_json import has_few_values, write_json
from lowtide.parsing.pieces import Done, Piece, Prefilled
from lowtide.serve.errors import Refusal, refusal_of
from lowtide.serve.service import Ask, Service
from lowtide.serve.sse import EventStream, WatchedAnswer, event

PROGRESS_S = 1.0
"""Least time between two pings that report progress with a prompt."""

JsonObject = dict[str, Any]

T = TypeVar("T")


class Reply(abc.ABC):
    """Builds the answers to one request in an API's form.

    Each answer's first piece is a `Prefilled`. media_type: of a stream. has_named_events: True if
    events are named by their frame's `type`.
    """

    media_type = "text/event-stream"
    has_named_events = True

    async def prepare(self) -> None:  # noqa: B027
        """Compute anything needed before the first frame."""

    def opening(self) -> Iterable[JsonObject]:
        """Return the frames that begin a stream."""
        return ()

    @abc.abstractmethod
    def frames(self, piece: Piece, index: int = 0) -> Iterable[JsonObject]:
        """Return the frames of one piece. index: number of its answer, if there are several."""

    @abc.abstractmethod
    def ping(self) -> JsonObject:
        """Return the frame sent during silence."""

    @abc.abstractmethod
    def failed(self, refusal: Refusal) -> JsonObject:
        """Return the last frame of a stream that failed."""

    def ending(self) -> Iterable[bytes]:
        """Return bytes that follow the last frame of a complete stream."""
        return ()

    def keep(self, piece: Piece, index: int = 0) -> None:
        """Collect a piece of an answer that is not streamed."""
        for _ in self.frames(piece, index):
            pass

    @abc.abstractmethod
    def whole(self) -> JsonObject:
        """Return the complete answer from all collected pieces."""

    def encode(self, frame: JsonObject) -> bytes:
        """Encode a frame for a stream."""
        return event(frame, frame["type"] if self.has_named_events else None)


def answered(
    service: Service,
    asks: Sequence[Ask],
    reply: Reply,
    is_streamed: bool | None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Start all answers, and send the reply once the first piece is there."""

    def all_headers() -> dict[str, str]:  # an ask's are complete with its first piece
        disclosed = {name: text for ask in asks for name, text in ask.disclosed.items()}
        return {**(headers or {}), **disclosed}

    async def respond(pieces: AsyncGenerator[tuple[int, Piece], None]) -> Response:
        if is_streamed:
            parts = _streamed(pieces, reply, any(ask.wants_progress for ask in asks))
            ping = lambda: reply.encode(reply.ping())  # noqa: E731
            return EventStream(parts, ping, reply.media_type, all_headers())
        await reply.prepare()
        async for index, piece in pieces:
            reply.keep(piece, index)
        body = await _written(reply.whole())
        return Response(body, headers=all_headers(), media_type="application/json")

    answers = [service.answer(ask, is_whole=not is_streamed) for ask in asks]
    return WatchedAnswer(merged(answers), respond)


async def _streamed(
    pieces: AsyncGenerator[tuple[int, Piece], None], reply: Reply, has_progress: bool
) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(pieces):
            await reply.prepare()
            for frame in reply.opening():
                yield reply.encode(frame)
            sent_s = time.monotonic()
            async for index, piece in pieces:
                is_due = has_progress and time.monotonic() - sent_s >= PROGRESS_S
                for frame in _frames(reply, piece, index, is_due):
                    if reply.has_named_events and isinstance(piece, Prefilled | Done):
                        # These may repeat the request, which may be as long as any body.
                        yield event(await _written(frame), frame["type"])
                    else:
                        yield reply.encode(frame)
                    sent_s = time.monotonic()
    except Exception as error:
        yield reply.encode(reply.failed(refusal_of(error)))
        return
    for end in reply.ending():
        yield end


def _frames(reply: Reply, piece: Piece, index: int, is_due: bool) -> Sequence[JsonObject]:
    """Return a piece's frames. is_due: report progress by a ping if the piece has no frame."""
    frames = list(reply.frames(piece, index))
    return frames or ([reply.ping()] if is_due and isinstance(piece, Prefilled) else [])


async def _written(value: JsonObject) -> str:
    """Encode JSON as ASCII, in a thread if it is long."""
    if has_few_values(value):
        return json.dumps(value)
    return await asyncio.to_thread(write_json, value)


def json_response(value: JsonObject, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response in ASCII: a request's text, sent back, may be invalid Unicode."""
    return Response(json.dumps(value), headers=headers, media_type="application/json")


async def merged(
    sources: Sequence[AsyncGenerator[T, None]],
) -> AsyncGenerator[tuple[int, T], None]:
    """Yield the items of all sources as they come, each with its source's index.

    If one source fails, the others are closed.
    """
    if len(sources) == 1:
        async with aclosing(sources[0]) as source:
            async for item in source:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue()

    async def pump(index: int, source: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(source):
                async for item in source:
                    queue.put_nowait((index, item))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.ensure_future(pump(index, source)) for index, source in enumerate(sources)]
    try:
        num_left = len(tasks)
        while num_left:
            found = await queue.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                num_left -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
