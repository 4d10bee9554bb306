"""`/v1/responses` reads all of Codex's requests, and OpenAI's client and Codex read its answers.

The answers are the same streamed and not.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from agent_requests import APPLY_PATCH, codex_lite_request, codex_request
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

from lowtide.parsing.pieces import CallArguments, CallBegun, Piece, Prefilled, Text
from lowtide.serve import sse
from lowtide.serve.custom_tools import CustomInput
from lowtide.serve.responses import ResponseReply, ToolForm

PATCH = "*** Begin Patch\n*** Update File: a.py\n-x\n+y\n*** End Patch\n"

ANSWER = answer_of(
    ("call_a", "exec_command", '{"cmd": "ls"}'),
    ("call_b", "apply_patch", json.dumps({"input": PATCH})),
    ("call_c", "collab__wait", "{}"),
)

OF_ANSWER = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.reasoning_text.delta",
    "response.reasoning_text.delta",
    "response.reasoning_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
    "response.output_item.added",
    "response.custom_tool_call_input.delta",
    "response.custom_tool_call_input.done",
    "response.output_item.done",
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
    "response.completed",
]


NESTED: Any = 1
for _ in range(100):
    NESTED = [NESTED]


def post(url: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{url}/v1/responses", json=body, timeout=30)


def without_ids(value: Any) -> Any:
    """The same without what is of one response: ids and times."""
    if isinstance(value, dict):
        own = ("id", "item_id", "created_at", "completed_at")
        return {name: without_ids(each) for name, each in value.items() if name not in own}
    return [without_ids(each) for each in value] if isinstance(value, list) else value


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_codex_gets_its_events_in_order() -> None:
    service = ScriptedService(ANSWER)
    with listening(service) as url:
        answer = post(url, codex_request())
        whole = post(url, codex_request(stream=False)).json()
    events = events_of(answer.text)
    assert [event["type"] for event in events] == OF_ANSWER
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "[DONE]" not in answer.text
    last = events[-1]["response"]
    assert without_ids(last) == without_ids(whole)
    assert last["model"] == "org/tiny"
    assert answer.headers["x-lowtide-model"] == "org/tiny"
    ignored = answer.headers["x-lowtide-ignored"].split(", ")
    assert ignored == [
        "prompt_cache_key",
        "client_metadata",
        "reasoning.summary",
        "tools.web_search",
    ]
    assert last["usage"] == {
        "input_tokens": 40,
        "input_tokens_details": {"cached_tokens": 16},
        "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 49,
    }
    assert service.num_closed == 2


def test_every_item_of_an_answer_comes_as_its_client_knows_it() -> None:
    with listening(ScriptedService(ANSWER)) as url:
        whole = post(url, codex_request(stream=False)).json()
    thoughts, message, call, patch, other = whole["output"]
    assert thoughts["content"] == [{"type": "reasoning_text", "text": "Look first."}]
    assert message["content"][0] == {
        "type": "output_text",
        "text": "I look.",
        "annotations": [],
        "logprobs": [],
    }
    assert (call["type"], call["name"], call["call_id"]) == (
        "function_call",
        "exec_command",
        "call_a",
    )
    assert call["arguments"] == '{"cmd": "ls"}' and "namespace" not in call
    assert (patch["type"], patch["name"], patch["input"]) == (
        "custom_tool_call",
        "apply_patch",
        PATCH,
    )
    assert (other["name"], other["namespace"]) == ("wait", "collab")
    ids = [item["id"] for item in whole["output"]]
    assert len(set(ids) | {whole["id"]} | {call["call_id"]}) == len(ids) + 2


def test_what_codex_sends_is_read_whole() -> None:
    service = ScriptedService([done()])
    with listening(service) as url:
        whole = post(url, codex_request(stream=False, include=[], input="x")).json()
        first = post(url, codex_request()).status_code
        lite = post(url, codex_lite_request()).status_code
    assert (whole["status"], first, lite) == ("completed", 200, 200)
    ask, in_items = service.asks[1:]
    assert [turn.role for turn in ask.conversation.turns] == ["system", "user"]
    assert ask.conversation.turns[1].text.endswith("\nRepair the test.")
    names = [tool.name for tool in ask.conversation.tools]
    assert names == [
        "exec_command",
        "write_stdin",
        "apply_patch",
        "collab__spawn_agent",
        "collab__wait",
    ]
    patch = ask.conversation.tools[2]
    assert patch.parameters["required"] == ["input"]
    assert APPLY_PATCH["format"]["definition"] in patch.description
    assert not ask.parallel_calls and ask.cut_to_room and ask.params.max_tokens is None
    assert ask.template_options == {"reasoning_effort": "medium"}
    assert [tool.name for tool in in_items.conversation.tools] == [
        "functions__exec_command",
        "functions__write_stdin",
        "functions__apply_patch",
    ]
    assert in_items.conversation.turns == ask.conversation.turns


def test_an_answer_that_comes_back_is_the_turn_that_was_written() -> None:
    service = ScriptedService(ANSWER)
    with listening(service) as url:
        output = post(url, codex_request(stream=False)).json()["output"]
        as_codex = [dict(item) for item in output]
        as_codex[0].pop("content")  # it sends thoughts back sealed alone
        outputs = [
            {"type": "function_call_output", "call_id": "call_a", "output": "a.py"},
            {
                "type": "custom_tool_call_output",
                "call_id": "call_b",
                "output": [{"type": "input_text", "text": "Done."}],
            },
        ]
        for items in (output, as_codex):
            assert post(url, codex_request([*items, *outputs])).status_code == 200
    *_, first, second = (ask.conversation.turns for ask in service.asks)
    assert first == second
    answer, of_a, of_b = first[-3:]
    assert (answer.text, answer.reasoning) == ("I look.", "Look first.")
    assert [call.name for call in answer.tool_calls] == [
        "exec_command",
        "apply_patch",
        "collab__wait",
    ]
    assert json.loads(answer.tool_calls[1].arguments) == {"input": PATCH}
    assert (of_a.role, of_a.text, of_a.tool_call_id) == ("tool", "a.py", "call_a")
    assert (of_b.role, of_b.text, of_b.tool_call_id) == ("tool", "Done.", "call_b")


def test_an_image_that_a_tool_shows_is_told_of_and_no_end() -> None:
    """Codex's `view_image`, for a model whose catalog does not say that it reads text alone."""
    service = ScriptedService([done()])
    arguments = json.dumps({"path": "a.png"})
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "high"}
    called = {"type": "function_call", "call_id": "call_a", "name": "view_image"}
    shown = {"type": "function_call_output", "call_id": "call_a", "output": [image]}
    with listening(service) as url:
        answer = post(url, codex_request([{**called, "arguments": arguments}, shown]))
    assert answer.status_code == 200
    assert "input[4].output[0].input_image" in answer.headers["x-lowtide-ignored"]
    output = service.asks[0].conversation.turns[-1]
    assert output.role == "tool" and "input_image left out" in output.text


def test_equal_words_are_equal_turns_whatever_their_form() -> None:
    service = ScriptedService([done()])
    part = {"type": "input_text", "text": "Hello."}
    forms: list[dict[str, Any]] = [
        {"input": "Hello.", "instructions": "Be brief."},
        {"input": [{"role": "user", "content": "Hello."}], "instructions": "Be brief."},
        {
            "input": [
                {"role": "developer", "content": "Be brief."},
                {"type": "message", "role": "user", "content": [part], "id": "msg_1"},
            ]
        },
    ]
    with listening(service) as url:
        for form in forms:
            assert post(url, {"model": "org/tiny", **form}).status_code == 200
    assert len({ask.conversation for ask in service.asks}) == 1


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"n": 2}, "n:"),
        ({"temperature": 101}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tool_choice": "required"}, "web_search"),
        ({"tool_choice": {"type": "web_search"}}, "web_search"),
        ({"tool_choice": {"type": "function", "name": "gone"}}, "gone"),
        ({"tool_choice": {"type": "function", "name": "auto"}}, "auto"),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"input": []}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"type": {}}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "item_reference"),
        ({"input": [{"role": "boss", "content": "x"}]}, "boss"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
        ({"tools": [{"type": []}]}, "tools[0].type"),
        ({"metadata": {"a": NESTED}}, "nested"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    hosted = {"tools": [{"type": "web_search"}]}
    with listening(ScriptedService([done()])) as url:
        answer = post(url, {"model": "org/tiny", "input": "x", **hosted, **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and named in error["message"]


def test_probes_and_hosted_tools_are_answered() -> None:
    service = ScriptedService([done("length")])
    with listening(service) as url:
        probe = post(url, {"model": "x", "input": "", "max_output_tokens": 1}).json()
        hosted = post(url, {"input": "x", "tools": [{"type": "web_search"}]})
    assert probe["status"] == "incomplete"
    assert probe["incomplete_details"] == {"reason": "max_output_tokens"}
    assert service.asks[0].params.max_tokens == 1
    assert hosted.status_code == 200 and service.asks[1].conversation.tools == ()
    assert hosted.headers["x-lowtide-ignored"] == "tools.web_search"


def test_an_older_name_of_the_length_is_read_and_an_unknown_effort_is_named() -> None:
    service = ScriptedService([done()])
    with listening(service) as url:
        answer = post(url, {"input": "x", "max_tokens": 5, "reasoning": {"effort": "extreme"}})
    assert service.asks[0].params.max_tokens == 5 == answer.json()["max_output_tokens"]
    assert service.asks[0].template_options == {}
    assert answer.headers["x-lowtide-ignored"] == "reasoning.effort"


def test_only_allowed_tools_are_shown() -> None:
    service = ScriptedService([done()])
    allowed = [{"type": "function", "name": "wait", "namespace": "collab"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": allowed}
    with listening(service) as url:
        assert post(url, codex_request(tool_choice=choice)).status_code == 200
    [ask] = service.asks
    assert [tool.name for tool in ask.conversation.tools] == ["collab__wait"]
    assert ask.tool_choice == "required"


def test_a_custom_tool_is_held_to_its_grammar() -> None:
    service = ScriptedService([done()])
    tools = [
        {
            "type": "custom",
            "name": syntax,
            "format": {"type": "grammar", "syntax": syntax, "definition": definition},
        }
        for syntax, definition in (("lark", 'start: "a"'), ("regex", r"\d/\d"), ("abnf", "a"))
    ]
    with listening(service) as url:
        assert post(url, {"input": "x", "tools": tools}).status_code == 200
    shown = service.asks[0].conversation.tools
    lark, expression, unknown = (tool.grammar for tool in shown)
    assert lark == 'start: "a"' and expression.startswith("start: /") and not unknown
    assert all("of this grammar" in tool.description for tool in shown)


def test_fields_of_chat_completions_are_named_where_they_have_no_effect() -> None:
    others = {"return_token_ids": True, "stream_options": {"include_obfuscation": False}}
    with listening(ScriptedService([done()])) as url:
        answer = post(url, {"model": "org/tiny", "input": "x", **others})
    assert answer.status_code == 200
    assert answer.headers["x-lowtide-ignored"] == ", ".join(others)


def test_a_header_can_carry_any_name_of_a_field() -> None:
    with listening(ScriptedService([done()])) as url:
        names = {"a\r\nset-cookie: x": 1, "ü" * 500: 1, **{f"field_{i}": 1 for i in range(100)}}
        answer = post(url, {"model": "org/tiny", "input": "x", **names})
    ignored = answer.headers["x-lowtide-ignored"].split(", ")
    assert ignored[0] == "a--set-cookie:-x" and ignored[-1] == "..." and len(ignored) == 41
    assert "set-cookie" not in answer.headers and "x-lowtide-model" not in answer.headers


def test_a_silent_answer_says_how_far_its_prompt_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "PING_S", 0.02)
    with listening(ScriptedService([Prefilled(30, 40), 0.1, Text("late"), done()])) as url:
        events = events_of(post(url, codex_request()).text)
    pings = [event for event in events if "lowtide" in event]
    assert pings and all(event["type"] == "response.in_progress" for event in pings)
    assert pings[0]["lowtide"] == {"prompt_tokens_done": 30, "prompt_tokens": 40}
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_openais_client_reads_the_same_streamed_and_not() -> None:
    asked: dict[str, Any] = {"model": "m", "input": "x", "tools": codex_request()["tools"]}
    with listening(ScriptedService(ANSWER)) as url, client_of(url) as client:
        whole = client.responses.create(**asked)
        kinds = [event.type for event in client.responses.create(**asked, stream=True)]
        with client.responses.stream(**asked) as stream:
            last = stream.get_final_response()
    assert whole.output_text == last.output_text == "I look."
    assert [type(item).__name__ for item in whole.output] == [
        "ResponseReasoningItem",
        "ResponseOutputMessage",
        "ResponseFunctionToolCall",
        "ResponseCustomToolCall",
        "ResponseFunctionToolCall",
    ]
    assert [item.type for item in last.output] == [item.type for item in whole.output]
    assert kinds == OF_ANSWER
    assert whole.usage is not None and whole.usage.input_tokens_details.cached_tokens == 16


_INPUTS = st.fixed_dictionaries({"input": st.text(max_size=5)})  # as a custom tool has them


@given(drawn_pieces(_INPUTS), st.sampled_from(["stop", "length"]), st.booleans())
@examples(100)
def test_streamed_is_not_streamed(pieces: list[Piece], reason: str, is_custom: bool) -> None:
    writer = ResponseReply({"id": "resp_1"}, {"tool": ToolForm("tool", None, is_custom)})
    events = [json.loads(json.dumps(e)) for p in [*pieces, done(reason)] for e in writer.frames(p)]
    whole = writer.whole()
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    ends = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert ends == whole["output"] == events[-1]["response"]["output"]
    deltas: dict[str, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            deltas[event["item_id"]] = deltas.get(event["item_id"], "") + event["delta"]
    for item in whole["output"]:
        parts = item.get("content")
        text = parts[0]["text"] if parts else item.get("arguments", item.get("input"))
        assert deltas.get(item["id"], "") == text
    arguments = ["" for piece in pieces if isinstance(piece, CallBegun)]
    for piece in pieces:
        if isinstance(piece, CallArguments):
            arguments[piece.index] += piece.text
    calls = [item for item in whole["output"] if "call_id" in item]
    for item, text in zip(calls, arguments, strict=True):
        assert item["input" if is_custom else "arguments"] == (
            json.loads(text)["input"] if is_custom else text
        )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"input": "a\\nb\\\\n\\"c"}', 'a\nb\\n"c'),
        (' {"input":"\\ud83d\\ude00 \\ud800x"}', "\U0001f600 \ud800x"),
        ('{"input": "a\nb \\d"}', "a\nb \\d"),
        ('{"input": "cut \\u00', "cut "),
        ('{"input": "', ""),
        ('{"more": 1, "input": "x"}', "x"),
        ('{"output": "x"}', '{"output": "x"}'),
        ('{"input": "C:\\users"}', "C:\\users"),
        ('{"input": "say "hi" now"}', 'say "hi" now'),
        ("no JSON", "no JSON"),
        ("", ""),
    ],
)
def test_a_custom_tool_s_text_as_its_arguments_come(arguments: str, expected: str) -> None:
    for place in range(len(arguments) + 1):
        for parts in ([arguments[:place], arguments[place:]], list(arguments)):
            text = CustomInput()
            assert "".join(map(text.push, parts)) + text.finish() == expected


def test_calls_are_told_as_their_arguments_come() -> None:
    forms = {"apply_patch": ToolForm("apply_patch", is_custom=True)}
    writer = ResponseReply({"id": "resp_1"}, forms)
    patch = CallBegun(2, "call_d", "apply_patch")
    parts = ['{"input": "*** Be', "gin\\", 'n+a"}']
    found = [writer.frames(piece) for piece in (patch, *(CallArguments(2, p) for p in parts))]
    deltas = [[event["delta"] for event in events if "delta" in event] for events in found]
    assert deltas == [[], ["*** Be"], ["gin"], ["\n+a"]]
