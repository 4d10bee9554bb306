"""The ASGI app: all routes over one service, without globals or signal handlers.

app = build_app(Service(llm, ServeSettings()))
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, FastAPI, Response
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from lowtide.files.json_file import as_json
from lowtide.serve import (
    anthropic_messages,
    events,
    ollama,
    openai_chat,
    openai_completions,
    page,
    responses,
)
from lowtide.serve.errors import NoEmbeddings, add_handlers
from lowtide.serve.guard import Guard
from lowtide.serve.metrics import Metrics
from lowtide.serve.request_log import RequestLog, note_served
from lowtide.serve.service import Service
from lowtide.version import __version__

_ROUTERS = (openai_chat, openai_completions, responses, anthropic_messages, ollama, events)


def build_app(service: Service, has_one_caller: bool = False) -> FastAPI:
    """Return the server's ASGI app; its lifespan enters `Service.running`.

    has_one_caller: no client is to be kept from taking others' place.
    """
    app = FastAPI(
        title="lowtide",
        version=__version__,
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
        lifespan=lambda _: service.running(),
    )
    add_handlers(app)
    for module in _ROUTERS:
        app.include_router(module.router_of(service))
    app.include_router(page.router_of())
    app.include_router(_models(service))
    app.include_router(_state(service, Metrics(service)))
    origins = list(service.settings.allowed_origins or ())
    if origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(JsonBodies)
    app.add_middleware(
        Guard,
        settings=service.settings,
        open_paths=page.page_files().keys(),
        bounds_sum=not has_one_caller,
    )
    app.add_middleware(RequestLog)
    service.on_served.append(note_served)
    return app


class JsonBodies:
    """Middleware that treats every body as JSON, since `curl -d` labels it a form."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            others = [pair for pair in scope["headers"] if pair[0] != b"content-type"]
            scope = {**scope, "headers": [*others, (b"content-type", b"application/json")]}
        await self._app(scope, receive, send)


def _models(service: Service) -> APIRouter:
    """Make the routes that list the loaded model and refuse embeddings."""
    router = APIRouter()

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the loaded model."""
        return {"object": "list", "data": [_model_object(service)]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """Describe the loaded model. Raise Refusal for another name."""
        service.check_model(name)
        return _model_object(service)

    @router.post("/v1/embeddings")
    async def embeddings() -> Response:
        """Refuse with a reason instead of a plain 404."""
        raise NoEmbeddings

    return router


def _add_health(router: APIRouter, service: Service) -> None:
    """Add the routes that load balancers poll, by GET or by HEAD."""

    @router.head("/health", include_in_schema=False)
    @router.get("/health")
    async def health() -> JSONResponse:
        """Report that the engine accepts work: 503 once it is closed or its thread has failed.

        The body says `ok`, as llama.cpp's server does, because monitors compare it.
        """
        is_alive = service.state != "ended"
        return JSONResponse({"status": "ok" if is_alive else "ended"}, 200 if is_alive else 503)

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready")
    async def ready() -> JSONResponse:
        """Report whether new requests are accepted."""
        state = service.state
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)


def _state(service: Service, metrics: Metrics) -> APIRouter:
    """Make the routes for health, counters, plan and statistics."""
    router = APIRouter()
    _add_health(router, service)

    @router.get("/metrics")
    async def counters() -> Response:
        """Serve counters in Prometheus' format."""
        page = metrics.page(await service.llm.stats())
        return Response(page, media_type="text/plain; version=0.0.4")

    @router.get("/v1/lowtide/plan")
    async def plan() -> JSONResponse:
        """Serve the memory plan."""
        return JSONResponse(as_json(asdict(service.plan)))

    @router.get("/v1/lowtide/stats")
    async def stats() -> JSONResponse:
        """Serve the engine's statistics since loading."""
        return JSONResponse(as_json(await service.llm.stats()))

    return router


def _model_object(service: Service) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "lowtide",
        "max_model_len": service.context,
    }
