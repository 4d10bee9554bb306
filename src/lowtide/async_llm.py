"""`AsyncLLM`: `LLM` for coroutines.

async with AsyncLLM("demo:autoregressive", host_memory="16MiB") as llm:
    async for event in llm.stream("Sort 93 21 57 40 12"):
        print(event.text, end="")
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
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
from lowtide.errors import UnsupportedError
from lowtide.option import check_int
from lowtide.params import MAX_TOP_LOGPROBS, SamplingParams


class AsyncLLM(LoadedModel):
    """A model under a memory budget, asked by coroutines: see `LLM`, whose options it has.

    Any number of tasks may ask at once and share passes; one that is cancelled ends what it asked,
    one that reads slowly delays no other. Loading, in the constructor, takes its time: where an
    event loop is running already, `await asyncio.to_thread(AsyncLLM, model)` keeps it free.
    """

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        raw: bool = False,
        **keywords: Unpack[AnswerKeywords],
    ) -> list[Completion]:
        """As `LLM.generate`."""
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
        """As `LLM.chat`."""

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
        """As `LLM.stream`; all of it, refusals too, begins with the first event awaited."""
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
        """What `generate` would ask, checked, for `events`: one for each answer.

        A program that has a say in the tokens replaces their `mask` or `is_stopped`. Raises as
        `generate`.
        """
        return self._requests(as_prompts(prompts), params, keywords, raw)

    def events(self, requests: Sequence[Request]) -> AsyncGenerator[Event, None]:
        """What happens to `requests`, each called by its `id`; events without text."""
        return async_loop.answers(self._loop, requests)

    async def logits(self, token_ids: TokenIds) -> Tensor:
        """As `LLM.logits`."""
        work, num_tokens = self._logits_work(token_ids)
        return await async_loop.run_passes(self._loop, work, num_tokens)

    async def prompt_logprobs(
        self, token_ids: TokenIds, num_top: int = 0
    ) -> list[TokenLogprobs | None]:
        """How likely each token of an autoregressive model's text is after those before it, with
        those of `num_top` of the likeliest at its place; the first has none. Waits for room in the
        KV cache. Raises UsageError, PlanError, or UnsupportedError for a diffusion model.
        """
        if self.config.is_diffusion:
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
        """As `LLM.token_ids`. max_tokens: a text of more is not read to its end, and raises
        `TooManyTokens`, a UsageError.
        """
        return await asyncio.to_thread(
            self._intake.token_ids, prompt, raw, template_options, add_special_tokens, max_tokens
        )

    async def adopt_policy(
        self, policy: str, policy_options: Mapping[str, str] | None = None
    ) -> None:
        """As `LLM.adopt_policy`."""
        change = partial(adopt_policy, policy=policy, policy_options=policy_options or {})
        await asyncio.to_thread(self._loop.replace, change)

    async def stats(self) -> dict[str, float]:
        """As `LLM.stats`."""
        return await asyncio.to_thread(self._loop.stats)

    async def release_memory(self) -> None:
        """Gives memory back to a system that runs short of it, where the plan is elastic. Passes
        do so by themselves: this is for the time between requests.
        """
        await asyncio.to_thread(self._loop.look, Engine.release_memory)

    async def close(self) -> None:
        """As `LLM.close`."""
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
        """What happens to `requests`, each called by its place among them."""
        reporter = Reporter(requests, self.tokenizer, has_text)
        async with aclosing(self.events(requests)) as events:
            async for event in events:
                yield reporter(event)
