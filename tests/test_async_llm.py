"""`AsyncLLM`: the answers of `LLM`, awaited; a task that is cancelled ends its own request only."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from inside import engine_of, loop_of, worker_of
from whole import LIMIT_S, check_idle, no_more_threads, passes_that_wait

from lowtide import LLM, AsyncLLM, SamplingParams
from lowtide.decode.request import Committed, Draft, Event, Finished
from lowtide.engine.running.async_loop import NUM_TOGETHER
from lowtide.errors import InternalError, UsageError
from lowtide.model_writing.synth import synth

PROMPTS = [[5, 17, 3], [9], [44, 3, 3, 80] * 10]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module", params=["qwen3_moe", "llada2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth(request.param, "tiny", tmp_path_factory.mktemp("async") / "model", seed=3)


@pytest.fixture(scope="module")
def expected(folder: Path) -> tuple[list[list[int]], torch.Tensor]:
    with LLM(folder, dtype="float32") as llm:
        answers = [llm.generate([prompt], PARAMS)[0].token_ids for prompt in PROMPTS]
        return answers, llm.logits(PROMPTS[2])


@pytest.fixture
def llm(folder: Path) -> Iterator[AsyncLLM]:
    with no_more_threads():
        llm = AsyncLLM(folder, dtype="float32")
        yield llm
        loop_of(llm).close()
        del llm
        gc.collect()


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, LIMIT_S))


def test_requests_that_are_being_decoded_are_refused_and_go_on(
    llm: AsyncLLM, expected: Any
) -> None:
    long = SamplingParams(max_tokens=900, ignore_eos=True)

    async def refused(requests: Any) -> None:
        with pytest.raises(UsageError, match="already being decoded"):
            async for _ in llm.events(requests):
                raise AssertionError("an event of another's request")

    async def ask() -> None:
        async with llm:
            requests = llm.requests([PROMPTS[0]], long)
            with passes_that_wait(llm):
                async with aclosing(llm.events(requests)) as first:
                    await anext(first)
                    await refused(requests)
                    await refused(llm.requests([PROMPTS[1]], long) * 2)
                    await anext(first)
            [again] = await llm.generate([PROMPTS[0]], PARAMS)
            assert again.token_ids == expected[0][0]

    run(ask())


def test_many_at_once_get_the_answers_they_get_alone(llm: AsyncLLM, expected: Any) -> None:
    async def ask() -> None:
        async with llm:
            asked = [llm.generate([prompt], PARAMS) for prompt in PROMPTS]
            *each, together, logits = await asyncio.gather(
                *asked, llm.generate(PROMPTS, PARAMS), llm.logits(PROMPTS[2])
            )
            assert [c.token_ids for [c] in each] == expected[0]
            assert [c.token_ids for c in together] == expected[0]
            assert torch.equal(logits, expected[1])
            assert (await llm.stats())["committed_tokens"] == 6 * 24
            assert repr(llm).startswith("AsyncLLM(")
        with pytest.raises(UsageError, match="closed"):
            await llm.generate(PROMPTS[0])

    run(ask())


def test_an_answer_told_whole_is_the_same_in_few_events(llm: AsyncLLM) -> None:
    params = SamplingParams(max_tokens=200, ignore_eos=True, logprobs=2)
    if llm.config.decoding.redraws:
        params = replace(params, logprobs=None)

    async def told(is_whole: bool) -> list[Event]:
        events = llm.events(llm.requests(PROMPTS, params), is_whole=is_whole)
        async with aclosing(events):
            return [event async for event in events]

    def joined(events: list[Event]) -> list[list[int]]:
        tokens: dict[int, list[int]] = {}
        for event in events:
            if isinstance(event, Committed):
                tokens.setdefault(event.request, []).extend(event.tokens)
                told = [each.token_id for each in event.logprobs]
                assert told == (list(event.tokens) if params.logprobs else [])
        return [tokens[request] for request in sorted(tokens)]

    async def ask() -> None:
        async with llm:
            streamed, whole = await told(False), await told(True)
            assert joined(streamed) == joined(whole)
            committed = [event for event in whole if isinstance(event, Committed)]
            assert len(committed) <= len(PROMPTS) * (2 + 200 // NUM_TOGETHER)
            assert not any(isinstance(event, Draft) for event in whole)
            ends = [event for event in whole if isinstance(event, Finished)]
            assert sorted(event.token_ids for event in ends) == sorted(
                tuple(each) for each in joined(whole)
            )

    run(ask())


def test_answers_that_end_together_wake_their_reader_once(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which each is asked by a task of its own."""
    num_woken = 0

    async def ask() -> None:
        running = asyncio.get_running_loop()
        call_soon = running.call_soon_threadsafe

        def woken(*arguments: Any) -> Any:
            nonlocal num_woken
            num_woken += 1
            return call_soon(*arguments)

        async def answer() -> int:
            events = llm.events(llm.requests(PROMPTS[0], PARAMS), is_whole=True)
            async with aclosing(events):
                return len([event async for event in events if isinstance(event, Finished)])

        async with llm:
            forwards = (await llm.stats())["forwards"]
            monkeypatch.setattr(running, "call_soon_threadsafe", woken)
            assert await asyncio.gather(*(answer() for _ in range(16))) == [1] * 16
            monkeypatch.undo()
            forwards = (await llm.stats())["forwards"] - forwards
        assert num_woken <= 2 * forwards  # that some begin, and what a pass has told

    run(ask())


def test_a_pass_waits_for_requests_that_are_expected(llm: AsyncLLM) -> None:
    """The same passes as if all had been asked at once; fewer come than were expected."""

    async def ask() -> None:
        async with llm:

            async def answered(num_early: int) -> float:
                before = (await llm.stats())["forwards"]
                early, late = PROMPTS[:num_early], PROMPTS[num_early:]
                tasks = [asyncio.create_task(llm.generate(each, PARAMS)) for each in early]
                await asyncio.sleep(0.05)
                tasks += [asyncio.create_task(llm.generate(each, PARAMS)) for each in late]
                llm.expect(-1)
                await asyncio.gather(*tasks)
                return (await llm.stats())["forwards"] - before

            llm.expect(len(PROMPTS) + 1)
            divided = await answered(1)
            llm.expect(len(PROMPTS) + 1)
            together = await answered(len(PROMPTS))
            assert divided == together

    run(ask())


def test_requests_that_do_not_come_are_not_waited_for(llm: AsyncLLM) -> None:
    async def ask() -> None:
        async with llm:
            for num_expected in (1, 10**6, -5):
                llm.expect(num_expected)
                start_s = time.monotonic()
                await llm.generate(PROMPTS[0], PARAMS)
                await llm.stats()  # work between passes is done meanwhile
                assert time.monotonic() - start_s < LIMIT_S / 4
            llm.expect(3)
            task = asyncio.create_task(llm.generate(PROMPTS[0], PARAMS))
            await asyncio.sleep(0.02)
        with pytest.raises(UsageError, match="closed"):
            await task

    run(ask())


def test_a_slow_reader_delays_no_other(llm: AsyncLLM, expected: Any) -> None:
    async def ask() -> None:
        async with aclosing(llm.stream(PROMPTS[1], PARAMS)) as slow:
            await anext(slow)
            [completion] = await llm.generate(PROMPTS[0], PARAMS)
            assert completion.token_ids == expected[0][0]
            rest = [event async for event in slow]
        last = rest[-1]
        assert isinstance(last, Finished) and list(last.token_ids) == expected[0][1]

    run(ask())


def test_what_is_cancelled_or_left_ends_alone(llm: AsyncLLM, expected: Any) -> None:
    long = SamplingParams(max_tokens=900, ignore_eos=True)

    async def ask() -> None:
        with passes_that_wait(llm):
            cancelled = asyncio.create_task(llm.generate([PROMPTS[2]], long))
            while not worker_of(llm).num_running:  # it has begun
                await asyncio.sleep(0.001)
            other = asyncio.create_task(llm.generate(PROMPTS[0], PARAMS))
            async with aclosing(llm.stream(PROMPTS[1], long)) as left:
                await anext(left)  # it begins
                await anext(left)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
        [completion] = await other
        assert completion.token_ids == expected[0][0]
        logits = asyncio.create_task(llm.logits(PROMPTS[2]))
        await asyncio.sleep(0)
        logits.cancel()
        with suppress(asyncio.CancelledError):
            await logits
        assert (await llm.generate(PROMPTS[1], PARAMS))[0].token_ids == expected[0][1]

    run(ask())
    check_idle(llm)


def test_refusals_and_errors_are_those_of_the_twin(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask() -> None:
        for prompt, said in ((["a"], "list of 1"), ([10**6], "not one of")):
            with pytest.raises(UsageError, match=said):
                await anext(llm.stream(prompt))
        with pytest.raises(UsageError, match="not the text"):
            await llm.logits("abc")

        def fails(batch: Any) -> Any:
            raise InternalError("a pass that fails")

        with monkeypatch.context() as patch:
            patch.setattr(engine_of(llm).model, "forward", fails)
            with pytest.raises(InternalError, match="a pass that fails"):
                await llm.generate(PROMPTS[0], PARAMS)
            with pytest.raises(InternalError, match="a pass that fails"):
                await llm.logits(PROMPTS[0])
        assert len(await llm.generate(PROMPTS[0], PARAMS)) == 1

    run(ask())


def test_a_stream_whose_loop_ended_is_dropped(llm: AsyncLLM) -> None:
    """News that nobody waits for any more are dropped, and nothing is left behind."""

    async def ask() -> None:
        stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=500, ignore_eos=True))
        await anext(stream)

    run(ask())
    assert len(run(llm.generate(PROMPTS[0], PARAMS))) == 1


def test_a_policy_is_adopted(llm: AsyncLLM, expected: Any) -> None:
    async def ask() -> None:
        await llm.adopt_policy("lru")
        assert llm.plan.policy == "lru"
        assert (await llm.generate(PROMPTS[0], PARAMS))[0].token_ids == expected[0][0]
        assert await llm.token_ids(PROMPTS[0]) == PROMPTS[0]

    run(ask())
