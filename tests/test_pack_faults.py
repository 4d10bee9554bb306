"""Faults while a model is packed: an incomplete copy never counts as a model."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_regular_file import a_device, a_folder, a_link_to_itself, a_pipe, a_socket, at_once

from lowtide.errors import LowtideError, StorageError, UsageError
from lowtide.llm import plan_model
from lowtide.model_writing.pack import pack
from lowtide.model_writing.pack_folder import reserved
from lowtide.model_writing.synth import synth
from lowtide.reading import file_reader


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth("qwen2_moe", "tiny", tmp_path_factory.mktemp("faults") / "model", seed=8)


@pytest.fixture(scope="module")
def packed(original: Path) -> dict[str, bytes]:
    return contents(pack(original, original.parent / "q4", format="q4"))


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    """One that may be changed."""
    return Path(shutil.copytree(original, tmp_path / "model"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def check_is_no_model(folder: Path) -> None:
    with pytest.raises(LowtideError):
        plan_model(folder, context=64)


def after_pieces(monkeypatch: pytest.MonkeyPatch, num: int, happens: Callable[[], None]) -> None:
    """Something that happens once, when so many pieces were rounded."""
    convert, calls = file_reader.convert, 0

    def counted(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == num:
            happens()
        convert(*arguments)

    monkeypatch.setattr(file_reader, "convert", counted)


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Limit the size of this process's files, so that writes fail as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_disk_that_fills_up_midway_leaves_whole_shards_and_goes_on(
    original: Path, packed: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    sizes = sorted(len(data) for name, data in packed.items() if name.endswith(".safetensors"))
    with files_of_at_most(sizes[-1] - 100), pytest.raises(StorageError, match="failed after"):
        pack(original, out, format="q4")
    for path in out.glob("*.safetensors"):
        assert path.read_bytes() == packed[path.name]
    assert not list(out.glob("*.partial"))
    check_is_no_model(out)
    assert contents(pack(original, out, format="q4")) == packed


def test_a_disk_with_too_little_room_for_all_is_told_before_anything_is_written(
    original: Path, packed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards that are whole, and what a killed run left of one, need no room once more."""
    sizes = {name: len(data) for name, data in packed.items()}
    first, second, *others = sorted(name for name in sizes if name.endswith(".safetensors"))
    texts = sizes["tokenizer.json"] + sizes["tokenizer_config.json"]
    needed = sum(sizes[name] for name in (first, second, *others)) + texts
    free = needed - 1
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    out = tmp_path / "out"
    with pytest.raises(StorageError, match=f"needs {needed} bytes of disk and {free} are free"):
        pack(original, out, format="q4")
    assert not out.exists()
    free = needed
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr("lowtide.model_writing.pack.whole_file", interrupt)
        pack(original, out, format="q4")
    (out / first).unlink()
    (out / second).rename(out / f"{second}.partial")
    free = sizes[first] + texts - 1
    with pytest.raises(StorageError, match=f"needs {free + 1} bytes of disk and {free} are free"):
        pack(original, out, format="q4")
    assert len(list(out.glob("*.safetensors"))) == len(others)
    disk = bytes_in(out) + free + 1
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=disk - bytes_in(out)))
    assert contents(pack(original, out, format="q4")) == packed


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_a_full_disk_does_not_hide_whose_folder_it_is(
    original: Path, packed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(UsageError, match="is packed already, whole, with experts in q4"):
        pack(original, original.parent / "q4", format="q8")
    assert contents(original.parent / "q4") == packed
    with pytest.raises(StorageError, match="needs .* bytes of disk and 0 are free"):
        pack(original, tmp_path, format="q8")
    assert not list(tmp_path.iterdir())


def to_a_file(path: Path) -> None:
    path.with_name("precious").write_bytes(b"precious")
    path.symlink_to("precious")


def to_nothing(path: Path) -> None:
    path.symlink_to("nothing")


def of_others(text: bytes) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.write_bytes(text)

    return make


@pytest.mark.parametrize(
    "make",
    [
        *(a_pipe, a_device, a_folder, a_socket, a_link_to_itself, to_a_file, to_nothing),
        *(of_others(b"precious"), of_others(b'{"formats": {}}'), of_others(b"[" * 9999)),
    ],
)
def test_notes_that_are_not_of_a_packing_are_let_be(
    original: Path, make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    make(out / "packing.json")
    before = [(path.name, path.lstat()[:-3]) for path in sorted(out.iterdir())]
    with at_once(), pytest.raises(UsageError, match="holds packing.json, which is not of this"):
        pack(original, out, format="q4")
    assert [(path.name, path.lstat()[:-3]) for path in sorted(out.iterdir())] == before
    if make is to_a_file:
        assert (out / "precious").read_bytes() == b"precious"


def test_notes_stay_when_a_packing_goes_on(
    original: Path, packed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk could not take them once more, and without them it would be another's folder."""
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr("lowtide.model_writing.pack.whole_file", interrupt)
        pack(original, tmp_path, format="q4")
    with pytest.raises(UsageError, match="not of this packing"):
        pack(original, tmp_path, format="q8")
    with files_of_at_most(0), pytest.raises(StorageError):
        pack(original, tmp_path, format="q4")
    assert contents(pack(original, tmp_path, format="q4")) == packed


def test_notes_that_cannot_be_written_leave_nothing(tmp_path: Path) -> None:
    for notes in ({}, {"source": "short"}, {"source": "long" * 10_000}):
        with (
            files_of_at_most(0),
            pytest.raises(StorageError, match="cannot be written: File too large"),
            reserved(tmp_path, notes, 0),
        ):
            raise AssertionError("it was reserved")
        assert not list(tmp_path.iterdir())


def test_a_folder_with_too_long_a_name_is_told(original: Path, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be written: File name too long"):
        pack(original, tmp_path / ("a" * 300), format="q4")


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_process_that_is_killed_leaves_no_model_and_the_next_goes_on(
    original: Path, packed: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    program = """
import os, signal, sys
from pathlib import Path
from lowtide.model_writing.pack import pack
from lowtide.reading import file_reader
convert, calls = file_reader.convert, 0
def killed(*arguments):
    global calls
    calls += 1
    if calls > 40:
        os.kill(os.getpid(), signal.SIGKILL)
    convert(*arguments)
file_reader.convert = killed
pack(Path(sys.argv[1]), Path(sys.argv[2]), format="q4")
"""
    done = subprocess.run([sys.executable, "-c", program, original, out], timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert list(out.glob("*.partial")) and (out / "packing.json").exists()
    check_is_no_model(out)
    assert contents(pack(original, out, format="q4")) == packed


def test_a_second_run_meanwhile_is_refused_and_the_first_is_whole(
    original: Path, packed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, refusals = tmp_path / "out", []

    def again() -> None:
        with pytest.raises(UsageError, match="Another process packs") as refusal:
            pack(original, out, format="q4")
        refusals.append(refusal)

    after_pieces(monkeypatch, 5, again)
    assert contents(pack(original, out, format="q4")) == packed and refusals


@pytest.mark.parametrize("change", ["touched", "longer", "gone"])
def test_a_source_that_changes_meanwhile_makes_no_model(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    shard = sorted(model.glob("*.safetensors"))[0]

    def changed() -> None:
        if change == "touched":
            os.utime(shard, ns=(1, 1))
        elif change == "gone":
            shard.unlink()
        else:
            with shard.open("ab") as file:
                file.write(b"\0")

    after_pieces(monkeypatch, 5, changed)
    out = tmp_path / "out"
    said = "cannot be read: No such file" if change == "gone" else "changed while it was packed"
    with pytest.raises(StorageError, match=said):
        pack(model, out, format="q4")
    check_is_no_model(out)


def test_a_source_that_changed_between_two_runs_is_another(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        after_pieces(patched, 40, interrupted)
        with pytest.raises(KeyboardInterrupt):
            pack(model, tmp_path / "out", format="q4")
    (tmp_path / "out" / "model-00001-of-00002.safetensors").touch()  # as if one was whole
    os.utime(sorted(model.glob("*.safetensors"))[-1], ns=(1, 1))
    with pytest.raises(UsageError, match="not of this packing"):
        pack(model, tmp_path / "out", format="q4")
    check_is_no_model(tmp_path / "out")
