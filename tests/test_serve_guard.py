"""Guard of the server: keys, Host and Origin, sizes; and the settings of these."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response
from serving import LIMIT_S
from starlette.types import Receive, Scope, Send

from lowtide.errors import UsageError
from lowtide.serve import guard
from lowtide.serve.app import build_app
from lowtide.serve.errors import add_handlers
from lowtide.serve.guard import Guard
from lowtide.serve.settings import ServeSettings

KEY = "a-key-of-some-length"


def ask(
    settings: ServeSettings, path: str = "/v1/models", method: str = "GET", **request: Any
) -> httpx.Response:
    """An app of one route behind a guard is asked once."""
    app = FastAPI()
    add_handlers(app)

    @app.api_route("/{path:path}", methods=["GET", "POST", "OPTIONS"])
    async def echo(request: Request) -> dict[str, int]:
        return {"bytes": len(await request.body())}

    app.add_middleware(Guard, settings=settings)

    async def once() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1:8000", timeout=LIMIT_S
        ) as client:
            return await client.request(method, path, **request)

    return asyncio.run(once())


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": f"Bearer {KEY}"}, 200),
        ({"authorization": f"bearer  {KEY} "}, 200),
        ({"x-api-key": KEY}, 200),
        ({"authorization": f"Bearer {KEY}x"}, 401),
        ({"authorization": f"Basic {KEY}"}, 401),
        ({"authorization": KEY}, 401),
        ({"x-api-key": ""}, 401),
        ({"authorization": "Bearer \xe4"}, 401),
    ],
)
def test_a_key_is_needed_everywhere_but_for_health(headers: dict[str, str], status: int) -> None:
    settings = ServeSettings(api_key=KEY)
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    for path in ("/v1/models", "/metrics", "/api/tags", "/v1/messages", "/ready"):
        assert ask(settings, path, headers=encoded).status_code == status, path
    assert ask(settings, "/health").status_code == 200


def test_refusals_have_the_form_of_their_api() -> None:
    settings = ServeSettings(api_key=KEY)
    assert ask(settings).json()["error"]["code"] == "invalid_api_key"
    told = ask(settings, "/v1/messages").json()
    assert told["type"] == "error" and told["error"]["type"] == "authentication_error"
    assert isinstance(ask(settings, "/api/chat").json()["error"], str)


@pytest.mark.parametrize(
    ("host", "is_let_in"),
    [
        ("127.0.0.1:8000", True),
        ("localhost", True),
        ("LOCALHOST:11434", True),
        ("[::1]:8000", True),
        ("192.168.1.7:8000", True),
        ("box.lan:8000", True),
        ("evil.example", False),
        ("evil.example:8000", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("localhost@evil.example", False),
        ("localhost:port", False),
        ("", False),
        ("a/b", False),
        ("a?b", False),
    ],
)
def test_names_of_others_are_refused(host: str, is_let_in: bool) -> None:
    settings = ServeSettings(allowed_hosts="BOX.lan")
    assert ask(settings, headers={"host": host}).status_code == (200 if is_let_in else 403)


@pytest.mark.parametrize(
    ("origin", "is_let_in"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://localhost:3000", True),
        ("http://localhost:3001", False),
        ("https://evil.example", False),
        ("null", False),
        ("", False),
        ("http://[", False),
        ("127.0.0.1:8000", False),
        ("http://127.0.0.1:8000.evil.example", False),
        ("http://127.0.0.1:80001", False),
        ("http://127.0.0.1", False),
    ],
)
def test_pages_of_others_are_refused(origin: str, is_let_in: bool) -> None:
    settings = ServeSettings(allowed_origins=["http://localhost:3000"])
    answer = ask(settings, method="POST", headers={"origin": origin}, content=b"{}")
    assert answer.status_code == (200 if is_let_in else 403)


def test_a_page_that_may_ask_is_told_so_before() -> None:
    """Browsers ask first, without the key."""
    settings = ServeSettings(api_key=KEY, allowed_origins="http://localhost:3000")
    service: Any = SimpleNamespace(settings=settings, model_name="m", on_served=[])
    transport = httpx.ASGITransport(build_app(service))
    wanted = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, content-type",
    }

    async def once() -> None:
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            for origin, is_let_in in (("http://localhost:3000", True), ("http://a.example", False)):
                headers = {"origin": origin, **wanted}
                answer = await client.options("/v1/chat/completions", headers=headers)
                assert answer.status_code == (200 if is_let_in else 403)
                told = answer.headers.get("access-control-allow-origin")
                assert told == (origin if is_let_in else None)
            given = {"origin": "http://localhost:3000", "authorization": f"Bearer {KEY}"}
            answer = await client.get("/api/version", headers=given)
            assert answer.headers["access-control-allow-origin"] == given["origin"]
            assert (await client.get("/api/version", headers=wanted)).status_code == 401

    asyncio.run(once())


def test_bodies_have_a_bound_whether_their_length_is_said_or_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guard, "MAX_BODY_BYTES", 1000)

    async def parts() -> AsyncGenerator[bytes, None]:
        for _ in range(11):
            yield b"x" * 100

    settings = ServeSettings()
    assert ask(settings, method="POST", content=b"x" * 1000).json() == {"bytes": 1000}
    assert ask(settings, method="POST", content=b"x" * 1001).status_code == 413
    assert ask(settings, method="POST", content=parts()).status_code == 413
    answer = ask(settings, method="POST", content=b"", headers={"content-length": "-1"})
    assert answer.status_code == 413


def test_the_bodies_of_all_requests_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small one is let in beside any others, and what has ended counts no more."""
    monkeypatch.setattr(guard, "UNCOUNTED_BYTES", 100)
    monkeypatch.setattr(guard, "MAX_BODIES_BYTES", 1000)

    async def statuses() -> list[int]:
        begun, may_end = list[int](), asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            begun.append(len(await Request(scope, receive).body()))
            await may_end.wait()
            await Response()(scope, receive, send)

        transport = httpx.ASGITransport(Guard(app, ServeSettings()))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            first = [asyncio.create_task(client.post("/", content=b"x" * 600)) for _ in range(2)]
            while len(begun) < 2:
                await asyncio.sleep(0)
            refused = await client.post("/", content=b"x" * 101)
            small = asyncio.create_task(client.post("/", content=b"x" * 100))
            may_end.set()
            answers = [*await asyncio.gather(*first), refused, await small]
            assert refused.headers["retry-after"] == "10"
            again = await client.post("/", content=b"x" * 1100)
            return [answer.status_code for answer in (*answers, again)]

    assert asyncio.run(statuses()) == [200, 200, 429, 200, 200]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "box.lan"])
def test_other_machines_need_a_key(host: str) -> None:
    with pytest.raises(UsageError, match="--api-key"):
        ServeSettings(host=host)
    assert not ServeSettings(host=host, api_key=KEY).is_local
    assert not ServeSettings(host=host, auth=False).is_local


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_this_machine_needs_none(host: str) -> None:
    assert ServeSettings(host=host).is_local


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 70000},
        {"api_key": "with space "},
        {"api_key": "ä"},
        {"max_requests": 0},
        {"request_timeout_s": 0.1},
    ],
)
def test_settings_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ServeSettings(**wrong)
