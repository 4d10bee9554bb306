"""Traces: what is written is what is read, and nothing else is believed."""

from __future__ import annotations

import io
import os
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.core import PassRows, Step, StepKind
from lowtide.errors import StorageError, UsageError
from lowtide.files.array_file import Contradiction
from lowtide.replay.trace import (
    TRACE_VERSION,
    Trace,
    TraceShape,
    TraceWriter,
    count_hits,
    trace_of,
)

SHAPE = TraceShape(2, 5, 2)


def make_trace(rows: tuple[int, ...] = (3, 1, 2), seed: int = 0) -> Trace:
    draw = np.random.default_rng(seed)
    writer = TraceWriter("a model", SHAPE)
    for index, num_rows in enumerate(rows):
        kind = StepKind.PREFILL if index == 0 else StepKind.DENOISE
        ids = np.sort(draw.integers(0, 5, (num_rows, 2, 2)), axis=2)
        writer.append(Step(kind, max(0, index - 1)), index // 2, ids, num_committed=index)
    return writer.trace()


def same(a: Trace, b: Trace) -> bool:
    facts = (a.model, a.shape, a.passes) == (b.model, b.shape, b.passes)
    names = ("ids", "weights", "requests", "kinds")
    return facts and all(np.array_equal(getattr(a, n), getattr(b, n)) for n in names)


def test_weights_and_whose_rows_they_are_come_back(tmp_path: Path) -> None:
    writer = TraceWriter("m", SHAPE)
    rows = PassRows(np.array([70, -1, 12]), np.array([0, 3, 2], np.uint8))
    writer.begin(Step(StepKind.DECODE, 0, rows), 0, 3)
    writer.record(0, np.array([[0, 1], [1, 4], [2, 3]]), np.float32([[0.2, 0.8]] * 3))
    writer.record(1, np.array([[0, 1], [1, 4], [2, 3]]))
    writer.trace().save(tmp_path / "t.npz")
    again = Trace.load(tmp_path / "t.npz")
    assert again.requests.tolist() == [0, -1, 1] and again.kinds.tolist() == [0, 3, 2]
    [routed] = again.iter_routed()
    assert routed.routing(0).weights.tolist() == np.float32([[0.2, 0.8]] * 3).tolist()
    assert routed.routing(1).weights.tolist() == [[0.5, 0.5]] * 3
    assert routed.step.rows is not None and routed.step.rows.request.tolist() == [0, -1, 1]


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [("weights", (0, 0, 0), np.nan), ("requests", 0, -2), ("kinds", 0, 9)],
)
def test_rows_that_cannot_be(name: str, index: Any, value: float) -> None:
    arrays = make_trace().arrays()
    arrays[name] = arrays[name].copy()
    arrays[name][index] = value
    with pytest.raises(Contradiction):
        trace_of(arrays)


@given(rows=st.lists(st.integers(0, 4), max_size=5), seed=st.integers(0, 9))
def test_any_trace_comes_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[int], seed: int
) -> None:
    path = tmp_path_factory.mktemp("trace") / "t.npz"
    trace = make_trace(tuple(rows), seed)
    trace.save(path)
    assert same(trace, Trace.load(path))
    assert trace.hits().shape == (len(rows), 2, 5)


def test_layer_by_layer_is_the_same_as_at_once() -> None:
    ids = np.array([[[0, 1], [2, 3]], [[1, 4], [0, 2]]])
    at_once, layers = TraceWriter("m", SHAPE), TraceWriter("m", SHAPE)
    at_once.append(Step(StepKind.DECODE, 4), 0, ids, num_committed=3)
    layers.begin(Step(StepKind.DECODE, 4), 0, 2)
    layers.record(1, ids[:, 1])
    layers.record(0, ids[:, 0])
    layers.commit(1)
    layers.commit(2)
    assert same(at_once.trace(), layers.trace())


def test_hits_are_counted_per_layer() -> None:
    ids = np.array([[[0, 1], [4, 4]], [[1, 3], [0, 4]]], np.uint16)
    assert count_hits(ids, 5).tolist() == [[1, 2, 0, 1, 0], [1, 0, 0, 0, 3]]


def test_blocks_begin_where_the_counter_restarts() -> None:
    writer = TraceWriter("m", SHAPE)
    ids = np.zeros((1, 2, 2), np.int64)
    for kind, index in (("p", 0), ("d", 0), ("d", 1), ("p", 2), ("d", 2), ("d", 0)):
        step = Step(StepKind.PREFILL if kind == "p" else StepKind.DENOISE, index)
        writer.append(step, 0, ids)
    assert [len(block) for block in writer.trace().blocks()] == [3, 1]
    assert np.array_equal(list(writer.trace().iter_ids())[1], ids)


def test_a_writer_refuses_more_than_it_may_hold() -> None:
    writer = TraceWriter("m", SHAPE, max_bytes=30)
    writer.begin(Step(StepKind.DECODE, 0), 0, 1)
    with pytest.raises(StorageError, match="30 bytes"):
        writer.begin(Step(StepKind.DECODE, 1), 0, 2)


def members(**changes: Any) -> dict[str, Any]:
    arrays: dict[str, Any] = {
        "version": np.array([TRACE_VERSION], np.int64),
        "shape": np.array(SHAPE, np.int64),
        "model": np.frombuffer(b"m", np.uint8),
        "passes": np.array([[1, 0, 0, 1, 0, 0, 0]], np.int32),
        "ids": np.zeros((1, 2, 2), np.uint16),
        "weights": np.ones((1, 2, 2), np.float32),
        "requests": np.zeros(1, np.int32),
        "kinds": np.zeros(1, np.uint8),
    }
    return {name: value for name, value in {**arrays, **changes}.items() if value is not None}


@pytest.mark.parametrize(
    "changes",
    [
        {"version": np.array([1], np.int64)},
        {"version": np.array([], np.int64)},
        {"shape": np.array([2, 5], np.int64)},
        {"shape": np.array([2, 5, 0, 4, 4], np.int64)},
        {"shape": np.array([2, 2**40, 2, 4, 4], np.int64)},
        {"shape": np.array([2, 5, 2, -4, 4], np.int64)},
        {"shape": np.array([2, 5, 2, 4, 2**60], np.int64)},
        {"model": np.array([255], np.uint8)},
        {"passes": np.array([[3, 0, 0, 1, 0, 0, 0]], np.int32)},
        {"passes": np.array([[1, 0, 0, -1, 0, 0, 0]], np.int32)},
        {"passes": np.array([[1, 0, 0, 2, 0, 0, 0]], np.int32)},
        {"passes": np.array([[1, 0, 0, 1]], np.int32)},
        {"ids": np.full((1, 2, 2), 5, np.uint16)},
        {"ids": np.zeros((1, 2, 2), np.int64)},
        {"ids": np.zeros((4,), np.uint16)},
        {"ids": None},
        {"more": np.zeros(1)},
        {"ids": np.array([None, {}], dtype=object)},
    ],
    ids=str,
)
def test_a_contradictory_trace_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    np.savez(tmp_path / "t.npz", **members(**changes))
    with pytest.raises(UsageError, match="t.npz"):
        Trace.load(tmp_path / "t.npz")


def test_the_members_of_these_tests_are_a_trace(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", **members())
    assert Trace.load(tmp_path / "t.npz").model == "m"


@pytest.mark.parametrize(
    ("version", "other_arrays"),
    [(1, dict.fromkeys(("weights", "requests", "kinds"))), (2, {}), (4, {"more": np.zeros(1)})],
)
def test_a_trace_of_another_version_says_what_to_do(
    tmp_path: Path, version: int, other_arrays: dict[str, Any]
) -> None:
    arrays = members(version=np.array([version], np.int64), **other_arrays)
    np.savez(tmp_path / "t.npz", **arrays)
    said = f"its version is {version}, and 3 is read; remove it, and make it again with lowtide"
    with pytest.raises(UsageError, match=said):
        Trace.load(tmp_path / "t.npz")


def test_a_huge_claim_allocates_nothing(tmp_path: Path) -> None:
    header = io.BytesIO()
    claim = {"descr": "<u2", "fortran_order": False, "shape": (10**12, 2, 2)}
    np.lib.format.write_array_header_1_0(header, claim)
    with zipfile.ZipFile(tmp_path / "t.npz", "w") as archive:
        for name, array in members(ids=None).items():
            part = io.BytesIO()
            np.lib.format.write_array(part, array)
            archive.writestr(f"{name}.npy", part.getvalue())
        archive.writestr("ids.npy", header.getvalue())
    with pytest.raises(UsageError, match="claims 8000000000000 bytes"):
        Trace.load(tmp_path / "t.npz")


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    with pytest.raises(StorageError, match="Trace .*t.npz is missing"):
        Trace.load(path)
    make_trace().save(path)
    whole = path.read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(UsageError):
            Trace.load(path)


def test_members_that_are_compressed_otherwise_are_refused(tmp_path: Path) -> None:
    """Of damaged ones Python's own module says so with errors of its own."""
    path = tmp_path / "t.npz"
    for kind in (zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2):
        with zipfile.ZipFile(path, "w", kind) as archive:
            archive.writestr("version.npy", b"\0" * 99)
        with pytest.raises(UsageError, match="compressed as none of ours is"):
            Trace.load(path)


def test_a_model_s_name_need_not_be_unicode(tmp_path: Path) -> None:
    trace = replace(make_trace(), model=os.fsdecode(b"caf\xe9"))
    trace.save(tmp_path / "t.npz")
    assert Trace.load(tmp_path / "t.npz").model == "caf\ufffd"


def test_a_failed_save_leaves_the_old_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.npz"
    make_trace().save(path)
    before = path.read_bytes()

    def full_disk(file: Any, **arrays: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full_disk)
    with pytest.raises(StorageError, match="No space left"):
        make_trace((1,)).save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
