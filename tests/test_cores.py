"""The option `cores`: what a process computes and reads on, and that processes share none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import python

from lowtide.errors import UsageError
from lowtide.threads.cores import by_core, parse_cores

needs_two = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core affinity")

# Every thread of a process that answers, and the cores it may use.
_THREADS = """
import json, os, sys
from lowtide import LLM
cores = json.loads(sys.argv[1])
with LLM("demo:autoregressive", host_memory="6MiB", context=256, cores=cores) as llm:
    [answer] = llm.generate("Sort 93 21 57 40 12", max_tokens=4)
    tasks = os.listdir("/proc/self/task")
    masks = {name: sorted(os.sched_getaffinity(int(name))) for name in tasks}
print(json.dumps([answer.token_ids, masks]))
"""


@given(st.sets(st.integers(0, 300), min_size=1))
def test_a_list_is_read_as_linux_writes_one(cpus: set[int]) -> None:
    text = ",".join(map(str, sorted(cpus)))
    if not text.isdecimal():
        assert parse_cores(text) == cpus
    assert parse_cores(f"{text},{max(cpus)}-{max(cpus)}") == parse_cores(sorted(cpus)) == cpus


@pytest.mark.parametrize(
    "given",
    [
        *(
            "",
            "0",
            "a",
            "1,",
            "3-",
            "-3",
            "0-99999999",
            "1-2-3",
            "+4",
            "0_1",
            "4.0",
            "٤",
            "9" * 5000,
        ),
        *(0, -1, True, 1.5, 10**5000, {}, [], [0.5], [-1], [10**5000]),
    ],
    ids=lambda given: type(given).__name__,
)
def test_what_is_no_cores_is_refused(given: object) -> None:
    with pytest.raises(UsageError, match="cores"):
        parse_cores(given)


@pytest.mark.parametrize("around", ["", " ", "\n", "\t "])
def test_a_range_may_be_one_core(around: str) -> None:
    assert parse_cores(f"{around}3-3{around}") == {3}
    assert parse_cores(f"{around}3{around}") == 3
    assert parse_cores(f"0,{around}2-3{around}") == {0, 2, 3}


@needs_two
@pytest.mark.parametrize("kind", ["number", "list"])
def test_every_thread_stays_inside(kind: str) -> None:
    last = max(os.sched_getaffinity(0))
    cores = 1 if kind == "number" else [last]
    ids, masks = json.loads(python("-c", _THREADS, json.dumps(cores)).stdout)
    kept = {tuple(mask) for mask in masks.values()}
    assert len(kept) == 1 and len(masks) > 2
    assert kept == {(last,)} or kind == "number" and len(kept.pop()) == 1
    free_ids, _ = json.loads(python("-c", _THREADS, "null").stdout)
    assert ids == free_ids


@needs_two
def test_processes_that_ask_for_numbers_share_no_core() -> None:
    hold = (
        "import os, sys; from lowtide.threads.cores import keep_to; keep_to(1);"
        "print(*os.sched_getaffinity(0), flush=True); sys.stdin.read()"
    )
    num_cores = len(os.sched_getaffinity(0))
    seen = []
    with ExitStack() as stack:
        for _ in range(num_cores):
            command = [sys.executable, "-c", hold]
            pipe = subprocess.PIPE
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
            stack.enter_context(process)
            assert process.stdout is not None
            seen.append(process.stdout.readline().split())
        assert sorted(cpu for [cpu] in seen) == sorted(map(str, os.sched_getaffinity(0)))
        refused = subprocess.run([sys.executable, "-c", hold], capture_output=True, text=True)
        assert f"{num_cores} of them are taken" in refused.stderr
        process.kill()  # whose core is free again at once, however it ends
        process.wait()
        again = subprocess.run(
            [sys.executable, "-c", hold], input="", capture_output=True, text=True, check=True
        )
        assert again.stdout.split() == seen[-1]


@needs_two
def test_a_plan_looks_at_cores_that_another_process_has() -> None:
    hold = (
        "import os, sys; from lowtide.threads.cores import keep_to;"
        "keep_to(len(os.sched_getaffinity(0))); print(flush=True); sys.stdin.read()"
    )
    plan = """
import os
from lowtide.errors import UsageError
from lowtide.llm import plan_model
from lowtide.threads.cores import keep_to
usable = os.sched_getaffinity(0)
for cores in (1, [max(usable)], len(usable)):
    plan_model("demo:autoregressive", device="cpu", cores=cores)
    print(len(os.sched_getaffinity(0)))
try:
    keep_to(1)
except UsageError as error:
    print("taken by other processes" in str(error))
"""
    num_cores = len(os.sched_getaffinity(0))
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", hold], stdin=pipe, stdout=pipe, text=True
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        told = python("-c", plan).stdout
        holder.kill()
    assert told.split() == ["1", "1", str(num_cores), "True"]


def test_a_process_keeps_to_its_first_choice() -> None:
    told = python(
        "-c",
        """
import os
from lowtide.errors import UsageError
from lowtide.threads.cores import keep_to
cpu = min(os.sched_getaffinity(0))
keep_to(frozenset({cpu}))
keep_to(frozenset({cpu}))
for other in (1, frozenset({cpu + 1})):
    try:
        keep_to(other)
    except UsageError as error:
        print("for its life" in str(error))
""",
    ).stdout
    assert told.split() == ["True", "True"]


def test_cores_that_the_process_may_not_use_are_refused() -> None:
    told = python(
        "-c",
        """
from lowtide.errors import UsageError
from lowtide.threads.cores import keep_to
try:
    keep_to(frozenset({60000}))
except UsageError as error:
    print(error)
""",
    ).stdout
    assert "60000" in told and "may use" in told


def test_hyper_threads_of_a_core_are_one_group(tmp_path: Path) -> None:
    for cpu in range(4):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 2},{cpu % 2 + 2}\n")
    assert by_core(range(4), tmp_path) == [{0, 2}, {1, 3}]
    assert by_core([0, 1, 3], tmp_path) == [{0}, {1, 3}]
