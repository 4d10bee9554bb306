"""The streaming writer: the format, and that a failure leaves nothing."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from lowtide.errors import InternalError, StorageError
from lowtide.model_writing.safetensors_writer import OutputTensor, SafetensorsWriter, header_bytes

ENTRIES = [OutputTensor("b", "F32", (2, 3)), OutputTensor("a", "I8", (5,))]
DATA: list[np.ndarray[Any, Any]] = [np.arange(6, dtype=np.float32), np.arange(5, dtype=np.int8)]
NUM_BYTES = len(header_bytes(ENTRIES, {})) + 29


def fail_at(
    monkeypatch: pytest.MonkeyPatch, num_bytes: int, error: BaseException, chunk: int = 1 << 20
) -> None:
    """The disk takes at most `chunk` bytes a call, and after `num_bytes` of them fails."""
    left, os_write, os_fsync = num_bytes, os.write, os.fsync

    def write(descriptor: int, data: memoryview) -> int:
        nonlocal left
        if not left:
            raise error
        num_written = os_write(descriptor, data[: min(left, chunk)])
        left -= num_written
        return num_written

    def fsync(descriptor: int) -> None:
        if not left:
            raise error
        os_fsync(descriptor)

    monkeypatch.setattr("os.write", write)
    monkeypatch.setattr("os.fsync", fsync)


def full_disk() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def write(path: Path) -> None:
    with SafetensorsWriter(path, ENTRIES) as writer:
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


@pytest.mark.parametrize("num_bytes", range(NUM_BYTES + 1))
def test_a_full_disk_at_every_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    (tmp_path / "other").write_text("mine")
    fail_at(monkeypatch, num_bytes, full_disk(), chunk=7)
    with pytest.raises(StorageError, match=f"{num_bytes} of {NUM_BYTES} bytes.*No space left"):
        write(tmp_path / "m")
    assert [p.name for p in tmp_path.iterdir()] == ["other"]


@pytest.mark.parametrize("num_bytes", [0, 10, NUM_BYTES - 29, NUM_BYTES - 1, NUM_BYTES])
def test_an_interrupt_leaves_an_older_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    (tmp_path / "m").write_text("older")
    fail_at(monkeypatch, num_bytes, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "m")
    assert [p.read_text() for p in tmp_path.iterdir()] == ["older"]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "whole")
    fail_at(monkeypatch, 10**6, full_disk(), chunk=3)
    write(tmp_path / "short")
    assert (tmp_path / "short").read_bytes() == (tmp_path / "whole").read_bytes()


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
    partial = tmp_path / "m.partial"
    partial.write_bytes(b"left")

    def usage(_: Path) -> SimpleNamespace:
        return SimpleNamespace(free=NUM_BYTES - 4 * partial.exists())

    monkeypatch.setattr("shutil.disk_usage", usage)
    write(tmp_path / "m")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_what_is_in_the_way_of_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "m.partial").mkdir()
    with pytest.raises(StorageError, match="m failed after 0"):
        write(tmp_path / "m")
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="m failed after 0"):
        write(tmp_path / "file" / "m")


def test_a_name_that_is_too_long_is_told(tmp_path: Path) -> None:
    writer = SafetensorsWriter(tmp_path / ("a" * 300) / "m", ENTRIES)
    with pytest.raises(StorageError, match="m cannot be written: File name too long"):
        _ = writer.is_whole


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
