"""The APIs' own clients and failures: they try again where that may help, and raise where not.

They raise errors of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest
from scripted_serving import ScriptedService, done, listening
from serving import Running, serving, talking_folder

from lowtide import AsyncLLM
from lowtide.errors import StorageError
from lowtide.parsing.pieces import Piece, Text
from lowtide.serve.errors import QueueFull
from lowtide.serve.service import Ask

SAID: list[Any] = [{"role": "user", "content": "x"}]


class FullOnce(ScriptedService):
    """Its queue is full when the first request comes."""

    async def answer(self, ask: Ask, *, is_whole: bool = False) -> AsyncGenerator[Piece, None]:
        if not self.asks:
            self.asks.append(ask)
            raise QueueFull("Too many requests.", 1)
        async with aclosing(super().answer(ask, is_whole=is_whole)) as pieces:
            async for piece in pieces:
                yield piece


def openai_text(url: str, **options: Any) -> str:
    with openai.OpenAI(base_url=f"{url}/v1", **{"api_key": "none", **options}) as client:
        with client.responses.stream(model="m", input="x") as stream:
            return stream.get_final_response().output_text


def anthropic_text(url: str, **options: Any) -> str:
    with anthropic.Anthropic(base_url=url, **{"api_key": "none", **options}) as client:
        with client.messages.stream(model="m", max_tokens=8, messages=SAID) as stream:
            return stream.get_final_text()


def ollama_text(url: str, **options: Any) -> str:
    with ollama.Client(host=url, **options) as client:
        parts = list(client.chat("org/tiny", SAID, stream=True))
    return "".join(part.message.content or "" for part in parts)


@pytest.mark.parametrize("ask", [openai_text, anthropic_text])
def test_a_full_queue_is_asked_again(ask: Callable[..., str]) -> None:
    service = FullOnce([Text("Here."), done()])
    with listening(service) as url:
        assert ask(url) == "Here."
    assert len(service.asks) == 2


@pytest.mark.parametrize(
    ("ask", "options", "error"),
    [
        (openai_text, {"max_retries": 0}, openai.RateLimitError),
        (anthropic_text, {"max_retries": 0}, anthropic.RateLimitError),
        (ollama_text, {}, ollama.ResponseError),
    ],
)
def test_a_full_queue_is_each_clients_own_error(
    ask: Callable[..., str], options: dict[str, Any], error: type[Exception]
) -> None:
    with listening(FullOnce([])) as url, pytest.raises(error, match="Too many requests"):
        ask(url, **options)


def test_an_answer_that_fails_in_the_midst_is_no_whole_one() -> None:
    service = ScriptedService([Text("He"), StorageError("the disk has gone")])
    with listening(service) as url:
        with pytest.raises(anthropic.APIStatusError, match="the disk has gone"):
            anthropic_text(url)
        with pytest.raises(ollama.ResponseError, match="the disk has gone"):
            ollama_text(url)
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            *_, last = client.responses.create(model="m", input="x", stream=True)
            with pytest.raises(openai.InternalServerError) as caught:
                client.with_options(max_retries=0).responses.create(model="m", input="x")
    assert last.type == "response.failed" and last.response.error is not None
    assert last.response.error.message == "the disk has gone"
    assert caught.value.code == "StorageError"
    assert len(service.asks) == 4  # none is asked again: it may have been read


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    llm = AsyncLLM(talking_folder(tmp_path_factory.mktemp("errors") / "model"), context=256)
    with serving(llm, api_key="right") as server:
        yield server
    asyncio.run(llm.close())


def test_a_wrong_key_is_each_clients_own_error(running: Running) -> None:
    with pytest.raises(openai.AuthenticationError):
        openai_text(running.url, api_key="wrong")
    with pytest.raises(anthropic.AuthenticationError):
        anthropic_text(running.url, api_key="wrong")
    with pytest.raises(ollama.ResponseError) as caught:
        ollama_text(running.url, headers={"authorization": "Bearer wrong"})
    assert caught.value.status_code == 401


def test_refusals_are_each_clients_own_errors(running: Running) -> None:
    long: list[Any] = [{"role": "user", "content": "word " * 2000}]
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="right", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.chat.completions.create(model="another", messages=SAID)
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="m", input="word " * 2000)
        assert caught.value.code == "context_length_exceeded"
    with anthropic.Anthropic(base_url=running.url, api_key="right") as client:
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            client.messages.create(model="m", max_tokens=8, messages=long)
    with ollama.Client(host=running.url, headers={"authorization": "Bearer right"}) as client:
        with pytest.raises(ollama.ResponseError, match="maximum context length"):
            client.chat(running.service.model_name, long)


def test_what_is_not_supported_is_asked_for_once(running: Running) -> None:
    asked: list[httpx.Request] = []
    with httpx.Client(event_hooks={"request": [asked.append]}) as http:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="right", http_client=http)
        with pytest.raises(openai.InternalServerError, match="Embeddings"):
            client.embeddings.create(model="m", input="x")
    assert len(asked) == 1
