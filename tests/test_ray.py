"""Batches and replicas on a Ray cluster of several nodes, all on this machine.

Takes a minute and a half: clusters, engines and their ends.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from test_batch import DEMO, answers, num_lines, sums, texts, written
from whole import wait_until

from lowtide import LLM
from lowtide.errors import PlanError, UsageError
from lowtide.serve.batch_files import is_error

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Ray's own code
    pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[dev-ray]'")
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    from lowtide.serve.ray import SESSION_HEADERS, app, session_of
    from lowtide.serve.ray_share import RAY_BYTES, share_of

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]

LIMIT_S = 120.0
NUM_NODES = 3
NODE_BYTES = 1500 << 20
FLAGS = ["--context", "2048", "--dtype", "float32"]  # whose words are the same in any company
OPTIONS = {"host_memory": "24MiB", "context": 2048, "dtype": "float32"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head that computes nothing, and nodes of one CPU each."""
    os.environ["RAY_DATA_DISABLE_PROGRESS_BARS"] = "1"
    nothing = {"num_cpus": 0, "object_store_memory": 80 << 20, "include_dashboard": False}
    found = Cluster(initialize_head=True, head_node_args=nothing)
    for _ in range(NUM_NODES):
        found.add_node(num_cpus=1, object_store_memory=80 << 20, memory=NODE_BYTES)
    found.wait_for_nodes()
    ray.init(address=found.address, log_to_driver=False, logging_level=logging.ERROR)
    yield found
    serve.shutdown()
    ray.shutdown()
    found.shutdown()


# Shares of a node.


def test_an_engines_share_is_what_its_process_takes(cluster: Cluster) -> None:
    share = share_of(DEMO, {"host_memory": "24MiB", "context": 512})
    beside = share.memory_bytes - share.options["host_memory"]
    assert share.options["host_memory"] == 24 << 20 and beside > RAY_BYTES
    assert share.options["cores"] == share.num_cpus == 1
    whole = share_of(DEMO, {"context": 512})  # the node's, or all that the model has use for
    assert whole.memory_bytes <= NODE_BYTES
    half = share_of(DEMO, {"context": 512}, memory=beside + (8 << 20))
    assert half.options["host_memory"] == 8 << 20
    assert share.num_on([{"CPU": 4, "memory": 3 * share.memory_bytes}, {"CPU": 0.5}]) == 3


def test_what_no_node_can_hold_is_refused(cluster: Cluster) -> None:
    with pytest.raises(PlanError, match="ray start --memory"):
        share_of(DEMO, {"context": 512}, memory="100MiB")
    with pytest.raises(UsageError, match="ask Ray for them"):
        share_of(DEMO, {"cores": 1})
    with pytest.raises(UsageError, match="give one of them"):
        app(DEMO, replicas=1, autoscaling={})


# Batches.


def start(cluster: Cluster, source: Path, target: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lowtide", "batch", DEMO, "-i", source, "-o", target]
    options = ["--ray", "--host-memory", "24MiB", "--at-once", "4", *FLAGS]
    environment = {**os.environ, "RAY_ADDRESS": cluster.address}
    return subprocess.Popen(
        [*command, *options], stderr=subprocess.PIPE, text=True, env=environment
    )


def workers() -> list[psutil.Process]:
    found = psutil.process_iter(["cmdline"])
    return [each for each in found if "ray::MapWorker" in " ".join(each.info["cmdline"] or ())]


def test_killed_workers_and_drivers_lose_and_repeat_nothing(
    cluster: Cluster, tmp_path: Path
) -> None:
    lines = [
        {**each, "body": {**each["body"], "max_tokens": 48, "ignore_eos": True}}
        if each["url"] != "/v1/responses"
        else each
        for each in sums(150, temperature=1.0)
    ]
    source, target = written(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    with start(cluster, source, target) as driver:
        wait_until(lambda: num_lines(target) >= 20)
        workers()[0].kill()
        num_before = num_lines(target)
        wait_until(lambda: num_lines(target) > num_before + 20)
        driver.kill()
    before = target.read_bytes()
    assert 40 < num_lines(target) < 150
    with target.open("ab") as file:
        file.write(b'{"id": "batch_req_torn')
    with start(cluster, source, target) as driver:
        _, told = driver.communicate(timeout=LIMIT_S)
    assert driver.returncode == 0, told
    assert target.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    whole = tmp_path / "whole.jsonl"
    alone = [sys.executable, "-m", "lowtide", "batch", DEMO, "-i", source, "-o", whole]
    subprocess.run([*alone, *FLAGS], check=True, capture_output=True)
    assert texts(target) == texts(whole) and len(texts(target)) == 150
    assert not any(map(is_error, answers(target).values()))


# Replicas.


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def url(cluster: Cluster) -> Iterator[str]:
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port, "location": "HeadOnly"})
    deploy(NUM_NODES)
    yield f"http://127.0.0.1:{port}"


def deploy(replicas: int) -> None:
    settings = {"served_name": "demo", "max_requests": 12}
    serve.run(app(DEMO, OPTIONS, settings, replicas=replicas), route_prefix="/")


def client(url: str, session: str | None = None) -> httpx.Client:
    headers = {} if session is None else {"x-session-id": session}
    return httpx.Client(base_url=url, timeout=LIMIT_S, headers=headers)


def messages(texts: Sequence[str]) -> list[dict[str, str]]:
    roles = itertools.cycle(("user", "assistant"))
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def chat(asked: httpx.Client, *texts: str, **fields: Any) -> dict[str, Any]:
    roles = itertools.cycle(("user", "assistant"))
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    reply = asked.post("/v1/chat/completions", json={"messages": messages, **fields})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def conversation(ask: Callable[[list[str]], tuple[str, int]], number: int) -> list[int]:
    """Cached tokens of six turns."""
    said, cached = list[str](), list[int]()
    for turn in range(6):
        said.append(f"Sort {number + 10} {turn + 20} 31 14")
        text, num_cached = ask(said)
        said.append(text)
        cached.append(num_cached)
    return cached


@pytest.mark.parametrize(
    ("header", "number"), [(name.decode(), 10 * i) for i, name in enumerate(SESSION_HEADERS)]
)
def test_a_conversation_stays_with_the_replica_that_keeps_its_keys(
    url: str, header: str, number: int
) -> None:
    """Its turns take over as much as in a single engine: all but what is new.

    No other conversation on its replica begins as it does.
    """
    with httpx.Client(base_url=url, timeout=LIMIT_S, headers={header: f"of {header}"}) as asked:

        def ask_served(said: list[str]) -> tuple[str, int]:
            answer = chat(asked, *said, temperature=0)
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            return answer["choices"][0]["message"]["content"], cached

        served = conversation(ask_served, number)
    with LLM(DEMO, **OPTIONS) as llm:

        def ask(said: list[str]) -> tuple[str, int]:
            [answer] = llm.chat(messages(said), temperature=0)
            return answer.text, answer.usage.cached_tokens

        assert served == conversation(ask, number) and served[-1] > 40


def test_replicas_keep_to_the_memory_and_cores_they_were_given(url: str) -> None:
    """Ray was told of more CPUs than there are: the engines that have cores share none."""
    replicas = [
        each
        for each in psutil.process_iter(["cmdline"])
        if "ray::ServeReplica" in " ".join(each.info["cmdline"] or ())
    ]
    share = share_of(DEMO, OPTIONS, 1)
    assert len(replicas) == NUM_NODES
    assert all(each.memory_info().rss <= share.memory_bytes for each in replicas)
    usable = os.sched_getaffinity(0)
    of_each = [
        {
            frozenset(os.sched_getaffinity(int(task)))
            for task in os.listdir(f"/proc/{each.pid}/task")
        }
        for each in replicas
    ]
    kept = [cores for [cores] in of_each if cores != usable]  # all threads of one the same
    assert len(kept) == min(NUM_NODES, len(usable)) - (len(usable) == 1)
    assert sum(map(len, kept)) == len(frozenset().union(*kept)) == len(kept)


def test_requests_without_a_header_go_to_each_replica_in_turn(url: str) -> None:
    with client(url) as asked:
        before = [asked.get("/v1/lowtide/stats").json()["forwards"] for _ in range(NUM_NODES)]
        for _ in range(NUM_NODES):
            chat(asked, "1 + 2")
        after = [asked.get("/v1/lowtide/stats").json()["forwards"] for _ in range(NUM_NODES)]
    assert sum(after) > sum(before) and all(
        new > old for old, new in zip(sorted(before), sorted(after), strict=True)
    )


def test_every_route_answers_as_the_server_does(url: str) -> None:
    with client(url, "routes") as asked:
        assert asked.get("/health").json() == {"status": "ok"}
        assert asked.get("/ready").json() == {"status": "ready"}
        assert asked.get("/v1/models").json()["data"][0]["id"] == "demo"
        assert "lowtide" in asked.get("/metrics").text and asked.get("/").status_code == 200
        for path, body in (
            ("/v1/completions", {"prompt": "Sort 9 8", "max_tokens": 4}),
            ("/v1/responses", {"input": "1 + 2"}),
            ("/v1/messages", {"max_tokens": 8, "messages": [{"role": "user", "content": "1 + 2"}]}),
            ("/api/chat", {"model": "demo", "messages": [{"role": "user", "content": "1 + 2"}]}),
        ):
            assert asked.post(path, json=body).status_code == 200, path
        assert asked.get("/api/tags").json()["models"][0]["name"].startswith("demo")
        refused = asked.post("/v1/completions", json={"prompt": "a", "frequency": 1})
        assert refused.status_code == 400 and "frequency" in refused.json()["error"]["message"]
        assert asked.post("/v1/embeddings", json={}).json()["error"]["code"] == "unsupported"


@pytest.mark.parametrize(
    ("path", "body", "end"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "1 + 2"}]}, "[DONE]"),
        (
            "/v1/messages",
            {"max_tokens": 9, "messages": [{"role": "user", "content": "1 + 2"}]},
            "message_stop",
        ),
        (
            "/api/chat",
            {"model": "demo", "messages": [{"role": "user", "content": "1 + 2"}]},
            '"done":true',
        ),
    ],
)
def test_streams_come_in_parts(url: str, path: str, body: dict[str, Any], end: str) -> None:
    with client(url, "streams") as asked:
        with asked.stream("POST", path, json={**body, "stream": True}) as reply:
            parts = list(reply.iter_text())
    assert len(parts) > 1 and end in parts[-1].replace(" ", "")


LONG = {"prompt": "Sort 9 8", "max_tokens": 1500, "ignore_eos": True, "stream": True}


def test_a_client_that_leaves_ends_its_passes(url: str) -> None:
    with client(url, "leaving") as asked:
        with asked.stream("POST", "/v1/completions", json=LONG) as reply:
            next(reply.iter_text())
        forwards = [0, 1]

        def is_still() -> bool:
            time.sleep(0.2)
            forwards.append(asked.get("/v1/lowtide/stats").json()["forwards"])
            return forwards[-1] == forwards[-2]

        wait_until(is_still)
        assert forwards[-1] < 1500


def test_too_many_requests_are_refused_by_the_engine(url: str) -> None:
    async def ask_all() -> list[httpx.Response]:
        headers = {"x-session-id": "crowd"}
        async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S, headers=headers) as asked:
            body = {**LONG, "max_tokens": 100, "stream": False}
            return await asyncio.gather(
                *(asked.post("/v1/completions", json=body) for _ in range(40))
            )

    replies = asyncio.run(ask_all())
    assert {reply.status_code for reply in replies} == {200, 429}
    for reply in replies:
        told = reply.json()
        if reply.status_code == 429:
            assert told["error"]["code"] == "queue_full" and int(reply.headers["retry-after"]) > 0


def test_streams_end_whole_while_replicas_go(url: str) -> None:
    """Last: one replica is left."""

    async def stream(asked: httpx.AsyncClient, number: int) -> str:
        headers, body = {"x-session-id": f"stream {number}"}, {**LONG, "max_tokens": 400}
        async with asked.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
            return "".join([part async for part in reply.aiter_text()])

    async def all_streams() -> list[str]:
        async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as asked:
            streams = [asyncio.create_task(stream(asked, number)) for number in range(8)]
            await asyncio.sleep(0.5)
            await asyncio.to_thread(deploy, 1)
            return await asyncio.gather(*streams)

    whole = asyncio.run(all_streams())
    assert all(each.rstrip().endswith("[DONE]") for each in whole)
    wait_until(lambda: len(serve.status().applications["default"].deployments) == 1)


def test_the_private_field_of_ray_is_where_it_was() -> None:
    """`session_of` reads headers from it: where this fails, conversations lose their replica."""
    from ray import cloudpickle
    from ray.serve._private.common import StreamingHTTPRequest

    class Pending:
        def __init__(self, *args: object) -> None:
            self.args = args

    scope = {"headers": [(b"host", b"a"), (b"session_id", b"codex 7")]}
    request = StreamingHTTPRequest(scope, proxy_actor_name="proxy")
    assert session_of(Pending(request)) == "codex 7"
    assert session_of(Pending(cloudpickle.dumps(request))) == "codex 7"
    assert session_of(Pending()) is None and session_of(None) is None
