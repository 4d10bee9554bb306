"""A small model that talks, and a server of it on the loopback."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import uvicorn
from starlette.types import ASGIApp

from lowtide import AsyncLLM
from lowtide.model_folder.demos import DEMO_FOLDER
from lowtide.serve.app import build_app
from lowtide.serve.server import bound_socket, config_of, url_of
from lowtide.serve.service import Service
from lowtide.serve.settings import ServeSettings

LIMIT_S = 60.0

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
        return httpx.Client(base_url=self.url, timeout=LIMIT_S, **options)


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


def wait_until(is_so: Any) -> None:
    """Until something is so, which is a matter of moments."""
    end_s = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.01)


class ServerProcess(NamedTuple):
    """`lowtide serve` in a process of its own."""

    process: subprocess.Popen[str]
    url: str
    said: list[str]  # lines on standard error


@contextmanager
def serving_process(model: str | Path, *arguments: str) -> Iterator[ServerProcess]:
    """A server of its own, once it listens, and killed at the end."""
    command = [sys.executable, "-m", "lowtide", "serve", str(model), "--port", "0", *arguments]
    env = os.environ | {"PYTHONWARNINGS": "error"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
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
