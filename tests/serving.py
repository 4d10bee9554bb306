"""A small model that talks, and a server of it on the loopback."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import uvicorn
from starlette.types import ASGIApp
from whole import LIMIT_S, wait_until

from lowtide import AsyncLLM
from lowtide.model_folder.demos import DEMO_FOLDER
from lowtide.serve.app import build_app
from lowtide.serve.server import bound_socket, config_of, url_of
from lowtide.serve.service import Service
from lowtide.serve.settings import ServeSettings

TEMPLATE = """\
{%- for tool in tools %}{{ tool | tojson }}\n{% endfor -%}
{%- for message in messages -%}
{{ message.role }}: {{ message.content }}
{% endfor -%}
{%- if add_generation_prompt %}assistant:{% endif -%}
"""


def talking_folder(folder: Path, kind: str = "autoregressive") -> Path:
    """A demo model with a chat template."""
    shutil.copytree(DEMO_FOLDER / kind, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


class Running(NamedTuple):
    """A server and where it is."""

    url: str
    service: Service

    def client(self, **options: Any) -> httpx.Client:
        # No server of tests speaks TLS, whose certificates take 20 ms to load.
        return httpx.Client(base_url=self.url, timeout=LIMIT_S, verify=False, **options)


@contextmanager
def serving(llm: AsyncLLM, **settings: Any) -> Iterator[Running]:
    """A server in a thread; the model stays loaded."""
    service = Service(llm, ServeSettings(port=0, **settings))
    with serving_app(build_app(service)) as url:
        yield Running(url, service)


@contextmanager
def serving_app(app: ASGIApp) -> Iterator[str]:
    """An app at a free port of the loopback, in a thread: its address."""
    server = uvicorn.Server(config_of(app))
    with bound_socket(ServeSettings(port=0)) as bound:
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([bound])))
        thread.start()
        try:
            wait_until(lambda: server.started)
            yield url_of(bound)
        finally:
            server.should_exit = True
            thread.join(LIMIT_S)
            assert not thread.is_alive()


@contextmanager
def asked(url: str, path: str, **body: object) -> Iterator[socket.socket]:
    """A client that has asked for an answer, and goes at the end."""
    place, content = urlsplit(url), json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((place.hostname, place.port), LIMIT_S) as client:
        client.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        yield client


class ServerProcess(NamedTuple):
    """`lowtide serve` in a process of its own."""

    process: subprocess.Popen[str]
    url: str
    said: list[str]  # lines on standard error


@contextmanager
def serving_process(model: str | Path, *arguments: str, **options: Any) -> Iterator[ServerProcess]:
    """A server of its own, once it listens, and killed at the end. options: of `Popen`."""
    command = [sys.executable, "-m", "lowtide", "serve", str(model), "--port", "0", *arguments]
    env = os.environ | {"PYTHONWARNINGS": "error"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env, **options)
    said: list[str] = []
    found = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        with process.stderr:
            for line in process.stderr:
                said.append(line)
                if "is served at" in line:
                    found.set()
        found.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert found.wait(LIMIT_S)
        match = re.search(r"http://\S+", "".join(said))
        assert match is not None, said
        yield ServerProcess(process, match[0], said)
    finally:
        process.kill()
        process.wait(LIMIT_S)
        reader.join(LIMIT_S)
