"""Fetching from the hub: told before, shown meanwhile, resumed after a break, checked after it."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hub_stand_in
import huggingface_hub
import pytest
from hub_repos import GOLDEN, whole_repo
from hub_stand_in import COMMIT, Content, Fault, StandIn, be_patient, wait_for
from rich.console import Console
from typer.testing import CliRunner

from lowtide.cli import screen
from lowtide.cli.app import app
from lowtide.errors import HubError
from lowtide.families import read_config, read_config_in
from lowtide.model_folder import hub, hub_download, hub_requests
from lowtide.model_folder.hub_download import fetch
from lowtide.model_folder.hub_model import HubModel
from lowtide.model_folder.hub_reference import HubReference
from lowtide.model_writing.synth import synth

SHARD = "model.safetensors"
SIZE = (GOLDEN / SHARD).stat().st_size


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def partial(cache: Path, stand_in: StandIn) -> Path:
    blobs = cache / "models--org--name" / "blobs"
    return blobs / f"{stand_in.digest('org/name', SHARD)}.lowtide"


@pytest.fixture
def cache(tmp_path: Path, stand_in: StandIn) -> Path:
    """Where the one model of the stand-in is fetched to."""
    stand_in.add("org/name", whole_repo())
    return tmp_path / "cache"


def test_a_model_is_fetched_whole(stand_in: StandIn, cache: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    folder = hub.resolve_model("org/name", progress=lambda *step: steps.append(step))
    assert folder == cache / "models--org--name" / "snapshots" / COMMIT
    fetched = {path.name: path.read_bytes() for path in folder.iterdir()}
    names = ("config.json", "generate.json", SHARD)
    assert fetched == {name: (GOLDEN / name).read_bytes() for name in names}
    assert (cache / "models--org--name" / "refs" / "main").read_text() == COMMIT
    assert {what for what, _, _ in steps} == {"fetching"}
    done = [done_bytes for _, done_bytes, _ in steps]
    assert done == sorted(done) and done[-1] >= SIZE and steps[-1][2] >= SIZE
    assert hub.resolve_model("org/name", offline=True) == folder
    assert not list(cache.rglob("*.lowtide"))


def test_the_template_for_tools_is_fetched_from_its_folder(stand_in: StandIn) -> None:
    name = "additional_chat_templates/tool_use.jinja"
    others = {"additional_chat_templates/rag.jinja": b"r", "other/tool_use.jinja": b"o"}
    stand_in.add("org/tools", {**whole_repo(), name: b"t", **others})
    folder = hub.resolve_model("org/tools")
    assert (folder / name).read_bytes() == b"t"
    assert not any((folder / other).exists() for other in others)


def test_a_mark_of_utf_8_is_no_part_of_a_configuration(stand_in: StandIn) -> None:
    files = whole_repo()
    config = files["config.json"]
    assert isinstance(config, bytes)
    stand_in.add("org/marked", {**files, "config.json": b"\xef\xbb\xbf" + config})
    asked = HubModel.ask(HubReference("org/marked")).model_config({})
    assert asked == read_config(json.loads(config))
    assert asked == read_config_in(hub.resolve_model("org/marked"))


def test_what_it_weighs_is_said_before(
    stand_in: StandIn, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.pull("org/name")
    [record] = caplog.records
    said = record.getMessage()
    assert said.startswith(f"org/name@main: fetching 2.9 MiB in 3 files to {cache}, where ")
    assert said.endswith(" are free.")
    caplog.clear()
    hub.pull("org/name")
    assert not caplog.records


def test_what_does_not_fit_is_not_begun(
    stand_in: StandIn, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(9 << 20, 8 << 20, 1 << 20))
    for verb in (["pull"], ["generate", "--prompt-ids", "1"], ["chat"], ["verify"]):
        result = run(*verb, "org/name")
        assert result.exit_code == 1
        message = "org/name@main does not fit: 2.9 MiB in 3 files are to be fetched"
        assert message in result.stderr and "1.0 MiB are free. Make room, or set HF_HOME" in (
            result.stderr
        )
    assert not cache.exists() and stand_in.sent_bytes < SIZE // 8  # headers alone


def test_a_budget_that_is_too_small_is_refused_before(stand_in: StandIn, cache: Path) -> None:
    result = run("generate", "org/name", "--prompt-ids", "1", "--host-memory", "1MiB")
    assert result.exit_code == 1 and "1.0 MiB" in result.stderr
    assert not cache.exists()


def test_generate_fetches_and_answers(stand_in: StandIn, cache: Path) -> None:
    arguments = ["--prompt-ids", "1 2 3", "--max-tokens", "4", "--context", "64", "--json"]
    by_hub = run("generate", "org/name", *arguments)
    assert by_hub.exit_code == 0, by_hub.output
    assert "org/name@main: fetching 2.9 MiB" in by_hub.stderr
    local = run("generate", str(GOLDEN), *arguments)
    assert json.loads(by_hub.stdout)["token_ids"] == json.loads(local.stdout)["token_ids"]


@pytest.mark.parametrize(
    "fault",
    [
        Fault(SHARD, 2, break_after=1_000_000),
        Fault(SHARD, 2, 503),
        Fault(SHARD, 2, 429, {"Retry-After": "0"}),
        Fault(SHARD, 2, pause_s=5),
        Fault(SHARD, 2, ignores_range=True, break_after=1_000_000),
    ],
)
def test_a_transfer_that_breaks_goes_on(
    stand_in: StandIn, cache: Path, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault.pause_s:
        be_patient(2.0, monkeypatch)
    stand_in.faults.append(fault)
    assert (hub.pull("org/name") / SHARD).read_bytes() == (GOLDEN / SHARD).read_bytes()
    assert fault.times == 0


def test_a_fetch_that_was_broken_off_is_resumed(
    stand_in: StandIn, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in.faults += [Fault(SHARD, 1, break_after=2 << 20), Fault(SHARD, 9, 500)]
    with pytest.raises(HubError, match="500.*what was fetched so far is kept"):
        hub.pull("org/name")
    assert partial(cache, stand_in).stat().st_size == 2 << 20
    stand_in.faults.clear()
    stand_in.requests.clear()
    caplog.clear()
    folder = hub.pull("org/name")
    assert (folder / SHARD).read_bytes() == (GOLDEN / SHARD).read_bytes()
    ranges = [r.range for r in stand_in.asked(SHARD) if r.is_elsewhere and r.method == "GET"]
    assert ranges == [f"bytes={2 << 20}-{SIZE - 1}"]
    assert "(2.0 MiB more are here already)" in caplog.records[0].getMessage()


def test_other_bytes_than_published_are_refused(stand_in: StandIn, cache: Path) -> None:
    stand_in.faults.append(Fault(SHARD, 1, garbles=True))
    with pytest.raises(HubError, match=r"other bytes than the hub says \(SHA-256 .*was removed"):
        hub.pull("org/name")
    assert not list(cache.rglob("*.lowtide"))
    assert (hub.pull("org/name") / SHARD).read_bytes() == (GOLDEN / SHARD).read_bytes()


def test_what_lies_there_is_checked_too(stand_in: StandIn, cache: Path) -> None:
    found = partial(cache, stand_in)
    found.parent.mkdir(parents=True)
    found.write_bytes(b"x" * SIZE)
    with pytest.raises(HubError, match="was removed"):
        hub.pull("org/name")
    found.write_bytes(b"x" * (SIZE + 5))
    with pytest.raises(HubError, match="was removed"):
        hub.pull("org/name")
    found.write_bytes((GOLDEN / SHARD).read_bytes())
    stand_in.requests.clear()
    hub.pull("org/name")
    assert not [r for r in stand_in.asked(SHARD) if r.is_elsewhere and r.method == "GET"]


def test_two_programs_do_not_fetch_one_file(stand_in: StandIn, cache: Path) -> None:
    import fcntl

    found = partial(cache, stand_in)
    found.parent.mkdir(parents=True)
    with open(found, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(HubError, match="another program is fetching model.safetensors; wait"):
            hub.pull("org/name")
    hub.pull("org/name")


def test_a_failure_ends_the_other_files(stand_in: StandIn, tmp_path: Path) -> None:
    made = synth("llada2", "tiny", tmp_path / "made")
    shards = sorted(path.name for path in made.glob("*.safetensors"))
    assert len(shards) > 2
    stand_in.add("org/more", whole_repo(made))
    stand_in.faults += [Fault(shards[0], 9, 403), Fault(shards[1], 99, pause_s=1.0, status=503)]
    with pytest.raises(HubError, match=r"\(403\)"):
        hub.pull("org/more")
    stand_in.faults.clear()
    assert {path.name for path in hub.pull("org/more").iterdir()} == {
        path.name for path in made.iterdir()
    }


def test_only_what_belongs_to_the_model_is_fetched(stand_in: StandIn, cache: Path) -> None:
    files = {**whole_repo(), "consolidated.safetensors": Content(b"", 30 << 30)}
    stand_in.add("org/name", files)
    folder = hub.pull("org/name")
    assert {path.name for path in folder.iterdir()} == {"config.json", "generate.json", SHARD}


def saying(**values: object) -> Callable[[dict[str, Any]], object]:
    """A listing that says this of the commit."""
    return lambda listing: listing.update(values)


def saying_of(name: str, **values: object) -> Callable[[dict[str, Any]], object]:
    """A listing that says this of a file."""

    def change(listing: dict[str, Any]) -> None:
        [file] = [file for file in listing["siblings"] if file["rfilename"] == name]
        file.update(values)

    return change


def lfs(sha256: object) -> dict[str, object]:
    return {"sha256": sha256, "oid": sha256, "size": SIZE, "pointerSize": 134}


PATHS = ("../../../../evil", "..%2f..%2fevil", "{folder}/evil", "x" * 10000, "a" * 39, None, 5)
"""That a hub may name where hexadecimal digits belong."""


@pytest.mark.parametrize("path", PATHS)
def test_a_hub_cannot_name_paths(
    stand_in: StandIn, cache: Path, path: object, tmp_path: Path
) -> None:
    """Where commits and digests become names of files."""
    named = path.format(folder=tmp_path) if isinstance(path, str) else path
    before = sorted(tmp_path.iterdir())
    for change, said in (
        (saying(sha=named), "is not a commit"),
        (saying_of(SHARD, lfs=lfs(named)), "not a SHA-256 of 'model.safetensors'"),
    ):
        stand_in.change_listing = change
        with pytest.raises(HubError, match=said) as caught:
            hub.pull("org/name")
        assert len(str(caught.value)) < 400 and sorted(tmp_path.iterdir()) == before


def with_name(name: object) -> Callable[[dict[str, Any]], object]:
    """A listing that names one file more."""
    return lambda listing: listing["siblings"].append({"rfilename": name, "size": 5})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (with_name(None), "lists a file None"),
        (with_name(7), "lists a file 7"),
        (with_name("x" * 5000 + ".json"), "lists a file 'xxx"),
        (with_name("\x1b[31mevil.json"), r"lists a file '\\x1b\[31mevil.json'"),
        (with_name("two\nlines.safetensors"), r"lists a file 'two\\nlines.safetensors'"),
        (with_name("half\ud800.json"), r"lists a file 'half\\ud800.json'"),
        (saying_of("config.json", size="big"), "'big' bytes of 'config.json'"),
        (saying_of(SHARD, size=-1), "-1 bytes of 'model.safetensors'"),
        (saying_of(SHARD, size=True), "True bytes of 'model.safetensors'"),
        (saying_of(SHARD, size=1.5), "1.5 bytes of 'model.safetensors'"),
        (saying_of(SHARD, lfs=5), "says 5, which is not a SHA-256 of 'model.safetensors'"),
        (saying(siblings=5), "lists 5, which are not files"),
        (saying(siblings=None), "lists None, which are not files"),
        (saying(siblings=["config.json"]), "lists a list of 1 values, which are not files"),
        (
            lambda listing: listing.update(more="x" * (65 << 20)),
            "answer has more than 67108864 bytes.*hf download.* give their folder",
        ),
    ],
)
def test_listings_that_make_no_sense_are_refused_in_words(
    stand_in: StandIn, cache: Path, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    stand_in.change_listing = change
    with pytest.raises(HubError, match=said) as caught:
        hub.pull("org/name")
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500
    assert not cache.exists()


def test_files_that_are_not_fetched_may_be_called_as_they_like(
    stand_in: StandIn, cache: Path
) -> None:
    files = {**whole_repo(), "a\nb.md": b"", "x" * 300 + ".md": b"", "sub/\x1b.json": b""}
    stand_in.add("org/name", files)
    assert (hub.pull("org/name") / SHARD).exists()


@pytest.mark.parametrize("named", ["../../evil.safetensors", "/etc/passwd", "gone.safetensors", 5])
def test_an_index_that_names_other_files_is_refused_before_weights_are_fetched(
    stand_in: StandIn, cache: Path, named: object
) -> None:
    files = whole_repo()
    shard = "model-00001-of-00001.safetensors"
    files[shard] = files.pop(SHARD)
    index = {"weight_map": {"lm_head.weight": shard, "x": named}}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    stand_in.add("org/name", files)
    with pytest.raises(HubError, match=f"model.safetensors.index.json names '{named}', which is"):
        hub.pull("org/name")
    assert not [request for request in stand_in.asked(shard) if request.is_elsewhere]


def test_an_index_beside_a_single_file_is_not_looked_at(stand_in: StandIn, cache: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    files = {**whole_repo(), "model.safetensors.index.json": json.dumps(index).encode()}
    stand_in.add("org/name", files)
    assert (hub.pull("org/name") / SHARD).exists()


@pytest.mark.parametrize("path", ["../../../../evil", "{folder}/evil"])
def test_names_that_answers_give_files_are_not_used(
    stand_in: StandIn, cache: Path, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The headers with a file's ETag, which huggingface-hub makes paths of."""
    etag = path.format(folder=tmp_path)
    monkeypatch.setattr(hub_stand_in, "blob_id", lambda name: f"{etag}-{name}")
    folder = hub.pull("org/name")
    assert list(tmp_path.iterdir()) == [cache]
    for name in ("config.json", "generate.json", SHARD):
        assert (folder / name).read_bytes() == (GOLDEN / name).read_bytes()
        assert (folder / name).resolve().parent == folder.parents[1] / "blobs"


def test_files_lie_as_huggingface_hub_has_them(stand_in: StandIn, cache: Path) -> None:
    """Small ones by git's name of their bytes."""
    folder = hub.pull("org/name")
    config = (GOLDEN / "config.json").read_bytes()
    digest = hashlib.sha1(b"blob %d\0" % len(config) + config).hexdigest()
    assert os.readlink(folder / "config.json") == f"../../blobs/{digest}"
    assert os.readlink(folder / SHARD) == f"../../blobs/{stand_in.digest('org/name', SHARD)}"
    stand_in.close()
    for name in ("config.json", SHARD):
        found = huggingface_hub.try_to_load_from_cache("org/name", name, cache, "main")
        assert found == str(folder / name)


def test_a_disk_without_links_holds_the_files_themselves(
    stand_in: StandIn, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "symlink", refuse)
    folder = hub.pull("org/name")
    assert (folder / SHARD).read_bytes() == (GOLDEN / SHARD).read_bytes()
    assert not (folder / SHARD).is_symlink() and not list((folder.parents[1] / "blobs").iterdir())
    assert hub.resolve_model("org/name", offline=True) == folder


def test_a_cache_that_cannot_be_written(stand_in: StandIn, cache: Path) -> None:
    cache.write_text("a file")
    with pytest.raises(HubError, match="could not be fetched: .*: Not a directory. .*set HF_HOME"):
        fetch(HubModel.ask(HubReference("org/name")))


PULL = [sys.executable, "-m", "lowtide", "pull", f"org/name@{COMMIT}"]


def environment(stand_in: StandIn, tmp_path: Path) -> dict[str, str]:
    """Of a program that asks the stand-in, with a home of its own."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return env | {"HF_ENDPOINT": stand_in.address, "HF_HOME": str(tmp_path / "home")}


def test_the_environment_is_honoured(stand_in: StandIn, cache: Path, tmp_path: Path) -> None:
    stand_in.needed_token = "secret"
    env = environment(stand_in, tmp_path)
    refused = subprocess.run(PULL, env=env, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1 and "HF_TOKEN" in refused.stderr
    env["HF_TOKEN"] = "secret"
    result = subprocess.run(PULL, env=env, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert str(tmp_path / "home" / "hub") in result.stdout


class NearlyFull(io.FileIO):
    """A file on a disk that has room for a MiB of it."""

    def write(self, data: Any, /) -> int:
        if self.tell() >= 1 << 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data) or 0


def test_a_disk_that_fills_up_is_told_and_what_came_is_kept(
    stand_in: StandIn, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though there was room when it was asked: another program took it."""
    with monkeypatch.context() as patch:
        patch.setattr(hub_download, "open", lambda path, _: NearlyFull(path, "a+"), raising=False)
        with pytest.raises(HubError, match=r"disk is full \(No space left.*HF_HOME.*is kept"):
            hub.pull("org/name")
    assert partial(cache, stand_in).stat().st_size == 1 << 20
    assert (hub.pull("org/name") / SHARD).read_bytes() == (GOLDEN / SHARD).read_bytes()


@pytest.mark.parametrize(("kind", "is_drawn"), [("xterm", True), ("dumb", False)])
def test_a_bar_shows_how_far_it_is_where_one_can_be_drawn(
    stand_in: StandIn, cache: Path, kind: str, is_drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", kind)
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80)
    monkeypatch.setattr(screen, "stderr_console", lambda: console)
    assert run("pull", "org/name").exit_code == 0
    shown = file.getvalue()
    assert ("fetching" in shown and "%" in shown) == is_drawn == bool(shown)


def test_ctrl_c_keeps_what_came(stand_in: StandIn, cache: Path, tmp_path: Path) -> None:
    """Heard while the hub has the program wait; the next one goes on where it was."""
    stand_in.faults.append(Fault(SHARD, 1, break_after=2 << 20))
    stand_in.faults.append(Fault(SHARD, 99, 503, {"Retry-After": "50"}))
    env = environment(stand_in, tmp_path)
    found = partial(tmp_path / "home" / "hub", stand_in)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(PULL, env=env, text=True, **pipes) as process:
        try:
            wait_for(lambda: found.exists() and found.stat().st_size == 2 << 20, timeout_s=60)
        finally:
            process.send_signal(signal.SIGINT)
        told, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and not told and "Traceback" not in errors, errors
    assert found.stat().st_size == 2 << 20
    stand_in.faults.clear()
    stand_in.requests.clear()
    result = subprocess.run(PULL, env=env, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    ranges = [r.range for r in stand_in.asked(SHARD) if r.is_elsewhere and r.method == "GET"]
    assert ranges == [f"bytes={2 << 20}-{SIZE - 1}"]


def test_elsewhere_a_fault_has_time_to_pass() -> None:
    assert sum(hub_requests.WAITS_S) > 10
