"""How likely a prompt's own tokens are, each after those before it."""

from __future__ import annotations

from functools import partial

from lowtide.async_llm import AsyncLLM
from lowtide.decode.request import TokenLogprobs
from lowtide.engine.running import async_loop, probing


async def prompt_logprobs(
    llm: AsyncLLM, token_ids: list[int], num_top: int
) -> list[TokenLogprobs | None]:
    """One for each token of an autoregressive model's prompt, with those of `num_top` of the
    likeliest at its place; the first has none. Waits for room in the KV cache."""
    work = partial(probing.logprobs, token_ids=token_ids, num_top=num_top)
    found = await async_loop.run_passes(llm._loop, work, len(token_ids))
    return [None, *found]
