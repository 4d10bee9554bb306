"""The page at `/`, without a browser: its files, their headers, and markdown as a tree."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import time
from collections.abc import Iterator
from itertools import chain
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import Running, serving

from lowtide import AsyncLLM
from lowtide.serve.markdown import MAX_CHARS, nodes_of
from lowtide.serve.page import page_files

KEY = "a key"
MAX_PACKED_BYTES = 40_000

TAGS = set("p h3 h4 h5 h6 ul ol li blockquote pre code em strong s a br hr".split())
TAGS |= set("table thead tbody tr th td".split())


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    llm = AsyncLLM("demo:autoregressive", context=256, host_memory="6MiB")
    with serving(llm, api_key=KEY, served_name="a-name-of-a-model") as server:
        yield server
    asyncio.run(llm.close())


@pytest.fixture
def client(running: Running) -> Iterator[httpx.Client]:
    """One without a key."""
    with running.client() as made:
        yield made


def test_the_page_is_open_and_says_nothing_of_the_machine(client, running) -> None:
    for path, found in page_files().items():
        answer = client.get(path)
        assert answer.status_code == 200 and answer.content == found.body
        assert running.service.model_name not in answer.text
        assert answer.headers["x-content-type-options"] == "nosniff"
    for path in ("/v1/lowtide/events", "/v1/lowtide/plan", "/v1/lowtide/stats", "/v1/models"):
        assert client.get(path).status_code == 401, path
    assert client.post("/v1/lowtide/markdown", json={"text": "a"}).status_code == 401
    for path in ("/static/", "/static/../page.py", "/static/page.py", "/static/none.js"):
        assert client.get(path).status_code in (401, 404), path


def test_nothing_in_it_is_inline_or_from_elsewhere(client) -> None:
    answer = client.get("/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy and "trusted-types 'none'" in policy
    html = answer.text
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", html)
    sources = re.findall(r"(?:src|href)=\"([^\"]+)\"", html)
    assert all(source.startswith(("static/", "#")) for source in sources)
    for path, found in page_files().items():
        if path.endswith((".js", ".css", ".html")):
            text = found.body.decode()
            assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(", text), path
            assert not re.search(r"https?://\w|url\(|@import", text), path


def test_it_is_whole_after_two_rounds_of_requests(client) -> None:
    """The page names its style and every module; no module is asked for by another alone."""
    html = client.get("/").text
    named = set(re.findall(r"(?:src|href)=\"(static/[^\"]+)\"", html))
    assert {f"/{name}" for name in named} | {"/"} == set(page_files())
    imported = chain.from_iterable(
        re.findall(r"from \"\./([^\"]+)\"", found.body.decode())
        for path, found in page_files().items()
        if path.endswith(".js")
    )
    assert {f"static/{name}" for name in imported} <= named


def test_it_is_sent_gzipped_and_small(client) -> None:
    num_bytes = 0
    for path, found in page_files().items():
        with client.stream("GET", path, headers={"accept-encoding": "gzip"}) as answer:
            packed = b"".join(answer.iter_raw())
        assert answer.headers["content-encoding"] == "gzip"
        assert gzip.decompress(packed) == found.body
        num_bytes += len(packed)
        plain = client.get(path, headers={"accept-encoding": "identity"})
        assert "content-encoding" not in plain.headers and plain.content == found.body
    assert num_bytes <= MAX_PACKED_BYTES


def test_what_has_not_changed_is_not_sent_again(client) -> None:
    first = client.get("/static/main.js")
    again = client.get("/static/main.js", headers={"if-none-match": first.headers["etag"]})
    assert again.status_code == 304 and not again.content


def test_markdown_is_rendered_with_the_key(client) -> None:
    headers = {"x-api-key": KEY}
    answer = client.post("/v1/lowtide/markdown", json={"text": "a *b*"}, headers=headers)
    assert answer.json() == {"nodes": [["p", {}, "a ", ["em", {}, "b"]]]}
    for body in ({}, {"text": 5}, {"text": "a" * (MAX_CHARS + 1)}, {"text": "a", "more": 1}):
        refused = client.post("/v1/lowtide/markdown", json=body, headers=headers)
        assert refused.status_code == 400 and refused.json()["error"]["message"]


SAFE = {"rel": "noopener noreferrer", "target": "_blank"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<script>alert(1)</script>", [["p", {}, "<script>alert(1)</script>"]]),
        ("a <b style=x>b</b>", [["p", {}, "a <b style=x>b</b>"]]),
        (
            "[a](https://b.example/c)",
            [["p", {}, ["a", {"href": "https://b.example/c", **SAFE}, "a"]]],
        ),
        ("[a](javascript:alert(1))", [["p", {}, "[a](javascript:alert(1))"]]),
        ("[a](/v1/models)", [["p", {}, "[a](/v1/models)"]]),
        ("[a](data:text/html,b)", [["p", {}, "[a](data:text/html,b)"]]),
        (
            "![a](http://b.example/c.png)",
            [["p", {}, ["a", {"href": "http://b.example/c.png", **SAFE}, "a"]]],
        ),
        (
            "[![a](http://b.example/c)](http://d.example/)",
            [["p", {}, ["a", {"href": "http://d.example/", **SAFE}, "a"]]],
        ),
        ("```py\nx < 1\n```", [["pre", {}, ["code", {}, "x < 1\n"]]]),
        ("3. a\n4. b", [["ol", {"start": 3}, ["li", {}, "a"], ["li", {}, "b"]]]),
        ("# a\n#### b", [["h3", {}, "a"], ["h4", {}, "b"]]),
        ("a\\\nb\nc", [["p", {}, "a", ["br", {}], "b", ["br", {}], "c"]]),
        ("", []),
    ],
)
def test_markdown_as_a_tree(text: str, expected: list[Any]) -> None:
    assert nodes_of(text) == expected


def test_a_table_says_how_its_cells_are_aligned_without_a_style() -> None:
    [table] = nodes_of("|a|b|\n|-:|-|\n|1|2|")
    assert table[0] == "table" and "style" not in json.dumps(table)
    [_, _, [_, _, [_, _, first, second]], _] = table
    assert first == ["th", {"class": "align-right"}, "a"] and second == ["th", {}, "b"]


@given(st.text("<>[]()!`*_#-+ |\n\t&;:/\\'\"=ahtpsjvcrix1.", max_size=60))
def test_a_tree_has_known_elements_and_links_alone(text: str) -> None:
    def check(nodes: list[Any]) -> None:
        for node in nodes:
            if isinstance(node, str):
                continue
            tag, attributes, *children = node
            assert tag in TAGS and set(attributes) <= {"href", "rel", "target", "start", "class"}
            if "href" in attributes:
                assert attributes["href"].lower().startswith(("http://", "https://"))
            check(children)

    check(nodes_of(text))


@pytest.mark.parametrize(
    "text", ["[", "*a_ ", "> ", "`a``", "![a](", "- ", "|a", "<a ", "**a ", "&#"]
)
def test_no_text_takes_long(text: str) -> None:
    long = (text * MAX_CHARS)[:MAX_CHARS]
    start_s = time.process_time()
    nodes_of(long)
    assert time.process_time() - start_s < 4.0
