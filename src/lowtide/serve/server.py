"""Runs the app: a socket, uvicorn, and a shutdown by signal that lets answers finish."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from lowtide.async_llm import AsyncLLM
from lowtide.errors import UsageError
from lowtide.serve import open_files
from lowtide.serve.app import build_app
from lowtide.serve.connection import Connection
from lowtide.serve.guard import MAX_HEADER_BYTES
from lowtide.serve.service import LAST_WORDS_S, SHUTDOWN_S, Service
from lowtide.serve.settings import ServeSettings

KEEP_ALIVE_S = 30

SEND_BUFFER_BYTES = 64 << 10
"""Requested kernel send buffer (Linux doubles it): holds some hundred tokens of a stream."""


def bound_socket(settings: ServeSettings) -> socket.socket:
    """Bind the server's address before a model is loaded, so that a bad one fails early.

    Raises UsageError.
    """
    host, port = settings.host, settings.port
    try:
        [(family, kind, _, _, address), *_] = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        made = socket.socket(family, kind)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            made.bind(address)
        except BaseException:
            made.close()
            raise
    except (OSError, UnicodeError) as error:  # the second: a name that no host can have
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"cannot listen at {host}, port {port}: {reason}. Choose another --host or --port."
        ) from error
    return made


def url_of(bound: socket.socket) -> str:
    """Return the URL by which clients on this machine reach the server."""
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def run_server(
    llm: AsyncLLM, settings: ServeSettings, bound: socket.socket, on_ready: Callable[[str], None]
) -> None:
    """Serve until a signal comes, which is raised again once all answers have ended.

    on_ready: called with the server's URL once it listens.
    """
    open_files.raise_limit()
    service = Service(llm, settings)
    server = _Server(config_of(build_app(service)), service, on_ready)
    service.warm_up()
    await server.serve([bound])


def config_of(app: ASGIApp) -> uvicorn.Config:
    """Return uvicorn's configuration: limits of connections, and no access log."""
    return uvicorn.Config(
        app,
        backlog=open_files.max_waiting(),
        http=Connection,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(SHUTDOWN_S),
    )


class _Server(uvicorn.Server):
    """uvicorn's server, which accepts no more requests after the first signal."""

    def __init__(
        self, config: uvicorn.Config, service: Service, on_ready: Callable[[str], None]
    ) -> None:
        super().__init__(config)
        self._service = service
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and sockets:
            self._on_ready(url_of(sockets[0]))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Give running answers `SHUTDOWN_S` to finish."""
        self._service.drain(SHUTDOWN_S - LAST_WORDS_S)
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Treat a closed terminal's signal as SIGTERM, unless it is ignored (nohup)."""
        with super().capture_signals():
            before = signal.getsignal(signal.SIGHUP)
            is_heard = threading.current_thread() is threading.main_thread()
            if not is_heard or before == signal.SIG_IGN:
                yield
                return
            signal.signal(signal.SIGHUP, self.handle_exit)
            try:
                yield
            finally:
                signal.signal(signal.SIGHUP, before)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._service.drain()
        super().handle_exit(sig, frame)
