"""`lowtide batch`: each line is answered once, whatever ends a run, as the server answers it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from serving import LIMIT_S, serving
from typer.testing import CliRunner, Result
from whole import wait_until

from lowtide import AsyncLLM
from lowtide.cli.app import app
from lowtide.errors import LowtideError, StorageError, UsageError
from lowtide.policies.presets import unregister
from lowtide.serve import batch as answering_module
from lowtide.serve import guard
from lowtide.serve.batch import Answerer, answer_all, answering, body_of
from lowtide.serve.batch_files import Asked, AskedLines, Results, Stream, is_error
from lowtide.serve.service import Service

DEMO = "demo:autoregressive"
FLOAT32 = ("--dtype", "float32")  # whose words are the same in any company
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CHAT, TEXT, ITEMS = "/v1/chat/completions", "/v1/completions", "/v1/responses"


def line(custom_id: str, question: str, url: str = CHAT, **fields: Any) -> dict[str, Any]:
    body = {
        CHAT: {"messages": [{"role": "user", "content": question}]},
        TEXT: {"prompt": question, "max_tokens": 4},
        ITEMS: {"input": question},
    }[url]
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {**body, **fields}}


def sums(count: int, **fields: Any) -> list[dict[str, Any]]:
    """Lines by every route, some of which draw."""
    urls = (CHAT, ITEMS, TEXT)
    return [
        line(f"n{number}", f"{number} + {7 * number % 50}", urls[number % 3], **fields)
        for number in range(count)
    ]


def written(path: Path, lines: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def answers(path: Path) -> dict[str, dict[str, Any]]:
    """The answers in a file by their ids, of which each is there once."""
    read = [json.loads(each) for each in path.read_text().splitlines()]
    by_id = {each["custom_id"]: each for each in read}
    assert len(by_id) == len(read)
    return by_id


def text_of(answer: dict[str, Any]) -> str:
    body = answer["response"]["body"]
    if "output" in body:
        return str(body["output"][-1]["content"][0]["text"])
    choice = body["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def texts(path: Path) -> dict[str, str]:
    return {custom_id: text_of(answer) for custom_id, answer in answers(path).items()}


def batch(*arguments: str | Path, model: str = DEMO, **options: Any) -> Result:
    return CliRunner().invoke(app, ["batch", model, *FLOAT32, *map(str, arguments)], **options)


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    llm = AsyncLLM(DEMO, context=2048, dtype="float32")
    yield llm
    asyncio.run(llm.close())


# Whole runs.


def test_long_lines_are_no_others_load(
    tmp_path: Path, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server refuses large requests beside others for later; a batch has no one else's."""
    monkeypatch.setattr(guard, "UNCOUNTED_BYTES", 0)
    monkeypatch.setattr(guard, "MAX_BODIES_BYTES", 10)
    lines = sums(3, temperature=0)
    source = written(tmp_path / "in.jsonl", lines)
    assert batch("-i", source, "-o", tmp_path / "out.jsonl").exit_code == 0
    assert len(texts(tmp_path / "out.jsonl")) == 3
    with serving(llm) as running, running.client() as client:
        assert client.post("/v1/completions", json=lines[0]["body"]).status_code == 429


def test_lines_of_every_route_are_answered_as_the_server_answers_them(
    tmp_path: Path, llm: AsyncLLM
) -> None:
    lines = sums(12, temperature=0)
    source = written(tmp_path / "in.jsonl", lines)
    result = batch("-i", source, "-o", tmp_path / "out.jsonl")
    assert result.exit_code == 0, result.output
    assert "12 of 12 lines are answered." in result.stderr and not result.stdout
    found = answers(tmp_path / "out.jsonl")
    with serving(llm) as running, running.client() as client:
        for each in lines:
            served = client.post(each["url"], json=each["body"])
            served_answer = {"response": {"body": served.json()}}
            assert text_of(found[each["custom_id"]]) == text_of(served_answer)
            assert found[each["custom_id"]]["response"]["status_code"] == served.status_code == 200
            assert found[each["custom_id"]]["error"] is None


def test_a_run_goes_on_where_an_earlier_one_was_and_draws_the_same(tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", sums(20, temperature=1.5))
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    assert batch("-i", source, "-o", whole).exit_code == 0
    some = whole.read_bytes().splitlines(keepends=True)[3:9]
    parts.write_bytes(b"".join(some) + b'{"id": "batch_req_7", "custom_id": "n1')  # torn
    assert batch("-i", source, "-o", parts, "--at-once", "3").exit_code == 0
    assert parts.read_bytes().startswith(b"".join(some))
    assert texts(parts) == texts(whole) and len(texts(whole)) == 20
    before = parts.read_bytes()
    assert batch("-i", source, "-o", parts).exit_code == 0  # nothing is left
    assert parts.read_bytes() == before


def test_shards_are_the_whole_in_other_files(tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", sums(11, temperature=1.0))
    assert batch("-i", source, "-o", tmp_path / "whole.jsonl", "--in-order").exit_code == 0
    found: dict[str, str] = {}
    for index in (1, 2, 3):
        part = tmp_path / f"{index}.jsonl"
        assert batch("-i", source, "-o", part, "--shard", f"{index}/3").exit_code == 0
        assert not found.keys() & texts(part).keys()
        found |= texts(part)
    assert found == texts(tmp_path / "whole.jsonl")
    assert list(answers(tmp_path / "whole.jsonl")) == [f"n{number}" for number in range(11)]


def test_sorting_keeps_the_answers_of_other_shards(tmp_path: Path) -> None:
    source, target = written(tmp_path / "in.jsonl", sums(7)), tmp_path / "out.jsonl"
    for index in (2, 1):
        result = batch("-i", source, "-o", target, "--shard", f"{index}/2", "--in-order")
        assert result.exit_code == 0, result.output
    assert list(answers(target)) == [f"n{number}" for number in range(7)]


def test_standard_input_and_output(tmp_path: Path) -> None:
    lines = "".join(json.dumps(each) + "\n" for each in sums(9))
    result = batch("-i", "-", "-o", "-", "--in-order", input=lines)
    assert result.exit_code == 0, result.output
    found = [json.loads(each)["custom_id"] for each in result.stdout.splitlines()]
    assert found == [f"n{number}" for number in range(9)]


@given(order=st.permutations(range(6)), num_done=st.integers(0, 6))
def test_a_stream_in_order_loses_nothing_at_an_early_end(order: list[int], num_done: int) -> None:
    lines = [Asked(number + 1, str(number), 0, 0) for number in range(6)]
    file = BytesIO()
    with closing(Stream(file, lines)) as stream:
        for number in order[:num_done]:
            stream.write(str(number), f"{number}\n".encode(), False)
    assert file.getvalue().decode().split() == sorted(map(str, order[:num_done]))


def test_a_pipe_with_a_name_is_an_input(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    text = "".join(json.dumps(each) + "\n" for each in sums(3))
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=(text,))
    writer.start()
    result = batch("-i", tmp_path / "pipe", "-o", tmp_path / "out.jsonl")
    writer.join()
    assert result.exit_code == 0, result.output
    assert len(answers(tmp_path / "out.jsonl")) == 3


def test_what_windows_writes_is_read(tmp_path: Path) -> None:
    text = "\r\n\r\n".join(json.dumps(each) for each in sums(3))  # without an end of the last line
    (tmp_path / "in.jsonl").write_bytes(b"\xef\xbb\xbf" + text.encode())
    result = batch("-i", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl")
    assert result.exit_code == 0, result.output
    assert len(answers(tmp_path / "out.jsonl")) == 3


def test_an_input_that_cannot_be_read_or_kept_is_told_of_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = batch("-i", "/proc/self/mem", "-o", tmp_path / "out.jsonl")
    assert result.exit_code == 1 and "input cannot be read" in result.stderr

    def no_room() -> None:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr("lowtide.cli.batch.TemporaryFile", no_room)
    result = batch("-i", "-", "-o", tmp_path / "out.jsonl", input="{}")
    assert result.exit_code == 1 and "TMPDIR" in result.stderr


def test_standard_output_that_is_the_input_is_refused(tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", sums(2))
    before = source.read_bytes()
    command = [sys.executable, "-m", "lowtide", "batch", DEMO, "-i", source, "-o", "-"]
    with source.open("ab") as appended:
        done = subprocess.run(command, stdout=appended, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and "is the input" in done.stderr
    assert source.read_bytes() == before


def test_errors_of_lines_are_told_and_end_nothing(tmp_path: Path) -> None:
    lines = [
        *sums(2),
        line("unknown field", "1 + 1", frequency=1),
        line("too long", "1 " * 5000),
        {**line("no such route", "1 + 1"), "url": "/v1/embeddings"},
        line("good", "1 + 1", stream=True, n=3),
    ]
    source, target = written(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    result = batch("-i", source, "-o", target)
    assert result.exit_code == 0 and "6 of 6 lines are answered, 3 with an error" in result.stderr
    found = answers(target)
    assert found["unknown field"]["response"]["status_code"] == 400
    assert "frequency" in found["unknown field"]["response"]["body"]["error"]["message"]
    assert found["too long"]["response"]["body"]["error"]["code"] == "context_length_exceeded"
    assert found["no such route"]["error"]["code"] == "invalid_url"
    assert len(found["good"]["response"]["body"]["choices"]) == 3
    assert batch("-i", source, "-o", target, "--strict").exit_code == 1


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([line("a", "1"), line("b", "1"), line("a", "1")], "Line 3 .* custom_id of line 1, 'a'"),
        ([line("a", "1"), {"url": CHAT, "body": {}}], "Line 2 .* no custom_id"),
        ([{**line("a", "1"), "custom_id": 7}], "Line 1 .* custom_id must be a text, not 7"),
        ([{"custom_id": "a", "url": CHAT}], "Line 1 .* no body"),
        ([{**line("a", "1"), "body": []}], "Line 1 .* body must be an object"),
        ([{**line("a", "1"), "method": "GET"}], "Line 1 .* method must be POST"),
        ([line("a", "1"), [1]], "Line 2 .* not a JSON object"),
        ([line("a", "1", model="gpt-9")], "Line 1 .* 'gpt-9', and this is 'demo:autoregressive'"),
        ([], "no lines"),
    ],
)
def test_wrong_lines_are_refused_before_anything_is_loaded(
    lines: list[Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowtide.cli.batch.open_async", None)  # never called
    result = batch("-i", written(tmp_path / "in.jsonl", lines), "-o", tmp_path / "out.jsonl")
    assert result.exit_code == 2, result.output
    assert re.search(said, result.stderr), result.stderr
    assert not (tmp_path / "out.jsonl").exists()


def test_a_policy_of_a_file_is_not_for_a_cluster(tmp_path: Path) -> None:
    source, mine = written(tmp_path / "in.jsonl", sums(1)), tmp_path / "mine.py"
    mine.write_text(
        "from lowtide.extend import Placement, Recipe, register_policy\n"
        "register_policy('of_a_file', Recipe(Placement))\n"
    )
    try:
        result = batch("-i", source, "-o", tmp_path / "out", "--ray", "--policy-file", mine)
    finally:
        unregister("of_a_file")
    assert result.exit_code == 2 and "--policy-file names a file of this machine" in result.stderr


def test_any_model_answers_for_another(tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", [line("a", "1 + 1", model="gpt-9")])
    assert batch("-i", source, "-o", tmp_path / "out.jsonl", "--any-model").exit_code == 0
    [answer] = answers(tmp_path / "out.jsonl").values()
    assert answer["response"]["body"]["model"] == DEMO


def test_files_that_are_not_the_answers_stay_as_they_are(tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", sums(2))
    before = source.read_bytes()
    assert "is the input" in batch("-i", source, "-o", source).stderr
    link = tmp_path / "link"
    link.symlink_to(source)
    assert "is the input" in batch("-i", source, "-o", link).stderr
    assert source.read_bytes() == before
    for text in ("precious\n", json.dumps({"custom_id": "n0"}) + "\n", "no end of a line"):
        other = tmp_path / "other"
        other.write_text(text)
        assert "other lines" in batch("-i", source, "-o", other).stderr
        assert other.read_text() == text
    of_another = written(tmp_path / "of_another", [{"custom_id": "x", "response": 1, "error": 0}])
    assert "other lines" in batch("-i", source, "-o", of_another).stderr
    assert "not a file" in batch("-i", source, "-o", "/dev/null").stderr
    missing = batch("-i", tmp_path / "missing", "-o", tmp_path / "out")
    assert missing.exit_code == 1 and "cannot be read" in missing.stderr
    for shard in ("0/2", "3/2", "x", "1", "1/0"):
        assert batch("-i", source, "-o", tmp_path / "out", "--shard", shard).exit_code == 2
    assert batch("-i", source).exit_code == 2


# What ends a run.


# These tests may themselves run under nohup, whose children ignore SIGHUP.
HEARING = """
import signal
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from lowtide.cli.main import main
main()
"""
IGNORING = HEARING.replace("SIG_DFL", "SIG_IGN")


def start(
    source: Path, target: Path, *arguments: str, code: str = HEARING
) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, "batch", DEMO, "-i", source, "-o", target]
    return subprocess.Popen([*command, *FLOAT32, *arguments], stderr=subprocess.PIPE, text=True)


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def check_kills(folder: Path, num_kills: int, num_asked: int) -> None:
    """Kills at random times; then one run to the end, beside an undisturbed one."""
    source = written(folder / "in.jsonl", sums(num_asked, temperature=1.0))
    target, draw = folder / "out.jsonl", random.Random(5)
    for _ in range(num_kills):
        before = target.read_bytes() if target.exists() else b""
        with start(source, target, "--at-once", "4") as process:
            more = num_lines(target) + draw.randrange(4)
            wait_until(lambda more=more: num_lines(target) >= more or process.poll() is not None)
            time.sleep(draw.random() * 0.05)
            process.kill()
        whole = before[: before.rfind(b"\n") + 1]
        assert target.read_bytes().startswith(whole)
    before = target.read_bytes()
    assert batch("-i", source, "-o", target).exit_code == 0
    assert target.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    assert batch("-i", source, "-o", folder / "undisturbed.jsonl").exit_code == 0
    assert texts(target) == texts(folder / "undisturbed.jsonl")
    assert len(texts(target)) == num_asked


@pytest.mark.parametrize("depth", [600, 975, 100_000])
def test_a_line_that_is_nested_too_deeply_is_refused_at_once(tmp_path: Path, depth: int) -> None:
    """By its number, and not only where it is read from deep within other calls."""
    source = tmp_path / "in.jsonl"
    deep = "[" * depth + "]" * depth
    source.write_text('{"custom_id": "a", "url": "/v1/completions", "body": {"a": ' + deep + "}}")
    with source.open("rb") as file, pytest.raises(UsageError, match=r"Line 1 .* nested too deeply"):
        AskedLines(file, None)


def test_a_seed_is_the_lines_own_in_any_process() -> None:
    line = {"custom_id": "line-7", "body": {"prompt": "a", "stream": True, "model": "x"}}
    assert body_of(line) == {"prompt": "a", "seed": 3772660831457202119}
    assert body_of({**line, "body": {"seed": 5}}) == {"seed": 5}


def test_killed_runs_lose_and_repeat_nothing(tmp_path: Path) -> None:
    check_kills(tmp_path, num_kills=2, num_asked=60)


@pytest.mark.slow
def test_twenty_killed_runs_lose_and_repeat_nothing(tmp_path: Path) -> None:
    check_kills(tmp_path, num_kills=20, num_asked=200)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_lets_lines_under_way_end(number: signal.Signals, tmp_path: Path) -> None:
    lines = [line(f"n{i}", "Sort 9 8", max_tokens=60, ignore_eos=True) for i in range(200)]
    source, target = written(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    with start(source, target, "--at-once", "2") as process:
        wait_until(lambda: num_lines(target) > 0)
        process.send_signal(number)
        _, told = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + number
    done = answers(target)
    assert 0 < len(done) < 200
    assert f"{len(done)} of 200 lines are answered; run again to continue" in told
    assert not any(is_error(answer) for answer in done.values())


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_before_the_model_is_loaded(number: signal.Signals, tmp_path: Path) -> None:
    source, target = written(tmp_path / "in.jsonl", sums(2000)), tmp_path / "out.jsonl"
    with start(source, target, "--at-once", "1") as process:
        wait_until(target.exists)
        time.sleep(0.3)  # it has read what is there, and loads for longer
        process.send_signal(number)
        _, told = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + number, told
    assert re.search("of 2,000 lines are answered; run again to continue", told)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_is_ignored_stays_so(number: signal.Signals, tmp_path: Path) -> None:
    """As under nohup, and behind `&` in a script."""
    source, target = written(tmp_path / "in.jsonl", sums(40)), tmp_path / "out.jsonl"
    code = IGNORING.replace("SIGHUP", number.name)
    with start(source, target, "--at-once", "1", code=code) as process:
        wait_until(lambda: num_lines(target) > 0)
        process.send_signal(number)
        process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0 and len(answers(target)) == 40


class FullDisk(BytesIO):
    """Takes so many bytes, and then no more."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def write(self, data: Any) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        taken = super().write(bytes(data)[: self.room])
        self.room -= taken
        return taken


@given(room=st.integers(0, 400), sizes=st.lists(st.integers(1, 60), min_size=1, max_size=12))
def test_a_full_disk_leaves_whole_lines(room: int, sizes: list[int]) -> None:
    file = FullDisk(room)
    results = Results(Path("out"), file, {})  # type: ignore[arg-type]
    results.synced_s = float("inf")
    expected = b""
    for number, size in enumerate(sizes):
        text = b"x" * (size - 1) + b"\n"
        try:
            results.write(str(number), text, False)
        except StorageError as error:
            assert f"{number} answers are in it" in str(error)
            break
        expected += text
    assert file.getvalue() == expected


def test_one_run_at_a_time_writes_to_a_file(tmp_path: Path) -> None:
    with closing(Results.open(tmp_path / "out", None, {})):
        with pytest.raises(UsageError, match="Another run"):
            Results.open(tmp_path / "out", None, {})
    Results.open(tmp_path / "out", None, {}).close()


def test_a_file_that_another_run_has_just_sorted_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening and locking: what was written to the old file would be lost."""

    def replaced(*_: object) -> None:
        (tmp_path / "new").write_bytes(b"")
        (tmp_path / "new").replace(tmp_path / "out")

    monkeypatch.setattr("lowtide.serve.batch_files.fcntl.flock", replaced)
    with pytest.raises(UsageError, match="Another run"):
        Results.open(tmp_path / "out", None, {})


@examples(10)
@given(
    ids=st.lists(st.text(max_size=12), unique=True, min_size=1, max_size=8),
    num_cut=st.integers(0, 200),
)
def test_any_cut_of_an_output_is_gone_on_with(
    ids: list[str], num_cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Ids of any text, half characters aside, which JSON lines cannot tell from others."""
    folder = tmp_path_factory.mktemp("cut")
    lines = AskedLines(
        BytesIO(b"".join(json.dumps(line(each, "1")).encode() + b"\n" for each in ids))
    )
    known = {asked.custom_id: asked for asked in lines.lines}
    whole = [
        json.dumps({"id": "batch_req_1", "custom_id": each, "response": None, "error": {}}).encode()
        + b"\n"
        for each in ids
    ]
    kept = b"".join(whole)[:num_cut]
    (folder / "out").write_bytes(kept)
    with closing(Results.open(folder / "out", None, known)) as results:
        num_whole = kept.count(b"\n")
        assert list(results.done) == ids[:num_whole]
        for each, text in zip(ids[num_whole:], whole[num_whole:], strict=True):
            results.write(each, text, True)
        results.sort(list(reversed(lines.lines)))
    assert (folder / "out").read_bytes() == b"".join(reversed(whole))


# How lines run.


def run_lines(
    llm: AsyncLLM, asked: list[dict[str, Any]], at_once: int, answerer_class: Any = Answerer
) -> list[dict[str, Any]]:
    lines = AskedLines(BytesIO(b"".join(json.dumps(each).encode() + b"\n" for each in asked)))
    made: list[dict[str, Any]] = []

    class Sink:
        def write(self, custom_id: str, text: bytes, is_error: bool) -> None:
            made.append(json.loads(text))

    async def run() -> None:
        async with answering(llm, "model", at_once) as answerer:
            answerer.__class__ = answerer_class
            stop, told = asyncio.Event(), []
            progress = lambda *each: told.append(each)  # noqa: E731
            await answer_all(answerer, lines, lines.lines, Sink(), at_once, stop, progress)
            assert [done for _, done, _ in told] == list(range(1, len(asked) + 1))

    asyncio.run(run())
    return made


@pytest.mark.parametrize("max_tokens", [3, 30])
def test_lines_share_passes_as_a_list_of_prompts_does(llm: AsyncLLM, max_tokens: int) -> None:
    """Also where prompts take time from answers, which the answers of others would be owed."""
    fields = {"temperature": 0, "max_tokens": max_tokens}
    asked = [line(f"n{i}", f"Sort {i % 89 + 10} 21 {99 - i % 89}", **fields) for i in range(120)]
    prompts = [each["body"]["messages"] for each in asked]

    async def generated() -> int:
        before = (await llm.stats())["forwards"]
        await llm.generate(prompts, temperature=0, max_tokens=max_tokens)
        return int((await llm.stats())["forwards"] - before)

    num_passes = asyncio.run(generated())
    before = asyncio.run(llm.stats())["forwards"]
    made = run_lines(llm, asked, at_once=256)
    after = asyncio.run(llm.stats())["forwards"]
    assert len(made) == 120 and not any(map(is_error, made))
    assert after - before <= 1.1 * num_passes


def test_a_fault_of_a_route_is_the_error_of_its_line(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starlette raises again what it has answered with 500."""
    tries = 0

    def fault(*_: object, **__: object) -> None:
        nonlocal tries
        tries += 1
        raise ZeroDivisionError

    async def sleep(delay_s: float) -> None:
        pass

    monkeypatch.setattr(Service, "check_num_answers", fault)
    monkeypatch.setattr(answering_module.asyncio, "sleep", sleep)
    [made] = run_lines(llm, [line("a", "1 + 1")], at_once=1)
    assert tries == 3 and made["error"]["code"] == "500"


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_may_pass_is_tried_three_times(
    status: int, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: dict[str, int] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        name = json.loads((await receive())["body"])["messages"][0]["content"]
        tries[name] = tries.get(name, 0) + 1
        found, body = 200, b'{"choices": []}'
        if name == "never" or tries[name] < 3:
            found, body = status, b'{"error": {"message": "not now"}}'
        await send({"type": "http.response.start", "status": found, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async def sleep(delay_s: float) -> None:
        pass

    monkeypatch.setattr(answering_module, "build_app", lambda service, **_: app)
    monkeypatch.setattr(answering_module.asyncio, "sleep", sleep)
    made = run_lines(llm, [line("a", "third"), line("b", "never")], at_once=1)
    assert tries == {"third": 3, "never": 3}
    assert not is_error(made[0])
    assert made[1]["error"] == {"code": str(status), "message": "not now"}


def test_an_engine_that_has_ended_ends_the_run(tmp_path: Path) -> None:
    llm = AsyncLLM(DEMO, context=512)
    asyncio.run(llm.close())
    with pytest.raises(LowtideError, match="engine has ended"):
        run_lines(llm, [line("a", "1 + 1")], at_once=1)
