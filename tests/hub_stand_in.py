"""The hub's HTTP interface on the loopback, as far as lowtide and huggingface-hub ask for it.

Two servers, as there: one has file lists, small files and redirects, the other, elsewhere, the
large files, in ranges. It writes down what it was asked, counts what it sent, and fails as told.

    stand_in.add("org/name", {"config.json": b"{}", "model.safetensors": Content(header, 30 << 30)})
    stand_in.faults.append(Fault("model.safetensors", status=429))
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session

from lowtide.model_folder import hub_requests

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Content(NamedTuple):
    """A file's bytes: `start`, and zeros from there on."""

    start: bytes
    num_bytes: int

    def part(self, first: int, stop: int) -> bytes:
        return self.start[first:stop].ljust(stop - first, b"\0")


@dataclass
class Fault:
    """Fault of requests whose path holds `part`, `times` times."""

    part: str
    times: int = 1
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    break_after: int | None = None  # bytes of the body
    pause_s: float = 0.0  # before anything is sent
    ignores_range: bool = False
    shifts_range: bool = False
    garbles: bool = False
    method: str = "GET"
    claims_bytes: int | None = None  # of a refusal's body, of which none comes


class Request(NamedTuple):
    """As it was asked."""

    method: str
    path: str
    range: str | None
    token: str | None
    is_elsewhere: bool  # of the server that has the large files


@dataclass
class Repo:
    files: dict[str, Content]
    commits: dict[str, str]  # by revision

    def digest(self, name: str) -> str:
        content = self.files[name]
        return hashlib.sha256(content.part(0, content.num_bytes)).hexdigest()


class StandIn:
    """Both servers; `close` ends them."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.sent_bytes = 0
        self.needed_token: str | None = None
        self.change_listing: Callable[[dict[str, Any]], object] | None = None  # in place
        self.released = threading.Event()
        self.lock = threading.Lock()
        self._digests: dict[tuple[str, str], str] = {}
        self._is_closed = False
        self._servers = [_Server(self), _Server(self)]
        self.address, self.elsewhere = (
            f"http://127.0.0.1:{server.server_address[1]}" for server in self._servers
        )
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

    def add(self, repo_id: str, files: Mapping[str, bytes | Content], commit: str = COMMIT) -> Repo:
        contents = {
            name: each if isinstance(each, Content) else Content(each, len(each))
            for name, each in files.items()
        }
        self.repos[repo_id] = Repo(contents, {"main": commit, commit: commit})
        return self.repos[repo_id]

    def digest(self, repo_id: str, name: str) -> str:
        """Of a large file; those that no disk holds have any."""
        key, content = (repo_id, name), self.repos[repo_id].files[name]
        if content.num_bytes > 1 << 30:
            return hashlib.sha256(repr(key).encode()).hexdigest()
        if key not in self._digests:
            self._digests[key] = self.repos[repo_id].digest(name)
        return self._digests[key]

    def fault(self, method: str, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.part in path and fault.times > 0 and fault.method == method:
                    fault.times -= 1
                    return fault
        return None

    def asked(self, part: str) -> list[Request]:
        return [request for request in self.requests if part in request.path]

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self.released.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()
        close_session()  # whose connections would go on being answered


def is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".gguf"))


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, stand_in: StandIn) -> None:
        self.stand_in = stand_in
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are part of the tests."""


class _Counted:
    """A connection's output, counted."""

    def __init__(self, out: Any, stand_in: StandIn) -> None:
        self._out, self._stand_in = out, stand_in

    def write(self, data: bytes) -> int:
        with self._stand_in.lock:
            self._stand_in.sent_bytes += len(data)
        return int(self._out.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.wfile = _Counted(self.wfile, self.server.stand_in)  # type: ignore[assignment]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub = self.server.stand_in
        path, token = unquote(urlsplit(self.path).path), self.headers.get("Authorization")
        is_elsewhere = hub.elsewhere.endswith(f":{self.server.server_address[1]}")
        request = Request(self.command, path, self.headers.get("Range"), token, is_elsewhere)
        with hub.lock:
            hub.requests.append(request)
        # A large file's address on the hub only leads elsewhere: what goes wrong goes wrong there.
        is_redirect = "/resolve/" in path and is_large(path) and not is_elsewhere
        fault = None if is_redirect else hub.fault(self.command, path)
        if fault is not None and fault.pause_s:
            hub.released.wait(fault.pause_s)
        if fault is not None and fault.status is not None:
            return self._send(fault.status, b"", dict(fault.headers), fault.claims_bytes)
        if hub.needed_token is not None and not is_elsewhere:
            if token != f"Bearer {hub.needed_token}":
                return self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        if is_elsewhere:
            return self._send_elsewhere(path, fault)
        if path.startswith("/api/models/"):
            return self._send_api(path.removeprefix("/api/models/"))
        return self._send_file(path.removeprefix("/"), fault)

    def _send_api(self, path: str) -> None:
        hub = self.server.stand_in
        repo_id, _, rest = path.replace("/tree/", "/revision/").partition("/revision/")
        repo = hub.repos.get(repo_id)
        if repo is None:
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        commit = repo.commits.get(rest or "main")
        if commit is None:
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        files = [(n, c.num_bytes, self._lfs(repo_id, n)) for n, c in repo.files.items()]
        answer: Any = {
            "id": repo_id,
            "modelId": repo_id,
            "sha": commit,
            "siblings": [
                {"rfilename": n, "size": size, "blobId": blob_id(n), **lfs}
                for n, size, lfs in files
            ],
        }
        if hub.change_listing is not None:
            hub.change_listing(answer)
        if "/tree/" in path:
            answer = [
                {"type": "file", "path": n, "size": size, "oid": blob_id(n), **lfs}
                for n, size, lfs in files
            ]
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _lfs(self, repo_id: str, name: str) -> dict[str, object]:
        if not is_large(name):
            return {}
        digest = self.server.stand_in.digest(repo_id, name)
        size = self.server.stand_in.repos[repo_id].files[name].num_bytes
        return {"lfs": {"sha256": digest, "oid": digest, "size": size, "pointerSize": 134}}

    def _send_file(self, path: str, fault: Fault | None) -> None:
        hub = self.server.stand_in
        repo_id, _, rest = path.partition("/resolve/")
        revision, _, name = rest.partition("/")
        repo = hub.repos.get(repo_id)
        if repo is None or name not in repo.files or revision not in repo.commits:
            code = "RepoNotFound" if repo is None else "EntryNotFound"
            return self._send(404, b"", {"X-Error-Code": code})
        content, headers = repo.files[name], {"X-Repo-Commit": repo.commits[revision]}
        if not is_large(name):
            headers["ETag"] = f'"{blob_id(name)}"'
            return self._send_content(content, headers, fault)
        headers["X-Linked-Etag"] = f'"{hub.digest(repo_id, name)}"'
        headers["X-Linked-Size"] = str(content.num_bytes)
        headers["Location"] = f"{hub.elsewhere}/{repo_id}/{name}"
        self._send(302, b"", headers)

    def _send_elsewhere(self, path: str, fault: Fault | None) -> None:
        org, repo, name = path.removeprefix("/").split("/", 2)
        self._send_content(self.server.stand_in.repos[f"{org}/{repo}"].files[name], {}, fault)

    def _send_content(self, content: Content, headers: dict[str, str], fault: Fault | None) -> None:
        first, stop, status = 0, content.num_bytes, 200
        asked = self.headers.get("Range")
        if asked is not None and not (fault is not None and fault.ignores_range):
            ends = asked.removeprefix("bytes=").split("-")
            first, stop, status = int(ends[0]), min(int(ends[1]) + 1, stop), 206
            if fault is not None and fault.shifts_range:
                first, stop = first + 1, stop + 1
            headers["Content-Range"] = f"bytes {first}-{stop - 1}/{content.num_bytes}"
        if self.command == "HEAD":
            return self._send(status, b"", headers, stop - first)
        end = stop
        if fault is not None and fault.break_after is not None:
            end = min(stop, first + fault.break_after)
        if end - first > 64 << 20:  # somebody asks for weights of a model that is not here
            return self._send(500, b"too much was asked for", {})
        body = content.part(first, end)
        if fault is not None and fault.garbles:
            body = b"x" * len(body)
        self._send(status, body, headers, stop - first)
        if end < stop:
            self.wfile.flush()
            self.close_connection = True

    def _send(
        self, status: int, body: bytes, headers: dict[str, str], length: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def blob_id(name: str) -> str:
    return hashlib.sha1(name.encode()).hexdigest()


def wait_for(is_so: Any, timeout_s: float = 5.0) -> None:
    """Raises TimeoutError unless `is_so()` becomes true."""
    end_s = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > end_s:
            raise TimeoutError
        time.sleep(0.005)


def be_patient(timeout_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait `timeout_s` for a silent hub."""
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", timeout_s)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", timeout_s)


@contextmanager
def served(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """A hub that huggingface-hub asks in this process, with `cache` as its cache. Nobody waits."""
    hub = StandIn()
    template = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", hub.address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    be_patient(30, monkeypatch)  # a busy machine is no failure
    monkeypatch.setattr(hub_requests, "WAITS_S", (0.0, 0.0))
    # A list that newer versions of huggingface-hub fetch once a day, for their user agent.
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(cache) + "-agents", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no-token"))
    try:
        yield hub
    finally:
        hub.close()
