"""The expert runtime: same bits wherever the experts lie and in whatever order they arrive."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowtide.core import Costs, MoEShape, Step, StepKind
from lowtide.errors import InternalError, StorageError
from lowtide.experts import compiled_residents, host_tier, rows
from lowtide.experts.batched_experts import BatchedExperts
from lowtide.experts.compiled_residents import CompiledResidents
from lowtide.experts.device_executor import DeviceExpertExecutor
from lowtide.experts.host_executor import HostExpertExecutor
from lowtide.experts.host_tier import HostTier
from lowtide.experts.layout import SlotLayout
from lowtide.experts.registrar import ExpertRegistrar
from lowtide.experts.rows import LayerCall, Routing
from lowtide.experts.runtime import ExpertRuntime
from lowtide.experts.slots import ExpertSlots, SlotLedger
from lowtide.experts.transfer import Transfer
from lowtide.kernels.choice import choose_kernels
from lowtide.kernels.layer_parts import Status
from lowtide.kernels.operands import ExpertWeights
from lowtide.kernels.reference import REFERENCE, Kernels
from lowtide.memory.arena import Arena
from lowtide.memory.workspace import Registrar, Workspace
from lowtide.policies.decision import Decision, Policies
from lowtide.policies.presets import recipe
from lowtide.policies.recipe import PolicyInputs
from lowtide.reading import file_reader
from lowtide.reading.file_reader import Ticket
from lowtide.threads.executor import Executor, InlineExecutor, drain

SHAPE = MoEShape(
    num_layers=2, num_experts=6, num_experts_per_token=3, hidden_size=32, expert_size=16
)
NUM_STAGING = 2
POLICIES = ["tide", "lru", "static"]
SMALL_TILE = 32
TILES = (512, SMALL_TILE)  # rows: a pass of few tokens is one tile, or several
Weights = dict[tuple[int, int], ExpertWeights]


def make_weights(dtype: torch.dtype) -> Weights:
    generator = torch.Generator().manual_seed(5)
    hidden, width = SHAPE.hidden_size, SHAPE.expert_size

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator).div(columns**0.5).to(dtype)

    return {
        (layer, expert): ExpertWeights(
            matrix(width, hidden), matrix(width, hidden), matrix(hidden, width)
        )
        for layer in range(SHAPE.num_layers)
        for expert in range(SHAPE.num_experts)
    }


WEIGHTS = {dtype: make_weights(dtype) for dtype in (torch.float32, torch.bfloat16)}


class StepInput(NamedTuple):
    """One call of one layer."""

    layer: int
    step: Step
    x: Tensor
    routing: Routing


def make_step(seed: int, layer: int, index: int, num_tokens: int, dtype: torch.dtype) -> StepInput:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, SHAPE.hidden_size, generator=generator).to(dtype)
    # Skewed, so that some experts are hit by many tokens and some by none.
    rank = torch.rand(num_tokens, SHAPE.num_experts, generator=generator)
    rank += torch.rand(SHAPE.num_experts, generator=generator)
    experts = rank.topk(SHAPE.num_experts_per_token).indices.sort().values
    weights = torch.rand(num_tokens, SHAPE.num_experts_per_token, generator=generator)
    kind = StepKind.PREFILL if seed % 7 == 0 else StepKind.DENOISE
    return StepInput(layer, Step(kind, index), x, Routing(experts, weights))


def dense_oracle(call: StepInput, weights: Weights) -> Tensor:
    """Every token's experts in ascending id, multiplied and added in float32, one at a time."""
    experts, scales = call.routing
    result = torch.zeros(call.x.shape, dtype=torch.float32)
    for expert in range(SHAPE.num_experts):
        tokens = (experts == expert).any(1).nonzero()[:, 0]
        if len(tokens):
            gate, up, down = weights[call.layer, expert]
            x = call.x[tokens]
            output = (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
            for i, token in enumerate(tokens.tolist()):
                scale = scales[token][experts[token] == expert]
                result[token] = result[token] + output[i].float() * scale
    return result


@contextmanager
def tile_of(num_rows: int) -> Iterator[None]:
    """Small tiles make long passes of few rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "TILE_ROWS", num_rows)
        yield


def in_one_buffer(call: StepInput, kernels: Kernels, tile_rows: int) -> Tensor:
    """All pairs' outputs side by side, then their sum: as passes of one tile are computed.

    An expert's rows are one product, or of more than a tile's several, none under 16 rows.
    """
    experts, weights = call.routing
    pairs = REFERENCE.sort_pairs(experts, SHAPE.num_experts)
    parts = call.x[pairs.token_of]
    start = 0
    for expert, count in enumerate(pairs.counts.tolist()):
        left = count
        while left:
            size = left if left <= tile_rows else tile_rows - 16 * (left - tile_rows < 16)
            own = parts[start : start + size]
            gate, up = (own.new_empty(size, SHAPE.expert_size) for _ in range(2))
            kernels.gated_mlp(own, WEIGHTS[own.dtype][call.layer, expert], gate, up, own)
            start, left = start + size, left - size
    term, out = torch.empty_like(call.x), torch.empty(call.x.shape)
    REFERENCE.combine(parts, pairs.part_of, weights, term, torch.empty(call.x.shape), out)
    return out


class Disorder:
    """A transfer whose reads end in random order, on the thread that waits for one of them.

    A slot is spoiled when its read starts, so that whoever does not wait computes nonsense.
    """

    def __init__(
        self, slots: ExpertSlots, weights: Weights, seed: int = 0, fail_at: Sequence[int] = ()
    ) -> None:
        self.started: list[tuple[int, int]] = []
        self._slots = slots
        self._weights = weights
        self._random = random.Random(seed)
        self.fail_at = set(fail_at)
        self._under_way: list[tuple[_Answer, Callable[[], int]]] = []

    def start(self, layer: int, expert: int, slot: int) -> Ticket:
        number = len(self.started)
        self.started.append((layer, expert))
        for part in range(3):
            self._slots.part(0, slot, part)[:] = 0xFF  # NaN in every type
        answer = _Answer(self)

        def read() -> int:
            if number in self.fail_at:
                raise StorageError(f"read {number} failed")
            return fill(self._slots, slot, self._weights[layer, expert])

        self._under_way.append((answer, read))
        return answer

    def describe(self, layer: int, expert: int) -> str:
        return f"expert {expert} of MoE layer {layer}"

    def drain(self) -> None:
        for answer, read in self._under_way:
            finish(answer, read)
        self._under_way.clear()

    def close(self) -> None:
        """Has no threads."""

    def finish_until(self, answer: _Answer) -> None:
        while not answer.done():
            self.finish_one()

    def finish_one(self) -> bool:
        """Finish one of the reads under way; return False if there was none."""
        if not self._under_way:
            return False
        i = self._random.randrange(len(self._under_way))
        finish(*self._under_way.pop(i))
        return True


class DisorderlyNews(threading.Event):
    """Whoever waits for news of a disorderly transfer gets the end of any of its reads."""

    def __init__(self, transfer: Disorder) -> None:
        super().__init__()
        self._transfer = transfer

    def wait(self, timeout: float | None = None) -> bool:
        return (not self.is_set() and self._transfer.finish_one()) or super().wait(timeout)


def wait_for_disorder(residents: CompiledResidents, transfer: Disorder) -> None:
    """The same of a compiled call that waits."""
    serve = residents.serve

    def finish_one(status: Status) -> None:
        if status is not Status.WAITS or not transfer.finish_one():
            serve(status)

    residents.serve = finish_one


class _Answer(Future[int]):
    def __init__(self, owner: Disorder) -> None:
        super().__init__()
        self._owner = owner

    def result(self, timeout: float | None = None) -> int:
        self._owner.finish_until(self)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._owner.finish_until(self)
        return super().exception(timeout)


class Pool:
    """An executor of real threads, more of them than this machine may have cores."""

    num_threads = num_cores = 3

    def __init__(self) -> None:
        # As the calling thread's (conftest.py): some machines have other bits with more.
        self._pool = ThreadPoolExecutor(self.num_threads, "", torch.set_num_threads, (1,))

    def submit(self, work: Callable[[], None]) -> Future[None]:
        return self._pool.submit(work)

    def run(self, works: Sequence[Callable[[], None]]) -> None:
        for future in [self.submit(work) for work in works]:
            future.result()

    def drain(self) -> None:
        drain(self._pool, self.num_threads)

    def close(self) -> None:
        """Has no threads."""


POOL = Pool()
EXECUTORS: list[Executor] = [InlineExecutor(), POOL]


class Threads:
    """A transfer that reads on threads of a pool."""

    def __init__(self, slots: ExpertSlots, weights: Weights, pool: ThreadPoolExecutor) -> None:
        self._slots, self._weights, self._pool = slots, weights, pool

    def start(self, layer: int, expert: int, slot: int) -> Ticket:
        return self._pool.submit(fill, self._slots, slot, self._weights[layer, expert])

    def describe(self, layer: int, expert: int) -> str:
        return f"expert {expert} of MoE layer {layer}"

    def drain(self) -> None:
        pass  # every ticket is with the runtime

    def close(self) -> None:
        """Has no threads."""


def finish(answer: Future[int], read: Callable[[], int]) -> None:
    if answer.set_running_or_notify_cancel():
        try:
            answer.set_result(read())
        except StorageError as error:
            answer.set_exception(error)


def fill(slots: ExpertSlots, slot: int, weights: ExpertWeights) -> int:
    num_bytes = 0
    for part, weight in enumerate(weights):
        target = slots.part(0, slot, part)
        target[:] = weight.flatten().view(torch.uint8).numpy()
        num_bytes += len(target)
    return num_bytes


class Experts:
    """Owner of the product that runs every rig's experts; some tests replace it."""

    product = staticmethod(REFERENCE.gated_mlp)


class WatchedKernels(Kernels):
    def gated_mlp(self, *arguments: Any) -> None:
        Experts.product(*arguments)


class Rig:
    """A runtime with random weights, and a workspace of exactly the registered size."""

    def __init__(
        self,
        policy: str,
        capacity: Sequence[int],
        dtype: torch.dtype = torch.float32,
        num_staging: int = NUM_STAGING,
        make_transfer: Callable[[ExpertSlots], Transfer] | None = None,
        executor: Executor | None = None,
        kernels: Kernels | None = None,
        **disorder: object,
    ) -> None:
        self.capacity = capacity
        self.layout = SlotLayout.of(SHAPE, dtype)
        num_slots = sum(capacity) + num_staging
        self.slots = ExpertSlots(Arena(num_slots * self.layout.num_bytes), self.layout)
        self.transfer: Transfer = (
            make_transfer(self.slots)
            if make_transfer
            else Disorder(self.slots, WEIGHTS[dtype], **disorder)
        )
        self.policies = make_policies(policy, capacity)
        ledger = SlotLedger(SHAPE.num_layers, SHAPE.num_experts, num_slots)
        executor = executor or InlineExecutor()
        kernels = kernels or WatchedKernels()
        self.host = HostTier(self.slots, ledger, self.transfer)
        if isinstance(self.transfer, Disorder):
            self.host.news = DisorderlyNews(self.transfer)
        batched = BatchedExperts.of(self.slots, kernels, executor.num_cores)
        experts = HostExpertExecutor(self.host, executor, kernels, batched)
        with pytest.MonkeyPatch.context() as patch:
            if isinstance(self.transfer, Disorder):  # which is asked whenever a wait is given up
                patch.setattr(compiled_residents, "INTERRUPT_POLL_S", 1e-4)
            self.runtime = ExpertRuntime(SHAPE, self.policies, experts)
        residents = self.runtime.residents()
        if isinstance(self.transfer, Disorder) and residents is not None:
            wait_for_disorder(residents, self.transfer)
        self.runtime.load()
        self.check()

    def run(self, call: StepInput) -> Tensor:
        registrar = Registrar()
        out = torch.full(call.x.shape, torch.nan)
        arguments = (call.layer, call.x, call.routing, call.step)
        ExpertRegistrar(SHAPE).forward(LayerCall(*arguments, registrar, out))
        workspace = Workspace(Arena(registrar.arena_bytes).bytes)
        self.runtime.begin_pass(call.step)
        self.runtime.forward(LayerCall(*arguments, workspace, out))
        self.runtime.end_pass()
        return out

    def check(self) -> None:
        ledger = self.host.ledger
        ledger.check_integrity()
        num_held = ledger.num_resident + len(self.host.read_ahead) + self.host.num_set_aside
        assert ledger.num_free + num_held == ledger.num_slots, "no slot stays taken"
        for layer, capacity in enumerate(self.capacity):
            assert ledger.is_resident(layer).sum() <= capacity


def make_policies(name: str, capacity: Sequence[int]) -> Policies:
    options = {"tau": 2} if name == "tide" else {}
    costs = Costs.unknown(1)
    setting = PolicyInputs(capacity, SHAPE.num_experts, costs, options=options)
    return recipe(name).policies_without_device(setting)


capacities = st.lists(
    st.integers(0, SHAPE.num_experts), min_size=SHAPE.num_layers, max_size=SHAPE.num_layers
)
calls = st.lists(
    st.tuples(st.integers(0, 10**6), st.integers(0, SHAPE.num_layers - 1), st.integers(1, 40)),
    min_size=1,
    max_size=8,
)


def make_steps(numbers: list[tuple[int, int, int]], dtype: torch.dtype) -> list[StepInput]:
    return [
        make_step(seed, layer, index, num_tokens, dtype)
        for index, (seed, layer, num_tokens) in enumerate(numbers)
    ]


@pytest.mark.invariant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", POLICIES)
@given(
    numbers=calls,
    capacity=capacities,
    num_staging=st.integers(1, 7),
    seed=st.integers(0, 10**6),
    executor=st.sampled_from(EXECUTORS),
)
def test_bits_never_depend_on_placement_or_on_the_order_of_reads(
    policy: str,
    dtype: torch.dtype,
    numbers: list[tuple[int, int, int]],
    capacity: list[int],
    num_staging: int,
    seed: int,
    executor: Executor,
) -> None:
    rig = Rig(policy, capacity, dtype, num_staging, executor=executor, seed=seed)
    for call in make_steps(numbers, dtype):
        result = rig.run(call)
        rig.check()
        assert torch.equal(result, dense_oracle(call, WEIGHTS[dtype]))


@pytest.mark.invariant
@given(
    numbers=st.lists(
        st.tuples(st.integers(0, 10**6), st.integers(0, 1), st.integers(1, 24)), max_size=8
    ),
    capacity=capacities,
    policy=st.sampled_from(POLICIES),
    executor=st.sampled_from(EXECUTORS),
)
def test_compiled_experts_have_the_same_bits_at_once_and_one_by_one(
    numbers: list[tuple[int, int, int]], capacity: list[int], policy: str, executor: Executor
) -> None:
    """A step of few tokens and all experts resident is one call.

    So are residents of few tokens, unless an expert waits for a slot; others run each by itself.
    """
    kernels = choose_kernels("auto", torch.bfloat16)
    make = partial(Rig, dtype=torch.bfloat16, executor=executor, kernels=kernels)
    everything = make("static", [SHAPE.num_experts] * SHAPE.num_layers)
    some = make(policy, capacity)
    for call in make_steps(numbers, torch.bfloat16):
        result = some.run(call)
        some.check()
        assert torch.equal(result, everything.run(call))


@pytest.mark.invariant
@pytest.mark.parametrize("policy", POLICIES)
@given(numbers=calls, capacity=capacities)
def test_reads_on_real_threads(
    policy: str, numbers: list[tuple[int, int, int]], capacity: list[int]
) -> None:
    with ThreadPoolExecutor(3) as pool:
        rig = Rig(
            policy,
            capacity,
            make_transfer=lambda slots: Threads(slots, WEIGHTS[torch.float32], pool),
            executor=POOL,
        )
        for call in make_steps(numbers, torch.float32):
            assert torch.equal(rig.run(call), dense_oracle(call, WEIGHTS[torch.float32]))
            rig.check()


@pytest.mark.parametrize("tile_rows", TILES)
@given(numbers=calls, policy=st.sampled_from(POLICIES), capacity=capacities)
def test_every_miss_is_one_read_and_no_hit_is_any(
    tile_rows: int, numbers: list[tuple[int, int, int]], policy: str, capacity: list[int]
) -> None:
    rig = Rig(policy, capacity)
    num_preloaded = len(rig.transfer.started)
    assert rig.runtime.stats.num_misses == 0, "what is loaded beforehand was not missed"
    hits = misses = 0
    for call in make_steps(numbers, torch.float32):
        wanted = set(call.routing.experts.flatten().tolist())
        present = set(np.flatnonzero(rig.host.ledger.is_resident(call.layer)).tolist())
        before = len(rig.transfer.started)
        with tile_of(tile_rows):
            rig.run(call)
        reads = {e for layer, e in rig.transfer.started[before:] if layer == call.layer}
        assert reads <= wanted - present
        hits += len(wanted & present)
        misses += len(wanted - present)
    stats = rig.host.stats
    assert (rig.runtime.stats.num_hits, rig.runtime.stats.num_misses) == (hits, misses)
    num_reads = num_preloaded + misses + stats.num_wasted + len(rig.host.read_ahead)
    assert len(rig.transfer.started) == num_reads
    assert rig.runtime.as_dict()["hit_rate"] == hits / (hits + misses)
    assert stats.num_admitted - stats.num_evicted == rig.host.ledger.num_resident
    expert_bytes = 3 * SHAPE.hidden_size * SHAPE.expert_size * 4
    assert stats.read_bytes == (num_preloaded + misses) * expert_bytes


def test_every_read_is_under_way_before_the_first_resident_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    rig = Rig("static", [0, 3], num_staging=3)
    start = rig.transfer.start

    def noted_start(layer: int, expert: int, slot: int) -> Ticket:
        events.append(f"read {expert}")
        return start(layer, expert, slot)

    def noted_product(
        x: Tensor, weights: ExpertWeights, gate: Tensor, up: Tensor, out: Tensor
    ) -> None:
        events.append("run")
        REFERENCE.gated_mlp(x, weights, gate, up, out)

    monkeypatch.setattr(rig.transfer, "start", noted_start)
    monkeypatch.setattr(Experts, "product", noted_product)
    rig.run(prompt(every_expert(layer=1)))
    assert events == ["read 3", "read 4", "read 5", *["run"] * 6]


def test_reads_begin_before_it_is_decided_who_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig("static", [2, 2], num_staging=3)
    decide = Policies.decide
    begun: list[list[tuple[int, int]]] = []

    def noted(*arguments: Any) -> Decision:
        begun.append(started(rig))
        return decide(*arguments)

    monkeypatch.setattr(Policies, "decide", noted)
    call = prompt(every_expert(layer=1))
    assert torch.equal(rig.run(call), dense_oracle(call, WEIGHTS[torch.float32]))
    assert begun == [[(1, 2), (1, 3), (1, 4)]], "as many as there are free slots"
    assert started(rig) == [(1, 2), (1, 3), (1, 4), (1, 5)], "each once"
    rig.check()


def test_reads_that_began_are_ended_where_deciding_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig("lru", [2, 2], num_staging=3)

    def fails(*arguments: Any) -> Decision:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Policies, "decide", fails)
        rig.run(every_expert())
    rig.check()
    call = every_expert()
    assert torch.equal(rig.run(call), dense_oracle(call, WEIGHTS[torch.float32]))


def every_expert(layer: int = 0, index: int = 0) -> StepInput:
    """A step that hits all six experts."""
    call = make_step(1, layer, index, 2, torch.float32)
    experts = torch.tensor([[0, 1, 2], [3, 4, 5]])
    return call._replace(routing=Routing(experts, call.routing.weights))


def prompt(call: StepInput) -> StepInput:
    """After its last layer nothing is read ahead."""
    return call._replace(step=Step(StepKind.PREFILL, 0))


def test_as_many_reads_as_slots_stay_under_way() -> None:
    """With two slots the third read starts as soon as the first expert was used."""
    rig = Rig("static", [0, 0], num_staging=2)
    under_way: list[int] = []
    wait = DisorderlyNews.wait

    def noted(news: DisorderlyNews, timeout: float | None = None) -> bool:
        under_way.append(len(rig.transfer.started))
        return wait(news, timeout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DisorderlyNews, "wait", noted)
        rig.run(prompt(every_expert(layer=1)))
    assert under_way == [2, 3, 4, 5, 6, 6]


@pytest.mark.parametrize("policy", POLICIES)
@given(
    numbers=calls,
    capacity=capacities,
    failing=st.sets(st.integers(0, 20), max_size=4),
    tile_rows=st.sampled_from(TILES),
    executor=st.sampled_from(EXECUTORS),
    seed=st.integers(0, 99),
)
def test_a_read_that_fails_leaves_a_usable_runtime(
    policy: str,
    numbers: list[tuple[int, int, int]],
    capacity: list[int],
    failing: set[int],
    tile_rows: int,
    executor: Executor,
    seed: int,
) -> None:
    steps = make_steps(numbers, torch.float32)
    rig = Rig(policy, capacity, executor=executor, seed=seed)
    first = len(rig.transfer.started)
    rig.transfer.fail_at = {first + number for number in failing}
    with tile_of(tile_rows):
        for call in steps:
            try:
                result = rig.run(call)
            except StorageError as error:
                assert str(error).startswith("read ")
            else:
                assert torch.equal(result, in_one_buffer(call, REFERENCE, tile_rows))
            rig.check()
        rig.transfer.fail_at = set()
        rig.host.pause()
        check_all(rig, steps, tile_rows)


def check_all(rig: Rig, steps: list[StepInput], tile_rows: int) -> None:
    """It computes all of them as if nothing had been."""
    for call in steps:
        assert torch.equal(rig.run(call), in_one_buffer(call, REFERENCE, tile_rows))
        rig.check()


@pytest.mark.parametrize("policy", POLICIES)
@given(
    numbers=calls,
    capacity=capacities,
    num_staging=st.integers(1, 3),
    at=st.integers(0, 25),
    tile_rows=st.sampled_from(TILES),
    executor=st.sampled_from(EXECUTORS),
)
def test_an_interrupt_at_any_product_leaves_a_usable_runtime(
    policy: str,
    numbers: list[tuple[int, int, int]],
    capacity: list[int],
    num_staging: int,
    at: int,
    tile_rows: int,
    executor: Executor,
) -> None:
    steps = make_steps(numbers, torch.float32)
    rig = Rig(policy, capacity, num_staging=num_staging, executor=executor)
    with tile_of(tile_rows):
        with interrupted_at(at), suppress(KeyboardInterrupt):
            for call in steps:
                rig.run(call)
        rig.check()
        check_all(rig, steps, tile_rows)


@pytest.mark.parametrize("is_after", [False, True])
@given(numbers=calls, capacity=capacities, policy=st.sampled_from(POLICIES), at=st.integers(0, 3))
def test_an_interrupt_at_any_call_over_several_leaves_a_usable_runtime(
    numbers: list[tuple[int, int, int]], capacity: list[int], policy: str, at: int, is_after: bool
) -> None:
    steps = make_steps(numbers, torch.bfloat16)
    kernels = choose_kernels("auto", torch.bfloat16)
    make = partial(Rig, dtype=torch.bfloat16, executor=POOL, kernels=kernels)
    rig, everything = make(policy, capacity), make("static", [SHAPE.num_experts] * SHAPE.num_layers)
    count, run = itertools.count(), BatchedExperts.run

    def run_or_stop(batched: BatchedExperts, *arguments: Any) -> None:
        is_due = next(count) == at
        if is_due and not is_after:
            raise KeyboardInterrupt
        run(batched, *arguments)
        if is_due:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(BatchedExperts, "run", run_or_stop)
        for call in steps:
            rig.run(call)
    rig.check()
    for call in steps:
        assert torch.equal(rig.run(call), everything.run(call))
        rig.check()


@contextmanager
def interrupted_at(number: int) -> Iterator[None]:
    """Ctrl-C inside the expert product of that number."""
    count = [0]

    def product(x: Tensor, weights: ExpertWeights, gate: Tensor, up: Tensor, out: Tensor) -> None:
        count[0] += 1
        if count[0] > number:
            raise KeyboardInterrupt
        REFERENCE.gated_mlp(x, weights, gate, up, out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Experts, "product", product)
        yield


def test_an_interrupt_while_waiting_for_a_read() -> None:
    rig = Rig("tide", [2, 2], num_staging=3)
    wait = DisorderlyNews.wait
    waits = []

    def interrupted(news: DisorderlyNews, timeout: float | None = None) -> bool:
        waits.append(news)
        if len(waits) == 3:
            raise KeyboardInterrupt
        return wait(news, timeout)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(DisorderlyNews, "wait", interrupted)
        rig.run(every_expert())
    rig.check()
    call = every_expert(index=1)
    assert torch.equal(rig.run(call), dense_oracle(call, WEIGHTS[torch.float32]))


def test_reads_under_way_are_waited_for_before_their_slots_are_given_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A read that cannot be cancelled any more still writes into its slot."""
    waited_for = threading.Event()
    answers: dict[int, Future[int]] = {}  # by slot
    rig = Rig("static", [0, 0], num_staging=3)

    def read(slot: int, has_begun: threading.Event) -> int:
        has_begun.set()
        if slot == 0:
            raise StorageError("read 0 failed")
        waited_for.wait(60)  # until the runtime waits for it
        return fill(rig.slots, slot, WEIGHTS[torch.float32][0, 0])

    def start(layer: int, expert: int, slot: int) -> Ticket:
        has_begun = threading.Event()
        answers[slot] = pool.submit(read, slot, has_begun)
        has_begun.wait(60)
        return answers[slot]

    def noted_wait(futures: Iterable[Future[int]], limit_s: float) -> object:
        wanted = set(futures)
        if wanted & set(answers.values()):
            waited_for.set()
        return wait(wanted, limit_s)

    reclaim = rig.host.ledger.reclaim

    def checked_reclaim(set_aside: Collection[int]) -> None:
        assert not set_aside and all(answer.done() for answer in answers.values())
        reclaim(set_aside)

    monkeypatch.setattr(rig.transfer, "start", start)
    monkeypatch.setattr(host_tier, "wait", noted_wait)
    monkeypatch.setattr(rig.host.ledger, "reclaim", checked_reclaim)
    rig.host.news = threading.Event()
    with ThreadPoolExecutor(3) as pool:
        try:
            with pytest.raises(StorageError, match="read 0"):
                rig.run(every_expert())
        finally:
            waited_for.set()
    assert len(answers) == 3
    rig.check()


def test_products_under_way_are_waited_for_before_an_error_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A compute thread still reads from its slot and writes to the workspace; none begins anew."""
    all_began, is_waited_for = threading.Barrier(3, timeout=60), threading.Event()
    here, ended = threading.local(), []
    pool_submit, pool_drain = POOL.submit, POOL.drain
    numbers, products = itertools.count(), itertools.count()

    def submit(work: Callable[[], None]) -> Future[None]:
        number = next(numbers)

        def numbered() -> None:
            here.number = number
            work()

        return pool_submit(numbered)

    def product(x: Tensor, weights: ExpertWeights, gate: Tensor, up: Tensor, out: Tensor) -> None:
        if next(products) < 3:
            all_began.wait()
        if here.number == 0:
            raise KeyboardInterrupt
        is_waited_for.wait(60)
        ended.append(here.number)

    def noted_drain() -> None:
        is_waited_for.set()
        pool_drain()

    rig = Rig("static", [0, 6], executor=POOL)
    monkeypatch.setattr(POOL, "submit", submit)
    monkeypatch.setattr(Experts, "product", product)
    monkeypatch.setattr(POOL, "drain", noted_drain)
    try:
        with pytest.raises(KeyboardInterrupt):
            rig.run(every_expert(layer=1))
        assert sorted(ended) == [1, 2]
    finally:
        is_waited_for.set()
    rig.check()


def read_ahead_rig() -> Rig:
    """All of layer 0 resident, two of layer 1; the first layer has just run."""
    rig = Rig("static", [6, 2], num_staging=3)
    rig.run(every_expert(0))
    return rig


def started(rig: Rig) -> list[tuple[int, int]]:
    return rig.transfer.started[sum(rig.capacity) :]  # after what is loaded beforehand


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("layer", range(SHAPE.num_layers))
def test_the_layer_that_comes_next_is_read_ahead_where_nearly_all_experts_are_hit(
    layer: int, executor: Executor
) -> None:
    """The next one of a pass; behind the last one, the first of a pass that is repeated."""
    following, capacity = 1 - layer, [2, 2]
    capacity[layer] = SHAPE.num_experts
    rig = Rig("static", capacity, num_staging=3, executor=executor)
    rig.run(every_expert(layer))
    expected = [(following, 2), (following, 3), (following, 4)]
    assert started(rig) == expected, "as many as there are free slots"
    rig.check()
    call = every_expert(following, index=layer)
    assert torch.equal(rig.run(call), dense_oracle(call, WEIGHTS[torch.float32]))
    assert started(rig)[3:] == [(following, 5)], "all of the other layer is there"
    stats = rig.host.stats
    assert (rig.runtime.stats.num_misses, stats.num_ahead, stats.num_wasted) == (4, 3, 0)


@pytest.mark.parametrize(
    "step",
    [Step(StepKind.PREFILL, 0), Step(StepKind.DECODE, 0), Step(StepKind.DENOISE, 0, is_last=True)],
)
def test_nothing_is_read_ahead_of_a_pass_that_is_another_or_will_not_come(step: Step) -> None:
    rig = Rig("static", [2, 6], num_staging=3)
    rig.run(every_expert(1)._replace(step=step))
    assert not started(rig) and not len(rig.host.read_ahead)


def test_what_a_pause_ends_is_read_again() -> None:
    """Between passes slots may go; the next pass does not miss what was on its way."""
    rig = Rig("static", [2, 6], num_staging=3)
    rig.run(every_expert(1))
    rig.host.pause()
    assert not len(rig.host.read_ahead) and rig.host.stats.num_wasted == 3
    call = every_expert(0, index=1)
    assert torch.equal(rig.run(call), dense_oracle(call, WEIGHTS[torch.float32]))
    rig.check()


def test_a_slot_that_comes_free_while_a_read_is_waited_for_is_filled() -> None:
    """Read 1 ends once a third one has begun, in the slot of expert 0."""
    rig = Rig("static", [0, 6], num_staging=2, executor=POOL)
    third_begins = threading.Event()
    weights = WEIGHTS[torch.float32]

    def read(expert: int, slot: int) -> int:
        if expert == 1:
            assert third_begins.wait(60)
        return fill(rig.slots, slot, weights[0, expert])

    with ThreadPoolExecutor(2) as pool, pytest.MonkeyPatch.context() as patch:

        def start(layer: int, expert: int, slot: int) -> Ticket:
            if expert == 2:
                third_begins.set()
            return pool.submit(read, expert, slot)

        patch.setattr(rig.transfer, "start", start)
        call = every_expert(0)
        assert torch.equal(rig.run(call), dense_oracle(call, weights))
    rig.check()


def test_slots_that_come_free_while_others_are_in_use_read_ahead() -> None:
    """Reads of layer 1 begin while an expert of layer 0 is still at work."""
    rig = Rig("static", [5, 0], num_staging=1, executor=POOL)
    has_read_ahead = threading.Event()
    start = rig.transfer.start

    def noted_start(layer: int, expert: int, slot: int) -> Ticket:
        if layer == 1:
            has_read_ahead.set()
        return start(layer, expert, slot)

    def product(x: Tensor, weights: ExpertWeights, gate: Tensor, up: Tensor, out: Tensor) -> None:
        if weights.gate.data_ptr() == rig.slots.weights(0, 0).gate.data_ptr():
            assert has_read_ahead.wait(60)
        REFERENCE.gated_mlp(x, weights, gate, up, out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rig.transfer, "start", noted_start)
        patch.setattr(Experts, "product", product)
        assert rig.host.ledger.slot_of(0, 0) == 0
        rig.run(every_expert(0))
    rig.check()


def test_a_step_of_few_experts_reads_nothing_ahead() -> None:
    rig = Rig("static", [6, 2], num_staging=3)
    rig.run(make_step(1, 0, 0, 1, torch.float32))
    assert not started(rig) and not len(rig.host.read_ahead)


def test_what_was_read_ahead_for_nothing_is_dropped() -> None:
    for call in (make_step(3, 1, 0, 1, torch.float32), every_expert(0)):
        rig = read_ahead_rig()
        wanted = set(call.routing.experts.flatten().tolist()) if call.layer else set()
        num_used = len({2, 3, 4} & wanted)
        assert torch.equal(rig.run(call), dense_oracle(call, WEIGHTS[torch.float32]))
        stats = rig.host.stats
        assert (stats.num_ahead, stats.num_wasted) == (num_used, 3 - num_used)
        rig.check()


@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_read_ahead_that_fails_matters_to_those_who_want_it(is_wanted: bool) -> None:
    rig = Rig("static", [6, 2], num_staging=3)
    rig.transfer.fail_at = {8}
    rig.run(every_expert(0))
    call = every_expert(1)
    if is_wanted:
        with pytest.raises(StorageError, match="read 8"):
            rig.run(call)
        rig.check()
    else:
        first = every_expert(0, index=1)
        assert torch.equal(rig.run(first), dense_oracle(first, WEIGHTS[torch.float32]))
    assert torch.equal(rig.run(call), dense_oracle(call, WEIGHTS[torch.float32]))
    rig.check()


@given(at=st.integers(0, 12), is_after=st.booleans(), executor=st.sampled_from(EXECUTORS))
def test_an_interrupt_at_any_start_of_a_read_leaves_a_usable_runtime(
    at: int, is_after: bool, executor: Executor
) -> None:
    rig = Rig("lru", [2, 2], num_staging=3, executor=executor)
    start, numbers = rig.transfer.start, itertools.count()

    def interrupted(layer: int, expert: int, slot: int) -> Ticket:
        number = next(numbers)
        if number == at and not is_after:
            raise KeyboardInterrupt
        ticket = start(layer, expert, slot)
        if number == at:
            raise KeyboardInterrupt
        return ticket

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rig.transfer, "start", interrupted)
        for layer in (0, 1, 0):
            try:
                rig.run(every_expert(layer))
            except KeyboardInterrupt:
                rig.check()
                break
    for layer in (0, 1):
        call = every_expert(layer)
        assert torch.equal(rig.run(call), dense_oracle(call, WEIGHTS[torch.float32]))
        rig.check()


def test_no_slot_for_an_absent_expert_is_an_error_and_not_a_wait_without_end() -> None:
    rig = Rig("static", [2, 0], num_staging=0)
    with pytest.raises(InternalError, match="experts wait and no slot is free"):
        rig.run(every_expert())
    rig.check()


class Deaf:
    """A transfer that answers at once, but for some reads, which end when they are let."""

    def __init__(self, slots: ExpertSlots, stuck: set[tuple[int, int]]) -> None:
        self.stuck = stuck
        self.waiting: list[tuple[Future[int], int]] = []  # with their slots
        self._slots = slots

    def start(self, layer: int, expert: int, slot: int) -> Ticket:
        answer: Future[int] = Future()
        answer.set_running_or_notify_cancel()
        if (layer, expert) in self.stuck:
            self.waiting.append((answer, slot))
        else:
            answer.set_result(fill(self._slots, slot, WEIGHTS[torch.float32][layer, expert]))
        return answer

    def let(self) -> None:
        """They write to their slots what nobody expects there, and end."""
        for answer, slot in self.waiting:
            for part in range(3):
                self._slots.part(0, slot, part)[:] = 0xFF
            answer.set_result(0)
        self.waiting.clear()

    def describe(self, layer: int, expert: int) -> str:
        return f"expert {expert} of MoE layer {layer}"

    def drain(self) -> None:
        assert not self.waiting, "whoever drains now waits for ever"

    def close(self) -> None:
        """Has no threads."""


@contextmanager
def short_limits() -> Iterator[None]:
    """While a read is waited for that never ends; what does end has longer on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (host_tier, file_reader):
            patch.setattr(module, "WAIT_LIMIT_S", 0.5)
        patch.setattr(host_tier, "END_LIMIT_S", 0.05)
        yield


def stalled() -> Any:
    return pytest.raises(StorageError, match=r"not ended within 0\.5 s")


def deaf_rig(capacity: list[int], executor: Executor, *stuck: tuple[int, int]) -> tuple[Rig, Deaf]:
    rig = Rig("static", capacity, make_transfer=lambda slots: Deaf(slots, set()), executor=executor)
    rig.transfer.stuck.update(stuck)
    return rig, rig.transfer


def check_set_aside(rig: Rig, slots: list[int]) -> None:
    """They are nobody's, and nobody gets them."""
    rig.check()
    assert rig.host.num_set_aside == len(slots)
    ledger = rig.host.ledger
    assert not any(ledger.is_free(slot) or ledger.is_bound(slot) for slot in slots)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("tile_rows", TILES)
def test_a_read_that_never_ends_fails_its_pass_alone(
    executor: Executor, tile_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pass of one tile, and of several."""
    monkeypatch.setattr(rows, "TILE_ROWS", tile_rows)
    rig, transfer = deaf_rig([2, 6], executor, (0, 4))
    call = make_step(1, 0, 0, 40, torch.float32)
    assert 4 in call.routing.experts
    expected = dense_oracle(call, WEIGHTS[torch.float32])
    with short_limits(), stalled():
        rig.run(call)
    check_set_aside(rig, [slot for _, slot in transfer.waiting])
    transfer.stuck.clear()
    assert torch.equal(rig.run(call), expected), "its bytes are read into another slot"
    check_set_aside(rig, [slot for _, slot in transfer.waiting])
    transfer.let()
    for _ in range(2):
        assert torch.equal(rig.run(call), expected)
        check_set_aside(rig, [])


def test_a_read_ahead_that_never_ends_fails_only_what_wants_it() -> None:
    rig, transfer = deaf_rig([6, 2], POOL, (1, 3))
    rig.run(every_expert(0))
    assert len(rig.host.read_ahead) and transfer.waiting
    for call in (every_expert(0, index=1), every_expert(0, index=2)):
        transfer.stuck.clear()
        assert torch.equal(rig.run(call), dense_oracle(call, WEIGHTS[torch.float32]))
        rig.check()
    with short_limits(), stalled():
        rig.host.pause()  # memory is to be moved
    transfer.let()
    rig.host.pause()
    check_set_aside(rig, [])


def test_no_slot_but_that_of_a_read_that_never_ends() -> None:
    rig = Rig("static", [0, 6], num_staging=1, make_transfer=lambda slots: Deaf(slots, {(0, 0)}))
    for _ in range(2):  # waits for the read itself, then for its slot
        with short_limits(), stalled():
            rig.run(every_expert())
        check_set_aside(rig, [slot for _, slot in rig.transfer.waiting])
    rig.transfer.stuck.clear()
    timer = threading.Timer(0.03, rig.transfer.let)
    timer.start()
    call = every_expert()
    assert torch.equal(rig.run(call), dense_oracle(call, WEIGHTS[torch.float32]))
    timer.join()


def test_a_runtime_closes_beside_a_read_that_never_ends() -> None:
    rig, transfer = deaf_rig([6, 2], POOL, (1, 3))
    rig.run(every_expert(0))
    assert transfer.waiting
    with short_limits():
        rig.runtime.close()
    assert transfer.waiting


def test_there_are_two_executors() -> None:
    """The host's, and a device's beside it, for any rows of a pass and any place of its experts."""
    modules = Path(host_tier.__file__).parent.glob("*.py")
    names = [f"lowtide.experts.{module.stem}" for module in modules]
    known = [each for name in names for each in vars(import_module(name)).values()]
    executors = {each for each in known if isinstance(each, type) and hasattr(each, "run_tile")}
    assert executors == {HostExpertExecutor, DeviceExpertExecutor}
