"""Sizes and rates of the machine, measured costs, what is kept of them, and `lowtide doctor`."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from lowtide.cli.app import app
from lowtide.core import Curve, IntArray, MoEShape
from lowtide.doctor import checkup, doctor
from lowtide.errors import PlanError, StorageError, UsageError
from lowtide.experts import transfer
from lowtide.experts.batched_experts import BatchedExperts
from lowtide.experts.layout import SlotLayout
from lowtide.files.folders import cache_folder
from lowtide.formats.plain import plain_format
from lowtide.hardware import machine, measure, memory, store, streams
from lowtide.hardware.cold_weights import last_level_cache_bytes
from lowtide.hardware.control_group import group_limit_bytes
from lowtide.hardware.machine import (
    PIECES_AT_ONCE,
    Machine,
    Rate,
    best_at_once,
    cpu_model,
    pcie_bytes_per_s,
    this_machine,
)
from lowtide.hardware.measure import (
    Measurements,
    Point,
    layer_dense_bytes,
    measure_costs,
)
from lowtide.hardware.store import CostKey, Stored, keep_rates, load, save, stored_or_measured
from lowtide.hardware.streams import DeviceDenseStream
from lowtide.hardware.timing import MAX_REPEATS, MIN_REPEATS, Timing, repeat_interleaved
from lowtide.kernels.choice import choose_kernels
from lowtide.kernels.cpu.reader import CompiledReader
from lowtide.kernels.reference import REFERENCE
from lowtide.lab import machine_profile
from lowtide.lab.emulated.device import EmulatedDevice
from lowtide.lab.emulated.speeds import EmulatedSpeeds
from lowtide.lab.profiles import load_profile
from lowtide.llm import LLM, plan_model
from lowtide.memory.arena import Arena
from lowtide.model_folder.checkpoint import TensorEntry
from lowtide.model_folder.demos import DEMO_FOLDER
from lowtide.model_writing.synth import synth
from lowtide.threads.executor import HostExecutor

# A temporary folder may be on a file system without them.
pytestmark = pytest.mark.filterwarnings("ignore:.* has no direct reads")

SHAPE = MoEShape(2, 8, 2, 64, 32)
LAYOUT = SlotLayout.of(SHAPE, torch.float32)
DENSE_BYTES = 4 * 64 * 256


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """As few repeats and as little memory as can be."""
    monkeypatch.setattr(measure, "COMPUTE_LIMIT_S", 0.0)
    monkeypatch.setattr(measure, "DISK_LIMIT_S", 0.0)
    monkeypatch.setattr(measure, "WARM_UP_LIMIT_S", 0.0)
    monkeypatch.setattr(measure, "cold_bytes", lambda: 1 << 20)
    monkeypatch.setattr(machine, "cold_bytes", lambda: 1 << 20)
    monkeypatch.setattr(machine, "RATE_LIMIT_S", 0.0)
    monkeypatch.setattr(machine, "PRODUCT_SIZE", 64)
    monkeypatch.setattr(doctor, "SCRATCH_BYTES", machine.READ_BYTES)
    monkeypatch.setattr(checkup, "BUSY_SPREAD", math.inf)  # of so few repeats


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lowtide"


@pytest.fixture
def executor() -> Iterator[HostExecutor]:
    executor = HostExecutor(SHAPE.num_experts_per_token)
    yield executor
    executor.close()


# Memory.


def test_sizes_are_in_order() -> None:
    assert 0 < memory.resident_bytes() <= memory.total_memory_bytes()
    assert 0 < memory.available_memory_bytes() <= memory.total_memory_bytes()
    assert memory.total_memory_bytes() <= psutil.virtual_memory().total


def test_touched_pages_become_resident() -> None:
    before = memory.resident_bytes()
    pages = mmap.mmap(-1, 96 << 20)  # new ones, whatever an allocator has kept
    np.frombuffer(pages, np.uint8)[:] = 1
    assert memory.resident_bytes() - before > 72 << 20


@pytest.mark.parametrize(
    ("text", "is_limit"), [("1048576\n", True), ("max\n", False), ("9223372036854771712", False)]
)
def test_a_control_group_limits_the_total(
    text: str, is_limit: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text(text)
    membership = tmp_path / "membership"
    membership.write_text("0::/\n")
    monkeypatch.setattr(
        memory, "group_limit_bytes", lambda: group_limit_bytes(tmp_path, membership)
    )
    machine_bytes = psutil.virtual_memory().total
    assert memory.total_memory_bytes() == (1 << 20 if is_limit else machine_bytes)
    assert memory.available_memory_bytes() <= memory.total_memory_bytes()


# The machine, from what the system says.


def test_this_machine_has_a_name_and_sizes() -> None:
    here = this_machine()
    assert here.cpu and here.kernel
    assert here.num_cores == len(os.sched_getaffinity(0))
    assert here.memory_bytes == memory.total_memory_bytes()
    assert here == this_machine()


def test_the_processor_is_named_where_the_system_names_it(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nmodel name\t: Abacus 9: wooden\nmodel name\t: other\n")
    assert cpu_model(path) == "Abacus 9: wooden"
    path.write_text("processor\t: 0\n")
    assert cpu_model(path) == cpu_model(tmp_path / "missing") != ""


def test_processors_of_one_name_differ_by_generation(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("cpu family\t: 26\nmodel\t\t: 2\nmodel name\t: Abacus\n\nmodel\t\t: 3\n")
    assert cpu_model(path) == "Abacus (family 26, model 2)"


def test_the_last_level_is_the_largest_cache(tmp_path: Path) -> None:
    for index, size in enumerate(("48K\n", "2048K\n", "33792K\n")):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        (folder / "size").write_text(size)
    assert last_level_cache_bytes(tmp_path) == 33 << 20
    assert last_level_cache_bytes(tmp_path / "missing") == 0


@pytest.mark.parametrize(
    ("speed", "width", "gigabytes"),
    [("16.0 GT/s PCIe", "16", 31.5), ("32.0 GT/s PCIe", "16", 63.0), ("5.0 GT/s", "8", 4.0)],
)
def test_a_link_has_the_ceiling_of_its_specification(
    speed: str, width: str, gigabytes: float, tmp_path: Path
) -> None:
    (tmp_path / "max_link_speed").write_text(speed)
    (tmp_path / "current_link_width").write_text(width)
    assert pcie_bytes_per_s(tmp_path) == pytest.approx(gigabytes * 1e9, rel=0.001)


@pytest.mark.parametrize("speed", [None, "Unknown\n", ""])
def test_a_link_that_is_not_described_has_no_ceiling(speed: str | None, tmp_path: Path) -> None:
    if speed is not None:
        (tmp_path / "max_link_speed").write_text(speed)
    assert pcie_bytes_per_s(tmp_path) is None


# Repeats.


def test_repeats_are_interleaved_and_their_median_counts() -> None:
    order: list[str] = []

    def sample(name: str, times: list[float]) -> Callable[[], float]:
        def take() -> float:
            order.append(name)
            return times.pop(0)

        return take

    samples = [sample("a", [3.0, 1.0, 2.0]), sample("b", [5.0, 5.0, 50.0])]
    assert repeat_interleaved(samples, 0.0) == [Timing(2.0, 1.0, 3.0, 3), Timing(5.0, 5.0, 50.0, 3)]
    assert order == ["a", "b"] * MIN_REPEATS
    assert Timing(2.0, 1.0, 3.0, 3).spread == 1.0 and Timing(0.0, 0.0, 0.0, 3).spread == 0.0


def test_there_is_an_end_to_repeats() -> None:
    [timing] = repeat_interleaved([lambda: 1.0], 1e9)
    assert timing.num_repeats == MAX_REPEATS


# Costs.


def test_without_a_device_the_host_is_the_device(quick: None, executor: HostExecutor) -> None:
    measurements = measure_costs(SHAPE, LAYOUT, executor, DENSE_BYTES)
    costs = measurements.costs()
    assert costs.expert_bytes == LAYOUT.num_bytes
    assert (costs.link_s, costs.sync_s, costs.disk_read_s) == (0.0, 0.0, 0.0)
    for num_tokens in (1, 3, 8, 100):
        assert 0 < costs.host_s.at(num_tokens) == costs.device_s.at(num_tokens)
        assert costs.dense_s.at(num_tokens) > 0
    assert all(point.timing.num_repeats >= MIN_REPEATS for point in measurements.host)
    assert costs.host_s.at(1) == measurements.host[0].timing.median_s
    # However slow the machine is: what lies beyond is drawn on from the last two points.
    for curve in (measurements.host, measurements.dense):
        assert [point.num_tokens for point in curve] == [1, 2, 4, 8, 16, 32, 64]


def test_memory_is_known_without_psutil(monkeypatch: pytest.MonkeyPatch) -> None:
    with_psutil = memory.total_memory_bytes(), memory.available_memory_bytes()
    monkeypatch.setitem(sys.modules, "psutil", None)
    total, available = memory.total_memory_bytes(), memory.available_memory_bytes()
    assert total == with_psutil[0]
    assert abs(available - with_psutil[1]) < total // 4  # others take and give back meanwhile

    def fails(*_: object) -> NoReturn:
        raise OSError

    monkeypatch.setattr(Path, "read_text", fails)
    with pytest.raises(UsageError, match="install psutil"):
        memory.total_memory_bytes()


def test_a_small_model_s_dense_weights_are_no_endless_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "cold_bytes", lambda: 64 << 20)
    shape = MoEShape(1, 8, 2, hidden_size=64, expert_size=32)
    stream = DeviceDenseStream(shape, torch.float32, torch.device("cpu"), 4096, REFERENCE)
    num_products, multiply = 0, torch.mm

    def counted(*arguments: torch.Tensor, **options: Any) -> torch.Tensor:
        nonlocal num_products
        num_products += 1
        return multiply(*arguments, **options)

    monkeypatch.setattr(torch, "mm", counted)
    assert stream.sample(2) > 0
    assert 1 < num_products <= 256


def test_few_tokens_on_the_host_are_measured_in_the_call_that_will_run(
    quick: None, executor: HostExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = choose_kernels("auto", torch.bfloat16)
    compiled = kernels.several_experts(3 * [plain_format(torch.bfloat16)])
    if compiled is None:
        pytest.skip("nothing can be compiled here")
    calls: list[list[int]] = []
    run = BatchedExperts.run

    def noted(batched: BatchedExperts, groups: IntArray, *scratch: torch.Tensor) -> None:
        calls.append(groups[:, 2].tolist())
        run(batched, groups, *scratch)

    monkeypatch.setattr(BatchedExperts, "run", noted)
    layout = SlotLayout.of(SHAPE, torch.bfloat16)
    measurements = measure_costs(SHAPE, layout, executor, DENSE_BYTES, kernels=kernels)
    assert measurements.costs().host_s.at(1) > 0
    few = {(n,) for n in (1, 2, 4, 8, 16, 32) if n <= compiled.max_rows}
    assert {tuple(set(num_tokens)) for num_tokens in calls} == few
    assert min(map(len, calls)) > 1


def test_the_spread_is_that_of_most_timings() -> None:
    wide, narrow = Timing(1.0, 1.0, 9.0, 3), Timing(1.0, 1.0, 1.5, 3)
    curve = (Point(1, wide), Point(2, narrow))
    assert Measurements(1, curve, (Point(1, narrow),)).spread == 0.5
    assert Measurements(1, curve, curve, link=wide).spread == 8.0


def test_times_of_a_device_are_its_own(quick: None, executor: HostExecutor) -> None:
    """The times that an emulated device is given are the least that can be measured."""
    speeds = EmulatedSpeeds(
        1e12, link_latency_s=5e-4, host_slowdown=3.0, device_s=Curve([(1, 1e-4)])
    )
    num_slots = 4
    arena = Arena(num_slots * LAYOUT.num_bytes)
    device = EmulatedDevice(arena, LAYOUT, num_slots, speeds)
    try:
        measurements = measure_costs(SHAPE, LAYOUT, executor, DENSE_BYTES, device=device)
    finally:
        device.close()
    costs = measurements.costs()
    # Waits end by a clock of their own, which may be a little ahead of the one that measures.
    assert costs.link_s >= 0.99 * 5e-4
    assert costs.host_s.at(1) >= 0.99 * 3e-4
    assert costs.device_s.at(1) > 0 and costs.sync_s > 0
    assert measurements.link is not None and costs.fetch_s == measurements.link.median_s
    slots = [arena.bytes[i * LAYOUT.num_bytes :][: LAYOUT.num_bytes] for i in range(num_slots)]
    assert all(slot.any() for slot in slots)  # every slot was copied into


def test_too_little_memory_is_refused_with_the_numbers(
    executor: HostExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "available_memory_bytes", lambda: 1 << 20)
    with pytest.raises(PlanError, match=r"256\.0 MiB .* 512\.0 KiB"):
        measure_costs(SHAPE, LAYOUT, executor, DENSE_BYTES, least_cold_bytes=256 << 20)


def test_a_layer_s_dense_weights_are_counted_by_its_number() -> None:
    def entry(*shape: int) -> TensorEntry:
        return TensorEntry(0, 0, 0, "F32", shape)

    dense = {
        "model.embed_tokens.weight": entry(100, 8),
        "model.layers.1.self_attn.q_proj.weight": entry(8, 8),
        "model.layers.1.norm.weight": entry(8),
        "model.layers.11.self_attn.q_proj.weight": entry(8, 8),
    }
    assert layer_dense_bytes(dense, 1, item_bytes=2) == 2 * (64 + 8)
    assert layer_dense_bytes(dense, 11, item_bytes=4) == 4 * 64


# What is kept.

HERE = Machine("Abacus 9", 4, 1 << 34, "Linux 7", None)
KEY = CostKey.of(HERE, SHAPE, LAYOUT, DENSE_BYTES)
SOME = Timing(2e-3, 1e-3, 4e-3, 5)
MEASUREMENTS = Measurements(LAYOUT.num_bytes, (Point(1, SOME),), (Point(1, SOME), Point(8, SOME)))
STORED = Stored(MEASUREMENTS, "2026-11-21T10:00:00+00:00")

seconds = st.floats(0, 1e6, allow_nan=False)


@st.composite
def timings(draw: st.DrawFn) -> Timing:
    least_s, median_s, most_s = sorted(draw(st.tuples(seconds, seconds, seconds)))
    return Timing(median_s, least_s, most_s, draw(st.integers(1, 99)))


@st.composite
def curves(draw: st.DrawFn, least: int = 1) -> tuple[Point, ...]:
    counts = sorted(draw(st.sets(st.integers(1, 512), min_size=least, max_size=4)))
    return tuple(Point(count, draw(timings())) for count in counts)


@given(
    host=curves(),
    dense=curves(),
    device=curves(least=0),
    others=st.tuples(*[st.none() | timings()] * 3),
    is_direct=st.booleans(),
)
def test_what_is_kept_comes_back(
    host: tuple[Point, ...],
    dense: tuple[Point, ...],
    device: tuple[Point, ...],
    others: tuple[Timing | None, ...],
    is_direct: bool,
) -> None:
    measurements = Measurements(LAYOUT.num_bytes, host, dense, device, *others, is_direct)
    stored = Stored(measurements, STORED.date)
    save(KEY, stored)
    assert load(KEY) == stored
    assert stored.costs.host_s.at(host[0].num_tokens) == host[0].timing.median_s


def test_a_file_says_what_it_is_of(cache: Path) -> None:
    save(KEY, STORED)
    assert [path.parent for path in cache.rglob("*.json")] == [cache / "costs"]
    of = json.loads(KEY.path.read_text())["of"]
    assert of["machine"]["cpu"] == "Abacus 9" and of["hidden_size"] == 64
    assert of["dtype"] == "float32" and of["version"]


@pytest.mark.parametrize(
    "changes",
    [
        {"machine": dataclasses.replace(HERE, cpu="Abacus 10")},
        {"machine": dataclasses.replace(HERE, gpu="Loom")},
        {"dtype": "bfloat16"},
        {"dense_bytes": 1},
        {"device": "cuda"},
        {"checkpoint": "/models/a"},
    ],
)
def test_another_machine_or_model_has_its_own(changes: dict[str, Any]) -> None:
    save(KEY, STORED)
    assert load(dataclasses.replace(KEY, **changes)) is None


def test_what_was_measured_in_another_way_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    save(KEY, STORED)
    monkeypatch.setattr(store, "METHOD", store.METHOD + 1)
    assert load(KEY) is None


def test_another_machine_s_file_under_this_one_s_name_is_refused() -> None:
    other = dataclasses.replace(KEY, machine=dataclasses.replace(HERE, num_cores=8))
    save(other, STORED)
    other.path.rename(KEY.path)
    with pytest.raises(StorageError, match="another machine"):
        load(KEY)


def damaged(change: Callable[[Any], None]) -> str:
    save(KEY, STORED)
    content = json.loads(KEY.path.read_text())
    change(content)
    return json.dumps(content)


DAMAGES: list[Callable[[Any], None]] = [
    lambda c: c.pop("measurements"),
    lambda c: c.update(measurements=[]),
    lambda c: c.update(date=5),
    lambda c: c.update(date="yesterday"),
    lambda c: c["measurements"].update(host=[]),
    lambda c: c["measurements"].update(host=None),
    lambda c: c["measurements"].update(expert_bytes=1),
    lambda c: c["measurements"].update(is_read_direct=1),
    lambda c: c["measurements"].update(link=[1.0, 1.0, 1.0]),
    lambda c: c["measurements"].update(link=[-1.0, -1.0, 1.0, 3]),
    lambda c: c["measurements"].update(link=[float("nan"), 1.0, 1.0, 3]),
    lambda c: c["measurements"].update(link=[float("inf"), 1.0, float("inf"), 3]),
    lambda c: c["measurements"].update(link=[5.0, 1.0, 2.0, 3]),
    lambda c: c["measurements"].update(link=["1", 1.0, 2.0, 3]),
    lambda c: c["measurements"].update(link=[True, 1, 2, 3]),
    lambda c: c["measurements"]["host"][0].__setitem__(0, 0),
    lambda c: c["measurements"]["dense"].reverse(),
]


@pytest.mark.parametrize("change", DAMAGES)
def test_a_damaged_file_is_a_typed_error(change: Callable[[Any], None]) -> None:
    text = damaged(change)
    KEY.path.write_text(text)
    with pytest.raises(StorageError, match=KEY.path.name):
        load(KEY)


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff", '{"of": 1, "of": 2}'])
def test_what_is_no_object_is_a_typed_error(text: str) -> None:
    KEY.path.parent.mkdir(parents=True)
    KEY.path.write_text(text, encoding="latin-1")
    with pytest.raises(StorageError, match=KEY.path.name):
        load(KEY)


class Count:
    """Measures nothing, and counts how often."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self) -> Measurements:
        self.num_calls += 1
        return MEASUREMENTS


def test_costs_are_measured_once_unless_asked_for_again() -> None:
    count = Count()
    first = stored_or_measured(KEY, count)
    assert stored_or_measured(KEY, count) == first and count.num_calls == 1
    stored_or_measured(KEY, count, is_fresh=True)
    assert count.num_calls == 2


def test_damage_is_said_and_mended(caplog: pytest.LogCaptureFixture) -> None:
    KEY.path.parent.mkdir(parents=True)
    KEY.path.write_text("{")
    count = Count()
    with caplog.at_level(logging.WARNING, "lowtide"):
        stored = stored_or_measured(KEY, count)
    assert "Measuring again" in caplog.text and KEY.path.name in caplog.text
    assert load(KEY) == stored and count.num_calls == 1


def test_a_cache_that_cannot_be_written_costs_only_the_keeping(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.mkdir()
    cache.write_text("in the way")
    with caplog.at_level(logging.WARNING, "lowtide"):
        assert stored_or_measured(KEY, Count()).measurements == MEASUREMENTS
    assert "this run only" in caplog.text


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_costs_only_the_keeping(
    make: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Writing through a pipe would wait for its reader."""
    KEY.path.parent.mkdir(parents=True)
    make(KEY.path)
    with caplog.at_level(logging.WARNING, "lowtide"):
        assert stored_or_measured(KEY, Count()).measurements == MEASUREMENTS
    assert f"{KEY.path} is not a regular file; remove it" in caplog.text


def test_a_place_that_cannot_be_looked_at_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="too long"):
        store.write_kept(tmp_path / ("x" * 300), {}, {}, "measured costs")


def test_an_interrupted_write_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(KEY, STORED)
    assert list(KEY.path.parent.iterdir()) == []


@pytest.mark.parametrize("given", ["", "relative/cache"])
def test_the_cache_is_the_user_s(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    assert cache_folder() == Path.home() / ".cache" / "lowtide"


# `lowtide doctor`.


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_doctor_says_what_a_model_costs_and_keeps_it(quick: None, cache: Path) -> None:
    told = json.loads(run("demo:diffusion", "--json"))
    assert told["machine"]["cpu"] == this_machine().cpu
    assert {rate["unit"] for rate in told["rates"]} == {"B"}
    assert all(rate["per_s"] > 0 for rate in told["rates"])
    [costs] = told["costs"]
    assert costs["name"] == "demo:diffusion" and costs["link"] is None
    assert costs["disk_read"]["median_s"] > 0
    assert costs["host"][0]["num_tokens"] == 1 and costs["host"][0]["median_s"] > 0
    assert not told["skipped"]
    assert len(list((cache / "costs").iterdir())) == 1
    # The scratch file has gone; a compiled kernel may have been kept.
    assert {path.name for path in cache.iterdir()} <= {"costs", "kernels", "rates"}
    assert json.loads(run("demo:diffusion", "--json"))["costs"] == [costs]
    assert json.loads(run("demo:diffusion", "--fresh", "--json"))["costs"] != [costs]


def test_a_disk_is_read_with_as_few_reads_at_once_as_are_as_fast() -> None:
    def rates(*per_s: float) -> list[Rate]:
        pairs = zip(PIECES_AT_ONCE, per_s, strict=False)
        return [Rate(name, "B", value, 0.0, value) for name, value in pairs]

    assert best_at_once(rates(1.0, 2.0, 2.04, 1.9)) == 2
    assert best_at_once(rates(1.0, 2.0, 3.0, 4.0)) == 8
    assert best_at_once(rates(1.0, 0.9, 0.8, 0.7)) == 1
    assert best_at_once([Rate("memory read", "B", 9.0, 0.0, 9.0)]) is None


@pytest.mark.parametrize("num_at_once", [1, 2, 8])
def test_an_engine_reads_as_doctor_found_best(
    num_at_once: int, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever reads are compiled, with the same words."""
    asked = []

    class Asked(CompiledReader):
        def __init__(self, *parts: Any) -> None:
            super().__init__(*parts)
            asked.append(parts[-1])

    monkeypatch.setattr(transfer, "CompiledReader", Asked)
    model = synth("qwen3_moe", "tiny", tmp_path / "model")
    least = plan_model(model, context=64).minimum_bytes
    expected = LLM(model, context=64, host_memory=least).generate([5, 6, 7], max_tokens=8)
    names = [name for name, n in PIECES_AT_ONCE.items() if n == num_at_once]
    keep_rates(this_machine(), [Rate(name, "B", 1e9, 0.0, 1e9) for name in names])
    with LLM(model, context=64, host_memory=least) as llm:
        assert llm.generate([5, 6, 7], max_tokens=8)[0].token_ids == expected[0].token_ids
    assert asked in ([], [None, num_at_once])  # without a compiler: none


def test_doctor_in_words(quick: None) -> None:
    short, text = run("demo:diffusion"), run("demo:diffusion", "-v")
    assert "Runs well here: " in short or "No published model fits" in short
    assert "memory read" not in short and text.startswith(("Nothing is wrong", "To fix", "2 "))
    assert this_machine().cpu in text
    for said in ("memory read", "memory copy", "disk, sequential", "best repeat"):
        assert said in text
    assert "not known" not in text
    assert "demo:diffusion: experts of 48.0 KiB, bfloat16" in text
    assert "read in" in text


def test_doctor_says_when_repeats_disagree(monkeypatch: pytest.MonkeyPatch, quick: None) -> None:
    point = Point(1, Timing(1e-3, 1e-3, 5e-3, 3))
    restless = Measurements(48 << 10, (point,), (point,))
    monkeypatch.setattr(doctor, "measure_costs", lambda *args, **options: restless)
    assert "400% of their median apart" in run("demo:diffusion")


def test_an_emulated_device_is_named_and_never_kept(quick: None, cache: Path) -> None:
    given = ("link_latency_us=100", "link_GBps=10", "host_slowdown=1")
    options = ["--device", "emulated", *(f"--device-option={option}" for option in given)]
    text = run("demo:diffusion", *options, "-v")
    assert "emulated" in text and "fetched in" in text
    assert not (cache / "costs").exists()


_EMULATED = ("link_latency_us=0", "link_GBps=10", "host_slowdown=1")


def test_this_machine_as_a_profile(quick: None, tmp_path: Path) -> None:
    file = tmp_path / "this.toml"
    options = dict(option.split("=") for option in _EMULATED)
    diagnosis = doctor.diagnose(
        DEMO_FOLDER / "diffusion", name="demo:diffusion", device="emulated", device_options=options
    )
    machine_profile.save_profile(diagnosis, file)
    [measured] = diagnosis.as_dict()["costs"]
    shape = MoEShape(*(measured[name] for name in MoEShape._fields))
    profile = load_profile(str(file))
    costs = profile.costs(shape)
    assert "emulated" in profile.name
    assert costs.link_s == pytest.approx(measured["link"]["median_s"], rel=1e-3)
    for curve, points in ((costs.host_s, measured["host"]), (costs.device_s, measured["device"])):
        for point in (points[0], points[-1]):  # what is between them is a roofline
            assert curve.at(point["num_tokens"]) >= 0.99 * point["median_s"]
        assert curve.at(1) == pytest.approx(points[0]["median_s"], rel=0.5)


def test_bench_writes_this_machine_as_a_profile(quick: None, tmp_path: Path) -> None:
    file = tmp_path / "this.toml"
    arguments = ["bench", "demo:diffusion", "--repeats", "1", "--max-tokens", "4"]
    arguments += ["--device", "emulated", *(f"--device-option={option}" for option in _EMULATED)]
    result = CliRunner().invoke(app, [*arguments, "--profile", str(file)])
    assert result.exit_code == 0, result.output
    assert "emulated" in load_profile(str(file)).name


@pytest.mark.parametrize("place", ["file/this.toml", "."])
def test_a_profile_is_refused_before_anything_is_measured(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    bench = ["bench", "demo:diffusion", "--profile"]
    result = CliRunner().invoke(app, [*bench, str(tmp_path / place), "--device", "emulated"])
    assert result.exit_code == 1 and "cannot be written" in result.stderr
    result = CliRunner().invoke(app, [*bench, str(tmp_path / "this.toml"), "--device", "cpu"])
    assert result.exit_code == 2 and "emulated" in result.stderr


def test_without_a_model_memory_and_disk_are_measured(quick: None) -> None:
    told = json.loads(run("--json"))
    names = [rate["name"] for rate in told["rates"]]
    assert told["costs"] == [] == told["skipped"]
    assert names[:2] == ["memory read", "memory copy, read and written"]
    assert names[2].startswith("disk, sequential") and names[3:] == list(PIECES_AT_ONCE)


def test_doctor_ends_on_a_busy_machine_and_says_what_it_skipped(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "LIMIT_S", -1.0)
    told = json.loads(run("demo:diffusion", "--json"))
    assert told["rates"] == told["costs"] == []
    skipped = [each["name"] for each in told["skipped"]]
    assert skipped[:2] == ["memory", "disk"] and skipped[-1] == "demo:diffusion"
    assert "memory was not measured: there was no time left" in run()


def test_a_disk_that_does_not_answer_is_skipped(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "READ_LIMIT_S", 0.0)
    told = json.loads(run("--json"))
    assert [rate["name"] for rate in told["rates"]][0] == "memory read"
    [skipped] = told["skipped"]
    assert skipped["name"] == "disk" and "has not ended within" in skipped["reason"]


def test_doctor_refuses_what_is_not_there() -> None:
    result = CliRunner().invoke(app, ["doctor", "no/such/model", "--json"])
    assert result.exit_code == 1 and "error" in json.loads(result.stdout)
