"""Request bodies: JSON of bounded size, parsed without blocking the event loop.

Whatever holds Python's interpreter lock blocks the event loop, even from another thread. So values
are counted before they are parsed. A small body is parsed on the loop, a large one in a thread, by
a parser that releases the lock.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi._compat import ModelField
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from lowtide.files.json_file import fault_of
from lowtide.parsing.call_json import NotFinite, parse_json

T = TypeVar("T")

MAX_VALUES = 250_000

SMALL_BYTES = 16 << 10
"""Bodies up to this size are handled on the loop: starting a thread would take longer."""

CHUNK_BYTES = 64 << 10


class JsonRoute(APIRoute):
    """A route that reads bounded JSON: `APIRouter(route_class=JsonRoute)`.

    An endpoint that is not a coroutine is called with the parsed body alone; if the body is large,
    in the thread that parses it.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle, field = super().get_route_handler(), self.body_field
        is_coroutine = inspect.iscoroutinefunction(self.endpoint)

        def response(body: bytes) -> Response:
            made: Response = self.endpoint(_checked(body, field))
            return made

        async def handle_json(request: Request) -> Response:
            read = _JsonRequest(request.scope, request.receive)
            body = await read.whole()
            if not body or field is None:
                return await handle(read)
            if not is_coroutine:
                return await _beside_loop(body, response)
            read.value = await _beside_loop(body, partial(_checked, field=field))
            return await handle(read)

        return handle_json


class _JsonRequest(Request):
    """A request whose body is parsed and validated before FastAPI handles it.

    FastAPI would do both on the loop. It accepts values that already have the right type.
    """

    value: Any = None

    async def whole(self) -> bytes:
        """Return the body once it is there. Raise HTTPException."""
        try:
            return await self.body()
        except ClientDisconnect:
            raise HTTPException(400, "The body did not come whole.") from None

    async def json(self) -> Any:
        return self.value


async def _beside_loop(body: bytes, work: Callable[[bytes], T]) -> T:
    """Handle a body, in a thread unless it is small."""
    if len(body) <= SMALL_BYTES:
        return work(body)
    return await asyncio.to_thread(work, body)


def _checked(body: bytes, field: ModelField | None) -> Any:
    """Parse a body and return the validated value for the route.

    Raises HTTPException, RequestValidationError or the body's own errors.
    """
    value = parse_body(body)
    if field is None:
        return value
    found, faults = field.validate(value, {}, loc=("body",))
    if faults:
        raise RequestValidationError(faults, body=value)
    return found


def parse_body(body: bytes) -> Any:
    """Parse JSON. Raise HTTPException or RequestValidationError."""
    try:
        encoding = json.detect_encoding(body)
        if not encoding.startswith("utf-8"):
            body = body.decode(encoding).encode()
        if count_values(body, MAX_VALUES) > MAX_VALUES:
            raise HTTPException(413, f"The body has more than {MAX_VALUES} JSON values.")
        return parse_json(body)
    except NotFinite as error:
        raise HTTPException(
            400, f"The body is not valid JSON: {error}; leave it out or send null."
        ) from None
    except RecursionError:
        raise HTTPException(400, "The body is nested too deeply; make it flatter.") from None
    except json.JSONDecodeError as error:
        fault = {"type": "json_invalid", "loc": ("body", error.pos), "msg": error.msg, "input": {}}
        raise RequestValidationError([fault]) from None
    except ValueError as error:  # no text in UTF-8, or an integer of very many digits
        raise HTTPException(400, f"The body is not valid JSON: {fault_of(error)[:200]}.") from None


def count_values(body: bytes, most: int) -> int:
    """Count the values of JSON in UTF-8, stopping above `most`."""
    num_values, in_string, last, place = 1, False, b"", 0
    while place < len(body) and num_values <= most:
        end = place + CHUNK_BYTES
        chunk = body[place:end]
        if (len(chunk) - len(chunk.rstrip(b"\\"))) % 2:  # an escape stays whole
            chunk = body[place : end + 1]
        place += len(chunk)
        parts = chunk.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        parts[not in_string :: 2] = [b""] * len(parts[not in_string :: 2])
        # Quotes stay, so that a list of one text does not look empty.
        outside = last + b'"'.join(parts).translate(None, b" \t\r\n")
        in_string ^= len(parts) % 2 == 0
        num_values += sum(outside.count(mark, len(last)) for mark in (b",", b"[", b"{"))
        num_values -= outside.count(b"[]") + outside.count(b"{}")
        last = outside[-1:]
    return num_values
