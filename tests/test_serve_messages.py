"""`/v1/messages` reads all of Claude Code's requests, and Anthropic's client reads its answers.

The answers are the same streamed and not.
"""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pytest
from agent_requests import claude_request, words
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from scripted_serving import (
    ScriptedService,
    answer_of,
    done,
    drawn_pieces,
    events_of,
    listening,
)

from lowtide.errors import StorageError
from lowtide.parsing.pieces import Piece, Text
from lowtide.serve import sse
from lowtide.serve.anthropic_messages import MessageReply
from lowtide.serve.errors import Draining, TooLong

ANSWER = answer_of(("call_1", "Tool1", '{"path": "a.py"}'), ("call_2", "Tool2", "{}"))

CONTENT = [
    {"type": "thinking", "thinking": "Look first.", "signature": ""},
    {"type": "text", "text": "I look."},
    {"type": "tool_use", "id": "call_1", "name": "Tool1", "input": {"path": "a.py"}},
    {"type": "tool_use", "id": "call_2", "name": "Tool2", "input": {}},
]

SHORT: dict[str, Any] = {
    "model": "org/tiny",
    "max_tokens": 8,
    "messages": [{"role": "user", "content": "x"}],
}


def post(url: str, body: dict[str, Any], path: str = "/v1/messages?beta=true") -> httpx.Response:
    return httpx.post(f"{url}{path}", json=body, timeout=30)


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of its events."""
    message: dict[str, Any] = {}
    texts: list[str] = []
    for event in events:
        kind = event["type"]
        if kind == "message_start":
            message = event["message"]
        elif kind == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            texts.append("")
        elif kind == "content_block_delta":
            delta, block = event["delta"], message["content"][event["index"]]
            if delta["type"] == "input_json_delta":
                texts[-1] += delta["partial_json"]
            elif delta["type"] != "signature_delta":
                name = delta["type"].removesuffix("_delta")
                block[name] += delta[name]
        elif kind == "content_block_stop" and message["content"][-1]["type"] == "tool_use":
            message["content"][-1]["input"] = json.loads(texts[-1] or "{}")
        elif kind == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    return message


def client_of(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)


def test_claude_code_gets_its_events_in_order() -> None:
    service = ScriptedService(ANSWER)
    with listening(service) as url:
        hello = httpx.head(f"{url}/api/hello")
        answer = post(url, claude_request())
        whole = post(url, claude_request(stream=False)).json()
    assert hello.status_code == 200
    events = events_of(answer.text)
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "content_block_start",
        *["content_block_delta"] * 2,
        "content_block_stop",
        *["content_block_start", "content_block_delta", "content_block_stop"] * 2,
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"]["usage"]["input_tokens"] == 40
    assert events[0]["message"]["content"] == [] and events[0]["message"]["stop_reason"] is None
    streamed = assembled(events)
    assert streamed.pop("id") != whole.pop("id")
    assert streamed == whole
    assert whole["content"] == CONTENT
    assert whole["stop_reason"] == "tool_use" and whole["model"] == "org/tiny"
    assert whole["usage"] == {
        "input_tokens": 24,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 16,
        "output_tokens": 9,
    }
    assert answer.headers["x-lowtide-model"] == "org/tiny"
    assert answer.headers["x-lowtide-ignored"] == "metadata, context_management, thinking.display"


def test_what_claude_code_sends_is_read_whole() -> None:
    service = ScriptedService([done()])
    with listening(service) as url:
        assert post(url, claude_request()).status_code == 200
    [ask] = service.asks
    system, user, later = ask.conversation.turns
    assert system.text == f"{words(60)}\n{words(9000)}"
    assert (user.role, user.text) == ("user", f"{words(600)}\nRepair the test.")
    assert (later.role, later.text) == ("system", words(500))
    assert [tool.name for tool in ask.conversation.tools] == [f"Tool{i}" for i in range(12)]
    assert ask.params.max_tokens == 32_000 and ask.cut_to_room
    assert ask.template_options == {"enable_thinking": True, "reasoning_effort": "high"}


def test_a_second_turn_begins_with_the_first_whatever_its_form() -> None:
    service = ScriptedService([done()])
    with listening(service) as url:
        for turn in (1, 2):
            assert post(url, claude_request(turn)).status_code == 200
    first, second = (ask.conversation for ask in service.asks)
    assert second.turns[: len(first.turns)] == first.turns and second.tools == first.tools
    answer, result, reminder = second.turns[len(first.turns) :]
    assert (answer.reasoning, answer.text) == ("Look first.", "I look.")
    assert (result.role, result.text, result.tool_call_id) == ("tool", "1 failed", "call_1")
    assert (reminder.role, reminder.text) == ("user", "<system-reminder>be brief</system-reminder>")


def test_the_answer_comes_back_as_the_turn_that_was_written() -> None:
    service = ScriptedService(ANSWER)
    with listening(service) as url:
        content = post(url, claude_request(stream=False)).json()["content"]
        each = [{"role": "assistant", "content": [block]} for block in content]
        for answers in ([{"role": "assistant", "content": content}], each):
            messages = [*SHORT["messages"], *answers, {"role": "user", "content": "go on"}]
            assert post(url, {**SHORT, "messages": messages}).status_code == 200
    _, first, second = (ask.conversation for ask in service.asks)
    assert first == second
    _, answer, _ = first.turns
    assert (answer.text, answer.reasoning) == ("I look.", "Look first.")
    assert [json.loads(call.arguments) for call in answer.tool_calls] == [{"path": "a.py"}, {}]


def test_the_billing_line_changes_nothing() -> None:
    service = ScriptedService([done()])
    line = "x-anthropic-billing-header: cc_version=2; cch={};"
    forms: list[Any] = [
        "Be brief.",
        f"{line.format(1)}\n\nBe brief.",
        f"Be brief.\n{line.format(2)}",
        [{"type": "text", "text": line.format(3)}, {"type": "text", "text": "Be brief."}],
    ]
    with listening(service) as url:
        for system in forms:
            assert post(url, {**SHORT, "system": system}).status_code == 200
        said = {"role": "user", "content": line.format(4)}
        assert post(url, {**SHORT, "messages": [said]}).status_code == 200
    *asks, last = service.asks
    assert len({ask.conversation for ask in asks}) == 1
    assert last.conversation.turns[0].text == line.format(4)


@pytest.mark.parametrize(
    ("choice", "asked", "parallel"),
    [
        ({"type": "auto"}, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "tool", "name": "Tool3"}, "Tool3", True),
        ({"type": "none"}, "none", True),
    ],
)
def test_choices_of_tools(choice: dict[str, Any], asked: str, parallel: bool) -> None:
    service = ScriptedService([done()])
    with listening(service) as url:
        assert post(url, claude_request(tool_choice=choice)).status_code == 200
    assert (service.asks[0].tool_choice, service.asks[0].parallel_calls) == (asked, parallel)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": []}, "user message"),
        ({"messages": [{"role": "boss", "content": "x"}]}, "boss"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "'tool_use'"),
        ({"messages": [{"role": "user", "content": [7]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2**40}, "max_tokens"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences: List should have at most 16 items"),
        ({"stop_sequences": ["x" * 2000]}, "stop_sequences.0: String should have at most 1024"),
        ({"temperature": "warm"}, "temperature"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"tools": [{"name": "a", "input_schema": "x"}]}, "input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "web_search"}}, "web_search"),
        ({"tool_choice": {"type": "tool", "name": "auto"}}, "auto"),
        ({"tool_choice": {"type": "some"}}, "some"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    hosted = {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}
    with listening(ScriptedService([done()])) as url:
        answer = post(url, {**SHORT, **hosted, **fields})
    assert answer.status_code == 400
    body = answer.json()
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert named in body["error"]["message"]


def test_an_image_that_a_tool_shows_is_told_of_and_no_end() -> None:
    service = ScriptedService([done()])
    called = {"type": "tool_use", "id": "toolu_1", "name": "Tool0", "input": {"path": "a.png"}}
    image = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    content = [{"type": "text", "text": "a.png"}, {"type": "image", "source": image}]
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": content}
    messages = [
        *SHORT["messages"],
        {"role": "assistant", "content": [called]},
        {"role": "user", "content": [result]},
    ]
    with listening(service) as url:
        answer = post(url, {**SHORT, "messages": messages})
    assert answer.status_code == 200
    place = f"messages[{len(messages) - 1}].content[0].content[1].image"
    assert answer.headers["x-lowtide-ignored"] == place
    output = service.asks[0].conversation.turns[-1]
    assert output.role == "tool" and output.text.startswith("a.png\n[image left out")


@pytest.mark.parametrize(
    ("source", "text", "ignored"),
    [
        ({"type": "base64", "media_type": "application/pdf", "data": "AA"}, "[document left", True),
        ({"type": "url", "url": "https://a.example/b.pdf"}, "[document left out", True),
        ({"type": "text", "media_type": "text/plain", "data": "its words"}, "its words", False),
    ],
)
def test_a_document_that_a_client_opened_is_told_of_and_no_end(
    source: dict[str, str], text: str, ignored: bool
) -> None:
    """As Claude Code sends a PDF: beside the tool's output, at every further turn."""
    service = ScriptedService([done()])
    content = [{"type": "document", "source": source}, {"type": "text", "text": "What is it?"}]
    with listening(service) as url:
        answer = post(url, {**SHORT, "messages": [{"role": "user", "content": content}]})
    assert answer.status_code == 200
    assert ("x-lowtide-ignored" in answer.headers) == ignored
    said = service.asks[0].conversation.turns[-1].text
    assert said.startswith(text) and said.endswith("What is it?")


def test_servers_tools_and_hidden_thoughts_are_left_out_and_named() -> None:
    service = ScriptedService([done()])
    hidden = [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "a"}]
    messages = [
        *SHORT["messages"],
        {"role": "assistant", "content": hidden},
        {"role": "user", "content": "b"},
    ]
    tools = [{"type": "web_search_20250305", "name": "web_search"}]
    fields = {"tools": tools, "betas": ["x"], "output_config": {"effort": "extreme"}}
    with listening(service) as url:
        answer = post(url, {**SHORT, "messages": messages, **fields})
    assert answer.status_code == 200
    assert answer.headers["x-lowtide-ignored"] == (
        "betas, messages[1].content[0].redacted_thinking, tools.web_search_20250305, "
        "output_config.effort"
    )
    assert [turn.text for turn in service.asks[0].conversation.turns] == ["x", "a", "b"]


@pytest.mark.parametrize(
    ("end", "reason", "sequence"),
    [
        (done("stop"), "end_turn", None),
        (done("stop", "END"), "stop_sequence", "END"),
        (done("length"), "max_tokens", None),
    ],
)
def test_ends(end: Piece, reason: str, sequence: str | None) -> None:
    service = ScriptedService([Text("a"), end])
    with listening(service) as url:
        whole = post(url, {**SHORT, "stop_sequences": ["END"]}).json()
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
    assert service.asks[0].params.stop_strings == ("END",)
    assert service.asks[0].template_options == {"enable_thinking": False}


def test_tokens_are_counted() -> None:
    with listening(ScriptedService([])) as url:
        body = claude_request()
        del body["max_tokens"]
        counted = post(url, body, "/v1/messages/count_tokens")
    assert counted.json() == {"input_tokens": 40}


def test_errors_have_anthropics_form() -> None:
    with listening(ScriptedService([TooLong(50_000, 1, 32_768)])) as url:
        long = post(url, claude_request())
    with listening(ScriptedService([Draining()])) as url:
        draining = post(url, claude_request())
    with listening(ScriptedService([Text("a"), StorageError("the disk is gone")])) as url:
        events = events_of(post(url, claude_request()).text)
        whole = post(url, SHORT)
    assert long.status_code == 400
    assert long.json()["error"]["message"] == "prompt is too long: 50000 tokens > 32768 maximum"
    assert draining.status_code == 503 and draining.json()["error"]["type"] == "overloaded_error"
    assert events[-1] == {
        "type": "error",
        "error": {"type": "api_error", "message": "the disk is gone"},
    }
    assert whole.status_code == 500 and whole.json()["error"]["type"] == "api_error"


def test_silence_is_broken_by_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "PING_S", 0.02)
    with listening(ScriptedService([0.1, Text("late"), done()])) as url:
        events = events_of(post(url, claude_request()).text)
    assert events[0]["type"] == "message_start"
    pings = [event for event in events if event["type"] == "ping"]
    assert pings and pings[0]["lowtide"] == {"prompt_tokens_done": 0, "prompt_tokens": 40}


def test_anthropics_client_reads_the_same_streamed_and_not() -> None:
    asked: dict[str, Any] = {
        "model": "claude",
        "max_tokens": 100,
        "messages": [{"role": "user", "content": "x"}],
        "tools": claude_request()["tools"],
    }
    with listening(ScriptedService(ANSWER)) as url, client_of(url) as client:
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            text = "".join(stream.text_stream)
            last = stream.get_final_message()
        counted = client.messages.count_tokens(model="claude", messages=asked["messages"])
    assert text == "I look." and counted.input_tokens == 40
    assert [block.type for block in whole.content] == [block["type"] for block in CONTENT]
    for ours, theirs in zip(last.content, whole.content, strict=True):
        assert ours.model_dump(exclude_none=True) == theirs.model_dump(exclude_none=True)
    assert last.stop_reason == whole.stop_reason == "tool_use"
    assert last.usage.cache_read_input_tokens == whole.usage.cache_read_input_tokens == 16


@given(drawn_pieces(), st.sampled_from(["stop", "length"]))
@examples(100)
def test_streamed_is_not_streamed(pieces: list[Piece], reason: str) -> None:
    writer = MessageReply("org/tiny")
    events = [json.loads(json.dumps(e)) for p in [*pieces, done(reason)] for e in writer.frames(p)]
    assert assembled(events) == writer.whole()
