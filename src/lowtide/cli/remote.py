"""`lowtide chat --url`: a conversation with a server of OpenAI's chat API."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from http.client import (
    HTTPConnection,
    HTTPException,
    HTTPResponse,
    HTTPSConnection,
    IncompleteRead,
)
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

from lowtide.cli.conversation import ChatIO, Dialogue
from lowtide.cli.line_editor import without_echo
from lowtide.cli.screen import printable
from lowtide.cli.text import TextWriter
from lowtide.cli.turns import Turns
from lowtide.errors import UsageError
from lowtide.params import DiffusionParams, SamplingParams, field_names

KEYS = ("LOWTIDE_API_KEY", "OPENAI_API_KEY")
"""Environment variables for the server's key; the first one set is used."""

_TIMEOUT_S = 600.0  # without a byte: a long prompt may take its time
_MAX_BYTES = 1 << 20  # of a line, or of an answer that is not a stream

_NOT_SENT = ("n", "logprobs")  # a conversation has one answer, and shows no probabilities

SENT = tuple(
    name for name in field_names(SamplingParams) if name not in (*_NOT_SENT, "stop", "diffusion")
)
"""Fields sent if they are set, besides `stop` and the diffusion parameters."""


class Delta(NamedTuple):
    """A piece of an answer; `reason` is set on the last one."""

    text: str
    thoughts: str
    reason: str | None
    usage: Mapping[str, Any]


class Server:
    """Client of one server; each request opens its own connection."""

    def __init__(self, url: str, key: str | None = None) -> None:
        """Raises UsageError for a bad address or key."""
        parts = _address(url)
        if key is not None and not (key.isascii() and key.isprintable()):
            raise UsageError(f"The key in {' or '.join(KEYS)} must be printable ASCII.")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._place = parts.netloc.rpartition("@")[2]
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def models(self) -> list[str]:
        """List the server's models. Raises UsageError."""
        with self._asked("GET", "/models") as response:
            listed = self._object(response.read(_MAX_BYTES)).get("data")
        if not isinstance(listed, list):
            raise UsageError(f"{self.url} lists no models; is it a server with OpenAI's API?")
        return [str(each["id"]) for each in listed if isinstance(each, dict) and "id" in each]

    def answer(self, body: Mapping[str, object]) -> Generator[Delta, None, None]:
        """Yield an answer as it comes; closing the generator stops it. Raises UsageError."""
        with self._asked("POST", "/chat/completions", body) as response:
            yield from self._deltas(response)

    @contextmanager
    def _asked(
        self, method: str, path: str, body: Mapping[str, object] | None = None
    ) -> Iterator[HTTPResponse]:
        """Send a request and yield its response.

        Raises UsageError for a failed connection, an error status or a broken answer.
        """
        sent, told = None if body is None else json.dumps(body).encode(), ""
        with closing(self._kind(self._place, timeout=_TIMEOUT_S)) as connection:
            try:
                connection.request(method, self._path + path, sent, self._headers)
                response = connection.getresponse()
                if response.status != 200:
                    told = self._error_text(response.read(_MAX_BYTES))
            except (OSError, HTTPException, UnicodeError) as error:
                raise UsageError(
                    f"{self.url} cannot be reached: {_reason(error)}. `lowtide serve MODEL` starts "
                    "a server."
                ) from None
            if response.status != 200:
                way_out = f" Its key goes into {KEYS[0]}." if response.status == 401 else ""
                raise UsageError(f"{self.url} answers {response.status}: {told}.{way_out}")
            try:
                with response:
                    yield response
            except (OSError, HTTPException) as error:
                raise UsageError(
                    f"{self.url} broke off its answer: {_reason(error)}. Ask again; the server's "
                    "log may say more."
                ) from None

    def _deltas(self, response: HTTPResponse) -> Iterator[Delta]:
        is_whole = False
        while line := response.readline(_MAX_BYTES):
            name, _, value = line.partition(b":")
            if name != b"data" or not value.strip():
                continue
            if value.strip() == b"[DONE]":
                return
            chunk = self._object(value)
            if "error" in chunk:
                raise UsageError(f"{self.url}: {self._error_text(value)}.")
            delta = _delta(chunk)
            is_whole |= delta.reason is not None
            yield delta
        if not is_whole:  # without a length, a broken connection looks like an end
            raise IncompleteRead(b"")

    def _object(self, text: bytes) -> dict[str, Any]:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise UsageError(
                f"{self.url} does not answer with a JSON object, as a server with OpenAI's API "
                f"does, but with {text[:80]!r}."
            )
        return found

    def _error_text(self, text: bytes) -> str:
        """Extract the message of an error."""
        try:
            found = self._object(text).get("error")
        except UsageError:
            found = text.decode(errors="replace")
        if isinstance(found, dict):
            found = found.get("message")
        return printable(str(found)[:500]).rstrip(".")


class RemoteDialogue(Dialogue):
    """Conversation with a model of a server; statistics are of the last answer."""

    def __init__(
        self, server: Server, model: str, params: SamplingParams, turns: Turns, io: ChatIO
    ) -> None:
        super().__init__(params, turns, io)
        self._server = server
        self._model = model
        self._last = "nothing yet"
        self._say(f"{model} of {server.url}")

    def _names(self) -> Sequence[str]:
        return (*SENT, "stop", *field_names(DiffusionParams))

    def _in_force(self, params: SamplingParams) -> SamplingParams:
        """Return `params` unchanged: the server's defaults are not known here."""
        return params

    def _answer(self, line: str) -> None:
        writer = TextWriter(self._out.file, True, self._out.is_terminal)
        start_s = time.perf_counter()
        reason: str | None = None
        usage: Mapping[str, Any] = {}
        try:
            with without_echo(), closing(self._server.answer(self._body(line))) as deltas:
                for delta in deltas:
                    writer.commit((), delta.text, delta.thoughts)
                    reason, usage = delta.reason or reason, delta.usage or usage
        except KeyboardInterrupt:
            return self._keep_stopped(line, writer.text)
        writer.finish(writer.text)
        self._turns.add(line, writer.text)
        self._note(reason, usage, time.perf_counter() - start_s)

    def _note(self, reason: str | None, usage: Mapping[str, Any], seconds: float) -> None:
        num_new = usage.get("completion_tokens")
        if isinstance(num_new, int):
            self._last = f"{num_new} tokens in {seconds:.1f} s"
            if self._out.is_terminal:
                self._say(self._last)
        if reason == "length":
            self._say("(cut: the server's limit, or the one set)")

    def _show_stats(self) -> None:
        self._say(self._last)

    def _body(self, line: str) -> dict[str, object]:
        unset = SamplingParams()
        given = {name: getattr(self._params, name) for name in SENT}
        blocks = asdict(self._params.diffusion)
        more: dict[str, object] = {
            "stop": list(self._params.stop_strings),
            "diffusion": {name: value for name, value in blocks.items() if value is not None},
            "chat_template_kwargs": self._turns.template_options,
        }
        return {
            "model": self._model,
            "messages": self._turns.prompt_with(line),
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: value for name, value in given.items() if value != getattr(unset, name)},
            **{name: value for name, value in more.items() if value},
        }


def _address(url: str) -> SplitResult:
    """Parse an address. Raises UsageError."""
    with suppress(ValueError):  # a bad port or bracket
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts
    raise UsageError(f"--url is a server's address such as http://localhost:8000, not {url!r}.")


def _reason(error: Exception) -> str:
    """Describe a failed connection or a broken answer."""
    if isinstance(error, TimeoutError):
        return f"nothing came for {_TIMEOUT_S:g} s"
    if isinstance(error, IncompleteRead):
        return "the connection was closed"
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


def server_at(url: str) -> Server:
    """Return the server at an address, with the environment's key. Raises UsageError."""
    return Server(url, next(filter(None, map(os.environ.get, KEYS)), None))


def chosen_model(server: Server, model: str | None) -> str:
    """Return the named model, or the server's only one. Raises UsageError."""
    names = server.models()
    if model is None and len(names) == 1:
        return names[0]
    if model is None or model not in names:
        listed = ", ".join(names[:20]) or "none"
        raise UsageError(f"Name one of the models of {server.url}: {listed}.")
    return model


def _delta(chunk: Mapping[str, Any]) -> Delta:
    choices = chunk.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else {}
    delta = choice.get("delta") if isinstance(choice, dict) else None
    delta = delta if isinstance(delta, dict) else {}
    thoughts = delta.get("reasoning_content") or delta.get("reasoning")
    usage = chunk.get("usage")
    return Delta(
        str(delta.get("content") or ""),
        str(thoughts or ""),
        choice.get("finish_reason") if isinstance(choice, dict) else None,
        usage if isinstance(usage, dict) else {},
    )
