"""Request bodies: JSON of bounded size, parsed without blocking the event loop.

Whatever holds Python's interpreter lock blocks the event loop, even from another thread. So values
are counted before they are parsed. A small body is parsed on the loop, a large one in a thread, by
a parser that releases the lock.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from lowtide.parsing.call_json import NotFinite, parse_json

MAX_VALUES = 250_000

SMALL_BYTES = 16 << 10
"""Bodies up to this size are parsed on the loop: starting a thread would take longer."""

_CHUNK_BYTES = 64 << 10


class JsonRoute(APIRoute):
    """A route that reads bounded JSON: `APIRouter(route_class=JsonRoute)`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            read = _JsonRequest(request.scope, request.receive)
            await read.read_as(self)
            return await handle(read)

        return handle_json


class _JsonRequest(Request):
    """A request whose body is parsed and validated before FastAPI handles it.

    FastAPI would do both on the loop. It accepts values that already have the right type.
    """

    _value: Any = None

    async def read_as(self, route: APIRoute) -> None:
        """Parse and validate the body. Raise HTTPException or the body's own errors."""
        try:
            body = await self.body()
        except ClientDisconnect:
            raise HTTPException(400, "The body did not come whole.") from None
        if not body or route.body_field is None:
            return
        if len(body) <= SMALL_BYTES:
            self._value = _checked(body, route)
        else:
            self._value = await asyncio.to_thread(_checked, body, route)

    async def json(self) -> Any:
        return self._value


def _checked(body: bytes, route: APIRoute) -> Any:
    """Parse a body and return the validated value for the route."""
    value = parse_body(body)
    if route.body_field is None:
        return value
    found, faults = route.body_field.validate(value, {}, loc=("body",))
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
        raise HTTPException(400, f"The body is not valid JSON: {str(error)[:200]}.") from None


def count_values(body: bytes, most: int) -> int:
    """Count the values of JSON in UTF-8, stopping above `most`."""
    num_values, in_string, last, place = 1, False, b"", 0
    while place < len(body) and num_values <= most:
        end = place + _CHUNK_BYTES
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
