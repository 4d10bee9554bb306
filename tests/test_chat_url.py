"""`lowtide chat --url` against a stand-in of a server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from lowtide.cli.app import app
from lowtide.cli.conversation import SETTABLE
from lowtide.cli.remote import Server, chosen_model
from lowtide.errors import UsageError
from lowtide.params import DiffusionParams
from lowtide.serve.openai_chat import ChatBody

CHUNKS = [
    {"choices": [{"delta": {"role": "assistant"}}]},
    {"choices": [{"delta": {"reasoning_content": "hm"}}]},
    {"choices": [{"delta": {"content": "the "}}]},
    {"choices": [{"delta": {"content": "answer"}}]},
    {"choices": [{"delta": {}, "finish_reason": "stop"}]},
    {"choices": [], "usage": {"completion_tokens": 3}},
]


class Handler(BaseHTTPRequestHandler):
    asked: ClassVar[list[dict[str, Any]]] = []
    key: ClassVar[str | None] = None
    chunks: ClassVar[list[dict[str, Any]]] = CHUNKS

    def do_GET(self) -> None:
        self._reply(200, {"data": [{"id": "one"}]})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.key is not None and self.headers["Authorization"] != f"Bearer {self.key}":
            return self._reply(401, {"error": {"message": "no such key"}})
        self.asked.append(json.loads(body))
        self.send_response(200)
        self.end_headers()
        for chunk in self.chunks:
            self.wfile.write(f": ping\n\ndata: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None: ...

    def _reply(self, status: int, found: object) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Handler, "asked", [])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def chat(*arguments: str, said: str) -> Any:
    return CliRunner().invoke(app, ["chat", *arguments, "--no-history"], input=said)


def test_turns_go_to_the_server_and_thoughts_do_not_go_back(url: str) -> None:
    done = chat("--url", f"{url}/v1/", "--system", "be brief", said="hi\nand?\n/stats\n")
    assert done.exit_code == 0, done.output
    assert done.stdout.count("the answer\n") == 2 and "hm" not in done.stdout
    assert "3 tokens in" in done.stderr
    first, second = Handler.asked
    assert first["model"] == "one" and first["stream"]
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert second["messages"][2:] == [
        {"role": "assistant", "content": "the answer"},
        {"role": "user", "content": "and?"},
    ]
    assert "temperature" not in first


def test_parameters_are_sent_where_they_are_given(url: str) -> None:
    given = ["--temperature", "0", "--max-tokens", "5", "--seed", "0"]
    done = chat("--url", url, *given, said="hi\n")
    assert done.exit_code == 0, done.output
    asked = Handler.asked[0]
    assert (asked["temperature"], asked["max_tokens"], asked["seed"]) == (0, 5, 0)
    assert "top_p" not in asked and "stop" not in asked


SET = {
    "temperature": 0.5,
    "top_k": 4,
    "top_p": 0.9,
    "min_p": 0.1,
    "max_tokens": 64,
    "seed": 7,
    "repetition_penalty": 1.1,
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
    "ignore_eos": True,
    "stop": ["x"],
}
SET_OF_BLOCKS = {
    "block_length": 32,
    "steps": 8,
    "threshold": 0.5,
    "remasking": "entropy",
    "edit_threshold": 0.9,
    "max_post_steps": 2,
    "cfg_scale": 1.0,
    "eos_early_stop": False,
    "eps": 0.01,
    "alg_temp": 0.1,
    "factor": 2.0,
}


def test_all_that_can_be_set_is_sent_where_the_api_has_it(url: str) -> None:
    assert {*SET, *SET_OF_BLOCKS} == set(SETTABLE)
    values = {**SET, "stop": "x", **SET_OF_BLOCKS}
    lines = [f"/set {name} {value}" for name, value in values.items()]
    back = [f"/set {name} default" for name in values]
    done = chat("--url", url, "--no-think", said="\n".join(["hi", *lines, "hi", *back, "hi"]))
    assert done.exit_code == 0 and "lowtide:" not in done.stderr, done.output
    assert f"one of {url}" in done.stderr
    first, second, third = Handler.asked
    sent = {name: second[name] for name in second if name not in first}
    assert sent == {**SET, "diffusion": SET_OF_BLOCKS}
    assert set(third) == set(first) and first["chat_template_kwargs"] == {"enable_thinking": False}
    body = {**second, "messages": [{"role": "user", "content": "hi"}]}
    [ask] = ChatBody.model_validate(body).asks()  # as lowtide's own server takes it
    assert ask.params.diffusion == DiffusionParams(**SET_OF_BLOCKS)


@pytest.mark.parametrize(
    "flags", [["--host-memory", "8GiB"], ["--raw"], ["--format", "q4"], ["--context", "99"]]
)
def test_flags_that_a_server_is_not_asked_are_refused(flags: list[str], url: str) -> None:
    done = chat("--url", url, *flags, said="hi\n")
    assert done.exit_code == 2 and f"{flags[0]}: the server has its own" in done.stderr
    assert not Handler.asked


def test_a_key_comes_from_the_environment(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handler, "key", "secret")
    done = chat("--url", url, said="hi\n")
    assert "401: no such key" in done.stderr and "LOWTIDE_API_KEY" in done.stderr
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert "the answer" in chat("--url", url, said="hi\n").stdout


def test_what_is_refused_is_told_in_one_line(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = chat("other", "--url", url, said="hi\n")
    assert done.exit_code == 2 and "Name one of the models" in done.stderr and "one" in done.stderr
    with pytest.raises(UsageError, match="cannot be reached: Connection refused. .*serve"):
        chosen_model(Server("127.0.0.1:9"), None)
    for address in ("ftp://x", "http://[::1", "localhost:one", "localhost:70000", ""):
        with pytest.raises(UsageError, match="address such as"):
            Server(address)
    with pytest.raises(UsageError, match="cannot be reached"):
        chosen_model(Server("a..b"), None)
    with pytest.raises(UsageError, match="printable ASCII") as error:
        Server(url, "gehe\u00efm")
    assert "gehe" not in str(error.value)
    monkeypatch.setattr(Handler, "chunks", [{"error": {"message": "out of luck"}}])
    done = chat("--url", url, said="hi\n")
    assert done.exit_code == 0 and "out of luck" in done.stderr


def test_an_answer_that_breaks_off_is_told(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a length or a chunk that is missing, only the answer's own end tells."""

    def broken(self: Handler) -> None:
        self.send_response(200)
        self.end_headers()
        for chunk in self.chunks:
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())

    monkeypatch.setattr(Handler, "do_POST", broken)
    assert "broke off" not in chat("--url", url, said="hi\n").stderr
    for num_chunks in range(4):
        monkeypatch.setattr(Handler, "chunks", CHUNKS[:num_chunks])
        done = chat("--url", url, said="hi\n")
        assert "broke off its answer: the connection was closed" in done.stderr


def test_a_list_of_models_that_breaks_off_is_told(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Handler) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"ff\r\n{")

    monkeypatch.setattr(Handler, "do_GET", broken)
    done = chat("--url", url, said="hi\n")
    assert done.exit_code == 2 and "broke off its answer: the connection was closed" in done.stderr


def test_without_a_model_or_an_address_chat_says_what_it_needs() -> None:
    done = chat(said="")
    assert done.exit_code == 2 and "--url" in done.stderr
