"""`GET /v1/lowtide/events`: the running engine as a stream, for a page that shows it.

The first event, `model`, has what does not change; each `state` is the present moment. Nothing is
computed while there is no listener. A listener is not a request: it takes no place in the queue.
"""

from __future__ import annotations

import asyncio
import time
from base64 import b64encode
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import numpy as np
from fastapi import APIRouter, Response

from lowtide.core import BoolArray, IntArray
from lowtide.engine.running.watching import Look
from lowtide.errors import LowtideError
from lowtide.option import Kind, options_of
from lowtide.params import DiffusionParams, SamplingParams
from lowtide.plan import MemoryPlan
from lowtide.serve.binding import binding_of
from lowtide.serve.errors import Refusal
from lowtide.serve.reply import JsonObject
from lowtide.serve.service import Service
from lowtide.serve.sse import EventStream, WatchedAnswer, event

EVENT_S = 0.1
"""Least time between two events."""

SILENCE_S = 1.0
"""Longest silence while nothing changes: only writing shows that a listener has gone."""

MAX_LISTENERS = 8

_PING = b": still here\n\n"

RECENT_EVENTS = 50
"""Events over whose passes the share of waiting is taken."""

_HIDDEN = ("seed", "n", "logprobs", "ignore_eos")
"""Numbers of an answer that are not settings of a conversation, or have a place of their own."""


def router_of(service: Service) -> APIRouter:
    router = APIRouter()
    listeners = Listeners(service)

    @router.get("/v1/lowtide/events", include_in_schema=False)  # which knows no endless answer
    async def events() -> Response:
        """Stream the engine's state until the listener goes or the server shuts down."""
        return WatchedAnswer(listeners.events(), _respond)

    return router


async def _respond(events: AsyncGenerator[bytes, None]) -> Response:
    return EventStream(events, lambda: _PING)


class Listeners:
    """Listeners to events, each with a state of its own."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.num_listening = 0

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield events, at most one in each `EVENT_S`, when something has changed.

        An event is made when the one before it was taken: what a slow listener has not read is
        left out. Raises Refusal if too many listen.
        """
        if self.num_listening >= MAX_LISTENERS:
            raise Refusal(
                f"{MAX_LISTENERS} listen to events already, the most that may; close another page.",
                429,
                "rate_limit_error",
                code="too_many_listeners",
                retry_after_s=10,
            )
        self.num_listening += 1
        service, last, told_s = self._service, None, 0.0
        try:
            with service.llm.watched() as look:
                changes = _StateChanges(service)
                yield event(model_facts(service), "model")
                while True:
                    state = changes.state(look())
                    if state != last:
                        yield event(state, "state")
                        last, told_s = {**state, "hits": ""}, time.monotonic()
                    elif time.monotonic() - told_s >= SILENCE_S:
                        yield _PING
                        told_s = time.monotonic()
                    if service.state != "ready":
                        return
                    await asyncio.sleep(EVENT_S)
        finally:
            self.num_listening -= 1


class _StateChanges:
    """The state last sent to one listener, from which the next event's changes are counted."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._num_tokens: IntArray | None = None
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT_EVENTS)

    def state(self, look: Look) -> JsonObject:
        """Return a `state` event."""
        admission, experts = self._service.admission, look.experts
        before = self._num_tokens
        hits = experts.num_tokens - (0 if before is None else before)
        self._num_tokens = experts.num_tokens
        moment = look.counts["generation_s"], experts.wait_s
        if not self._recent or self._recent[-1] != moment:
            self._recent.append(moment)
        seconds, wait_s = np.subtract(self._recent[-1], self._recent[0]).tolist()
        binding = binding_of(self._service.plan, wait_s / seconds if seconds > 0 else None)
        return {
            "state": self._service.state,
            "queue": {"running": admission.num_running, "waiting": admission.num_waiting},
            "residents": {name: bitmap(each) for name, each in experts.residents.items()},
            "hits": counts(hits) if hits.any() else "",
            "memory": {name: tier._asdict() for name, tier in look.memory.items()},
            "counts": {
                "tokens": look.counts["committed_tokens"],
                "forwards": look.counts["forwards"],
                "seconds": round(look.counts["generation_s"], 4),
                "read_bytes": experts.read_bytes,
                "hits": experts.num_hits,
                "misses": experts.num_misses,
            },
            "binding": binding._asdict(),
        }


def bitmap(is_set: BoolArray) -> str:
    """Encode booleans, row by row and the first in a byte's highest bit, in base64."""
    return b64encode(np.packbits(is_set).tobytes()).decode()


def counts(numbers: IntArray) -> str:
    """Encode counts, row by row in a byte each, at most 255, in base64."""
    return b64encode(np.minimum(numbers, 255).astype(np.uint8).tobytes()).decode()


def model_facts(service: Service) -> JsonObject:
    """Return the `model` event: what a loaded model is and was planned to be."""
    llm, plan = service.llm, service.llm.plan
    config, decoding = llm.config, llm.config.decoding
    return {
        "model": service.model_name,
        "architecture": config.architecture,
        "is_diffusion": not decoding.writes_in_order,
        "context": service.context,
        "layers": list(config.moe_layers),
        "num_experts": config.moe_shape.num_experts,
        "device": plan.device,
        "policy": plan.policy,
        "formats": str(plan.formats),
        "predicted": _predicted(plan),
        "settings": _settings(service),
    }


def _predicted(plan: MemoryPlan) -> JsonObject | None:
    speed = None if plan.prediction is None else plan.prediction.speed
    return None if speed is None else speed._asdict()


def _settings(service: Service) -> list[JsonObject]:
    """Return the numbers that an answer of this model may ask for, with their declarations."""
    llm = service.llm
    try:
        in_force = llm.params_in_force(SamplingParams())
    except LowtideError:  # a model whose own defaults need more than that: shown without them
        in_force = SamplingParams()
    defaults: Mapping[str, Any] = {
        name: getattr(owner, name)
        for owner in (in_force.diffusion, in_force)
        for name in owner.__dataclass_fields__
    }
    of_diffusion = {option.keyword for option in options_of(DiffusionParams)}
    return [
        {
            "name": option.keyword,
            "help": option.help,
            "is_integer": option.kind is Kind.INTEGER,
            "low": option.low,
            "high": option.high,
            "default": defaults[option.keyword],
            "is_diffusion": option.keyword in of_diffusion,
        }
        for option in (*options_of(SamplingParams), *options_of(DiffusionParams))
        if option.keyword in llm.answer_fields
        and option.kind in (Kind.INTEGER, Kind.NUMBER)
        and option.keyword not in _HIDDEN
    ]
