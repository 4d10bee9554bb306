"""`GET /v1/lowtide/events`: what it says, whom it keeps out, and that it delays nobody."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
from inside import engine_of
from serving import LIMIT_S, Running, serving, serving_process
from whole import wait_until

from lowtide import AsyncLLM
from lowtide.config import parse_size
from lowtide.plan import MemoryPlan
from lowtide.serve.binding import binding_of
from lowtide.serve.events import EVENT_S, MAX_LISTENERS

PATH = "/v1/lowtide/events"
BODY: dict[str, Any] = {"prompt": "Sort 93 21 57 40 12", "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    made = AsyncLLM("demo:autoregressive", context=256, host_memory="6MiB", cache="off")
    yield made
    asyncio.run(made.close())


@pytest.fixture
def running(llm: AsyncLLM) -> Iterator[Running]:
    with serving(llm) as server:
        yield server


class Heard(NamedTuple):
    """Events of a listener, one after the other."""

    client: httpx.Client
    lines: Iterator[str]

    def next(self) -> tuple[str, dict[str, Any]]:
        name = ""
        for line in self.lines:
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                return name, json.loads(line.removeprefix("data: "))
        return "", {}

    def state(self) -> dict[str, Any]:
        name, data = self.next()
        assert name == "state"
        return data


@contextmanager
def listening(running: Running) -> Iterator[Heard]:
    with running.client() as client, client.stream("GET", PATH) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield Heard(client, answer.iter_lines())


def residents(state: dict[str, Any], shape: tuple[int, int], tier: str = "host") -> np.ndarray:
    bits = np.unpackbits(np.frombuffer(b64decode(state["residents"][tier]), np.uint8))
    return bits[: shape[0] * shape[1]].reshape(shape).astype(bool)


def test_first_what_the_model_is_then_what_it_does(running: Running, llm: AsyncLLM) -> None:
    with listening(running) as heard, running.client() as client:
        name, model = heard.next()
        shape = len(model["layers"]), model["num_experts"]
        assert name == "model" and shape == (4, 32) and model["context"] == 256
        assert not model["is_diffusion"]
        names = {each["name"] for each in model["settings"]}
        assert {"temperature", "top_p", "max_tokens"} <= names and "steps" not in names
        first = heard.state()
        assert first["hits"] == "" and first["state"] == "ready"
        assert first["queue"] == {"running": 0, "waiting": 0}
        ledger = engine_of(llm).experts.host.ledger
        assert np.array_equal(residents(first, shape), ledger.residents)
        memory = first["memory"]["host"]
        assert memory["budget_bytes"] == parse_size("6MiB")
        assert sum(memory["held"].values()) <= memory["budget_bytes"]

        before = engine_of(llm).experts.as_dict()
        usage = client.post("/v1/completions", json=BODY).json()["usage"]
        after = engine_of(llm).experts.as_dict()
        counts, hits = first["counts"], np.zeros(shape[0] * shape[1], int)
        while counts["tokens"] < first["counts"]["tokens"] + usage["completion_tokens"]:
            state = heard.state()
            counts = state["counts"]
            if state["hits"]:
                hits += np.frombuffer(b64decode(state["hits"]), np.uint8)
        for mine, theirs in (
            ("hits", "num_hits"),
            ("misses", "num_misses"),
            ("read_bytes", "read_bytes"),
        ):
            assert counts[mine] - first["counts"][mine] == after[theirs] - before[theirs], mine
        # Every row of a pass asks for four experts in each layer.
        num_rows = usage["prompt_tokens"] + usage["completion_tokens"] - 1
        assert hits.sum() == 4 * shape[0] * num_rows
        assert state["binding"]["what"] in ("disk", "memory", "arithmetic")  # as was measured
        assert state["binding"]["sentence"] and state["binding"]["help"]


def test_nothing_is_counted_while_nobody_listens(running: Running, llm: AsyncLLM) -> None:
    experts = engine_of(llm).experts
    with listening(running) as heard:
        heard.next()
        assert experts.is_watched
    wait_until(lambda: not experts.is_watched)


def test_events_come_ten_times_a_second_at_most(running: Running) -> None:
    with listening(running) as heard, running.client() as client:
        heard.next()
        before = heard.state()["counts"]["forwards"]
        start_s, num_states = time.monotonic(), 0
        for _ in range(10):
            client.post("/v1/completions", json=BODY)
        took_s = time.monotonic() - start_s
        while heard.state()["counts"]["forwards"] < before + 10 * BODY["max_tokens"]:
            num_states += 1
    assert num_states <= took_s / EVENT_S + 2


def test_listeners_are_no_requests_and_eight_at_most(llm: AsyncLLM) -> None:
    with serving(llm, max_requests=1) as running, ExitStack() as stack, running.client() as client:
        heard = [stack.enter_context(listening(running)) for _ in range(MAX_LISTENERS)]
        for each in heard:
            each.next()
        refused = client.get(PATH)
        assert refused.status_code == 429 and "8 listen" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) > 0
        assert running.service.is_idle
        assert client.post("/v1/completions", json=BODY).status_code == 200
        stack.close()

        def is_let_in() -> bool:
            with running.client() as another, another.stream("GET", PATH) as answer:
                return answer.status_code == 200

        wait_until(is_let_in)


def test_one_who_does_not_read_delays_nobody(running: Running, llm: AsyncLLM) -> None:
    with listening(running), running.client() as client:
        for _ in range(30):
            assert client.post("/v1/completions", json=BODY).status_code == 200
    wait_until(lambda: not engine_of(llm).experts.is_watched)


def test_a_server_that_ends_says_so_and_waits_for_no_listener() -> None:
    with serving_process(
        "demo:autoregressive", "--context", "256", "--host-memory", "6MiB"
    ) as server:
        with httpx.stream("GET", server.url + PATH, timeout=LIMIT_S) as answer:
            heard = Heard(httpx.Client(), answer.iter_lines())
            heard.next()
            assert heard.state()["state"] == "ready"
            start_s = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            state = heard.state()
            while state["state"] == "ready":
                state = heard.state()
            assert state["state"] == "draining" and heard.next() == ("", {})
        server.process.wait(LIMIT_S)
        assert time.monotonic() - start_s < 10


def test_memory_that_moves_is_told(tmp_path) -> None:
    llm = AsyncLLM("demo:autoregressive", context=1024, host_memory="7MiB")
    with serving(llm) as running, listening(running) as heard, running.client() as client:
        heard.next()
        first = heard.state()["memory"]["host"]
        body = {"prompt": "1 " * 300, "max_tokens": 200, "ignore_eos": True}
        client.post("/v1/completions", json=body)
        state = heard.state()
        while state["counts"]["tokens"] < 200:
            state = heard.state()
        held = state["memory"]["host"]["held"]
        assert set(held) >= {"dense", "kv_cache", "slots"}
        assert held["kv_cache"] > first["held"]["kv_cache"]
        assert sum(held.values()) <= first["budget_bytes"] * 1.02
    asyncio.run(llm.close())


def test_a_diffusion_model_says_its_own_settings() -> None:
    llm = AsyncLLM("demo:diffusion", context=256)
    with serving(llm) as running, listening(running) as heard:
        _, model = heard.next()
        assert model["is_diffusion"]
        by_name = {each["name"]: each for each in model["settings"]}
        assert by_name["steps"]["is_diffusion"] and by_name["steps"]["default"] > 0
        assert not by_name["temperature"]["is_diffusion"]
        binding = heard.state()["binding"]
        assert binding["what"] in ("memory", "arithmetic") and binding["sentence"].endswith(".")
    asyncio.run(llm.close())


@pytest.mark.parametrize(
    ("budget", "waited_share", "what"),
    [("6MiB", None, "disk"), ("6MiB", 0.6, "disk"), ("6MiB", 0.01, None), ("64MiB", None, None)],
)
def test_what_binds_is_one_sentence_and_what_would_help(budget, waited_share, what) -> None:
    plan = planned(budget)
    found = binding_of(plan, waited_share)
    assert found.what == what if what else found.what in ("memory", "arithmetic")
    assert found.sentence.endswith(".") and "\n" not in found.sentence and found.help
    if what == "disk":
        assert "memory" in found.help and "q4" in found.help
    if waited_share == 0.6:
        assert "60%" in found.sentence


def planned(budget: str) -> MemoryPlan:
    from lowtide.llm import plan_model

    return plan_model("demo:autoregressive", host_memory=budget, context=256)
