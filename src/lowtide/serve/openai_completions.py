"""`POST /v1/completions`: texts and token ids as they are, streamed and whole.

`echo` with `logprobs` tells how likely the prompt itself is, which evaluation harnesses ask for.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from fastapi import APIRouter, Response
from pydantic import Field

from lowtide.decode.request import TokenLogprobs
from lowtide.errors import UnsupportedError
from lowtide.params import MAX_SEED, MAX_TOP_LOGPROBS
from lowtide.parsing.pieces import Done, Logprobs, Piece, Text, joined
from lowtide.serve.json_body import JsonRoute
from lowtide.serve.openai_fields import SamplingFields, token_text
from lowtide.serve.openai_reply import OpenAIReply, Part, several
from lowtide.serve.service import Ask, Service
from lowtide.serve.writers import JsonObject

DEFAULT_TOKENS = 16
"""Length of an answer whose request names none, as OpenAI has it."""

MAX_PROMPTS = 64
MAX_PROMPT_TOKENS = 2**22

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
# fail_fast: a million values that are none make one error.
Ids = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_PROMPT_TOKENS, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
ManyIds = Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]


class CompletionBody(SamplingFields):
    """A request of completions."""

    prompt: str | Texts | Ids | ManyIds
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @property
    def prompts(self) -> list[str | Sequence[int]]:
        """One by one."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    def asks(self) -> list[Ask]:
        """One for each answer, prompt by prompt. Raises UsageError for what cannot be asked."""
        params = self.sampling(self.max_tokens or DEFAULT_TOKENS, self.logprobs)
        asks: list[Ask] = []
        for index, prompt in enumerate(self.prompts):
            seed = None if params.seed is None else (params.seed + index) % (MAX_SEED + 1)
            ask = Ask(
                prompt=prompt,
                params=replace(params, seed=seed),
                wants_frames=bool(self.stream_options.include_drafts),
                wants_progress=self.return_progress,
            )
            asks += several(ask, self.n)
        return asks


@dataclass(frozen=True)
class Echo:
    """A prompt that is sent before its answers. logprobs: of each token, where they are asked for;
    None of the first, which has no probability."""

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs | None]


def router_of(service: Service) -> APIRouter:
    """The route, over one service."""
    router = APIRouter(route_class=JsonRoute)

    @router.post(CompletionReply.path)
    async def completions(body: CompletionBody) -> Response:
        """Answers to prompts as they are."""
        service.check_model(body.model)
        asks = body.asks()
        service.check_num_answers(len(asks), "prompt" if body.n == 1 else "n")
        if body.echo and body.logprobs is not None and service.llm.config.is_diffusion:
            raise UnsupportedError("echo with logprobs needs an autoregressive model.")
        return CompletionReply(service, body, asks).response()

    return router


class CompletionReply(OpenAIReply[CompletionBody]):
    """Owns the echoes, one for each prompt, and how many characters of each answer were sent."""

    path = "/v1/completions"
    id_prefix = "cmpl-"
    kind = chunk_kind = "text_completion"

    def __init__(self, service: Service, body: CompletionBody, asks: Sequence[Ask]) -> None:
        super().__init__(service, body, asks)
        self._start_s = time.monotonic()
        self._echoes: list[Echo] = []
        self._num_sent = [0] * len(asks)

    async def prepare(self) -> None:
        if self.body.echo:
            self._echoes = [await self._echo(ask) for ask in self.asks[:: self.body.n]]

    def opening(self) -> Iterator[JsonObject]:
        for index in range(len(self.asks) if self._echoes else 0):
            echo = self._echoes[index // self.body.n]
            yield self.choice(index, echo.text, echo.logprobs, echo.token_ids)

    def choice(
        self,
        index: int,
        text: str = "",
        tokens: Sequence[TokenLogprobs | None] = (),
        token_ids: Sequence[int] = (),
        end: Done | None = None,
    ) -> JsonObject:
        """token_ids: whose the probabilities `tokens` are."""
        choice: JsonObject = {"index": index, "text": text, "logprobs": None}
        if self.body.logprobs is not None and tokens:
            texts = [token_text(token_id, self.tokenizer) for token_id in token_ids]
            choice["logprobs"] = self._logprobs(index, texts, tokens)
        choice["finish_reason"] = None if end is None else end.reason
        if end is not None and self.body.return_token_ids:
            choice["token_ids"] = list(end.token_ids)
        return choice

    def choices(self, index: int, piece: Part) -> Iterator[JsonObject]:
        if isinstance(piece, Text):
            yield self.choice(index, piece.text)
        elif isinstance(piece, Logprobs):
            token_ids = [token.token_id for token in piece.tokens]
            yield self.choice(index, "", piece.tokens, token_ids)
        elif isinstance(piece, Done):
            yield self.choice(index, end=piece)

    def whole_choice(self, index: int, pieces: Sequence[Piece], end: Done) -> JsonObject:
        text = joined(pieces, Text)
        tokens: list[TokenLogprobs | None] = []
        token_ids: list[int] = []
        if self._echoes:
            echo = self._echoes[index // self.body.n]
            text, tokens, token_ids = echo.text + text, [*echo.logprobs], [*echo.token_ids]
        new = [token for p in pieces if isinstance(p, Logprobs) for token in p.tokens]
        token_ids += [token.token_id for token in new]
        return self.choice(index, text, [*tokens, *new], token_ids, end)

    def _logprobs(
        self, index: int, texts: Sequence[str], tokens: Sequence[TokenLogprobs | None]
    ) -> JsonObject:
        offsets = []
        for text in texts:
            offsets.append(self._num_sent[index])
            self._num_sent[index] += len(text)
        return {
            "tokens": list(texts),
            "token_logprobs": [None if token is None else token.logprob for token in tokens],
            "top_logprobs": [None if token is None else self._top(token) for token in tokens],
            "text_offset": offsets,
        }

    def _top(self, token: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens and the token itself, by text: of two alike the likelier."""
        top = {token_text(one, self.tokenizer): value for one, value in reversed(token.top)}
        top.setdefault(token_text(token.token_id, self.tokenizer), token.logprob)
        return top

    async def _echo(self, ask: Ask) -> Echo:
        token_ids = await self.service.prompt_ids(ask)
        text = ask.prompt if isinstance(ask.prompt, str) else ""
        if not text and self.tokenizer is not None:
            text = self.tokenizer.decode(token_ids)
        logprobs: list[TokenLogprobs | None] = []
        if self.body.logprobs is not None:
            asked = self.service.llm.prompt_logprobs(token_ids, self.body.logprobs)
            logprobs = await self.service.in_time(self._start_s, asked)
        return Echo(text, token_ids, logprobs)
