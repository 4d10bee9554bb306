"""Compiled reads of whole experts: what arrives, and what is raised where it does not."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from programs import python

from lowtide.errors import InternalError, StorageError, UnsupportedError
from lowtide.files.regular_file import RegularFile
from lowtide.kernels.cpu import library
from lowtide.kernels.cpu.compiler import find_compiler
from lowtide.kernels.cpu.library import load_kernels, struct
from lowtide.kernels.cpu.reader import (
    PIECE_BYTES,
    CompiledReader,
    OpenFile,
    Range,
    Readiness,
    SlotSegment,
)

Bytes = NDArray[np.uint8]

TESTS = Path(__file__).parent

NUM_BYTES = 2 * PIECE_BYTES + 77
"""Of an expert: some pieces, which several threads read."""

SLOT_BYTES = NUM_BYTES + 100

EXPERTS = [
    [Range(0, [SlotSegment(13, 50_001, 0), SlotSegment(50_100, 999, 50_001)])],
    [Range(0, [SlotSegment(5, NUM_BYTES, 0)])],
    [Range(1, [SlotSegment(1, 70_000, 30_001)]), Range(0, [SlotSegment(7, 30_001, 0)])],
]


class Opened(NamedTuple):
    reader: CompiledReader
    slots: Bytes  # [2, SLOT_BYTES]
    files: list[OpenFile]


@contextmanager
def opened(
    files: list[OpenFile], experts: Sequence[Sequence[Range]] = EXPERTS, is_direct: bool = False
) -> Iterator[Opened]:
    slots = np.zeros((2, SLOT_BYTES), np.uint8)
    # Direct reads land on whole pages.
    ring = np.frombuffer(mmap.mmap(-1, 4 << 20), np.uint8) if is_direct else None
    library = load_kernels()
    reader = CompiledReader(library, experts, files, slots.reshape(-1), SLOT_BYTES, ring)
    yield Opened(reader, slots, files)
    assert reader.close(60.0)
    for file in files:
        os.close(file.descriptor)


def open_files(paths: Sequence[Path], flags: int = 0) -> list[OpenFile]:
    found = [RegularFile.at(path) for path in paths]
    return [OpenFile(file, file.open(flags)) for file in found]


def content(number: int) -> Bytes:
    return np.random.default_rng(number).integers(0, 256, NUM_BYTES + 5, np.uint8)


def wanted(expert: int) -> Bytes:
    slot = np.zeros(SLOT_BYTES, np.uint8)
    for file, segments in EXPERTS[expert]:
        for start, num_bytes, target in segments:
            slot[target : target + num_bytes] = content(file)[start : start + num_bytes]
    return slot


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    found = [tmp_path / "first.bin", tmp_path / "second.bin"]
    for number, path in enumerate(found):
        path.write_bytes(content(number).tobytes())
    return found


@pytest.mark.parametrize("is_direct", [False, True])
def test_two_experts_at_once_arrive_in_their_slots(paths: list[Path], is_direct: bool) -> None:
    try:
        files = open_files(paths, os.O_DIRECT if is_direct else 0)
    except StorageError:
        pytest.skip("no direct reads here")
    with opened(files, is_direct=is_direct) as own, ThreadPoolExecutor(2) as threads:
        for experts in ([0, 1], [2, 0], [1, 2]):
            own.slots[:] = 0
            read = threads.map(own.reader.read, experts, [0, 1], [60.0, 60.0])
            # What lies between segments is read with them.
            assert list(read) == [own.reader.num_bytes(expert) for expert in experts]
            for slot, expert in enumerate(experts):
                assert np.array_equal(own.slots[slot], wanted(expert))
                assert not own.reader.is_filling(slot)
        assert own.reader.drain(60.0)
    assert [own.reader.num_bytes(expert) for expert in range(3)] == [51_086, NUM_BYTES, 100_001]


def test_what_lies_on_sectors_is_read_in_place(tmp_path: Path) -> None:
    """Where file and slot have the same borders; all else goes through the ring."""
    path, size = tmp_path / "file.bin", 2 * PIECE_BYTES
    stored = np.random.default_rng(0).integers(1, 256, 3 * size, np.uint8)
    path.write_bytes(stored.tobytes())
    try:
        files = open_files([path], os.O_DIRECT)
    except StorageError:
        pytest.skip("no direct reads here")
    parts = [SlotSegment(4096, 50_000, 0), SlotSegment(54_096, size - 50_000, 50_000)]
    apart = [SlotSegment(4096, 50_000, 0), SlotSegment(54_096, size - 50_000, 54_096)]
    # In another order than in the file, and at borders that are no piece's.
    first = PIECE_BYTES // 2 + 8192
    turned = [SlotSegment(4096, first, size - first), SlotSegment(4096 + first, size - first, 0)]
    cases = (parts, apart, [SlotSegment(4097, size, 0)], turned)
    experts = [[Range(0, each)] for each in cases]
    ring, slots = (np.frombuffer(mmap.mmap(-1, 2 * size), np.uint8) for _ in range(2))
    reader = CompiledReader(load_kernels(), experts, files, slots, 2 * size, ring)
    for expert, is_in_place in ((0, True), (1, False), (2, False), (3, True)):
        slots[:], ring[:] = 0, 0
        assert reader.read(expert, 0, 60.0) == size
        for start, num_bytes, target in experts[expert][0].segments:
            wanted = stored[start : start + num_bytes]
            assert np.array_equal(slots[target : target + num_bytes], wanted)
        assert np.count_nonzero(slots) == size
        assert bool(ring.any()) is not is_in_place
    assert reader.close(60.0)
    os.close(files[0].descriptor)


def test_a_file_that_was_truncated_is_named_with_its_bytes(paths: list[Path]) -> None:
    with opened(open_files(paths)) as own:
        os.truncate(paths[0], 100)
        with pytest.raises(StorageError, match=f"first.bin ends at byte 100 of {NUM_BYTES + 5}: "):
            own.reader.read(1, 0, 60.0)
        assert not own.reader.is_filling(0)


def test_a_file_that_was_written_to_is_not_read(paths: list[Path]) -> None:
    """The second of two files that an expert lies in, and only experts that lie there."""
    with opened(open_files(paths)) as own:
        with paths[1].open("r+b") as file:
            file.write(b"other")
        os.utime(paths[1], ns=(0, 0))  # a clock's tick may be milliseconds
        with pytest.raises(StorageError, match=r"second\.bin was written to after it was opened"):
            own.reader.read(2, 0, 60.0)
        own.reader.read(0, 0, 60.0)
        assert np.array_equal(own.slots[0, :50_000], wanted(0)[:50_000])


def test_what_the_system_refuses_is_said_in_its_words(paths: list[Path]) -> None:
    files = open_files(paths)
    os.close(files[0].descriptor)
    files[0] = files[0]._replace(descriptor=os.open(paths[0], os.O_WRONLY))
    with opened(files) as own:
        message = r"Reading 51086 bytes .* of .*first\.bin failed: Bad file descriptor\."
        with pytest.raises(StorageError, match=message):
            own.reader.read(0, 0, 60.0)


def test_a_closed_reader_reads_nothing(paths: list[Path]) -> None:
    with opened(open_files(paths)) as own:
        assert own.reader.close(60.0)
        with pytest.raises(StorageError, match="The read of 51086 bytes .* was given up"):
            own.reader.read(0, 0, 60.0)
        assert not own.slots.any()


def test_a_filling_ends_once_and_by_its_number() -> None:
    readiness = Readiness(load_kernels(), 2)
    assert readiness.wait(0, 0.0) == 0
    before, now = readiness.begin(0), readiness.begin(0)
    readiness.end(0, before, has_failed=True)
    assert readiness.wait(0, 0.001) is None
    readiness.end(0, now)
    readiness.end(0, now, has_failed=True)
    assert readiness.wait(0, 60.0) == readiness.wait(1, 0.0) == 0
    readiness.end(1, readiness.begin(1), has_failed=True)
    assert readiness.wait(1, 60.0) not in (0, None)


def test_a_read_that_never_ends_keeps_no_caller_longer_than_was_said(
    tmp_path: Path, paths: list[Path]
) -> None:
    try:
        compiler = find_compiler()
    except UnsupportedError as error:
        pytest.skip(str(error))
    unruly = tmp_path / "unruly.so"
    flags = ["-std=c++17", "-shared", "-fPIC", "-pthread"]
    source = str(TESTS / "cpp" / "unruly_reads.cpp")
    subprocess.run([compiler, *flags, source, "-o", str(unruly), "-ldl"], check=True)
    load_kernels()  # compiled before a limit runs
    done = python(
        str(TESTS / "endless_read.py"),
        str(tmp_path / "fifo"),
        str(paths[0]),
        env={**os.environ, "LD_PRELOAD": str(unruly)},
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ended\n"


def test_structs_are_the_librarys_own() -> None:
    """Numbers, addresses, structs in structs and arrays, each at its place in C++."""
    matrix, grouped = struct("Matrix"), struct("GroupedAttention")
    assert matrix.multiply.size == ctypes.sizeof(ctypes.c_void_p)
    assert grouped.projections.size == 3 * ctypes.sizeof(matrix)
    own = grouped(num_projections=2, scale=0.5)
    own.projections[1].num_outs = 7
    assert (own.num_projections, own.scale, own.projections[1].num_outs) == (2, 0.5, 7)
    with pytest.raises(InternalError, match="no struct Unknown"):
        struct("Unknown")


def test_a_struct_that_ctypes_would_lay_out_otherwise_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fields = library.fields_of(load_kernels(), "Turn")
    moved = [*fields[:2], fields[2]._replace(start=20)]
    monkeypatch.setattr(library, "fields_of", lambda *_: moved)
    with pytest.raises(InternalError, match=r"Turn\.number is at 16 with 8 bytes here, and at 20"):
        struct.__wrapped__("Turn")
