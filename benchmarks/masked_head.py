"""The head of a masked pass: what its rows' arg-max and confidence take, fused and materialised.

Three ways to the same answer: `fused`, tiles of logits that are reduced where they were computed;
`materialised`, the logits of the masked rows first, as the paper has it; and `all`, those of every
token, then a float32 softmax, as published decoders do. The ceiling is the product of the masked
rows alone, at once, into memory that is there already; its bits depend on the number of rows.
Peaks are what the process grew by, each measured in a run of its own.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import torch
from common.arguments import run_script
from common.ceilings import memory_ceiling
from common.memory import peak_resident_bytes, reset_peak
from common.record import Recorder, say
from torch import Tensor

from lowtide.compute import Compute
from lowtide.hardware.memory import resident_bytes
from lowtide.kernels.reference import REFERENCE
from lowtide.kernels.row_statistics import Form, Wanted
from lowtide.layers.head import LogitsHead
from lowtide.layers.linear import Linear
from lowtide.memory.arena import Arena
from lowtide.memory.workspace import Registrar, Workspace
from lowtide.threads.executor import HostExecutor, InlineExecutor

_VOCABS = {"LLaDA-8B": 126_464, "Qwen3": 151_936}
_NUM_WORK_THREADS = 8
_MIB = 1 << 20


class MaskedHead:
    """A head of random weights, and the hidden states of one pass."""

    def __init__(self, vocab: int, num_tokens: int, hidden: int, executor: HostExecutor) -> None:
        self._weight = _random_weight(vocab, hidden)
        self._norm = torch.ones(hidden, dtype=torch.bfloat16)
        self._hidden = torch.randn(num_tokens, hidden).bfloat16()
        self._executor = executor

    def plan_bytes(self, num_rows: int, form: Form) -> int:
        """What the workspace must hold."""
        registrar = Registrar()
        compute = Compute(InlineExecutor(), REFERENCE, registrar, torch.device("meta"))
        head = LogitsHead(self._norm.to("meta"), 1e-6, self._weight.to("meta"), compute)
        rows = torch.empty(num_rows, dtype=torch.int64, device="meta")
        head.statistics(self._hidden.to("meta"), rows, Wanted(), None, form)
        return registrar.arena_bytes

    def statistics(self, num_rows: int, form: Form) -> Callable[[], Tensor]:
        """A run in a workspace of its own."""
        workspace = Workspace(Arena(self.plan_bytes(num_rows, form)).bytes)
        compute = Compute(self._executor, REFERENCE, workspace)
        head = LogitsHead(self._norm, 1e-6, self._weight, compute)
        rows = torch.arange(num_rows) * (len(self._hidden) // num_rows)

        def run() -> Tensor:
            workspace.reset()
            return head.statistics(self._hidden, rows, Wanted(), None, form).best

        return run

    def all_rows(self, num_rows: int) -> Callable[[], Tensor]:
        """As published, in memory that torch allocates."""
        rows = torch.arange(num_rows) * (len(self._hidden) // num_rows)
        product = Linear(self._weight, Compute(self._executor, REFERENCE, Registrar()))

        def run() -> Tensor:
            logits = torch.empty(len(self._hidden), len(self._weight), dtype=torch.bfloat16)
            product.forward(self._hidden, logits)
            probability = torch.softmax(logits.float(), dim=-1)
            best = logits.argmax(dim=-1, keepdim=True)
            probability.gather(-1, best)
            return best[rows]

        return run

    def product(self, num_rows: int) -> Callable[[], Tensor]:
        """The ceiling."""
        product = Linear(self._weight, Compute(self._executor, REFERENCE, Registrar()))
        logits = torch.zeros(num_rows, len(self._weight), dtype=torch.bfloat16)

        def run() -> Tensor:
            product.forward(self._hidden[:num_rows], logits)
            return logits

        return run


def main() -> None:
    options = _options()
    settings = {
        "dtype": "bfloat16",
        "num_tokens": options.tokens,
        "hidden_size": options.hidden,
        "repeats": options.repeats,
    }
    recorder = Recorder("masked_head", settings, options.out)
    recorder.write("ceiling", memory_ceiling())
    executor = HostExecutor(_NUM_WORK_THREADS)
    with closing(executor), executor.in_charge(), torch.inference_mode():
        for name, vocab in _VOCABS.items():
            head = MaskedHead(vocab, options.tokens, options.hidden, executor)
            for num_rows in options.rows:
                _measure(recorder, name, head, vocab, num_rows, options.repeats)


def _measure(
    recorder: Recorder, name: str, head: MaskedHead, vocab: int, num_rows: int, repeats: int
) -> None:
    makers = {
        "fused": partial(head.statistics, num_rows, Form.FUSED),
        "materialised": partial(head.statistics, num_rows, Form.MATERIALISED),
        "all": partial(head.all_rows, num_rows),
    }
    peak_bytes = {way: _peak_bytes(make) for way, make in makers.items()}
    runs = {way: make() for way, make in makers.items()}
    runs["product"] = head.product(num_rows)
    rounds = [{way: _seconds(run) for way, run in runs.items()} for _ in range(1 + repeats)]
    # The first warms.
    times_s = {way: statistics.median(round_s[way] for round_s in rounds[1:]) for way in runs}
    fused_s = times_s["fused"]
    values = {
        "model": name,
        "vocab": vocab,
        "num_rows": num_rows,
        **{f"{way}_ms": 1e3 * seconds for way, seconds in times_s.items()},
        "over_materialised": fused_s / times_s["materialised"],
        "over_all": fused_s / times_s["all"],
        "over_product": fused_s / times_s["product"],
        **{f"{way}_peak_bytes": num_bytes for way, num_bytes in peak_bytes.items()},
        "fused_plan_bytes": head.plan_bytes(num_rows, Form.FUSED),
        "materialised_plan_bytes": head.plan_bytes(num_rows, Form.MATERIALISED),
    }
    recorder.write("masked head", values)
    say(
        f"{name}, {num_rows} rows: fused {1e3 * fused_s:.0f} ms, "
        f"{values['over_materialised']:.2f}x materialised, {values['over_all']:.2f}x all, "
        f"{values['over_product']:.2f}x the product; "
        + ", ".join(f"{way} {size / _MIB:.0f} MiB" for way, size in peak_bytes.items())
    )


def _peak_bytes(make: Callable[[], Callable[[], Tensor]]) -> int:
    """What the process grows by in the second of two runs, all memory but the first's included."""
    make()()  # what libraries keep
    before = resident_bytes()
    reset_peak()
    make()()
    return max(0, peak_resident_bytes() - before)


def _seconds(run: Callable[[], Tensor]) -> float:
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


def _random_weight(vocab: int, hidden: int) -> Tensor:
    """Random rows, again and again: drawing all would take as long as the measurement."""
    part = torch.randn(1 << 12, hidden).mul_(hidden**-0.5).bfloat16()
    return part.repeat(-(-vocab // len(part)), 1)[:vocab]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=256, help="tokens of the pass (256)")
    parser.add_argument("--hidden", type=int, default=1024, help="width of hidden states (1024)")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[16, 128], help="masked rows (16 128)"
    )
    parser.add_argument("--repeats", type=int, default=None, help="runs of each, in turn (3)")
    parser.add_argument("--out", type=Path, help="append the JSON lines to this file too")
    parser.add_argument("--quick", action="store_true", help="one repeat: a look, not a result")
    options = parser.parse_args()
    if options.repeats is None:
        options.repeats = 1 if options.quick else 3
    return options


if __name__ == "__main__":
    run_script(main)
