"""How an answer leaves that a `Writer` puts into one API's form: streamed, or whole."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from starlette.responses import Response

from lowtide.files.long_json import has_few_values, write_json
from lowtide.parsing.pieces import Done, Piece, Prefilled
from lowtide.serve.errors import Refusal, refusal_of
from lowtide.serve.service import Ask, Service
from lowtide.serve.sse import EventStream, WatchedAnswer, compact_json, event

PROGRESS_S = 1.0
"""At most so often a stream says how far its prompt is."""

JsonObject = dict[str, Any]


class Writer(Protocol):
    """Puts one answer into an API's form. The first piece that it is given is a `Prefilled`."""

    def take(self, piece: Piece) -> Sequence[JsonObject]:
        """What is to be sent of a piece."""
        ...

    def ping(self) -> JsonObject:
        """What is sent in place of silence."""
        ...

    def failed(self, refusal: Refusal) -> JsonObject:
        """What is sent last of an answer that cannot be completed."""
        ...

    def whole(self) -> JsonObject:
        """The answer that is not streamed, after its last piece."""
        ...


def answered(
    service: Service,
    is_streamed: bool | None,
    ask: Ask,
    writer: Writer,
    headers: Mapping[str, str],
    encode: Callable[[JsonObject], bytes] | None = None,
    media_type: str = "text/event-stream",
) -> Response:
    """An answer as it is written, by default as events that are named by their `type`; or whole."""
    encoded = encode or _named_event

    async def respond(pieces: AsyncGenerator[Piece, None]) -> Response:
        if is_streamed:
            parts, told = _parts(pieces, writer, encoded), {**headers, **ask.disclosed}
            return EventStream(parts, lambda: encoded(writer.ping()), media_type, told)
        async for piece in pieces:
            writer.take(piece)
        body, told = await _written(writer.whole()), {**headers, **ask.disclosed}
        return Response(body, headers=told, media_type="application/json")

    return WatchedAnswer(service.answer(ask), respond)


def json_response(value: JsonObject, headers: Mapping[str, str] | None = None) -> Response:
    """ASCII alone: what a request sent and is sent back may be no valid Unicode."""
    return Response(json.dumps(value), headers=headers, media_type="application/json")


def json_line(value: JsonObject) -> bytes:
    """A line of NDJSON."""
    return compact_json(value).encode() + b"\n"


def _named_event(value: JsonObject) -> bytes:
    return event(value, value["type"])


async def _parts(
    pieces: AsyncGenerator[Piece, None],
    writer: Writer,
    encode: Callable[[JsonObject], bytes],
) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(pieces):
            sent_s = time.monotonic()
            async for piece in pieces:
                for each in _sent(writer, piece, time.monotonic() - sent_s):
                    if encode is _named_event and isinstance(piece, Prefilled | Done):
                        yield event(await _written(each), each["type"])
                    else:
                        yield encode(each)
                    sent_s = time.monotonic()
    except Exception as error:
        yield encode(writer.failed(refusal_of(error)))


async def _written(value: JsonObject) -> str:
    """Its JSON, ASCII alone. A response repeats what was asked, which may be as long as any body:
    then a thread writes it.
    """
    if has_few_values(value):
        return json.dumps(value)
    return await asyncio.to_thread(write_json, value)


def _sent(writer: Writer, piece: Piece, silent_s: float) -> Sequence[JsonObject]:
    """What a stream sends of a piece after so long a silence."""
    sent = writer.take(piece)
    if isinstance(piece, Prefilled) and not sent and silent_s >= PROGRESS_S:
        return [writer.ping()]
    return sent
