"""`AsyncLLM`: `LLM` for coroutines.

async with AsyncLLM("demo:autoregressive", host_memory="16MiB") as llm:
    async for event in llm.stream("Sort 93 21 57 40 12"):
        print(event.text, end="")
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing
from functools import partial
from typing import Unpack

from torch import Tensor

from lowtide.answers.completion import Completion
from lowtide.answers.keywords import AnswerKeywords
from lowtide.answers.loaded import LoadedModel
from lowtide.answers.reporter import Reporter
from lowtide.decode.prompts import Messages, Prompt, TokenIds, as_prompts, one_prompt
from lowtide.decode.request import Event, Finished, Request, TokenLogprobs
from lowtide.engine.running import async_loop, probing
from lowtide.engine.running.engine import Engine
from lowtide.engine.running.policy_setting import adopt_policy
from lowtide.engine.running.watching import Look
from lowtide.errors import UnsupportedError
from lowtide.option import check_int
from lowtide.params import MAX_TOP_LOGPROBS, SamplingParams
from lowtide.policies.recipe import Recipe


class AsyncLLM(LoadedModel):
    """A model under a memory budget, for coroutines; the options are those of `LLM`.

    Tasks share passes. Cancelling a task stops its requests, and a slow reader delays no other.
    The constructor loads the model and blocks; inside a running event loop use `await
    asyncio.to_thread(AsyncLLM, model)`.
    """

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        raw: bool = False,
        **keywords: Unpack[AnswerKeywords],
    ) -> list[Completion]:
        """Answer as `LLM.generate`."""
        asked = await asyncio.to_thread(lambda: self.requests(prompts, params, raw=raw, **keywords))
        return await self._answered(asked)

    async def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        template_options: Mapping[str, object] | None = None,
        **keywords: Unpack[AnswerKeywords],
    ) -> list[Completion]:
        """Answer as `LLM.chat`."""

        def requests() -> list[Request]:
            return self._requests(self._chats(messages, template_options), params, keywords, False)

        return await self._answered(await asyncio.to_thread(requests))

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        **keywords: Unpack[AnswerKeywords],
    ) -> AsyncGenerator[Event, None]:
        """Stream as `LLM.stream`; even refusals come with the first event awaited."""
        one = one_prompt(prompt)
        requests = await asyncio.to_thread(lambda: self._requests([one], params, keywords, raw))
        async with aclosing(self._events(requests)) as events:
            async for event in events:
                yield event

    def requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        raw: bool = False,
        **keywords: Unpack[AnswerKeywords],
    ) -> list[Request]:
        """Make the checked requests of `generate`, one per answer, for `events`.

        A caller that constrains tokens replaces their `mask` or `is_stopped`. Raises like
        `generate`.
        """
        return self._requests(as_prompts(prompts), params, keywords, raw)

    def events(
        self, requests: Sequence[Request], *, is_whole: bool = False
    ) -> AsyncGenerator[Event, None]:
        """Yield events of `requests`, named by request id, without text.

        is_whole: tokens come together in few events and drafts not at all, which costs less if
        nothing is shown before the end.
        """
        return async_loop.answers(self._loop, requests, is_whole)

    def expect(self, num_requests: int) -> None:
        """Have passes wait a moment for requests that are being made ready for `events`.

        They wait where these would add much to a pass, and for at most 0.2 s from one request to
        the next. Below 0: fewer come than were expected.
        """
        self._loop.expect(num_requests)

    async def logits(self, token_ids: TokenIds) -> Tensor:
        """Return logits as `LLM.logits`."""
        work, num_tokens = self._logits_work(token_ids)
        return await async_loop.run_passes(self._loop, work, num_tokens)

    async def prompt_logprobs(
        self, token_ids: TokenIds, num_top: int = 0
    ) -> list[TokenLogprobs | None]:
        """Return the log-probability of each token of a text after the tokens before it.

        The first token has none. Each entry also holds `num_top` of the likeliest tokens at its
        place. Waits for room in the KV cache. Raises UsageError, PlanError, or UnsupportedError for
        a diffusion model.
        """
        if not self.config.decoding.writes_in_order:
            raise UnsupportedError(
                "Log-probabilities of a text need an autoregressive model, and "
                f"{self.config.architecture} is none."
            )
        ids = self._text_ids(token_ids)
        num_top = check_int("num_top", num_top, 0, MAX_TOP_LOGPROBS)
        work = partial(probing.logprobs, token_ids=ids, num_top=num_top)
        return [None, *await async_loop.run_passes(self._loop, work, len(ids))]

    async def token_ids(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        template_options: Mapping[str, object] | None = None,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Return a prompt's token ids as `LLM.token_ids`.

        max_tokens: tokenizing stops beyond it, and `TooManyTokens`, a UsageError, is raised.
        """
        return await asyncio.to_thread(
            self._intake.token_ids, prompt, raw, template_options, add_special_tokens, max_tokens
        )

    def prompt_ids(
        self,
        prompt: Prompt,
        *,
        raw: bool = False,
        template_options: Mapping[str, object] | None = None,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Return a prompt's token ids as `token_ids`, and block until they are there."""
        return self._intake.token_ids(prompt, raw, template_options, add_special_tokens, max_tokens)

    async def adopt_policy(
        self, policy: str | Recipe, policy_options: Mapping[str, str] | None = None
    ) -> None:
        """Switch policies as `LLM.adopt_policy`."""
        change = partial(adopt_policy, policy=policy, policy_options=policy_options or {})
        await asyncio.to_thread(self._loop.replace, change)

    async def stats(self) -> dict[str, float]:
        """Return counters as `LLM.stats`."""
        return await asyncio.to_thread(self._loop.stats)

    def watched(self) -> AbstractContextManager[Callable[[], Look]]:
        """Yield a function that takes a snapshot of the engine as it runs.

        It neither waits for a pass nor delays one; experts' demands are counted in the context.
        """
        return self._loop.watched()

    async def release_memory(self) -> None:
        """Return memory to a system that runs short of it.

        Passes do this themselves; this method is for the time between requests.
        """
        await asyncio.to_thread(self._loop.look, Engine.release_memory)

    async def close(self) -> None:
        """Close as `LLM.close`."""
        await asyncio.to_thread(self._loop.close)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _answered(self, requests: Sequence[Request]) -> list[Completion]:
        finished: dict[int, Finished] = {}
        async with aclosing(self._events(requests, has_text=False)) as events:
            async for event in events:
                if isinstance(event, Finished):
                    finished[event.request] = event
        return self._completions(requests, finished)

    async def _events(
        self, requests: Sequence[Request], has_text: bool = True
    ) -> AsyncGenerator[Event, None]:
        """Yield events of `requests`, numbered by their place."""
        reporter = Reporter(requests, self.tokenizer, has_text)
        async with aclosing(self.events(requests)) as events:
            async for event in events:
                yield reporter(event)
