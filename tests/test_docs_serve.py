"""docs/serve.md: its transcripts are answered in the form shown, its fields are the server's."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from serving import serving

from lowtide import AsyncLLM
from lowtide.serve.openai_chat import ChatBody
from lowtide.serve.openai_completions import CompletionBody

PAGE = (Path(__file__).parents[1] / "docs" / "serve.md").read_text(encoding="utf-8")
TRANSCRIPTS = re.findall(r"```console\n\$ (curl .*?[^\\])\n(.*?)```", PAGE, flags=re.DOTALL)
[SERVED] = re.findall(r"lowtide serve (demo:\w+)`", PAGE)


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    """Of the server that the page speaks of."""
    llm = AsyncLLM(SERVED)
    with serving(llm) as server, server.client() as made:
        yield made
    asyncio.run(llm.close())


def forms(text: str) -> list[Any]:
    """A transcript without its words and numbers, and without repetitions."""
    found = []
    for line in text.split("\n"):
        name, _, data = ("", "", line) if line.startswith("{") else line.partition(": ")
        each = (name, form(json.loads(data)) if data.startswith("{") else data)
        if each not in found:
            found.append(each)
    return found


def form(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: form(each) for key, each in value.items()}
    if isinstance(value, list):
        return [form(each) for each in value[:1]]
    return "number" if isinstance(value, float) else type(value).__name__.replace("int", "number")


@pytest.mark.parametrize(("command", "shown"), TRANSCRIPTS)
def test_what_is_asked_is_answered_so(client: httpx.Client, command: str, shown: str) -> None:
    words = shlex.split(command.replace("\\\n", " "))
    [url] = [word for word in words if "://" in word]
    answer = client.post(urlsplit(url).path, content=words[words.index("-d") + 1])
    pattern = words[words.index("grep") + 1] if "grep" in words else ""
    lines = [line for line in answer.text.split("\n") if pattern in line]
    assert answer.status_code == 200, answer.text
    assert forms("\n".join([*lines, ""])) == forms(shown), answer.text


def test_every_api_has_a_transcript() -> None:
    shown = [command for command, _ in TRANSCRIPTS]
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"):
        assert any(f"{path} " in command for command in shown)


def test_fields_of_a_request_are_those_of_the_table() -> None:
    rows = re.findall(
        r"^\| (both|`/v1/\S*completions`)(?:, without effect)? \| (.*) \|$", PAGE, re.M
    )
    told: dict[str, set[str]] = {"both": set()}
    for path, fields in rows:
        names = re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", fields))
        told[path] = told.get(path, set()) | set(names)
    for path, body in (("chat/completions", ChatBody), ("completions", CompletionBody)):
        assert set(body.model_fields) == told["both"] | told[f"`/v1/{path}`"]
