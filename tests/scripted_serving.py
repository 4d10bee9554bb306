"""A server on loopback whose answers are given pieces: of APIs' forms, without an engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

from fastapi import FastAPI
from hypothesis import strategies as st
from serving import serving_app

from lowtide.config.decoding import Causal
from lowtide.config.sampling import PublishedSampling
from lowtide.parsing.pieces import (
    CallArguments,
    CallBegun,
    Done,
    Piece,
    Prefilled,
    Reasoning,
    Text,
)
from lowtide.serve import (
    anthropic_messages,
    ollama,
    openai_chat,
    openai_completions,
    responses,
)
from lowtide.serve.errors import add_handlers
from lowtide.serve.service import Ask, Service

NUM_PROMPT, NUM_NEW, NUM_CACHED, NUM_REASONING = 40, 9, 16, 3


def done(reason: str = "stop", stop_string: str | None = None) -> Done:
    """The end of an answer to a prompt of `NUM_PROMPT` tokens."""
    return Done(reason, NUM_PROMPT, NUM_NEW, NUM_CACHED, NUM_REASONING, stop_string)


def answer_of(*calls: tuple[str, str, str]) -> list[Piece]:
    """Thoughts, a text, and calls, each an id, a name and arguments."""
    pieces: list[Piece] = [Reasoning("Look "), Reasoning("first."), Text("I "), Text("look.")]
    for index, (call_id, name, arguments) in enumerate(calls):
        pieces += [CallBegun(index, call_id, name), CallArguments(index, arguments)]
    return [*pieces, done("tool_calls")]


def events_of(text: str) -> list[dict[str, Any]]:
    """A stream's events, each checked for its name."""
    events = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


_TEXTS = st.text(max_size=5)
_ARGUMENTS = st.dictionaries(_TEXTS, _TEXTS, max_size=2)


@st.composite
def drawn_pieces(
    draw: st.DrawFn, arguments: st.SearchStrategy[dict[str, str]] = _ARGUMENTS
) -> list[Piece]:
    """Draw an answer without its end: texts, thoughts and calls in any order.

    arguments: strategy for the arguments of a call.
    """
    parts = st.one_of(st.builds(Text, _TEXTS), st.builds(Reasoning, _TEXTS), arguments)
    pieces: list[Piece] = [Prefilled(0, NUM_PROMPT)]
    num_calls = 0
    for part in draw(st.lists(parts, max_size=8)):
        if not isinstance(part, dict):
            pieces.append(part)
            continue
        pieces.append(CallBegun(num_calls, f"call_{num_calls}", "tool"))
        pieces += [CallArguments(num_calls, text) for text in _divided(draw, json.dumps(part))]
        num_calls += 1
    return pieces


def _divided(draw: st.DrawFn, text: str) -> list[str]:
    places = [0, *sorted(draw(st.lists(st.integers(0, len(text)), max_size=4))), len(text)]
    return [text[a:b] for a, b in pairwise(places) if a < b]


class ScriptedService:
    """Stands in for `Service`: each answer is the script, and what is asked is kept.

    script: pieces behind the first `Prefilled`; a number is a silence in seconds, an error is
    raised. asks: what was asked, in order. num_closed: answers that have ended.
    """

    model_name = "org/tiny"
    context = 32_768
    created = 1_700_000_000

    def __init__(self, script: Sequence[Piece | float | Exception], config: Any = None) -> None:
        self.script = list(script)
        self.asks: list[Ask] = []
        self.num_closed = 0
        config = config or SimpleNamespace(sampling=PublishedSampling(), decoding=Causal())
        self.llm = SimpleNamespace(config=config, tokenizer=None, has_chat_template=False)

    check_model = Service.check_model

    def check_num_answers(self, num_answers: int, param: str) -> None:
        pass

    async def answer(self, ask: Ask, *, is_whole: bool = False) -> AsyncGenerator[Piece, None]:
        self.asks.append(ask)
        try:
            if self.script and isinstance(self.script[0], Exception):
                raise self.script[0]
            yield Prefilled(0, NUM_PROMPT)
            for each in self.script:
                if isinstance(each, Exception):
                    raise each
                if isinstance(each, float):
                    await asyncio.sleep(each)
                else:
                    yield each
        finally:
            self.num_closed += 1

    async def count(self, ask: Ask) -> int:
        self.asks.append(ask)
        return NUM_PROMPT


@contextmanager
def listening(service: ScriptedService) -> Iterator[str]:
    """A server over it: the address, without a path."""
    app = FastAPI()
    add_handlers(app)
    for module in (openai_chat, openai_completions, responses, anthropic_messages, ollama):
        app.include_router(module.router_of(cast(Service, service)))
    with serving_app(app) as url:
        yield url
