"""A GPU at work: its tests, what its link and kernels reach, and hybrid steps under every policy.

    python benchmarks/gpu.py test|short|full --deadline SECONDS --out FOLDER

Runs from the source tree and installs nothing: needs torch with its Triton and numpy, `test` also
pytest. What cannot run there is named in the table, and the rest runs.
Experts have LLaDA2.0-mini's shape and are generated in host memory: 6 MoE layers in `short`, all
19 in `full`, a block of 32 tokens per step, routing with that model's locality. No attention, no
head and no early gates: tokens per second are of the MoE layers alone, and `dali` and `hybrimoe`
prefetch nothing. Every line is written when it is measured; at the deadline the run ends with what
it has, names what was left, and has failed only if something of it had.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import os
import re
import signal
import statistics
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import TYPE_CHECKING

try:
    import numpy as np
    import torch
except ModuleNotFoundError as missing:
    raise SystemExit(
        f"{sys.executable} has no {missing.name}; name a Python that has: make gpu PYTHON=..."
    ) from None
from common.record import REPOSITORY, Recorder, say
from common.synth_trace import synth_trace
from torch import Tensor

from lowtide.core import Costs, Curve, MoEShape, Step
from lowtide.devices.cuda import CudaDevice, slot_image
from lowtide.errors import PlanError
from lowtide.experts.batched_experts import BatchedExperts, cores_beside_device
from lowtide.experts.device import ExpertGroup
from lowtide.experts.device_executor import DeviceExpertExecutor
from lowtide.experts.device_tier import DeviceTier
from lowtide.experts.host_executor import HostExpertExecutor
from lowtide.experts.host_tier import HostTier
from lowtide.experts.layout import SlotLayout
from lowtide.experts.link import Link
from lowtide.experts.rows import ExpertBuffers, ExpertRows, LayerCall, Routing
from lowtide.experts.runtime import ExpertRuntime
from lowtide.experts.slots import ExpertSlots, SlotLedger
from lowtide.formats import formats
from lowtide.hardware.memory import available_memory_bytes
from lowtide.kernels.choice import choose_kernels
from lowtide.kernels.reference import REFERENCE
from lowtide.memory.arena import Arena
from lowtide.memory.pinned import PinnedMemory
from lowtide.memory.workspace import Workspace
from lowtide.policies.decision import Policies
from lowtide.policies.prefetch import Gate, NoPrefetch
from lowtide.policies.presets import make_policies
from lowtide.policies.recipe import PolicyInputs
from lowtide.reading.file_reader import Ticket
from lowtide.replay.trace import TraceShape
from lowtide.threads.executor import HostExecutor

if TYPE_CHECKING:
    import pytest

    from lowtide.kernels.triton_experts import SlotImage

MODEL = MoEShape(
    num_layers=19, num_experts=256, num_experts_per_token=8, hidden_size=2048, expert_size=512
)
DTYPE = torch.bfloat16
DEVICE = torch.device("cuda")
BLOCK_TOKENS = 32
STEPS_PER_BLOCK = 8
LOCALITY = 0.98  # from step to step, as TIDE reports it for this model
NUM_LAYERS = {"short": 6, "full": MODEL.num_layers}
NUM_BLOCKS = {"short": 5, "full": 9}  # the first warms up
PRESETS = {
    "short": ("lowtide", "tide", "dali", "lru", "all-host", "on-demand"),
    "full": (
        *("lowtide", "tide", "dali", "lru", "fiddler", "hybrimoe", "edgemoe", "static"),
        *("layer-split", "all-host", "on-demand"),
    ),
}
BUDGETS = (64, 128)  # residents of 256 experts, per layer
NUM_STAGING = 16
DECODE_TOKENS = (1, 8, 32)
PACKED = ("q8", "q4", "MXFP4")
_GIGA = 1e9
_COPY_BYTES = 256 << 20
_MISSING = re.compile(r"^E +ModuleNotFoundError: No module named '([^']+)'", re.MULTILINE)
_GRACE_S = 20.0  # after the deadline a hanging process is ended
CACHES = {"TRITON_CACHE_DIR": "~/.triton/cache", "XDG_CACHE_HOME": "~/.cache"}


class DeadlineReached(KeyboardInterrupt):
    """The time is over: what runs is interrupted, as by Ctrl-C."""


class Report:
    """Writes measurements as they come and remembers a short table of them."""

    def __init__(self, stage: str, out: Path) -> None:
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        settings = {
            "gpu": torch.cuda.get_device_name(),
            "gpu_memory_bytes": total_memory_bytes(),
            "cuda": torch.version.cuda,
            "stage": stage,
        }
        self.path = out / f"{today}-gpu-{stage}.jsonl"
        self._recorder = Recorder("gpu", settings, self.path)
        self._rows: list[tuple[str, str]] = []
        self._left: dict[str, None] = {}
        self.num_done = 0
        self.num_failed = 0

    def expect(self, names: Iterable[str]) -> None:
        """Parts, or tests, that are still to come."""
        self._left.update(dict.fromkeys(names))

    def done(self, name: str) -> None:
        self._left.pop(name, None)
        self.num_done += 1

    def tell_left(self) -> None:
        """Lists what was not reached: parts by name, tests by file with their number."""
        files = Counter(name.partition("::")[0] for name in self._left if "::" in name)
        for file, count in files.items():
            self.line(file, f"{count} not reached")
        for name in self._left:
            self.write("not reached", {"part": name})
            if "::" not in name:
                self.line(name, "not reached")

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Run a part; report its failure, so that the next part can begin."""
        try:
            yield
            self.done(name)
        except PlanError as error:  # this GPU is too small for it
            self.done(name)
            self.line(name, f"not run: {error}")
        except Exception as error:
            self.done(name)
            self.num_failed += 1
            self.line(name, f"failed: {type(error).__name__}: {str(error)[:200]}")
            self.write("failure", {"part": name, "message": traceback.format_exc()[-2000:]})

    def write(self, what: str, values: Mapping[str, object]) -> None:
        self._recorder.write(what, values)

    def line(self, name: str, text: str) -> None:
        self._rows.append((name, text))

    def print_table(self) -> None:
        width = max((len(name) for name, _ in self._rows), default=0)
        for name, text in self._rows:
            print(f"{name:<{width}}  {text}")
        print(f"written to {self.path}", flush=True)


def main() -> int:
    arguments = _arguments()
    if not torch.cuda.is_available():
        say("There is no GPU here (torch.cuda.is_available() is false): nothing was run.")
        return 1
    find_caches()
    try:
        report = Report(arguments.stage, arguments.out)
    except OSError as error:
        say(f"Results cannot be written: {error}. Name another folder: make gpu OUT=...")
        return 1
    is_good = False
    try:
        with deadline(arguments.deadline):
            if arguments.stage == "test":
                is_good = run_tests(report)
            else:
                run_benchmarks(arguments.stage, report)
                is_good = not report.num_failed
    except DeadlineReached:
        report.line("deadline", f"reached after {arguments.deadline:g} s; what is left is listed")
        report.tell_left()
        is_good = report.num_done > 0 and not report.num_failed
    finally:
        report.print_table()
    return 0 if is_good else 1


def find_caches() -> None:
    """Send caches to temporary folders where the home cannot be written."""
    for name, place in CACHES.items():
        if name not in os.environ and not _can_write(Path(place).expanduser()):
            os.environ[name] = tempfile.mkdtemp(prefix="lowtide-")


def _can_write(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def run_tests(report: Report, folder: Path = REPOSITORY / "tests") -> bool:
    """All tests marked `gpu`, as pytest finds them; whether all of them passed."""
    if find_spec("pytest") is None:
        report.line("tests", f"not run: {sys.executable} has no pytest")
        return False
    import pytest

    outcomes = _Outcomes(report)
    # Other people's deprecations on a machine that is not ours are no failures.
    options = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "-W", "default"]
    options += ["--continue-on-collection-errors"]  # a module that is missing there
    # A failed test would call off the dump that ends a process which hangs after the deadline.
    options += ["-p", "no:faulthandler"]
    try:
        status = pytest.main([*options, str(folder)], plugins=[outcomes])
    finally:
        for name, counts in outcomes.counts.items():
            text = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
            report.line(name, text)
    if status == pytest.ExitCode.INTERRUPTED:
        raise DeadlineReached
    return report.num_done > 0 and not report.num_failed


class _Outcomes:
    """Writes down every test's outcome when it is known."""

    def __init__(self, report: Report) -> None:
        self.counts: dict[str, dict[str, int]] = {}
        self._report = report

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        # Whole models last: they take the longest, and fail with whatever fails before.
        items.sort(key=lambda item: "engine" in item.path.name)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._report.expect(item.nodeid for item in session.items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self._report.done(report.nodeid)
            self._note(report, report.duration)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        missing = _MISSING.search(report.longreprtext) if report.failed else None
        if missing is not None:  # most files with tests for other machines need more than torch
            self._report.line(report.nodeid, f"not run: {sys.executable} has no {missing[1]}")
        elif report.failed:
            self._note(report, 0.0)
        elif report.skipped:  # the file needs a module that is not there
            self._report.line(report.nodeid, f"not run: {report.longrepr[-1]}")

    def _note(self, report: pytest.TestReport | pytest.CollectReport, seconds: float) -> None:
        file = report.nodeid.partition("::")[0]
        counts = self.counts.setdefault(file, {})
        counts[report.outcome] = counts.get(report.outcome, 0) + 1
        values = {"test": report.nodeid, "outcome": report.outcome, "seconds": seconds}
        if report.failed:
            self._report.num_failed += 1
            values["message"] = report.longreprtext[-2000:]
        self._report.write("test", values)


def _part_of(preset: str, budget: int) -> str:
    return f"{preset}, {budget} residents"


def run_benchmarks(stage: str, report: Report) -> None:
    """Ceilings first, then what the device reaches, then whole steps."""
    report.expect(["expert copies", "kernel", "packed kernels", "resident layer", "costs"])
    report.expect(_part_of(each, b) for each in (*PRESETS[stage], "timeline") for b in BUDGETS)
    shape = MODEL._replace(num_layers=num_layers_with_room(stage, report))
    link_rate, device_rate = measure_ceilings(report)
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        executor = HostExecutor(shape.num_experts_per_token)
        stack.callback(executor.close)
        stack.enter_context(executor.in_charge())
        pinned = PinnedMemory()
        stack.callback(pinned.close)
        home = make_experts(shape, pinned, report)
        with report.part("expert copies"):
            measure_link(home, pinned, link_rate, report)
        kernel_rate = device_rate
        with report.part("kernel"):
            kernel_rate = measure_kernel(home, device_rate, report)
        with report.part("packed kernels"):
            measure_packed_kernels(device_rate, report)
        with report.part("resident layer"):
            measure_resident_layer(home, pinned, report)
        with report.part("costs"):
            costs = measure_expert_costs(executor, pinned, report)
            rates = (link_rate, kernel_rate)
            measure_presets(stage, shape, home, pinned, executor, costs, rates, report)


def num_layers_with_room(stage: str, report: Report) -> int:
    """The stage's layers, or as many as half of the free host memory holds; ends without one."""
    layer_bytes = MODEL.num_experts * SlotLayout.of(MODEL, DTYPE).num_bytes
    free_bytes, wanted = available_memory_bytes(), NUM_LAYERS[stage]
    num_layers = min(wanted, free_bytes // 2 // layer_bytes)
    if not num_layers:
        raise SystemExit(
            f"One layer's experts take {layer_bytes / _GIGA:.1f} GB of host memory; "
            f"{free_bytes / _GIGA:.1f} GB are free, of which half is used."
        )
    if num_layers < wanted:
        text = f"{num_layers} MoE layers instead of {wanted}: {free_bytes / _GIGA:.1f} GB are free"
        report.line("host memory", text)
    return num_layers


def measure_presets(
    stage: str,
    shape: MoEShape,
    home: HostTier,
    pinned: PinnedMemory,
    executor: HostExecutor,
    costs: Costs,
    rates: tuple[float, float],
    report: Report,
) -> None:
    """Whole steps under every preset, at every budget."""
    for preset in PRESETS[stage]:
        for budget in BUDGETS:
            with report.part(_part_of(preset, budget)):
                bench = HybridBench(shape, home, pinned, executor, costs, budget, preset)
                with bench.running():
                    bench.measure(NUM_BLOCKS[stage], rates, report)
    for budget in BUDGETS:  # last: what a profiler leaves behind slows launches down
        with report.part(_part_of("timeline", budget)):
            bench = HybridBench(shape, home, pinned, executor, costs, budget, "lowtide")
            with bench.running():
                bench.write_timeline(report)


def measure_ceilings(report: Report) -> tuple[float, float]:
    """Bytes per second of a plain pinned copy, and of a device copy (read and written)."""
    host = torch.ones(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    device, other = (torch.ones(4 * _COPY_BYTES, dtype=torch.uint8, device=DEVICE) for _ in "ab")
    part = device[:_COPY_BYTES]
    link_s = _median_s(lambda: part.copy_(host, non_blocking=True))
    back_s = _median_s(lambda: host.copy_(part, non_blocking=True))
    copy_s = _median_s(lambda: other.copy_(device, non_blocking=True))
    link_rate, device_rate = _COPY_BYTES / link_s, 8 * _COPY_BYTES / copy_s
    report.write(
        "ceilings",
        {
            "pinned_to_device_GBps": link_rate / _GIGA,
            "device_to_pinned_GBps": _COPY_BYTES / back_s / _GIGA,
            "device_copy_read_and_written_GBps": device_rate / _GIGA,
        },
    )
    report.line("plain pinned copy", f"{link_rate / _GIGA:.1f} GB/s")
    report.line("device copy, read + written", f"{device_rate / _GIGA:.0f} GB/s")
    return link_rate, device_rate


def make_experts(shape: MoEShape, pinned: PinnedMemory, report: Report) -> HostTier:
    """All experts in pinned host memory. Few different ones: only their bytes count here."""
    layout = SlotLayout.of(shape, DTYPE)
    num_experts = shape.num_layers * shape.num_experts
    start_s = perf_counter()
    arena = Arena(num_experts * layout.num_bytes)
    is_pinned = pinned.register(arena)
    slots = ExpertSlots(arena, layout)
    pattern = torch.randn(7 * layout.num_bytes // 2).mul_(shape.hidden_size**-0.5).to(DTYPE)
    images = pattern.view(7, -1).view(torch.uint8)
    for expert in range(num_experts):
        slots.image(expert).copy_(images[expert % 7])
    report.write(
        "experts",
        {
            "num_layers": shape.num_layers,
            "host_bytes": arena.num_bytes,
            "is_pinned": is_pinned,
            "seconds": perf_counter() - start_s,
        },
    )
    ledger = SlotLedger(shape.num_layers, shape.num_experts, num_experts)
    home = HostTier(slots, ledger, _InPlace(), is_permanent=True)
    home.load_all(lambda *progress: None)
    return home


class _InPlace:
    """A transfer of experts whose bytes are in their slots already."""

    def start(self, layer: int, expert: int, slot: int) -> Ticket:
        ticket: Ticket = Ticket()
        ticket.set_result(0)
        return ticket

    def describe(self, layer: int, expert: int) -> str:
        return f"expert {expert} of MoE layer {layer}"

    def drain(self) -> None:
        pass

    def close(self) -> None:
        pass


def measure_link(home: HostTier, pinned: PinnedMemory, ceiling: float, report: Report) -> None:
    """One copy per expert, as the runtime does it."""
    layout, num_slots = home.slots.layout, 64
    device = CudaDevice(MODEL, layout, num_slots, BLOCK_TOKENS, pinned)
    draw = np.random.default_rng(0)

    def fetch() -> None:
        for slot, expert in enumerate(draw.integers(0, MODEL.num_experts, num_slots).tolist()):
            last = device.copy(home.slots.image(expert), slot, None)
        last.wait()

    rate = num_slots * layout.num_bytes / _median_host_s(fetch)
    device.close()
    values = {"expert_bytes": layout.num_bytes, "GBps": rate / _GIGA, "of_plain": rate / ceiling}
    report.write("link", values)
    text = f"{rate / _GIGA:.1f} GB/s, {rate / ceiling:.0%} of plain (expected: 85%)"
    report.line("expert copies", text)


def measure_kernel(home: HostTier, ceiling: float, report: Report) -> float:
    """Bytes per second of weights at decode sizes; the launches are replayed from a graph."""
    layout = home.slots.layout
    images = [home.slots.image(expert) for expert in range(MODEL.num_experts)]
    slots = torch.stack(images).to(DEVICE).view(DTYPE)
    return _measure_kernel("kernel", layout, slots, ceiling, "expected: 70%", report)


def measure_packed_kernels(ceiling: float, report: Report) -> None:
    """The same of packed weights, of any bytes."""
    for name in PACKED:
        layout = SlotLayout.of(MODEL, DTYPE, kept=[(formats()[name],) * 3] * MODEL.num_layers)
        shape = (MODEL.num_experts, layout.num_bytes)
        slots = torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)
        part = f"{name} kernel"
        _measure_kernel(part, layout, slots, ceiling, "in its own bytes", report)


def _measure_kernel(
    name: str, layout: SlotLayout, slots: Tensor, ceiling: float, remark: str, report: Report
) -> float:
    image = slot_image(layout.largest, layout)
    slot_of = torch.arange(MODEL.num_experts, dtype=torch.int32, device=DEVICE)
    rate = 0.0
    for num_tokens in DECODE_TOKENS:
        layers = [LayerInput(num_tokens, seed) for seed in range(8)]
        launches = [_planned(layer, slots, image, slot_of) for layer in layers]
        each_s = _each_s(_graph_of(launches))
        seconds = statistics.median(each_s)
        num_hit = sum(int((np.diff(layer.rows.bounds) > 0).sum()) for layer in layers)
        rate = num_hit * layout.num_bytes / seconds
        values = {
            "num_tokens": num_tokens,
            "experts_hit": num_hit / len(layers),
            "layer_us": seconds / len(layers) * 1e6,
            "each_layer_us": [one / len(layers) * 1e6 for one in each_s],
            "GBps": rate / _GIGA,
            "of_device_copy": rate / ceiling,
        }
        report.write(name, values)
        text = f"{rate / _GIGA:.0f} GB/s, {rate / ceiling:.0%} of a device copy ({remark})"
        report.line(f"{name}, {num_tokens} tokens", text)
    return rate


def _planned(
    layer: LayerInput, slots: Tensor, image: SlotImage, slot_of: Tensor
) -> Callable[[], None]:
    """A layer's products alone: its tiles are planned here, once."""
    from lowtide.kernels.triton_experts import Tiles, gated_mlps, plan_tiles, tile_rows

    parts, gate = layer.buffers.parts, layer.buffers.gate
    tiles = Tiles.empty(len(parts), MODEL.num_experts, parts.device)
    rows = tile_rows(len(parts), MODEL.num_experts)
    plan_tiles(layer.rows.counts, slot_of, rows, tiles)
    num_tiles = int(tiles.num_tiles)
    return lambda: gated_mlps(slots, image, tiles, num_tiles, rows, parts, gate)


def _graph_of(launches: Sequence[Callable[[], None]]) -> Callable[[], None]:
    """All of `launches` in one: the calling thread is slower than the smallest of them."""
    for launch in launches:
        launch()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    return graph.replay


def measure_resident_layer(home: HostTier, pinned: PinnedMemory, report: Report) -> None:
    """A layer with every expert resident, as the runtime runs it: sort, products, sum."""
    device = CudaDevice(MODEL, home.slots.layout, MODEL.num_experts, BLOCK_TOKENS, pinned)
    for expert in range(MODEL.num_experts):
        last = device.copy(home.slots.image(expert), expert, None)
    last.wait()
    group = everyone()
    for num_tokens in DECODE_TOKENS:
        layers = [LayerInput(num_tokens, seed) for seed in range(8)]

        def run_all(layers: Sequence[LayerInput] = layers) -> None:
            for layer in layers:
                layer.run(device, group)

        layer_us = _median_s(run_all) / len(layers) * 1e6
        report.write("resident_layer", {"num_tokens": num_tokens, "layer_us": layer_us})
        report.line(f"resident layer, {num_tokens} tokens", f"{layer_us:.0f} us")
    device.close()


def everyone() -> ExpertGroup:
    """All experts of a layer, expert e in slot e."""
    return ExpertGroup(0, np.arange(MODEL.num_experts), np.arange(MODEL.num_experts))


class LayerInput:
    """One layer's step with every expert resident."""

    def __init__(self, num_tokens: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        k, hidden = MODEL.num_experts_per_token, MODEL.hidden_size
        rank = torch.rand(num_tokens, MODEL.num_experts, generator=draw)
        self._experts = rank.topk(k).indices.sort().values.to(DEVICE)
        self._weights = torch.rand(num_tokens, k, generator=draw).to(DEVICE)
        self._x = torch.randn(num_tokens, hidden, generator=draw).to(DEVICE, DTYPE)
        self.out = torch.empty_like(self._x, dtype=torch.float32)
        self.rows = ExpertRows(REFERENCE.sort_pairs(self._experts, MODEL.num_experts))
        scratch = self._x.new_empty((2, num_tokens * k, MODEL.expert_size))
        parts = self._x[self.rows.token_of]
        self.buffers = ExpertBuffers(parts, *scratch)
        self._terms = (self._x.clone(), self.out.clone())

    def run(self, device: CudaDevice, group: ExpertGroup) -> None:
        rows = ExpertRows(device.kernels.sort_pairs(self._experts, MODEL.num_experts))
        torch.index_select(self._x, 0, rows.token_of, out=self.buffers.parts)
        device.run(group, rows, self.buffers, None)
        sums = (*self._terms, self.out)
        device.kernels.combine(self.buffers.parts, rows.part_of, self._weights, *sums)


def measure_expert_costs(executor: HostExecutor, pinned: PinnedMemory, report: Report) -> Costs:
    """Measure the costs that policies are given, as `lowtide doctor` does."""
    from lowtide.hardware.measure import measure_costs

    def pinned_arena(num_bytes: int) -> Arena:
        arena = Arena(num_bytes)
        pinned.register(arena)
        return arena

    layout, kernels = SlotLayout.of(MODEL, DTYPE), choose_kernels("auto", DTYPE)
    device = CudaDevice(MODEL, layout, 128, 512, pinned)
    dense_bytes = 4 * MODEL.hidden_size**2 * DTYPE.itemsize  # about an attention layer
    with pinned.lent():
        measured = measure_costs(
            MODEL,
            layout,
            executor,
            dense_bytes,
            device=device,
            make_arena=pinned_arena,
            kernels=kernels,
        )
    device.close()
    costs = measured.costs()
    values = {
        "host_products": kernels.name,
        "link_us": costs.link_s * 1e6,
        "sync_us": costs.sync_s * 1e6,
        **{f"host_{n}_us": costs.host_s.at(n) * 1e6 for n in (1, 2, 4, 16)},
        **{f"device_{n}_us": costs.device_s.at(n) * 1e6 for n in (1, 2, 4, 16)},
    }
    report.write("costs", values)
    return costs


class HybridBench:
    """The MoE layers of a model under one preset and budget, fed with a synthetic routing."""

    def __init__(
        self,
        shape: MoEShape,
        home: HostTier,
        pinned: PinnedMemory,
        executor: HostExecutor,
        costs: Costs,
        budget: int,
        preset: str,
    ) -> None:
        """Raises PlanError when the GPU has no room for the budget."""
        self._shape = shape
        self._name = preset
        self._budget = budget
        self._slot_bytes = home.slots.layout.num_bytes
        num_slots = shape.num_layers * budget + NUM_STAGING
        # Nothing comes between two layers here: no time in which the link is left alone.
        self._costs = replace(costs, num_staging=NUM_STAGING // 2, dense_s=Curve([(1, 0.0)]))
        setting = PolicyInputs([budget] * shape.num_layers, shape.num_experts, self._costs)
        device = CudaDevice(shape, home.slots.layout, num_slots, BLOCK_TOKENS, pinned)
        num_pairs = BLOCK_TOKENS * shape.num_experts_per_token
        ledger = SlotLedger(shape.num_layers, shape.num_experts, num_slots)
        link = Link(device, ledger, home, costs.link_s, self._costs.num_staging)
        kernels = choose_kernels("auto", DTYPE)
        batched = BatchedExperts.of(home.slots, kernels, cores_beside_device(executor))
        experts = DeviceExpertExecutor(
            DeviceTier(device, link, self._costs),
            HostExpertExecutor(home, executor, kernels, batched, device.host_work),
            tuple(torch.empty((2, num_pairs, shape.expert_size), dtype=DTYPE)),
        )
        policies = _without_gates(make_policies(preset, setting, everything_fits=False))
        self._runtime = ExpertRuntime(shape, policies, experts)
        self._x = torch.randn(BLOCK_TOKENS, shape.hidden_size).to(DEVICE, DTYPE)
        self._out = torch.empty_like(self._x, dtype=torch.float32)
        weights = torch.rand(BLOCK_TOKENS, shape.num_experts_per_token)
        self._weights = weights.div_(weights.sum(1, keepdim=True)).to(DEVICE)
        row_bytes = 4 * (shape.hidden_size + 2 * shape.expert_size)
        buffer = torch.empty(2 * num_pairs * row_bytes, dtype=torch.uint8, device=DEVICE)
        self._workspace = Workspace(buffer)

    @contextmanager
    def running(self) -> Iterator[None]:
        """The first residents are loaded; at the end the device is closed."""
        try:
            self._runtime.load()
            yield
        finally:
            self._runtime.close()

    def measure(self, num_blocks: int, rates: tuple[float, float], report: Report) -> None:
        """Tokens per second, and step time against the bound of the bytes that were moved."""
        steps = self._steps(num_blocks)
        warm = steps[:STEPS_PER_BLOCK]
        for step, experts in warm:
            self._forward(step, experts)
        before = self._runtime.as_dict()
        seconds = [self._forward(step, experts) for step, experts in steps[len(warm) :]]
        after = self._runtime.as_dict()
        done = {name: value - before[name] for name, value in after.items()}
        total_s, num_steps = sum(seconds), len(seconds)
        tokens = num_steps * BLOCK_TOKENS / STEPS_PER_BLOCK
        blocks_s = np.reshape(seconds, (-1, STEPS_PER_BLOCK)).sum(axis=1).tolist()
        bound_s, by = self._bound_s(done, num_steps, rates)
        values = {
            "preset": self._name,
            "residents_per_layer": self._budget,
            "num_layers": self._shape.num_layers,
            "moe_tokens_per_s": tokens / total_s,
            "each_moe_tokens_per_s": [BLOCK_TOKENS / block_s for block_s in blocks_s],
            "step_ms": statistics.median(seconds) * 1e3,
            "bound_ms": bound_s / num_steps * 1e3,
            "bound_by": by,
            "of_bound": total_s / bound_s,
            "hit_rate": done["num_hits"] / max(1, done["num_hits"] + done["num_misses"]),
            "link_GBps": done["link_bytes"] / total_s / _GIGA,
            "host_experts_per_step": done["num_on_host"] / num_steps,
        }
        report.write("hybrid", values)
        report.line(
            f"{self._name}, {self._budget} residents",
            f"{tokens / total_s:.0f} tokens/s, step {total_s / bound_s:.2f}x its bound by {by} "
            "(expected: 1.5x)",
        )

    def write_timeline(self, report: Report) -> None:
        """Two steps of a second block as a Chrome trace, for Perfetto."""
        from torch.profiler import ProfilerActivity, profile

        steps = self._steps(2)
        for step, experts in steps[:STEPS_PER_BLOCK]:
            self._forward(step, experts)
        path = report.path.with_name(f"{report.path.stem}-{self._name}-{self._budget}.trace.json")
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            for step, experts in steps[STEPS_PER_BLOCK:][:2]:
                self._forward(step, experts)
        profiler.export_chrome_trace(str(path))
        report.write("timeline", {"file": path.name, "bytes": path.stat().st_size})

    def _bound_s(
        self, done: Mapping[str, float], num_steps: int, rates: tuple[float, float]
    ) -> tuple[float, str]:
        """The longest that any part must take alone, and which part that is."""
        link_rate, kernel_rate = rates
        num_used = done["num_hits"] + done["num_misses"]
        num_pairs = num_steps * self._shape.num_layers * len(self._weights.view(-1))
        host_s = self._costs.host_s.at(max(1, round(num_pairs / num_used)))
        times = {
            "link": done["link_bytes"] / link_rate,
            "host": done["num_on_host"] * host_s,
            "device": (num_used - done["num_on_host"]) * self._slot_bytes / kernel_rate,
        }
        by = max(times, key=times.__getitem__)
        return times[by], by

    def _forward(self, step: Step, experts: Tensor) -> float:
        """Seconds of one step through all layers. experts [layers, tokens, k]."""
        torch.cuda.synchronize()
        start_s = perf_counter()
        for layer in range(self._shape.num_layers):
            with self._workspace.scope():
                routing = Routing(experts[layer], self._weights)
                self._runtime.forward(
                    LayerCall(layer, self._x, routing, step, self._workspace, self._out)
                )
        torch.cuda.synchronize()
        return perf_counter() - start_s

    def _steps(self, num_blocks: int) -> list[tuple[Step, Tensor]]:
        trace = synth_trace(
            TraceShape(*self._shape),
            num_blocks=num_blocks,
            steps_per_block=STEPS_PER_BLOCK,
            block_length=BLOCK_TOKENS,
            num_prompt_rows=0,
            locality=LOCALITY,
        )
        return [
            (
                one.step,
                torch.from_numpy(ids.astype(np.int64)).transpose(0, 1).contiguous().to(DEVICE),
            )
            for one, ids in zip(trace.passes, trace.iter_ids(), strict=True)
        ]


def _without_gates(policies: Policies) -> Policies:
    """A synthetic routing has no router to run early: prefetches that need one are left out."""
    if policies.prefetch.gate is Gate.NONE:
        return policies
    return replace(policies, prefetch=NoPrefetch())


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raises DeadlineReached after `seconds`; ends the process if that is not heard."""

    def reached(signal_number: int, frame: FrameType | None) -> None:
        raise DeadlineReached

    signal.signal(signal.SIGALRM, reached)
    try:
        # Again and again: one that is raised while an object is destroyed is lost.
        signal.setitimer(signal.ITIMER_REAL, seconds, _GRACE_S / 2)
        faulthandler.dump_traceback_later(seconds + _GRACE_S, exit=True)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()


def total_memory_bytes() -> int:
    return torch.cuda.get_device_properties(DEVICE).total_memory


def _median_s(work: Callable[[], object]) -> float:
    return statistics.median(_each_s(work))


def _each_s(work: Callable[[], object], repeats: int = 11) -> list[float]:
    """Seconds on the GPU, between events around `work`, after two turns that are not counted."""
    times = []
    for _ in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return times[2:]


def _median_host_s(work: Callable[[], object], repeats: int = 7) -> float:
    """Seconds on the clock; `work` waits for its own end."""
    times = []
    for _ in range(repeats + 1):
        start_s = perf_counter()
        work()
        times.append(perf_counter() - start_s)
    return statistics.median(times[1:])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("stage", choices=("test", "short", "full"))
    parser.add_argument("--deadline", type=float, default=300.0, metavar="SECONDS")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs" / "results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
