"""Replicas of a model under Ray Serve; each runs the server's own app on its own engine.

    # serve run mine:served
    from lowtide.serve.ray import app

    served = app("org/name", settings={"api_key": "..."}, replicas=3)

A conversation stays with the replica that has its KV cache, found by the headers that agents send.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from typing import Any

from ray import cloudpickle, serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from starlette.types import ASGIApp

from lowtide.async_llm import AsyncLLM
from lowtide.errors import UsageError
from lowtide.serve.app import build_app
from lowtide.serve.ray_share import share_of, with_own_cores
from lowtide.serve.service import SHUTDOWN_S, Service
from lowtide.serve.settings import ServeSettings

SESSION_HEADERS = (
    b"x-session-id",
    b"x-claude-code-session-id",  # Claude Code
    b"session-id",  # Codex
    b"session_id",
    b"x-session-affinity",  # opencode
)
"""Headers that identify a conversation; the first one present is used."""

SPARE_REQUESTS = 64
"""Requests passed to an engine beyond its queue: the engine refuses them, with a time to wait."""

_HEALTH_PERIOD_S = 5.0

_log = logging.getLogger("ray.serve")


class SessionRouter(ConsistentHashRouter):  # type: ignore[misc]  # Ray has no types
    """Sends a conversation's requests to one replica, other requests to each in turn."""

    def initialize_state(self, **options: Any) -> None:
        super().initialize_state(**options)
        self._turn = itertools.count()
        self._has_told = False

    def _routing_key(self, pending_request: Any) -> str | None:
        return session_of(pending_request)

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """Rank the replicas for a request; a replica that refuses it is followed by the next."""
        if not candidate_replicas or session_of(pending_request) is not None:
            chosen: list[list[Any]] = await super().choose_replicas(
                candidate_replicas, pending_request
            )
            return chosen
        if pending_request is not None and not self._has_told:
            self._has_told = True
            names = ", ".join(name.decode() for name in SESSION_HEADERS)
            _log.warning(
                "A request has no header of a conversation (%s): such requests go to each replica "
                "in turn, and a conversation's next turn may be computed again.",
                names,
            )
        first = next(self._turn) % len(candidate_replicas)
        ranked = sorted(candidate_replicas, key=lambda each: each.replica_id.unique_id)
        return [[each] for each in ranked[first:] + ranked[:first]]


def session_of(pending_request: Any) -> str | None:
    """Return the conversation that a request of Ray's HTTP proxy belongs to, or None if unnamed.

    The proxy passes headers to a router only in its own first argument, whose scope is a private
    field of Ray's (tests/test_ray.py fails if that moves).
    """
    if pending_request is None or not pending_request.args:
        return None
    first = pending_request.args[0]
    if isinstance(first, bytes):  # what the proxy of this cluster has packed for the replica
        first = cloudpickle.loads(first)
    scope = getattr(first, "_asgi_scope", None)
    headers = dict(scope["headers"]) if scope else {}
    found = next(filter(None, map(headers.get, SESSION_HEADERS)), None)
    return None if found is None else found.decode("latin-1")


@serve.deployment
@serve.ingress()
class Replica:
    """One engine with the server's app."""

    def __init__(self, model: str, options: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        self._llm = AsyncLLM(model, **with_own_cores(options))
        self._service = Service(self._llm, ServeSettings(**settings))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return build_app(self._service)

    async def check_health(self) -> None:
        """Raise RuntimeError once the engine has ended, so that Ray starts another replica."""
        if self._service.state == "ended":
            raise RuntimeError("The engine has ended.")

    async def __del__(self) -> None:
        # The app's lifespan has drained it before.
        await self._llm.close()


def app(
    model: str,
    options: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    replicas: int | None = None,
    autoscaling: Mapping[str, Any] | None = None,
    cores: int | None = None,
    memory: str | int | None = None,
) -> serve.Application:
    """Return a Ray Serve application for `serve run` or `serve.run`.

    model, options: as for `LLM`; every node must find the model.
    settings: fields of `ServeSettings`; each replica checks access itself.
    replicas: one by default. autoscaling: Ray's `AutoscalingConfig` instead.
    cores, memory: of each replica, by default all of the smallest node. memory is the whole
    process's, such as `"12GiB"`.

    Raises UsageError or PlanError if no node can hold the model.
    """
    if replicas is not None and autoscaling is not None:
        raise UsageError("replicas and autoscaling: give one of them.")
    given = dict(settings or {})
    checked = ServeSettings(**given)
    share = share_of(model, options or {}, cores, memory)
    scaling: dict[str, Any] = {"num_replicas": replicas or 1}
    if autoscaling is not None:
        scaling = {"autoscaling_config": AutoscalingConfig(**autoscaling)}
    deployment = Replica.options(  # type: ignore[attr-defined]
        **scaling,
        # Refusals are the engine's: Ray's own have no form that clients know.
        max_ongoing_requests=checked.max_requests + SPARE_REQUESTS,
        max_queued_requests=-1,
        graceful_shutdown_timeout_s=checked.request_timeout_s + SHUTDOWN_S,
        health_check_period_s=_HEALTH_PERIOD_S,
        ray_actor_options={"num_cpus": share.num_cpus, "memory": share.memory_bytes},
        request_router_config=RequestRouterConfig(request_router_class=SessionRouter),
    )
    bound: serve.Application = deployment.bind(model, share.options, given)
    return bound
