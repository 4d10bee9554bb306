"""How many torch threads a product has: on some machines its bits depend on that.

On an AMD Zen 5 float32 products of 5 to 7 rows have other bits with two threads than with one. So
here every product tells its count, which fails on any machine, whatever its products do.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from computing import on_this_thread

import lowtide
from lowtide.engine.opening import model as opening
from lowtide.families import read_config_in
from lowtide.kernels.reference import REFERENCE, Kernels
from lowtide.layers import causal_attention
from lowtide.layers import linear as linear_module
from lowtide.layers.linear import Linear
from lowtide.llm import LLM, plan_model
from lowtide.model_writing.synth import synth
from lowtide.params import SamplingParams
from lowtide.threads import executor as executor_module
from lowtide.threads.executor import HostExecutor

CORES_PER_EXPERT = [1, 2, 4]
EXPERT, PIECE = "of an expert", "of a layer"
CALLER, WORKER, DEVICE = "MainThread", "lowtide-compute", "lowtide-device"


@functools.cache
def openmp() -> ctypes.CDLL | None:
    """The OpenMP that torch brings along."""
    files = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    return ctypes.CDLL(str(files[0])) if files else None


def num_threads_here() -> int:
    """Of a product on this thread.

    `torch.get_num_threads` would give a thread that nobody told the process's number first.
    """
    library = openmp()
    return torch.get_num_threads() if library is None else int(library.omp_get_max_threads())


class Told:
    """Thread counts of the products, by kind and thread."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], set[int]] = defaultdict(set)
        self._here = threading.local()

    def telling(self, product: Callable[..., Any], kind: str = PIECE) -> Callable[..., Any]:
        """`product`, which tells first; what it calls is of its kind."""

        @functools.wraps(product)
        def told(*arguments: Any, **options: Any) -> Any:
            outer = getattr(self._here, "kind", None)
            self._here.kind = outer or kind
            thread = threading.current_thread().name.split("_")[0]
            self.counts[self._here.kind, thread].add(num_threads_here())
            try:
                return product(*arguments, **options)
            finally:
                self._here.kind = outer

        return told

    def kernels(self) -> Kernels:
        told = self

        class Telling(Kernels):
            multiply = staticmethod(told.telling(REFERENCE.multiply))
            gated_mlp = staticmethod(told.telling(REFERENCE.gated_mlp, EXPERT))

        return Telling()

    def of(self, kind: str) -> dict[str, set[int]]:
        """By thread."""
        return {thread: counts for (k, thread), counts in self.counts.items() if k == kind}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """Of all products of a model, the router's and attention's too, its layers cut into pieces."""
    told = Told()
    monkeypatch.setattr(linear_module, "SPLIT_BYTES", 0)
    monkeypatch.setattr(causal_attention, "SPLIT_OPERATIONS", 1)
    monkeypatch.setattr(opening, "choose_kernels", lambda *_, **__: told.kernels())
    for owner, name in (
        (torch, "mm"),
        (torch, "addmm"),
        (torch, "bmm"),
        (torch, "matmul"),
        (F, "linear"),
        (F, "scaled_dot_product_attention"),
        (causal_attention, "flash"),
    ):
        monkeypatch.setattr(owner, name, told.telling(getattr(owner, name)))
    return told


@pytest.fixture(scope="module", params=["llada2", "qwen3_moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth(request.param, "tiny", tmp_path_factory.mktemp("threads") / "model", seed=3)


def have_cores(monkeypatch: pytest.MonkeyPatch, num_cores: int) -> None:
    """As many CPUs, none of which a thread can be kept to."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_cores)))
    monkeypatch.setattr(executor_module, "core_shares", lambda *_: [])


def ask(llm: LLM) -> None:
    """Long prompts and short steps."""
    llm.generate([list(range(3, 40)), [5, 17]], SamplingParams(max_tokens=9))
    llm.logits(list(range(100, 123)))


@pytest.mark.parametrize("cores_per_expert", CORES_PER_EXPERT)
@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_every_product_of_a_kind_has_one_count_wherever_it_runs(
    device: str,
    cores_per_expert: int,
    model: Path,
    told: Told,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the calling thread, on compute threads and on an emulated device."""
    options: dict[str, Any] = {"device": device, "dtype": "float32", "context": 128}
    have_cores(monkeypatch, read_config_in(model).moe.num_experts_per_token * cores_per_expert)
    with LLM(model, policy="tide", **options, **budget(model, options)) as llm:
        ask(llm)
    of_experts, of_pieces = told.of(EXPERT), told.of(PIECE)
    if device == "cpu":
        assert WORKER in of_experts and {CALLER, WORKER} <= of_pieces.keys()
    else:
        assert {WORKER, DEVICE} <= of_experts.keys() and CALLER in of_pieces
    # Measuring, when a model is opened, is the caller's.
    assert set().union(*of_experts.values()) == {cores_per_expert}
    assert set().union(*of_pieces.values()) == {1}


def budget(model: Path, options: dict[str, Any]) -> dict[str, int]:
    """For about half of the experts."""
    plan = plan_model(model, **options)
    half = (plan.minimum_bytes + plan.full_bytes) // 2
    return {"host_memory" if options["device"] == "cpu" else "gpu_memory": half}


@pytest.fixture(params=CORES_PER_EXPERT)
def executor(request: pytest.FixtureRequest) -> Iterator[HostExecutor]:
    executor = HostExecutor(2, num_cores=2 * request.param)
    assert executor.num_threads == 2
    yield executor
    executor.close()


def test_a_divided_layer_has_the_count_of_a_whole_one(
    executor: HostExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told()
    layer = Linear(torch.ones(128, 8), on_this_thread(None, told.kernels(), executor))
    with executor.in_charge():
        for split_bytes in (0, 1 << 30):
            monkeypatch.setattr(linear_module, "SPLIT_BYTES", split_bytes)
            executor.submit(lambda: None).result()  # an expert, between two layers
            layer.forward(torch.ones(3, 8), torch.empty(3, 128))
    assert told.of(PIECE) == {CALLER: {1}, WORKER: {1}}


def test_uneven_shares_of_the_cores_give_every_expert_as_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two CPUs of one core, and one each of two others."""
    shares = [frozenset({0, 1}), frozenset({2})]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(executor_module, "core_shares", lambda *_: shares)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    executor, counts = HostExecutor(2), set()
    both = threading.Barrier(2, timeout=60)

    def note() -> None:
        both.wait()
        counts.add(num_threads_here())

    try:
        for work in [executor.submit(note) for _ in range(2)]:
            work.result()
    finally:
        executor.close()
    assert counts == {1}


def test_one_file_says_how_many() -> None:
    """A thread that said so by itself could say something else."""
    package = Path(lowtide.__file__).parent
    files = [path.name for path in package.rglob("*.py") if "set_num_threads(" in path.read_text()]
    assert files == ["executor.py"]
