"""Errors as answers in the form of each API.

Exceptions raised below a route become an HTTP status and a body here. Once a stream has begun,
`body_of` makes its error event.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response

from lowtide.errors import LowtideError, PageError, PlanError, UnsupportedError, UsageError
from lowtide.option import in_words
from lowtide.serve import no_such_path
from lowtide.serve.request_log import LIMIT, note_refusal

_log = logging.getLogger(__name__)

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    431: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


_FIELDS: Mapping[str, Mapping[str, str]] = {
    "/v1/completions": {"messages": "prompt"},
    "/v1/responses": {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
    },
    "/v1/messages": {"response_format": "output_config.format"},
    "/api/chat": {"max_tokens": "options.num_predict", "response_format": "format"},
    "/api/generate": {
        "messages": "prompt",
        "max_tokens": "options.num_predict",
        "response_format": "format",
    },
}
"""Fields of `/v1/chat/completions` that another path calls differently."""


@dataclass(eq=False)
class Refusal(Exception):
    """An error answer: HTTP status, message and machine-readable fields.

    kind: OpenAI's error type. param: the field at fault. code: for programs.
    """

    message: str
    status: int = 400
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None

    def __str__(self) -> str:
        return self.message

    @property
    def headers(self) -> dict[str, str]:
        if self.status == 501:  # clients ask again at any status from 500 on
            return {"x-should-retry": "false"}
        return {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}


class TooLong(Refusal):
    """The prompt leaves no room in the context for the requested answer.

    is_counted: False if counting stopped early, so `num_prompt` is a lower bound.
    """

    def __init__(
        self, num_prompt: int, num_new: int, context: int, is_counted: bool = True
    ) -> None:
        least = "" if is_counted else "at least "
        super().__init__(
            f"This model's maximum context length is {context} tokens. However, you requested "
            f"{least}{num_prompt + num_new} tokens ({num_prompt} in the messages, {num_new} in the "
            "completion). Please reduce the length of the messages or completion.",
            param="messages",
            code="context_length_exceeded",
        )
        self.num_prompt, self.num_new, self.context = num_prompt, num_new, context

    @property
    def anthropic_message(self) -> str:
        return f"prompt is too long: {self.num_prompt} tokens > {self.context} maximum"


class UnclearLength(Refusal):
    """The request states its length twice; a proxy in front may have read another body."""

    def __init__(self) -> None:
        super().__init__("Content-Length and Transfer-Encoding exclude each other; leave one out.")

    @property
    def headers(self) -> dict[str, str]:
        return {"connection": "close"}  # what comes next may be the rest of it


class NoEmbeddings(Refusal):
    """Embeddings are not supported."""

    def __init__(self) -> None:
        super().__init__(
            "Embeddings are not supported; give this client another server for them.",
            501,
            "not_supported_error",
            code="unsupported",
        )


class QueueFull(Refusal):
    """Too many requests are waiting."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message, 429, "rate_limit_error", None, "queue_full", retry_after_s)


class Draining(Refusal):
    """The server is shutting down."""

    def __init__(self) -> None:
        super().__init__(
            "The server is shutting down.", 503, "server_error", None, "draining", retry_after_s=5
        )


class TimedOut(Refusal):
    """The answer took longer than `--request-timeout`."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(
            f"The answer was not complete after {limit_s:g} s, the server's --request-timeout.",
            504,
            "timeout_error",
            code="timeout",
        )


def refusal_of(error: BaseException) -> Refusal:
    """Turn any exception into a Refusal; log it if the request is not at fault."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, HTTPException):
        return Refusal(str(error.detail), error.status_code)
    if isinstance(error, UnsupportedError):
        return Refusal(str(error), code="unsupported")
    if isinstance(error, UsageError | PlanError) and not isinstance(error, PageError):
        return Refusal(str(error))
    if LIMIT.allows(f"Failed requests ({type(error).__name__})"):
        _log.error("A request failed: %s: %s", type(error).__name__, error, exc_info=error)
    if isinstance(error, LowtideError):
        return Refusal(str(error), 500, "server_error", code=type(error).__name__)
    return Refusal("The server failed on this request.", 500, "server_error")


def body_of(refusal: Refusal, path: str) -> dict[str, Any]:
    """Return the error's JSON in the form, and with the fields, of `path`'s API."""
    fields = _FIELDS.get(path, {})
    message = in_words(refusal.message, {name: f"`{field}`" for name, field in fields.items()})
    if path.startswith("/api/") and path != "/api/hello":
        return {"error": message}
    if path.startswith(("/v1/messages", "/api/hello")):
        if isinstance(refusal, TooLong) and refusal.num_prompt >= refusal.context:
            message = refusal.anthropic_message
        kind = _ANTHROPIC_TYPES.get(refusal.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    param = _param_at(refusal, path)
    named = {"message": message, "type": refusal.kind}
    return {"error": {**named, "param": param, "code": refusal.code}}


def _param_at(refusal: Refusal, path: str) -> str | None:
    """Return what `path` calls the field at fault."""
    return refusal.param and _FIELDS.get(path, {}).get(refusal.param, refusal.param)


def response_of(error: BaseException, path: str) -> Response:
    """Return the error answer of a request of which nothing has been sent yet."""
    refusal = refusal_of(error)
    note_refusal(refusal.code or refusal.kind, _param_at(refusal, path))
    # ASCII: a name that a request sent and is told of may be no valid Unicode.
    body = json.dumps(body_of(refusal, path))
    return Response(body, refusal.status, refusal.headers, media_type="application/json")


def add_handlers(app: FastAPI) -> None:
    """Make the app answer every error, unknown paths included, in its API's form."""
    for kind in (Refusal, LowtideError, Exception):
        app.add_exception_handler(kind, _handle)
    app.add_exception_handler(RequestValidationError, _handle_invalid)
    app.add_exception_handler(HTTPException, _handle)


def _handle(request: Request, error: Exception) -> Response:
    path, address = request.url.path, str(request.base_url).rstrip("/")
    allowed = None
    if isinstance(error, HTTPException) and error.status_code == 404:
        error = Refusal(no_such_path.unknown_path_message(path, address), 404, code="not_found")
    elif isinstance(error, HTTPException) and error.status_code == 405:
        allowed = Headers(error.headers).get("allow")
        way_out = f"send {allowed or 'another method'}"
        error = Refusal(f"{request.method:.80} is not answered here; {way_out}.", 405)
    response = response_of(error, path)
    if allowed is not None:
        response.headers["allow"] = allowed
    return response


def _handle_invalid(request: Request, error: Exception) -> Response:
    """Answer a body that failed validation by naming its first wrong field."""
    faults: list[Mapping[str, Any]] = list(error.errors())  # type: ignore[attr-defined]
    body: object = error.body  # type: ignore[attr-defined]
    fault = _fitting(faults, body)
    where = ".".join(map(str, _place(fault, body)))
    if fault["type"] == "json_invalid":
        refusal = Refusal("The body is not valid JSON.")
    elif not where:
        refusal = Refusal("The body must be a JSON object.")
    elif fault["type"] == "extra_forbidden":
        refusal = Refusal(
            f"{where} is not supported; leave it out.", param=where, code="unsupported"
        )
    else:
        refusal = Refusal(f"{where}: {fault['msg']}", param=where)
    return response_of(refusal, request.url.path)


def _fitting(faults: Sequence[Mapping[str, Any]], body: object) -> Mapping[str, Any]:
    """Choose one of pydantic's faults to report, all of the first wrong field.

    A union yields a fault for each member: prefer the member of the value's own type, else the
    innermost fault.
    """
    of_field = [fault for fault in faults if fault["loc"][:2] == faults[0]["loc"][:2]]
    of_kind = [fault for fault in of_field if not _is_of_another_kind(fault)]
    return of_kind[0] if of_kind else max(of_field, key=lambda fault: len(_place(fault, body)))


def _is_of_another_kind(fault: Mapping[str, Any]) -> bool:
    is_word = isinstance(fault["input"], str)
    return fault["type"].endswith("_type") or (fault["type"] == "literal_error" and not is_word)


def _place(fault: Mapping[str, Any], body: object) -> list[str | int]:
    """Return the keys that lead to a fault; pydantic's own path also names union members."""
    place: list[str | int] = []
    _, *keys = fault["loc"]
    for key in keys:
        is_missing = fault["type"] == "missing" and key == keys[-1]
        if isinstance(body, Mapping) and (key in body or is_missing or not place):
            body = body.get(key)
        elif isinstance(body, list) and isinstance(key, int) and key < len(body):
            body = body[key]
        else:
            continue
        place.append(key)
    return place
