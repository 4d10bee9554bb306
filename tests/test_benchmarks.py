"""Shared parts of the benchmark scripts; no speed is judged here."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import larger_than_memory
import offload
import psutil
import pytest
import torch
from common import (
    balloon,
    causal,
    ceilings,
    disk_home,
    emulated,
    memory,
    models,
    peer,
    record,
    run,
    worker,
)
from hypothesis import given
from hypothesis import strategies as st
from programs import python
from whole import wait_until

from lowtide import LLM
from lowtide.core import MoEShape, Step, StepKind
from lowtide.engine.opening.config import EngineConfig
from lowtide.errors import InternalError, PlanError, UsageError
from lowtide.lab.profiles import load_profile
from lowtide.lab.simulation.host_alone import compare_alone
from lowtide.lab.simulation.simulator import simulate
from lowtide.layers.batch import Batch, KVRange, Segment
from lowtide.llm import plan_model
from lowtide.model_writing.synth import synth
from lowtide.policies.recipe import PolicyInputs
from lowtide.replay.calibration import Calibration


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth("llada2", "tiny", tmp_path_factory.mktemp("models") / "tiny")


def test_a_record_is_one_json_line_with_its_circumstances(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "times", lambda: os.times_result((2.0, 0.25, 1.0, 0.5, 99.0)))
    out = tmp_path / "new" / "rows.jsonl"
    recorder = record.Recorder("thing", {"model": "m"}, out)
    recorder.write("first", {"speed": 1.23456789, "count": 1234567})
    recorder.write("second", {})
    lines = out.read_text().splitlines()
    assert lines == capsys.readouterr().out.splitlines()
    first, second = map(json.loads, lines)
    assert (first["speed"], first["count"]) == (1.2346, 1234567)
    assert second["what"] == "second"
    assert {"machine", "commit", "date", "settings", "benchmark"} <= first.keys()
    assert first["processor_s"] == 3.75  # its own and its processes', user and system


def test_every_kind_of_limit_wraps_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with memory.choose_limit("none").limited(["run", "me"], 100) as command:
        assert command == ["run", "me"]
    with memory.MemoryLimit("systemd", "").limited(["run"], 100) as command:
        assert "--property=MemoryMax=100" in command and command[-1] == "run"
    with control_groups(tmp_path, monkeypatch):
        for kind, own, name in (
            ("cgroup v1", "memory/mine", "memory.limit_in_bytes"),
            ("cgroup v2", "mine", "memory.max"),
        ):
            (tmp_path / own).mkdir(parents=True)
            with memory.MemoryLimit(kind, "").limited(["run", "me"], 100) as command:
                group = Path(command[3]).parent
                assert group.parent == tmp_path / own
                assert (group / name).read_text() == "100" and command[4:] == ["run", "me"]
            assert not group.exists()
    with pytest.raises(UsageError, match="none"):
        memory.choose_limit("some")


@contextmanager
def control_groups(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have groups of both kinds in a folder, which go with the files in them."""
    read_text = Path.read_text

    def told(path: Path, *arguments: Any) -> str:
        if path == Path("/proc/self/cgroup"):
            return "9:cpu,memory:/mine\n0::/mine\n"
        return read_text(path, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(memory, "CGROUP_ROOT", root)
        patch.setattr(Path, "read_text", told)
        patch.setattr(Path, "rmdir", shutil.rmtree)
        yield


def test_a_balloon_holds_until_what_ran_has_ended() -> None:
    left_bytes = balloon.memory_info("MemAvailable") - (64 << 20)
    limit = memory.choose_limit("balloon")
    with limit.limited(["run", "me"], left_bytes) as command:
        assert command == ["run", "me"]
        [process] = balloons()
        assert Path(f"/proc/{process.pid}/oom_score_adj").read_text().strip() == "1000"
    assert not process.is_running()
    with pytest.raises(PlanError, match="burst"), limit.limited(["run"], left_bytes):
        [process] = balloons()
        process.kill()
        process.wait()


def balloons() -> list[psutil.Process]:
    """Whatever else this process has begun, or has just ended."""
    found = []
    for each in psutil.Process().children():
        with suppress(psutil.Error):
            found += [each] if any("balloon.py" in word for word in each.cmdline()) else []
    return found


def test_a_balloon_goes_with_who_wanted_it() -> None:
    code = (
        "import sys; from common import memory\n"
        "with memory.choose_limit('balloon').limited(['run'], int(sys.argv[1])):\n"
        "    import psutil; print(psutil.Process().children()[0].pid, flush=True); 1 / 0"
    )
    left = str(balloon.memory_info("MemAvailable") - (32 << 20))
    folder = Path(memory.__file__).parents[1]
    done = python("-c", code, left, cwd=folder, timeout=60)
    assert "ZeroDivisionError" in done.stderr and not psutil.pid_exists(int(done.stdout))


@given(
    st.integers(0, 1 << 36),
    st.lists(st.integers(-(1 << 27), 1 << 27), min_size=1, max_size=50),
)
def test_a_balloon_stops_at_its_mark(left_bytes: int, others: list[int]) -> None:
    """Whatever others take (or give back) meanwhile, a step never goes below the mark."""
    available_bytes = left_bytes + (1 << 31)
    moves = iter(others)

    def available() -> int:
        nonlocal available_bytes
        available_bytes -= next(moves, 0)
        return available_bytes

    def take(num_bytes: int) -> range:
        nonlocal available_bytes
        available_bytes -= num_bytes
        assert available_bytes >= left_bytes
        return range(num_bytes)  # has a length, as memory has

    balloon.inflate(left_bytes, available, take, lambda: True)
    assert available_bytes <= left_bytes + balloon.TOLERANCE_BYTES
    assert balloon.inflate(0, lambda: 1 << 40, take, lambda: False) == []


def test_room_is_what_others_leave() -> None:
    """Memory that this process takes itself is still its own; a limit that moved is refused."""

    def stays() -> bool:
        watched = memory.RoomWatch()
        with watched:
            block = torch.ones(64 << 20)  # 256 MiB, every page touched
        before, after = watched.least_bytes, memory.room_bytes()
        return block.nbytes > 2 * abs(after - before) and watched.most_bytes >= before

    wait_until(stays)  # but while others take or give back as much
    assert memory.moved_share(1000, 990, 1020) == 0.02 == memory.moved_share(1000, 980, 1010)
    row = {"room_at_start_bytes": 500, "room_least_bytes": 990, "room_most_bytes": 1020}
    assert "refused" not in larger_than_memory.judged(row, 1000)
    assert "10.0%" in larger_than_memory.judged(row, 1100)["refused"]
    assert "104.0%" in larger_than_memory.judged(row, None)["refused"]


def test_the_page_cache_says_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    os.truncate(path, 4 << 20)  # what was never written is in no page
    assert memory.cached_share(path, [(0, 1 << 19), (1 << 19, 1 << 20)]) == 1
    assert memory.cached_share(path, [(0, 2 << 20)]) == 0.5
    assert memory.cached_share(path, [(2 << 20, 4 << 20)]) == 0


def test_peak_memory_can_start_again() -> None:
    block = torch.ones(16 << 20)
    with_block = memory.peak_resident_bytes()
    assert with_block >= block.nbytes
    del block
    memory.reset_peak()
    assert memory.peak_resident_bytes() <= with_block


def test_ceilings_are_positive(tiny: Path) -> None:
    rates = ceilings.Disk(tiny, 24576, 1 << 18).measure()
    rates |= ceilings.memory_ceiling(1 << 16, repeats=1)
    assert all(rate > 0 for name, rate in rates.items() if name.endswith("GBps"))
    assert {"random_read_GBps", "sequential_read_GBps"} <= rates.keys()


def test_cached_and_recomputed_runs_write_the_same(tiny: Path) -> None:
    options = EngineConfig(context=128, dtype="float32")
    with run.loaded_engine(str(tiny), options) as engine, engine.executor.in_charge():
        config = engine.model.config
        done = [
            run.decode(run.engine_decoder(engine, use), run.make_request(config, 40, 64, seed=0))
            for use in (True, False)
        ]
        first = run.decode(run.engine_decoder(engine), run.make_request(config, 40, 64, 0), 2)
    assert done[0].token_ids == done[1].token_ids
    assert [each.num_tokens for each in done] == [64, 64]
    assert (first.num_forwards, first.token_ids) == (2, ())


def test_the_worker_reports_reads_and_memory(tiny: Path) -> None:
    least = plan_model(tiny, context=128).minimum_bytes
    settings = {
        "model": str(tiny),
        "budget_bytes": least,
        "context": 128,
        "policy": "tide",
        "policy_options": {"tau": "2"},
        "num_prompt": 8,
        "num_new": 32,
        "repeats": 3,
    }
    row = worker.run_lowtide(settings)
    assert (row["num_tokens"], row["hit_rate"], row["resident_share"]) == (96, 0.0, 0.0)
    assert len(row["each_tokens_per_s"]) == 3 and row["tokens_per_s"] in row["each_tokens_per_s"]
    assert row["read_bytes"] > 0
    assert row["budget_bytes"] == least >= row["used_bytes"]


def test_a_task_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.sys, "executable", "false")
    with pytest.raises(InternalError, match="nothing"):
        worker.in_process("nothing", {}, memory.choose_limit("none"), 0)


def run_offload(
    model: Path, out: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> list[dict[str, Any]]:
    """The rows of `benchmarks/offload.py`, whose runs a test replaces."""
    disk = SimpleNamespace(measure=dict)
    monkeypatch.setattr(offload, "Disk", lambda *_: disk)
    monkeypatch.setattr(offload, "memory_ceiling", dict)
    told = ["--model", str(model), "--weights", "--limit", "none", "--out", str(out), *arguments]
    monkeypatch.setattr(sys, "argv", ["offload.py", *told])
    offload.main()
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_budgets_hold_their_share_of_the_experts(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks: list[dict[str, Any]] = []

    def measure(task: dict[str, Any], *_: object) -> dict[str, Any]:
        tasks.append(task)
        return {}

    monkeypatch.setattr(offload, "measure_lowtide", measure)
    told = ("--shares", "1", "0.5", "0", "--peer-shares")
    rows = run_offload(tiny, tmp_path / "out", monkeypatch, *told)
    shares = [row["experts_in_memory"] for row in rows if row["what"] == "lowtide"]
    assert shares == [1.0, 0.5, "least"]
    for share, task in zip(shares, tasks, strict=True):
        budget_bytes, context = task["budget_bytes"], task["context"]
        plan = plan_model(tiny, context=context)
        chosen = plan_model(tiny, context=context, host_memory=budget_bytes)
        if share == "least":
            assert chosen.minimum_bytes == budget_bytes and not sum(chosen.residents_per_layer)
        else:
            assert chosen.host.num_slots == share * plan.num_experts


def test_a_model_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = models.model_folder(None, "tiny")
    before = (folder / "config.json").stat().st_mtime_ns
    assert models.model_folder(None, "tiny") == folder and tmp_path in folder.parents
    assert (folder / "config.json").stat().st_mtime_ns == before
    with pytest.raises(UsageError, match="config.json"):
        models.model_folder(tmp_path, "tiny")


def test_the_peer_is_the_same_function(tiny: Path, tmp_path: Path) -> None:
    folder = peer.convert(tiny, tmp_path / "peer")
    assert peer.convert(tiny, folder) == folder
    token_ids = torch.arange(3, 43)
    with LLM(tiny, dtype="float32", context=64, block_length=8) as llm:
        wanted = llm.logits(token_ids.tolist())
    model = peer.load_peer(folder, None, str(tmp_path)).float()
    segment = Segment(0, 40, 0, 8, KVRange(0, 48))
    batch = Batch(token_ids, torch.arange(40), (segment,), Step(StepKind.DENOISE, 0))
    adapter = peer.PeerModel(model, [folder])
    with torch.inference_mode():
        logits = adapter.logits(adapter.forward(batch))
    torch.testing.assert_close(logits, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("shares", [["0.5"], ["1"]], ids=["ours beside it", "alone"])
def test_the_peer_is_measured_with_its_page_cache_and_without(
    shares: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = synth("llada2", "tiny", tmp_path / "tiny")  # a folder beside it is made
    ours = {"num_tokens": 96, "num_forwards": 24, "tokens_per_s": 50.0}
    monkeypatch.setattr(offload, "measure_lowtide", lambda *_: ours)

    def in_process(name: str, task: dict[str, Any], *_: object) -> dict[str, Any]:
        assert name == "peer"
        return peer.measure({**task, "max_memory_bytes": 4 << 20})

    monkeypatch.setattr(offload, "in_process", in_process)
    told = ("--prompt", "8", "--new", "32", "--shares", *shares)
    rows = run_offload(model, tmp_path / "out", monkeypatch, *told)
    cold, warm = (row for row in rows if row["what"].startswith("transformers"))
    assert (cold["page_cache"], warm["page_cache"]) == ("dropped before every pass", "kept")
    for row in (cold, warm):
        assert len(row["each_s_per_forward"]) == 3 and 0 <= row["resident_share"] < 1
        if shares == ["1"]:  # which is not the peer's budget
            assert "ratio" not in row and "tokens_per_s" not in row
            continue
        speeds = [4 / seconds for seconds in row["each_s_per_forward"]]
        assert row["each_tokens_per_s"] == pytest.approx(speeds, rel=1e-3)
        assert row["ratio"] == pytest.approx(50.0 / row["tokens_per_s"], rel=1e-3)


def test_an_autoregressive_lane_is_measured_under_a_budget(tmp_path: Path) -> None:
    model = synth("qwen3_moe", "tiny", tmp_path / "tiny")
    plan = plan_model(model, context=96)
    settings = {
        "lane": "lowtide",
        "model": str(model),
        "gguf": "",
        "policy": "lru",
        "context": 96,
        "budget_bytes": plan.full_bytes - plan.num_experts * plan.host.slot_bytes // 2,
        "num_prompt": 80,
        "num_new": 4,
        "repeats": 3,
    }
    row = causal.measure(settings)
    assert 0 < row["resident_share"] < 1 and row["storage_read_bytes_per_answer"] > 0
    assert row["prefill_tokens_per_s"] > 0 < row["decode_tokens_per_s"]
    assert row["first_decode_tokens_per_s"] > 0 and len(row["each_decode"]) == 2
    assert 0 < row["room_least_bytes"] <= row["room_most_bytes"]
    with pytest.raises(UsageError, match="2 or more"):
        causal.measure(settings | {"repeats": 1})
    with pytest.raises(UsageError, match="no lane"):
        causal.measure(settings | {"lane": "another"})


def test_presets_take_turns_on_one_emulated_engine(tiny: Path, tmp_path: Path) -> None:
    model = emulated.Model("tiny", str(tiny), num_layers=4)
    learned, calibration = emulated.learn(model, tmp_path, num_new=8)
    device, link, latency, host = map(float, emulated.device_options(model).values())
    assert link > 0 == latency and device > 1 < host
    speeds = {"link_GBps": "100", "link_latency_us": "0", "host_slowdown": "1"}
    with emulated.Track.open(model, 0.5, speeds, calibration) as track:
        assert track.describe()["num_residents"] == track.describe()["num_experts"] // 2
        for preset, options in (("tide", {"tau": 1, "waits": True}), ("layer-split", {})):
            track.adopt(preset, options)
            stretch = track.answer(learned.prompts[0], learned.params, learned.token_ids[0])
            row = emulated.stretches_row([stretch, stretch])
            assert row["least"] == row["tokens_per_s"] == row["most"] > 0
            assert 0 < row["experts_share"] < 1 and stretch.num_tokens == 8
        with pytest.raises(InternalError, match="something else"):
            track.answer(learned.prompts[0], learned.params, [])
    validate = import_module("simulate")
    first = validate.first_answer(learned.trace)
    assert first.num_committed == 8 and len(first.passes) < len(learned.trace.passes)
    setting = PolicyInputs([32] * 3, 64, load_profile("rtx3090").costs(MoEShape(*first.shape)))
    report = simulate(first, "tide", setting)
    assert report.num_passes == stretch.totals["num_passes"]
    predicted_s = stretch.s_per_pass
    assert validate.compared(predicted_s * 1.04, [stretch])["holds"]
    assert not validate.compared(predicted_s * 1.3, [stretch])["holds"]


def test_presets_take_turns_where_experts_lie_on_disk(tiny: Path, tmp_path: Path) -> None:
    model = emulated.Model("tiny", str(tiny), num_layers=4)
    learned, calibration = emulated.learn(model, tmp_path, num_new=8)
    memory = disk_home.measure_in_memory(model, learned)
    assert 0 < memory.experts_s < memory.pass_s
    known = Calibration.load(calibration)
    validate = import_module("simulate")
    first = validate.first_answer(learned.trace)
    with disk_home.DiskTrack.open(model, 0.5, calibration) as track:
        memory, measured = disk_home.InMemory(1.0, 0.25), track.measure()
        around_s = track.around_reads_s(learned)
        assert around_s > 0
        costs = disk_home.replay_costs(measured, memory, 0.5, around_s, 3)
        assert costs.link_s > 0 and costs.dense_s.at(1) == 0.25 and costs.sync_s == around_s
        assert costs.device_s.at(1) == measured.device_s.at(1) / 2
        for name in ("static", "lru"):
            track.adopt(name, {})
            stretch = track.answer(learned)
            setting = PolicyInputs(
                track.llm.plan.residents_per_layer,
                known.shape.num_experts,
                costs,
                frequency=known.frequency,
                following=known.following,
                hits=known.trace.hits(),
            )
            [report] = compare_alone(first, [name], setting)
            row = validate.counted(report, [stretch], validate.COUNTED_ON_DISK)
            assert report.num_passes == stretch.totals["num_passes"]
            assert all(one["measured"] == [one["predicted"]] for one in row.values()), name


def test_only_presets_that_may_decide_something_go_on() -> None:
    policies = import_module("policies")
    names = ("lru", "tide", "tide tau=1", "dali", "layer-split", "lowtide", "static")
    assert policies.contenders(names, {}) == list(names)
    # 1.1 is near the 1.2 expected, 3 is far from 1.3; static may be the fastest.
    speeds = {"lru": 1, "tide": 33, "tide tau=1": 30, "dali": 30, "layer-split": 10}
    speeds |= {"lowtide": 80, "static": 70}
    taken = {
        name: [emulated.Stretch(speed, emulated.Totals({"seconds": 1.0}), [])]
        for name, speed in speeds.items()
    }
    assert policies.contenders(names, taken) == ["tide", "tide tau=1", "lowtide", "static"]


def test_what_is_expected_of_presets_is_a_ratio() -> None:
    policies = import_module("policies")
    speeds = {"tide tau=1": 1.0, "tide": 2.0, "dali": 4.0, "hybrimoe": 2.0, "lowtide": 3.0}
    assert policies.expectations(speeds) == {
        "tide / tide tau=1": 2.0,
        "dali / hybrimoe": 2.0,
        "lowtide / best other": 0.75,
        "lowtide / tide or dali": 0.75,
    }
