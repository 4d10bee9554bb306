"""How a request's body is parsed: JSON whose numbers are finite, so that every answer which repeats
a part of it is JSON, too."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from lowtide.parsing.call_json import NotFinite, parse_json


class JsonRoute(APIRoute):
    """A route with such a body: `APIRouter(route_class=JsonRoute)`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return handle_json


class _JsonRequest(Request):
    async def json(self) -> Any:
        """Raises HTTPException: FastAPI hands on no other error of a body that it reads."""
        try:
            return parse_json(await self.body())
        except NotFinite as error:
            raise HTTPException(
                400, f"The body is not valid JSON: {error}; leave it out or send null."
            ) from None
