"""Parts of the server by themselves: streams, stop strings, context."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import LIMIT_S
from starlette.responses import Response
from starlette.types import Message
from stop_strings import cut_at_stop

from lowtide.config import Canvas
from lowtide.decode.request import Draft
from lowtide.errors import PlanError
from lowtide.families import families, read_config_in
from lowtide.llm import plan_model
from lowtide.model_folder.demos import DEMO_FOLDER
from lowtide.model_writing.synth import write_checkpoint
from lowtide.params import DiffusionParams
from lowtide.parsing.answer_pieces import AnswerPieces, CompletionTest, StopStrings
from lowtide.parsing.pieces import (
    CallArguments,
    CallBegun,
    Frame,
    FrameToken,
    Piece,
    Reasoning,
    Text,
)
from lowtide.plan import MemoryPlan
from lowtide.serve import sse
from lowtide.serve.context import AGENT_TOKENS, agent_note, served_context
from lowtide.serve.conversation import ToolCall, arguments_of
from lowtide.serve.errors import QueueFull
from lowtide.serve.frames import FrameWriter
from lowtide.serve.openai_fields import DiffusionFields
from lowtide.serve.reply import merged
from lowtide.serve.sse import EventStream, WatchedAnswer, begun, event


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, LIMIT_S))


class Source:
    """Items with waits between them; knows whether it was closed."""

    def __init__(self, *items: Any, wait_s: float = 0.0) -> None:
        self._items, self._wait_s = items, wait_s
        self.is_closed = False

    async def items(self) -> AsyncGenerator[Any, None]:
        try:
            for item in self._items:
                await asyncio.sleep(self._wait_s)
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.is_closed = True


async def listed(items: AsyncGenerator[Any, None]) -> list[Any]:
    async with aclosing(items):
        return [item async for item in items]


# Streams


def test_a_first_failure_is_raised_before_anything_is_sent() -> None:
    with pytest.raises(QueueFull):
        run(begun(Source(QueueFull("full", 1)).items()))

    async def ask() -> list[Any]:
        return await listed(await begun(Source(1, 2, 3).items()))

    assert run(ask()) == [1, 2, 3]


@pytest.mark.parametrize("count", [1, 3])
def test_several_answers_are_told_as_one(count: int) -> None:
    async def ask() -> None:
        sources = [Source(*range(n + 1), wait_s=0.001) for n in range(count)]
        found = await listed(merged([source.items() for source in sources]))
        for place in range(count):
            assert [item for index, item in found if index == place] == list(range(place + 1))
        assert all(source.is_closed for source in sources)

    run(ask())


def test_one_that_fails_ends_the_others() -> None:
    async def ask() -> None:
        slow, failing = Source(1, 2, wait_s=LIMIT_S), Source(1, ValueError("as told"))
        with pytest.raises(ValueError, match="as told"):
            await listed(merged([slow.items(), failing.items()]))
        assert slow.is_closed and failing.is_closed

    run(ask())


def test_events_are_one_line_each() -> None:
    assert event({"text": "a\nb é \ud800"}) == b'data: {"text":"a\\nb \\u00e9 \\ud800"}\n\n'
    assert event("[DONE]") == b"data: [DONE]\n\n"
    assert event({}, "ping") == b"event: ping\ndata: {}\n\n"


PING = b"ping"


class Connection:
    """A client that goes when it has read some messages; knows whether it was pinged."""

    def __init__(self, most: int) -> None:
        self.sent: list[Message] = []
        self._most = most
        self._gone = asyncio.Event()
        self.is_pinged = asyncio.Event()

    @property
    def parts(self) -> list[bytes]:
        return [message["body"] for message in self.sent if message.get("body")]

    async def receive(self) -> Message:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)
        if message.get("body") == PING:
            self.is_pinged.set()
        if len(self.sent) >= self._most:
            self._gone.set()


async def streamed(parts: AsyncGenerator[bytes, None]) -> Response:
    return EventStream(parts, lambda: PING)


def test_a_ping_stands_where_nothing_came(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> None:
        client = Connection(most=1000)
        await (await streamed(Source(b"1", b"2").items()))({}, client.receive, client.send)
        assert client.parts == [b"1", b"2"]

        async def late() -> AsyncGenerator[bytes, None]:
            for part in (b"1", b"2"):
                client.is_pinged.clear()
                await client.is_pinged.wait()
                yield part

        monkeypatch.setattr(sse, "PING_S", 0.01)
        client.sent.clear()
        await (await streamed(late()))({}, client.receive, client.send)
        assert client.parts[0] == client.parts[-2] == PING and client.parts[-1] == b"2"
        assert [part for part in client.parts if part != PING] == [b"1", b"2"]

    run(ask())


def test_what_is_pinged_is_closed_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "PING_S", 0.01)

    async def silent(source: Source) -> AsyncGenerator[bytes, None]:
        yield b"1"
        async with aclosing(source.items()) as items:
            async for item in items:
                yield item

    async def ask() -> None:
        source, client = Source(b"2", wait_s=LIMIT_S), Connection(most=3)
        answer = WatchedAnswer(silent(source), streamed)
        await answer({"type": "http"}, client.receive, client.send)
        assert source.is_closed and client.parts[:2] == [b"1", PING]

    run(ask())


def test_a_ping_that_cannot_be_made_ends_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "PING_S", 0.01)

    def ping() -> bytes:
        raise ValueError("as told")

    async def ask() -> None:
        source, client = Source(b"1", wait_s=LIMIT_S), Connection(most=1000)
        with pytest.raises(ExceptionGroup) as caught:
            await EventStream(source.items(), ping)({}, client.receive, client.send)
        assert [str(error) for error in caught.value.exceptions] == ["as told"]
        assert source.is_closed and not client.parts

    run(ask())


def test_no_ping_parts_what_waits_for_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(sse, "PING_S", 0.01)
    monkeypatch.setattr(sse, "time", SimpleNamespace(monotonic=lambda: now_s))

    class Slow(Connection):
        async def send(self, message: Message) -> None:
            nonlocal now_s
            await super().send(message)
            now_s += 1
            await asyncio.sleep(0.05)

    async def ask() -> None:
        client = Slow(most=1000)
        await (await streamed(Source(b"1", b"2").items()))({}, client.receive, client.send)
        assert client.parts == [b"1", b"2"]

    run(ask())


def test_pieces_are_closed_though_their_stream_has_not_begun() -> None:
    class Blocked(Connection):
        async def send(self, message: Message) -> None:
            await super().send(message)
            await asyncio.Event().wait()

    async def ask() -> None:
        source, client = Source(b"x"), Blocked(most=1)
        await WatchedAnswer(source.items(), streamed)({"type": "http"}, client.receive, client.send)
        assert source.is_closed and len(client.sent) == 1

    run(ask())


# Pieces


TEXTS = st.text("ab\n", max_size=12)


@given(st.lists(TEXTS, max_size=6), st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3))
def test_stop_strings_cut_whatever_the_parts(parts: Sequence[str], strings: list[str]) -> None:
    stop, whole = StopStrings(strings), "".join(parts)
    found = ""
    for part in parts:
        if stop.found is None:
            found += stop.push(part)
    found += "" if stop.found else stop.finish()
    assert found == cut_at_stop(whole, strings)
    assert (stop.found is not None) == (found != whole)


class Told:
    """A reader that tells what it is given as token ids' places."""

    num_reasoning = 0

    def __init__(self, *pieces: Piece) -> None:
        self._pieces = pieces

    def feed(self, token_ids: Sequence[int]) -> list[Piece]:
        return [self._pieces[i] for i in token_ids]

    def finish(self, is_cut: bool = False) -> list[Piece]:
        return []


CALLS = (
    Reasoning("a stop in thoughts"),
    Text("tex"),
    CallBegun(0, "x", "f"),
    CallArguments(0, "{}"),
    CallBegun(1, "y", "g"),
    CallArguments(1, "{}"),
)


def test_a_second_call_is_left_out_where_one_is_wanted() -> None:
    one = AnswerPieces(Told(*CALLS), ["stop"], parallel_calls=False)
    assert one.push(range(4)) == [CALLS[0], Text("tex"), *CALLS[2:4]] and not one.is_complete
    assert one.push([4, 5]) == [] and one.is_complete and one.finish() == []
    several = AnswerPieces(Told(*CALLS), ["stop"])
    assert several.push(range(6)) == list(CALLS) and not several.is_complete


def test_what_may_begin_a_stop_string_is_told_before_a_call() -> None:
    pieces = AnswerPieces(Told(Text("a st"), *CALLS[2:4], Text("op b")), ["stop"])
    assert pieces.push([0]) == [Text("a ")]
    assert pieces.push([1, 2]) == [Text("st"), *CALLS[2:4]]
    assert pieces.push([3]) == [Text("op b")] and not pieces.is_complete


def test_what_might_have_begun_a_stop_string_is_told_at_the_end() -> None:
    pieces = AnswerPieces(Told(Text("a st")), ["stop"])
    assert pieces.push([0]) == [Text("a ")]
    assert pieces.finish() == [Text("st")] and not pieces.is_complete


def test_a_reader_that_fails_ends_its_own_answer() -> None:
    assert CompletionTest(AnswerPieces(Told()))([0])  # there is no such piece


def test_frames_show_the_block_without_the_prompt_and_what_is_behind_the_end() -> None:
    block = (7, 8, 19, 9, 19, 6), (False, False, True, False, True, False)
    frame_of = FrameWriter(None).frame_of
    assert frame_of(Draft(0, 4, *block, 3, num_shown=6), 5) == Frame("8 ▁9 ▁6 ", 2, 3, 0)
    assert frame_of(Draft(0, 4, *block, 3, num_shown=4), 3) == Frame("7 8 ▁9 ", 1, 3, 1)
    told = (0, 2, 0, 1, 0, 3), (7, 8, 5, 9, 19, 6), (0.0, 0.9, 0.25, 1.0, 0.0, 0.5)
    frame = frame_of(Draft(0, 4, *block, 3, 4, *told), 5)
    assert frame.tokens == (
        FrameToken("8 ", 2, 0.9),
        FrameToken("5 ", 0, 0.25),
        FrameToken("9 ", 1, 1.0),
    )


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_arguments_that_no_answer_could_say_as_json_are_a_text(number: str) -> None:
    arguments = f'{{"a": [{number}]}}'
    assert arguments_of(ToolCall("", "", arguments)) == {"input": arguments}


# Context


def test_the_context_is_what_a_quarter_of_the_budget_has_room_for() -> None:
    folder = DEMO_FOLDER / "autoregressive"
    config = read_config_in(folder, {})
    large = replace(config, max_positions=1 << 20)
    asked: list[int] = []

    def plan_with(context: int) -> MemoryPlan:
        asked.append(context)
        return plan_model(folder, host_memory="64MiB", context=context)

    assert served_context(plan_with, config, 512) == config.max_positions
    context = served_context(plan_with, large, 512)
    tier = plan_with(context).fast_tier
    assert config.max_positions < context and tier.kv_cache_bytes <= 0.26 * tier.budget_bytes

    def refusing(context: int) -> MemoryPlan:
        if context > 2000:
            raise PlanError("as told")
        return plan_with(context)

    assert 512 <= served_context(refusing, large, 512) <= 2000
    whole = replace(config, decoding=Canvas())
    assert served_context(plan_with, whole, 512) == 512


WINDOWED: dict[str, dict[str, list[str]]] = {
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    # As Gemma: five of six layers see the last tokens alone, and take most of the bytes.
    "gpt_oss, most": {"layer_types": [*["sliding_attention"] * 5, "full_attention"]},
    "gpt_oss, no other": {"layer_types": ["sliding_attention"] * 4},
    "qwen3_5_moe": {},
}


@pytest.mark.parametrize("name", WINDOWED)
def test_the_context_is_the_largest_that_fits(name: str, tmp_path: Path) -> None:
    """Where windows cap the caches of layers, and where there are states."""
    family = name.partition(",")[0]
    size = families()[family].sizes()["tiny"]
    config = {**size.config, "max_position_embeddings": 1 << 20, **WINDOWED[name]}
    if layer_types := WINDOWED[name].get("layer_types"):
        config["num_hidden_layers"] = len(layer_types)
    write_checkpoint(replace(size, config=config), tmp_path / "model")
    asked: list[int] = []

    def plan_with(context: int) -> MemoryPlan:
        asked.append(context)
        return plan_model(tmp_path / "model", host_memory="256MiB", context=context)

    context = served_context(plan_with, read_config_in(tmp_path / "model", {}), 4096)
    assert len(asked) <= 20 and 4096 < context

    def taken(num_tokens: int) -> int:
        tier = plan_with(num_tokens).fast_tier
        return tier.kv_cache_bytes + tier.state_bytes

    assert taken(context) <= (64 << 20)
    assert context == 1 << 20 or taken(context + 256) > (64 << 20)
    by_first_tokens = (64 << 20) * 4096 // taken(4096)
    assert context > by_first_tokens // 256 * 256 - 256


def test_who_is_told_that_the_context_is_short() -> None:
    assert agent_note(AGENT_TOKENS) == ""
    assert "Codex" in agent_note(4096) and "32768" in agent_note(4096)


def test_a_diffusion_object_has_the_fields_of_the_python_api() -> None:
    assert set(DiffusionFields.model_fields) == {field.name for field in fields(DiffusionParams)}
