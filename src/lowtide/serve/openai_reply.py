"""Replies of OpenAI's two older APIs: several answers to one request, streamed or whole."""

from __future__ import annotations

import abc
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

from fastapi import Response

from lowtide.decode.intake import sample_seed
from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.parsing.pieces import Done, Frame, Piece, Prefilled
from lowtide.serve.errors import Refusal, body_of
from lowtide.serve.openai_fields import OpenAIFields, new_id
from lowtide.serve.reply import JsonObject, Reply, answered
from lowtide.serve.service import Ask, Service
from lowtide.serve.sse import event

Body = TypeVar("Body", bound=OpenAIFields)


class OpenAIReply(Reply, Generic[Body]):
    """Builds the envelope of chunks and choices; each API fills in its choices.

    asks: one per answer, prompt by prompt.
    path: the API whose error form is used.
    kind, chunk_kind: values of `object` in a whole answer and in a chunk.
    """

    has_named_events = False
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
        self._answers: list[list[Piece]] = [[] for _ in asks]  # where they are not streamed
        self._ends: dict[int, Done] = {}

    def response(self) -> Response:
        """Send the asks, and respond once the first piece is there."""
        return answered(self.service, self.asks, self, self.body.stream)

    def opening(self) -> Iterator[JsonObject]:
        for choice in self.first_choices():
            yield self._object([choice])

    def frames(self, piece: Piece, index: int = 0) -> Iterator[JsonObject]:
        match piece:
            case Frame():
                yield self._object([self.choice(index)], **_draft(piece))
            case Prefilled():
                if self.body.return_progress:
                    yield self._object([self.choice(index)], **_progress(piece))
            case _:
                if isinstance(piece, Done):
                    self._ends[index] = piece
                for choice in self.choices(piece, index):
                    yield self._object([choice])

    def ending(self) -> Iterator[bytes]:
        if self.body.stream_options.include_usage:
            yield event(self._object([], usage=self._usage()))
        yield event("[DONE]")

    def ping(self) -> JsonObject:
        return self._object([self.choice(0)])

    def failed(self, refusal: Refusal) -> JsonObject:
        return body_of(refusal, self.path)

    def keep(self, piece: Piece, index: int = 0) -> None:
        self._answers[index].append(piece)
        if isinstance(piece, Done):
            self._ends[index] = piece

    def whole(self) -> JsonObject:
        choices = [
            self.whole_choice(index, pieces, self._ends[index])
            for index, pieces in enumerate(self._answers)
        ]
        return self._object(choices, usage=self._usage())

    def first_choices(self) -> Iterable[JsonObject]:
        """Return the choices that begin a stream."""
        return ()

    @abc.abstractmethod
    def choice(self, index: int) -> JsonObject:
        """Return a choice that adds nothing to its answer."""

    @abc.abstractmethod
    def choices(self, piece: Piece, index: int) -> Iterable[JsonObject]:
        """Return a piece of a streamed answer as choices."""

    @abc.abstractmethod
    def whole_choice(self, index: int, pieces: Sequence[Piece], end: Done) -> JsonObject:
        """Return a complete answer as one choice."""

    def _object(self, choices: Sequence[JsonObject], **more: Any) -> JsonObject:
        return {**self._head, "choices": choices, **more}

    def _usage(self) -> JsonObject:
        """Count the tokens of a request; each prompt has `n` answers."""
        ends = [self._ends[index] for index in sorted(self._ends)]
        prompts = ends[:: self.body.n]
        num_prompt = sum(end.num_prompt for end in prompts)
        num_new = sum(end.num_new for end in ends)
        reasoning = sum(end.num_reasoning for end in ends)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
            "prompt_tokens_details": {"cached_tokens": sum(end.num_resumed for end in prompts)},
            "completion_tokens_details": {"reasoning_tokens": reasoning},
        }


def several(ask: Ask, num_answers: int) -> list[Ask]:
    """Repeat an Ask. With a seed, the answers draw as with `n` in the Python API."""
    seed = ask.params.seed
    if seed is None or num_answers == 1:
        return [ask] * num_answers
    seeds = [sample_seed(seed, sample) for sample in range(num_answers)]
    return [replace(ask, params=replace(ask.params, seed=each)) for each in seeds]


def token_text(token_id: int, tokenizer: Tokenizer | None) -> str:
    """Decode one token for display."""
    return f"<{token_id}>" if tokenizer is None else tokenizer.piece(token_id)


def _draft(frame: Frame) -> JsonObject:
    """Return a diffusion model's draft, which is sent beside an empty choice."""
    return {
        "type": "diffusion_frame",
        "text": frame.text,
        "masked": frame.num_masked,
        "step": frame.num_forwards,
        "start": frame.start,
        "tokens": [(token.text, token.step, round(token.confidence, 3)) for token in frame.tokens],
    }


def _progress(progress: Prefilled) -> JsonObject:
    """Return the progress of reading the prompt, in llama.cpp's form."""
    counts = {"total": progress.num_total, "processed": progress.num_done}
    return {"prompt_progress": counts}
