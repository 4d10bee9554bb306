"""Ollama's API, as far as its clients need it to talk to the model that is loaded."""

from __future__ import annotations

import hashlib
from typing import Any

from fastapi import APIRouter, Response
from pydantic import Field

from lowtide.model_folder.gguf_file import is_gguf
from lowtide.parsing import has_thoughts
from lowtide.plan import OWN_FORMAT
from lowtide.schemas import model_schema
from lowtide.serve.agent_api import headers_of
from lowtide.serve.errors import NoEmbeddings, Refusal
from lowtide.serve.json_body import JsonRoute
from lowtide.serve.ollama_body import (
    OllamaBody,
    OllamaChatBody,
    OllamaFields,
    OllamaGenerateBody,
)
from lowtide.serve.ollama_lines import OllamaLines, json_line, timestamp
from lowtide.serve.reply import JsonObject, answered, json_response
from lowtide.serve.service import Ask, Service

VERSION = "0.20.0"
"""The version of Ollama's API that is spoken here: editors ask for at least 0.6.4, Codex for at
least 0.13.4."""

NDJSON = "application/x-ndjson"

_NEVER = "2318-01-01T00:00:00Z"
"""When a model that stays loaded expires."""


class OllamaModelBody(OllamaFields):
    """A request about a model, by either of the names that the field has had."""

    model: str = Field("", max_length=512)
    name: str = Field("", max_length=512)
    stream: bool | None = None


def router_of(service: Service) -> APIRouter:
    """The routes of this API."""
    router = APIRouter(route_class=JsonRoute)
    _add_answers(router, service)
    _add_facts(router, service)

    @router.post("/api/pull")
    async def pull(body: OllamaModelBody) -> Response:
        _check_model(service, body.model or body.name)
        if body.stream is False:
            return json_response({"status": "success"})
        lines = (json_line({"status": status}) for status in ("pulling manifest", "success"))
        return Response(b"".join(lines), media_type=NDJSON)

    @router.post("/api/embed")
    @router.post("/api/embeddings")
    async def embed() -> Response:
        raise NoEmbeddings

    return router


def _check_model(service: Service, name: str) -> None:
    """Raises Refusal for another model than is loaded, and where none is named."""
    if not name:
        raise Refusal("The request names no model.", param="model")
    service.check_model(name)


def _add_answers(router: APIRouter, service: Service) -> None:
    @router.post("/api/chat")
    def chat(body: OllamaChatBody) -> Response:
        _check_model(service, body.model)
        conversation = body.conversation()
        ask = body.ask(conversation) if conversation.turns else None
        return _answered(service, body, ask, is_chat=True)

    @router.post("/api/generate")
    def generate(body: OllamaGenerateBody) -> Response:
        _check_model(service, body.model)
        body.check()
        ask = body.asked(service.llm.has_chat_template) if body.prompt else None
        return _answered(service, body, ask, is_chat=False)


def _answered(service: Service, body: OllamaBody, ask: Ask | None, is_chat: bool) -> Response:
    """Where nothing is asked the model is to be loaded, which it is."""
    lines = OllamaLines(service.model_name, is_chat)
    if ask is None:
        return json_response(lines.loaded())
    headers = headers_of(service, service.model_name, body.ignored())
    return answered(service, [ask], lines, body.stream is not False, headers)


def _add_facts(router: APIRouter, service: Service) -> None:
    @router.head("/")
    async def alive() -> Response:
        return Response()

    @router.get("/api/version")
    async def version() -> JsonObject:
        return {"version": VERSION}

    @router.get("/api/tags")
    async def tags() -> JsonObject:
        return {"models": [_model(service)]}

    @router.get("/api/ps")
    async def ps() -> JsonObject:
        plan = service.llm.plan
        gpu_bytes = 0 if plan.gpu is None else plan.gpu.used_bytes
        running = {
            "expires_at": _NEVER,
            "size": plan.host.used_bytes + gpu_bytes,
            "size_vram": gpu_bytes,
            "context_length": service.context,
        }
        return {"models": [_model(service) | running]}

    @router.post("/api/show")
    async def show(body: OllamaModelBody) -> JsonObject:
        _check_model(service, body.model or body.name)
        return {
            "modelfile": f"FROM {service.model_name}",
            "parameters": "",
            "template": "",
            "details": _details(service),
            "model_info": _model_info(service),
            "capabilities": _capabilities(service),
            "modified_at": timestamp(service.created),
        }


def _model(service: Service) -> JsonObject:
    """The model as lists have it. The digest is of its name: none of its bytes are read for it."""
    return {
        "name": service.model_name,
        "model": service.model_name,
        "modified_at": timestamp(service.created),
        "size": service.llm.plan.full_bytes,
        "digest": hashlib.sha256(service.model_name.encode()).hexdigest(),
        "details": _details(service),
    }


def _details(service: Service) -> JsonObject:
    config, formats = service.llm.config, service.llm.plan.formats
    changed = [name for name in (formats.experts, formats.dense) if name != OWN_FORMAT]
    return {
        "parent_model": "",
        "format": "gguf" if is_gguf(service.llm.path) else "safetensors",
        "family": config.family,
        "families": [config.family],
        "parameter_size": parameter_size(_num_parameters(service)),
        "quantization_level": changed[0] if changed else config.dtype,
    }


def _model_info(service: Service) -> dict[str, Any]:
    config = service.llm.config
    info = {
        "context_length": service.context,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "vocab_size": config.vocab_size,
    }
    if config.experts is not None:
        info["expert_count"] = config.experts.num_experts
        info["expert_used_count"] = config.experts.num_experts_per_token
    return {
        "general.architecture": config.family,
        "general.parameter_count": _num_parameters(service),
        **{f"{config.family}.{name}": value for name, value in info.items()},
    }


def parameter_size(num_parameters: int) -> str:
    """As Ollama writes it: `30.5B`, `3.8M`."""
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if num_parameters >= unit:
            return f"{num_parameters / unit:.1f}{name}"
    return str(num_parameters)


def _num_parameters(service: Service) -> int:
    schema = model_schema(service.llm.config)
    return schema.dense_elements + schema.expert_elements


def _capabilities(service: Service) -> list[str]:
    tokenizer = service.llm.tokenizer
    if tokenizer is None:
        return ["completion"]
    tools = ["tools"] if tokenizer.template_names("tools") else []
    return ["completion", *tools, *(["thinking"] if has_thoughts(tokenizer) else [])]
