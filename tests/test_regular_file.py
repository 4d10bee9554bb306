"""Files that are replaced by others, and things that are no files."""

from __future__ import annotations

import gc
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from lowtide.errors import CheckpointError, HubError, StorageError
from lowtide.files.array_file import load_arrays
from lowtide.files.json_file import read_object
from lowtide.files.regular_file import RegularFile, open_regular, read_regular
from lowtide.model_folder.hub_cache import missing_files


@contextmanager
def at_once(limit_s: float = 60) -> Iterator[None]:
    """Fail if the body waits for anything."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"it waited for {limit_s} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def open_descriptors() -> int:
    gc.collect()  # whatever other tests have left open ends now, and not in between
    return len(os.listdir("/proc/self/fd"))


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_folder(path: Path) -> None:
    path.mkdir()


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


def a_link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


THINGS = (a_pipe, a_device, a_folder, a_socket, a_link_to_itself)


@pytest.mark.parametrize("make", THINGS)
def test_what_is_no_file_is_refused_at_once(make, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "thing.json"
    make(path)
    before = open_descriptors()
    with at_once():
        for read in (
            lambda: read_regular(path, 100, CheckpointError),
            lambda: read_object(path, 100),
            lambda: RegularFile.at(path, CheckpointError),
        ):
            with pytest.raises(CheckpointError, match=r"thing\.json (is not a regular|cannot be)"):
                read()
        with pytest.raises(StorageError, match=r"thing\.json (is not a regular|cannot be)"):
            load_arrays(path, {}, 100, "trace", "lowtide generate --trace", {})
        make(index := tmp_path / "model.safetensors.index.json")
        if index.exists():
            with pytest.raises(HubError, match=r"index\.json (is not a regular|cannot be)"):
                missing_files(tmp_path)
        else:  # as a link into the hub's cache whose target is gone
            assert "*.safetensors" in missing_files(tmp_path)
    assert open_descriptors() == before


def test_a_file_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    assert read_regular(path, 100) == b"x" * 100
    with pytest.raises(StorageError, match="has 100 bytes; at most 99 are read"):
        read_regular(path, 99)
    # Files of the system have no size before they are read.
    with pytest.raises(StorageError, match="has 6 bytes; at most 5 are read"):
        read_regular(Path("/proc/self/status"), 5)


def test_a_link_is_the_file_that_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"abc")
    link = tmp_path / "link"
    link.symlink_to("blob")
    file = RegularFile.at(link)
    assert (file.path, file.num_bytes) == (link, 3)
    (tmp_path / "elsewhere").symlink_to(tmp_path / "blob")
    os.replace(tmp_path / "elsewhere", link)  # another link to the same file
    os.close(file.open())
    (tmp_path / "other").write_bytes(b"abc")
    link.unlink()
    link.symlink_to("other")
    with pytest.raises(StorageError, match=r"link was changed or replaced .*open the model again"):
        file.open()


def rewritten(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.replace(other, path)


def grown(path: Path) -> None:
    status = path.stat()
    with path.open("ab") as file:
        file.write(b"x")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def set_back(path: Path) -> None:
    """As programs do that keep the times of what they copy."""
    status = path.stat()
    path.write_bytes(bytes(status.st_size))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("change", [rewritten, replaced, grown, set_back])
def test_a_file_that_was_written_to_is_seen(change, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"weights")
    os.utime(path, ns=(0, 0))
    file = RegularFile.at(path)
    descriptor = file.open()
    file.check(descriptor)
    time.sleep(0.05)  # a clock's tick may be milliseconds
    change(path)
    if change is not replaced:  # what is open stays what it was
        with pytest.raises(StorageError, match="written to after it was opened"):
            file.check(descriptor)
    os.close(descriptor)


@pytest.mark.parametrize("change", [rewritten, replaced, grown, set_back])
def test_another_file_is_not_opened(change, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"weights")
    os.utime(path, ns=(0, 0))  # a clock's tick may be milliseconds
    with open_regular(path) as (stream, file):
        assert stream.read() == b"weights"
    path.read_bytes()  # the time it was read at is nobody's business
    os.close(file.open())
    before = open_descriptors()
    change(path)
    with pytest.raises(StorageError, match="changed or replaced after it was checked"):
        file.open()
    assert open_descriptors() == before
