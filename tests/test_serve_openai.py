"""OpenAI's two older APIs, asked by OpenAI's own client: what Python's API would answer."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from pydantic import BaseModel, ValidationError
from scripted_serving import ScriptedService, done, listening
from serving import LIMIT_S, Running, serving, talking_folder

from lowtide import LLM, AsyncLLM, DiffusionParams, SamplingParams
from lowtide.params import AUTOREGRESSIVE_ONLY
from lowtide.parsing.pieces import Done, Piece, Prefilled, Text
from lowtide.serve import sse
from lowtide.serve.anthropic_messages import MessagesBody
from lowtide.serve.openai_chat import ChatBody
from lowtide.serve.openai_completions import CompletionBody
from lowtide.serve.responses import ResponsesBody
from lowtide.serve.service import Ask

CONTEXT = 512
MESSAGES: list[Any] = [
    {"role": "developer", "content": "Write Python."},
    {"role": "user", "content": [{"type": "text", "text": "def fib(n):"}]},
]
PLAIN = [{"role": "system", "content": "Write Python."}, {"role": "user", "content": "def fib(n):"}]


@pytest.fixture(scope="module", params=["autoregressive", "diffusion"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_folder(tmp_path_factory.mktemp("openai") / request.param, request.param)


@pytest.fixture(scope="module")
def python(folder: Path) -> Iterator[LLM]:
    with LLM(folder, context=CONTEXT, dtype="float32", cache="off") as llm:
        yield llm


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    llm = AsyncLLM(folder, context=CONTEXT, dtype="float32", cache="exact")
    with serving(llm) as server:
        yield server
    asyncio.run(llm.close())


@pytest.fixture
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=LIMIT_S
    ) as made:
        yield made


def is_diffusion(running: Running) -> bool:
    return not running.service.llm.config.decoding.writes_in_order


def test_a_conversation_is_answered_as_by_python(client, running, python) -> None:
    [expected] = python.chat(PLAIN, SamplingParams(max_tokens=24, temperature=0.7, seed=5))
    answer = client.chat.completions.create(
        model=running.service.model_name,
        messages=MESSAGES,
        max_tokens=24,
        temperature=0.7,
        seed=5,
        extra_body={"return_token_ids": True},
    )
    [choice] = answer.choices
    assert choice.model_extra["token_ids"] == expected.token_ids
    assert choice.message.content == expected.text and choice.message.role == "assistant"
    assert choice.finish_reason == expected.finish_reason
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
    assert answer.usage.completion_tokens == len(expected.token_ids)


def test_a_stream_is_the_same_answer(client, running, python) -> None:
    [expected] = python.chat(PLAIN, SamplingParams(max_tokens=24, seed=1))
    chunks = list(
        client.chat.completions.create(
            model=running.service.model_name,
            messages=MESSAGES,
            max_completion_tokens=24,
            seed=1,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == expected.text
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == expected.finish_reason and set(reasons[:-1]) == {None}
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(expected.token_ids)
    assert len({chunk.id for chunk in chunks}) == 1


def test_several_answers_draw_as_those_of_python(client, running, python) -> None:
    params = SamplingParams(max_tokens=8, temperature=1.5, seed=3, n=3)
    expected = [completion.text for completion in python.chat(PLAIN, params)]
    asked: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 8, "temperature": 1.5, "seed": 3}
    model = running.service.model_name
    answer = client.chat.completions.create(model=model, n=3, **asked)
    assert [choice.message.content for choice in answer.choices] == expected
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(model=model, n=3, stream=True, **asked):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == expected


def test_a_stop_string_ends_the_text_before_it(client, running, python) -> None:
    [whole] = python.chat(PLAIN, SamplingParams(max_tokens=40, temperature=0))
    stop = whole.text[2:4]
    expected = whole.text[: whole.text.index(stop)]
    asked: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 40, "temperature": 0}
    for given in (stop, ["\x00", stop]):
        answer = client.chat.completions.create(
            model=running.service.model_name, stop=given, **asked
        )
        assert answer.choices[0].message.content == expected
        assert answer.choices[0].finish_reason == "stop"


def test_prompts_are_answered_as_by_python(client, running, python) -> None:
    ids = python.token_ids("import os\n", raw=True)
    params = SamplingParams(max_tokens=12, temperature=0.5, seed=2)
    expected = python.generate(["def f(", "import os\n"], params, raw=True)
    model = running.service.model_name
    asked: dict[str, Any] = {"model": model, "max_tokens": 12, "temperature": 0.5}
    answer = client.completions.create(prompt=["def f(", "import os\n"], seed=2, **asked)
    assert [choice.text for choice in answer.choices] == [each.text for each in expected]
    assert answer.usage.prompt_tokens == sum(each.usage.prompt_tokens for each in expected)
    for prompt in (ids, [ids]):
        answer = client.completions.create(prompt=prompt, seed=3, **asked)
        assert [choice.text for choice in answer.choices] == [expected[1].text]
    stream = client.completions.create(prompt="def f(", seed=2, stream=True, **asked)
    assert "".join(chunk.choices[0].text for chunk in stream) == expected[0].text
    echoed = client.completions.create(prompt="def f(", seed=2, echo=True, **asked)
    assert echoed.choices[0].text == "def f(" + expected[0].text


def test_log_probabilities_are_the_model_s(client, running, python) -> None:
    asked: dict[str, Any] = {"model": running.service.model_name, "max_tokens": 4, "temperature": 0}
    if is_diffusion(running):
        with pytest.raises(openai.BadRequestError, match="logprobs"):
            client.chat.completions.create(messages=MESSAGES, logprobs=True, **asked)
        with pytest.raises(openai.BadRequestError, match="logprobs"):
            client.completions.create(prompt="a", logprobs=1, echo=True, **asked)
        return
    [expected] = python.chat(PLAIN, SamplingParams(max_tokens=4, temperature=0, logprobs=2))
    answer = client.chat.completions.create(
        messages=MESSAGES, logprobs=True, top_logprobs=2, **asked
    )
    content = answer.choices[0].logprobs.content
    assert [entry.logprob for entry in content] == [row.logprob for row in expected.logprobs]
    assert [[t.logprob for t in entry.top_logprobs] for entry in content] == [
        [value for _, value in row.top] for row in expected.logprobs
    ]
    streamed = client.chat.completions.create(
        messages=MESSAGES, logprobs=True, stream=True, **asked
    )
    parts = [chunk.choices[0].logprobs for chunk in streamed if chunk.choices]
    told = [entry.logprob for part in parts if part for entry in part.content]
    assert told == [entry.logprob for entry in content]


def test_diffusion_settings_and_drafts(client, running, python) -> None:
    asked: dict[str, Any] = {"model": running.service.model_name, "max_tokens": 40}
    options = {"steps": 4, "threshold": 0.5}
    if not is_diffusion(running):
        with pytest.raises(openai.BadRequestError, match="steps"):
            client.chat.completions.create(
                messages=MESSAGES, extra_body={"diffusion": options}, **asked
            )
        return
    params = SamplingParams(max_tokens=40, diffusion=DiffusionParams(**options))
    [expected] = python.chat(PLAIN, params)
    chunks = list(
        client.chat.completions.create(
            messages=MESSAGES,
            stream=True,
            stream_options={"include_drafts": True},  # type: ignore[typeddict-unknown-key]
            extra_body={"diffusion": options},
            **asked,
        )
    )
    frames = [c for c in chunks if (c.model_extra or {}).get("type") == "diffusion_frame"]
    assert frames and all(not frame.choices[0].delta.content for frame in frames)
    assert any("▁" in frame.model_extra["text"] for frame in frames)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == expected.text


def test_progress_is_told_when_asked_for(client, running) -> None:
    chunks = client.chat.completions.create(
        model=running.service.model_name,
        messages=MESSAGES,
        max_tokens=4,
        stream=True,
        extra_body={"return_progress": True},
    )
    told = [c.model_extra["prompt_progress"] for c in chunks if "prompt_progress" in c.model_extra]
    assert told[0]["processed"] == 0 and told[0]["total"] > 10


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ({"logit_bias": {"5": 1}}, 400, "logit_bias is not supported"),
        ({"surprise": 1}, 400, "surprise is not supported"),
        ({"prompt_embeds": "gASV"}, 400, "prompt_embeds is not supported"),
        ({"cache_salt": "\x00" * 1000}, 400, "cache_salt is not supported"),
        ({"model": "../../etc/passwd"}, 404, "does not exist"),
        ({"model": "another"}, 404, "does not exist"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "image_url"),
        ({"temperature": -1}, 400, "temperature"),
        ({"temperature": "warm"}, 400, "temperature"),
        ({"n": 1000}, 400, "n"),
        ({"stop": ["x"] * 17}, 400, "stop: List should have at most 16 items"),
        ({"stop": ["x", 5]}, 400, "stop.1: Input should be a valid string"),
        ({"stop": 5}, 400, "stop: Input should be a valid string"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "messages.0.content: Input should"),
        ({"messages": MESSAGES * 5000}, 400, "messages: List should have at most 8192 items"),
        ({"max_tokens": 100000}, 400, "maximum context length"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "none"}}},
            400,
            "no tool for tool_choice 'none'",
        ),
        ({"tool_choice": "some"}, 400, "tool_choice: Input should be 'none', 'auto' or 'required'"),
        ({"tool_choice": {"type": "function"}}, 400, "tool_choice.function: Field required"),
        ({"tool_choice": {"type": "allowed_tools"}}, 400, "tool_choice."),
        ({"structured_outputs": {}}, 400, "one of json, regex and grammar"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, 400, "one of json, regex"),
        ({"structured_outputs": {"choice": ["a"]}}, 400, "structured_outputs.choice is not supp"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            400,
            "leave one out",
        ),
        ({f"field_{i}": 1 for i in range(2000)}, 400, "fields; at most 1024"),
        ({"diffusion": {f"field_{i}": 1 for i in range(2000)}}, 400, "2000 fields; at most 1024"),
        ({"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
        ({"top_logprobs": 3}, 400, "top_logprobs"),
        ({"reasoning_effort": "extreme"}, 400, "reasoning_effort: Input should be 'none'"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"seed": 2**64}, 400, "seed"),
    ],
)
def test_what_is_refused_is_refused_by_name(running, changes, status, said) -> None:
    body = {"messages": MESSAGES, "max_tokens": 4, **changes}
    with running.client() as client:
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == status
        error = answer.json()["error"]
        assert said in error["message"] and set(error) == {"message", "type", "param", "code"}
        canary = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0}
        texts = {
            client.post("/v1/chat/completions", json=canary).json()["choices"][0]["message"][
                "content"
            ]
            for _ in range(2)
        }
        assert len(texts) == 1


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b'"x"', b"\xff\xfe", b"NaN", b"1e999", b'{"prompt": "\xff"}'),
        b'{"messages": ' + b"[" * 100_000,
        b'{"seed": ' + b"9" * 5000 + b"}",
    ],
)
def test_a_body_that_is_none_is_a_400(running: Running, body: bytes) -> None:
    with running.client() as client:
        for path in ("/v1/chat/completions", "/v1/completions"):
            answer = client.post(path, content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 400 and answer.json()["error"]["message"]
            assert "sys." not in answer.text  # Python's advice to a programmer


def test_a_compressed_body_is_not_unpacked(running: Running) -> None:
    body = gzip.compress(json.dumps({"prompt": "a", "max_tokens": 1}).encode())
    with running.client() as client:
        answer = client.post("/v1/completions", content=body, headers={"content-encoding": "gzip"})
    assert answer.status_code == 400


def test_other_paths_have_errors_in_openai_s_form(running: Running) -> None:
    with running.client() as client:
        for method, path, status in (
            ("GET", "/v1/nothing", 404),
            ("GET", "/v1/chat/completions", 405),
            ("OPTIONS", "/v1/chat/completions", 405),
            ("POST", "/v1/embeddings", 501),
            ("GET", "/v1/models/another", 404),
        ):
            answer = client.request(method, path)
            assert answer.status_code == status and answer.json()["error"]["message"], path
            if status == 405:
                assert answer.headers["allow"] == "POST"
                assert answer.json()["error"]["message"].endswith("send POST.")
        assert client.get("/v1/models/" + running.service.model_name).json()["object"] == "model"


def test_the_model_and_the_state_are_told(client, running) -> None:
    [model] = client.models.list().data
    assert model.id == running.service.model_name
    with running.client() as http:
        assert http.get("/health").json() == {"status": "ok"}
        assert http.get("/ready").json() == {"status": "ready"}
        plan = http.get("/v1/lowtide/plan").json()
        assert plan["context"] == CONTEXT and plan["host"]["budget_bytes"] > 0
        is_guided = running.service.llm.config.decoding.writes_in_order
        assert (plan["grammars_bytes"] > 0) is is_guided and plan["texts_bytes"] > 0
        assert http.get("/v1/lowtide/stats").json()["committed_tokens"] >= 0
        http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3})
        told = http.get("/metrics").text
    for name in (
        "num_requests_running",
        "request_success_total",
        "time_to_first_token_seconds_bucket",
        "request_prefill_time_seconds_sum",
        "request_time_per_output_token_seconds_sum",
        "request_decode_time_seconds_sum",
        "kv_cache_usage_perc",
        "generation_tokens_total",
        "expert_cache_hits_total",
        "expert_reads_ahead_used_total",
        "expert_reads_ahead_late_total",
        "expert_reads_ahead_dropped_total",
    ):
        assert f"lowtide:{name}" in told


def test_events_are_those_of_the_field(running: Running) -> None:
    """As raw lines: nothing but data, `[DONE]` at the end, an empty delta with the reason."""
    body = {"messages": MESSAGES, "max_tokens": 4, "stream": True}
    with (
        running.client() as client,
        client.stream("POST", "/v1/chat/completions", json=body) as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    last = json.loads(lines[-2].removeprefix("data: "))
    assert last["choices"][0]["delta"] == {} and last["choices"][0]["finish_reason"]


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "text/plain"])
def test_a_body_is_json_whatever_it_is_called(running: Running, kind: str | None) -> None:
    """`curl -d` calls it a form."""
    answer = httpx.post(
        f"{running.url}/v1/completions",
        content=json.dumps({"prompt": "a", "max_tokens": 2, "user": "x", "logit_bias": {}}),
        headers={} if kind is None else {"content-type": kind},
        timeout=LIMIT_S,
    )
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "prompt",
    [
        *("", [], [[]], ["a"] * 65, [[1]] * 65, [1, "a"], [[1], "a"]),
        *([value] for value in (-1, 10**6, 2**31, 2**63, 1.5, True, None)),
    ],
)
def test_prompts_have_bounds(running: Running, prompt: object) -> None:
    with running.client() as client:
        answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
    assert answer.status_code == 400 and "rompt" in answer.json()["error"]["message"]


SAMPLING: list[dict[str, Any]] = [
    *({"temperature": value} for value in (0, 1e-9, 100)),
    *({"top_p": value} for value in (0, 0.5, 1)),
    *({"top_k": value} for value in (-1, 0, 1, 2**31 - 1)),
    *({"min_p": value} for value in (0, 1)),
    *({"seed": value} for value in (-(2**63), 2**63 - 1)),
    *({"stop": value} for value in ([], [""], "\n", ["\x00", "é"])),
    *({"repetition_penalty": value} for value in (0.01, 1, 100)),
    *({"presence_penalty": value} for value in (-2, 0, 2)),
    *({"frequency_penalty": value} for value in (-2, 0, 2)),
    {"logprobs": False},
    {"logprobs": True, "top_logprobs": 20},
    {"ignore_eos": True},
]


def test_every_sampling_field_in_every_kind_of_model(running: Running) -> None:
    """Fields that are off are left out; a diffusion model refuses by name those that it lacks."""
    body = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0.7}
    with running.client() as client:
        for fields in SAMPLING:
            answer = client.post("/v1/chat/completions", json={**body, **fields})
            [name, value], *_ = fields.items()
            off = AUTOREGRESSIVE_ONLY.get(name)
            is_refused = (
                is_diffusion(running) and name in AUTOREGRESSIVE_ONLY and value not in (off, False)
            )
            assert answer.status_code == (400 if is_refused else 200), (fields, answer.text)
            assert not is_refused or name in answer.json()["error"]["message"]


WRONG: dict[str, list[Any]] = {
    "prompt": [None] * 100_000,
    "messages": [5] * 8000,
    "stop": [5] * 100_000,
    "stop_sequences": [5] * 100_000,
    "include": [5] * 100_000,
}


@pytest.mark.parametrize("body", [ChatBody, CompletionBody, ResponsesBody, MessagesBody])
def test_many_wrong_values_make_few_errors(body: type[BaseModel]) -> None:
    """Each takes a kilobyte."""
    with pytest.raises(ValidationError) as caught:
        body.model_validate(WRONG)
    assert caught.value.error_count() < 100


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_silence_is_broken_by_chunks_without_words(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(sse, "PING_S", 0.02)
    body = {"messages": MESSAGES, "prompt": "a", "stream": True}
    del body["prompt" if "chat" in path else "messages"]
    with listening(ScriptedService([0.1, Text("late"), done()])) as url:
        answer = httpx.post(f"{url}{path}", json=body, timeout=LIMIT_S)
    *events, end = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    choices = [json.loads(event)["choices"][0] for event in events]
    texts = [choice.get("text") or choice.get("delta", {}).get("content") for choice in choices]
    num_silent = texts.index("late")
    assert end == "[DONE]" and num_silent > ("chat" in path)  # there the first has the role
    assert not any(texts[:num_silent])
    *reasons, last = [choice["finish_reason"] for choice in choices]
    assert last == "stop" and not any(reasons)


class UnevenService(ScriptedService):
    """Three answers: the last ends first, and the first finds least of its prompt kept."""

    def __init__(self) -> None:
        super().__init__([])
        self._ends = [asyncio.Event() for _ in range(3)]

    async def answer(self, ask: Ask, *, is_whole: bool = False) -> AsyncGenerator[Piece, None]:
        place = len(self.asks)
        self.asks.append(ask)
        yield Prefilled(0, 40)
        if place < 2:
            await self._ends[place + 1].wait()
        yield Done("stop", 40, 1, 7 * (place + 1))
        self._ends[place].set()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_usage_does_not_depend_on_which_answer_ends_first(path: str) -> None:
    body: dict[str, Any] = {"messages": MESSAGES} if "chat" in path else {"prompt": "a"}
    body |= {"n": 3, "stream_options": {"include_usage": True}}
    with listening(UnevenService()) as url:
        whole = httpx.post(f"{url}{path}", json=body, timeout=LIMIT_S).json()
    with listening(UnevenService()) as url:
        streamed = httpx.post(f"{url}{path}", json={**body, "stream": True}, timeout=LIMIT_S)
    *_, last, end = [part for part in streamed.text.split("\n\n") if part]
    assert end == "data: [DONE]"
    assert json.loads(last.removeprefix("data: "))["usage"] == whole["usage"]
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 7}
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (40, 3)


@pytest.mark.parametrize(
    ("effort", "options"),
    [
        ("none", {"enable_thinking": False}),
        ("minimal", {"reasoning_effort": "low"}),
        ("medium", {"reasoning_effort": "medium"}),
        ("xhigh", {"reasoning_effort": "high"}),
    ],
)
def test_an_effort_means_the_same_in_both_of_openai_s_apis(
    effort: str, options: dict[str, object]
) -> None:
    service = ScriptedService([done()])
    chat = {"messages": MESSAGES, "reasoning_effort": effort}
    with listening(service) as url:
        for path, body in (
            ("/v1/chat/completions", chat),
            ("/v1/responses", {"input": "x", "reasoning": {"effort": effort}}),
            ("/v1/chat/completions", {**chat, "chat_template_kwargs": {"reasoning_effort": "own"}}),
        ):
            assert httpx.post(f"{url}{path}", json=body, timeout=LIMIT_S).status_code == 200
    first, second, third = (ask.template_options for ask in service.asks)
    assert first == second == options and third == {**options, "reasoning_effort": "own"}


def test_lm_evaluation_harness_gets_what_it_reads(running: Running, python: LLM) -> None:
    """The bodies of its `local-completions` (0.4.13), read as it reads the answers."""
    model = running.service.model_name
    contexts = [python.token_ids(text, raw=True) for text in ("def add(a, b):\n", "import os\n")]
    likely = python.generate(contexts[0], max_tokens=4, temperature=0, raw=True)[0].token_ids
    texts = [[*contexts[0], *likely], [*contexts[1], 7, 3, 9]]
    scored = {
        "model": model,
        "prompt": texts,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    written = {
        "prompt": contexts,
        "model": model,
        "max_tokens": 8,
        "temperature": 0,
        "stop": ["\n\n", "<|endoftext|>"],
        "seed": 1234,
    }
    with running.client() as client:
        scores = client.post("/v1/completions", json=scored)
        answers = client.post("/v1/completions", json=written)
    stopped = python.generate(
        contexts, SamplingParams(max_tokens=8, temperature=0, stop=written["stop"]), raw=True
    )
    assert [choice["text"] for choice in answers.json()["choices"]] == [c.text for c in stopped]
    if is_diffusion(running):
        assert scores.status_code == 400 and "autoregressive" in scores.json()["error"]["message"]
        return
    choices = sorted(scores.json()["choices"], key=lambda choice: choice["index"])
    for choice, ids, context in zip(choices, texts, contexts, strict=True):
        assert choice["logprobs"]["token_logprobs"][0] is None
        found = choice["logprobs"]["token_logprobs"][len(context) : -1]
        tops = choice["logprobs"]["top_logprobs"][len(context) : -1]
        rows = python.logits(ids).log_softmax(-1)[len(context) - 1 : -1]
        continued = torch.tensor(ids[len(context) :])
        expected = rows[torch.arange(len(rows)), continued]
        assert sum(found) == pytest.approx(float(expected.sum()), abs=1e-3)
        is_greedy = all(score == max(top.values()) for score, top in zip(found, tops, strict=True))
        assert is_greedy == torch.equal(rows.argmax(-1), continued)
    assert len(choices[0]["logprobs"]["tokens"]) == len(texts[0]) + 1
