"""The host's work beside a GPU: calls and launches of a token and layer, by count and not by clock.

On the stand-in of `late_cuda.py`, whose Triton kernels here do nothing but route at random, and
whose events have ended when they are asked for. So the counts are the same under any load.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

import pytest

pytest.importorskip("triton")

import late_cuda as stand_in
import torch
from late_cuda import CudaTensor, LateEvent, LateGpu, LateStream, late_cuda
from triton.runtime.interpreter import InterpretedFunction

import lowtide
from lowtide.core import Costs, Curve
from lowtide.engine.running import device as device_engine
from lowtide.experts.idle_time import IdleTime
from lowtide.llm import LLM, plan_model
from lowtide.model_writing.synth import synth
from lowtide.models.decoder import Decoder
from lowtide.params import SamplingParams
from lowtide.threads.executor import HostExecutor

PACKAGE = str(Path(lowtide.__file__).parent)
OPTIONS: dict[str, Any] = {"device": "cuda", "context": 128, "dtype": "float32"}
PROMPT = [7, 3, 120, 9]
NUM_PASSES = 6  # of one token each, of which the first makes what the others find


class Count(NamedTuple):
    """Of one pass: calls of lowtide's functions, and work that was queued on the GPU."""

    calls: int
    launches: int


class Counter:
    """Counts a decoder's passes."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.passes: list[Count] = []
        self._calls = self._launches = 0
        patch.setattr(Decoder, "forward", self._counting(Decoder.forward))
        patch.setattr(LateGpu, "put", self._launching(LateGpu.put))

    def _counting(self, forward: Any) -> Any:
        def counted(decoder: Decoder, batch: Any) -> Any:
            self._calls = self._launches = 0
            sys.setprofile(self._saw)
            try:
                return forward(decoder, batch)
            finally:
                sys.setprofile(None)
                self.passes.append(Count(self._calls, self._launches))

        return counted

    def _launching(self, put: Any) -> Any:
        def counted(gpu: LateGpu, work: Any) -> None:
            self._launches += 1
            put(gpu, work)

        return counted

    def _saw(self, frame: FrameType, event: str, _: object) -> None:
        self._calls += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)


def uncounted(work: Any) -> Any:
    """Let work that is not the engine's thread's be done on it, without its calls."""

    def run(*arguments: Any) -> Any:
        profile = sys.getprofile()
        sys.setprofile(None)
        try:
            return work(*arguments)
        finally:
            sys.setprofile(profile)

    return run


def submit_at_once(executor: HostExecutor, work: Any) -> Future[None]:
    future: Future[None] = Future()
    work()
    future.set_result(None)
    return future


def ended(event: LateEvent) -> bool:
    event.stream.run_to(event.position)
    return True


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """Threads, clocks and kernels whose calls are the same in every run."""
    curve = Curve([(1, 1e-4), (512, 1e-3)])
    costs = Costs(1, 2e-4, curve, curve.scaled(0.3), curve, 1e-5)
    stored = SimpleNamespace(costs=costs)
    monkeypatch.setattr(device_engine, "stored_or_measured", lambda key, measure: stored)
    monkeypatch.setattr(IdleTime, "expected_s", lambda self, layer, known_s: known_s)
    monkeypatch.setattr(HostExecutor, "submit", uncounted(submit_at_once))
    monkeypatch.setattr(LateStream, "step_towards", uncounted(LateStream.step_towards))
    monkeypatch.setattr(LateEvent, "query", uncounted(ended))
    # Numbers that nothing computes are zeros.
    monkeypatch.setattr(stand_in, "garbage", zeros_like)
    dispatch = stand_in.Operators.__torch_dispatch__

    def zeroed(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = dispatch(mode, func, types, args, kwargs)
        if func is torch.ops.aten.empty.memory_format and isinstance(made, CudaTensor):
            made.elements.zero_()
        return made

    monkeypatch.setattr(stand_in.Operators, "__torch_dispatch__", zeroed)
    draw = random.Random(0)

    def route(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **_: Any) -> None:
        if kernel.__name__ == "_choose_experts":
            experts, weights, num_experts, num_chosen = arguments[2:6]
            for row in experts:
                row.copy_(torch.tensor(sorted(draw.sample(range(num_experts), num_chosen))))
            weights.fill_(1 / num_chosen)

    monkeypatch.setattr(InterpretedFunction, "run", route)
    return Counter(monkeypatch)


def zeros_like(leaf: Any) -> Any:
    is_tensor = isinstance(leaf, torch.Tensor)
    return torch.zeros(leaf.shape, dtype=leaf.dtype) if is_tensor else leaf


@contextmanager
def opened(folder: Path, share: float, policy: str, patch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """The model with a share of the experts' bytes beyond the least budget."""
    with late_cuda(patch):
        plan = plan_model(folder, **OPTIONS)
        budget = plan.minimum_bytes + int(share * (plan.full_bytes - plan.minimum_bytes))
        with LLM(folder, gpu_memory=budget, policy=policy, **OPTIONS) as llm:
            yield llm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth("qwen3_moe", "tiny", tmp_path_factory.mktemp("calls") / "model", seed=5)


# Reached, with compiled decisions and, where all is resident, with graphs, one of whose six passes
# is the one that is captured. When first counted: 218 resident; 463, 427, 477 at half.
@pytest.mark.parametrize(
    ("share", "policy", "most_calls", "most_launches"),
    [
        (1.0, "lowtide", 44, 15),
        (0.5, "lowtide", 200, 36),
        (0.5, "tide", 180, 33),
        (0.5, "lru", 192, 37),
    ],
)
def test_a_token_and_layer_cost_the_host_a_bounded_number_of_calls(
    share: float,
    policy: str,
    most_calls: int,
    most_launches: int,
    folder: Path,
    counter: Counter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with opened(folder, share, policy, monkeypatch) as llm:
        counter.passes.clear()
        llm.generate([PROMPT], SamplingParams(max_tokens=NUM_PASSES + 2, ignore_eos=True))
        num_layers = len(llm.plan.residents_per_layer)
        decoded = counter.passes[-NUM_PASSES:]
    num_steps = num_layers * len(decoded)
    assert len(counter.passes) == NUM_PASSES + 2
    assert sum(each.calls for each in decoded) <= most_calls * num_steps
    assert sum(each.launches for each in decoded) <= most_launches * num_steps
