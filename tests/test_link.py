"""The slots of a device under any programme of decisions: the right bytes, and no slot lost.

A world of one thread stands in for device, host threads and disk. What is queued there ends in a
random order, but a legal one, and whenever somebody looks or waits; a wait that nothing can end
is an error. Every run checks whose bytes it reads.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from random import Random
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowtide.core import (
    Assignment,
    BoolArray,
    Costs,
    Curve,
    Facts,
    IntArray,
    MoEShape,
    Moves,
    Step,
    StepKind,
)
from lowtide.errors import DeviceError, StorageError
from lowtide.experts import (
    device_executor,
    device_tier,
    host_executor,
    host_reads,
    host_tier,
    link,
    read_ahead,
    rows,
    runtime,
    slots,
)
from lowtide.experts import (
    work as work_module,
)
from lowtide.experts.device import ExpertGroup
from lowtide.experts.device_executor import DeviceExpertExecutor
from lowtide.experts.device_tier import DeviceTier
from lowtide.experts.host_executor import HostExpertExecutor
from lowtide.experts.host_reads import HostReads
from lowtide.experts.host_tier import HostTier
from lowtide.experts.link import Link
from lowtide.experts.rows import ExpertBuffers, ExpertRows, LayerCall, Routing
from lowtide.experts.runtime import ExpertRuntime
from lowtide.experts.slots import SlotLedger
from lowtide.kernels.reference import REFERENCE, Kernels
from lowtide.memory.workspace import Workspace
from lowtide.policies.decision import Policies
from lowtide.policies.prefetch import Ahead, Gate, PrefetchOutcome
from lowtide.policies.presets import recipe
from lowtide.policies.recipe import PolicyInputs

GARBAGE = -1.0
HIDDEN = 2


@pytest.fixture(autouse=True, scope="module")
def small_tiles() -> Iterator[None]:
    """Passes of some hundred rows are long ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "TILE_ROWS", 32)
        yield


class Task:
    """Something that a queue of the world does: it begins, and later it ends or fails."""

    def __init__(self, begin: Callable[[], None], end: Callable[[], None], after: Any) -> None:
        self.begin = begin
        self.end = end
        self.after = after
        self.has_begun = self.has_ended = False
        self.error: Exception | None = None
        self.told: list[Callable[[Any], None]] = []  # once it has ended


class World:
    """Queues of tasks, each in its own order, as a random source lets them go on."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.can_fail = False
        self._pace = random.choice([0.02, 0.3, 0.7])
        self._queues: dict[str, deque[Task]] = {}
        self._speeds: dict[str, float] = {}  # of each queue

    def queue(self, name: str, task: Task) -> None:
        self._queues.setdefault(name, deque()).append(task)
        self._speeds.setdefault(name, self.random.choice([1.0, 0.1, 0.01]))

    def look(self) -> None:
        """Time passes whenever anybody looks."""
        while self.random.random() < self._pace and self.step():
            pass

    def until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            assert self.step(), "nothing that is under way can end"

    def drain(self, *names: str) -> None:
        queues = [queue for name, queue in self._queues.items() if name.startswith(names)]
        self.until(lambda: not any(queues))

    def step(self) -> bool:
        heads = [(name, queue[0]) for name, queue in self._queues.items() if queue]
        ready = [(n, t) for n, t in heads if t.after is None or t.after.has_ended]
        if not ready:
            return False
        [(name, task)] = self.random.choices(ready, [self._speeds[name] for name, _ in ready])
        if not task.has_begun:
            task.has_begun = True
            task.begin()
        else:
            self._end(task)
            self._queues[name].popleft()
        return True

    def _end(self, task: Task) -> None:
        try:
            if task.after is not None and task.after.error is not None:
                raise DeviceError("what it waited for failed")
            if self.can_fail and self.random.random() < 0.02:
                raise StorageError("on purpose")
            task.end()
        except (DeviceError, StorageError) as error:
            task.error = error
        task.has_ended = True
        for tell in task.told:
            tell(None)


class FakeEvent:
    def __init__(self, world: World, task: Task) -> None:
        self._world = world
        self._task = task

    @property
    def has_ended(self) -> bool:
        return self._task.has_ended

    @property
    def error(self) -> Exception | None:
        return self._task.error

    def is_done(self) -> bool:
        self._world.look()
        return self._task.has_ended

    def wait(self, limit_s: float = 1.0) -> None:
        self._world.until(lambda: self._task.has_ended)
        if self._task.error is not None:
            raise DeviceError(str(self._task.error))


class LateFuture(Future[Any]):
    """Of work that the world does when it likes."""

    def __init__(self, world: World, name: str, begin: Callable[[], None], end: Any) -> None:
        super().__init__()
        self._world = world
        self._answer: Any = None
        self.task = Task(begin, lambda: setattr(self, "_answer", end()), None)
        world.queue(name, self.task)

    def done(self) -> bool:
        self._world.look()
        return self.task.has_ended

    def add_done_callback(self, fn: Callable[[Any], None]) -> None:
        self.task.told.append(fn)

    def cancel(self) -> bool:
        """It will not happen any more: here because it has."""
        self._world.until(lambda: self.task.has_ended)
        return True

    def result(self, timeout: float | None = None) -> Any:
        self._world.until(lambda: self.task.has_ended)
        if self.task.error is not None:
            raise self.task.error
        return self._answer


class FakeNews(threading.Event):
    """Whoever waits for any, time passes for him."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def wait(self, timeout: float | None = None) -> bool:
        if not self.is_set():
            assert self._world.step(), "nothing that is under way can end"
        return True


class FakeSlots:
    """Slots of one number each: whose expert it is."""

    class Layout(NamedTuple):
        num_bytes: int = 4
        shapes: tuple[tuple[int, ...], ...] = 3 * ((1, 1),)

    layout = Layout()

    def __init__(self, num_slots: int) -> None:
        self.values = torch.full((max(1, num_slots),), GARBAGE)

    def image(self, slot: int) -> Tensor:
        return self.values[slot : slot + 1]

    def weights(self, layer: int, slot: int) -> Tensor:
        return self.image(slot)


class FakeDevice:
    """Copies and runs in two queues; each run's output is what it found in the slot."""

    torch_device = torch.device("cpu")
    kernels = REFERENCE

    def __init__(self, world: World, num_slots: int) -> None:
        self.num_slots = num_slots
        self._world = world
        self.values = FakeSlots(num_slots).values
        self._tasks: list[Task] = []

    def copy(self, source: Tensor, slot: int, after: Any) -> FakeEvent:
        def end() -> None:
            self.values[slot] = source[0]

        return self._queue("copies", lambda: self.values[slot].fill_(GARBAGE), end, after)

    def run(
        self, group: ExpertGroup, rows: ExpertRows, buffers: ExpertBuffers, after: Any
    ) -> FakeEvent:
        assert (np.diff(group.experts) > 0).all()
        pairs = [(rows.pairs(expert), slot) for expert, slot in zip(*group[1:], strict=True)]

        def begin() -> None:
            for of_expert, slot in pairs:
                buffers.parts[of_expert] = self.values[slot]

        def end() -> None:
            for of_expert, slot in pairs:
                same = buffers.parts[of_expert] == self.values[slot]
                assert same.all(), "a slot changed under a run"

        return self._queue("runs", begin, end, after)

    def to_host(self, x: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
        self._world.drain("runs")
        return x, experts

    def host_parts(self, parts: Tensor) -> Tensor:
        return parts

    def stage(self, predicted: Tensor) -> Tensor:
        return predicted

    def from_host(self, *_: Any) -> None:
        pass

    def host_work(self, num_tokens: Sequence[int], work: Any) -> Any:
        return work

    def join(self) -> None:
        self._world.drain("runs")
        for task in self._tasks:
            if task.error is not None:
                raise DeviceError(str(task.error))

    def drain(self) -> None:
        self._world.drain("copies", "runs")
        self._tasks.clear()

    def close(self) -> None:
        pass

    def _queue(self, name: str, begin: Any, end: Any, after: Any) -> FakeEvent:
        self._world.look()
        task = Task(begin, end, after)
        self._tasks.append(task)
        self._world.queue(name, task)
        return FakeEvent(self._world, task)


class WhoseWeights(Kernels):
    """The host's products, as on the device: whose weights were found."""

    def gated_mlp(self, x: Tensor, weights: Tensor, gate: Tensor, up: Tensor, out: Tensor) -> None:
        out[:] = weights


class FakeBatchedExperts:
    """Any experts of few tokens in one call, which reads all their slots."""

    def __init__(self, random: Random, slots: FakeSlots) -> None:
        self._random = random
        self._values = slots.values

    def takes_experts(self, num_tokens: IntArray) -> BoolArray:
        return num_tokens <= self._random.randint(0, 4)

    def run(self, groups: IntArray, parts: Tensor, gate: Tensor, up: Tensor, layer: int) -> None:
        for slot, first, num_rows in groups.tolist():
            parts[first : first + num_rows] = self._values[slot]


class FakeExecutor:
    """Two host threads."""

    num_threads = num_cores = 2

    def __init__(self, world: World) -> None:
        self._world = world

    def submit(self, work: Callable[[], None]) -> Future[None]:
        name = f"host {self._world.random.randrange(2)}"
        return LateFuture(self._world, name, lambda: None, work)

    def run(self, works: Sequence[Callable[[], None]]) -> None:
        for work in works:
            work()

    def drain(self) -> None:
        self._world.drain("host")

    def close(self) -> None:
        """Has no threads."""


class FakeTransfer:
    """Four readers, each of which spoils a slot at once and fills it later."""

    def __init__(self, world: World, values: Tensor, num_experts: int) -> None:
        self._world = world
        self._values = values
        self._num_experts = num_experts

    def start(self, layer: int, expert: int, slot: int) -> Future[int]:
        self._values[slot] = GARBAGE

        def end() -> int:
            self._values[slot] = value_of(layer, expert, self._num_experts)
            return 4

        name = f"reader {self._world.random.randrange(4)}"
        return LateFuture(self._world, name, lambda: None, end)

    def describe(self, layer: int, expert: int) -> str:
        return f"expert {expert} of MoE layer {layer}"

    def drain(self) -> None:
        self._world.drain("reader")

    def close(self) -> None:
        """Has no threads."""


def value_of(layer: int, expert: int, num_experts: int) -> float:
    return float(1 + layer * num_experts + expert)


class AnyPlacement:
    """Keeps whatever it likes, within the capacity."""

    def __init__(self, random: Random, capacity: list[int], num_experts: int) -> None:
        self._random = random
        self._num_experts = num_experts
        self.capacity = capacity

    def initial(self, layer: int) -> IntArray:
        num_initial = self._random.randint(0, self.capacity[layer])
        return np.array(sorted(self._random.sample(range(self._num_experts), num_initial)), int)

    def update(self, facts: Facts) -> Moves:
        layer, is_resident = facts.layer, facts.is_kept
        kept = np.flatnonzero(is_resident).tolist()
        assert len(kept) <= self.capacity[layer]
        evict = [expert for expert in kept if self._random.random() < 0.3]
        num_free = self.capacity[layer] - len(kept) + len(evict)
        absent = np.flatnonzero(~is_resident).tolist()
        admit = self._random.sample(absent, self._random.randint(0, min(num_free, len(absent))))
        is_owed = self._random.random() < 0.3
        return Moves(np.array(sorted(admit), int), np.array(evict, int), is_owed=is_owed)


class AnyAssign:
    """Sends experts wherever they can be run."""

    def __init__(self, random: Random, can_fetch: bool) -> None:
        self._random = random
        self._can_fetch = can_fetch

    def __call__(self, facts: Facts) -> Assignment:
        demand, arriving_s = facts.demand, facts.arriving_s
        assert arriving_s is not None
        share = self._random.choice([0.1, 0.5, 0.9, 1.0])
        can_run = demand.is_resident | np.isfinite(arriving_s) | self._can_fetch
        draws = [self._random.random() < share for _ in demand.experts]
        on_device = np.array(draws, np.bool_) & can_run
        fetch = demand.experts[on_device & ~demand.is_resident]
        return Assignment(
            demand.experts[on_device & demand.is_resident],
            fetch,
            demand.experts[~on_device],
        )


class AnyPrefetch:
    gate = Gate.NONE

    def __init__(self, random: Random) -> None:
        self._random = random

    def observe(self, facts: Facts) -> None:
        pass

    def record(self, outcome: PrefetchOutcome) -> None:
        pass

    def choose(self, ahead: Ahead) -> IntArray:
        absent = np.flatnonzero(~ahead.is_kept).tolist()
        return np.array(self._random.sample(absent, self._random.randint(0, len(absent))), int)


class Machine:
    """A hybrid runtime of random size in a world of its own."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.world = World(random)
        num_layers, num_experts = random.choice([1, 1, 2, 3]), random.randint(2, 7)
        self.shape = MoEShape(num_layers, num_experts, random.randint(1, 2), HIDDEN, HIDDEN)
        self.capacity = [random.randint(0, num_experts) for _ in range(num_layers)]
        num_staging = random.choice([0, 1, 2, 3, 4, 8])
        if not num_staging:  # as a plan has it: no slot at all, or one for every expert
            self.capacity = [random.choice([0, num_experts])] * num_layers
        num_demand_slots = num_staging - num_staging // 2
        is_on_disk = random.random() < 0.5
        self.host = self._disk_host() if is_on_disk else whole_host(self.world, self.shape)
        self.runtime = make_runtime(
            self.world,
            self.shape,
            sum(self.capacity) + num_staging,
            self.host,
            self._policies(num_demand_slots > 0),
            costs(num_demand_slots, link_s=random.choice([1e-9, 1e-10])),
        )
        self.workspace = Workspace(torch.empty(1 << 16, dtype=torch.uint8))
        self.num_passes = 0
        self.most_tokens = random.choice([6, 150])  # of one tile, or of several

    def _policies(self, can_fetch: bool) -> Policies:
        random = self.random
        placement: Any = AnyPlacement(random, self.capacity, self.shape.num_experts)
        assign, prefetch = AnyAssign(random, can_fetch), AnyPrefetch(random)
        waits, capacity = random.random() < 0.5, np.array(self.capacity)
        return Policies(placement, assign, prefetch, capacity, Costs.unknown(1), waits)

    def _disk_host(self) -> HostTier:
        num_layers, num_experts = self.shape[:2]
        capacity = [self.random.randint(0, num_experts) for _ in range(num_layers)]
        self.host_capacity = capacity
        setting = PolicyInputs(capacity, num_experts, Costs.unknown(1))
        num_slots = sum(capacity) + self.random.randint(1, 4)
        slots: Any = FakeSlots(num_slots)
        return HostTier(
            slots,
            SlotLedger(num_layers, num_experts, num_slots),
            FakeTransfer(self.world, slots.values, num_experts),
            recipe("lru").policies_without_device(setting),
        )

    def preload(self) -> None:
        self.runtime.load()

    def run_pass(self) -> None:
        """All layers, or the first ones: Ctrl-C may have come between two of them."""
        num_layers = self.shape.num_layers
        for layer in range(self.random.choice([num_layers, self.random.randint(1, num_layers)])):
            self.run_layer(layer)
            self.check()
        self.num_passes += 1

    def pause(self) -> None:
        """Between passes: what no resident lies in loses its bytes, and some residents leave."""
        tier = tier_of(self.runtime)
        tier.pause()
        tier.ledger.check_integrity()
        assert not tier.link.num_coming and not tier.link.has_waiting
        for layer in range(self.shape.num_layers):
            for expert in np.flatnonzero(tier.ledger.is_resident(layer)).tolist():
                if self.random.random() < 0.3:
                    tier.evict(layer, expert)
        device = tier.device
        assert isinstance(device, FakeDevice)
        for slot in range(device.num_slots):
            if tier.ledger.is_free(slot):
                device.values[slot] = GARBAGE

    def run_layer(self, layer: int) -> None:
        num_tokens, k = self.random.randint(1, self.most_tokens), self.shape.num_experts_per_token
        chosen = [
            sorted(self.random.sample(range(self.shape.num_experts), k)) for _ in range(num_tokens)
        ]
        routing = Routing(torch.tensor(chosen), torch.ones(num_tokens, k))
        x, out = torch.zeros(num_tokens, HIDDEN), torch.empty(num_tokens, HIDDEN)
        with self.workspace.scope():
            step = Step(StepKind.DENOISE, self.num_passes)
            self.runtime.forward(LayerCall(layer, x, routing, step, self.workspace, out))
        values = [[value_of(layer, e, self.shape.num_experts) for e in row] for row in chosen]
        assert torch.equal(out[:, 0], torch.tensor(values).sum(1))

    def check(self) -> None:
        """Between layers: no slot is lost, and nobody is resident whom nobody asked for."""
        link, ledger = tier_of(self.runtime).link, tier_of(self.runtime).link.ledger
        assert ledger.num_free + ledger.num_resident + link.num_coming == ledger.num_slots
        for layer, capacity in enumerate(self.capacity):
            assert link.is_kept(layer).sum() <= capacity

    def check_idle(self) -> None:
        """At the end: every slot is free or a resident's."""
        self.world.can_fail = False
        self.run_pass()
        self.runtime.adopt(self.runtime.policies)
        tier_of(self.runtime).device.drain()
        self.host.abandon()
        tier_of(self.runtime).link.ledger.check_integrity()
        self.host.ledger.check_integrity()
        if not self.host.is_permanent:
            for layer, capacity in enumerate(self.host_capacity):
                assert self.host.ledger.is_resident(layer).sum() <= capacity


def make_runtime(
    world: World,
    shape: MoEShape,
    num_slots: int,
    host: HostTier,
    policies: Policies,
    its_costs: Costs,
) -> ExpertRuntime:
    device = FakeDevice(world, num_slots)
    ledger = SlotLedger(shape.num_layers, shape.num_experts, num_slots)
    batched: Any = (
        FakeBatchedExperts(world.random, host.slots) if world.random.random() < 0.7 else None
    )
    threads, kernels = FakeExecutor(world), WhoseWeights()
    link = Link(device, ledger, host, its_costs.link_s, its_costs.num_staging)
    host.news = FakeNews(world)
    executor = DeviceExpertExecutor(
        DeviceTier(device, link, its_costs),
        HostExpertExecutor(host, threads, kernels, batched, device.host_work),
        (torch.empty(64, HIDDEN), torch.empty(64, HIDDEN)),
    )
    return ExpertRuntime(shape, policies, executor)


def tier_of(runtime: ExpertRuntime) -> DeviceTier:
    assert runtime.device is not None
    return runtime.device


def whole_host(world: World, shape: MoEShape) -> HostTier:
    """All experts in host memory for ever."""
    num_layers, num_experts = shape[:2]
    num_slots = num_layers * num_experts
    slots: Any = FakeSlots(num_slots)
    transfer: Any = FakeTransfer(world, slots.values, num_experts)
    ledger = SlotLedger(num_layers, num_experts, num_slots)
    host = HostTier(slots, ledger, transfer, is_permanent=True)
    host.load_all(lambda *_: None)
    return host


def costs(num_staging: int, link_s: float) -> Costs:
    curve = Curve([(1, 1e-9)])
    return Costs(4, link_s, curve, curve, curve, 0.0, num_staging=num_staging)


seeds = st.integers(0, 2**32)


@examples(100)
@given(seeds)
def test_every_run_reads_its_own_experts_bytes_and_pauses_lose_none(seed: int) -> None:
    machine = Machine(seed)
    machine.preload()
    for _ in range(8):
        machine.run_pass()
        if machine.random.random() < 0.5:
            machine.pause()
    machine.check_idle()


@examples(100)
@given(seeds)
def test_failures_are_told_once_lose_no_slot_and_leave_no_old_bytes(seed: int) -> None:
    """Also where passes pause in between."""
    machine = Machine(seed)
    machine.preload()
    for _ in range(8):
        machine.world.can_fail = True
        try:
            machine.run_pass()
        except (DeviceError, StorageError):
            machine.check()
        if machine.random.random() < 0.5:
            with suppress(DeviceError):
                tier_of(machine.runtime).pause()
            machine.world.can_fail = False
            machine.pause()
    machine.check_idle()


class CtrlC:
    """Comes at the n-th line of the calling thread's code in the runtime."""

    ON_THREADS = ("_run_ready", "_run", "_run_few", "_gather", "_give_back", "give_back", "end")
    ON_THREADS += ("is_finished", "<lambda>")
    MODULES = (runtime, work_module, host_tier, host_reads, read_ahead, host_executor)
    MODULES += (device_executor, device_tier, link, slots)
    FILES = frozenset(module.__file__ for module in MODULES)

    def __init__(self, num_lines: int) -> None:
        self._num_left = num_lines

    def __call__(self, frame: FrameType, event: str, _: Any) -> CtrlC | None:
        if frame.f_code.co_filename not in self.FILES or frame.f_code.co_name in self.ON_THREADS:
            return None
        self._num_left -= event == "line"
        if not self._num_left:
            raise KeyboardInterrupt
        return self


@contextmanager
def traced(tracer: CtrlC) -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        yield
    finally:
        sys.settrace(before)


@examples(100)
@given(seeds)
def test_ctrl_c_comes_at_any_line_and_again_while_that_is_cleared_up(seed: int) -> None:
    machine = Machine(seed)
    runtime, random = machine.runtime, machine.random
    machine.preload()
    abandon = runtime.executor.abandon

    def abandon_or_stop() -> None:
        """Trace what clears up, and the code that it returns to."""
        tracer, caller = CtrlC(random.randint(1, 100)), inspect.currentframe().f_back
        caller.f_trace = tracer
        sys.settrace(tracer)
        abandon()

    for _ in range(6):
        with pytest.MonkeyPatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(runtime.executor, "abandon", abandon_or_stop)
            with traced(CtrlC(random.randint(1, 4000 if machine.most_tokens > 6 else 1500))):
                machine.run_pass()
        machine.run_pass()
    machine.check_idle()


# What the programmes above found, or cannot see


class Script:
    """Policies that do what they are told; the host computes everything."""

    gate = Gate.NONE

    def __init__(self, first: dict[int, list[int]], admit: list[int], ahead: list[int]) -> None:
        self._first = first
        self._admit = np.array(admit, int)
        self.ahead = np.array(ahead, int)

    def initial(self, layer: int) -> IntArray:
        return np.array(self._first.get(layer, []), int)

    def update(self, facts: Facts) -> Moves:
        return Moves(self._admit[~facts.is_kept[self._admit]], np.empty(0, int))

    def __call__(self, facts: Facts) -> Assignment:
        experts = facts.demand.experts
        return Assignment(experts[:0], experts[:0], experts)

    def observe(self, facts: Facts) -> None:
        pass

    def record(self, outcome: PrefetchOutcome) -> None:
        pass

    def choose(self, ahead: Ahead) -> IntArray:
        return self.ahead


TWO_LAYERS = MoEShape(2, 4, 1, HIDDEN, HIDDEN)


def scripted(
    first: dict[int, list[int]], admit: list[int], ahead: list[int], num_staging: int = 2
) -> tuple[World, ExpertRuntime]:
    world, script = World(Random(0)), Script(first, admit, ahead)
    policies = Policies(script, script, script, np.full(2, 4), Costs.unknown(1))
    host = whole_host(world, TWO_LAYERS)
    runtime = make_runtime(world, TWO_LAYERS, 10, host, policies, costs(num_staging, 1e-3))
    runtime.load()
    return world, runtime


def run_layer(runtime: ExpertRuntime, layer: int, chosen: Sequence[list[int]] = ([0],)) -> None:
    routing = Routing(torch.tensor(chosen), torch.ones(len(chosen), 1))
    x, out = torch.zeros(len(chosen), HIDDEN), torch.empty(len(chosen), HIDDEN)
    workspace = Workspace(torch.empty(1 << 12, dtype=torch.uint8))
    step = Step(StepKind.DENOISE, 0)
    runtime.forward(LayerCall(layer, x, routing, step, workspace, out))


def test_moves_and_prefetches_are_chosen_while_the_work_is_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, runtime = scripted({}, admit=[], ahead=[])
    script: Any = runtime.policies.placement
    order: list[str] = []

    def note(owner: Any, method: str, name: str) -> None:
        original = getattr(owner, method)
        monkeypatch.setattr(
            owner, method, lambda *arguments: (order.append(name), original(*arguments))[1]
        )

    note(runtime.executor.threads, "submit", "host")
    note(tier_of(runtime).device, "copy", "copy")
    note(tier_of(runtime).device, "run", "run")
    note(tier_of(runtime).device, "from_host", "collect")
    note(script, "update", "moves")
    note(script, "choose", "ahead")
    monkeypatch.setattr(
        Script, "__call__", lambda _, f: Assignment(f.demand[0][:0], *np.split(f.demand[0], 2))
    )
    run_layer(runtime, 0, [[0], [1]])
    assert order == ["host", "copy", "moves", "run", "ahead", "collect"]


@pytest.mark.parametrize(("num_fetched", "expected"), [(1, [1]), (2, [2]), (3, [3]), (4, [2, 2])])
def test_no_wave_of_fetched_experts_is_small(
    num_fetched: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, runtime = scripted({}, admit=[], ahead=[], num_staging=4)
    device, sizes = tier_of(runtime).device, list[int]()
    run = device.run

    def noted(group: ExpertGroup, *arguments: Any) -> Any:
        sizes.append(len(group.experts))
        return run(group, *arguments)

    monkeypatch.setattr(device, "run", noted)
    monkeypatch.setattr(
        Script, "__call__", lambda _, f: Assignment(f.demand[0][:0], f.demand[0], f.demand[0][:0])
    )
    run_layer(runtime, 0, [[expert] for expert in range(num_fetched)])
    assert sizes == expected


def test_no_prefetch_begins_once_its_layer_has_spoken() -> None:
    world, runtime = scripted({}, admit=[], ahead=[])
    tier_of(runtime).link.look_ahead(1, np.array([1, 2]))
    tier_of(runtime).link.pump()
    world.drain("copies")
    run_layer(runtime, 1)
    assert (
        tier_of(runtime).link.stats.num_prefetched
        == tier_of(runtime).link.stats.prefetch.num_wasted
        == 1
    )


def test_a_layer_that_is_resident_asks_no_gate_and_leaves_the_link_to_moves() -> None:
    _, runtime = scripted({0: [0, 1, 2, 3]}, admit=[], ahead=[])
    tier_of(runtime).early_gate = object()  # nobody asks it anything
    tier_of(runtime).link.obey(1, Moves(np.array([2]), np.empty(0, int)), {})
    run_layer(runtime, 0)
    assert tier_of(runtime).link.stats.num_moved == 1


def test_prefetches_of_a_pass_that_was_broken_off_make_room() -> None:
    _, runtime = scripted({}, admit=[], ahead=[1])
    run_layer(runtime, 0)
    assert tier_of(runtime).link.num_coming == 1
    runtime.policies.prefetch.ahead = np.empty(0, int)
    run_layer(runtime, 0)
    assert tier_of(runtime).link.num_coming == 0


@pytest.mark.parametrize(("admit", "kept"), [([], set()), ([2], {2})])
def test_a_move_that_arrives_for_a_step_may_leave_in_the_same(
    admit: list[int], kept: set[int]
) -> None:
    _, runtime = scripted({}, admit=[], ahead=[])
    tier_of(runtime).link.obey(0, Moves(np.array([1]), np.empty(0, int)), {})
    tier_of(runtime).link.pump()
    arrival = tier_of(runtime).link.take_arrivals(0, [1])[1]
    assert arrival is not None
    moves = Moves(np.array(admit, int), np.array([1]))
    assert tier_of(runtime).link.obey(0, moves, {1: arrival, 2: None}) == kept


def test_a_host_tier_that_is_abandoned_still_evicts_what_was_in_use() -> None:
    world = World(Random(0))
    host_slots: Any = FakeSlots(2)
    ledger = SlotLedger(1, 3, 2)
    transfer: Any = FakeTransfer(world, host_slots.values, 3)
    policies = recipe("lru").policies_without_device(PolicyInputs([1], 3, Costs.unknown(1)))
    host = HostTier(host_slots, ledger, transfer, policies)
    host.news = FakeNews(world)
    step = Step(StepKind.DENOISE, 0)
    late = FakeEvent(world, Task(lambda: None, lambda: None, None))
    first, second = np.array([0]), np.array([1])
    reads = HostReads(host, 0, first)
    reads.obey(host.own_moves(step, 0, first))
    [(_, slot)] = reads
    host.used_by(slot, late)
    HostReads(host, 0, second).obey(host.own_moves(step, 0, second))
    host.abandon()
    assert ledger.num_resident == 0


def test_an_owed_move_comes_after_the_last_layer_and_its_victim_stays_until_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, runtime = scripted({0: [0]}, admit=[], ahead=[])
    swap = Moves(np.array([2]), np.array([0]), is_owed=True)
    monkeypatch.setattr(
        Script, "update", lambda _, f: swap if f.layer == 0 else Moves(*[np.empty(0, int)] * 2)
    )
    run_layer(runtime, 0)
    world.drain("copies")
    ledger, stats = tier_of(runtime).ledger, tier_of(runtime).link.stats
    assert np.flatnonzero(ledger.is_resident(0)).tolist() == [0] and stats.num_moved == 0
    run_layer(runtime, 1)
    assert np.flatnonzero(ledger.is_resident(0)).tolist() == [2]
    assert stats.num_moved == stats.num_moves_done == runtime.stats.num_moves_asked == 1
    ledger.check_integrity()
