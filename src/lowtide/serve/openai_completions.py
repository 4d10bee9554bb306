"""`POST /v1/completions`: completes texts and token ids without a chat template.

`CompletionBody.asks` maps a request's fields to `Ask`s. `CompletionReply.choices` maps each kind of
piece of an answer to choices. `echo` with `logprobs` scores the prompt itself, as evaluation
harnesses need.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from fastapi import APIRouter, Response
from pydantic import Field

from lowtide.decode.request import TokenLogprobs
from lowtide.errors import UnsupportedError
from lowtide.model_folder.tokenizer import Tokenizer
from lowtide.params import MAX_SEED, MAX_TOP_LOGPROBS
from lowtide.parsing.pieces import Done, Logprobs, Piece, Text, joined
from lowtide.serve.json_body import JsonRoute
from lowtide.serve.openai_fields import OpenAIFields
from lowtide.serve.openai_reply import OpenAIReply, several, token_text
from lowtide.serve.reply import JsonObject
from lowtide.serve.service import Ask, Service

DEFAULT_TOKENS = 16
"""OpenAI's default `max_tokens` for completions."""

_END_CHARS = 32
"""Characters or tokens of a prompt's end that are enough to contain its last word."""

MAX_PROMPTS = 64
MAX_PROMPT_TOKENS = 2**22

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
# fail_fast: a million values that are none make one error.
Ids = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_PROMPT_TOKENS, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
ManyIds = Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]


class CompletionBody(OpenAIFields):
    prompt: str | Texts | Ids | ManyIds
    echo: bool | None = None
    add_special_tokens: bool = True
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @property
    def prompts(self) -> list[str | Sequence[int]]:
        """The prompts as a list."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    def asks(self) -> list[Ask]:
        """Return one Ask per answer, prompt by prompt. Raise UsageError."""
        params = self.sampling(self.max_tokens or DEFAULT_TOKENS, self.logprobs)
        asks: list[Ask] = []
        for index, prompt in enumerate(self.prompts):
            seed = None if params.seed is None else (params.seed + index) % (MAX_SEED + 1)
            ask = Ask(
                prompt=prompt,
                params=replace(params, seed=seed),
                adds_special=self.add_special_tokens,
                wants_frames=bool(self.stream_options.include_drafts),
                wants_progress=self.return_progress,
            )
            asks += several(ask, self.n)
        return asks


@dataclass(frozen=True)
class Placed:
    """A token whose probability is reported.

    place: offset of its text. is_first: the first token of a prompt or an answer, whose leading
    space decoders drop. logprobs: None for a prompt's first token, which has no probability.
    """

    token_id: int
    place: int
    is_first: bool
    logprobs: TokenLogprobs | None


@dataclass(frozen=True)
class Echo:
    """A prompt that is repeated before its answers.

    tokens: empty if no probabilities are requested.
    """

    text: str
    tokens: Sequence[Placed]


class Places:
    """Tracks the text offset at which an answer's next token begins.

    start: characters before the answer. after: the end of its prompt.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, start: int = 0, after: Sequence[int] = ()
    ) -> None:
        self._tokenizer, self._place = tokenizer, start
        self._is_first = tokenizer is None or not any(map(tokenizer.is_text, after))
        self._stream = None if tokenizer is None else tokenizer.stream()
        if self._stream is not None and after:
            self._stream.begin_after(after)

    def placed(
        self, token_id: int, logprobs: TokenLogprobs | None, place: int | None = None
    ) -> Placed:
        """Return the next token with its offset. place: the offset, if known."""
        found = Placed(token_id, self._place if place is None else place, self._is_first, logprobs)
        if self._tokenizer is not None and self._stream is not None:
            self._is_first &= not self._tokenizer.is_text(token_id)
            self._place += len(self._stream.push([token_id]))
        return found


def router_of(service: Service) -> APIRouter:
    router = APIRouter(route_class=JsonRoute)

    @router.post(CompletionReply.path)
    def completions(body: CompletionBody) -> Response:
        service.check_model(body.model)
        asks = body.asks()
        service.check_num_answers(len(asks), "prompt" if body.n == 1 else "n")
        scores_text = body.echo and body.logprobs is not None
        if scores_text and not service.llm.config.decoding.writes_in_order:
            raise UnsupportedError("echo with logprobs needs an autoregressive model.")
        return CompletionReply(service, body, asks).response()

    return router


class CompletionReply(OpenAIReply[CompletionBody]):
    """Builds completions; owns each prompt's echo and each answer's text offsets."""

    path = "/v1/completions"
    id_prefix = "cmpl-"
    kind = chunk_kind = "text_completion"

    def __init__(self, service: Service, body: CompletionBody, asks: Sequence[Ask]) -> None:
        super().__init__(service, body, asks)
        self._start_s = time.monotonic()
        self._echoes: list[Echo] = []
        self._places = [Places(self.tokenizer, after=self._end(ask)) for ask in asks]

    async def prepare(self) -> None:
        if self.body.echo:
            self._echoes = [await self._echo(ask) for ask in self.asks[:: self.body.n]]
            starts = [len(echo.text) for echo in self._echoes for _ in range(self.body.n)]
            self._places = [
                Places(self.tokenizer, start, self._end(ask))
                for start, ask in zip(starts, self.asks, strict=True)
            ]

    def first_choices(self) -> Iterator[JsonObject]:
        for index in range(len(self.asks) if self._echoes else 0):
            echo = self._echoes[index // self.body.n]
            yield self.choice(index, echo.text, echo.tokens)

    def choice(
        self,
        index: int,
        text: str = "",
        tokens: Sequence[Placed] = (),
        end: Done | None = None,
    ) -> JsonObject:
        choice: JsonObject = {"index": index, "text": text, "logprobs": None}
        if self.body.logprobs is not None and tokens:
            choice["logprobs"] = self._logprobs(tokens)
        choice["finish_reason"] = None if end is None else end.reason
        if end is not None and self.body.return_token_ids:
            choice["token_ids"] = list(end.token_ids)
        return choice

    def choices(self, piece: Piece, index: int) -> Iterator[JsonObject]:
        match piece:
            case Text(text):
                yield self.choice(index, text)
            case Logprobs():
                yield self.choice(index, "", self._placed(index, piece))
            case Done():
                yield self.choice(index, end=piece)

    def whole_choice(self, index: int, pieces: Sequence[Piece], end: Done) -> JsonObject:
        text = joined(pieces, Text)
        tokens: list[Placed] = []
        if self._echoes:
            echo = self._echoes[index // self.body.n]
            text, tokens = echo.text + text, [*echo.tokens]
        for piece in pieces:
            if isinstance(piece, Logprobs):
                tokens += self._placed(index, piece)
        return self.choice(index, text, tokens, end)

    def _end(self, ask: Ask) -> Sequence[int]:
        """Return a prompt's last ids, which decide how the answer's first token decodes."""
        if self.tokenizer is None or self.body.logprobs is None or ask.prompt is None:
            return ()
        if isinstance(ask.prompt, str):
            return self.tokenizer.encode(ask.prompt[-_END_CHARS:], add_special=False)
        return ask.prompt[-_END_CHARS:]

    def _placed(self, index: int, piece: Logprobs) -> list[Placed]:
        return [self._places[index].placed(token.token_id, token) for token in piece.tokens]

    def _logprobs(self, tokens: Sequence[Placed]) -> JsonObject:
        each = [token.logprobs for token in tokens]
        return {
            "tokens": [self._name(token.token_id, token.is_first) for token in tokens],
            "token_logprobs": [None if found is None else found.logprob for found in each],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": [token.place for token in tokens],
        }

    def _top(self, token: Placed) -> dict[str, float] | None:
        """Return the likeliest tokens and the token itself, by text.

        Of two tokens with the same text the likelier is kept.
        """
        found = token.logprobs
        if found is None:
            return None
        top = {self._name(one, token.is_first): value for one, value in reversed(found.top)}
        top.setdefault(self._name(token.token_id, token.is_first), found.logprob)
        return top

    def _name(self, token_id: int, is_first: bool) -> str:
        return token_name(token_id, self.tokenizer, is_first)

    async def _echo(self, ask: Ask) -> Echo:
        token_ids = await self.service.prompt_ids(ask)
        text = ask.prompt if isinstance(ask.prompt, str) else ""
        places: Sequence[int | None] = [None] * len(token_ids)
        if self.tokenizer is not None and self.body.logprobs is not None and text:
            places = await asyncio.to_thread(
                self.tokenizer.places, text, add_special=ask.adds_special
            )
        if not text and self.tokenizer is not None:
            text = self.tokenizer.decode(token_ids)
        if self.body.logprobs is None:
            return Echo(text, ())
        asked = self.service.llm.prompt_logprobs(token_ids, self.body.logprobs)
        logprobs = await self.service.in_time(self._start_s, asked)
        owner = Places(self.tokenizer)
        return Echo(text, list(map(owner.placed, token_ids, logprobs, places)))


def token_name(token_id: int, tokenizer: Tokenizer | None, is_first: bool) -> str:
    """Return a token as this API writes it: its text, or its bytes if it is part of a character."""
    if tokenizer is None:
        return token_text(token_id, tokenizer)
    text = tokenizer.decode([token_id], skip_special=False)
    data = tokenizer.piece_bytes(token_id) if "\ufffd" in text else None
    if data is not None:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
    return text if is_first and text else tokenizer.piece(token_id)
