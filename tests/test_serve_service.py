"""One engine for many: queue, cancellation, time, faults; nothing of one request is another's."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from inside import engine_of, loop_of, worker_of
from serving import Running, asked, serving, talking_folder
from whole import LIMIT_S, check_idle, no_more_threads, passes_that_wait, wait_until

from lowtide import AsyncLLM, SamplingParams
from lowtide.decode.batch_decoder import BatchDecoder
from lowtide.decode.request import Committed, Event, Request
from lowtide.engine.running import worker
from lowtide.engine.running.engine import Engine
from lowtide.errors import InternalError, NumericError, UsageError
from lowtide.parsing.answer_pieces import AnswerPieces
from lowtide.parsing.pieces import Done, Piece, Prefilled, Text
from lowtide.serve.admission import Admission
from lowtide.serve.conversation import Conversation, Turn
from lowtide.serve.errors import Draining, QueueFull, Refusal, TimedOut, TooLong
from lowtide.serve.service import Ask, Served, Service, name_of
from lowtide.serve.settings import ServeSettings

LONG = SamplingParams(max_tokens=1800, ignore_eos=True, temperature=0)
SHORT = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=64, temperature=0.8, ignore_eos=True)
TALK = Conversation((Turn("user", "import os"),))


@pytest.fixture(scope="module", params=["autoregressive", "diffusion"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_folder(tmp_path_factory.mktemp("service") / request.param, request.param)


@pytest.fixture
def llm(folder: Path) -> Iterator[AsyncLLM]:
    with no_more_threads():
        llm = AsyncLLM(folder, context=2048, dtype="float32", cache="off")
        yield llm
        loop_of(llm).close()
        del llm
        gc.collect()


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, LIMIT_S))


async def whole(pieces: AsyncGenerator[Piece, None]) -> tuple[list[Piece], Done]:
    """All pieces of an answer, and the last of them."""
    async with aclosing(pieces):
        found = [piece async for piece in pieces]
    assert isinstance(found[-1], Done)
    return found, found[-1]


async def text_of(service: Service, ask: Ask) -> str:
    pieces, _ = await whole(service.answer(ask))
    return "".join(piece.text for piece in pieces if isinstance(piece, Text))


def test_the_first_piece_is_the_prompt_s_length_and_the_last_the_answer_s_end(
    llm: AsyncLLM,
) -> None:
    async def ask() -> None:
        service = Service(llm)
        pieces, done = await whole(service.answer(Ask(TALK, params=SHORT)))
        assert pieces[0] == Prefilled(0, done.num_prompt) and pieces[-1] is done
        assert done.num_prompt == await service.count(Ask(TALK)) and done.num_new == 6
        assert done.reason in ("stop", "length") and len(done.token_ids) == 6

    run(ask())


def test_the_queue_is_bounded_by_requests(llm: AsyncLLM) -> None:
    async def ask() -> None:
        service = Service(llm, ServeSettings(max_requests=2))
        async with aclosing(service.answer(Ask(TALK, params=LONG))) as first:
            await anext(first)
            async with aclosing(service.answer(Ask(TALK, params=LONG))) as second:
                await anext(second)
                with pytest.raises(QueueFull, match="2 requests") as caught:
                    await anext(service.answer(Ask(TALK, params=SHORT)))
                assert caught.value.status == 429
                assert 1 <= int(caught.value.headers["retry-after"]) <= 60
            assert await text_of(service, Ask(TALK, params=SHORT))
        assert service.admission.num_running == service.admission.num_waiting == 0
        assert service.admission.num_refused == 1

    run(ask())


def test_the_queue_is_bounded_by_prompt_tokens_that_wait(llm: AsyncLLM) -> None:
    async def ask() -> None:
        service = Service(llm, ServeSettings(max_queued_tokens=20))
        long = Ask(prompt=[5] * 30, params=SHORT)
        async with aclosing(service.answer(long)) as first:
            assert await anext(first) == Prefilled(0, 30)  # alone it is let in
            with pytest.raises(QueueFull, match="30 tokens are waiting"):
                await anext(service.answer(Ask(prompt=[5], params=SHORT)))
            await anext(first)  # has begun
            await text_of(service, Ask(prompt=[5], params=SHORT))
        assert service.admission.num_waiting_tokens == 0

    run(ask())


def test_a_prompt_that_brings_the_queue_above_its_tokens_is_refused() -> None:
    admission = Admission(max_requests=9, max_queued_tokens=20)
    with admission.enter() as first, admission.enter() as second:
        first.wait_with(12)
        with pytest.raises(QueueFull, match="12 tokens are waiting, and with 9 more .* above 20"):
            second.wait_with(9)
        second.wait_with(8)
        assert admission.num_waiting_tokens == 20


async def begun(service: Service) -> None:
    """Until a request is counted as one that runs."""
    while not service.admission.num_running:
        await asyncio.sleep(0.001)


def test_a_request_runs_as_soon_as_its_first_pass_does(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading its prompt is not waiting, neither in the queue's numbers nor in its own."""
    forward, may_end = engine_of(llm).model.forward, threading.Event()

    def held(batch: Any) -> Any:
        assert may_end.wait(LIMIT_S)
        return forward(batch)

    async def ask() -> None:
        service, served = Service(llm), []
        service.on_served.append(served.append)
        monkeypatch.setattr(engine_of(llm).model, "forward", held)
        answer = asyncio.ensure_future(whole(service.answer(Ask(prompt=[5] * 30, params=SHORT))))
        await begun(service)
        admission = service.admission
        assert admission.num_waiting == admission.num_waiting_tokens == 0
        may_end.set()
        await answer
        assert served[0].queue_s < served[0].first_s

    run(ask())


def test_a_server_that_drains_finishes_what_it_has(llm: AsyncLLM) -> None:
    async def ask() -> None:
        service = Service(llm)
        async with aclosing(service.answer(Ask(TALK, params=SHORT))) as pieces:
            await anext(pieces)
            service.drain()
            assert service.state == "draining"
            with pytest.raises(Draining):
                await anext(service.answer(Ask(TALK)))
            assert isinstance([piece async for piece in pieces][-1], Done)

    run(ask())


def test_an_answer_that_is_too_long_for_a_server_that_ends_is_told_so(llm: AsyncLLM) -> None:
    async def ask() -> None:
        service = Service(llm)
        async with aclosing(service.answer(Ask(TALK, params=LONG))) as pieces:
            for _ in range(3):
                await anext(pieces)
            service.drain(0.0)
            with pytest.raises(Draining):
                async for _ in pieces:
                    pass

    run(ask())
    check_idle(llm)


def test_an_answer_that_waits_is_told_so_by_a_server_that_ends(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no event comes any more, as in the queue or in a long pass."""

    async def ask() -> None:
        waits = asyncio.Event()

        async def events(_: list[Request], is_whole: bool) -> AsyncGenerator[Event, None]:
            waits.set()
            await asyncio.Event().wait()
            yield Committed(0, (5,))

        monkeypatch.setattr(llm, "events", events)
        service = Service(llm)
        async with aclosing(service.answer(Ask(TALK, params=SHORT))) as pieces:
            await anext(pieces)  # the prompt's length
            task = asyncio.ensure_future(anext(pieces))
            await waits.wait()
            service.drain()
            service.drain(0.01)
            with pytest.raises(Draining):
                await task
        assert service.is_idle

    run(ask())


def test_an_answer_that_is_left_ends_between_two_passes(llm: AsyncLLM) -> None:
    async def ask() -> None:
        service, served = Service(llm), []
        service.on_served.append(served.append)
        expected = await text_of(service, Ask(TALK, params=SHORT))
        async with aclosing(service.answer(Ask(TALK, params=LONG))) as pieces:
            for _ in range(3):
                await anext(pieces)
        with passes_that_wait(llm):
            task = asyncio.create_task(whole(service.answer(Ask(TALK, params=LONG))))
            await begun(service)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        assert await text_of(service, Ask(TALK, params=SHORT)) == expected
        assert [one.reason for one in served][1:3] == ["abort", "abort"]
        assert isinstance(served[0], Served) and served[0].num_new == 6

    run(ask())
    check_idle(llm)


@pytest.mark.parametrize("num_ticks", range(6))
def test_an_answer_that_is_left_as_an_event_comes_ends(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, num_ticks: int
) -> None:
    async def ask() -> None:
        waits, coming = asyncio.Event(), asyncio.Event()

        async def events(_: list[Request], is_whole: bool) -> AsyncGenerator[Event, None]:
            waits.set()
            await coming.wait()
            yield Committed(0, (5,))
            await asyncio.Event().wait()

        monkeypatch.setattr(llm, "events", events)
        service, served = Service(llm), []
        service.on_served.append(served.append)
        pieces = service.answer(Ask(TALK, params=SHORT))
        await anext(pieces)  # the prompt's length
        task = asyncio.ensure_future(anext(pieces))
        await waits.wait()
        coming.set()
        for _ in range(num_ticks):
            await asyncio.sleep(0)
        was_told = task.done()
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled() != was_told
        await pieces.aclose()
        assert served[0].reason == "abort"

    run(ask())


def test_events_that_end_before_their_answer_are_a_fault(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask() -> None:
        async def events(_: list[Request], is_whole: bool) -> AsyncGenerator[Event, None]:
            yield Committed(0, (5,))

        monkeypatch.setattr(llm, "events", events)
        service, served = Service(llm), []
        service.on_served.append(served.append)
        with pytest.raises(InternalError, match="before the answer"):
            await whole(service.answer(Ask(TALK, params=SHORT)))
        assert [one.reason for one in served] == ["error"]

    run(ask())


def test_an_answer_has_a_limit_of_time(llm: AsyncLLM) -> None:
    async def ask() -> None:
        service = Service(llm, ServeSettings(request_timeout_s=1))
        object.__setattr__(service.settings, "request_timeout_s", 0.01)
        with pytest.raises(TimedOut, match="--request-timeout"):
            await whole(service.answer(Ask(TALK, params=LONG)))

    run(ask())
    check_idle(llm)


async def ids_of(service: Service, ask: Ask) -> tuple[int, ...]:
    _, done = await whole(service.answer(ask))
    return done.token_ids


@pytest.mark.parametrize("is_frozen", [True, False])
def test_objects_that_the_program_froze_stay_frozen(llm: AsyncLLM, is_frozen: bool) -> None:
    """A server freezes what there is, and unfreezes it at its end, where nobody has before it."""

    async def serve() -> int:
        async with Service(llm).running():
            return gc.get_freeze_count()

    gc.freeze() if is_frozen else gc.unfreeze()
    assert run(serve()) > 0
    assert (gc.get_freeze_count() > 0) == is_frozen
    gc.freeze()


def hold_pass(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, num_asked: int) -> None:
    """The next pass is run once so many have asked."""
    run_pass, its_worker = worker.run_pass, worker_of(llm)

    def with_all(engine: Engine, decoder: BatchDecoder[Any]) -> list[Event]:
        wait_until(lambda: its_worker.num_running + its_worker.mailbox.qsize() == num_asked)
        monkeypatch.setattr(worker, "run_pass", run_pass)
        return run_pass(engine, decoder)

    monkeypatch.setattr(worker, "run_pass", with_all)


def test_numbers_that_overflow_fail_their_own_request(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In passes that others share, who may also have the memory of its keys afterwards."""
    kernels = type(engine_of(llm).model.compute.kernels)
    select_rows = kernels.select_rows

    async def ask() -> None:
        service = Service(llm)
        others = [Ask(prompt=text, params=SHORT) for text in ("import os\n", "def f(x):\n    ")]
        alone = [await ids_of(service, each) for each in others]
        prompts = [await service.prompt_ids(each) for each in others]
        used = {llm.config.decoding.mask_token_id, *chain(*alone, *prompts)}
        broken = next(token for token in range(100) if token not in used)

        def overflowing(self: Any, matrix: Any, rows: torch.Tensor, out: torch.Tensor) -> None:
            select_rows(self, matrix, rows, out)
            out[rows == broken] = float("nan")

        monkeypatch.setattr(kernels, "select_rows", overflowing)
        asks = [others[0], Ask(prompt=[broken] * 40, params=SHORT), others[1]]
        for _ in range(2):
            hold_pass(llm, monkeypatch, len(asks))
            answers = [ids_of(service, each) for each in asks]
            first, error, last = await asyncio.gather(*answers, return_exceptions=True)
            assert isinstance(error, NumericError) and "all weights are finite" in str(error)
            assert [first, last] == alone
        assert [await ids_of(service, each) for each in others] == alone

    run(ask())
    check_idle(llm)


def test_room_is_cut_or_refused(llm: AsyncLLM) -> None:
    async def ask() -> None:
        service = Service(llm)
        many = SamplingParams(max_tokens=32_000, temperature=0, stop=["\n"])
        with pytest.raises(TooLong, match="32000 in the completion"):
            await anext(service.answer(Ask(TALK, params=many)))
        async with aclosing(service.answer(Ask(TALK, params=many, cut_to_room=True))) as pieces:
            await anext(pieces)
        long = Ask(prompt=[5] * 2048, params=SHORT, cut_to_room=True)
        with pytest.raises(TooLong) as caught:
            await anext(service.answer(long))
        assert caught.value.anthropic_message == "prompt is too long: 2048 tokens > 2048 maximum"

    run(ask())


def test_a_bad_request_fails_alone(llm: AsyncLLM) -> None:
    async def ask() -> None:
        service = Service(llm)
        expected = await text_of(service, Ask(TALK, params=SHORT))
        params = SamplingParams(max_tokens=64, ignore_eos=True, temperature=0)
        alone = await text_of(service, Ask(TALK, params=params))
        running = asyncio.create_task(text_of(service, Ask(TALK, params=params)))
        for bad in (
            Ask(prompt=[10**9], params=SHORT),
            Ask(prompt="", params=SHORT),
            Ask(params=SHORT),
            Ask(Conversation((Turn("wizard", "x"),)), params=SHORT),
        ):
            with pytest.raises(UsageError):
                await anext(service.answer(bad))
        assert await running == alone
        assert await text_of(service, Ask(TALK, params=SHORT)) == expected

    run(ask())


def test_answers_in_company_have_the_ids_that_they_have_alone(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, where only ties may fall otherwise."""

    async def ask() -> None:
        service = Service(llm)
        asks = [
            Ask(prompt=text, params=replace(DRAWN, seed=seed))
            for seed, text in enumerate(["import os\n", "def f(x):\n    ", "47 + 85", "class A:"])
        ]
        passes = [(await llm.stats())["forwards"]]
        alone = [await ids_of(service, each) for each in asks]
        passes.append((await llm.stats())["forwards"])
        hold_pass(llm, monkeypatch, len(asks))
        together = await asyncio.gather(*(ids_of(service, each) for each in asks))
        passes.append((await llm.stats())["forwards"])
        assert together == alone and len(set(alone)) == 4
        assert passes[2] - passes[1] < passes[1] - passes[0]  # some were shared

    run(ask())


def test_draws_differ_unless_a_seed_is_given(llm: AsyncLLM) -> None:
    async def ask() -> None:
        service = Service(llm)

        def drawn(seed: int | None) -> Ask:
            params = SamplingParams(max_tokens=24, temperature=5.0, seed=seed, ignore_eos=True)
            return Ask(TALK, params=params)

        assert len({await text_of(service, drawn(None)) for _ in range(4)}) == 4
        assert len({await text_of(service, drawn(7)) for _ in range(2)}) == 1

    run(ask())


def test_names(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"")
    assert name_of(str(tmp_path / "model.gguf")) == "model"
    assert name_of(str(tmp_path)) == tmp_path.name
    assert name_of("org/name") == "org/name" and name_of("demo:diffusion") == "demo:diffusion"


# Over sockets


@pytest.fixture
def running(llm: AsyncLLM) -> Iterator[Running]:
    with serving(llm, max_requests=1) as server:
        yield server


LONG_BODY = {"prompt": "import", "max_tokens": 1800, "ignore_eos": True, "temperature": 0}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_ends_its_request(llm: AsyncLLM, running: Running, stream: bool) -> None:
    admission = running.service.admission
    ended: list[Served] = []
    running.service.on_served.append(ended.append)
    with passes_that_wait(llm):
        with asked(running.url, "/v1/completions", **LONG_BODY, stream=stream) as client:
            wait_until(lambda: admission.num_running)
            assert not stream or client.recv(1)
        wait_until(lambda: ended)
        assert ended[-1].reason == "abort" and ended[-1].num_new < 1800
        assert admission.num_running + admission.num_waiting == 0
        wait_until(lambda: worker_of(llm).is_idle)


def test_a_full_queue_is_a_429_with_its_time(running: Running) -> None:
    body = {"prompt": "a", "max_tokens": 2}
    with running.client() as client:
        with running.service.admission.enter():
            refused = client.post("/v1/completions", json=body)
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert client.post("/v1/completions", json=body).status_code == 200
        running.service.drain()
        refused = client.post("/v1/completions", json=body)
        assert refused.status_code == 503 and "retry-after" in refused.headers
        for path, status, state in (("/health", 200, "ok"), ("/ready", 503, "draining")):
            told = client.get(path)
            assert (told.status_code, told.json()) == (status, {"status": state})


def test_load_balancers_may_ask_by_head(running: Running) -> None:
    """HEAD is answered as GET without the body, on a connection that stays of use."""
    with running.client() as client:
        for prepare in (lambda: None, running.service.drain):
            prepare()
            for path in ("/health", "/ready"):
                told, asked = client.get(path), client.head(path)
                assert asked.status_code == told.status_code and not asked.content
                assert asked.headers["content-length"] == str(len(told.content))


def test_more_answers_than_may_ever_run_are_refused(running: Running) -> None:
    """A 429 would have the client ask again and again."""
    said = [{"role": "user", "content": "x"}]
    with running.client() as client:
        for path, body, param in (
            ("/v1/chat/completions", {"messages": said, "n": 2}, "n"),
            ("/v1/completions", {"prompt": ["a", "b"]}, "prompt"),
            ("/v1/completions", {"prompt": "a", "n": 2}, "n"),
        ):
            answer = client.post(path, json=body)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert "2 answers are more than the 1" in error["message"] and error["param"] == param


def test_what_fails_in_the_midst_of_a_stream_is_an_event(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    push = AnswerPieces.push

    def failing(pieces: AnswerPieces, tokens: Sequence[int]) -> list[Piece]:
        found = push(pieces, tokens)
        if any(isinstance(piece, Text) for piece in found):
            raise Refusal("as told", 500, "server_error")
        return found

    body = {**LONG_BODY, "stream": True}
    with monkeypatch.context() as patched, running.client() as client:
        patched.setattr(AnswerPieces, "push", failing)
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["message"] == "as told"
        assert "[DONE]" not in lines[-1]
        whole_answer = client.post("/v1/completions", json=LONG_BODY)
        assert whole_answer.status_code == 500
    with running.client() as client:
        answer = client.post("/v1/completions", json={**LONG_BODY, "max_tokens": 3})
        assert answer.status_code == 200


def test_an_engine_that_has_ended_is_not_healthy(running: Running) -> None:
    with running.client() as client:
        assert client.get("/health").status_code == 200
        loop_of(running.service.llm).close()
        for path in ("/health", "/ready"):
            told = client.get(path)
            assert (told.status_code, told.json()) == (503, {"status": "ended"})
        assert client.get("/").status_code == 200
        with client.stream("GET", "/v1/lowtide/events") as events:
            told = [line for line in events.iter_lines() if line.startswith("data: ")]
        assert json.loads(told[-1].removeprefix("data: "))["state"] == "ended"
        answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
        assert answer.status_code >= 400 and answer.json()["error"]["message"]
