"""Experts of few rows on the CPU: how much of the memory's speed each format's kernels reach.

    python benchmarks/cpu_kernels.py --shapes Qwen3-30B --rows 1 2 4 8 --threads 1

Experts have the shapes of published models and lie cold: a ring of them, larger than the caches, is
gone through. The ceiling is reading the same bytes with as many threads, the faster of two ways, in
the same round; torch's products of the same bfloat16 weights are beside. Every round measures all
of them, one after the other, so that a machine that drifts or is shared drifts for all alike; rates
are medians over rounds, shares medians of each round's own quotient. `--processor-time` takes the
time that processors spent instead of the clock's, for a machine that others use meanwhile; with
several threads it counts those that wait, too.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from common.arguments import make_parser, run_script
from common.record import Recorder, say

from lowtide.formats import formats, fp8, ggml, grouped_ints
from lowtide.formats.arranged import Sectioned
from lowtide.formats.plain import plain_format
from lowtide.kernels.choice import choose_kernels, choose_pack
from lowtide.kernels.cpu.library import load_library
from lowtide.kernels.cpu.weight_calls import CompiledExperts
from lowtide.kernels.operands import SlotPlaces
from lowtide.memory.arena import Arena

_GIGA = 1e9
_REGION_BYTES = 32 << 10
_ROUND_BYTES = 96 << 20  # gone through by each in a round, at least two experts


class Shape(NamedTuple):
    """Of an expert."""

    hidden: int
    width: int

    @property
    def num_weights(self) -> int:
        return 3 * self.hidden * self.width

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of gate, up and down."""
        return (self.width, self.hidden), (self.width, self.hidden), (self.hidden, self.width)


SHAPES: Mapping[str, Shape] = {
    "LLaDA2-mini": Shape(2048, 512),
    "Qwen3-30B": Shape(2048, 768),
    "DeepSeek-V2-Lite": Shape(2048, 1408),
    "gpt-oss-20b": Shape(2880, 2880),
    "Mixtral": Shape(4096, 14336),
}


_Made = tuple[torch.Tensor, CompiledExperts | None]
"""An expert's bytes, and what computes with them."""

_Make = Callable[[Shape], _Made]


class Experts(Protocol):
    """A ring of experts in one format."""

    num_bytes: int  # of each
    memory: Arena

    def takes(self, num_rows: int) -> bool:
        """Return True if its kernels take `num_rows` rows of an expert."""
        ...

    def run(self, first: int, count: int, num_rows: int, num_threads: int) -> None:
        """Experts `first` to before `first + count` of the ring, each on rows of its own."""
        ...


class CompiledRing:
    """Gate, up and down one after the other; compiled kernels, all experts in one call."""

    def __init__(self, make: _Make, shape: Shape, num_experts: int, max_rows: int) -> None:
        self.shape = shape
        content, kernels = make(shape)
        self.num_bytes = len(content)
        self.memory = Arena(num_experts * self.num_bytes)
        self.memory.bytes.view(num_experts, -1)[:] = content
        if kernels is None:
            raise SystemExit("nothing can be compiled here")
        self.kernels: CompiledExperts = kernels
        count = round_experts(shape.num_weights // 2)  # the most: others are larger
        self._rows = torch.randn(count * max_rows, shape.hidden).bfloat16()
        self._gate, self._up = (
            torch.empty(count * max_rows, shape.width, dtype=torch.bfloat16) for _ in range(2)
        )
        start, part = self.memory.bytes.data_ptr(), self.num_bytes // 3
        self._places = SlotPlaces(start, start + part, start + 2 * part, self.num_bytes)

    def takes(self, num_rows: int) -> bool:
        return num_rows <= self.kernels.max_rows

    def run(self, first: int, count: int, num_rows: int, num_threads: int) -> None:
        slots = np.arange(first, first + count, dtype=np.int64)
        firsts = np.arange(count, dtype=np.int64) * num_rows
        groups = np.stack([slots, firsts, np.full_like(slots, num_rows)], 1)
        self.kernels.gated_mlps(groups, self._places, self._rows, self._gate, self._up, num_threads)


def _bfloat16(shape: Shape) -> _Made:
    weights = torch.randn(shape.num_weights).bfloat16() * 0.02
    kernels = choose_kernels("auto", torch.bfloat16)
    return weights.view(torch.uint8), kernels.several_experts(3 * [plain_format(torch.bfloat16)])


def _quantised(num_bits: int, rounds_rows: bool, shape: Shape) -> _Made:
    """The same with weights in 8 or 4 bits."""
    parts = []
    for num_rows, num_columns in shape.matrices:
        rows = formats()[f"q{num_bits}"].for_rows(num_columns)
        part = np.empty(num_rows * rows.block_bytes[0], np.uint8)
        weights = (torch.randn(num_rows * num_columns) * 0.02).numpy()
        choose_pack("auto")(rows, weights.view(np.uint8), "F32", part, None)
        parts.append(torch.from_numpy(part))
    rounded = frozenset((f"q{num_bits}",) * rounds_rows)
    kernels = choose_kernels("auto", torch.bfloat16, rounded=rounded)
    return torch.cat(parts), kernels.several_experts([rows] * 3)


def _packed(name: str, rounds_rows: bool, shape: Shape) -> _Made:
    """The same with weights in a packed type of GGUF files."""
    stored = formats()[name]
    # Of bytes below 64, because every scale that they make is a number.
    content = torch.randint(64, (stored.num_bytes(shape.num_weights),), dtype=torch.uint8)
    rounded = frozenset((name,) * rounds_rows)
    kernels = choose_kernels("auto", torch.bfloat16, rounded=rounded)
    return content, kernels.several_experts([stored] * 3)


def _sectioned(stored: Sectioned, shape: Shape) -> _Made:
    """The same as checkpoints that other tools rounded are kept."""
    parts = []
    for rows in shape.matrices:
        # Every code is a number, in FP8, too, and so is every scale of two such bytes or four.
        part = torch.randint(127, (stored.matrix_bytes(rows),), dtype=torch.uint8)
        stored.views(part.numpy(), rows)[1][:] = 0x3C
        parts.append(part)
    kernels = choose_kernels("auto", torch.bfloat16)
    return torch.cat(parts), kernels.several_experts([stored] * 3)


class TorchExperts:
    """The same weights by torch's products."""

    def __init__(self, experts: CompiledRing, max_rows: int) -> None:
        self.num_bytes, self.memory = experts.num_bytes, experts.memory
        shape = experts.shape
        self._shape = shape
        self._weights = self.memory.bytes.view(torch.bfloat16).view(-1, 3, shape.num_weights // 3)
        self._x = torch.randn(max_rows, shape.hidden).bfloat16()
        self._gate, self._up = (
            torch.empty(max_rows, shape.width, dtype=torch.bfloat16) for _ in range(2)
        )
        self._out = torch.empty_like(self._x)

    def takes(self, num_rows: int) -> bool:
        return True

    def run(self, first: int, count: int, num_rows: int, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        hidden, width = self._shape
        x, gate, up, out = (each[:num_rows] for each in (self._x, self._gate, self._up, self._out))
        for gate_w, up_w, down_w in self._weights[first : first + count]:
            torch.mm(x, gate_w.view(width, hidden).t(), out=gate)
            torch.mm(x, up_w.view(width, hidden).t(), out=up)
            torch.nn.functional.silu(gate, inplace=True).mul_(up)
            torch.mm(gate, down_w.view(hidden, width).t(), out=out)


FORMATS: Mapping[str, _Make] = {
    "bf16": _bfloat16,
    "q8": partial(_quantised, 8, False),
    "q4": partial(_quantised, 4, False),
    "q8-int8": partial(_quantised, 8, True),
    "q4-int8": partial(_quantised, 4, True),
    **{each.name: partial(_packed, each.name, False) for each in ggml.FORMATS},
    **{f"{each.name}-int8": partial(_packed, each.name, True) for each in ggml.FORMATS},
    "gptq": partial(_sectioned, grouped_ints.FORMATS[4, 128, "F16", True]),
    "ct-int4": partial(_sectioned, grouped_ints.FORMATS[4, 32, "BF16", False]),
    "ct-int8": partial(_sectioned, grouped_ints.FORMATS[8, 128, "BF16", False]),
    "fp8": partial(_sectioned, fp8.FORMATS["F32"].in_memory),
}
"""By name; "-int8": with `activations="int8"`."""

_PACKED = ("Q4_0", "Q8_0", "Q4_K", "Q6_K")
_USUAL = (
    *("bf16", "q8", "q4", "q8-int8", "q4-int8", "gptq", "fp8"),
    *_PACKED,
    *(f"{name}-int8" for name in _PACKED),
)


class Ceiling:
    """Reading a ring of experts, divided among threads."""

    def __init__(self, max_threads: int) -> None:
        library = load_library(Path(__file__).parent / "common" / "reading.cpp")
        self._ways = [library.read_in_turn, library.read_side_by_side]
        for way in self._ways:
            way.argtypes, way.restype = (ctypes.c_void_p, ctypes.c_long), ctypes.c_uint64
        self._pool = ThreadPoolExecutor(max_threads)

    def runs(self, experts: Experts, num_threads: int) -> Iterator[Callable[[int, int], None]]:
        for way in self._ways:
            yield partial(self._read, way, experts, num_threads)

    def _read(
        self,
        way: Callable[[int, int], int],
        experts: Experts,
        num_threads: int,
        first: int,
        count: int,
    ) -> None:
        start = experts.memory.bytes.data_ptr() + first * experts.num_bytes
        share = count * experts.num_bytes // num_threads // _REGION_BYTES * _REGION_BYTES
        works = [partial(way, start + thread * share, share) for thread in range(num_threads)]
        for done in [self._pool.submit(work) for work in works[1:]]:
            done.result()
        works[0]()


def round_experts(num_bytes: int) -> int:
    """Experts of so many bytes that a round goes through."""
    return max(2, _ROUND_BYTES // num_bytes)


@dataclass
class Series:
    """One thing that every round measures."""

    name: str
    num_rows: int
    run: Callable[[int, int], None]
    rates: list[float]  # GB/s of each round


class Ring:
    """Goes through a ring of experts, always on to those that are coldest."""

    def __init__(self, experts: Experts, num_experts: int) -> None:
        self._num_bytes, self._num_experts = experts.num_bytes, num_experts
        self._count = min(round_experts(experts.num_bytes), num_experts)
        self._first = 0

    def rate(self, run: Callable[[int, int], None], clock: Callable[[], float]) -> float:
        """GB/s of weights."""
        if self._first + self._count > self._num_experts:
            self._first = 0
        start_s = clock()
        run(self._first, self._count)
        seconds = clock() - start_s
        self._first += self._count
        return self._count * self._num_bytes / seconds / _GIGA


def main() -> None:
    options = _options()
    settings = {
        "rounds": options.rounds,
        "ring_bytes": options.ring_mib << 20,
        "time": "processor" if options.processor_time else "clock",
    }
    recorder = Recorder("cpu_kernels", settings, options.out)
    ceiling = Ceiling(max(options.threads))
    with torch.inference_mode():
        for shape in options.shapes:
            for name in options.formats:
                _measure(recorder, ceiling, shape, name, options)


def _measure(
    recorder: Recorder, ceiling: Ceiling, shape: str, name: str, options: argparse.Namespace
) -> None:
    num_weights, max_rows = SHAPES[shape].num_weights, max(options.rows)
    num_experts = max(2, (options.ring_mib << 20) // (2 * num_weights))
    experts = CompiledRing(FORMATS[name], SHAPES[shape], num_experts, max_rows)
    # Rates of all are in the format's own bytes, so that their quotients are those of times.
    plain = experts
    if name != "bf16":
        plain = CompiledRing(_bfloat16, SHAPES[shape], num_experts, max_rows)
    beside = TorchExperts(plain, max_rows)
    for num_threads in options.threads:
        reads = list(ceiling.runs(experts, num_threads))
        series = [Series("read", 0, run, []) for run in reads]
        for num_rows in options.rows:
            ways: dict[str, Experts] = {name: experts, "bf16": plain, "torch": beside}
            series += [
                Series(way, num_rows, _of(each, num_rows, num_threads), [])
                for way, each in ways.items()
                if each.takes(num_rows)
            ]
        _go_round(Ring(experts, num_experts), series, num_threads, options)
        _report(recorder, shape, name, num_threads, series)


def _of(experts: Experts, num_rows: int, num_threads: int) -> Callable[[int, int], None]:
    return lambda first, count: experts.run(first, count, num_rows, num_threads)


def _go_round(
    ring: Ring, series: Sequence[Series], num_threads: int, options: argparse.Namespace
) -> None:
    def processor_time() -> float:
        return time.process_time() / num_threads

    clock = processor_time if options.processor_time else time.perf_counter
    for one in series:  # the first warms
        ring.rate(one.run, clock)
    for _ in range(options.rounds):
        for one in series:
            one.rates.append(ring.rate(one.run, clock))


def _report(
    recorder: Recorder, shape: str, name: str, num_threads: int, series: Sequence[Series]
) -> None:
    in_turn, side_by_side = (one.rates for one in series if one.name == "read")
    ceilings = [max(both) for both in zip(in_turn, side_by_side, strict=True)]
    recorder.write(
        "ceiling",
        {
            "shape": shape,
            "num_threads": num_threads,
            "in_turn_GBps": statistics.median(in_turn),
            "side_by_side_GBps": statistics.median(side_by_side),
        },
    )
    for one in series:
        if one.name == "read":
            continue
        shares = [rate / best for rate, best in zip(one.rates, ceilings, strict=True)]
        rate, share = statistics.median(one.rates), statistics.median(shares)
        recorder.write(
            "experts",
            {
                "shape": shape,
                "format": name,
                "kernels": one.name,
                "num_rows": one.num_rows,
                "num_threads": num_threads,
                "GBps": rate,
                "of_ceiling": share,
                "each_GBps": [round(rate, 3) for rate in one.rates],
                "each_of_ceiling": [round(share, 4) for share in shares],
                "GFLOPps": rate * one.num_rows,  # 2 operations for 2 bytes and row
            },
        )
        say(
            f"{shape} {one.name}, {one.num_rows} rows, {num_threads} threads: "
            f"{rate:.1f} GB/s, {100 * share:.0f}% of reading"
        )


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=_USUAL)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ring-mib", type=int, default=1536, help="larger than any cache")
    parser.add_argument("--processor-time", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
