"""The page at `/` and its files: static, open without a key, and the same on every machine.

What the page shows of a model it asks for itself, with the key if there is one. `serve/static/` has
ES modules and no third party's code; the browser runs them as they are.
"""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from lowtide.serve.json_body import JsonRoute
from lowtide.serve.markdown import MAX_CHARS, nodes_of
from lowtide.serve.reply import json_response

_FOLDER = Path(__file__).parent / "static"

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

# Scripts can make no HTML of texts: no part of an answer is ever parsed as a page.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)

HEADERS = {
    "content-security-policy": _POLICY,
    "cache-control": "no-cache",  # asked for again, and answered by 304
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "vary": "accept-encoding",
    "x-content-type-options": "nosniff",
}


class PageFile(NamedTuple):
    """A file of the page, as it is and gzipped."""

    media_type: str
    body: bytes
    packed: bytes
    etag: str


@cache
def page_files() -> Mapping[str, PageFile]:
    """Return the page's files by their path at the server."""
    files = {}
    for path in sorted(_FOLDER.iterdir()):
        if path.suffix in _TYPES:
            body = path.read_bytes()
            packed = gzip.compress(body, mtime=0)
            name = "/" if path.name == "index.html" else f"/static/{path.name}"
            etag = f'"{sha256(body).hexdigest()[:16]}"'
            files[name] = PageFile(_TYPES[path.suffix], body, packed, etag)
    return files


class MarkdownBody(BaseModel):
    """A text to render, the whole of an answer or some paragraphs of it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: str = Field(max_length=MAX_CHARS)


def router_of() -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    for path, found in page_files().items():
        router.add_api_route(path, _endpoint(found), include_in_schema=False)
    turn = asyncio.Lock()  # rendering holds the interpreter: one text at a time

    @router.post("/v1/lowtide/markdown")
    async def markdown(body: MarkdownBody) -> Response:
        """Render markdown as a tree of elements."""
        async with turn:
            return json_response({"nodes": await asyncio.to_thread(nodes_of, body.text)})

    return router


def _endpoint(found: PageFile) -> Callable[[Request], Awaitable[Response]]:
    async def page_file(request: Request) -> Response:
        """Serve a file of the page, gzipped where the client takes that."""
        headers = HEADERS | {"etag": found.etag}
        if found.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return Response(found.body, headers=headers, media_type=found.media_type)
        headers["content-encoding"] = "gzip"
        return Response(found.packed, headers=headers, media_type=found.media_type)

    return page_file
