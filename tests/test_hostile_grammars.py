"""Grammars that would end or starve a server are refused with their reason.

Their form and their API do not matter; another client is answered all the while.

A third of a minute: a grammar that takes too much is known by the two seconds that it took.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from hostile_grammars import (
    AUTO_DOORS,
    EXPRESSIONS,
    GRAMMARS_WITHOUT_A_CHAIN,
    LARK_DOORS,
    MESSAGES,
    REGEX_DOORS,
    RULE_LINKS,
    SCHEMA_DOORS,
    SCHEMA_LINKS,
    SCHEMAS_WITHOUT_A_CHAIN,
    Body,
    rule_chain,
    schema_chain,
)
from serving import LIMIT_S, Running, ServerProcess, serving, serving_process, talking_folder
from small_tokenizers import PLAIN
from test_serve_grammar import EOS, nested_schema, new_grammars, request_of

from lowtide import AsyncLLM
from lowtide.errors import UsageError
from lowtide.serve import grammar_chains
from lowtide.serve.grammar import Constraint, GrammarMask, Grammars
from lowtide.serve.grammar_chains import MAX_CHAIN

pytestmark = pytest.mark.hostile

CANARY_S = 5.0
MOST_BYTES = 64 << 20
SMALL_STACK_BYTES = 256 << 10
CONTEXT = 512
TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool.function.name }} {% endfor -%}
{%- for message in messages -%}{{ message.role }}: {{ message.content }}
{% endfor -%}
assistant:"""
"""The template leaves out tools' parameters: a prompt of them would be too long."""

CANARY = {
    "messages": MESSAGES,
    "max_tokens": 40,
    "return_token_ids": True,
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "c", "schema": {"enum": ["one hundred", "thirty two"]}},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = talking_folder(tmp_path_factory.mktemp("hostile") / "model")
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Running]:
    llm = AsyncLLM(folder, context=CONTEXT)
    with serving(llm) as server:
        yield server
    asyncio.run(llm.close())


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return new_grammars(PLAIN.tokenizer)


def canary_ids(client: httpx.Client) -> list[int]:
    answer = client.post("/v1/chat/completions", json=CANARY)
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


def refused(client: httpx.Client, path: str, body: Body) -> str:
    """The reason of a 400."""
    answer = client.post(path, json=body)
    while answer.status_code == 429:  # a busy machine gives the two seconds in more than ten
        answer = client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    reason: str = error if isinstance(error, str) else error["message"]
    assert len(reason) < 600 and "\n" not in reason and "rule_" not in reason
    return reason


def hold(mask: GrammarMask, num_tokens: int = 40) -> None:
    """Writes what a mask allows, at random, in a thread with little stack, and ends the mask."""
    failures: list[BaseException] = []
    held = [mask]

    def write() -> None:
        try:
            one, chance = held.pop(), random.Random(0)
            for _ in range(num_tokens):
                choices = np.flatnonzero(one.allowed()).tolist()
                one.take(chance.choice(choices))
                if choices == [EOS]:
                    break
        except BaseException as error:
            failures.append(error)

    before = threading.stack_size(SMALL_STACK_BYTES)
    thread = threading.Thread(target=write)
    try:
        thread.start()
    finally:
        threading.stack_size(before)
    del mask
    thread.join(LIMIT_S)
    assert not failures


# chains

LARK_CHAINS = {
    **{name: lambda num, link=link: rule_chain(num, *link) for name, link in RULE_LINKS.items()},
    "a schema in a grammar": lambda num: (
        f"start: %json {json.dumps(schema_chain(num, SCHEMA_LINKS['properties']))}"
    ),
    "rules, then a schema": lambda num: rule_chain(
        num // 2,
        "OTHER",
        "r",
        f"%json {json.dumps(schema_chain(num - num // 2, SCHEMA_LINKS['all of']))}",
    ),
}
CHAINS: dict[str, Callable[[int], Constraint]] = {
    **{
        f"schema: {name}": lambda num, link=link: Constraint.json_schema(schema_chain(num, link))
        for name, link in SCHEMA_LINKS.items()
    },
    **{
        f"lark: {name}": lambda num, make=make: Constraint.lark(make(num))
        for name, make in LARK_CHAINS.items()
    },
}


@pytest.mark.parametrize("kind", CHAINS)
def test_a_chain_of_too_many_references_is_refused_by_name(kind: str, grammars: Grammars) -> None:
    request = request_of(PLAIN.tokenizer)
    for num in (MAX_CHAIN + 1, 2000):
        with pytest.raises(UsageError, match=f"chain of {num} references.* at most 256"):
            grammars.applied(request, CHAINS[kind](num))
    try:
        made = grammars.applied(request, CHAINS[kind](MAX_CHAIN))
    except UsageError as error:  # not for its chain
        assert "references" not in str(error)
    else:
        assert isinstance(made.mask, GrammarMask)
        hold(made.mask)


@pytest.mark.parametrize("kind", CHAINS)
def test_a_chain_that_is_not_seen_ends_no_process_but_the_child(
    kind: str, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar that passes there is compiled here, and its masks and its end take little stack."""
    monkeypatch.setattr(grammar_chains, "MAX_CHAIN", 10**9)
    request = request_of(PLAIN.tokenizer)
    try:
        made = grammars.applied(request, CHAINS[kind](2000))
    except UsageError as error:
        assert "form cannot be kept to" in str(error)
    else:
        assert isinstance(made.mask, GrammarMask)
        hold(made.mask)


# grammars without a chain

OTHERS: dict[str, Callable[[], Constraint]] = {
    **{
        f"schema: {name}": lambda schema=schema: Constraint.json_schema(schema)
        for name, schema in SCHEMAS_WITHOUT_A_CHAIN.items()
    },
    **{
        f"lark: {name}": lambda text=text: Constraint.lark(text)
        for name, text in GRAMMARS_WITHOUT_A_CHAIN.items()
    },
    **{
        f"regex: {name}": lambda text=text: Constraint.regex(text)
        for name, text in EXPRESSIONS.items()
    },
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_grammar_that_takes_too_much_is_refused_or_kept_to(kind: str, grammars: Grammars) -> None:
    request, process = request_of(PLAIN.tokenizer), psutil.Process()
    before_bytes = process.memory_info().rss
    try:
        made = grammars.applied(request, OTHERS[kind]())
    except UsageError as error:
        assert "cannot be kept to" in str(error) or "nested" in str(error)
    else:
        assert isinstance(made.mask, GrammarMask)
        hold(made.mask)
    assert process.memory_info().rss - before_bytes < MOST_BYTES
    # The turn is free, and the child another one.
    assert grammars.applied(request, Constraint.regex(f"a{{{len(kind)}}}")).mask is not None


# doors


DOORS_OF_EACH_API = ("chat, strict", "ollama, format", "responses, required", "anthropic, any")
"""By which what takes two seconds each comes, too."""


@pytest.mark.parametrize("door", SCHEMA_DOORS)
def test_every_door_of_schemas(door: str, running: Running) -> None:
    chance = random.Random(door)
    with running.client() as client:
        expected = canary_ids(client)
        for link in [SCHEMA_LINKS["references"], chance.choice([*SCHEMA_LINKS.values()])]:
            reason = refused(client, *SCHEMA_DOORS[door](schema_chain(2000, link)))
            assert "chain of 2000 references" in reason
            assert canary_ids(client) == expected
        if door not in DOORS_OF_EACH_API:
            return
        patterns = SCHEMAS_WITHOUT_A_CHAIN["sixty patterns"]
        asked = {"type": "object", "properties": {"a": patterns}, "required": ["a"]}
        assert "processor time" in refused(client, *SCHEMA_DOORS[door](asked))
        assert canary_ids(client) == expected


@pytest.mark.parametrize("door", LARK_DOORS)
def test_every_door_of_grammars(door: str, running: Running) -> None:
    with running.client() as client:
        expected = canary_ids(client)
        for name in ("rules", "terminals with text", "a schema in a grammar"):
            make = LARK_CHAINS[name]
            path, body = LARK_DOORS[door](make(2000))
            answer = client.post(path, json=body)
            # A custom tool's grammar that cannot be rewritten surely is told, not enforced.
            if answer.status_code == 200 and "custom" in door:
                assert "grammar" in answer.headers["x-lowtide-unguided"]
            else:
                assert "chain of 2000 references" in refused(client, path, body)
            assert canary_ids(client) == expected
        reason = refused(client, *LARK_DOORS[door](GRAMMARS_WITHOUT_A_CHAIN["200 expressions"]))
        assert "processor time" in reason
        assert canary_ids(client) == expected


@pytest.mark.parametrize("door", REGEX_DOORS)
def test_every_door_of_expressions(door: str, running: Running) -> None:
    with running.client() as client:
        expected = canary_ids(client)
        for text in EXPRESSIONS.values():
            path, body = REGEX_DOORS[door](text)
            assert client.post(path, json=body).status_code in (200, 400)
            assert canary_ids(client) == expected


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("door", AUTO_DOORS)
def test_a_schema_that_need_not_be_kept_to_is_no_refusal(
    door: str, is_streamed: bool, running: Running
) -> None:
    with running.client() as client:
        for schema, reason in (
            ({"properties": {"a": {"type": "string", "pattern": "(("}}}, "unclosed group"),
            (schema_chain(300, SCHEMA_LINKS["items"]), "chain of 300 references"),
            (nested_schema(70), "The schema of 'f' is nested more than 64 deep"),
            ({"properties": {"a": {"type": "string"}}}, ""),
        ):
            path, body = AUTO_DOORS[door](schema)
            answer = client.post(path, json={**body, "stream": is_streamed})
            assert answer.status_code == 200, answer.text
            assert reason in answer.headers.get("x-lowtide-unguided", "")
            assert bool(reason) == ("x-lowtide-unguided" in answer.headers)


# through the socket


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with serving_process(folder, "--context", str(CONTEXT)) as process:
        yield process


SOCKET_DOORS = ("chat, response_format", "ollama, format", "anthropic, any")


def test_others_are_answered_meanwhile(server: ServerProcess) -> None:
    """Many hostile clients at once, each with grammars of its own."""
    process = psutil.Process(server.process.pid)
    with httpx.Client(base_url=server.url, timeout=LIMIT_S) as client:
        expected = canary_ids(client)
        before_bytes = most_bytes = process.memory_info().rss
        is_over = threading.Event()

        def attack(number: int) -> list[int]:
            chance, statuses = random.Random(number), []
            with httpx.Client(base_url=server.url, timeout=LIMIT_S) as hostile:
                while not is_over.is_set():
                    door = SCHEMA_DOORS[SOCKET_DOORS[number % len(SOCKET_DOORS)]]
                    path, body = door(hostile_schema(chance))
                    statuses.append(hostile.post(path, json=body).status_code)
            return statuses

        with ThreadPoolExecutor(6) as pool:
            attacks = [pool.submit(attack, number) for number in range(6)]
            try:
                for number in range(4):
                    start_s = time.monotonic()
                    assert canary_ids(client) == expected
                    fresh = {"enum": [f"answer {number}"]}
                    answer = client.post("/v1/chat/completions", json=with_schema(fresh))
                    assert answer.status_code == 200, answer.text
                    assert time.monotonic() - start_s < CANARY_S
                    most_bytes = max(most_bytes, process.memory_info().rss)
            finally:
                is_over.set()
        statuses = [status for each in attacks for status in each.result()]
        assert statuses and set(statuses) <= {400, 429}
        assert most_bytes - before_bytes < MOST_BYTES
        assert canary_ids(client) == expected
    assert server.process.poll() is None


def hostile_schema(chance: random.Random) -> Body:
    if chance.random() < 0.5:
        return schema_chain(chance.randrange(1000, 2000), chance.choice([*SCHEMA_LINKS.values()]))
    patterns = [f"(.*[a-{chance.choice('bcdefghij')}]{i % 7 + 1}.*){{3}}" for i in range(60)]
    asked = {"type": "string", "allOf": [{"pattern": each} for each in patterns]}
    return {"type": "object", "properties": {"a": asked}, "required": ["a"]}


def with_schema(schema: Body) -> dict[str, Any]:
    named = {"name": "c", "schema": schema}
    return {**CANARY, "response_format": {"type": "json_schema", "json_schema": named}}


def test_the_child_ends_with_the_server(server: ServerProcess) -> None:
    """Last of this file's: it ends the server."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert children
    server.process.kill()
    _, alive = psutil.wait_procs(children, LIMIT_S)
    assert not alive
