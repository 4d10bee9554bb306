"""The streaming writer: the format, and that a failure leaves nothing."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from lowtide.errors import InternalError, StorageError
from lowtide.lab.safetensors_writer import (
    Buffer,
    OpenFile,
    OutputFile,
    OutputTensor,
    SafetensorsWriter,
    header_bytes,
    open_for_writing,
    partial_path,
    write_text_file,
)

ENTRIES = [OutputTensor("b", "F32", (2, 3)), OutputTensor("a", "I8", (5,))]
DATA: list[np.ndarray[Any, Any]] = [np.arange(6, dtype=np.float32), np.arange(5, dtype=np.int8)]
NUM_BYTES = len(header_bytes(ENTRIES, {})) + 29


class FaultyFile:
    """Writes at most `chunk` bytes per call and fails at byte `fail_at`."""

    def __init__(self, file: OutputFile, fail_at: int, error: BaseException, chunk: int) -> None:
        self.file, self.left, self.error, self.chunk = file, fail_at, error, chunk

    def write(self, data: Buffer, /) -> int | None:
        if self.left == 0:
            raise self.error
        num_bytes = self.file.write(data[: min(self.left, self.chunk)])
        self.left -= num_bytes or 0
        return num_bytes

    def flush(self) -> None:
        if self.left == 0:
            raise self.error
        self.file.flush()

    def fileno(self) -> int:
        return self.file.fileno()

    def close(self) -> None:
        self.file.close()


def failing_at(num_bytes: int, error: BaseException, chunk: int = 1 << 20) -> OpenFile:
    return lambda path: FaultyFile(open_for_writing(path), num_bytes, error, chunk)


def full_disk() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def write(path: Path, open_file: OpenFile = open_for_writing) -> None:
    with SafetensorsWriter(path, ENTRIES, open_file=open_file) as writer:
        for array in DATA:
            writer.write(array.data)


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with SafetensorsWriter(path, ENTRIES, metadata={"format": "pt"}) as writer:
        assert not path.exists()
        for array in DATA:
            writer.write(array.data)
    assert path.stat().st_size == writer.num_bytes
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]
    with safe_open(path, "np") as file:
        assert file.metadata() == {"format": "pt"}
        assert np.array_equal(file.get_tensor("b"), DATA[0].reshape(2, 3))
        assert np.array_equal(file.get_tensor("a"), DATA[1])


@given(st.lists(st.sampled_from(["BF16", "F16", "F32", "U8"]), max_size=8), st.integers(0, 9))
def test_data_begins_on_a_multiple_of_eight(types: list[str], extent: int) -> None:
    entries = [OutputTensor(f"t{i}", dtype, (extent, i)) for i, dtype in enumerate(types)]
    header = header_bytes(entries, {})
    assert len(header) % 8 == 0
    assert int.from_bytes(header[:8], "little") == len(header) - 8


@pytest.mark.parametrize("fail_at", range(NUM_BYTES + 1))
def test_a_full_disk_at_every_byte(tmp_path: Path, fail_at: int) -> None:
    (tmp_path / "other").write_text("mine")
    with pytest.raises(StorageError, match=f"{fail_at} of {NUM_BYTES} bytes.*No space left"):
        write(tmp_path / "m", failing_at(fail_at, full_disk(), chunk=7))
    assert [p.name for p in tmp_path.iterdir()] == ["other"]


@pytest.mark.parametrize("fail_at", [0, 10, NUM_BYTES - 29, NUM_BYTES - 1, NUM_BYTES])
def test_an_interrupt_leaves_an_older_file_as_it_was(tmp_path: Path, fail_at: int) -> None:
    (tmp_path / "m").write_text("older")
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "m", failing_at(fail_at, KeyboardInterrupt()))
    assert [p.read_text() for p in tmp_path.iterdir()] == ["older"]


def test_short_writes_are_continued(tmp_path: Path) -> None:
    write(tmp_path / "short", failing_at(10**6, full_disk(), chunk=3))
    write(tmp_path / "whole")
    assert (tmp_path / "short").read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_file_that_takes_nothing(tmp_path: Path) -> None:
    class Full(FaultyFile):
        def write(self, data: Buffer, /) -> int | None:
            return 0

    with pytest.raises(StorageError, match="nothing was written"):
        write(tmp_path / "m", lambda path: Full(open_for_writing(path), 1, full_disk(), 1))


@pytest.mark.parametrize("data", [DATA[:1], [*DATA, DATA[1]], []])
def test_too_little_or_too_much_data(tmp_path: Path, data: list[np.ndarray[Any, Any]]) -> None:
    with pytest.raises(InternalError), SafetensorsWriter(tmp_path / "m", ENTRIES) as writer:
        for array in data:
            writer.write(array.data)
    assert list(tmp_path.iterdir()) == []


def test_two_tensors_of_one_name(tmp_path: Path) -> None:
    with pytest.raises(InternalError, match="two tensors"):
        SafetensorsWriter(tmp_path / "m", [ENTRIES[0], ENTRIES[0]])


def test_a_disk_with_too_little_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(free=100)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(StorageError, match=f"{NUM_BYTES} bytes of disk and 100 are free"):
        write(tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written anew, so it is gone before room is asked for."""
    partial = partial_path(tmp_path / "m")
    partial.write_bytes(b"left")

    def usage(_: Path) -> SimpleNamespace:
        return SimpleNamespace(free=NUM_BYTES - 4 * partial.exists())

    monkeypatch.setattr("shutil.disk_usage", usage)
    write(tmp_path / "m")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_what_is_in_the_way_of_a_file_is_told(tmp_path: Path) -> None:
    partial_path(tmp_path / "m").mkdir()
    with pytest.raises(StorageError, match="m failed after 0"):
        write(tmp_path / "m")
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="m failed after 0"):
        write(tmp_path / "file" / "m")


def test_a_name_that_is_too_long_is_told(tmp_path: Path) -> None:
    writer = SafetensorsWriter(tmp_path / ("a" * 300) / "m", ENTRIES)
    with pytest.raises(StorageError, match="m cannot be written: File name too long"):
        _ = writer.is_whole


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        write(tmp_path / "gone" / "m")


@pytest.mark.parametrize("error", [full_disk(), KeyboardInterrupt()])
def test_text_files_are_whole_or_not_there(tmp_path: Path, error: BaseException) -> None:
    expected = StorageError if isinstance(error, OSError) else KeyboardInterrupt
    for fail_at in range(6):
        with pytest.raises(expected):
            write_text_file(tmp_path / "t", "hello", open_file=failing_at(fail_at, error, chunk=2))
        assert list(tmp_path.iterdir()) == []
    write_text_file(tmp_path / "t", "hello")
    assert (tmp_path / "t").read_text() == "hello"


def test_a_write_does_not_go_through_all_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a shard with thousands of them that took longer than all the rest."""
    counted, plain = [0], OutputTensor.num_bytes.fget
    assert plain is not None

    def num_bytes(tensor: OutputTensor) -> int:
        counted[0] += 1
        return int(plain(tensor))

    monkeypatch.setattr(OutputTensor, "num_bytes", property(num_bytes))
    tensors = [OutputTensor(f"t{i}", "U8", (1,)) for i in range(50)]
    with SafetensorsWriter(tmp_path / "many", tensors) as writer:
        for _ in tensors:
            writer.write(b"0")
    assert counted[0] <= 4 * len(tensors)
