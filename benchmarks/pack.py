"""How fast a model is packed: source bytes a second of `lowtide pack`, beside what bounds it.

    python benchmarks/pack.py --formats q4 --rounds 3

The model has Qwen3-30B-A3B's layers, as many as fit into `--GiB`, in bfloat16 on the disk that it
is packed onto; nothing of it is in the page cache when a measurement begins. Bounds are a plain
copy of its files, to the disk, and rounding as many bytes that lie in memory, a thread for each
core. Every round measures all of them, one after the other; rates are medians over rounds, and
shares medians of each round's own quotient. A folder is removed as soon as it was measured.

Wanted, on two quiet cores: 1 GB of source a second.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from common.arguments import make_parser, run_script
from common.cut_models import cut_model, weight_bytes
from common.memory import drop_pages
from common.record import Recorder, say

from lowtide.formats import formats
from lowtide.kernels.choice import choose_pack
from lowtide.lab.pack import pack

_GIGA = 1e9
_WANTED_GBPS = 1.0
_COLUMNS = 2048
_PIECE_ROWS = 2048  # as many bytes as a thread of `pack` rounds at a time
_COPY_BYTES = 32 << 20

Rates = dict[str, list[float]]


def main() -> None:
    options = _options()
    model = options.model or cut_model("qwen3_moe", round(options.GiB * (1 << 30)))
    num_bytes = weight_bytes(model)
    settings = {"model": model.name, "bytes": num_bytes, "rounds": options.rounds}
    recorder = Recorder("pack", settings, options.out)
    rates: dict[str, Rates] = {name: {} for name in options.formats}
    for number in range(options.rounds + 1):
        for name, found in rates.items():
            measured = _round(model, name, num_bytes)
            if number:  # the first leaves kernels compiled and pages touched
                for what, rate in measured.items():
                    found.setdefault(what, []).append(rate)
    for name, found in rates.items():
        values = _values(found)
        recorder.write(name, {**values, "wanted_GBps": _WANTED_GBPS})
        say(
            f"{name}: {values['pack_GBps']:.2f} GB/s of source, {values['share_of_copy']:.0%} of a "
            f"copy's, {values['share_of_rounding']:.0%} of rounding's in memory (wanted: "
            f"{_WANTED_GBPS:g} GB/s)"
        )


def _round(model: Path, name: str, num_bytes: int) -> dict[str, float]:
    """GB/s of source, each measured once; and the cores that packing kept busy."""
    with tempfile.TemporaryDirectory(dir=model.parent, prefix="pack-") as folder:
        start_s = time.process_time()
        pack_s = _time_s(model, lambda: pack(model, Path(folder) / "packed", format=name))
        busy_s = time.process_time() - start_s
        shutil.rmtree(Path(folder) / "packed")
        copy_s = _time_s(model, lambda: _copy(model, Path(folder)))
    return {
        "pack_GBps": num_bytes / pack_s / _GIGA,
        "cores_busy": busy_s / pack_s,
        "copy_GBps": num_bytes / copy_s / _GIGA,
        "rounding_GBps": _rounding_GBps(name, num_bytes),
    }


def _values(found: Rates) -> dict[str, float]:
    shares = {
        f"share_of_{bound}": statistics.median(
            pack / other for pack, other in zip(found["pack_GBps"], found[what], strict=True)
        )
        for bound, what in (("copy", "copy_GBps"), ("rounding", "rounding_GBps"))
    }
    return {what: statistics.median(all_rates) for what, all_rates in found.items()} | shares


def _time_s(model: Path, work: Callable[[], object]) -> float:
    drop_pages([model])
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def _copy(model: Path, folder: Path) -> None:
    """The model's shards, on the disk when this returns, their pages given back as they are
    written: what keeps them would end up waiting for pages."""
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb", buffering=0) as source, (folder / path.name).open("wb", 0) as target:
            done = 0
            while content := source.read(_COPY_BYTES):
                target.write(content)
                os.fdatasync(target.fileno())
                for file in (source, target):
                    os.posix_fadvise(file.fileno(), done, len(content), os.POSIX_FADV_DONTNEED)
                done += len(content)


def _rounding_GBps(name: str, num_bytes: int) -> float:
    """Of weights that lie in memory, with a thread for each core."""
    rows, kernel = formats()[name].for_rows(_COLUMNS), choose_pack("auto")
    weights = np.random.default_rng(0).normal(0, 0.02, (_PIECE_ROWS, _COLUMNS)).astype(np.float32)
    source = (weights.view(np.uint32) >> 16).astype(np.uint16).reshape(-1).view(np.uint8)
    num_threads = min(8, os.cpu_count() or 1)
    targets = [np.empty(rows.num_bytes(weights.size), np.uint8) for _ in range(num_threads)]
    num_pieces = max(num_threads, num_bytes // len(source))

    def work(thread: int) -> None:
        for _ in range(thread, num_pieces, num_threads):
            kernel(rows, source, "BF16", targets[thread], None)

    with ThreadPoolExecutor(num_threads) as pool:
        start_s = time.perf_counter()
        list(pool.map(work, range(num_threads)))
        return num_pieces * len(source) / (time.perf_counter() - start_s) / _GIGA


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--model", type=Path, help="folder of bfloat16 weights (a synthetic one)")
    parser.add_argument("--GiB", type=float, default=4.0, help="of the synthetic model, at most")
    parser.add_argument("--formats", nargs="+", choices=("q8", "q4"), default=["q4", "q8"])
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each")
    return parser.parse_args()


if __name__ == "__main__":
    run_script(main)
