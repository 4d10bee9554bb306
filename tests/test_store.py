"""Byte ranges of files: any of them, direct or buffered, with every failure named."""

from __future__ import annotations

import os
import re
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from test_regular_file import open_descriptors

from lowtide.errors import StorageError
from lowtide.files.regular_file import RegularFile, is_in_memory
from lowtide.formats import formats
from lowtide.formats.plain import ITEM_BYTES
from lowtide.memory.arena import Arena
from lowtide.model_folder.checkpoint import TensorEntry
from lowtide.reading import file_reader as store
from lowtide.reading.dense_weights import DenseWeights
from lowtide.reading.file_reader import SECTOR_BYTES, FileReader, Piece, Read, ring_bytes

FILE_SIZES = (3 * SECTOR_BYTES + 777, SECTOR_BYTES, 5)
CONTENTS = [
    np.random.default_rng(i).integers(0, 256, size, dtype=np.uint8)
    for i, size in enumerate(FILE_SIZES)
]


@pytest.fixture(scope="module")
def files() -> Iterator[list[Path]]:
    with tempfile.TemporaryDirectory() as folder:
        yield write(Path(folder), CONTENTS)


def write(folder: Path, contents: list[NDArray[np.uint8]]) -> list[Path]:
    paths = [folder / f"{i}.bin" for i in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content.tobytes())
    return paths


@contextmanager
def reading(files: list[Path], largest_read_bytes: int = 1 << 15) -> Iterator[FileReader]:
    """A reader on any file system: whether it is direct is another test's question."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reader = FileReader([RegularFile.at(path) for path in files], largest_read_bytes)
    try:
        yield reader
    finally:
        reader.close()


@contextmanager
def no_direct_reads(monkeypatch: pytest.MonkeyPatch, fails_at: str) -> Iterator[None]:
    """A file system that refuses O_DIRECT when a file is opened, or when it is read."""
    real_open, real_preadv = os.open, os.preadv
    direct: set[int] = set()

    def fake_open(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT and fails_at == "open":
            raise OSError(22, "Invalid argument")
        descriptor = real_open(path, flags & ~os.O_DIRECT, *rest)
        direct.discard(descriptor)
        if flags & os.O_DIRECT:
            direct.add(descriptor)
        return descriptor

    def fake_preadv(descriptor: int, *rest: object) -> int:
        if descriptor in direct:
            raise OSError(22, "Invalid argument")
        return real_preadv(descriptor, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fake_open)
        patch.setattr(os, "preadv", fake_preadv)
        yield


def whole(file: int, start: int, num_bytes: int) -> tuple[Read, NDArray[np.uint8]]:
    target = np.zeros(num_bytes, np.uint8)
    piece = Piece(0, num_bytes, formats()["F16"], target, formats()["F16"])
    return Read(file, start, num_bytes, (piece,)), target


@st.composite
def ranges(draw: st.DrawFn) -> tuple[int, int, int]:
    """File, start and length of a range inside it, often touching the end."""
    file = draw(st.integers(0, len(FILE_SIZES) - 1))
    size = FILE_SIZES[file]
    start = draw(st.integers(0, size))
    num_bytes = draw(st.one_of(st.just(size - start), st.integers(0, size - start)))
    return file, start, num_bytes // 2 * 2


@pytest.mark.parametrize("is_buffered", [False, True])
@pytest.mark.parametrize("max_read_bytes", [16 << 20, SECTOR_BYTES, 2 * SECTOR_BYTES])
@given(wanted=st.lists(ranges(), min_size=1, max_size=8))
def test_any_ranges_of_any_files(
    is_buffered: bool, max_read_bytes: int, files: list[Path], wanted: list[tuple[int, int, int]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "MAX_READ_BYTES", max_read_bytes)
        if is_buffered:
            patch.delattr(os, "O_DIRECT")
        with reading(files) as reader:
            assert not (is_buffered and reader.is_direct)
            tickets, targets = [], []
            for file, start, num_bytes in wanted:
                read, target = whole(file, start, num_bytes)
                tickets.append(reader.submit([read]))
                targets.append(target)
            for ticket, target, (file, start, num_bytes) in zip(
                tickets, targets, wanted, strict=True
            ):
                assert ticket.result() == num_bytes
                assert np.array_equal(target, CONTENTS[file][start : start + num_bytes])


@st.composite
def reads_in_pieces(draw: st.DrawFn) -> tuple[int, int, str, list[tuple[int, int]]]:
    """Start, length, stored type, and (offset, elements) of disjoint pieces with odd gaps."""
    dtype = draw(st.sampled_from(list(ITEM_BYTES)))
    start = draw(st.integers(0, 2 * SECTOR_BYTES))
    room = FILE_SIZES[0] - start
    pieces: list[tuple[int, int]] = []
    offset = 0
    while len(pieces) < 3:
        offset += draw(st.integers(0, 9))
        num_elements = draw(st.integers(1, 1500))
        if offset + num_elements * ITEM_BYTES[dtype] > room:
            break
        pieces.append((offset, num_elements))
        offset += num_elements * ITEM_BYTES[dtype]
    return start, offset if pieces else 0, dtype, pieces


@pytest.mark.parametrize("max_read_bytes", [16 << 20, SECTOR_BYTES])
@given(wanted=reads_in_pieces(), target_dtype=st.sampled_from(list(ITEM_BYTES)))
def test_pieces_are_converted_wherever_they_begin(
    max_read_bytes: int,
    files: list[Path],
    wanted: tuple[int, int, str, list[tuple[int, int]]],
    target_dtype: str,
) -> None:
    start, num_bytes, dtype, parts = wanted
    with (
        pytest.MonkeyPatch.context() as patch,
        reading_small(patch, files, max_read_bytes) as reader,
    ):
        pieces = tuple(
            Piece(
                offset=offset,
                num_bytes=n * ITEM_BYTES[dtype],
                format=formats()[dtype],
                target=np.zeros(n * ITEM_BYTES[target_dtype], np.uint8),
                target_format=formats()[target_dtype],
            )
            for offset, n in parts
        )
        reader.submit([Read(0, start, num_bytes, pieces)]).result()
        for piece in pieces:
            stored = CONTENTS[0][start + piece.offset :][: piece.num_bytes].copy()
            expected = torch.from_numpy(stored).view(TORCH[dtype]).to(TORCH[target_dtype])
            actual = torch.from_numpy(piece.target).view(TORCH[target_dtype])
            assert torch.equal(actual.isnan(), expected.isnan())
            assert torch.equal(actual.nan_to_num(), expected.nan_to_num())


TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@contextmanager
def reading_small(
    patch: pytest.MonkeyPatch, files: list[Path], max_read_bytes: int
) -> Iterator[FileReader]:
    patch.setattr(store, "MAX_READ_BYTES", max_read_bytes)
    with reading(files) as reader:
        yield reader


def test_the_ring_is_as_large_as_it_says(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    arenas: list[Arena] = []

    def arena(num_bytes: int) -> Arena:
        arenas.append(Arena(num_bytes))
        return arenas[-1]

    monkeypatch.setattr(store, "Arena", arena)
    for largest in (1, SECTOR_BYTES, 5 * SECTOR_BYTES + 1, 1 << 40):
        assert ring_bytes(largest) % SECTOR_BYTES == 0
        assert ring_bytes(largest) >= store.NUM_READERS * min(largest, store.MAX_READ_BYTES)
    assert ring_bytes(1 << 40) < store.NUM_READERS * (store.MAX_READ_BYTES + 4 * SECTOR_BYTES)
    with reading(files, 5 * SECTOR_BYTES + 1):
        assert [each.num_bytes for each in arenas] == [ring_bytes(5 * SECTOR_BYTES + 1)]


@pytest.mark.parametrize("fails_at", ["open", "read"])
def test_without_direct_reads_buffered_ones_are_used_and_said_once(
    fails_at: str, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *call: dropped.append(call))
    before = open_descriptors()
    with no_direct_reads(monkeypatch, fails_at):
        with pytest.warns(UserWarning, match="no direct reads.*page cache") as said:
            reader = FileReader([RegularFile.at(path) for path in files], SECTOR_BYTES)
        assert len(said) == 1
        assert not reader.is_direct
        read, target = whole(0, 4097, 6000)
        assert reader.submit([read]).result() == 6000
        reader.close()
    assert np.array_equal(target, CONTENTS[0][4097:10097])
    assert all(advice == os.POSIX_FADV_DONTNEED for *_, advice in dropped)
    first, last = min(start for _, start, _, _ in dropped), max(s + n for _, s, n, _ in dropped)
    assert first <= 4097
    assert last >= 10097
    assert open_descriptors() == before


@pytest.mark.parametrize("is_buffered", [False, True])
def test_a_file_truncated_while_open(
    is_buffered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write(tmp_path, CONTENTS)
    os.utime(paths[0], ns=(0, 0))  # a clock's tick may be milliseconds
    if is_buffered:
        monkeypatch.delattr(os, "O_DIRECT")
    with reading(paths) as reader:
        reader.submit([whole(0, 5000, 4000)[0]]).result()
        for size in (6000, SECTOR_BYTES, 0):
            os.truncate(paths[0], size)
            read, _ = whole(0, 5000, 4000)
            numbers = rf"{re.escape(str(paths[0]))} ends at byte {size} of \d+: it was truncated"
            with pytest.raises(StorageError, match=numbers):
                reader.submit([read]).result()
            read, target = whole(1, 0, SECTOR_BYTES)  # the reader is still usable
            reader.submit([read]).result()
            assert np.array_equal(target, CONTENTS[1])
        paths[0].write_bytes(CONTENTS[0].tobytes())  # whole again, but who knows what is in it
        with pytest.raises(StorageError, match="was written to after it was opened"):
            reader.submit([whole(0, 5000, 4000)[0]]).result()
    with reading(paths) as reader:
        read, target = whole(0, 5000, 4000)
        reader.submit([read]).result()
        assert np.array_equal(target, CONTENTS[0][5000:9000])


def test_failures_never_use_up_the_ring(tmp_path: Path) -> None:
    paths = write(tmp_path, CONTENTS)
    with reading(paths) as reader:
        tickets = [reader.submit([whole(2, 0, 4)[0], whole(2, 4, 400)[0]]) for _ in range(20)]
        for ticket in tickets:
            with pytest.raises(StorageError, match="ends at byte 5"):
                ticket.result()
        read, target = whole(0, 1, 2000)
        assert reader.submit([read]).result(timeout=60) == 2000
        assert np.array_equal(target, CONTENTS[0][1:2001])


def test_a_read_that_the_system_refuses(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with reading(files) as reader:
        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(StorageError, match="200 bytes at 100 of .*0.bin.*Input/output error"):
            reader.submit([whole(0, 100, 200)[0]]).result()
        monkeypatch.undo()
        assert reader.submit([whole(0, 100, 200)[0]]).result() == 200


def test_short_reads_are_continued(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def short(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return real(descriptor, [buffers[0][:SECTOR_BYTES]], offset)

    with reading(files) as reader:
        monkeypatch.setattr(os, "preadv", short)
        read, target = whole(0, 10, FILE_SIZES[0] - 11)
        reader.submit([read]).result()
        assert np.array_equal(target, CONTENTS[0][10:-1])


def replace(path: Path) -> None:
    path.with_name("other").write_bytes(b"y" * SECTOR_BYTES)
    path.with_name("other").rename(path)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(
    ("damage", "said"),
    [(Path.unlink, "it is missing"), (replace, "it was changed or replaced.*4096 bytes then")],
)
def test_a_file_that_is_another_now_is_an_error_and_nothing_stays_open(
    which: int, damage: Callable[[Path], None], said: str, files: list[Path], tmp_path: Path
) -> None:
    before = open_descriptors()
    path = tmp_path / "it"
    path.write_bytes(b"x" * SECTOR_BYTES)
    there = [RegularFile.at(files[0]), RegularFile.at(files[1])]
    there[which] = RegularFile.at(path)
    damage(path)
    with pytest.raises(StorageError, match=said):
        FileReader(there, SECTOR_BYTES)
    assert open_descriptors() == before


def test_closing_leaves_no_thread_and_no_descriptor(files: list[Path]) -> None:
    before, threads = open_descriptors(), set(threading.enumerate())
    with reading(files) as reader:
        tickets = [reader.submit([whole(0, i, 64)[0]]) for i in range(50)]
        assert open_descriptors() == before + len(files)
    assert all(ticket.done() for ticket in tickets)
    for ticket in tickets:  # answered, or dropped before it began
        if not ticket.cancelled():
            assert ticket.result() == 64
        else:
            with pytest.raises(CancelledError):
                ticket.result()
    reader.close()  # a second time does nothing
    assert open_descriptors() == before and not set(threading.enumerate()) - threads
    with pytest.raises(StorageError, match="closed reader"):
        reader.submit([])


def test_several_reads_are_under_way_at_a_time(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read waits for the others, so that this ends only if they overlap."""
    meeting = threading.Barrier(store.NUM_READERS, timeout=60)
    real = os.preadv

    def together(*arguments: object) -> int:
        meeting.wait()
        return real(*arguments)

    with reading(files) as reader:
        monkeypatch.setattr(os, "preadv", together)
        tickets = [reader.submit([whole(0, i, 64)[0]]) for i in range(store.NUM_READERS)]
        assert [ticket.result() for ticket in tickets] == [64] * store.NUM_READERS


def test_dense_weights_are_read_and_converted(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    stored = {
        "a": torch.randn(7, 5, generator=generator).bfloat16(),
        "b": torch.randn(11, generator=generator),
        "c": torch.randn(0, 4, generator=generator),
        "d": torch.randn(2, 3, generator=generator).half(),
    }
    content, entries = bytearray(b"x"), {}
    for (name, tensor), dtype in zip(stored.items(), ("BF16", "F32", "F32", "F16"), strict=True):
        num_bytes = tensor.numel() * tensor.element_size()
        entries[name] = TensorEntry(0, len(content), num_bytes, dtype, tuple(tensor.shape))
        content += tensor.numpy(force=True).tobytes() if dtype != "BF16" else bits(tensor)
    path = tmp_path / "dense.bin"
    path.write_bytes(content)
    wanted = {"a": torch.bfloat16, "b": torch.bfloat16, "c": torch.float32, "d": torch.float32}
    dense = DenseWeights(entries, wanted)
    assert dense.num_bytes == 128 + 64 + 0 + 64
    said = []
    with reading([path], 4096) as reader:
        loaded = dense.load(reader, lambda *progress: said.append(progress))
    for name, tensor in stored.items():
        assert loaded[name].data_ptr() % 64 == 0 or not tensor.numel()
        assert torch.equal(loaded[name], tensor.to(wanted[name]))
        assert dense.meta()[name].shape == tensor.shape
        assert dense.meta()[name].dtype == wanted[name]
    assert said[-1][1:] == (70 + 44 + 12, 70 + 44 + 12)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.int16).numpy().tobytes()


def test_files_in_memory_are_copied_once() -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir():
        pytest.skip("no file system in memory here")
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        path = Path(folder) / "weights"
        path.write_bytes(CONTENTS[0])
        with path.open("rb") as file:
            if not is_in_memory(file.fileno()):
                pytest.skip(f"{memory} is on a disk")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            reader = FileReader([RegularFile.at(path)], SECTOR_BYTES)
        assert not reader.is_direct
        read, target = whole(0, 4097, 6000)
        assert reader.submit([read]).result() == 6000
        reader.close()
    assert np.array_equal(target, CONTENTS[0][4097:10097])
