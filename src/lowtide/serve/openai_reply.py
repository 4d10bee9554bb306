"""How OpenAI's two older APIs answer: streamed or whole, several answers to one request."""

from __future__ import annotations

import abc
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

from fastapi import Response

from lowtide.decode.intake import sample_seed
from lowtide.parsing.pieces import (
    CallArguments,
    CallBegun,
    Done,
    Frame,
    Logprobs,
    Piece,
    Prefilled,
    Reasoning,
    Text,
)
from lowtide.serve.errors import body_of, refusal_of
from lowtide.serve.many_answers import merged
from lowtide.serve.openai_fields import (
    SamplingFields,
    frame_fields,
    new_id,
    progress_fields,
    usage_of,
)
from lowtide.serve.service import Ask, Service
from lowtide.serve.sse import EventStream, WatchedAnswer, event
from lowtide.serve.writers import JsonObject, json_response

Body = TypeVar("Body", bound=SamplingFields)

Part = Text | Reasoning | CallBegun | CallArguments | Logprobs | Done
"""A piece that adds to an answer; the others tell how far it is."""


class OpenAIReply(abc.ABC, Generic[Body]):
    """Owns the order of what is sent; what is sent of a piece, each API says.

    asks: one for each answer, prompt by prompt. path: whose form errors have. kind, chunk_kind:
    what `object` is of a whole answer and of a stream's chunks.
    """

    path: ClassVar[str]
    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, service: Service, body: Body, asks: Sequence[Ask]) -> None:
        self.service, self.body, self.asks = service, body, asks
        self.tokenizer = service.llm.tokenizer
        self._head: JsonObject = {
            "id": new_id(self.id_prefix),
            "created": int(time.time()),
            "object": self.chunk_kind if body.stream else self.kind,
            "model": service.model_name,
            "system_fingerprint": None,
        }

    def response(self) -> Response:
        """Asks, and answers once the first piece is there."""
        pieces = merged([self.service.answer(ask) for ask in self.asks])
        return WatchedAnswer(pieces, self._streamed if self.body.stream else self._whole)

    async def prepare(self) -> None:  # noqa: B027
        """What there is to wait for before any piece is read."""

    def opening(self) -> Iterable[JsonObject]:
        """The choices that begin a stream, once all is prepared."""
        return ()

    @abc.abstractmethod
    def choice(self, index: int) -> JsonObject:
        """One that adds nothing to an answer."""

    @abc.abstractmethod
    def choices(self, index: int, piece: Part) -> Iterable[JsonObject]:
        """What a piece adds to an answer that is streamed."""

    @abc.abstractmethod
    def whole_choice(self, index: int, pieces: Sequence[Piece], end: Done) -> JsonObject:
        """All of an answer."""

    async def _streamed(self, pieces: AsyncGenerator[tuple[int, Piece], None]) -> Response:
        parts, headers = self._events(pieces), self._disclosed()
        return EventStream(parts, lambda: event(self._object([self.choice(0)])), headers=headers)

    async def _whole(self, pieces: AsyncGenerator[tuple[int, Piece], None]) -> Response:
        await self.prepare()
        answers: list[list[Piece]] = [[] for _ in self.asks]
        async for index, piece in pieces:
            answers[index].append(piece)
        ends = [piece for answer in answers for piece in answer if isinstance(piece, Done)]
        pairs = zip(answers, ends, strict=True)
        choices = [self.whole_choice(index, *pair) for index, pair in enumerate(pairs)]
        whole = self._object(choices, usage=usage_of(ends, self.body.n))
        return json_response(whole, self._disclosed())

    def _disclosed(self) -> dict[str, str]:
        return {name: text for ask in self.asks for name, text in ask.disclosed.items()}

    async def _events(
        self, pieces: AsyncGenerator[tuple[int, Piece], None]
    ) -> AsyncGenerator[bytes, None]:
        ends: dict[int, Done] = {}
        try:
            async with aclosing(pieces):
                await self.prepare()
                for choice in self.opening():
                    yield event(self._object([choice]))
                async for index, piece in pieces:
                    if isinstance(piece, Done):
                        ends[index] = piece
                    for chunk in self._chunks(index, piece):
                        yield event(chunk)
        except Exception as error:
            yield event(body_of(refusal_of(error), self.path))
            return
        if self.body.stream_options.include_usage:
            in_order = [ends[index] for index in sorted(ends)]
            yield event(self._object([], usage=usage_of(in_order, self.body.n)))
        yield event("[DONE]")

    def _chunks(self, index: int, piece: Piece) -> Iterator[JsonObject]:
        if isinstance(piece, Frame):
            yield self._object([self.choice(index)], **frame_fields(piece))
        elif isinstance(piece, Prefilled):
            if self.body.return_progress:
                yield self._object([self.choice(index)], **progress_fields(piece))
        else:
            for choice in self.choices(index, piece):
                yield self._object([choice])

    def _object(self, choices: Sequence[JsonObject], **more: Any) -> JsonObject:
        """A chunk, or the whole."""
        return {**self._head, "choices": choices, **more}


def several(ask: Ask, num_answers: int) -> list[Ask]:
    """So many answers: with a seed they draw as those of the Python API with `n`."""
    seed = ask.params.seed
    if seed is None:
        return [ask] * num_answers
    seeds = [sample_seed(seed, sample) for sample in range(num_answers)]
    return [replace(ask, params=replace(ask.params, seed=each)) for each in seeds]
