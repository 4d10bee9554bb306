"""Compares the speed of kernels that two compilers made: `python tools/compiler_speed.py`.

The system's compiler and zig, as `make wheel` calls it, compile all parts. Two processes that have
the one's and the other's libraries loaded then take turns at the same product, on one thread, with
weights that fit into the caches: there code weighs most. A product's ratio is the median of the
pairs'; above 1 zig's is the faster one.

    python tools/compiler_speed.py --built SYSTEM ZIG      # copies of the package that have them
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lowtide.kernels import check
from lowtide.kernels.cpu import library
from lowtide.kernels.cpu.compiler import find_compiler, zig_for
from lowtide.kernels.cpu.library import build_kernels, built_folder
from lowtide.kernels.cpu.sources import all_parts
from lowtide.kernels.cpu.variants import INT8_VARIANTS, VARIANTS, num_variants

_INPUTS = 768
_TIMES = 64  # as often a matrix of check.py stands below itself
_ROWS = (1, 8, 32)
_PAIRS = 11
_SECTIONS = 1 << 16
_TURN_S = 0.01


class Product(NamedTuple):
    """Product with weights of a type by some rows, in a variant."""

    kind: str  # plain, packed or rounded
    type: int
    name: str
    variant: int
    num_rows: int

    @property
    def title(self) -> str:
        names = INT8_VARIANTS if self.kind == "rounded" else VARIANTS
        return f"{self.kind} {self.name}, {self.num_rows} rows, {names[self.variant]}"


def main() -> int:
    """Prints the ratio of every product, the least and the median by kind."""
    parser = argparse.ArgumentParser(description="Speed of kernels by compiler.")
    parser.add_argument("--built", nargs=2, type=Path, metavar="PACKAGE")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        _work(options.work)
        return 0
    with tempfile.TemporaryDirectory(prefix="lowtide-compilers-") as name:
        _compare(options.built or _build(Path(name)))
    return 0


def _build(folder: Path) -> list[Path]:
    machine = platform.machine()
    made = {folder / "system": [find_compiler()], folder / "zig": zig_for(machine, "2.28")}
    for package, command in made.items():
        build_kernels(package, command, machine)
    return [*made]


def _compare(packages: list[Path]) -> None:
    workers = [_start(package) for package in packages]
    ratios: dict[str, list[float]] = {}
    for number, product in enumerate(_products(_loaded(packages[0]))):
        pairs = []
        for turn in range(_PAIRS):
            order = workers if turn % 2 else workers[::-1]
            took_s = {id(worker): _asked(worker, number) for worker in order}
            pairs.append(took_s[id(workers[0])] / took_s[id(workers[1])])
        ratio = statistics.median(pairs)
        print(f"{ratio:5.2f}  {product.title}", flush=True)
        ratios.setdefault(product.kind, []).append(ratio)
    for kind, found in ratios.items():
        told = (
            f"least {min(found):.2f}, median {statistics.median(found):.2f}, most {max(found):.2f}"
        )
        print(f"{kind}: {told} of {len(found)} products")
    for worker in workers:
        worker.communicate("")


def _start(package: Path) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--work", str(package)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)


def _asked(worker: subprocess.Popen[str], number: int) -> float:
    print(number, file=worker.stdin, flush=True)
    return float(worker.stdout.readline())


# In a process of its own


def _work(package: Path) -> None:
    kernels = _loaded(package)
    products = list(_products(kernels))
    weights = {matrix.type: matrix.stored.content * _TIMES for matrix in check.matrices(kernels)}
    for line in sys.stdin:
        product = products[int(line)]
        content = weights.get(product.type, b"") if product.kind != "plain" else b""
        print(_time(kernels, product, content), flush=True)


def _loaded(package: Path) -> check.Kernels:
    """Load the libraries of a folder in the place of this package's own."""
    [path] = built_folder(package).glob("*.so")
    built = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    library.loaded.update(dict.fromkeys(all_parts(), built))
    kernels = check.Kernels()
    if kernels.path != str(path):
        raise SystemExit(f"{kernels.path} is loaded, not {path}")
    return kernels


def _products(kernels: check.Kernels) -> Iterator[Product]:
    best, best_int8 = num_variants(kernels.core) - 1, kernels.best_int8()
    exact = [variant for variant in range(1, best + 1)] or [0]
    int8 = sorted({min(1, best_int8), best_int8})
    for variant in exact:
        for num_rows in _rows(kernels.max_rows(variant)):
            yield Product("plain", 0, "BF16", variant, num_rows)
    for matrix in check.matrices(kernels):
        if matrix.type >= _SECTIONS:
            continue
        most = kernels.best_own() if matrix.is_own else best
        for variant in sorted({min(1, most), most}):
            rows = kernels.max_own_rows(variant) if matrix.is_own else kernels.max_rows(variant)
            for num_rows in _rows(rows):
                yield Product("packed", matrix.type, matrix.name, variant, num_rows)
        for variant in int8:
            for num_rows in _ROWS:
                yield Product("rounded", matrix.type, matrix.name, variant, num_rows)


def _rows(most: int) -> list[int]:
    return [each for each in _ROWS if each <= most]


def _time(kernels: check.Kernels, product: Product, content: bytes) -> float:
    """Return the least seconds of one call within a turn."""
    num_outs = 37 * _TIMES
    if product.kind == "plain":
        content = (b"\x83\x3d\x91\xbd\xab\x3d" * (num_outs * _INPUTS // 3 + 1))[
            : 2 * num_outs * _INPUTS
        ]
    weights = ctypes.create_string_buffer(content, len(content))
    x = array("H", [0x3D80, 0xBD91, 0x3DA5] * (product.num_rows * _INPUTS // 3))
    out = array("H", bytes(2 * product.num_rows * num_outs))
    call = getattr(kernels, f"{product.kind}_multiply")
    given = (
        *(product.variant, 1, product.type, x.buffer_info()[0], _INPUTS),
        *(ctypes.addressof(weights), None, out.buffer_info()[0], num_outs),
        *(product.num_rows, num_outs, _INPUTS),
    )
    least_s, start_s = float("inf"), time.perf_counter()
    call(*given)
    while time.perf_counter() - start_s < _TURN_S or least_s == float("inf"):
        begin_s = time.perf_counter()
        call(*given)
        least_s = min(least_s, time.perf_counter() - begin_s)
    return least_s


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
