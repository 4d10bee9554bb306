"""Passes that graphs repeat: what the host says, and every graph captured once.

Kernels are torch's in place of Triton's, whose interpreter is slow and has tests of its own.
Experts' read their slots when a GPU would.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
from hypothesis import given
from hypothesis import strategies as st
from late_cuda import CudaTensor, LateGpu, LateGraph, late_cuda

from lowtide.core import Costs, Curve, Step
from lowtide.devices import cuda
from lowtide.engine.running import device as device_engine
from lowtide.errors import DeviceError
from lowtide.experts.layout import ExpertLayout, SlotLayout
from lowtide.families import families
from lowtide.kernels import choice, triton_experts
from lowtide.kernels.reference import REFERENCE, Kernels
from lowtide.layers.attention import CachedAttention
from lowtide.llm import LLM, plan_model
from lowtide.model_writing.synth import synth
from lowtide.models import captured_passes
from lowtide.params import DiffusionParams, SamplingParams

OPTIONS: dict[str, Any] = {"context": 128, "dtype": "float32"}
PROMPTS = [[7, 3, 120, 9], [44, 3, 3]]


def elements(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.elements if isinstance(tensor, CudaTensor) else tensor


class QueuedExperts:
    """Stands for Triton's kernels of experts: queues torch's products, without a look at counts."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.gpu: LateGpu
        self.layouts: dict[Any, ExpertLayout] = {}
        self.planned: tuple[torch.Tensor, torch.Tensor]  # counts, slots
        self.slot_image = cuda.slot_image
        patch.setattr(choice, "_triton", Kernels)
        patch.setattr(cuda, "slot_image", self.image)
        for name in ("plan_tiles", "gated_mlps", "place_rows"):
            patch.setattr(triton_experts, name, getattr(self, name))
        curve = Curve([(1, 1e-4), (512, 1e-3)])
        stored = SimpleNamespace(costs=Costs(1, 2e-4, curve, curve.scaled(0.3), curve, 1e-5))
        patch.setattr(device_engine, "stored_or_measured", lambda key, measure: stored)

    def image(self, layout: ExpertLayout, slots: SlotLayout) -> Any:
        image = self.slot_image(layout, slots)
        self.layouts[image] = layout
        return image

    def plan_tiles(
        self, counts: torch.Tensor, slots: torch.Tensor, tile_rows: int, tiles: Any
    ) -> None:
        self.planned = counts, slots

    def gated_mlps(
        self,
        slots: torch.Tensor,
        image: Any,
        tiles: Any,
        num_tiles: int,
        tile_rows: int,
        parts: torch.Tensor,
        gate: torch.Tensor,
    ) -> None:
        counts, slot_of = map(elements, self.planned)
        stored, parts, gate = map(elements, (slots, parts, gate))
        layout = self.layouts[image]

        def run() -> None:
            bounds = [0, *counts.cumsum(0).tolist()]
            for slot, (start, stop) in zip(slot_of.tolist(), pairwise(bounds), strict=True):
                if start < stop and slot >= 0:
                    weights = layout.weights_in(stored[slot].view(torch.uint8))
                    own, inner = parts[start:stop], gate[start:stop]
                    REFERENCE.gated_mlp(own, weights, inner, torch.empty_like(inner), own)

        self.gpu.put(run)

    def place_rows(
        self, host_parts: torch.Tensor, listed: torch.Tensor, parts: torch.Tensor
    ) -> None:
        parts = elements(parts)

        def run() -> None:
            rows = listed[listed >= 0].long()
            parts[rows] = host_parts[rows]

        self.gpu.put(run)


@pytest.fixture
def experts(monkeypatch: pytest.MonkeyPatch) -> QueuedExperts:
    return QueuedExperts(monkeypatch)


def answers(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    """Two answers at once, of which one ends sooner: passes of some rows, then of fewer."""
    lengths, diffusion = (9, 5), DiffusionParams()
    if not llm.config.decoding.writes_in_order:
        lengths, diffusion = (16, 8), DiffusionParams(block_length=8, steps=4)
    params = [SamplingParams(max_tokens=n, ignore_eos=True, diffusion=diffusion) for n in lengths]
    return [each.token_ids for each in llm.generate(prompts, params[: len(prompts)])]


@pytest.mark.parametrize("family", sorted(families()))
def test_repeated_passes_say_the_same(
    family: str, tmp_path: Path, experts: QueuedExperts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each number of rows that comes again a graph before and after each layer's mixer."""
    folder = synth(family, "tiny", tmp_path / "model", seed=5)
    with LLM(folder, device="cpu", **OPTIONS) as llm:
        wanted = [answers(llm) for _ in range(4)]
        num_graphs = llm.config.num_layers + 1
        if not llm.config.decoding.keeps_keys:
            num_graphs = 0
    with late_cuda(monkeypatch, haste=0.2) as experts.gpu, warnings.catch_warnings():
        warnings.simplefilter("error")
        with LLM(folder, device="cuda", gpu_memory="256MiB", **OPTIONS) as llm:
            found = [answers(llm) for _ in range(3)]
            num_captured = experts.gpu.num_graphs
            found.append(answers(llm))
    assert found == wanted
    assert experts.gpu.num_graphs == num_captured  # the fourth repeats the first three's
    if num_graphs:
        num_captured -= 1  # the first keeps the pool
        assert num_captured > 0 and num_captured % num_graphs == 0
    else:
        assert num_captured == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synth("qwen3_moe", "tiny", tmp_path_factory.mktemp("graphs") / "model", seed=5)


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[list[int]]:
    with LLM(folder, device="cpu", **OPTIONS) as llm:
        return answers(llm)


@given(seed=st.integers(0, 1 << 16), data=st.data())
def test_whatever_happens_between_passes_the_words_are_the_same(
    seed: int, data: st.DataObject, folder: Path, wanted: list[list[int]]
) -> None:
    """Experts leave and come back, policies change, and somebody looks at the layers."""
    with pytest.MonkeyPatch.context() as patch, late_cuda(patch, seed, haste=0.2) as gpu:
        experts = QueuedExperts(patch)
        experts.gpu = gpu
        plan = plan_model(folder, device="cuda", **OPTIONS)
        share = data.draw(st.sampled_from([0.5, 0.9, 1.0]))
        budget = plan.minimum_bytes + int(share * (plan.full_bytes - plan.minimum_bytes))
        policies = st.sampled_from(["lowtide", "tide", "lru", "dali"])
        options = {"gpu_memory": budget, "policy": data.draw(policies)}
        with LLM(folder, device="cuda", **options, **OPTIONS) as llm:
            for _ in range(data.draw(st.integers(1, 4))):
                happening = data.draw(st.sampled_from(["nothing", "policy", "look"]))
                if happening == "policy":
                    llm.adopt_policy(data.draw(policies))
                looks = llm.observed(Looks()) if happening == "look" else nullcontext()
                with looks:
                    assert answers(llm) == wanted
            told = llm.stats()
    rows = ("num_device_rows", "num_host_rows", "num_disk_rows", "num_substituted_rows")
    assert told["num_expert_rows"] == sum(told[name] for name in rows)


class Looks:
    """Sees each layer, whose pass then cannot be captured."""

    def saw_layer(self, layer: int, step: Step, x: Any, routing: Any, out: Any) -> None:
        pass


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]])
def test_experts_that_come_back_into_other_slots_are_found(
    prompts: list[list[int]],
    folder: Path,
    wanted: list[list[int]],
    experts: QueuedExperts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`lru` begins with no residents, and fetches them in the order in which they are demanded.

    With one answer at a time all graphs are captured anew after that.
    """
    wanted = wanted[: len(prompts)]
    with late_cuda(monkeypatch, haste=0.2) as experts.gpu:
        with LLM(folder, device="cuda", gpu_memory="256MiB", **OPTIONS) as llm:
            assert answers(llm, prompts) == answers(llm, prompts) == wanted
            num_graphs = experts.gpu.num_graphs
            llm.adopt_policy("lru")
            assert answers(llm, prompts) == wanted
            llm.adopt_policy("lowtide")
            assert answers(llm, prompts) == answers(llm, prompts) == wanted
    assert 0 < num_graphs < experts.gpu.num_graphs


def test_counts_are_those_of_passes_that_are_queued_anew(
    folder: Path,
    wanted: list[list[int]],
    experts: QueuedExperts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = []
    for most_rows in (0, 64):
        monkeypatch.setattr(captured_passes, "MAX_ROWS", most_rows)
        with late_cuda(monkeypatch, haste=0.2) as experts.gpu:
            with LLM(folder, device="cuda", gpu_memory="256MiB", **OPTIONS) as llm:
                assert answers(llm) == answers(llm) == wanted
                counted.append(llm.stats())
        assert (experts.gpu.num_graphs > 0) == (most_rows > 0)
    names = [name for name in counted[0] if name.startswith("num_") or name == "hit_rate"]
    assert {name: counted[0][name] for name in names} == {n: counted[1][n] for n in names}


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "lfm2_moe", "llada2"])
@pytest.mark.parametrize("num_captured", [0, 1, 4])
def test_what_cuda_does_not_capture_is_queued_anew(
    num_captured: int,
    family: str,
    tmp_path: Path,
    experts: QueuedExperts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It says so once, and loses nothing of the pass that was under way."""
    folder = synth(family, "tiny", tmp_path / "model", seed=5)
    with LLM(folder, device="cpu", **OPTIONS) as llm:
        wanted = [answers(llm), answers(llm)]
    end = LateGraph.capture_end

    def refuse(graph: LateGraph) -> None:
        end(graph)
        if graph.gpu.num_graphs > num_captured:
            raise RuntimeError("operation would make the legacy stream depend on a capture")

    monkeypatch.setattr(LateGraph, "capture_end", refuse)
    with late_cuda(monkeypatch, haste=0.2) as experts.gpu:
        with LLM(folder, device="cuda", gpu_memory="256MiB", **OPTIONS) as llm:
            with pytest.warns(UserWarning, match="queued anew .* the legacy stream") as told:
                assert [answers(llm), answers(llm)] == wanted
            stats = llm.stats()
    assert len(told) == 1 and experts.gpu.num_graphs == num_captured + 1
    assert stats["hit_rate"] == 1.0


def test_a_pass_that_failed_is_not_known(
    folder: Path,
    wanted: list[list[int]],
    experts: QueuedExperts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next is queued anew once more, since the GPU may not know of all experts."""
    attend, num_calls = CachedAttention.run, 0

    def fail(attention: CachedAttention, *given: Any) -> None:
        nonlocal num_calls
        num_calls += attention.layer == 2
        if num_calls in (2, 4) and attention.layer == 2:  # of the first passes over one token
            raise torch.OutOfMemoryError("no memory for attention")
        attend(attention, *given)

    monkeypatch.setattr(CachedAttention, "run", fail)
    prompts = PROMPTS[:1]
    with late_cuda(monkeypatch, haste=0.2) as experts.gpu:
        with LLM(folder, device="cuda", gpu_memory="256MiB", **OPTIONS) as llm:
            for _ in range(2):
                with pytest.raises(DeviceError, match="no memory for attention"):
                    answers(llm, prompts)
            assert experts.gpu.num_graphs == 0
            assert answers(llm, prompts) == answers(llm, prompts) == wanted[:1]
    assert experts.gpu.num_graphs > 0
