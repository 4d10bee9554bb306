"""The engine on a GPU that does everything late (`late_cuda.py`): the same words as on the CPU."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from inside import engine_of

pytest.importorskip("triton")

import torch
from buddy_cases import profiled
from late_cuda import CUDA, LateGpu, late_cuda

from lowtide.core import Costs, Curve, Facts, MoEShape, RoutedTokens
from lowtide.devices import cuda
from lowtide.doctor import doctor
from lowtide.engine.running import device as device_engine
from lowtide.errors import (
    DeviceError,
    InternalError,
    NumericError,
    PlanError,
    UnsupportedError,
)
from lowtide.experts.layout import SlotLayout
from lowtide.families import families
from lowtide.hardware import measure, store, streams
from lowtide.kernels import choice
from lowtide.lab import verify as verify_module
from lowtide.lab.baselines import COMPARED
from lowtide.lab.verify import verify
from lowtide.llm import LLM, plan_model
from lowtide.memory.arena import Arena
from lowtide.memory.pinned import PinnedMemory
from lowtide.model_writing.pack import pack
from lowtide.model_writing.synth import synth
from lowtide.params import DiffusionParams, SamplingParams
from lowtide.plan import WeightFormats
from lowtide.policies.catalogue import CATALOGUE
from lowtide.policies.presets import register, unregister
from lowtide.threads.executor import HostExecutor

OPTIONS: dict[str, Any] = {"context": 128}
PROMPT = [7, 3, 120, 9, 44, 3, 3, 80] * 4
AUTOREGRESSIVE = SamplingParams(max_tokens=4)
DIFFUSION = SamplingParams(
    max_tokens=8, diffusion=DiffusionParams(block_length=8, steps=4, threshold=0.5)
)
TOLERANCE = 1e-4
"""Of the largest logit, in float32: a GPU's attention sums in another order."""


@pytest.fixture(autouse=True)
def known_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring takes seconds, and there is nothing to measure."""
    curve = Curve([(1, 1e-4), (512, 1e-3)])
    costs = Costs(1, 2e-4, curve, curve.scaled(0.3), curve, 1e-5)
    stored = SimpleNamespace(costs=costs)
    monkeypatch.setattr(device_engine, "stored_or_measured", lambda key, measure: stored)


@pytest.fixture
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter is slow, and has tests of its own."""
    for module in (choice, cuda):
        monkeypatch.setattr(module, "why_no_triton", lambda device: "it is slow")


class Case:
    """A model and what it answers on the CPU."""

    def __init__(
        self, family: str, folder: Path, dtype: str = "float32", packed: str = "", **options: Any
    ) -> None:
        """packed: the format that the model is packed in."""
        self.folder = synth(family, "tiny", folder, seed=5)
        if packed:
            self.folder = pack(self.folder, folder.with_name("packed"), format=packed)
        self.options = {**OPTIONS, "dtype": dtype, **options}
        self.params = DIFFUSION if family == "llada2" else AUTOREGRESSIVE
        with LLM(self.folder, device="cpu", **self.options) as llm:
            self.ids, self.logits = self.answer(llm)

    def answer(self, llm: LLM) -> tuple[list[int], torch.Tensor]:
        if not llm.config.decoding.keeps_keys:
            return [], llm.logits(PROMPT)
        [completion] = llm.generate([PROMPT], self.params)
        return completion.token_ids, llm.logits([*PROMPT, *completion.token_ids])

    def open(self, share: float, policy: str, **options: Any) -> LLM:
        """With a share of the experts' bytes beyond the least budget, of the device's memory."""
        plan = plan_model(self.folder, device="cuda", **self.options)
        budget = plan.minimum_bytes + int(share * (plan.full_bytes - plan.minimum_bytes))
        policy = policy if plan.num_experts else "auto"
        given = {"device": "cuda", "gpu_memory": budget, "policy": policy}
        return LLM(self.folder, **self.options, **given, **options)

    def open_from_disk(self, policy: str, **options: Any) -> LLM:
        """With half of the experts in host memory: the others are read when they are needed."""
        home = plan_model(self.folder, device="cuda", **self.options).host
        num_bytes = home.used_bytes - home.num_slots // 2 * home.slot_bytes
        return self.open(0.3, policy, host_memory=num_bytes, **options)

    def check(self, llm: LLM) -> None:
        ids, logits = self.answer(llm)
        assert ids == self.ids
        largest = self.logits.abs().max().item()
        assert (logits - self.logits).abs().max().item() <= TOLERANCE * largest


@pytest.fixture(scope="module", params=sorted(families()))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param) / "model")


@pytest.fixture(scope="module")
def small_case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("mixtral", tmp_path_factory.mktemp("small") / "model")


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.filterwarnings("ignore:Experts on the GPU run one by one")
@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in (1, 2, 3))])
def test_every_family_says_the_same(case: Case, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(f"{case.folder.parent.name} {seed}")
    share, policy = draw.choice([0.0, draw.random(), 1.0]), draw.choice(COMPARED)
    with late_cuda(monkeypatch, seed, haste=0.25 * seed):
        try:
            llm = case.open(share, policy)
        except PlanError:  # some policies need a slot
            assert not share
            return
        with llm:
            case.check(llm)


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.filterwarnings("ignore:Experts on the GPU run one by one")
@pytest.mark.filterwarnings("ignore:.*cannot be pinned")
@pytest.mark.parametrize(
    "policy", ["dali", *(pytest.param(p, marks=pytest.mark.slow) for p in COMPARED)]
)
@pytest.mark.parametrize("is_pinned", [True, False])
def test_every_policy_says_the_same(
    small_case: Case, policy: str, is_pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with late_cuda(monkeypatch, seed=3, haste=0.2) as gpu:
        if not is_pinned:
            monkeypatch.setattr(gpu.cudart, "cudaHostRegister", lambda *_: 2)
            monkeypatch.setattr(gpu, "pin", pin_without_the_system(gpu))
        with small_case.open(0.5, policy) as llm:
            assert llm.device == "late"
            small_case.check(llm)


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.filterwarnings("ignore:Experts on the GPU run one by one")
@pytest.mark.filterwarnings("ignore:.*cannot be pinned")
@pytest.mark.parametrize("policy", ["lowtide", "tide", "dali"])
@pytest.mark.parametrize("name", ["small_case", "diffusion_case"])
def test_experts_whose_home_is_the_disk_say_the_same(
    name: str, policy: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    case: Case = request.getfixturevalue(name)
    with late_cuda(monkeypatch, seed=2, haste=0.2), case.open_from_disk(policy) as llm:
        case.check(llm)
        assert llm.stats()["read_bytes"] > 0


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.filterwarnings("ignore:Experts on the GPU run one by one")
@pytest.mark.filterwarnings("ignore:.*cannot be pinned")
@pytest.mark.parametrize(
    ("policy", "is_pinned"), [("lowtide", True), ("tide", True), ("dali", True), ("lowtide", False)]
)
def test_host_slots_go_to_a_system_that_runs_short(
    small_case: Case, policy: str, is_pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they have then is one pinned range, and the words are the same throughout."""
    system, module = SimpleNamespace(free_bytes=1 << 40), "lowtide.engine.running.moving_slots"
    monkeypatch.setattr(f"{module}.available_memory_bytes", lambda: system.free_bytes)
    monkeypatch.setattr(f"{module}.LOOK_S", 0.0)
    with late_cuda(monkeypatch, seed=2, haste=0.2) as gpu:
        if not is_pinned:
            monkeypatch.setattr(gpu.cudart, "cudaHostRegister", lambda *_: 2)
            monkeypatch.setattr(gpu, "pin", pin_without_the_system(gpu))
        with small_case.open_from_disk(policy) as llm:
            plan, home = llm.plan, engine_of(llm).home
            num_least = plan.host.num_slots - sum(plan.host_residents_per_layer)
            for free_bytes, num_slots in (
                (1 << 40, plan.host.num_slots),
                (100 << 20, num_least),
                (1 << 40, plan.host.num_slots),
            ):
                system.free_bytes = free_bytes
                for _ in range(2):
                    small_case.check(llm)
                    arena = home.slots.arena
                    assert llm.stats()["num_host_slots"] == num_slots
                    found = gpu.cudart.ranges.get(arena.bytes.data_ptr())
                    assert found == (arena.committed_bytes if is_pinned else None)


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.filterwarnings("ignore:Experts on the GPU run one by one")
@pytest.mark.parametrize("name", ["small_case", "diffusion_case"])
@pytest.mark.parametrize("is_lossless", [True, False])
def test_buddies_beside_a_gpu(
    name: str, is_lossless: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same words where none may stand in, and otherwise a receipt of those that did."""
    case: Case = request.getfixturevalue(name)
    options = {"miss": "buddy", "max_mass": "off", "tae": "off", "beta": "off"}
    if is_lossless:
        options["rho"] = "0"
    with profiled() as seen, late_cuda(monkeypatch, seed=2, haste=0.2):
        with case.open(0.4, "buddymoe", policy_options=options) as llm:
            if is_lossless:
                case.check(llm)
                return
            [completion] = llm.generate([PROMPT], case.params)
            receipt = completion.usage.receipt
            assert seen[0].asked and receipt is not None and receipt.num_substituted > 0
            assert llm.stats()["num_substituted_rows"] > 0


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.filterwarnings("ignore:Experts on the GPU run one by one")
def test_a_driver_that_pins_only_a_part_of_the_memory(
    small_case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so once, the words are the same, and what was pinned is unpinned at the end."""
    with late_cuda(monkeypatch, seed=4, haste=0.2) as gpu:
        monkeypatch.setattr(gpu, "pin", pin_without_the_system(gpu))
        register = gpu.cudart.cudaHostRegister
        answers: list[int] = []

        def register_one(address: int, num_bytes: int, flags: int) -> int:
            answers.append(2 if answers else register(address, num_bytes, flags))
            return answers[-1]

        monkeypatch.setattr(gpu.cudart, "cudaHostRegister", register_one)
        before = dict(gpu.cudart.ranges)
        pinned = PinnedMemory()
        first = pinned.make_arena(4096)
        with pytest.warns(UserWarning, match="cannot be pinned .CUDA error 2") as told:
            second = pinned.make_arena(1 << 20)
        assert len(told) == 1 and answers == [0, 2]
        assert pinned.holds(first.bytes) and not pinned.holds(second.bytes)
        pinned.close()
        assert gpu.cudart.ranges == before
        # The home is refused; what the device itself reads and writes is pinned already.
        with pytest.warns(UserWarning, match="cannot be pinned") as told:
            llm = small_case.open(0.5, "lowtide")
        with llm:
            small_case.check(llm)
        assert sum("cannot be pinned" in str(each.message) for each in told) == 1


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_bfloat16_is_refused_on_a_gpu_that_has_no_products_of_it(
    device: str, small_case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {**OPTIONS, "device": device}
    with late_cuda(monkeypatch, capability=(7, 5)):
        with pytest.raises(
            UnsupportedError, match="bfloat16 on late: .* 7.5, .* `dtype=.float16.`"
        ):
            plan_model(small_case.folder, dtype="bfloat16", **given)
        for dtype in ("float16", "float32"):
            assert plan_model(small_case.folder, dtype=dtype, **given).device == "cuda"
    with late_cuda(monkeypatch, capability=(8, 0)):
        assert plan_model(small_case.folder, dtype="bfloat16", **given).device == "cuda"


def pin_without_the_system(gpu: LateGpu) -> Any:
    def pin(tensor: torch.Tensor) -> torch.Tensor:
        gpu.pinned.append(tensor)
        gpu.cudart.ranges[tensor.data_ptr()] = tensor.nbytes
        return tensor

    return pin


@pytest.mark.slow
def test_the_triton_kernels_say_the_same(small_case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    num_groups, run = 0, cuda.TritonExperts.run

    def noted(experts: Any, *arguments: Any) -> Any:
        nonlocal num_groups
        num_groups += 1
        return run(experts, *arguments)

    monkeypatch.setattr(cuda.TritonExperts, "run", noted)
    with late_cuda(monkeypatch), small_case.open(0.5, "lowtide") as llm:
        assert small_case.answer(llm)[0] == small_case.ids
    assert num_groups > 0


@pytest.mark.parametrize(
    ("family", "given", "form", "kernels"),
    [
        ("mixtral", {"packed": "q4"}, "q4", "reference"),
        ("gpt_oss", {}, "MXFP4", "reference"),
        pytest.param("mixtral", {"expert_dtype": "q8"}, "q8", "auto", marks=pytest.mark.slow),
        pytest.param("gpt_oss", {}, "MXFP4", "auto", marks=pytest.mark.slow),
    ],
)
def test_experts_stay_packed(
    family: str,
    given: dict[str, str],
    form: str,
    kernels: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dense weights of a packed folder are unpacked as they are loaded."""
    case = Case(family, tmp_path / "model", **given)
    with late_cuda(monkeypatch, haste=0.2), case.open(0.6, "lowtide", kernels=kernels) as llm:
        # A GPU computes with rows as they are, also where a processor would round them.
        rows = "auto (own)" if family == "gpt_oss" else "own"
        assert llm.plan.formats == WeightFormats(experts=form, activations=rows)
        assert 0 < sum(llm.plan.residents_per_layer) < llm.plan.num_experts
        case.check(llm)


def test_dense_weights_in_few_bits_are_refused(
    small_case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        late_cuda(monkeypatch),
        pytest.raises(UnsupportedError, match="choose `expert_dtype` alone"),
    ):
        plan_model(small_case.folder, device="cuda", format="q4", **OPTIONS)


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.filterwarnings("ignore:Experts on the GPU run one by one")
def test_bfloat16_keeps_to_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No operator that is compiled for the CPU is given an address of the GPU's."""
    case = Case("qwen3_moe", tmp_path / "model", "bfloat16")
    with late_cuda(monkeypatch, haste=0.3), case.open(0.5, "lowtide") as llm:
        case.answer(llm)


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.filterwarnings("ignore:Experts on the GPU run one by one")
def test_verify_on_a_gpu(small_case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "lossless_presets", lambda: ("lowtide",))
    with late_cuda(monkeypatch, haste=0.3):
        verdicts = verify(small_case.folder, max_tokens=2, device="cuda", **small_case.options)
    on_gpu = [verdict for verdict in verdicts if verdict.device == "cuda"]
    assert len(on_gpu) == 3 and all(verdict.is_same for verdict in verdicts)
    assert {verdict.tolerance for verdict in on_gpu} == {1e-4}


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.filterwarnings("ignore:Experts on the GPU run one by one")
@pytest.mark.parametrize("forgotten", ["the last use of a slot", "a ring's last use"])
def test_a_wait_that_is_forgotten_is_noticed(
    small_case: Case, forgotten: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if forgotten == "the last use of a slot":
        monkeypatch.setattr(cuda, "wait_on", lambda stream, after: None)
    else:
        monkeypatch.setattr(cuda.CudaEvent, "wait", lambda self, limit_s=0.0: None)
    # Old bytes, another answer, logits that are not numbers, experts that there are not.
    noticed = (AssertionError, DeviceError, InternalError, NumericError, MemoryError, ValueError)
    with late_cuda(monkeypatch, seed=1), pytest.raises(noticed):
        with small_case.open(0.3, "on-demand") as llm:
            small_case.check(llm)


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_a_gpu_that_fails_is_a_typed_error_and_the_engine_goes_on(
    small_case: Case, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    with late_cuda(monkeypatch) as gpu, small_case.open(0.5, "lowtide", kernels="reference") as llm:
        for num_good in (0, 40, 200):
            with monkeypatch.context() as patch:
                patch.setattr(gpu, "put", failing_after(num_good, gpu.put, error))
                with pytest.raises(DeviceError, match="GPU.*made up"):
                    small_case.answer(llm)
            small_case.check(llm)


def failing_after(num_good: int, put: Any, error: type[Exception]) -> Any:
    left = iter(range(num_good))

    def fail(work: Any) -> None:
        if next(left, None) is None:
            raise error("made up")
        put(work)

    return fail


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_the_host_waits_once_per_layer_and_never_for_resident_ones(
    small_case: Case, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_waits, wait = 0, cuda.CudaDevice.to_host

    def counted(self: cuda.CudaDevice, *arguments: Any) -> torch.Tensor:
        nonlocal num_waits
        num_waits += 1
        return wait(self, *arguments)

    monkeypatch.setattr(cuda.CudaDevice, "to_host", counted)
    monkeypatch.setattr(cuda.ReferenceExperts, "run", no_products)  # they ask for the counts
    with late_cuda(monkeypatch) as gpu, small_case.open(share, "tide", kernels="reference") as llm:
        before = gpu.num_waits
        llm.logits(PROMPT[:8])
        assert gpu.num_waits - before == 1  # for the logits
        num_layers = len(llm.plan.residents_per_layer)
        assert num_waits == (0 if share == 1 else num_layers)


def no_products(*arguments: Any) -> cuda.CudaEvent:
    return cuda.CudaEvent(arguments[-1].record_event())


@pytest.fixture
def toy() -> Iterator[str]:
    """A policy that asks for all there is to know of a routing, and answers the same one."""

    def copy(facts: Facts) -> RoutedTokens:
        assert facts.routing is not None and facts.routing.scores is not None
        return RoutedTokens(facts.routing.experts.copy(), facts.routing.weights.copy())

    made = replace(CATALOGUE["tide"], substitution=lambda setting: copy, asks_scores=True)
    register("toy", made)
    yield "toy"
    unregister("toy")


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.filterwarnings("ignore:Experts on the GPU run one by one")
def test_a_substitution_says_the_same_and_waits_no_more(
    small_case: Case, toy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with late_cuda(monkeypatch, haste=0.2), small_case.open(0.5, toy) as llm:
        small_case.check(llm)
    monkeypatch.setattr(cuda.ReferenceExperts, "run", no_products)  # they ask for the counts
    with late_cuda(monkeypatch) as gpu, small_case.open(0.5, toy, kernels="reference") as llm:
        before = gpu.num_waits
        llm.logits(PROMPT[:8])
        assert gpu.num_waits - before == 1  # for the logits


@pytest.fixture(scope="module")
def diffusion_case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("llada2", tmp_path_factory.mktemp("diffusion") / "model")


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize("name", ["small_case", "diffusion_case"])
def test_a_pass_sends_nothing_back_but_what_it_decides(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the host waits for that alone: nothing hides in the copies there."""
    case: Case = request.getfixturevalue(name)
    num_waits, wait = 0, cuda.CudaEvent.wait

    def counted(self: cuda.CudaEvent, *arguments: Any) -> None:
        nonlocal num_waits
        num_waits += 1
        wait(self, *arguments)

    monkeypatch.setattr(cuda.CudaEvent, "wait", counted)
    monkeypatch.setattr(cuda.ReferenceExperts, "run", no_products)  # they ask for the counts
    with late_cuda(monkeypatch) as gpu, case.open(1.0, "tide", kernels="reference") as llm:
        num_waits = gpu.num_waits = gpu.num_bytes_to_host = 0
        llm.generate([PROMPT] * 3, case.params)
        num_hidden, num_passes = gpu.num_waits, llm.stats()["forwards"]
        assert (num_waits, num_hidden) == (num_passes, 0)
        num_rows = 3 * (case.params.diffusion.block_length or 1)
        assert gpu.num_bytes_to_host <= num_passes * num_rows * 24


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.filterwarnings("ignore:Experts on the GPU run one by one")
@pytest.mark.parametrize("name", ["small_case", "diffusion_case"])
def test_who_draws_and_who_does_not_say_the_same_together(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    case: Case = request.getfixturevalue(name)
    drawn = replace(case.params, temperature=1.0, top_p=0.9, seed=3)
    params = [drawn, case.params, replace(drawn, seed=4)]
    if case.params is AUTOREGRESSIVE:
        params += [replace(case.params, logprobs=2), replace(case.params, repetition_penalty=1.3)]
    prompts = [PROMPT[start:] for start in range(len(params))]

    def answers(llm: LLM) -> list[list[int]]:
        return [completion.token_ids for completion in llm.generate(prompts, params)]

    with LLM(case.folder, device="cpu", **case.options) as llm:
        expected = answers(llm)
    with late_cuda(monkeypatch, haste=0.2), case.open(0.5, "lowtide") as llm:
        assert answers(llm) == expected


@pytest.fixture
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "COMPUTE_LIMIT_S", 0.0)
    monkeypatch.setattr(measure, "NUM_TOKENS", (1, 8))
    for module in (measure, streams):
        monkeypatch.setattr(module, "cold_bytes", lambda: 1 << 16)


@pytest.mark.usefixtures("plain_kernels", "short_measurements")
@pytest.mark.filterwarnings("ignore:Experts on the GPU run one by one")
def test_a_budget_without_slots_is_measured_with_some(
    small_case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Costs] = []

    def measured(key: object, measure: Any) -> SimpleNamespace:
        found.append(measure().costs())
        return SimpleNamespace(costs=found[0])

    monkeypatch.setattr(device_engine, "stored_or_measured", measured)
    with late_cuda(monkeypatch, haste=0.3), small_case.open(0.0, "all-host") as llm:
        assert engine_of(llm).experts.device.device.num_slots == 0
        small_case.check(llm)
    assert found[0].device_s.at(1) > 0 and found[0].link_s > 0


@pytest.mark.usefixtures("plain_kernels", "short_measurements")
@pytest.mark.filterwarnings("ignore:Experts on the GPU run one by one")
def test_what_doctor_measured_is_not_measured_again(
    small_case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "machine_rates", lambda *_, **__: [])
    monkeypatch.setattr(device_engine, "stored_or_measured", lambda key, measure: store.load(key))
    with late_cuda(monkeypatch, haste=0.5):
        [measured] = doctor.diagnose(small_case.folder, device="cuda", dtype="float32").costs
        with small_case.open(0.5, "lowtide") as llm:
            tier = engine_of(llm).experts.device
            assert tier is not None and tier.costs.link_s == measured.stored.costs.link_s > 0


def test_neither_cudnn_attends_nor_tf32_multiplies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither on a GPU nor, where it has no meaning, on the CPU; others get them back."""
    was_on, attend = [], torch.nn.functional.scaled_dot_product_attention
    products = torch.backends.cuda.matmul

    def noted(*arguments: Any, **options: Any) -> torch.Tensor:
        was_on.append(torch.backends.cuda.cudnn_sdp_enabled())
        was_on.append(products.fp32_precision != "ieee")
        return attend(*arguments, **options)

    before, products_before = torch.backends.cuda.cudnn_sdp_enabled(), products.fp32_precision
    products.fp32_precision = "tf32"
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    model = synth("llada2", "tiny", tmp_path / "model", seed=5)
    try:
        with LLM(model, device="cpu", **OPTIONS) as llm:
            was_on.clear()  # what was only registered
            llm.generate([PROMPT], DIFFUSION)
            llm.logits(PROMPT)
        assert was_on and not any(was_on)
        assert torch.backends.cuda.cudnn_sdp_enabled() == before
        assert products.fp32_precision == "tf32"
    finally:
        products.fp32_precision = products_before


@pytest.mark.usefixtures("short_measurements")
def test_costs_are_measured_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = MoEShape(1, num_experts=8, num_experts_per_token=2, hidden_size=64, expert_size=32)
    layout = SlotLayout.of(shape, torch.float32)
    executor = HostExecutor(2)
    with late_cuda(monkeypatch, haste=0.5):
        arenas: list[Arena] = []
        pinned = PinnedMemory()
        device = cuda.CudaDevice(shape, layout, 8, 32, pinned, "reference")

        def make_arena(num_bytes: int) -> Arena:
            arenas.append(Arena(num_bytes))
            assert pinned.register(arenas[-1])
            return arenas[-1]

        with pinned.lent():
            measured = measure.measure_costs(
                shape,
                layout,
                executor,
                1 << 14,
                device=device,
                make_arena=make_arena,
                least_cold_bytes=1 << 18,
            )
        device.close()
    executor.close()
    assert arenas and not any(pinned.holds(arena.bytes) for arena in arenas)
    costs = measured.costs()
    assert costs.link_s > 0 and costs.sync_s > 0 and costs.device_s.at(8) > 0


def test_work_is_done_when_it_is_waited_for_and_devices_are_not_mixed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with late_cuda(monkeypatch):
        there, here = torch.zeros(4, device=CUDA), torch.zeros(4)
        host = torch.empty(4, pin_memory=True)
        host.fill_(1.0)
        there.copy_(host, non_blocking=True)
        host.fill_(2.0)  # too early: the copy was only queued
        assert there.cpu().tolist() == [2.0] * 4
        with pytest.raises(AssertionError, match="mixes"):
            there + here
        with pytest.raises(AssertionError, match="not pinned"):
            there.copy_(here, non_blocking=True)
        with pytest.raises(AssertionError, match="address"):
            there.data_ptr()
