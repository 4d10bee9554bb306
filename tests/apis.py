"""The server's APIs by their paths: how each is asked, and how its answers and errors are read.

An API that is added gets a row in `APIS`, and `test_contract_api.py` holds it to what all promise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

Json = Any


class Api(NamedTuple):
    ask: Callable[[str, int], Json]  # a greedy request: what is said, and the tokens at most
    text_of: Callable[[Json], str]  # of a whole answer
    text_in: Callable[[Json], str]  # of one event of a stream
    is_raw: bool = False  # the words are the prompt, without a chat template


def said(text: str) -> list[Json]:
    return [{"role": "user", "content": text}]


def _chat(text: str, max_tokens: int) -> Json:
    return {"messages": said(text), "max_tokens": max_tokens, "temperature": 0}


def _chat_delta(event: Json) -> str:
    return "".join(each["delta"].get("content") or "" for each in event["choices"])


def _response_text(answer: Json) -> str:
    parts = [part for item in answer["output"] for part in item.get("content", ())]
    return "".join(part["text"] for part in parts if part["type"] == "output_text")


def _response_delta(event: Json) -> str:
    return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""


def _message_delta(event: Json) -> str:
    delta = event.get("delta", {}) if event["type"] == "content_block_delta" else {}
    return str(delta.get("text", ""))


def _of_ollama(max_tokens: int) -> Json:
    return {"model": "model", "options": {"num_predict": max_tokens, "temperature": 0}}


APIS: Mapping[str, Api] = {
    "/v1/completions": Api(
        lambda text, most: {"prompt": text, "max_tokens": most, "temperature": 0},
        lambda answer: str(answer["choices"][0]["text"]),
        lambda event: "".join(each["text"] for each in event["choices"]),
        is_raw=True,
    ),
    "/v1/chat/completions": Api(
        _chat, lambda answer: str(answer["choices"][0]["message"]["content"]), _chat_delta
    ),
    "/v1/responses": Api(
        lambda text, most: {"input": text, "max_output_tokens": most, "temperature": 0},
        _response_text,
        _response_delta,
    ),
    "/v1/messages": Api(
        _chat,
        lambda answer: "".join(part.get("text", "") for part in answer["content"]),
        _message_delta,
    ),
    "/api/chat": Api(
        lambda text, most: {**_of_ollama(most), "messages": said(text)},
        lambda answer: str(answer["message"]["content"]),
        lambda event: str(event["message"]["content"]),
    ),
    "/api/generate": Api(
        lambda text, most: {**_of_ollama(most), "prompt": text},
        lambda answer: str(answer["response"]),
        lambda event: str(event["response"]),
    ),
}


def events_of(stream: str) -> list[Json]:
    """Of server-sent events, or of lines of JSON."""
    lines = stream.splitlines()
    if any(line.startswith("data: ") for line in lines):
        lines = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line.strip() and line != "[DONE]"]


def check_error(path: str, body: Json) -> str:
    """Check a refusal, in the form of the API that a path belongs to; return what it says."""
    error = body["error"]
    if path.startswith("/api/") and path != "/api/hello":
        assert set(body) == {"error"} and isinstance(error, str) and error
        return error
    if path.startswith(("/v1/messages", "/api/hello")):
        assert set(body) == {"type", "error"} and body["type"] == "error"
        assert set(error) == {"type", "message"}
    else:
        assert set(body) == {"error"} and set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"] and error["type"]
    return error["message"]


def told_failure(path: str, text: str) -> str:
    """Return the message of an answer that failed: the whole of it, or a stream's last event."""
    found = json.loads(text.strip().split("\n")[-1].removeprefix("data: "))
    message: Json = found["error"] if "error" in found else found["response"]["error"]
    if path.startswith("/api/"):
        assert set(found) == {"error"}
        return str(message)
    if path == "/v1/messages":
        assert found["type"] == "error" and message["type"] == "api_error"
    elif "error" not in found:
        assert found["type"] == "response.failed"
    return str(message["message"])
