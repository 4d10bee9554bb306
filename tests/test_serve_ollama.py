"""Ollama's API: its client finds the model, talks to it, and reads the same streamed and not."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import ollama
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from scripted_serving import (
    NUM_NEW,
    NUM_PROMPT,
    ScriptedService,
    answer_of,
    done,
    drawn_pieces,
    listening,
)

from lowtide.errors import StorageError
from lowtide.families import read_config
from lowtide.model_writing.synth import synth
from lowtide.parsing.pieces import Piece, Prefilled, Text
from lowtide.plan import WeightFormats
from lowtide.serve import sse
from lowtide.serve.ollama import OllamaReply, parameter_size

MODEL = ScriptedService.model_name

ANSWER = answer_of(("call_x", "weather", '{"city": "Bern"}'), ("call_y", "time", "{}"))

CALLS = [("weather", {"city": "Bern"}), ("time", {})]

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}

SAID: list[dict[str, Any]] = [{"role": "user", "content": "x"}]


class _Plan:
    full_bytes = 1 << 30
    host = SimpleNamespace(used_bytes=1 << 28)
    gpu = None
    formats = WeightFormats()


def post(url: str, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{url}{path}", json=body, timeout=30)


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> ScriptedService:
    """A service that knows a model's configuration."""
    folder: Path = synth("qwen3_moe", "tiny", tmp_path_factory.mktemp("ollama") / "model", seed=3)
    config = read_config(json.loads((folder / "config.json").read_text()))
    service = ScriptedService(ANSWER, config)
    service.llm.plan, service.llm.path = _Plan(), folder
    return service


def test_ollamas_client_finds_the_model(facts: ScriptedService) -> None:
    with listening(facts) as url, ollama.Client(host=url) as client:
        [listed] = client.list().models
        [running] = client.ps().models
        shown = client.show(MODEL)
        pulled = [part.status for part in client.pull(MODEL, stream=True)]
        at_once = client.pull(MODEL).status
        version = httpx.get(f"{url}/api/version").json()["version"]
        assert httpx.head(url).status_code == 200
    assert listed.model == running.model == MODEL
    assert running.context_length == 32_768
    assert (listed.size, running.size, running.size_vram) == (1 << 30, 1 << 28, 0)
    assert shown.details is not None and shown.details.format == "safetensors"
    assert pulled[-1] == at_once == "success"
    assert tuple(map(int, version.split("."))) >= (0, 13, 4)
    assert shown.capabilities == ["completion"]
    assert shown.modelinfo is not None
    assert shown.modelinfo["qwen3_moe.context_length"] == 32_768
    assert shown.modelinfo["general.architecture"] == "qwen3_moe"
    assert shown.modelinfo["general.parameter_count"] > 0


def test_details_say_how_weights_are_stored_and_kept(
    facts: ScriptedService, tmp_path: Path
) -> None:
    service, plan = ScriptedService(ANSWER, facts.llm.config), _Plan()
    plan.formats = WeightFormats(dense="q4")  # of a model without experts
    service.llm.plan, service.llm.path = plan, tmp_path / "model.gguf"
    service.llm.path.write_bytes(b"GGUF")
    with listening(service) as url:
        [model] = httpx.get(f"{url}/api/tags").json()["models"]
    details = model["details"]
    assert (details["format"], details["quantization_level"]) == ("gguf", "q4")


@pytest.mark.parametrize("path", ["/api/show", "/api/pull", "/api/chat", "/api/generate"])
def test_another_model_is_not_found(path: str) -> None:
    with listening(ScriptedService([done()])) as url:
        answer = post(url, path, {"model": "llama3:latest"})
        known = post(url, path, {"model": f"{MODEL}:latest"}) if path != "/api/show" else None
        unnamed = post(url, path, {"model": ""})
    assert answer.status_code == 404
    assert "llama3" in answer.json()["error"] and MODEL in answer.json()["error"]
    assert known is None or known.status_code == 200
    assert unnamed.status_code == 400 and "names no model" in unnamed.json()["error"]


def test_embeddings_are_refused_by_name() -> None:
    with listening(ScriptedService([])) as url, ollama.Client(host=url) as client:
        with pytest.raises(ollama.ResponseError, match="Embeddings are not supported") as raised:
            client.embed(MODEL, "x")
        assert post(url, "/api/embeddings", {}).status_code == 501
    assert raised.value.status_code == 501


def test_ollamas_client_reads_the_same_streamed_and_not() -> None:
    service = ScriptedService(ANSWER)
    with listening(service) as url, ollama.Client(host=url) as client:
        whole = client.chat(MODEL, SAID, tools=[TOOL], think=True)
        parts = list(client.chat(MODEL, SAID, tools=[TOOL], think=True, stream=True))
    assert whole.message.content == "".join(part.message.content or "" for part in parts)
    assert whole.message.thinking == "".join(part.message.thinking or "" for part in parts)
    streamed = [call for part in parts for call in part.message.tool_calls or ()]
    for calls in (whole.message.tool_calls or (), streamed):
        assert [(call.function.name, call.function.arguments) for call in calls] == CALLS
    for end in (whole, parts[-1]):
        assert end.done and end.done_reason == "stop"
        assert (end.prompt_eval_count, end.eval_count) == (NUM_PROMPT, NUM_NEW)
        assert (end.total_duration or 0) >= (end.eval_duration or 0) >= 0
    assert not any(part.done for part in parts[:-1])
    ask = service.asks[0]
    assert ask.template_options == {"enable_thinking": True}
    assert [tool.name for tool in ask.conversation.tools] == ["weather"]


def test_generate_speaks_by_the_template_or_raw() -> None:
    service = ScriptedService([Text("a"), Text("b"), done("length")])
    with listening(service) as url, ollama.Client(host=url) as client:
        whole = client.generate(MODEL, "x", system="Be brief.", raw=True)
        parts = list(client.generate(MODEL, "x", raw=True, stream=True))
    assert whole.response == "ab" == "".join(part.response or "" for part in parts)
    assert whole.done_reason == parts[-1].done_reason == "length"
    assert all(ask.prompt == "x" and ask.conversation is None for ask in service.asks)


def test_options_are_those_of_ours() -> None:
    service = ScriptedService([done()])
    options = {
        "num_predict": 5,
        "num_ctx": 8192,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 7,
        "stop": ["END"],
        "repeat_penalty": 1.2,
        "mirostat": 0,
    }
    body = {"model": MODEL, "messages": SAID, "options": options, "keep_alive": "5m"}
    with listening(service) as url:
        answer = post(url, "/api/chat", body)
        endless = {"num_predict": -1, "top_k": 0, "top_p": 0, "repeat_penalty": 1.0}
        post(url, "/api/chat", {**body, "options": endless, "think": None})
    params, other = (ask.params for ask in service.asks)
    assert answer.headers["x-lowtide-ignored"] == "keep_alive, options.num_ctx, options.mirostat"
    assert (params.max_tokens, params.temperature, params.top_k) == (5, 0.5, 3)
    assert (params.top_p, params.min_p, params.seed) == (0.9, 0.1, 7)
    assert (params.stop_strings, params.repetition_penalty) == (("END",), 1.2)
    assert (other.max_tokens, other.top_k, other.repetition_penalty) == (None, 0, 1)  # off
    assert 0 < other.top_p < 1e-3  # the likeliest token alone, as Ollama has it
    assert all(ask.cut_to_room for ask in service.asks)


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/api/chat", {"messages": [{"role": "boss", "content": "x"}]}, "boss"),
        ("/api/chat", {"messages": [{"role": "user", "images": ["aGk="]}]}, "images"),
        ("/api/chat", {"messages": [5]}, "messages[0]"),
        ("/api/chat", {"messages": SAID, "format": "yaml"}, "format"),
        ("/api/chat", {"messages": SAID, "options": {"mirostat": 2}}, "mirostat"),
        ("/api/chat", {"messages": SAID, "options": {"temperature": -1}}, "temperature"),
        (
            "/api/chat",
            {"messages": SAID, "options": {"stop": ["x"] * 17}},
            "options.stop: List should have at most 16 items",
        ),
        ("/api/chat", {"messages": SAID, "tools": [{"type": "function"}]}, "tools[0].function"),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("/api/generate", {"prompt": "x", "format": "json", "raw": True}, "format"),
        ("/api/generate", {"prompt": "x", "system": "y"}, "system"),  # without a template
        ("/api/generate", {"prompt": "x", "context": [1]}, "context"),
        ("/api/generate", {"prompt": "x", "images": ["aGk="]}, "images"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(
    path: str, fields: dict[str, Any], named: str
) -> None:
    with listening(ScriptedService([done()])) as url:
        answer = post(url, path, {"model": MODEL, **fields})
    assert answer.status_code == 400 and named in answer.json()["error"]


def test_nothing_to_say_loads_the_model() -> None:
    with listening(ScriptedService([done()])) as url, ollama.Client(host=url) as client:
        assert client.chat(MODEL, []).done_reason == "load"
        assert client.generate(MODEL).done_reason == "load"


def test_tools_outputs_answer_the_calls_before_them() -> None:
    service = ScriptedService([done()])
    calls = [{"function": {"name": name, "arguments": given}} for name, given in CALLS]
    said = [
        *SAID,
        {"role": "assistant", "content": "", "tool_calls": calls, "thinking": "Look first."},
        {"role": "tool", "content": "noon", "tool_name": "time"},
        {"role": "tool", "content": "rain"},
        {"role": "user", "content": "thanks"},
    ]
    with listening(service) as url:
        assert post(url, "/api/chat", {"model": MODEL, "messages": said}).status_code == 200
    _, answer, noon, rain, _ = service.asks[0].conversation.turns
    assert answer.reasoning == "Look first."
    weather, time = answer.tool_calls
    assert (noon.tool_call_id, rain.tool_call_id) == (time.id, weather.id)
    # As Mistral's templates want them.
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", call.id) for call in answer.tool_calls)


def test_errors_and_silence_are_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "PING_S", 0.02)
    broken = [0.1, Text("a"), StorageError("the disk is gone")]
    body = {"model": MODEL, "messages": SAID}
    with listening(ScriptedService(broken)) as url, ollama.Client(host=url) as client:
        answer = post(url, "/api/chat", body)
        whole = post(url, "/api/chat", {**body, "stream": False})
        with pytest.raises(ollama.ResponseError, match="the disk is gone"):
            list(client.chat(MODEL, SAID, stream=True))
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    first, *_, last = lines_of(answer.text)
    assert first["message"] == {"role": "assistant", "content": ""} and not first["done"]
    assert last == {"error": "the disk is gone"}
    assert whole.status_code == 500 and whole.json() == {"error": "the disk is gone"}


def test_time_in_the_queue_is_not_the_prompt_s() -> None:
    times_ns = iter((0, 100, 130, 200))  # it comes, is read, writes, ends
    lines = OllamaReply("org/tiny", True, times_ns.__next__)
    waited, begun = Prefilled(0, NUM_PROMPT), Prefilled(16, NUM_PROMPT)
    *_, [end] = (list(lines.frames(p)) for p in (waited, begun, Text("a"), done()))
    assert (end["prompt_eval_duration"], end["eval_duration"]) == (30, 70)
    assert end["total_duration"] == 200


@given(drawn_pieces(), st.booleans())
@examples(100)
def test_streamed_is_not_streamed(pieces: list[Piece], is_chat: bool) -> None:
    lines = OllamaReply("org/tiny", is_chat, itertools.count(1).__next__)
    sent = [line for piece in [*pieces, done()] for line in lines.frames(piece)]
    whole = lines.whole()
    words, text = ("message", "content") if is_chat else (None, "response")
    parts = [line[words] if words else line for line in sent]
    all_words = whole[words] if words else whole
    assert "".join(part[text] for part in parts) == all_words[text]
    assert "".join(part.get("thinking", "") for part in parts) == all_words.get("thinking", "")
    calls = [call for part in parts for call in part.get("tool_calls", ())]
    assert calls == all_words.get("tool_calls", [])
    assert [line["done"] for line in sent] == [False] * (len(sent) - 1) + [True]


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "0"), (999, "999"), (3_800_000, "3.8M"), (1_000, "1.0K"), (30_532_000_000, "30.5B")],
)
def test_a_model_is_as_large_as_it_is(count: int, said: str) -> None:
    assert parameter_size(count) == said
