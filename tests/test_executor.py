"""Compute threads: work is done once, errors come back, torch's settings stay."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from lowtide.errors import PlanError
from lowtide.threads import executor as executor_module
from lowtide.threads.cores import siblings_of
from lowtide.threads.executor import Executor, HostExecutor, InlineExecutor, core_shares


@pytest.fixture
def executor() -> Iterator[HostExecutor]:
    executor = HostExecutor(num_experts_per_token=4)
    yield executor
    executor.close()


@pytest.mark.parametrize("is_inline", [False, True])
def test_all_work_is_done_once(is_inline: bool, executor: HostExecutor) -> None:
    chosen: Executor = InlineExecutor() if is_inline else executor
    done: list[int] = []
    chosen.run([partial(done.append, i) for i in range(20)])
    assert sorted(done) == list(range(20))
    for i in range(20, 30):
        assert chosen.submit(partial(done.append, i)).result() is None
    assert sorted(done) == list(range(30))


@pytest.mark.parametrize("which", [0, 3])
def test_an_error_comes_back_after_all_work_ended(which: int, executor: HostExecutor) -> None:
    done: list[int] = []

    def work(i: int) -> None:
        done.append(i)
        if i == which:
            raise ZeroDivisionError(f"work {i}")

    with pytest.raises(ZeroDivisionError, match=f"work {which}"):
        executor.run([partial(work, i) for i in range(8)])
    assert sorted(done) == list(range(8))
    with pytest.raises(ZeroDivisionError, match=f"work {which}"):
        executor.submit(partial(work, which)).result()


def test_a_thread_that_the_system_refuses_leaves_none_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[threading.Thread] = []
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if begun:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(PlanError, match="refuses one of 2 threads .*ulimit -u"):
        HostExecutor(num_experts_per_token=2, num_cores=2)
    [thread] = begun
    thread.join(60)
    assert thread.name.startswith("lowtide-compute") and not thread.is_alive()


def test_torch_keeps_its_threads_and_workers_make_no_gradients() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    executor = HostExecutor(num_experts_per_token=4)
    try:
        assert torch.get_num_threads() == 3
        with executor.in_charge():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
        modes: list[bool] = []
        executor.submit(lambda: modes.append(torch.is_inference_mode_enabled())).result()
        assert modes == [True]
        assert torch.get_num_threads() == 3
    finally:
        executor.close()
        torch.set_num_threads(before)


def test_every_thread_is_made_at_once_and_ends_at_the_close() -> None:
    """A thread made later would change the process's setting while it is in use."""
    before = set(threading.enumerate())
    executor = HostExecutor(num_experts_per_token=8)
    made = set(threading.enumerate()) - before
    assert len(made) == executor.num_threads
    assert all(thread.name.startswith("lowtide-compute") for thread in made)
    executor.close()
    assert not made & set(threading.enumerate())


def test_no_more_threads_than_experts_of_a_token() -> None:
    executor = HostExecutor(num_experts_per_token=1)
    try:
        assert executor.num_threads == 1
    finally:
        executor.close()


def describe_cores(folder: Path, cores: list[str]) -> Path:
    """As Linux does: the CPUs of each core."""
    for text in cores:
        for cpu in siblings_of(text):
            topology = folder / f"cpu{cpu}" / "topology"
            topology.mkdir(parents=True)
            (topology / "thread_siblings_list").write_text(text + "\n")
    return folder


def test_threads_share_out_whole_cores(tmp_path: Path) -> None:
    folder = describe_cores(tmp_path, ["0,4", "1,5", "2-3", "6"])
    every = range(7)
    assert core_shares(4, every, folder) == core_shares(9, every, folder) == []
    assert core_shares(3, every, folder) == [{0, 4}, {1, 5}, {2, 3}]
    assert core_shares(2, every, folder) == [{0, 4, 1, 5}, {2, 3, 6}]
    assert core_shares(1, [3, 6], folder) == [{3, 6}]
    # Where the system does not tell, every CPU counts as a core.
    assert core_shares(1, [0, 1], tmp_path / "nothing") == [{0, 1}]


def test_every_thread_keeps_to_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = [frozenset({100 + i}) for i in range(3)]
    kept: dict[int, frozenset[int]] = {}
    monkeypatch.setattr(executor_module, "core_shares", lambda *_: shares)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda _, share: kept.update({threading.get_ident(): share})
    )
    executor = HostExecutor(num_experts_per_token=3)
    executor.close()
    assert sorted(kept.values(), key=min) == shares and threading.get_ident() not in kept
    kept.clear()
    HostExecutor(num_experts_per_token=3, num_cores=2).close()  # a part of the machine: anywhere
    assert not kept


def test_a_share_that_was_taken_away_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "core_shares", lambda *_: [frozenset({1 << 20})])
    executor = HostExecutor(num_experts_per_token=1)
    try:
        assert executor.submit(lambda: None).result() is None
    finally:
        executor.close()
